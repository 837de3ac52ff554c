"""Runs the diffusion head on flat lists of tokens: sampling them, and scoring transitions that were sampled."""

from dataclasses import dataclass

import torch
from torch import Tensor

from margrpo.diffusion.transition import Transition, token_log_prob
from margrpo.models.base import Head


@dataclass(frozen=True)
class Conditions:
    """Conditions of M tokens in the head's width, embedded once and used at every denoising step.

    Args:
        embedded: [M, W], or [2, M, W] with guidance: the conditional branch, then the unconditional one.
        guidance_scale: w of u + w (c - u); None without guidance.
    """

    embedded: Tensor
    guidance_scale: float | None = None

    def __len__(self) -> int:
        return self.embedded.shape[-2]

    def select(self, rows: Tensor) -> "Conditions":
        """Gather tokens, rows int64 [K]."""
        return Conditions(self.embedded.index_select(-2, rows), self.guidance_scale)

    def without_guidance(self) -> "Conditions":
        """Keep the conditional branch alone."""
        return self if self.guidance_scale is None else Conditions(self.embedded[0])


@dataclass(frozen=True)
class Trace:
    """Transitions kept while sampling M tokens at K denoising steps; S may be no dimension at all.

    Args:
        x_t: fp32 [K, S, M, C], state before the transition.
        x_prev: fp32 [K, S, M, C], state after it.
        log_prob: fp32 [K, S, M], per token, averaged over channels.
        std: fp32 [K, S, M, 1 or C], of the kernel that `log_prob` is the density of.
    """

    x_t: Tensor
    x_prev: Tensor
    log_prob: Tensor
    std: Tensor


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of transitions, and the moments they come from.

    Args:
        log_prob: fp32 [..., M], averaged over channels.
        mean: fp32 [..., M, C].
        std: fp32, broadcasts against mean.
    """

    log_prob: Tensor
    mean: Tensor
    std: Tensor


class TokenDenoiser:
    """A head with its transition; counts the evaluations of single tokens in `head_tokens`.

    Trajectories of the same tokens are given together, as a dimension before the tokens: most of the head's work is the
    modulation, which depends on condition and denoising step alone, and is then done once for all of them.

    Args:
        head: the diffusion head.
        transition: kernels of its denoising steps.
        score_guided: score with the guided prediction; otherwise with the conditional one.
    """

    def __init__(self, head: Head, transition: Transition, *, score_guided: bool) -> None:
        self.head = head
        self.transition = transition
        self.score_guided = score_guided
        self.head_tokens = 0

    def embed(self, z: Tensor, guidance_scale: float | None = None) -> Conditions:
        """Embed conditions z [M, E]; with guidance [2 M, E], the unconditional rows last."""
        embedded = self.head.embed_condition(z)
        return Conditions(embedded if guidance_scale is None else embedded.unflatten(0, (2, -1)), guidance_scale)

    def embed_timesteps(self, device: torch.device) -> Tensor:
        """Embed the timesteps of all denoising steps [D, W]."""
        return self.head.embed_timestep(self.transition.timesteps.to(device))

    @torch.no_grad()
    def sample(
        self, conditions: Conditions, noise: Tensor, kept_steps: list[int], *, plain: bool = False
    ) -> tuple[Tensor, Trace | None]:
        """Denoise M tokens, each once, or S times with a dimension S before M in `noise` and in all that is returned.

        Args:
            conditions: of the tokens.
            noise: fp32 [1 + D, M, C] or [1 + D, S, M, C], the initial state followed by the noise of each transition;
                deterministic ones leave theirs unread.
            kept_steps: ascending denoising steps whose transitions are returned.
            plain: take the official sampler's steps, which for flow matching are deterministic.

        Returns:
            end points fp32 [M, C] or [S, M, C], and the kept transitions (None when there are none to keep).
        """
        timesteps = self.embed_timesteps(noise.device)
        x = noise[0]
        kept: list[tuple[Tensor, ...]] = []
        for step in range(self.transition.num_steps):
            prediction, conditional = self._predict(x, conditions, timesteps[step])
            if plain:
                x = self.transition.plain_step(prediction, x, step, noise[step + 1])
                continue
            x_prev, mean, std = self.transition.sample(prediction, x, step, noise[step + 1])
            if step in kept_steps:
                if conditions.guidance_scale is not None and not self.score_guided:
                    mean, std = self.transition.moments(conditional, x, step)
                kept.append((x, x_prev, token_log_prob(x_prev, mean, std), std.expand(*x.shape[:-1], -1)))
            x = x_prev
        if not kept:
            return x, None
        return x, Trace(*(torch.stack(tensors) for tensors in zip(*kept, strict=True)))

    def score(
        self, conditions: Conditions, x_t: Tensor, x_prev: Tensor, step: Tensor, std: Tensor | None = None
    ) -> Scores:
        """Score transitions under `conditions`, with gradients where those have them.

        Args:
            conditions: M rows.
            x_t: fp32 [M, C], or [S, M, C] for S transitions per row.
            x_prev: fp32, as x_t.
            step: int64 [M], denoising step of each row.
            std: of the kernels, broadcasts against x_t; None for what the head predicts. The update passes the one of
                the rollout: a predicted variance is a constant of the update.
        """
        if not self.score_guided:
            conditions = conditions.without_guidance()
        prediction, _ = self._predict(x_t, conditions, self.embed_timesteps(x_t.device)[step])
        mean, predicted_std = self.transition.moments(prediction, x_t, step)
        std = predicted_std if std is None else std
        return Scores(token_log_prob(x_prev, mean, std), mean, std)

    def _predict(self, x: Tensor, conditions: Conditions, timestep: Tensor) -> tuple[Tensor, Tensor]:
        """Return the guided and the conditional prediction, each as x [..., M, C]; timestep is [W] or [M, W]."""
        branches = 1 if conditions.guidance_scale is None else 2
        self.head_tokens += branches * x.shape[:-1].numel()
        x = x.to(conditions.embedded.dtype)
        embedding = conditions.embedded + timestep
        if conditions.guidance_scale is None:
            prediction = self.head.denoise(x, embedding)
            return prediction, prediction
        conditional, unconditional = self.head.denoise(torch.stack([x, x], dim=-3), embedding).unbind(-3)
        return self.transition.guide(conditional, unconditional, conditions.guidance_scale), conditional
