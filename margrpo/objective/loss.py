"""The clipped surrogate, the KL estimators, and their weighted mean over decisions."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from margrpo.objective.advantage import AdvantageScale

KLEstimator = Literal["gaussian", "mean_k3", "k3"]


@dataclass(frozen=True)
class ObjectiveConfig:
    """What is optimised: surrogate - kl_weight * KL, averaged over the decisions of a mask step.

    Args:
        advantage_scale: what centred rewards are divided by: the standard deviation of their `group` (GRPO, arXiv
            2402.03300) or of the `batch`, or `none` (Dr. GRPO, arXiv 2503.20783).
        clip_low: with more than one update per rollout the surrogate is
            min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (PPO, arXiv 1707.06347), r the ratio of the new to the
            recorded probability of a decision; in (0, 1].
        clip_high: see clip_low; larger than it is "clip-higher" (DAPO, arXiv 2503.14476).
        max_log_ratio: log r is clamped to +- this before the exponential; beyond it a decision has no gradient.
        kl_weight: beta, factor of the KL divergence of policy from reference.
        kl_estimator: one number per decision. `gaussian`: closed form of the two transitions,
            (mean - reference_mean)^2 / (2 std^2) averaged over channels. `mean_k3`: exp(d) - d - 1 averaged over
            channels, d = reference_mean - mean, which is what the published runs used. `k3`: exp(d) - d - 1,
            d = reference_log_prob - log_prob (http://joschu.net/blog/kl-approx.html).

    Raises:
        ValueError: naming the field and what it accepts.
    """

    advantage_scale: AdvantageScale = "group"
    clip_low: float = 0.2
    clip_high: float = 0.2
    max_log_ratio: float = 10.0
    kl_weight: float = 0.01
    kl_estimator: KLEstimator = "gaussian"

    def __post_init__(self) -> None:
        for name, choices in (("advantage_scale", get_args(AdvantageScale)), ("kl_estimator", get_args(KLEstimator))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}; accepted: {', '.join(choices)}")
        if not 0.0 < self.clip_low <= 1.0:
            raise ValueError(f"clip_low is {self.clip_low}; it must lie in (0, 1]")
        for name in ("clip_high", "max_log_ratio"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")
        if not self.kl_weight >= 0.0:
            raise ValueError(f"kl_weight is {self.kl_weight}; it must not be negative")


def weighted_mean(values: Tensor, weight: Tensor, total_weight: Tensor | None = None) -> Tensor:
    """Return sum(w x) / total_weight over M decisions; exactly 0, with a gradient path, when nothing is selected.

    Args:
        values: fp32 [M].
        weight: fp32 [M], not negative.
        total_weight: fp32 scalar; sum(w) when None. Ranks that average their results pass the mean of their sums, and
            so get the mean over the decisions of all.
    """
    total = weight.sum() if total_weight is None else total_weight
    return (values * weight).sum() / torch.where(total > 0, total, 1.0)


def policy_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    weight: Tensor,
    config: ObjectiveConfig,
    *,
    on_policy: bool,
    total_weight: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the negated surrogate averaged over M decisions, and metrics.

    Args:
        log_prob: fp32 [M], under the policy that is trained.
        old_log_prob: fp32 [M], as recorded by the rollout.
        advantage: fp32 [M], of each decision's image.
        weight: fp32 [M], not negative; 1 / S for each of the S trajectories of a critical token, else 1.
        config: clipping.
        on_policy: nothing was updated since the rollout: the ratio is exp(l - stopgrad(l)), 1 in value, and the
            recorded log-probabilities are only compared. Otherwise the ratio to them is used, clipped.
        total_weight: see `weighted_mean`.

    Returns:
        a scalar, and as detached scalars `ratio_deviation`, the largest |ratio - 1| to the recorded log-probabilities,
        and `clip_share` in [0, 1], the weighted share of decisions whose gradient is clipped away.
    """
    log_ratio = (log_prob - old_log_prob).clamp(-config.max_log_ratio, config.max_log_ratio)
    ratio = log_ratio.exp()
    deviation = (ratio.detach() - 1.0).abs()
    if on_policy:
        surrogate = (log_prob - log_prob.detach()).exp() * advantage
        clipped_away = torch.zeros_like(deviation)
    else:
        clipped = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high) * advantage
        surrogate = torch.minimum(ratio * advantage, clipped)
        clipped_away = (clipped < ratio * advantage).float()
    metrics = {
        "ratio_deviation": deviation.max() if len(deviation) else deviation.sum(),
        "clip_share": weighted_mean(clipped_away, weight, total_weight),
    }
    return -weighted_mean(surrogate, weight, total_weight), metrics


def k3(difference: Tensor) -> Tensor:
    """exp(d) - d - 1, elementwise, of a float tensor of any shape; never below 0 but for rounding."""
    # Not exp(d) - d - 1: its rounding error of 1e-7 is larger than a KL divergence early in training.
    return difference.expm1() - difference


def gaussian_kl(mean: Tensor, std: Tensor, reference_mean: Tensor, reference_std: Tensor) -> Tensor:
    """KL(N(mean, std^2) || N(reference_mean, reference_std^2)) in nats, averaged over channels.

    Args:
        mean: fp32 [M, C].
        std: fp32, positive, broadcasts against mean.
        reference_mean: fp32 [M, C].
        reference_std: fp32, positive, broadcasts against mean.

    Returns:
        fp32 [M]; with equal standard deviations the mean of (mean - reference_mean)^2 / (2 std^2).
    """
    log_variance_ratio = 2.0 * (std / reference_std).log()
    return 0.5 * (((mean - reference_mean) / reference_std).square() + k3(log_variance_ratio)).mean(-1)


def image_nats(kl: Tensor, channels: int, tokens: int, denoising_steps: int) -> Tensor:
    """Sum a KL divergence over an image, in nats.

    Args:
        kl: fp32, any shape, nats averaged over the channels of trained decisions.
        channels: C of a token.
        tokens: N of an image.
        denoising_steps: those with a density, by which each token is made.
    """
    return kl * (channels * tokens * denoising_steps)
