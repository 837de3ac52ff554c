"""Scenes and records that several tests of the shapes task use."""

from dataclasses import replace

import numpy as np
import torch

from margrpo.shapes.grammar import Placed, Record, Scene, prompts, sample_scene
from margrpo.shapes.renderer import render_batch
from margrpo.shapes.verifier import score, verify

CHUNK = 100


def draw(count: int, seed: int) -> tuple[list[Record], list[Scene]]:
    """Draw training prompts, each with a scene that fulfils it."""
    records = prompts(count, seed=seed, held_out=False)
    rng = np.random.default_rng(seed)
    return records, [sample_scene(record, rng) for record in records]


def verdicts(records: list[Record], scenes: list[Scene]) -> list[bool]:
    """Strict verdict on each rendered scene."""
    parts = range(0, len(scenes), CHUNK)
    return [v for i in parts for v in verify(render_batch(scenes[i : i + CHUNK]), records[i : i + CHUNK])]


def scores(records: list[Record], scenes: list[Scene]) -> torch.Tensor:
    """Graded score of each rendered scene, fp32 [B]."""
    parts = range(0, len(scenes), CHUNK)
    return torch.tensor([s for i in parts for s in score(render_batch(scenes[i : i + CHUNK]), records[i : i + CHUNK])])


def with_object(scene: Scene, index: int, **changes: float | str) -> Scene:
    """The scene with one object changed."""
    changed: Placed = replace(scene[index], **changes)  # type: ignore[arg-type]
    return [*scene[:index], changed, *scene[index + 1 :]]
