"""The interface of a transition: the Gaussian kernels N(mean, std^2) of the denoising steps of a head's sampler."""

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor


class Transition(ABC):
    """Kernels of denoising steps d = 0..D-1, each taking x_t to x_prev; the first x_t is drawn from N(0, 1).

    All tensors are token-major with channels last. Inputs may have any float dtype; the maths is fp32.

    Attributes:
        num_steps: D.
        timesteps: fp32 [D] on the CPU, what the head is given at each denoising step.
        trainable_steps: the denoising steps that have a density, ascending. The others are deterministic.
    """

    def __init__(self, timesteps: Tensor, trainable_steps: list[int], constants: Tensor) -> None:
        """Keep the tables.

        Args:
            timesteps: [D], any dtype.
            trainable_steps: the denoising steps with a density.
            constants: [D, K], the K constants of each step, in the order in which the subclass unpacks them.
        """
        self.num_steps = len(timesteps)
        self.timesteps = timesteps.float()
        self.trainable_steps = trainable_steps
        self._constants = constants.float()
        self._constants_on: dict[torch.device, Tensor] = {}

    @abstractmethod
    def moments(self, prediction: Tensor, x_t: Tensor, step: int | Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the kernel.

        Args:
            prediction: the head's output for x_t, [..., C], or wider where the head also predicts the variance.
            x_t: [..., C].
            step: one denoising step for all tokens, or int64 [...] on the device of x_t, one for each token.

        Returns:
            mean: fp32 [..., C].
            std: fp32, broadcasts against mean; 0 at a deterministic step.
        """

    @abstractmethod
    def plain_step(self, prediction: Tensor, x_t: Tensor, step: int, noise: Tensor) -> Tensor:
        """Take one step of the official plain sampler.

        Args:
            prediction: the head's output for x_t, as in `moments`.
            x_t: [..., C].
            step: the denoising step.
            noise: standard normal [..., C]; unread where the plain sampler is deterministic.

        Returns:
            x_prev [..., C] in the dtype of x_t.
        """

    def sample(self, prediction: Tensor, x_t: Tensor, step: int, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Draw x_prev from the kernel.

        The density to score is that of the returned x_prev, after its rounding to the dtype of x_t.

        Args:
            prediction: the head's output for x_t, as in `moments`.
            x_t: [..., C].
            step: the denoising step.
            noise: standard normal [..., C]; unread at a deterministic step.

        Returns:
            x_prev [..., C] in the dtype of x_t, and the moments.
        """
        mean, std = self.moments(prediction, x_t, step)
        x_prev = mean + std * noise.float() if step in self.trainable_steps else mean
        return x_prev.to(x_t.dtype), mean, std

    def guide(self, conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
        """Apply classifier-free guidance (arXiv 2207.12598) to predictions [..., C]: u + scale (c - u)."""
        return torch.lerp(unconditional, conditional, scale)

    def constants(self, step: int | Tensor, device: torch.device) -> tuple[Tensor, ...]:
        """Look up the K constants of `step`, each fp32 [..., 1] on `device`, without a host synchronisation."""
        if device not in self._constants_on:
            # Validation runs under inference mode: a table cached there could not take part in a later backward pass.
            with torch.inference_mode(False):
                self._constants_on[device] = self._constants.to(device)
        return self._constants_on[device][step].unsqueeze(-1).unbind(-2)


def log_prob(x_prev: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Log density of N(mean, std^2) at x_prev, elementwise.

    Args:
        x_prev: [..., C], any dtype; the caller detaches it.
        mean: fp32 [..., C].
        std: fp32, positive, broadcasts against mean.

    Returns:
        fp32 [..., C].
    """
    return -0.5 * ((x_prev.float() - mean) / std).square() - std.log() - 0.5 * math.log(2 * math.pi)


def token_log_prob(x_prev: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Log density of a token, averaged over its C channels: fp32 [...], from the arguments of `log_prob`."""
    return log_prob(x_prev, mean, std).mean(-1)
