"""Draws scenes of the embedded task: flat colours, edges smoothed over one pixel."""

import math

import torch
from torch import Tensor

from margrpo.shapes.grammar import BACKGROUND, COLOURS, SIDE, SQUARE_REACH, Placed, Scene

SQUARE_HALF_SIDE = SQUARE_REACH / math.sqrt(2)
CROSS_HALF_WIDTH = 0.36
TRIANGLE_INRADIUS = 0.5

UNIT_AREA = {
    "circle": math.pi,
    "square": (2 * SQUARE_HALF_SIDE) ** 2,
    "triangle": 0.75 * math.sqrt(3),
    "cross": 8 * CROSS_HALF_WIDTH - 4 * CROSS_HALF_WIDTH**2,
}
"""Area of each shape at radius 1."""


def signed_distance(shape: str, x: Tensor, y: Tensor, radius: float | Tensor) -> Tensor:
    """Signed distance to the outline of a shape centred at the origin, negative inside; y points down.

    `radius` is that of the circle around the shape; the square is slightly smaller than that.
    """
    if shape == "circle":
        return torch.hypot(x, y) - radius
    if shape == "square":
        return torch.maximum(x.abs(), y.abs()) - SQUARE_HALF_SIDE * radius
    if shape == "triangle":
        slanted = x.abs() * math.cos(math.pi / 6) - y * math.sin(math.pi / 6)
        return torch.maximum(slanted, y) - TRIANGLE_INRADIUS * radius
    long, short = radius, CROSS_HALF_WIDTH * radius
    upright = torch.maximum(x.abs() - short, y.abs() - long)
    lying = torch.maximum(x.abs() - long, y.abs() - short)
    return torch.minimum(upright, lying)


def coverage(shape: str, x: Tensor, y: Tensor, area: Tensor) -> Tensor:
    """Share of each pixel, in [0, 1], that a shape covers; `area` in pixels, x and y are offsets from its centre."""
    radius = (area / UNIT_AREA[shape]).sqrt()
    return (0.5 - signed_distance(shape, x, y, radius)).clamp(0.0, 1.0)


def render(scene: Scene) -> Tensor:
    """Draw a scene: uint8 [3, SIDE, SIDE]."""
    image = torch.tensor(BACKGROUND, dtype=torch.float32)[:, None, None].repeat(1, SIDE, SIDE)
    for placed in scene:
        _draw(image, placed)
    return image.round().to(torch.uint8)


def render_batch(scenes: list[Scene]) -> Tensor:
    """Draw B scenes: uint8 [B, 3, SIDE, SIDE]."""
    return torch.stack([render(scene) for scene in scenes])


def _draw(image: Tensor, placed: Placed) -> None:
    reach = placed.radius + 2
    left, top = (max(0, math.floor(centre - reach)) for centre in (placed.x, placed.y))
    right, bottom = (min(SIDE, math.ceil(centre + reach)) for centre in (placed.x, placed.y))
    x = torch.arange(left, right) + 0.5 - placed.x
    y = torch.arange(top, bottom)[:, None] + 0.5 - placed.y
    area = torch.tensor(UNIT_AREA[placed.shape] * placed.radius**2)
    cover = coverage(placed.shape, x.expand(len(y), -1), y.expand(-1, len(x)), area)
    window = image[:, top:bottom, left:right]
    colour = torch.tensor(COLOURS[placed.colour], dtype=torch.float32)[:, None, None]
    window += cover * (colour - window)
