"""Weighted sum of rewards, with every scorer's answer checked before anything is learnt from it."""

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from margrpo.rewards.base import Reward

FIRST_RETRY_SECONDS = 0.5

log = logging.getLogger(__name__)


class RewardError(RuntimeError):
    """A scorer failed or answered wrongly; the message names it and the prompts, the cause is chained."""


@dataclass(frozen=True)
class RewardResult:
    """Scores of B images.

    Args:
        total: fp32 [B], weighted sum; NaN where any scorer gave NaN.
        per_reward: fp32 [B] per scorer, unweighted.
    """

    total: Tensor
    per_reward: dict[str, Tensor]


class RewardCombiner(nn.Module):
    """Calls every reward on the images, in micro-batches, and sums the scores.

    Rewards that are modules are frozen, stay in eval mode and move with this one.

    Args:
        rewards: at least one, with distinct names.
        weights: one finite factor per reward; all 1 when None.
        micro_batch: images per call of a scorer; all at once when None.
        retries: how often a call that raises an OSError (which a lost connection or a time-out is) is repeated, after
            0.5, 1, 2, ... seconds.

    Raises:
        ValueError: one of the above does not hold.
    """

    def __init__(
        self,
        rewards: list[Reward],
        weights: list[float] | None = None,
        micro_batch: int | None = None,
        retries: int = 2,
    ) -> None:
        super().__init__()
        weights = [1.0] * len(rewards) if weights is None else weights
        _check_configuration([reward.name for reward in rewards], weights, micro_batch, retries)
        self.rewards = rewards
        self.weights = weights
        self.micro_batch = micro_batch
        self.retries = retries
        # Registered here as well as listed above: rewards without a network need not be modules.
        self.networks = nn.ModuleList(reward for reward in rewards if isinstance(reward, nn.Module))
        self.requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> "RewardCombiner":
        """Stay in eval mode whatever the trainer asks: dropout or batch statistics would change the reward."""
        super().train(False)
        return self

    @torch.no_grad()
    def forward(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> RewardResult:
        """Score images uint8 [B, 3, H, W] with their B prompts and B records, in the precision of the scorers.

        Raises:
            RewardError: a scorer raised (after the retries, if it was transient) or did not return one score per image.
        """
        total = torch.zeros(len(images), dtype=torch.float32, device=images.device)
        per_reward = {}
        for reward, weight in zip(self.rewards, self.weights, strict=True):
            # The trainer's autocast is for the policy: scorers keep the precision they were published with.
            with torch.autocast(images.device.type, enabled=False):
                scores = [
                    self._score(reward, images[part], prompts[part], metadata[part])
                    for part in self._parts(len(images))
                ]
            per_reward[reward.name] = torch.cat(scores)
            total += weight * per_reward[reward.name]
        return RewardResult(total, per_reward)

    def _parts(self, count: int) -> Iterator[slice]:
        size = self.micro_batch or count
        return (slice(first, first + size) for first in range(0, count, size))

    def _score(self, reward: Reward, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
        scores = self._call(reward, images, prompts, metadata)
        if not isinstance(scores, Tensor) or scores.shape != (len(images),):
            found = f"shape {list(scores.shape)}" if isinstance(scores, Tensor) else f"a {type(scores).__name__}"
            raise RewardError(
                f"reward {reward.name!r} returned {found}; expected a tensor of shape [{len(images)}], "
                f"one score per image; {_describe(prompts)}"
            )
        return scores.to(images.device, torch.float32)

    def _call(self, reward: Reward, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
        attempt = 0
        while True:
            try:
                return reward(images, prompts, metadata)
            except Exception as error:
                if attempt == self.retries or not isinstance(error, OSError):
                    raise RewardError(f"reward {reward.name!r} failed: {error!r}; {_describe(prompts)}") from error
                delay = FIRST_RETRY_SECONDS * 2**attempt
                log.warning("reward %r failed, trying again in %g s: %r", reward.name, delay, error)
                time.sleep(delay)
                attempt += 1


def _check_configuration(names: list[str], weights: list[float], micro_batch: int | None, retries: int) -> None:
    if not names:
        raise ValueError("no rewards are configured; expected at least one")
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"several rewards are named {', '.join(repeated)}; give each its own name")
    if len(weights) != len(names):
        raise ValueError(f"{len(weights)} weights for {len(names)} rewards ({', '.join(names)}); expected one for each")
    for name, weight in zip(names, weights, strict=True):
        if not math.isfinite(weight):
            raise ValueError(f"the weight of reward {name!r} is {weight}; expected a finite number")
    if micro_batch is not None and micro_batch < 1:
        raise ValueError(f"micro_batch is {micro_batch}; expected at least 1 image, or null for all at once")
    if retries < 0:
        raise ValueError(f"retries is {retries}; expected 0 or more")


def _describe(prompts: list[str]) -> str:
    distinct = list(dict.fromkeys(prompts))
    shown = ", ".join(repr(prompt) for prompt in distinct[:3])
    more = f" and {len(distinct) - 3} more" if len(distinct) > 3 else ""
    return f"prompts: {shown}{more}"
