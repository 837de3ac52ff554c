"""Ancestral transitions of a DDPM head: the posterior of the forward process given the predicted clean token."""

import torch
from diffusers import DDPMScheduler
from torch import Tensor

from margrpo.diffusion.schedule import with_timesteps
from margrpo.diffusion.transition import Transition


class AncestralTransition(Transition):
    """Ancestral sampling for a head that predicts the noise eps (DDPM, arXiv 2006.11239, equations 6, 7 and 15).

    With a = alpha_bar of this timestep, a' = alpha_bar of the next one (1 after the last) and b = 1 - a / a':

        x_0  = (x_t - sqrt(1 - a) eps) / sqrt(a), clipped where the checkpoint says so
        mean = sqrt(a') b / (1 - a) x_0 + sqrt(a / a') (1 - a') / (1 - a) x_t,    std^2 = b (1 - a') / (1 - a)

    The last step has std 0, hence no density: it is deterministic and never trained.
    """

    def __init__(self, timesteps: Tensor, alphas_cumprod: Tensor, clip_range: float | None) -> None:
        """Tabulate the kernels.

        Args:
            timesteps: [D], what the head is given.
            alphas_cumprod: fp32 [D], alpha_bar of these timesteps, ascending in (0, 1).
            clip_range: x_0 is clipped to [-clip_range, clip_range]; None for no clipping.
        """
        self.clip_range = clip_range
        alpha = alphas_cumprod
        next_alpha = torch.cat([alpha[1:], alpha.new_ones(1)])
        beta = 1 - alpha / next_alpha
        clean_scale = next_alpha.sqrt() * beta / (1 - alpha)
        sample_scale = (alpha / next_alpha).sqrt() * (1 - next_alpha) / (1 - alpha)
        std = ((1 - next_alpha) / (1 - alpha) * beta).sqrt()
        constants = torch.stack([(1 - alpha).sqrt(), alpha.sqrt(), clean_scale, sample_scale, std], dim=-1)
        super().__init__(timesteps, std.nonzero().flatten().tolist(), constants)

    @classmethod
    def from_scheduler(cls, scheduler: DDPMScheduler, num_steps: int) -> "AncestralTransition":
        """Take the constants of `num_steps` denoising steps from diffusers.

        Raises:
            ValueError: num_steps is out of range, or the scheduler's configuration is not supported.
        """
        accepted = {
            "prediction_type": ("epsilon",),
            "variance_type": ("fixed_small", "fixed_small_log"),  # two ways to compute the same std
            "thresholding": (False,),
            "rescale_betas_zero_snr": (False,),  # eps says nothing about x_0 at an alpha_bar of 0
        }
        scheduler = with_timesteps(scheduler, num_steps, accepted)
        clip_range = scheduler.config.clip_sample_range if scheduler.config.clip_sample else None
        return cls(scheduler.timesteps, scheduler.alphas_cumprod[scheduler.timesteps], clip_range)

    def moments(self, prediction: Tensor, x_t: Tensor, step: int | Tensor) -> tuple[Tensor, Tensor]:
        """Mean fp32 [..., C] and std fp32 [..., 1] of the ancestral step; see the base class."""
        noise_level, signal_level, clean_scale, sample_scale, std = self.constants(step, x_t.device)
        x_t = x_t.float()
        clean = (x_t - noise_level * prediction.float()) / signal_level
        if self.clip_range is not None:
            clean = clean.clamp(-self.clip_range, self.clip_range)
        return clean_scale * clean + sample_scale * x_t, std

    def plain_step(self, prediction: Tensor, x_t: Tensor, step: int, noise: Tensor) -> Tensor:
        """Take one ancestral step, the same as `sample`; see the base class."""
        return self.sample(prediction, x_t, step, noise)[0]
