"""Masked autoregressive sampling: plain generation, and the rollout that also keeps what the update needs.

Inside this file tokens are in decoding order: tokens known before a mask step are the first ones, those it predicts
follow, and all that are still unknown come last, so that every set of tokens is a slice.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from margrpo.models.base import Condition, HybridModel, concatenate_rows, expand_row, repeat_rows
from margrpo.rollout.config import RolloutConfig, SamplingConfig
from margrpo.rollout.decisions import StepRecord, Trajectories, build_mask_step, critical_tokens
from margrpo.rollout.denoising import Conditions, TokenDenoiser
from margrpo.rollout.noise import Noise, Stream
from margrpo.rollout.plan import RolloutPlan
from margrpo.rollout.types import MaskStep


@dataclass(frozen=True)
class Sampled:
    """Result of a rollout before it is decoded and scored; fields as in `Rollout`."""

    order: Tensor
    latents: Tensor
    mask_steps: list[MaskStep]
    head_tokens: int


class _Walk:
    """State of a batch of images while their tokens become known."""

    def __init__(
        self, model: HybridModel, policy: nn.Module, condition: Condition, sampling: SamplingConfig, noise: Noise
    ) -> None:
        self.model = model
        self.policy = policy
        self.noise = noise
        self.order = noise.order()
        batch, _ = self.order.shape
        prefix = model.prefix(policy, condition)
        rows = next(iter(condition.values())).shape[0]
        self.prefix = repeat_rows(prefix, batch // rows)
        self.guidance_scale = sampling.guidance_scale if sampling.guided else None
        if self.guidance_scale is not None:
            unconditional = model.prefix(policy, model.unconditional())
            self.prefix = concatenate_rows(self.prefix, expand_row(unconditional, batch))
        self.latents = torch.zeros(
            batch, model.num_tokens, model.token_channels, dtype=torch.float32, device=self.order.device
        )
        self.start = 0

    def predict_conditions(self, stop: int) -> Tensor:
        """Return z of tokens start..stop: [B * n, E], with guidance [2 * B * n, E], the unconditional rows last."""
        known, wanted, latents = self.order[:, : self.start], self.order[:, self.start : stop], self.latents
        if self.guidance_scale is not None:
            known, wanted, latents = (torch.cat([tensor, tensor]) for tensor in (known, wanted, latents))
        dtype = next(iter(self.prefix.values())).dtype
        z = self.model.predict_condition(self.policy, latents.to(dtype), known, self.prefix)
        return z.gather(1, wanted[..., None].expand(-1, -1, z.shape[2])).flatten(0, 1)

    def draw_noise(self, index: int, predicted_stop: int, stop: int, draws: int) -> Tensor:
        """Return noise [draws, B * n, C] of tokens start..stop.

        The predicted tokens draw from a stream of their own: an image does not depend on what else is denoised.
        """
        noise = self.noise.normal(Stream.PREDICTED, index, self.order[:, self.start : predicted_stop], draws)
        if stop > predicted_stop:
            rest = self.noise.normal(Stream.UNKNOWN, index, self.order[:, predicted_stop:stop], draws)
            noise = torch.cat([noise, rest], dim=2)
        return noise.flatten(1, 2)

    def put(self, tokens: Tensor) -> None:
        """Make the next tokens known, fp32 [B, n, C]."""
        stop = self.start + tokens.shape[1]
        places = self.order[:, self.start : stop, None].expand(-1, -1, tokens.shape[2])
        self.latents = self.latents.scatter(1, places, tokens)
        self.start = stop


@torch.no_grad()
def generate(
    model: HybridModel,
    policy: nn.Module,
    condition: Condition,
    sampling: SamplingConfig,
    denoiser: TokenDenoiser,
    noise: Noise,
    *,
    plain: bool = True,
) -> Tensor:
    """Generate latents fp32 [B, N, C]; each token is denoised once.

    Args:
        model: the model.
        policy: its policy, or another with the same interface.
        condition: P rows; B must be a multiple of P.
        sampling: steps and guidance.
        denoiser: the model's head with the transition of `sampling.denoising_steps`.
        noise: source of B samples' noise.
        plain: use the official sampler's steps instead of the stochastic ones of training.
    """
    walk = _Walk(model, policy, condition, sampling, noise)
    batch, draws = len(walk.order), 1 + denoiser.transition.num_steps
    for index, count in enumerate(model.mask_schedule(sampling.mask_steps)):
        stop = walk.start + count
        conditions = denoiser.embed(walk.predict_conditions(stop), walk.guidance_scale)
        end_points, _ = denoiser.sample(conditions, walk.draw_noise(index, stop, stop, draws), [], plain=plain)
        walk.put(end_points.unflatten(0, (batch, count)))
    return walk.latents


@torch.no_grad()
def roll_out(
    model: HybridModel,
    condition: Condition,
    config: RolloutConfig,
    plan: RolloutPlan,
    denoiser: TokenDenoiser,
    noise: Noise,
) -> Sampled:
    """Sample B images and keep the decisions of the planned steps.

    Every unknown token is denoised only at the mask steps whose end points or transitions are asked for; elsewhere
    only the predicted tokens are.

    Args:
        model: the model; its policy samples.
        condition: P rows; B = P * group_size.
        config: settings of the rollout.
        plan: steps to train.
        denoiser: the model's head with the transition of `config.denoising_steps`.
        noise: source of B samples' noise.
    """
    walk = _Walk(model, model.policy, condition, config, noise)
    batch, total, draws = len(walk.order), model.num_tokens, 1 + denoiser.transition.num_steps
    records: list[StepRecord] = []
    composite: list[Tensor] = []
    previous: Tensor | None = None
    for index, count in enumerate(plan.schedule):
        start, predicted_stop = walk.start, walk.start + count
        stop = total if index in plan.complete else predicted_stop
        z = walk.predict_conditions(stop)
        conditions = denoiser.embed(z, walk.guidance_scale)
        kept_steps = plan.trained.get(index, [])
        step_noise = walk.draw_noise(index, predicted_stop, stop, draws)
        flat_end_points, trace = denoiser.sample(conditions, step_noise, kept_steps)
        end_points = flat_end_points.unflatten(0, (batch, stop - start))
        if trace is not None:
            trajectories = None
            if config.trajectory_source == "per_step" and config.extra_trajectories:
                trajectories = draw_trajectories(
                    denoiser, conditions, walk, index * config.extra_trajectories, config, kept_steps
                )
            before = previous[:, -(stop - start) :] if config.checks_consistency and previous is not None else None
            records.append(
                StepRecord(
                    index, start, predicted_stop, conditions, kept_steps, trace, end_points, before, trajectories
                )
            )
        previous = end_points if index in plan.complete else None
        # A copy: a view would keep the conditions of all tokens, at every step, until the end.
        composite.append(z.unflatten(0, (-1, stop - start))[:batch, :count].clone())
        walk.put(end_points[:, :count])

    in_order = walk.order[..., None].expand(-1, -1, model.token_channels)
    final = walk.latents.gather(1, in_order)
    shared: Trajectories | None = None
    if config.trajectory_source == "composite" and config.extra_trajectories:
        conditions = denoiser.embed(torch.cat(composite, dim=1).flatten(0, 1))
        wanted = sorted({step for steps in plan.trained.values() for step in steps})
        walk.start = 0
        shared = draw_trajectories(denoiser, conditions, walk, 0, config, wanted)
    critical = critical_tokens(config, shared, final)
    mask_steps = [build_mask_step(record, walk.order, final, shared, critical, config, denoiser) for record in records]
    return Sampled(walk.order, walk.latents, mask_steps, denoiser.head_tokens)


def draw_trajectories(
    denoiser: TokenDenoiser,
    conditions: Conditions,
    walk: _Walk,
    first_index: int,
    config: RolloutConfig,
    kept_steps: list[int],
) -> Trajectories:
    """Denoise tokens from `walk.start` on again, once per extra trajectory, each with noise of its own.

    The noise has the indices from `first_index` on.
    """
    tokens = walk.order[:, walk.start :][:, : len(conditions) // len(walk.order)]
    draws = 1 + denoiser.transition.num_steps
    noise = [
        walk.noise.normal(Stream.TRAJECTORY, index, tokens, draws).flatten(1, 2)
        for index in range(first_index, first_index + config.extra_trajectories)
    ]
    end_points, trace = denoiser.sample(conditions, torch.stack(noise, dim=1), kept_steps)
    assert trace is not None
    return Trajectories(kept_steps, end_points.unflatten(1, tokens.shape), trace.x_t, trace.x_prev)
