"""The numbers of the report: what is measured on a run, and how the seeds of a variant are summed up."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from reporting.events import Run, Variant

HELDOUT = "reward/heldout"
KL = "stability/kl_image_nats"
GRADIENT_NORM = "stability/gradient_norm"
DIVERSITY = "rollout/diversity"
PEAK_MEMORY = "memory/peak_gib"

SPIKE = 5.0
"""A gradient norm above so many running medians is a spike."""
SPIKE_WINDOW = 20
"""Updates before it that the running median is of; the first have fewer, and the very first five are never spikes."""
PAPER = (
    "what arXiv 2604.06966 reports for the same row, NOVA trained on HPS and scored by it times 100: another model and "
    "another reward, so that only the order of the rows can be compared"
)
ENDS = 10
"""Rollouts at the start and at the end that diversity is averaged over."""
RESAMPLES = 10_000


class Measure(NamedTuple):
    """A column: `of` returns the number of a run, or None where the run did not log what it needs.

    paired: the number of the first variant's run with the same seed is subtracted.
    optional: there is no column where no run has it.
    """

    key: str
    title: str
    digits: int
    of: Callable[[Run], float | None]
    meaning: str
    paired: bool = False
    optional: bool = False


class Estimate(NamedTuple):
    """Mean over the seeds that have the number; the ends of the interval are None below two seeds."""

    mean: float
    low: float | None
    high: float | None
    seeds: int


class Row(NamedTuple):
    """A variant and its estimates by measure; None is missing."""

    variant: Variant
    estimates: dict[str, Estimate | None]


def _of(curve: str, compute: Callable[[np.ndarray], float | None]) -> Callable[[Run], float | None]:
    return lambda run: compute(run.curves[curve].values) if curve in run.curves else None


def before(run: Run) -> float | None:
    """Held-out reward of the validation ahead of training."""
    return float(run.curves[HELDOUT].values[0]) if HELDOUT in run.curves and run.curves[HELDOUT].steps[0] == 0 else None


def final(run: Run) -> float | None:
    """Held-out reward of the last validation, if there was one after the first rollout."""
    return (
        float(run.curves[HELDOUT].values[-1]) if HELDOUT in run.curves and run.curves[HELDOUT].steps[-1] > 0 else None
    )


def peak(run: Run) -> float | None:
    """Held-out reward of the best validation, that ahead of training included; None without a final one."""
    return None if final(run) is None else float(run.curves[HELDOUT].values.max())


def difference(
    first: Callable[[Run], float | None], second: Callable[[Run], float | None]
) -> Callable[[Run], float | None]:
    """Subtract the second number of a run from the first; None when one of them is."""

    def compute(run: Run) -> float | None:
        minuend, subtrahend = first(run), second(run)
        return None if minuend is None or subtrahend is None else minuend - subtrahend

    return compute


def variation(values: np.ndarray) -> float | None:
    """Standard deviation over mean of positive values [n]; None below two of them."""
    return float(values.std(ddof=1) / values.mean()) if len(values) > 1 else None


def spikes(values: np.ndarray) -> int:
    """Count the values [n] above 5 times the median of the up to 20 before them; the first five never count."""
    return sum(
        bool(values[place] > SPIKE * np.median(values[max(0, place - SPIKE_WINDOW) : place]))
        for place in range(5, len(values))
    )


def growth(run: Run) -> float | None:
    """Slope of a least-squares line through the KL divergence, in nats an image per 100 rollouts."""
    if KL not in run.curves or len(run.curves[KL].steps) < 2:
        return None
    return float(100 * np.polyfit(run.curves[KL].steps, run.curves[KL].values, 1)[0])


GROUPS: dict[str, list[Measure]] = {
    "Reward": [
        Measure("before", "before", 3, before, "held-out reward ahead of training"),
        Measure("final", "final", 3, final, "held-out reward at the last validation"),
        Measure("gain", "final − before", 3, difference(final, before), "the difference of the two, seed by seed"),
        Measure(
            "versus_first", "final − first row's", 3, final, "seed by seed, so that luck of the seed drops out", True
        ),
        Measure("peak", "peak", 3, peak, "the best validation of each run, that before training included"),
        Measure(
            "collapse",
            "peak − final",
            3,
            difference(peak, final),
            "what a run had and lost; 0 for a run that ends at its best",
        ),
        Measure(
            "published",
            "paper",
            2,
            lambda run: run.published,
            PAPER,
            optional=True,
        ),
    ],
    "Stability": [
        Measure(
            "gradient_variation",
            "gradient-norm variation",
            2,
            _of(GRADIENT_NORM, variation),
            "standard deviation over mean of the gradient norm before clipping",
        ),
        Measure(
            "gradient_spikes",
            "spikes",
            1,
            _of(GRADIENT_NORM, spikes),
            f"updates of a run whose gradient norm is above {SPIKE:g} times the median of the {SPIKE_WINDOW} before",
        ),
        Measure(
            "kl_growth",
            "KL growth per 100 rollouts (nats an image)",
            1,
            growth,
            "slope of a straight line through the KL divergence from the reference",
        ),
        Measure(
            "diversity_start",
            "diversity, start",
            3,
            _of(DIVERSITY, lambda v: float(v[:ENDS].mean())),
            f"RMS pixel distance, in [0, 1], between two images of a prompt, mean of the first {ENDS} rollouts",
        ),
        Measure(
            "diversity_end",
            "diversity, end",
            3,
            _of(DIVERSITY, lambda v: float(v[-ENDS:].mean())),
            f"the same, mean of the last {ENDS} rollouts",
        ),
    ],
    "Time and memory": [
        Measure("rollouts", "rollouts", 0, lambda run: run.rollouts or None, "rollouts that were trained on"),
        Measure(
            "seconds_rollout",
            "sampling (s)",
            2,
            _of("time/rollout", lambda v: float(np.median(v))),
            "median seconds a rollout takes to sample",
        ),
        Measure("seconds_reward", "reward (s)", 2, _of("time/reward", lambda v: float(np.median(v))), "to score"),
        Measure("seconds_update", "update (s)", 2, _of("time/update", lambda v: float(np.median(v))), "to train on"),
        Measure(
            "peak_memory_gib",
            "peak memory (GiB)",
            2,
            _of(PEAK_MEMORY, lambda v: float(v.max())),
            "the most at any time",
        ),
    ],
}
"""The tables of the report."""


def columns(rows: Sequence[Row]) -> dict[str, list[Measure]]:
    """Return the tables' columns, without the optional ones that every row misses."""
    return {
        name: [m for m in measures if not m.optional or any(row.estimates[m.key] for row in rows)]
        for name, measures in GROUPS.items()
    }


def summarise(variants: Sequence[Variant]) -> list[Row]:
    """Estimate every measure of every variant; what is relative to the first variant is missing for the first."""
    measures = [measure for group in GROUPS.values() for measure in group]
    return [Row(v, {m.key: estimate(_numbers(m, v, variants[0])) for m in measures}) for v in variants]


def _numbers(measure: Measure, variant: Variant, first: Variant) -> list[float | None]:
    numbers = [measure.of(run) for run in variant.runs]
    if not measure.paired:
        return numbers
    if variant is first:
        return []
    base = {run.seed: measure.of(run) for run in first.runs}
    partners = [base.get(run.seed) for run in variant.runs]
    return [None if n is None or p is None else n - p for n, p in zip(numbers, partners, strict=True)]


def estimate(values: Sequence[float | None]) -> Estimate | None:
    """Mean over seeds with a 95% bootstrap interval: the percentiles of the mean of seeds drawn with replacement.

    Args:
        values: one per seed; None is left out.

    Returns:
        None when all are missing.
    """
    known = np.array([value for value in values if value is not None])
    if len(known) == 0:
        return None
    if len(known) == 1:
        return Estimate(float(known[0]), None, None, 1)
    drawn = np.random.default_rng(0).integers(len(known), size=(RESAMPLES, len(known)))
    low, high = np.percentile(known[drawn].mean(1), [2.5, 97.5])
    return Estimate(float(known.mean()), float(low), float(high), len(known))


def band(runs: Sequence[Run], curve: str, window: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Sum up a curve over seeds.

    Args:
        runs: seeds of a variant.
        curve: its name.
        window: each value is first averaged with those of the rollouts before it, so many in all.

    Returns:
        steps int64 [n] that any seed logged, and float64 [3, n]: lowest, mean and highest of the seeds that logged
        them; None when no seed has the curve.
    """
    by_step: dict[int, list[float]] = {}
    for run in runs:
        if curve in run.curves:
            steps, values = run.curves[curve]
            for place, step in enumerate(steps.tolist()):
                by_step.setdefault(step, []).append(float(values[max(0, place + 1 - window) : place + 1].mean()))
    if not by_step:
        return None
    steps = np.array(sorted(by_step))
    return steps, np.array([[min(v), np.mean(v), max(v)] for v in (by_step[step] for step in steps.tolist())]).T
