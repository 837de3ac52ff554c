"""Rules on boxes that the compositional rewards share: where two boxes lie to each other, how counts are graded.

A box is (left, top, right, bottom) in pixels, y pointing down.
"""

from typing import Literal

Box = tuple[float, float, float, float]
Direction = Literal["left", "right", "above", "below", "near"]

DIRECTIONS: dict[str, Direction] = {
    "left of": "left",
    "on the left of": "left",
    "right of": "right",
    "on the right of": "right",
    "above": "above",
    "on top of": "above",
    "on the top of": "above",
    "top of": "above",
    "below": "below",
    "on the bottom of": "below",
    "next to": "near",
    "near": "near",
    "on side of": "near",
}
"""Where the first object lies, seen from the second, for every locality of the training data."""

NEAR = 150 / 480
"""Offset that still is near, as a share of the longer image side: T2I-CompBench takes 150 of at most 480 pixels."""

FREE_OVERLAP = 0.1
"""Intersection over union up to which a direction counts in full (T2I-CompBench)."""


def direction_of(locality: str) -> Direction:
    """Direction that a locality such as "on the left of" names.

    Raises:
        ValueError: the locality is none of `DIRECTIONS`.
    """
    if locality not in DIRECTIONS:
        raise ValueError(f"unknown locality {locality!r}; known are {', '.join(DIRECTIONS)}")
    return DIRECTIONS[locality]


def box_iou(first: Box, second: Box) -> float:
    """Intersection over union of two boxes, in [0, 1]; 0 if both are empty."""
    width = max(0.0, min(first[2], second[2]) - max(first[0], second[0]))
    height = max(0.0, min(first[3], second[3]) - max(first[1], second[1]))
    intersection = width * height
    union = _area(first) + _area(second) - intersection
    return intersection / union if union > 0 else 0.0


def relation_score(locality: str, first: Box, second: Box, image_size: tuple[int, int]) -> float:
    """How well the first box lies at `locality` of the second, in [0, 1].

    The rule of T2I-CompBench's 2D spatial metric. A direction holds if the centres lie farther apart along its axis,
    the right way round, than across it; it scores 1, or 0.1 / iou for boxes that overlap by more than 0.1. Near scores
    1 if the centres are near along either axis, else the near distance over the larger offset. Unlike the published
    training reward, "above" and "on top of" are directions too, and near is measured in pixels.

    Args:
        image_size: (height, width) in pixels.

    Raises:
        ValueError: the locality is none of `DIRECTIONS`.
    """
    direction = direction_of(locality)
    dx = (second[0] + second[2] - first[0] - first[2]) / 2
    dy = (second[1] + second[3] - first[1] - first[3]) / 2
    if direction == "near":
        near = NEAR * max(image_size)
        return 1.0 if min(abs(dx), abs(dy)) < near else near / max(abs(dx), abs(dy))
    along, across = {"left": (dx, dy), "right": (-dx, dy), "above": (dy, dx), "below": (-dy, dx)}[direction]
    if along <= abs(across):
        return 0.0
    overlap = box_iou(first, second)
    return 1.0 if overlap < FREE_OVERLAP else FREE_OVERLAP / overlap


def count_score(found: int, asked: int) -> float:
    """Score of `found` objects where `asked` >= 1 were asked for: 0 for none, 1 for the exact number, else 0.2.

    The counting rule of the published GroundingDINO training reward.
    """
    if found == 0:
        return 0.0
    return 1.0 if found == asked else 0.2


def _area(box: Box) -> float:
    return max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1])
