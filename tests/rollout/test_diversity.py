"""How much the images of a group differ."""

import itertools

import numpy as np
import pytest
import torch

from margrpo.rollout.diversity import group_diversity


def test_diversity_is_the_mean_distance_of_the_pairs_of_a_group():
    images = torch.randint(0, 256, (6, 3, 4, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    pixels = images.double().numpy() / 255
    pairs = [pair for group in (range(3), range(3, 6)) for pair in itertools.combinations(group, 2)]
    expected = np.mean([np.sqrt(np.square(pixels[i] - pixels[j]).mean()) for i, j in pairs])
    assert group_diversity(images, 3).item() == pytest.approx(expected, rel=1e-6)


def test_equal_images_have_none_and_opposite_ones_all_of_it():
    white = torch.full((1, 3, 8, 8), 255, dtype=torch.uint8)
    assert group_diversity(white.expand(4, -1, -1, -1), 4).item() == 0.0
    assert group_diversity(torch.cat([white, white - 255, white, white - 255]), 2).item() == pytest.approx(1.0)


def test_what_differs_between_groups_does_not_count():
    images = torch.arange(0, 200, 50, dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 2, 2)
    assert group_diversity(images.repeat_interleave(2, dim=0), 2).item() == 0.0


def test_a_small_difference_is_not_lost_in_rounding_or_autocast():
    images = torch.full((2, 3, 64, 64), 250, dtype=torch.uint8)
    images[1, 0, 0, 0] += 1
    expected = pytest.approx(1 / 255 / np.sqrt(3 * 64 * 64), rel=1e-5)
    assert group_diversity(images, 2).item() == expected
    with torch.autocast("cpu", torch.bfloat16):
        assert group_diversity(images, 2).item() == expected
