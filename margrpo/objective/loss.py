"""The clipped surrogate, the KL estimators, and their weighted mean over decisions."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from margrpo.objective.advantage import AdvantageScale

KLEstimator = Literal["gaussian", "mean_k3", "k3"]


@dataclass(frozen=True)
class ObjectiveConfig:
    """What is optimised.

    Args:
        advantage_scale: what centred rewards are divided by; see `group_advantages`.
        clip_low: the ratio is clipped below at 1 - clip_low (PPO, arXiv 1707.06347).
        clip_high: the ratio is clipped above at 1 + clip_high; larger than clip_low is "clip higher" (arXiv 2503.14476).
        max_log_ratio: the log ratio is clamped to this magnitude before the exponential.
        kl_weight: beta, factor of the KL penalty to the reference.
        kl_estimator: `gaussian`: closed form of the two transitions. `mean_k3`: exp(d) - d - 1 on the difference of
            their means, as the published runs had it. `k3`: the same on log-probabilities
            (http://joschu.net/blog/kl-approx.html).
    """

    advantage_scale: AdvantageScale = "group"
    clip_low: float = 0.2
    clip_high: float = 0.2
    max_log_ratio: float = 10.0
    kl_weight: float = 0.01
    kl_estimator: KLEstimator = "gaussian"

    def __post_init__(self) -> None:
        if not 0.0 < self.clip_low <= 1.0:
            raise ValueError(f"clip_low is {self.clip_low}; it must lie in (0, 1]")
        if not self.clip_high > 0.0:
            raise ValueError(f"clip_high is {self.clip_high}; it must be positive")
        if not self.max_log_ratio > 0.0:
            raise ValueError(f"max_log_ratio is {self.max_log_ratio}; it must be positive")
        if not self.kl_weight >= 0.0:
            raise ValueError(f"kl_weight is {self.kl_weight}; it must not be negative")


def weighted_mean(values: Tensor, weight: Tensor) -> Tensor:
    """Return sum(w x) / sum(w) over M decisions; exactly 0, with a gradient path, when nothing is selected."""
    total = weight.sum()
    return (values * weight).sum() / torch.where(total > 0, total, 1.0)


def policy_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    weight: Tensor,
    config: ObjectiveConfig,
    *,
    on_policy: bool,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the negated surrogate, averaged over M decisions, and metrics.

    Args:
        log_prob: fp32 [M], under the policy that is trained.
        old_log_prob: fp32 [M], as recorded by the rollout.
        advantage: fp32 [M], of each decision's image.
        weight: fp32 [M].
        config: clipping.
        on_policy: nothing was updated since the rollout: the ratio is exp(l - stopgrad(l)), 1 in value; the recorded
            log-probabilities are only compared. Otherwise the ratio to them is used, clipped.

    Returns:
        a scalar, and `ratio_deviation` (largest |ratio - 1| to the recorded log-probabilities) and `clip_share`
        (weighted share of decisions whose gradient is clipped away).
    """
    log_ratio = (log_prob - old_log_prob).clamp(-config.max_log_ratio, config.max_log_ratio)
    deviation = (log_ratio.detach().exp() - 1.0).abs()
    metrics = {"ratio_deviation": deviation.max() if len(deviation) else deviation.sum()}
    if on_policy:
        surrogate = (log_prob - log_prob.detach()).exp() * advantage
        metrics["clip_share"] = torch.zeros_like(metrics["ratio_deviation"])
    else:
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
        surrogate = torch.minimum(ratio * advantage, clipped * advantage)
        is_clipped = (clipped * advantage < ratio * advantage).float()
        metrics["clip_share"] = weighted_mean(is_clipped, weight)
    return -weighted_mean(surrogate, weight), metrics


def gaussian_kl(mean: Tensor, std: Tensor, reference_mean: Tensor, reference_std: Tensor) -> Tensor:
    """KL(N(mean, std^2) || N(reference)) in nats, averaged over channels: [M, C] to [M]."""
    variance_ratio = (std / reference_std).square()
    distance = ((mean - reference_mean) / reference_std).square()
    return (0.5 * (variance_ratio + distance - 1.0 - variance_ratio.log())).expand_as(mean).mean(-1)


def k3(difference: Tensor) -> Tensor:
    """exp(d) - d - 1, elementwise; never negative."""
    return difference.exp() - difference - 1.0
