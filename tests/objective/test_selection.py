"""Selection of tokens: uncertainty, top fraction, consistency."""

import math
import statistics

import pytest
import torch

from margrpo.objective.selection import consistency_gain, consistent, top_fraction, uncertainty


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_uncertainty_is_the_population_std_over_trajectories_averaged_over_channels():
    end_points = random(3, 2, 4, 5)
    result = uncertainty(end_points)
    for image in range(2):
        for token in range(4):
            stds = [statistics.pstdev(end_points[:, image, token, channel].tolist()) for channel in range(5)]
            assert result[image, token].item() == pytest.approx(statistics.mean(stds), rel=1e-5)


def test_one_trajectory_has_no_uncertainty():
    assert torch.equal(uncertainty(random(1, 2, 3, 4)), torch.zeros(2, 3))


@pytest.mark.parametrize(("fraction", "count"), [(0.0, 0), (0.1, 1), (0.3, 3), (0.5, 5), (1.0, 10)])
def test_top_fraction_marks_exactly_the_highest_of_each_row(fraction, count):
    scores = random(4, 10)
    marked = top_fraction(scores, fraction)
    for row, chosen in zip(scores, marked, strict=True):
        assert set(chosen.nonzero().flatten().tolist()) == set(sorted(range(10), key=lambda i: -row[i])[:count])


def test_top_fraction_takes_the_first_of_equal_scores():
    assert top_fraction(torch.ones(1, 6), 0.5).tolist() == [[True] * 3 + [False] * 3]


def test_consistency_gain_is_the_difference_of_cosines():
    current, previous, final = random(2, 3, 4, seed=1), random(2, 3, 4, seed=2), random(2, 3, 4, seed=3)

    def cosine(a, b):
        return sum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b))

    gain = consistency_gain(current, previous, final)
    for image in range(2):
        for token in range(3):
            c, p, f = (tensor[image, token].tolist() for tensor in (current, previous, final))
            assert gain[image, token].item() == pytest.approx(cosine(c, f) - cosine(p, f), abs=1e-5)


def test_a_token_without_direction_has_a_finite_gain():
    zero = torch.zeros(1, 1, 4)
    assert consistency_gain(zero, zero, zero).item() == 0


def test_predicted_tokens_stay_and_others_must_exceed_the_threshold():
    gain = torch.tensor([[0.2, 0.1, -0.3, -0.3]])
    predicted = torch.tensor([[False, False, False, True]])
    assert consistent(gain, predicted, 0.1).tolist() == [[True, False, False, True]]
