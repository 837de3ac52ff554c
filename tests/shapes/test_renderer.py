"""The renderer, against areas and colours known in advance."""

import math

import pytest
import torch

from margrpo.shapes.grammar import BACKGROUND, COLOURS, SHAPES, SIDE, Placed
from margrpo.shapes.renderer import SQUARE_HALF_SIDE, render, render_batch
from tests.shapes.helpers import draw


def inside(shape: str, x: float, y: float, radius: float) -> bool:
    """Whether a point lies in a shape around the origin, y downwards; the triangle's circumradius is `radius`."""
    if shape == "circle":
        return x * x + y * y <= radius * radius
    if shape == "square":
        return max(abs(x), abs(y)) <= SQUARE_HALF_SIDE * radius
    if shape == "triangle":
        corners = [(radius * math.sin(a), -radius * math.cos(a)) for a in (0, 2 * math.pi / 3, 4 * math.pi / 3)]
        edges = zip(corners, corners[1:] + corners[:1], strict=True)
        return all((bx - ax) * (y - ay) - (by - ay) * (x - ax) >= 0 for (ax, ay), (bx, by) in edges)
    return max(abs(x), abs(y)) <= radius and min(abs(x), abs(y)) <= 0.36 * radius


@pytest.mark.parametrize("shape", SHAPES)
def test_pixels_are_the_colour_by_the_share_that_the_shape_covers(shape: str) -> None:
    placed = Placed(shape, "white", x=60.3, y=70.7, radius=17.4)
    low, high = torch.tensor(BACKGROUND).double(), torch.tensor(COLOURS["white"]).double()
    offsets = [(k + 0.5) / 8 for k in range(8)]
    share = torch.zeros(SIDE, SIDE, dtype=torch.float64)
    for row in range(50, 92):
        for column in range(40, 82):
            points = [(column + a - placed.x, row + b - placed.y) for a in offsets for b in offsets]
            share[row, column] = sum(inside(shape, x, y, placed.radius) for x, y in points) / len(points)
    expected = low[:, None, None] + share * (high - low)[:, None, None]
    difference = (render([placed]).double() - expected).abs() / (high - low)[:, None, None]
    # Corners are rounded by less than half a pixel; everything else is exact to the sampling of the reference.
    assert difference.max() < 0.45
    assert difference.mean() < 1e-3


def test_an_empty_scene_is_all_background() -> None:
    image = render([])
    assert image.shape == (3, SIDE, SIDE)
    assert image.dtype == torch.uint8
    assert (image == torch.tensor(BACKGROUND, dtype=torch.uint8)[:, None, None]).all()


@pytest.mark.parametrize("colour", COLOURS)
def test_the_middle_of_an_object_has_exactly_its_palette_colour(colour: str) -> None:
    image = render([Placed("circle", colour, 64.0, 64.0, 16.0)])
    assert tuple(image[:, 64, 64].tolist()) == COLOURS[colour]


def test_a_batch_is_its_scenes_drawn_one_by_one() -> None:
    _, scenes = draw(12, seed=2)
    assert torch.equal(render_batch(scenes), torch.stack([render(scene) for scene in scenes]))
