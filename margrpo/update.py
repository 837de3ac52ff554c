"""The loss of one trained mask step: the decisions of a rollout scored again by the policy and by the reference."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from margrpo.models.base import HybridModel, Prefix, concatenate_rows, expand_row, repeat_rows
from margrpo.objective.loss import KLEstimator, ObjectiveConfig, gaussian_kl, k3, policy_loss, weighted_mean
from margrpo.rollout.denoising import Scores, TokenDenoiser
from margrpo.rollout.types import MaskStep, Rollout


@dataclass(frozen=True)
class Reference:
    """The frozen policy to stay near to, on one rollout.

    Args:
        policy: the policy.
        denoiser: its head.
        prefix: its `image_prefix`, the same for every mask step.
    """

    policy: nn.Module
    denoiser: TokenDenoiser
    prefix: Prefix


def mask_step_loss(
    model: HybridModel,
    reference: Reference,
    rollout: Rollout,
    mask_step: MaskStep,
    advantage: Tensor,
    objective: ObjectiveConfig,
    denoiser: TokenDenoiser,
    *,
    on_policy: bool,
    total_weight: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean over the decisions of a mask step of the negated surrogate plus the KL penalty.

    Args:
        model: its policy is trained.
        reference: what the KL divergence is measured from.
        rollout: the rollout.
        mask_step: one of its mask steps.
        advantage: fp32 [B].
        objective: clipping and KL.
        denoiser: head of the policy.
        on_policy: no update was made since the rollout; see `policy_loss`.
        total_weight: fp32 scalar, sum of the decisions' weights, or its mean over ranks; see `weighted_mean`.

    Returns:
        the loss (a scalar), and detached scalars: the metrics of `policy_loss`, `policy_loss`, `loss`, and `kl`, the
        closed-form KL divergence in nats, averaged over channels and decisions.
    """
    decisions = mask_step.decisions
    prefix = image_prefix(model, model.policy, rollout)
    scores = score(model, model.policy, prefix, rollout, mask_step, denoiser)
    with torch.no_grad():
        reference_scores = score(model, reference.policy, reference.prefix, rollout, mask_step, reference.denoiser)
        kl = weighted_mean(kl_divergence(scores, reference_scores, "gaussian"), decisions.weight, total_weight)
    surrogate_loss, metrics = policy_loss(
        scores.log_prob,
        decisions.log_prob,
        advantage[decisions.image][decisions.place],
        decisions.weight,
        objective,
        on_policy=on_policy,
        total_weight=total_weight,
    )
    divergence = kl_divergence(scores, reference_scores, objective.kl_estimator)
    loss = surrogate_loss + objective.kl_weight * weighted_mean(divergence, decisions.weight, total_weight)
    return loss, {**metrics, "kl": kl, "policy_loss": surrogate_loss.detach(), "loss": loss.detach()}


def image_prefix(model: HybridModel, policy: nn.Module, rollout: Rollout) -> Prefix:
    """Compute a policy's prefix of each of B images; where guided scores need them, B unconditional rows follow."""
    config = rollout.config
    prefix = repeat_rows(model.prefix(policy, rollout.condition), config.group_size)
    if config.guided and config.score_guided:
        unconditional = model.prefix(policy, model.unconditional())
        prefix = concatenate_rows(prefix, expand_row(unconditional, len(rollout.order)))
    return prefix


def score(
    model: HybridModel,
    policy: nn.Module,
    prefix: Prefix,
    rollout: Rollout,
    mask_step: MaskStep,
    denoiser: TokenDenoiser,
) -> Scores:
    """Score the decisions of a mask step under a policy with its `image_prefix`; it sees what the rollout's saw."""
    config, decisions = rollout.config, mask_step.decisions
    batch = len(rollout.order)
    known, latents = rollout.order[:, : mask_step.start], rollout.latents
    images, tokens, guidance_scale = decisions.image, decisions.token, None
    if config.guided and config.score_guided:
        known, latents = torch.cat([known, known]), torch.cat([latents, latents])
        images, tokens = torch.cat([images, images + batch]), torch.cat([tokens, tokens])
        guidance_scale = config.guidance_scale
    z = model.predict_condition(policy, latents.to(next(iter(prefix.values())).dtype), known, prefix)
    conditions = denoiser.embed(z[images, tokens], guidance_scale).select(decisions.place)
    return denoiser.score(conditions, **decisions.payload)


def kl_divergence(scores: Scores, reference: Scores, estimator: KLEstimator) -> Tensor:
    """KL divergence of M transitions from the reference's, fp32 [M], averaged over channels; see `ObjectiveConfig`."""
    if estimator == "gaussian":
        return gaussian_kl(scores.mean, scores.std, reference.mean, reference.std)
    if estimator == "mean_k3":
        return k3(reference.mean - scores.mean).mean(-1)
    return k3(reference.log_prob - scores.log_prob)
