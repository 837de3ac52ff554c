"""Finds the objects in an image: pixels to palette colours, connected pixels of one colour to components."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from margrpo.shapes.grammar import BACKGROUND, COLOURS, SHAPES, SIDE
from margrpo.shapes.renderer import coverage

POOL = 2
"""Images are analysed at half their size: objects stay large, and noise of single pixels averages out."""

GRID = SIDE // POOL
STRIDES = 4
"""Steps a label spreads in each direction between two checks for convergence."""

SMALLEST_AREA = 24.0
"""Components below this many pixels are specks, not objects."""


@dataclass(frozen=True)
class Component:
    """A connected region of one colour; lengths in pixels of the full image.

    Args:
        colour: name of the colour.
        area: pixels, edge pixels by their share.
        x: centroid, to the right.
        y: centroid, downwards.
        overlap: intersection over union with the ideal shape of the same area and centroid, per shape, in [0, 1].
    """

    colour: str
    area: float
    x: float
    y: float
    overlap: dict[str, float]

    @property
    def shape(self) -> str:
        """The most similar shape."""
        return max(self.overlap, key=lambda shape: self.overlap[shape])


def find_components(images: Tensor) -> list[list[Component]]:
    """Find the components of each image uint8 [B, 3, SIDE, SIDE], largest first; specks are left out.

    Raises:
        ValueError: images of another size.
    """
    if images.shape[1:] != (3, SIDE, SIDE):
        raise ValueError(f"images have shape {tuple(images.shape)}; the shapes task draws [B, 3, {SIDE}, {SIDE}]")
    colour, cover = classify_pixels(F.avg_pool2d(images.float(), POOL))
    labels = label_components(torch.where(cover > 0.5, colour, -1))
    return _measure(labels, colour, cover)


def classify_pixels(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Explain each pixel as background mixed with one palette colour.

    Nearest colours would turn the smoothed edge of one colour into a fringe of another; the mixture with the smallest
    residual does not.

    Args:
        pixels: fp32 [B, 3, H, W] in [0, 255].

    Returns:
        index of the colour, int64 [B, H, W], and its share of the pixel, fp32 [B, H, W] in [0, 1].
    """
    background = torch.tensor(BACKGROUND, dtype=torch.float32, device=pixels.device)
    directions = torch.tensor(list(COLOURS.values()), dtype=torch.float32, device=pixels.device) - background
    offset = pixels - background[:, None, None]
    squares = directions.square().sum(dim=1)
    dots = torch.einsum("kc,bchw->bkhw", directions, offset)
    share = (dots / squares[:, None, None]).clamp(0.0, 1.0)
    residual = share.square() * squares[:, None, None] - 2 * share * dots
    colour = residual.argmin(dim=1)
    return colour, share.gather(1, colour[:, None])[:, 0]


def label_components(classes: Tensor) -> Tensor:
    """Give connected pixels (4 neighbours) of equal class one number, distinct in the batch.

    Args:
        classes: int64 [B, H, W]; negative is background.

    Returns:
        int64 [B, H, W]; -1 at the background.
    """
    foreground = classes >= 0
    labels = torch.arange(classes.numel(), device=classes.device).view_as(classes)
    labels = torch.where(foreground, labels, -1)
    while True:
        before = labels
        for dimension, backwards in ((1, False), (1, True), (2, False), (2, True)):
            for _ in range(STRIDES):
                labels = _spread(labels, classes, dimension, backwards=backwards)
        if torch.equal(before, labels):
            return labels


def _spread(labels: Tensor, classes: Tensor, dimension: int, *, backwards: bool) -> Tensor:
    """Take over the larger label of the pixel before (or behind) along a dimension, where its class is the same."""
    length = labels.shape[dimension] - 1
    here, there = (0, 1) if backwards else (1, 0)
    mine, other = labels.narrow(dimension, here, length), labels.narrow(dimension, there, length)
    same = classes.narrow(dimension, here, length) == classes.narrow(dimension, there, length)
    spread = labels.clone()
    spread.narrow(dimension, here, length).copy_(torch.where(same, torch.maximum(mine, other), mine))
    return spread


def _measure(labels: Tensor, colour: Tensor, cover: Tensor) -> list[list[Component]]:
    batch = len(labels)
    places = torch.arange(GRID, device=labels.device, dtype=torch.float32) + 0.5
    kept, inverse, counts = labels[labels >= 0].unique(return_inverse=True, return_counts=True)
    image, y, x = (labels >= 0).nonzero(as_tuple=True)
    weight = cover[image, y, x]
    area = torch.zeros(len(kept), device=labels.device).index_add(0, inverse, weight)
    centre_x = torch.zeros_like(area).index_add(0, inverse, weight * places[x]) / area
    centre_y = torch.zeros_like(area).index_add(0, inverse, weight * places[y]) / area
    big = (counts * POOL**2 >= SMALLEST_AREA).nonzero().squeeze(1)
    found: list[list[Component]] = [[] for _ in range(batch)]
    if len(big) == 0:
        return found
    image_of = kept[big] // GRID**2
    colour_of = colour.flatten()[kept[big]]
    mine = labels[image_of] == kept[big, None, None]
    overlaps = _overlaps(mine.float(), area[big], centre_x[big], centre_y[big])
    names = list(COLOURS)
    rows = zip(
        image_of.tolist(),
        colour_of.tolist(),
        (area[big] * POOL**2).tolist(),
        (centre_x[big] * POOL).tolist(),
        (centre_y[big] * POOL).tolist(),
        overlaps.tolist(),
        strict=True,
    )
    for index, colour_index, size, at_x, at_y, overlap in rows:
        shapes = dict(zip(SHAPES, overlap, strict=True))
        found[index].append(Component(names[colour_index], size, at_x, at_y, shapes))
    for components in found:
        components.sort(key=lambda component: -component.area)
    return found


def _overlaps(mine: Tensor, area: Tensor, centre_x: Tensor, centre_y: Tensor) -> Tensor:
    """Intersection over union [K, shapes] of masks [K, GRID, GRID] with ideal shapes of the same area and centroid."""
    places = torch.arange(GRID, device=mine.device, dtype=torch.float32) + 0.5
    x = places - centre_x[:, None, None]
    y = places[:, None] - centre_y[:, None, None]
    columns = []
    for shape in SHAPES:
        ideal = coverage(shape, x, y, area[:, None, None])
        shared = torch.minimum(mine, ideal).sum(dim=(1, 2))
        columns.append(shared / torch.maximum(mine, ideal).sum(dim=(1, 2)))
    return torch.stack(columns, dim=1)
