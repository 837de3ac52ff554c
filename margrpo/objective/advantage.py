"""Group-relative advantages of GRPO (arXiv 2402.03300)."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

AdvantageScale = Literal["group", "batch", "none"]


@dataclass(frozen=True)
class Advantages:
    """Advantages of B images in P groups, and what is worth logging about the groups.

    Args:
        values: fp32 [B].
        group_std: fp32 [P], unbiased standard deviation of each group's finite rewards; 0 where there are fewer than 2.
        zero_std_groups: groups that teach nothing, because their finite rewards are equal or fewer than 2.
        invalid: images whose reward is not finite.
    """

    values: Tensor
    group_std: Tensor
    zero_std_groups: int
    invalid: int


def group_advantages(rewards: Tensor, group_size: int, scale: AdvantageScale, eps: float = 1e-4) -> Advantages:
    """Centre the rewards of each group on their mean, and scale them.

    Args:
        rewards: float [B], images of a prompt contiguous. One that is not finite leaves the statistics of its group,
            and its image gets advantage 0.
        group_size: G; B = P * G.
        scale: what centred rewards are divided by. `group`: standard deviation of the group + eps (GRPO); `batch`:
            standard deviation of all centred rewards + eps; `none`: nothing (Dr. GRPO, arXiv 2503.20783).
            Standard deviations are unbiased, as in the published release.
        eps: keeps groups that hardly differ from being blown up; in units of reward.

    Raises:
        ValueError: B is not a positive multiple of the group size, or the scale is unknown.
    """
    if rewards.ndim != 1 or group_size < 1 or len(rewards) == 0 or len(rewards) % group_size:
        raise ValueError(
            f"rewards have shape {tuple(rewards.shape)}; expected [B], B a positive multiple of group_size {group_size}"
        )
    groups = rewards.float().view(-1, group_size)
    finite = groups.isfinite()
    count = finite.sum(dim=1, keepdim=True)
    # Measured from the lowest reward, equal rewards are exactly 0; from their mean they would keep its rounding error.
    lowest = torch.where(finite, groups, torch.inf).amin(dim=1, keepdim=True)
    raised = torch.where(finite, groups - lowest, 0.0)
    centred = torch.where(finite, raised - raised.sum(dim=1, keepdim=True) / count.clamp(min=1), 0.0)
    group_std = (centred.square().sum(dim=1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    if scale == "group":
        values = centred / (group_std + eps)
    elif scale == "batch":
        values = centred / ((centred.square().sum() / (count.sum() - 1).clamp(min=1)).sqrt() + eps)
    elif scale == "none":
        values = centred
    else:
        raise ValueError(f"advantage scale is {scale!r}; accepted: group, batch, none")
    return Advantages(
        values=values.flatten(),
        group_std=group_std.squeeze(1),
        zero_std_groups=int((group_std == 0).sum()),
        invalid=int((~finite).sum()),
    )
