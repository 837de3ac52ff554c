"""Lays out the report: one HTML page without outside resources, and its tables as Markdown and CSV."""

import base64
import csv
import io
from collections.abc import Sequence
from html import escape

from reporting.events import Grid, Run, Variant
from reporting.measures import HELDOUT, Estimate, Measure, Row, columns
from reporting.pictures import CHARTS, colour, draw_curves, draw_heldout

MISSING = "–"

STYLE = """
:root { color-scheme: light; font: 16px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff }
body { margin: 0 auto; max-width: 1360px; padding: 0 16px 48px }
h1 { margin: 24px 0 4px; font-size: 1.7rem } h2 { margin: 40px 0 8px; font-size: 1.25rem } h3 { margin: 20px 0 4px }
p, figcaption, li { max-width: 75ch } figcaption, .interval { color: #555; font-size: .9rem }
.legend { position: sticky; top: 0; z-index: 1; display: flex; flex-wrap: wrap; gap: 2px 16px; padding: 8px 0;
  margin: 0; background: #fff; border-bottom: 1px solid #ddd; list-style: none }
.chip { display: inline-block; width: 18px; height: 0; border-top: 4px solid; margin-right: 6px;
  vertical-align: middle }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 560px), 1fr)); gap: 16px 32px }
figure { margin: 16px 0 0; max-width: 760px } figure > img { width: 100%; height: auto; display: block }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: 6px 14px 6px 0; text-align: right; vertical-align: top; border-bottom: 1px solid #e4e4e4 }
th { font-weight: 600 } thead th { vertical-align: bottom; max-width: 11em }
th:first-child { position: sticky; left: 0; text-align: left; background: #fff }
td .interval { display: block; white-space: nowrap } dl { margin: 8px 0 } dt { font-weight: 600; font-size: .9rem }
dd { margin: 0 0 4px; color: #555; font-size: .9rem }
.samples { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 300px), 1fr)); gap: 16px 24px;
  align-items: end }
@media (max-width: 700px) {
  .scroll { font-size: .85rem } .scroll::before { content: "scroll sideways for more columns →"; color: #555 }
  th, td { padding-right: 9px } th:first-child { max-width: 7.5em }
}
"""


def write_page(title: str, variants: Sequence[Variant], rows: Sequence[Row]) -> str:
    """Return the page."""
    overview = _figure(
        draw_heldout(rows),
        "Final and peak held-out reward",
        "Look for intervals that do not overlap, and for a final reward far below its peak; the dotted line is the "
        "reward before training.",
        HELDOUT,
    )
    legend = "".join(f"<li>{_chip(v.place)}{escape(v.name)}</li>" for v in variants)
    curves = "".join(
        _figure(draw_curves(chart, variants), f"{chart.title} over rollouts", chart.look_for, chart.curve)
        for chart in CHARTS
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{STYLE}</style></head><body>
<h1>{escape(title)}</h1>
{"".join(f"<p>{escape(remark)}</p>" for remark in remarks(variants))}
<ul class="legend">{legend}</ul>
<h2>Which variant ends higher?</h2>
{overview}
<h2>Tables</h2>
{"".join(_table(name, measures, rows) for name, measures in columns(rows).items())}
<h2>Curves</h2>
<p>A line is the mean over seeds; the band reaches from the lowest seed to the highest.</p>
<div class="pair">{curves}</div>
<h2>Samples</h2>
{_samples(variants)}
</body></html>
"""


def remarks(variants: Sequence[Variant]) -> list[str]:
    """Say what a reader has to know before comparing anything."""
    counts = sorted({len(variant.runs) for variant in variants})
    runs = sum(len(variant.runs) for variant in variants)
    said = [f"{runs} runs of {len(variants)} variants. A missing metric is shown as {MISSING}."]
    if counts[0] == 1:
        which = "Every variant has" if counts[-1] == 1 else "Some variants have"
        said.append(
            f"{which} one seed, and therefore no interval: nothing tells a difference of such a variant from luck."
        )
    if counts[-1] > 1:
        said.append(
            "In brackets: 95% bootstrap intervals of the mean over seeds. With two or three seeds such an interval "
            "only reaches from the lowest seed to the highest, which covers the true mean in about half or three "
            "quarters of all cases."
        )
    lengths = {run.rollouts for variant in variants for run in variant.runs}
    if len(lengths) > 1:
        shorter = [_label(v, run) for v in variants for run in v.runs if run.rollouts < max(lengths)]
        said.append(f"Runs with fewer than {max(lengths)} rollouts: " + ", ".join(shorter) + ".")
    return said


def write_markdown(rows: Sequence[Row]) -> str:
    """Return the tables as Markdown."""
    parts = []
    for name, measures in columns(rows).items():
        lines = [["variant", "seeds", *(measure.title for measure in measures)]]
        for row in rows:
            cells = [" ".join(filter(None, _cell(row.estimates[m.key], m, row.variant))) for m in measures]
            lines.append([row.variant.name, str(len(row.variant.runs)), *cells])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        lines.insert(1, ["-" * width for width in widths])
        table = ["| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines]
        parts.append(f"**{name}**\n\n" + "\n".join(table) + "\n")
    return "\n".join(parts)


def write_csv(rows: Sequence[Row]) -> str:
    """Return all measures as CSV: mean, ends of the interval, and seeds that have it; empty where missing."""
    keys = [measure.key for measures in columns(rows).values() for measure in measures]
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["variant", "seeds", *(f"{key}{end}" for key in keys for end in ("", "_low", "_high", "_seeds"))])
    for row in rows:
        estimates = [row.estimates[key] or (None, None, None, 0) for key in keys]
        writer.writerow([row.variant.name, len(row.variant.runs), *(value for e in estimates for value in e)])
    return buffer.getvalue()


def _cell(value: Estimate | None, measure: Measure, variant: Variant) -> tuple[str, str]:
    if value is None:
        return MISSING, ""
    digits = measure.digits
    details = "" if value.low is None else f"[{value.low:.{digits}f}, {value.high:.{digits}f}]"
    if value.seeds < len(variant.runs):
        details += f" ({value.seeds} of {len(variant.runs)} seeds)"
    return f"{value.mean:.{digits}f}", details.strip()


def _table(name: str, measures: Sequence[Measure], rows: Sequence[Row]) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in ("variant", "seeds", *(m.title for m in measures)))
    body = ""
    for row in rows:
        cells = [_cell(row.estimates[measure.key], measure, row.variant) for measure in measures]
        body += f"<tr><th>{_chip(row.variant.place)}{escape(row.variant.name)}</th><td>{len(row.variant.runs)}</td>"
        body += (
            "".join(f'<td>{value}<span class="interval">{details}</span></td>' for value, details in cells) + "</tr>"
        )
    meanings = "".join(f"<dt>{escape(m.title)}</dt><dd>{escape(m.meaning)}</dd>" for m in measures)
    return (
        f'<h3>{name}</h3><div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        f"<details><summary>What the columns say</summary><dl>{meanings}</dl></details>"
    )


def _figure(svg: str | None, alternative: str, look_for: str, curve: str) -> str:
    if svg is None:
        return f"<figure><p>No run logged <code>{curve}</code>.</p></figure>"
    source = base64.b64encode(svg.encode()).decode()
    return (
        f'<figure><img alt="{escape(alternative)}" src="data:image/svg+xml;base64,{source}">'
        f"<figcaption>{escape(look_for)}</figcaption></figure>"
    )


def _samples(variants: Sequence[Variant]) -> str:
    with_grids = [(variant, [run for run in variant.runs if run.grids]) for variant in variants]
    seeds = [{run.seed for run in runs} for _, runs in with_grids if runs]
    if not seeds:
        return "<p>No run logged <code>samples/heldout</code>.</p>"
    shared = sorted(seed for seed in set.intersection(*seeds) if seed is not None)
    chosen = [
        (variant, next((run for run in runs if shared and run.seed == shared[0]), runs[0]))
        for variant, runs in with_grids
        if runs
    ]
    without = [variant.name for variant, runs in with_grids if not runs]
    noise = (
        "All grids show the same prompts and the same noise" if shared else "Runs of one seed share prompts and noise"
    )
    return (
        f"<p>{noise}: look for colours and shapes that the prompt under an image asks for and that only some variants "
        "get right, and for images that all look alike.</p>"
        + (f"<p>Without samples: {escape(', '.join(without))}.</p>" if without else "")
        + _grids("First", [(variant, run, run.grids[0]) for variant, run in chosen])
        + _grids("Last", [(variant, run, run.grids[1]) for variant, run in chosen if len(run.grids) > 1])
    )


def _grids(title: str, grids: Sequence[tuple[Variant, Run, Grid]]) -> str:
    names: dict[Grid, list[str]] = {}
    for variant, run, grid in grids:
        names.setdefault(grid, []).append(_chip(variant.place) + escape(_label(variant, run)))
    figures = "".join(
        f"<figure>{'<br>'.join(of)}<br>after {grid.step} updates"
        f'<img alt="Held-out samples after {grid.step} updates" '
        f'src="data:image/png;base64,{base64.b64encode(grid.png).decode()}"></figure>'
        for grid, of in names.items()
    )
    return f'<h3>{title}</h3><div class="samples">{figures}</div>' if figures else ""


def _label(variant: Variant, run: Run) -> str:
    return variant.name if run.seed is None else f"{variant.name}, seed {run.seed}"


def _chip(index: int) -> str:
    return f'<span class="chip" style="border-color: {colour(index)}"></span>'
