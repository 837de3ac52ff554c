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
        embedded: [M, W], or [2 M, W] with guidance: the conditional rows, then the unconditional ones.
        guidance_scale: w of u + w (c - u); None without guidance.
    """

    embedded: Tensor
    guidance_scale: float | None = None

    def __len__(self) -> int:
        return len(self.embedded) if self.guidance_scale is None else len(self.embedded) // 2

    def select(self, rows: Tensor) -> "Conditions":
        """Gather tokens, rows int64 [K]."""
        if self.guidance_scale is not None:
            rows = torch.cat([rows, rows + len(self)])
        return Conditions(self.embedded[rows], self.guidance_scale)

    def without_guidance(self) -> "Conditions":
        """Keep the conditional branch alone."""
        return Conditions(self.embedded[: len(self)])


@dataclass(frozen=True)
class Trace:
    """Transitions kept while sampling M tokens at K denoising steps.

    Args:
        x_t: fp32 [K, M, C], state before the transition.
        x_prev: fp32 [K, M, C], state after it.
        log_prob: fp32 [K, M], per token, averaged over channels.
    """

    x_t: Tensor
    x_prev: Tensor
    log_prob: Tensor


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of M transitions, and the moments they come from.

    Args:
        log_prob: fp32 [M], averaged over channels.
        mean: fp32 [M, C].
        std: fp32, broadcasts against mean.
    """

    log_prob: Tensor
    mean: Tensor
    std: Tensor


class TokenDenoiser:
    """A head with its transition; counts the evaluations of single tokens in `head_tokens`.

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
        return Conditions(self.head.embed_condition(z), guidance_scale)

    def embed_timesteps(self, device: torch.device) -> Tensor:
        """Embed the timesteps of all denoising steps [D, W]."""
        return self.head.embed_timestep(self.transition.timesteps.to(device))

    @torch.no_grad()
    def sample(
        self, conditions: Conditions, noise: Tensor, kept_steps: list[int], *, plain: bool = False
    ) -> tuple[Tensor, Trace | None]:
        """Denoise M tokens.

        Args:
            conditions: of the tokens.
            noise: fp32 [1 + D, M, C], the initial state followed by the noise of each transition; deterministic ones
                leave theirs unread.
            kept_steps: ascending denoising steps whose transitions are returned.
            plain: take the official sampler's steps, which for flow matching are deterministic.

        Returns:
            end points fp32 [M, C], and the kept transitions (None when there are none to keep).
        """
        timesteps = self.embed_timesteps(noise.device)
        x = noise[0]
        kept: list[tuple[Tensor, Tensor, Tensor]] = []
        for step in range(self.transition.num_steps):
            prediction, conditional = self._predict(x, conditions, timesteps[step])
            if plain:
                x = self.transition.plain_step(prediction, x, step, noise[step + 1])
                continue
            x_prev, mean, std = self.transition.sample(prediction, x, step, noise[step + 1])
            if step in kept_steps:
                if conditions.guidance_scale is not None and not self.score_guided:
                    mean, std = self.transition.moments(conditional, x, step)
                kept.append((x, x_prev, token_log_prob(x_prev, mean, std)))
            x = x_prev
        if not kept:
            return x, None
        x_t, x_prev, log_prob = (torch.stack(tensors) for tensors in zip(*kept, strict=True))
        return x, Trace(x_t, x_prev, log_prob)

    def score(self, conditions: Conditions, x_t: Tensor, x_prev: Tensor, step: Tensor) -> Scores:
        """Score M transitions under `conditions`, with gradients where those have them.

        Args:
            conditions: one row per transition.
            x_t: fp32 [M, C].
            x_prev: fp32 [M, C].
            step: int64 [M], denoising step of each.
        """
        if not self.score_guided:
            conditions = conditions.without_guidance()
        timesteps = self.embed_timesteps(x_t.device)[step]
        if conditions.guidance_scale is not None:
            timesteps = torch.cat([timesteps, timesteps])
        prediction, _ = self._predict(x_t, conditions, timesteps)
        mean, std = self.transition.moments(prediction, x_t, step)
        return Scores(token_log_prob(x_prev, mean, std), mean, std)

    def _predict(self, x: Tensor, conditions: Conditions, timestep: Tensor) -> tuple[Tensor, Tensor]:
        """Return the guided and the conditional prediction, each [M, C]."""
        self.head_tokens += len(conditions.embedded)
        x = x.to(conditions.embedded.dtype)
        embedding = conditions.embedded + timestep
        if conditions.guidance_scale is None:
            prediction = self.head.denoise(x, embedding)
            return prediction, prediction
        conditional, unconditional = self.head.denoise(torch.cat([x, x]), embedding).chunk(2)
        return torch.lerp(unconditional, conditional, conditions.guidance_scale), conditional
