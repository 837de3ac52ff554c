"""The report says what the event files say, and nothing where they say nothing."""

import csv
import io
import json
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from torch.utils.tensorboard import SummaryWriter

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))
import report
from reporting.events import Curve, Run, Variant, group_variants, read_runs
from reporting.measures import GROUPS, band, estimate, growth, spikes, summarise, variation
from reporting.page import MISSING, remarks, write_csv, write_markdown
from reporting.pictures import CHARTS, colour

REWARD = {0: 0.2, 4: 0.5, 9: 0.4}


def write_run(directory, curves, grids=(), sweep=None):
    """Write event files: curves are {name: {step: value}}."""
    directory.mkdir(parents=True, exist_ok=True)
    with SummaryWriter(str(directory)) as writer:
        for name, points in curves.items():
            for step, value in points.items():
                writer.add_scalar(name, value, step)
        for step in grids:
            writer.add_image("samples/heldout", np.full((8, 8, 3), step, np.uint8), step, dataformats="HWC")
    if sweep:
        (directory / "sweep.json").write_text(json.dumps(sweep))


def write_sweep(folder, seeds=3, rollouts=30):
    """Write three variants with every curve, the middle one without KL divergence and one seed short of diversity."""
    rng = np.random.default_rng(0)
    for order, variant in enumerate(("zeta", "grpo", "alpha")):
        for seed in range(seeds):
            noise = dict(enumerate(rng.uniform(0.9, 1.1, rollouts).tolist()))
            last = rollouts - 1
            curves = {
                "reward/heldout": {0: 0.2, last // 2: 0.3 + seed / 100, last: 0.25 + order / 10 + seed / 100},
                "reward/train": noise,
                "stability/gradient_norm": noise,
                "time/rollout": noise,
                "time/reward": noise,
                "time/update": noise,
                "stability/kl_image_nats": {step: step * (order + 1) / 10 for step in noise},
                "rollout/diversity": noise,
            }
            if variant == "grpo":
                del curves["stability/kl_image_nats"]
                if seed == 1:
                    del curves["rollout/diversity"]
            said = {"sweep": "components", "variant": variant, "seed": seed, "overrides": {}, "order": order}
            write_run(folder / variant / f"seed{seed}", curves, grids=(0, 10, 20), sweep=said)
    return folder


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    return write_sweep(tmp_path_factory.mktemp("runs") / "components")


@pytest.fixture(scope="module")
def page(sweep, tmp_path_factory):
    output = tmp_path_factory.mktemp("report")
    report.main([str(sweep), "--output", str(output)])
    return (output / "index.html").read_text(encoding="utf-8")


def run_with(**curves):
    """Build a run from {name: values} with one value per rollout; `/` is written `__`."""
    return Run(
        Path("x"),
        "x",
        curves={name.replace("__", "/"): Curve(np.arange(len(v)), np.array(v, float)) for name, v in curves.items()},
    )


def test_curves_and_the_first_and_last_grid_are_read_back(tmp_path):
    later = {"final/heldout_reward": {300: 0.4}}
    write_run(tmp_path / "a", {"reward/heldout": REWARD, "reward/train": {0: 0.2, 9: 0.3}, **later}, grids=(0, 5, 10))
    (run,) = read_runs([tmp_path])
    steps, values = run.curves["reward/heldout"]
    assert dict(zip(steps.tolist(), values.tolist(), strict=True)) == pytest.approx(REWARD)
    assert [grid.step for grid in run.grids] == [0, 10]
    assert run.grids[0].png.startswith(b"\x89PNG")
    assert run.rollouts == 10


def test_more_values_than_tensorboard_keeps_by_default_are_all_read(tmp_path):
    write_run(tmp_path / "a", {"reward/train": dict.fromkeys(range(10_050), 0.5)})
    assert len(read_runs([tmp_path])[0].curves["reward/train"].steps) == 10_050


def test_a_step_that_a_resumed_run_logged_again_counts_once_with_its_last_value(tmp_path):
    write_run(tmp_path / "a", {"reward/train": {0: 0.1, 1: 0.2, 2: 9.0}})
    time.sleep(1.1)  # event files are read in the order of the second in their names
    write_run(tmp_path / "a", {"reward/train": {2: 0.3, 3: 0.4}})
    (run,) = read_runs([tmp_path])
    assert run.curves["reward/train"].steps.tolist() == [0, 1, 2, 3]
    assert run.curves["reward/train"].values == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_a_file_cut_off_by_a_kill_is_read_up_to_there(tmp_path):
    write_run(tmp_path / "a", {"reward/train": dict(enumerate([0.1, 0.2, 0.3]))})
    (file,) = (tmp_path / "a").iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    assert read_runs([tmp_path])[0].curves["reward/train"].values == pytest.approx([0.1, 0.2])


def test_values_that_are_not_finite_are_left_out(tmp_path):
    write_run(tmp_path / "a", {"reward/train": {0: np.nan, 1: 0.5}, "stability/kl_image_nats": {0: np.inf}})
    (run,) = read_runs([tmp_path])
    assert run.curves["reward/train"].steps.tolist() == [1]
    assert "stability/kl_image_nats" not in run.curves


def test_variants_come_in_the_order_of_the_sweep_file_with_their_seeds(sweep):
    variants = group_variants(read_runs([sweep]))
    assert [(v.place, v.name, [run.seed for run in v.runs]) for v in variants] == [
        (0, "zeta", [0, 1, 2]),
        (1, "grpo", [0, 1, 2]),
        (2, "alpha", [0, 1, 2]),
    ]


def test_variants_of_two_sweeps_are_kept_apart_by_the_name_of_the_sweep(tmp_path):
    for sweep in ("one", "two"):
        said = {"sweep": sweep, "variant": "base", "seed": 0, "overrides": {}}
        write_run(tmp_path / sweep / "base" / "seed0", {"reward/heldout": REWARD}, sweep=said)
    assert [v.name for v in group_variants(read_runs([tmp_path]))] == ["one/base", "two/base"]


def test_without_a_sweep_the_name_is_the_part_of_the_path_that_runs_do_not_share(tmp_path):
    for name in ("nova/version_0", "nova/version_1", "other/version_0"):
        write_run(tmp_path / name, {"reward/heldout": REWARD})
    names = ["nova/version_0", "nova/version_1", "other/version_0"]
    assert [v.name for v in group_variants(read_runs([tmp_path]))] == names
    assert [v.name for v in group_variants(read_runs([tmp_path / "nova"]))] == ["version_0", "version_1"]
    assert [v.name for v in group_variants(read_runs([tmp_path / names[0], tmp_path / names[0]]))] == ["version_0"]


def test_a_run_that_died_before_its_first_event_is_shown_as_missing(tmp_path):
    write_run(tmp_path / "a" / "seed0", {"reward/heldout": REWARD}, sweep={"sweep": "s", "variant": "a", "seed": 0})
    dead = tmp_path / "b" / "seed0"
    dead.mkdir(parents=True)
    (dead / "sweep.json").write_text(json.dumps({"sweep": "s", "variant": "b", "seed": 0}))
    rows = summarise(group_variants(read_runs([tmp_path])))
    assert [row.variant.name for row in rows] == ["a", "b"]
    assert set(rows[1].estimates.values()) == {None}


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "is not a directory"), ({}, r"lacks sweep, variant, seed"), ("empty", r"neither event files .* nor sweep")],
)
def test_what_cannot_be_read_is_named(tmp_path, content, message, capsys):
    folder = tmp_path / "runs"
    if content is not None:
        folder.mkdir()
    if content == {}:
        (folder / "sweep.json").write_text("{}")
    with pytest.raises(SystemExit):
        report.main([str(folder)])
    assert re.search(rf"runs.*{message}", capsys.readouterr().err)


def test_the_interval_is_the_bootstrap_of_the_mean_over_seeds():
    values = [0.1, 0.4, 0.2, 0.8, 0.3]
    rng = np.random.default_rng(5)
    means = sorted(np.mean(rng.choice(values, 5)) for _ in range(20_000))
    found = estimate([*values, None])
    assert found.mean == pytest.approx(0.36)
    assert found.seeds == 5
    assert (found.low, found.high) == pytest.approx((means[500], means[19_500]), abs=0.02)


def test_the_interval_of_three_seeds_reaches_from_the_lowest_to_the_highest():
    assert estimate([0.3, 0.1, 0.2])[1:3] == pytest.approx((0.1, 0.3))


def test_one_seed_has_no_interval_and_none_has_no_estimate():
    assert estimate([0.3, None]) == (0.3, None, None, 1)
    assert estimate([None, None]) is None
    assert estimate([]) is None


def test_spikes_are_counted_against_the_running_median():
    values = np.ones(60)
    values[[2, 30, 45]] = 10.0
    values[50] = 4.9
    assert spikes(values) == 2
    assert spikes(np.concatenate([np.full(30, 1.0), np.full(30, 10.0)])) == 10, "a new level is no spike for ever"
    assert spikes(np.ones(3)) == 0


def test_variation_and_growth():
    assert variation(np.array([1.0, 3.0])) == pytest.approx(np.sqrt(2) / 2)
    assert variation(np.array([1.0])) is None
    assert growth(run_with(stability__kl_image_nats=[0.0, 0.5, 1.0, 1.5])) == pytest.approx(50)
    assert growth(run_with(stability__kl_image_nats=[0.0])) is None


def test_the_measures_of_a_run(tmp_path):
    write_run(
        tmp_path / "a",
        {
            "reward/heldout": REWARD,
            "reward/train": {0: 0.2, 9: 0.3},
            "time/update": {0: 9.0, 1: 2.0, 2: 2.0},
            "rollout/diversity": {0: 0.4, 1: 0.2},
        },
    )
    (row,) = summarise(group_variants(read_runs([tmp_path])))
    known = {key: round(value.mean, 6) for key, value in row.estimates.items() if value}
    assert known == {
        "before": 0.2,
        "final": 0.4,
        "gain": 0.2,
        "peak": 0.5,
        "collapse": 0.1,
        "seconds_update": 2.0,
        "diversity_start": 0.3,
        "diversity_end": 0.3,
        "rollouts": 10,
    }


def test_a_run_that_was_validated_only_before_training_has_no_final_reward(tmp_path):
    write_run(tmp_path / "a", {"reward/heldout": {0: 0.2}, "reward/train": {0: 0.2, 1: 0.2}})
    (row,) = summarise(group_variants(read_runs([tmp_path])))
    assert row.estimates["before"] is not None
    assert {row.estimates[key] for key in ("final", "gain", "peak", "collapse")} == {None}


def test_differences_from_the_first_variant_are_paired_by_seed(sweep):
    rows = summarise(group_variants(read_runs([sweep])))
    assert [row.estimates["versus_first"] and round(row.estimates["versus_first"].mean, 6) for row in rows] == [
        None,
        0.1,
        0.2,
    ]
    assert rows[1].estimates["versus_first"][1:3] == pytest.approx((0.1, 0.1)), "what the seeds share drops out"


def test_what_is_missing_is_never_a_number(sweep):
    rows = summarise(group_variants(read_runs([sweep])))
    table = list(csv.DictReader(io.StringIO(write_csv(rows))))
    assert [line["kl_growth"] for line in table][1] == ""
    assert [line["kl_growth_seeds"] for line in table] == ["3", "0", "3"]
    assert {line["peak_memory_gib"] for line in table} == {""}
    assert float(table[0]["kl_growth"]) == pytest.approx(10)
    markdown = write_markdown(rows)
    lines = [line for line in markdown.splitlines() if line.startswith("| grpo")]
    titles = [line for line in markdown.splitlines() if line.startswith("| variant")]
    for title, line in zip(titles, lines, strict=True):
        cells = dict(zip([t.strip() for t in title.split("|")], [c.strip() for c in line.split("|")], strict=True))
        for name in ("KL growth per 100 rollouts (nats an image)", "peak memory (GiB)"):
            assert cells.get(name, MISSING) == MISSING
        assert "(2 of 3 seeds)" in cells.get("diversity, end", "(2 of 3 seeds)")


def test_a_band_spans_the_seeds_that_logged_a_step():
    runs = [run_with(a=[1.0, 2.0, 3.0]), run_with(a=[3.0, 6.0]), run_with(b=[0.0])]
    steps, spanned = band(runs, "a", window=1)
    assert steps.tolist() == [0, 1, 2]
    assert spanned.tolist() == [[1, 2, 3], [2, 4, 3], [3, 6, 3]]
    assert band(runs, "a", window=2)[1][0].tolist() == [1, 1.5, 2.5]
    assert band(runs, "c", window=1) is None


def test_the_page_says_when_there_is_one_seed_and_which_runs_are_short():
    whole, short = run_with(reward__train=[1.0, 2.0]), run_with(reward__train=[1.0])
    text = " ".join(remarks([Variant(0, "x", [whole]), Variant(1, "y", [short])]))
    assert "Every variant has one seed, and therefore no interval" in text
    assert "Runs with fewer than 2 rollouts: y." in text
    assert "one seed" not in " ".join(remarks([Variant(0, "x", [whole, whole])]))


def test_the_page_needs_nothing_outside_itself(page):
    sources = re.findall(r'(?:src|href)="([^"]{0,30})', page)
    assert sources
    assert all(source.startswith(("data:image/svg+xml;base64,", "data:image/png;base64,")) for source in sources)
    assert "url(" not in page
    assert "<script" not in page
    assert 'name="viewport"' in page


def test_every_picture_has_a_sentence_and_every_curve_a_picture(page):
    figures = re.findall(r"<figure><img alt=.*?</figure>", page, re.DOTALL)
    assert len(figures) == len(CHARTS) + 1
    assert all("<figcaption>Look for" in figure for figure in figures)


def test_variants_keep_colour_and_order_everywhere(page):
    for part in re.split(r"<ul|<table|<h2>Samples", page)[1:]:
        shown = re.findall(r'border-color: (#\w+)"></span>(zeta|grpo|alpha)', part)
        assert list(dict.fromkeys(shown)) == [(colour(i), name) for i, name in enumerate(("zeta", "grpo", "alpha"))]


def test_the_first_and_last_grids_are_of_one_seed_and_equal_ones_are_shown_once(page):
    titles = [f"{name}, seed 0" for name in ("zeta", "grpo", "alpha")]
    for heading, step in (("First", 0), ("Last", 20)):
        shown = re.search(rf'<h3>{heading}</h3><div class="samples">(.*?)</div>', page)[1]
        assert re.findall(r"</span>(.*?)<br>", shown) == titles
        assert re.findall(r"<br>after (\d+) updates", shown) == [str(step)]
        assert shown.count("<img") == 1


def test_curves_that_no_run_logged_are_named(tmp_path):
    write_run(tmp_path / "a", {"reward/heldout": REWARD})
    report.main([str(tmp_path), "--output", str(tmp_path / "out")])
    text = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert "No run logged <code>rollout/diversity</code>" in text
    assert "No run logged <code>samples/heldout</code>" in text


def test_the_same_runs_give_the_same_files_and_the_table_is_printed(sweep, page, tmp_path, capsys):
    report.main([str(sweep), "--output", str(tmp_path)])
    assert {file.name for file in tmp_path.iterdir()} == {"index.html", "table.md", "table.csv"}
    assert (tmp_path / "index.html").read_text(encoding="utf-8") == page
    assert (tmp_path / "table.md").read_text(encoding="utf-8") in capsys.readouterr().out


def test_the_column_of_the_paper_is_there_only_where_a_run_knows_its_figure():
    variants = [Variant(0, "a", [run_with(reward__heldout=[0.1, 0.2])]), Variant(1, "b", [run_with()])]
    assert "| paper" not in write_markdown(summarise(variants))
    assert "published" not in write_csv(summarise(variants))
    variants[1].runs[0].published = 28.65
    table = write_markdown(summarise(variants))
    assert [line.split("|")[-2].strip() for line in table.splitlines()[2:6]] == ["paper", "-----", MISSING, "28.65"]
    assert "28.65" in write_csv(summarise(variants))


def test_every_measure_is_explained_and_has_its_own_name():
    measures = [measure for group in GROUPS.values() for measure in group]
    assert len({m.key for m in measures}) == len({m.title for m in measures}) == len(measures)
    assert all(m.meaning for m in measures)


@pytest.mark.slow
def test_fifteen_runs_take_less_than_half_a_minute_of_cpu(tmp_path):
    write_sweep(tmp_path / "runs", seeds=5, rollouts=100)
    started = time.process_time()
    report.main([str(tmp_path / "runs")])
    assert time.process_time() - started < 30
