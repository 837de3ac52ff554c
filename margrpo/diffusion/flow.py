"""Stochastic transitions of a flow-matching head: an SDE with the marginals of the Euler sampler's ODE."""

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from margrpo.diffusion.schedule import with_timesteps
from margrpo.diffusion.transition import Transition


class FlowTransition(Transition):
    """Flow SDE on noise levels sigma_0 = 1 > ... > sigma_D = 0, for a head that predicts the velocity v (noise - data).

    With dt = sigma_(d+1) - sigma_d < 0 and e = noise_level * sqrt(sigma / (1 - sigma)), following Flow-GRPO
    (arXiv 2505.05470):

        mean = x_t (1 + e^2 dt / (2 sigma)) + v dt (1 + e^2 (1 - sigma) / (2 sigma)),    std = e sqrt(-dt)

    Where sigma is 1, e is computed with 1 - sigma_1 in the denominator. Later steps can be left to the ODE
    (MixGRPO, arXiv 2507.21802): mean = x_t + v dt, no density.
    """

    def __init__(
        self, timesteps: Tensor, sigmas: Tensor, noise_level: float = 0.7, stochastic_steps: int | None = None
    ) -> None:
        """Tabulate the kernels.

        Args:
            timesteps: [D], what the head is given.
            sigmas: [D + 1], descending in (0, 1], then 0.
            noise_level: scale of the noise, positive.
            stochastic_steps: only the first so many steps, 1..D, add noise; None for all.

        Raises:
            ValueError: noise_level or stochastic_steps is out of range.
        """
        num_steps = len(timesteps)
        if stochastic_steps is None:
            stochastic_steps = num_steps
        if not noise_level > 0:
            raise ValueError(f"noise_level must be positive, got {noise_level}")
        if not 1 <= stochastic_steps <= num_steps:
            raise ValueError(f"stochastic_steps must be in 1..{num_steps} or null for all, got {stochastic_steps}")
        sigmas = sigmas.double()
        sigma, dt = sigmas[:-1], sigmas.diff()
        diffusion = noise_level * torch.sqrt(sigma / (1 - torch.where(sigma == 1, sigmas[1], sigma)))
        diffusion[stochastic_steps:] = 0
        drift = diffusion.square() * dt / (2 * sigma)
        constants = torch.stack([1 + drift, dt + drift * (1 - sigma), diffusion * torch.sqrt(-dt), dt], dim=-1)
        super().__init__(timesteps, list(range(stochastic_steps)), constants)

    @classmethod
    def from_scheduler(
        cls,
        scheduler: FlowMatchEulerDiscreteScheduler,
        num_steps: int,
        noise_level: float = 0.7,
        stochastic_steps: int | None = None,
    ) -> "FlowTransition":
        """Take the noise levels of `num_steps` denoising steps from diffusers.

        Raises:
            ValueError: a value is out of range, or the scheduler's configuration is not supported.
        """
        accepted = {"use_dynamic_shifting": (False,), "invert_sigmas": (False,), "stochastic_sampling": (False,)}
        scheduler = with_timesteps(scheduler, num_steps, accepted)
        return cls(scheduler.timesteps, scheduler.sigmas, noise_level, stochastic_steps)

    def moments(self, prediction: Tensor, x_t: Tensor, step: int | Tensor) -> tuple[Tensor, Tensor]:
        """Mean fp32 [..., C] and std fp32 [..., 1] of the SDE step; see the base class."""
        sample_scale, velocity_scale, std, _ = self.constants(step, x_t.device)
        return sample_scale * x_t.float() + velocity_scale * prediction.float(), std

    def plain_step(self, prediction: Tensor, x_t: Tensor, step: int, noise: Tensor) -> Tensor:
        """Take one deterministic Euler step; see the base class."""
        dt = self.constants(step, x_t.device)[-1]
        return (x_t.float() + dt * prediction.float()).to(x_t.dtype)
