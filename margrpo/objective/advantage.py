"""Group-relative advantages of GRPO (arXiv 2402.03300)."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

EPSILON = 1e-4

AdvantageScale = Literal["group", "batch", "none"]


@dataclass(frozen=True)
class Advantages:
    """Advantages of B images and what is worth logging about their groups.

    Args:
        values: fp32 [B].
        group_std: fp32 [P], unbiased standard deviation of the valid rewards of each group.
        zero_std_groups: groups that teach nothing because their valid rewards are equal.
        invalid: images without a finite reward.
    """

    values: Tensor
    group_std: Tensor
    zero_std_groups: int
    invalid: int


def group_advantages(rewards: Tensor, group_size: int, scale: AdvantageScale) -> Advantages:
    """Centre the rewards of each group, and scale them.

    Args:
        rewards: [B], images of a prompt contiguous. One that is not finite leaves its group's statistics and gets 0.
        group_size: G; B must be a multiple.
        scale: `group` divides by the group's standard deviation + 1e-4, `batch` by that of all centred rewards + 1e-4,
            `none` does not divide (Dr. GRPO, arXiv 2503.20783).

    Raises:
        ValueError: B is not a positive multiple of the group size.
    """
    if rewards.ndim != 1 or len(rewards) == 0 or len(rewards) % group_size:
        raise ValueError(f"rewards have shape {tuple(rewards.shape)}; expected [B] with B a multiple of {group_size}")
    groups = rewards.double().view(-1, group_size)
    valid = groups.isfinite()
    count = valid.sum(dim=1, keepdim=True)
    known = torch.where(valid, groups, 0.0)
    mean = known.sum(dim=1, keepdim=True) / count.clamp(min=1)
    highest = torch.where(valid, groups, -torch.inf).amax(dim=1, keepdim=True)
    lowest = torch.where(valid, groups, torch.inf).amin(dim=1, keepdim=True)
    # Compared, not computed: rounding of the mean would leave a residue where all rewards are equal.
    differs = highest > lowest
    centred = torch.where(valid & differs, groups - mean, 0.0)
    group_std = (centred.square().sum(dim=1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    if scale == "group":
        values = centred / (group_std + EPSILON)
    elif scale == "batch":
        batch_std = (centred.square().sum() / (valid.sum() - 1).clamp(min=1)).sqrt()
        values = centred / (batch_std + EPSILON)
    else:
        values = centred
    return Advantages(
        values.flatten().float(), group_std[:, 0].float(), int((~differs).sum()), int((~valid).sum())
    )
