"""Group-relative advantages: against a loop, and what groups that teach nothing or lack a reward get."""

import math
import statistics
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from margrpo.objective.advantage import AdvantageScale, group_advantages
from tests.helpers import relative_error

GROUP_SIZE = 4
EPS = 1e-4


def random_rewards() -> Tensor:
    return torch.rand(6 * GROUP_SIZE, generator=torch.Generator().manual_seed(0))


def looped_advantages(rewards: list[float], scale: AdvantageScale) -> list[float]:
    centred: list[float] = []
    group_std: list[float] = []
    for first in range(0, len(rewards), GROUP_SIZE):
        group = rewards[first : first + GROUP_SIZE]
        centred += [reward - statistics.fmean(group) for reward in group]
        group_std += [statistics.stdev(group)] * GROUP_SIZE
    if scale == "group":
        return [value / (std + EPS) for value, std in zip(centred, group_std, strict=True)]
    if scale == "batch":
        return [value / (statistics.stdev(centred) + EPS) for value in centred]
    return centred


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_equal_those_of_a_loop(scale: AdvantageScale) -> None:
    rewards = random_rewards()
    advantages = group_advantages(rewards, GROUP_SIZE, scale)
    expected = torch.tensor(looped_advantages(rewards.tolist(), scale))
    assert advantages.values.dtype == torch.float32
    assert relative_error(advantages.values, expected) < 1e-5
    assert (advantages.zero_std_groups, advantages.invalid) == (0, 0)


def test_group_std_is_the_unbiased_one() -> None:
    rewards = random_rewards()
    expected = torch.tensor([statistics.stdev(group) for group in rewards.view(-1, GROUP_SIZE).tolist()])
    assert relative_error(group_advantages(rewards, GROUP_SIZE, "none").group_std, expected) < 1e-6


def test_advantages_equal_those_of_the_published_release(data_dir: Path) -> None:
    recorded = load_file(data_dir / "nova/loss_flow.safetensors")
    advantages = group_advantages(recorded["rewards"], 4, "group")
    assert relative_error(advantages.values, recorded["advantages"]) < 1e-6


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("group_size", [2, 3, 6, 7])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -0.7, 1e6 + 0.1, 0.0])
def test_equal_rewards_give_advantages_that_are_exactly_zero_and_are_counted(
    scale: AdvantageScale, dtype: torch.dtype, group_size: int, reward: float
) -> None:
    # Another group differs, so that the scale of the batch is not zero.
    rewards = torch.tensor([reward] * group_size + list(range(group_size)), dtype=dtype)
    advantages = group_advantages(rewards, group_size, scale)
    assert advantages.values[:group_size].tolist() == [0.0] * group_size
    assert advantages.group_std[0].item() == 0.0
    assert advantages.zero_std_groups == 1
    assert (advantages.values[group_size:] != 0).any()


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_image_without_a_finite_reward_leaves_its_group_and_gets_zero(scale: AdvantageScale, bad: float) -> None:
    advantages = group_advantages(torch.tensor([1.0, bad, 2.0, 4.0, 0.0, 1.0, 3.0, 3.0]), 4, scale)
    remaining = [1.0, 2.0, 4.0]
    std = {
        "group": statistics.stdev(remaining) + EPS,
        "batch": statistics.stdev([r - 7 / 3 for r in remaining] + [r - 7 / 4 for r in (0.0, 1.0, 3.0, 3.0)]) + EPS,
        "none": 1.0,
    }[scale]
    expected = torch.tensor([(reward - 7 / 3) / std for reward in remaining])
    assert advantages.values[1].item() == 0.0
    assert relative_error(advantages.values[[0, 2, 3]], expected) < 1e-6
    assert relative_error(advantages.group_std[:1], torch.tensor([statistics.stdev(remaining)])) < 1e-6
    assert (advantages.zero_std_groups, advantages.invalid) == (0, 1)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_fewer_than_two_finite_rewards_give_zeros(scale: AdvantageScale) -> None:
    rewards = torch.tensor([math.nan, 0.3, math.nan, math.inf, math.nan, math.nan])
    advantages = group_advantages(rewards, 3, scale)
    assert advantages.values.tolist() == [0.0] * 6
    assert advantages.group_std.tolist() == [0.0, 0.0]
    assert (advantages.zero_std_groups, advantages.invalid) == (2, 5)


def test_without_a_scale_advantages_grow_with_the_rewards() -> None:
    rewards = random_rewards()
    small, large = (group_advantages(factor * rewards, GROUP_SIZE, "none").values for factor in (1, 10))
    assert relative_error(large, 10 * small) < 1e-5


@pytest.mark.parametrize("shape", [(0,), (7,), (2, 4), ()])
def test_rewards_that_are_not_whole_groups_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected \[B\], B a positive multiple of group_size 4") as error:
        group_advantages(torch.zeros(shape), 4, "group")
    assert str(shape) in str(error.value)


def test_an_unknown_scale_is_refused() -> None:
    with pytest.raises(ValueError, match="'std'; accepted: group, batch, none"):
        group_advantages(torch.zeros(4), 4, "std")  # type: ignore[arg-type]
