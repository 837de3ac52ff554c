"""Ancestral transitions of a DDPM head that predicts the noise and how large the variance is, on a cosine process."""

import re

import torch
from torch import Tensor

from margrpo.diffusion.transition import Transition

TRAIN_TIMESTEPS = 1000


def cosine_alphas_cumprod() -> Tensor:
    """Alpha_bar of the 1000 training timesteps, float64: the cosine schedule (arXiv 2102.09672, equation 17)."""
    time = torch.arange(TRAIN_TIMESTEPS + 1, dtype=torch.float64) / TRAIN_TIMESTEPS
    alpha_bar = torch.cos((time + 0.008) / 1.008 * torch.pi / 2).square()
    return (1 - (1 - alpha_bar[1:] / alpha_bar[:-1]).clamp(max=0.999)).cumprod(0)


def respaced_timesteps(spacing: str) -> list[int]:
    """Timesteps that a sampler with fewer steps visits, ascending in 0..999.

    Args:
        spacing: `"N"`: N timesteps from 0 to 999 at equal distances, rounded; `"ddimN"`: the N multiples of an integer.

    Raises:
        ValueError: another form, or a number of steps that the form does not give.
    """
    match = re.fullmatch(r"(ddim)?(\d+)", spacing)
    if match is None:
        raise ValueError(f"spacing {spacing!r} is not supported; accepted: a number such as '25', or such as 'ddim25'")
    count = int(match[2])
    if not 2 <= count <= TRAIN_TIMESTEPS:
        raise ValueError(f"spacing {spacing!r}: the number of denoising steps must be in 2..{TRAIN_TIMESTEPS}")
    if match[1]:
        for stride in range(1, TRAIN_TIMESTEPS + 1):
            timesteps = list(range(0, TRAIN_TIMESTEPS, stride))
            if len(timesteps) == count:
                return timesteps
        raise ValueError(f"spacing {spacing!r}: no integer stride gives {count} of {TRAIN_TIMESTEPS} timesteps")
    # Summed, not multiplied: the rounding errors decide which way a half is rounded.
    distance, position, rounded = (TRAIN_TIMESTEPS - 1) / (count - 1), 0.0, []
    for _ in range(count):
        rounded.append(round(position))
        position += distance
    return rounded


class LearnedVarianceTransition(Transition):
    """Ancestral sampling for a head that predicts [eps, v] (improved DDPM, arXiv 2102.09672, equation 15).

    With a = alpha_bar of this timestep, a' = alpha_bar of the next one (1 after the last) and b = 1 - a / a':

        x_0  = x_t / sqrt(a) - sqrt(1 / a - 1) eps, never clipped
        mean = sqrt(a') b / (1 - a) x_0 + sqrt(a / a') (1 - a') / (1 - a) x_t
        log std^2 = f log b + (1 - f) log(b (1 - a') / (1 - a)),    f = (v + 1) / 2, not clamped

    The last step adds no noise, hence has no density: it is deterministic and never trained. Its second logarithm, that
    of 0, is the one of the step before.
    """

    def __init__(self, timesteps: list[int]) -> None:
        """Tabulate the kernels; timesteps: ascending in 0..999, at least two."""
        alpha = cosine_alphas_cumprod()[timesteps].flip(0)
        next_alpha = torch.cat([alpha[1:], alpha.new_ones(1)])
        beta = 1 - alpha / next_alpha
        posterior_variance = beta * (1 - next_alpha) / (1 - alpha)
        posterior_variance[-1] = posterior_variance[-2]
        constants = [
            alpha.rsqrt(),
            (1 / alpha - 1).sqrt(),
            next_alpha.sqrt() * beta / (1 - alpha),
            (alpha / next_alpha).sqrt() * (1 - next_alpha) / (1 - alpha),
            beta.log(),
            posterior_variance.log(),
        ]
        descending = torch.tensor(timesteps).flip(0)
        super().__init__(descending, list(range(len(timesteps) - 1)), torch.stack(constants, dim=-1))

    def x_start(self, prediction: Tensor, x_t: Tensor, step: int | Tensor) -> Tensor:
        """Predict the clean token x_0, fp32 [..., C], from the arguments of `moments`."""
        sample_scale, noise_scale, *_ = self.constants(step, x_t.device)
        noise, _ = prediction.float().chunk(2, dim=-1)
        return sample_scale * x_t.float() - noise_scale * noise

    def moments(self, prediction: Tensor, x_t: Tensor, step: int | Tensor) -> tuple[Tensor, Tensor]:
        """Mean and std, both fp32 [..., C], from a prediction [..., 2 C]; see the base class."""
        _, _, clean_scale, sample_scale, log_beta, log_posterior_variance = self.constants(step, x_t.device)
        mean = clean_scale * self.x_start(prediction, x_t, step) + sample_scale * x_t.float()
        _, variance = prediction.float().chunk(2, dim=-1)
        log_variance = torch.lerp(log_posterior_variance, log_beta, (variance + 1) / 2)
        return mean, torch.exp(0.5 * log_variance)

    def plain_step(self, prediction: Tensor, x_t: Tensor, step: int, noise: Tensor) -> Tensor:
        """Take one ancestral step, the same as `sample`; see the base class."""
        return self.sample(prediction, x_t, step, noise)[0]

    def guide(self, conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
        """Guide the noise alone; the variance stays that of the conditional prediction."""
        noise, variance = conditional.chunk(2, dim=-1)
        return torch.cat([torch.lerp(unconditional.chunk(2, dim=-1)[0], noise, scale), variance], dim=-1)
