"""The pictures of the report, as SVG: curves with the band over seeds, and held-out reward with its intervals."""

import io
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from reporting.events import TRAINING, Variant
from reporting.measures import DIVERSITY, GRADIENT_NORM, HELDOUT, KL, Row, band

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f3c8d", "#555555")
"""Told apart by colour-blind readers too (Okabe and Ito, https://jfly.uni-koeln.de/color/)."""
DASHES: tuple[Any, ...] = ("solid", (0, (5, 2)), (0, (1, 1.5)))
SMOOTHED = 10

STYLE: dict[Any, Any] = {
    "font.size": 13,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "svg.hashsalt": "margrpo",  # the same runs give the same bytes
}


class Chart(NamedTuple):
    """A curve of all variants; `look_for` is the sentence under it."""

    curve: str
    title: str
    unit: str
    look_for: str
    window: int = 1
    scale: str = "linear"


CHARTS = (
    Chart(
        HELDOUT,
        "Held-out reward",
        "mean reward of held-out prompts",
        "Look for a curve that rises and stays up: one that falls from its peak collapses, and one that never leaves "
        "the band of the others has bought nothing.",
    ),
    Chart(
        TRAINING,
        "Training reward",
        f"reward, mean of last {SMOOTHED} rollouts",
        "Look for a rise that the held-out reward shares; if only this one rises, the policy learns prompts by heart.",
        window=SMOOTHED,
    ),
    Chart(
        KL,
        "KL divergence from the reference",
        "nats per image (logarithmic)",
        "Look for a curve that flattens: a policy that moves ever faster without a higher reward is drifting.",
        scale="log",
    ),
    Chart(
        GRADIENT_NORM,
        "Gradient norm before clipping",
        "L2 norm (logarithmic)",
        "Look for a level, narrow curve: peaks far above it are the spikes of the table, and a steady rise announces "
        "a collapse.",
        scale="log",
    ),
    Chart(
        DIVERSITY,
        "Diversity within a group",
        f"RMS pixel distance, last {SMOOTHED} rollouts",
        "Look for a curve that keeps its height: one that sinks shows a policy that draws the same image over and "
        "over (0 is equal images, 1 is black against white).",
        window=SMOOTHED,
    ),
)


def colour(index: int) -> str:
    """Return the colour of the variant at this place."""
    return COLOURS[index % len(COLOURS)]


def draw_curves(chart: Chart, variants: Sequence[Variant]) -> str | None:
    """Draw a curve of all variants: mean over seeds, and the band from the lowest seed to the highest.

    Returns:
        SVG; None when no run has the curve.
    """
    bands = [(variant, found) for variant in variants if (found := band(variant.runs, chart.curve, chart.window))]
    if not bands:
        return None

    def draw(axes: Axes) -> None:
        for variant, (steps, (lowest, mean, highest)) in bands:
            dashes = DASHES[variant.place // len(COLOURS) % len(DASHES)]
            marker = "o" if len(steps) <= 2 * SMOOTHED else None
            axes.plot(steps, mean, color=colour(variant.place), linestyle=dashes, linewidth=1.8, marker=marker, ms=4)
            if len(variant.runs) > 1:
                axes.fill_between(steps, lowest, highest, color=colour(variant.place), alpha=0.15, linewidth=0)
        axes.set(xlabel="rollouts", ylabel=chart.unit, title=chart.title, yscale=chart.scale)

    return _svg(draw, height=4.2)


def draw_heldout(rows: Sequence[Row]) -> str | None:
    """Draw final (full) and peak (hollow) held-out reward of every variant with their intervals.

    Returns:
        SVG; None when no run has a held-out reward.
    """
    shown = [row for row in rows if row.estimates["peak"]]
    if not shown:
        return None

    def draw(axes: Axes) -> None:
        for place, row in enumerate(shown):
            for key, offset, fill in (("final", 0.14, True), ("peak", -0.14, False)):
                value = row.estimates[key]
                if value is None:
                    continue
                shade = colour(row.variant.place)
                if value.low is not None and value.high is not None:
                    axes.plot([value.low, value.high], [place + offset] * 2, color=shade, linewidth=2)
                face = shade if fill else "white"
                axes.plot(value.mean, place + offset, "o", color=shade, markerfacecolor=face, markersize=9)
        before = [row.estimates["before"].mean for row in shown if row.estimates["before"]]
        if before:
            axes.axvline(sum(before) / len(before), color="#555555", linestyle=(0, (2, 2)), linewidth=1.2)
        axes.set_yticks(range(len(shown)), [row.variant.name for row in shown])
        axes.set_ylim(len(shown) - 0.5, -0.5)
        axes.set(xlabel="mean reward of held-out prompts", title="Held-out reward: final ●, peak ○")

    return _svg(draw, height=1.6 + 0.55 * len(shown))


def _svg(draw: Callable[[Axes], None], height: float) -> str:
    buffer = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, height), layout="constrained")
        draw(figure.subplots())
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
