"""Group-relative advantages."""

import math
import statistics

import pytest
import torch

from margrpo.objective.advantage import EPSILON, group_advantages


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_equal_the_loop_written_definition(scale):
    rewards = torch.rand(12, generator=torch.Generator().manual_seed(0))
    result = group_advantages(rewards, 4, scale)
    values = rewards.tolist()
    groups = [values[i : i + 4] for i in range(0, 12, 4)]
    centred = [r - statistics.mean(group) for group in groups for r in group]
    for image, value in enumerate(centred):
        divisor = {
            "group": statistics.stdev(groups[image // 4]) + EPSILON,
            "batch": math.sqrt(sum(c * c for c in centred) / 11) + EPSILON,
            "none": 1.0,
        }[scale]
        assert result.values[image].item() == pytest.approx(value / divisor, rel=1e-5)
    assert result.group_std.tolist() == pytest.approx([statistics.stdev(group) for group in groups], rel=1e-5)
    assert (result.zero_std_groups, result.invalid) == (0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.1, 0.7, 1 / 3, 1e6 + 0.1])
def test_equal_rewards_give_advantages_that_are_exactly_zero_and_are_counted(value, dtype):
    rewards = torch.tensor([value] * 6 + [0.0, 1.0] * 3, dtype=dtype)
    result = group_advantages(rewards, 6, "group")
    assert torch.equal(result.values[:6], torch.zeros(6))
    assert (result.values[6:] != 0).all()
    assert result.zero_std_groups == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_image_without_a_finite_reward_leaves_its_group_and_gets_zero(bad):
    with_bad = group_advantages(torch.tensor([0.2, bad, 0.5, 0.9]), 4, "group")
    without = group_advantages(torch.tensor([0.2, 0.5, 0.9]), 3, "group")
    assert with_bad.values[1] == 0
    assert torch.equal(with_bad.values[[0, 2, 3]], without.values)
    assert with_bad.invalid == 1


def test_a_group_with_one_valid_reward_teaches_nothing():
    result = group_advantages(torch.tensor([0.4, math.nan, math.nan]), 3, "group")
    assert torch.equal(result.values, torch.zeros(3))
    assert result.zero_std_groups == 1


@pytest.mark.parametrize("rewards", [torch.zeros(5), torch.zeros(2, 2), torch.zeros(0)])
def test_a_wrong_shape_is_an_error_that_names_the_group_size(rewards):
    with pytest.raises(ValueError, match="multiple of 4"):
        group_advantages(rewards, 4, "group")
