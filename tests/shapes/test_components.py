"""Finding objects in pixels."""

import numpy as np
import pytest
import torch

from margrpo.shapes.components import classify_pixels, find_components, label_components
from margrpo.shapes.grammar import BACKGROUND, COLOURS, SHAPES, SIDE, Placed
from margrpo.shapes.renderer import UNIT_AREA, render


def flood_fill(classes: np.ndarray) -> np.ndarray:
    """Number connected pixels of equal class one after the other, int [H, W]; -1 at the background."""
    labels = np.full(classes.shape, -1)
    for start in np.ndindex(classes.shape):
        if classes[start] < 0 or labels[start] >= 0:
            continue
        stack, number = [start], labels.max() + 1
        while stack:
            y, x = stack.pop()
            if labels[y, x] >= 0:
                continue
            labels[y, x] = number
            for ny, nx in ((y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)):
                in_image = 0 <= ny < classes.shape[0] and 0 <= nx < classes.shape[1]
                if in_image and classes[ny, nx] == classes[start]:
                    stack.append((ny, nx))
    return labels


def test_labels_part_the_pixels_as_a_flood_fill_does() -> None:
    classes = np.random.default_rng(0).integers(-1, 2, size=(3, 24, 24))
    found = label_components(torch.from_numpy(classes)).numpy()
    for mine, reference in zip(found, map(flood_fill, classes), strict=True):
        pairs = set(zip(mine.ravel().tolist(), reference.ravel().tolist(), strict=True))
        assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})
    assert not set(found[0][found[0] >= 0]) & set(found[1][found[1] >= 0])


def test_a_winding_region_is_one_component() -> None:
    spiral = torch.full((1, 15, 15), -1)
    spiral[:, ::2] = 0
    for row in range(1, 15, 2):
        spiral[:, row, -1 if row % 4 == 1 else 0] = 0
    labels = label_components(spiral)
    assert len(labels[labels >= 0].unique()) == 1


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("share", [0.3, 0.6, 1.0])
def test_a_pixel_mixed_with_the_background_keeps_its_colour_and_share(colour: str, share: float) -> None:
    low, high = torch.tensor(BACKGROUND).float(), torch.tensor(COLOURS[colour]).float()
    index, found = classify_pixels((low + share * (high - low)).view(1, 3, 1, 1))
    assert list(COLOURS)[index.item()] == colour
    assert found.item() == pytest.approx(share, abs=1e-3)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("colour", COLOURS)
def test_an_object_is_found_with_its_colour_shape_area_and_centroid(shape: str, colour: str) -> None:
    (component,) = find_components(render([Placed(shape, colour, 50.2, 71.9, 16.6)])[None])[0]
    assert (component.colour, component.shape) == (colour, shape)
    assert component.area == pytest.approx(UNIT_AREA[shape] * 16.6**2, rel=0.06)
    assert (component.x, component.y) == pytest.approx((50.2, 71.9), abs=0.5)


def test_specks_are_left_out_and_larger_patches_are_not() -> None:
    image = render([])
    image[:, 10:14, 10:14] = torch.tensor(COLOURS["red"], dtype=torch.uint8)[:, None, None]
    assert find_components(image[None]) == [[]]
    image[:, 40:48, 40:48] = torch.tensor(COLOURS["red"], dtype=torch.uint8)[:, None, None]
    assert [component.area for component in find_components(image[None])[0]] == [pytest.approx(64.0)]


def test_images_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match=rf"\(2, 3, 64, 64\).*\[B, 3, {SIDE}, {SIDE}\]"):
        find_components(torch.zeros(2, 3, 64, 64, dtype=torch.uint8))
