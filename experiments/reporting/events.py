"""Reads runs: TensorBoard event files, and what the sweep says about the run."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import (
    IMAGES,
    SCALARS,
    EventAccumulator,
)

SAMPLES = "samples/heldout"
TRAINING = "reward/train"
SWEEP_FILE = "sweep.json"


class Curve(NamedTuple):
    """A metric of a run; values that are not finite are left out.

    steps: int64 [n], ascending, in rollouts.
    values: float64 [n].
    """

    steps: np.ndarray
    values: np.ndarray


class Grid(NamedTuple):
    """A grid of held-out images."""

    step: int
    png: bytes


@dataclass
class Run:
    """One run.

    Args:
        directory: where its event files are.
        variant: what it is compared by.
        seed: null when no sweep says.
        sweep: the sweep it belongs to; null for a run of its own.
        order: place of the variant in its sweep; null when no sweep says.
        published: what the paper reports for the variant; null when no sweep says.
        curves: by the name under which TensorBoard shows them; without those that were never logged.
        grids: the first and the last sample grid, or one of them, or none.
    """

    directory: Path
    variant: str
    seed: int | None = None
    sweep: str | None = None
    order: int | None = None
    published: float | None = None
    curves: dict[str, Curve] = field(default_factory=dict)
    grids: list[Grid] = field(default_factory=list)

    @property
    def rollouts(self) -> int:
        """Rollouts that were trained on, as far as they were logged."""
        return int(self.curves[TRAINING].steps[-1]) + 1 if TRAINING in self.curves else 0


class Variant(NamedTuple):
    """Runs that differ in their seed alone.

    place: among the variants; decides the colour.
    """

    place: int
    name: str
    runs: list[Run]


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """Read every run at or below the paths, in the order of paths, then of names.

    A run is a directory with event files or a `sweep.json`. Without the latter its variant is the directory's name,
    with as much of the path before it as the runs do not share.

    Raises:
        ValueError: a path does not exist, or has no run.
    """
    directories: list[Path] = []
    for path in paths:
        if not path.is_dir():
            raise ValueError(f"{path} is not a directory; name run directories, or directories above them")
        found = sorted(
            {file.parent for pattern in (SWEEP_FILE, "events.out.tfevents*") for file in path.rglob(pattern)}
        )
        if not found:
            raise ValueError(f"{path}: neither event files (events.out.tfevents*) nor {SWEEP_FILE} below it")
        directories += [directory for directory in found if directory not in directories]
    alone = [directory.parent.parts for directory in directories if not (directory / SWEEP_FILE).exists()]
    shared = _common_length(alone)
    return [read_run(directory, "/".join(directory.parts[shared:])) for directory in directories]


def read_run(directory: Path, name: str) -> Run:
    """Read one run.

    Args:
        directory: has the event files, of which there are several if the run was resumed; a step that was logged again
            after a resume counts with its last value.
        name: its variant, unless `sweep.json` says otherwise.

    Raises:
        ValueError: `sweep.json` lacks a key.
    """
    run = Run(directory, name)
    sweep_file = directory / SWEEP_FILE
    if sweep_file.exists():
        said = json.loads(sweep_file.read_text(encoding="utf-8"))
        missing = [key for key in ("sweep", "variant", "seed") if key not in said]
        if missing:
            raise ValueError(f"{sweep_file}: lacks {', '.join(missing)}; sweep.py writes sweep, variant and seed")
        run.sweep, run.variant, run.seed, run.order = said["sweep"], said["variant"], said["seed"], said.get("order")
        run.published = said.get("published")
    if not any(directory.glob("events.out.tfevents*")):
        return run
    events = EventAccumulator(str(directory), size_guidance={SCALARS: 0, IMAGES: 0}).Reload()
    for tag in events.Tags()["scalars"]:
        last = {event.step: event.value for event in events.Scalars(tag)}
        points = sorted((step, value) for step, value in last.items() if np.isfinite(value))
        if points:
            steps, values = zip(*points, strict=True)
            run.curves[tag] = Curve(np.array(steps), np.array(values))
    if SAMPLES in events.Tags()["images"]:
        grids = sorted({event.step: event.encoded_image_string for event in events.Images(SAMPLES)}.items())
        run.grids = [Grid(*grids[0]), Grid(*grids[-1])][: len(grids)]
    return run


def group_variants(runs: list[Run]) -> list[Variant]:
    """Group runs by variant, in the order of the sweep file; runs of no sweep as they come.

    With several sweeps, the name of the sweep is part of a variant's name.
    """
    sweeps = list(dict.fromkeys(run.sweep for run in runs))
    groups: dict[tuple[str | None, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.sweep, run.variant), []).append(run)

    def place(key: tuple[str | None, str]) -> tuple[int, float]:
        orders = [run.order for run in groups[key] if run.order is not None]
        return sweeps.index(key[0]), min(orders, default=float("inf"))

    variants = []
    for index, key in enumerate(sorted(groups, key=place)):
        name = f"{key[0]}/{key[1]}" if key[0] is not None and len(sweeps) > 1 else key[1]
        variants.append(Variant(index, name, sorted(groups[key], key=lambda run: -1 if run.seed is None else run.seed)))
    return variants


def _common_length(paths: list[tuple[str, ...]]) -> int:
    length = 0
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        length += 1
    return length
