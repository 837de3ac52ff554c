"""What a rollout hands to the update. Nothing here assumes how a token's log-probability is computed."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from margrpo.models.base import Condition
from margrpo.rollout.config import RolloutConfig


@dataclass(frozen=True)
class Decisions:
    """The scored decisions of one mask step, as flat lists: U places in the images, M >= U decisions at those places.

    A token that takes one trajectory has one decision of weight 1 per denoising step, a critical token has S of
    weight 1 / S.

    Args:
        image: int64 [U], image of each place.
        token: int64 [U], token of each place.
        place: int64 [M], place of each decision.
        weight: fp32 [M], share of the decision in its token's surrogate.
        log_prob: fp32 [M], log-probability under the policy that made the rollout, as the update scores it.
        payload: named tensors [M, ...] that the scoring function of the model family needs.
    """

    image: Tensor
    token: Tensor
    place: Tensor
    weight: Tensor
    log_prob: Tensor
    payload: dict[str, Tensor]


@dataclass(frozen=True)
class MaskStep:
    """A trained mask step.

    Args:
        index: position among the effective mask steps.
        start: tokens known before the step, the first in decoding order.
        stop: tokens known after it.
        decisions: what is trained at it.
        shares: share of the tokens denoised for training at the step that are `critical` and `consistent`, and of all
            unknown tokens that are `trained`; each in [0, 1].
    """

    index: int
    start: int
    stop: int
    decisions: Decisions
    shares: dict[str, float]


@dataclass
class Rollout:
    """A scored batch of groups; B = P * group_size images, those of one prompt contiguous.

    Args:
        step: number of the rollout in the run.
        config: settings it was made with.
        prompts: P prompts.
        condition: frozen text side, P rows.
        order: int64 [B, N], decoding order.
        latents: fp32 [B, N, C], finished latents.
        mask_steps: trained mask steps in ascending order.
        images: uint8 [B, 3, H, W].
        rewards: fp32 [B], combined reward; NaN where a scorer gave none.
        rewards_by_scorer: fp32 [B] per scorer.
        seconds: time by phase.
        head_tokens: head-token evaluations spent.
    """

    step: int
    config: RolloutConfig
    prompts: list[str]
    condition: Condition
    order: Tensor
    latents: Tensor
    mask_steps: list[MaskStep]
    images: Tensor
    rewards: Tensor
    rewards_by_scorer: dict[str, Tensor]
    seconds: dict[str, float] = field(default_factory=dict)
    head_tokens: int = 0


@dataclass(frozen=True)
class Evaluation:
    """Images generated for held-out or given prompts, one per prompt.

    Args:
        indices: their places in the prompt file.
        prompts: B prompts.
        metadata: their records.
        images: uint8 [B, 3, H, W].
        rewards: fp32 [B], or None when nothing scores them.
        rewards_by_scorer: fp32 [B] per scorer.
    """

    indices: list[int]
    prompts: list[str]
    metadata: list[dict[str, Any]]
    images: Tensor
    rewards: Tensor | None
    rewards_by_scorer: dict[str, Tensor]
