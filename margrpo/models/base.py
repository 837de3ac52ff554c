"""What the rollout and the update ask of an AR-diffusion hybrid model, whatever its family."""

from abc import ABC, abstractmethod
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from margrpo.diffusion.transition import Transition

Condition = dict[str, Tensor]
"""Frozen text side of P prompts: named tensors whose first dimension is P. Only its family knows the names."""

Prefix = dict[str, Tensor]
"""What a policy computes once per prompt, before any latents are known: named tensors whose first dimension is P."""


class Head(nn.Module, ABC):
    """Diffusion head: a per-token network, so that its cost is proportional to the tokens it is given."""

    @abstractmethod
    def embed_condition(self, z: Tensor) -> Tensor:
        """Map conditions z [M, E] to the head's width [M, W]; independent of the denoising step."""

    @abstractmethod
    def embed_timestep(self, timesteps: Tensor) -> Tensor:
        """Map timesteps fp32 [K] to the head's width [K, W]; independent of the token."""

    @abstractmethod
    def denoise(self, x: Tensor, embedding: Tensor) -> Tensor:
        """Predict from noisy tokens x [..., C] and the sum of both embeddings [..., W]; leading dimensions broadcast.

        Returns [..., C], or wider where the head predicts the variance too.
        """

    def forward(self, x: Tensor, timesteps: Tensor, z: Tensor) -> Tensor:
        """Run `denoise` on noisy tokens x [M, C] with their timesteps fp32 [M] and their conditions z [M, E]."""
        return self.denoise(x, self.embed_condition(z) + self.embed_timestep(timesteps))


class HybridModel(nn.Module, ABC):
    """An autoregressive policy that predicts a condition per token and a diffusion head that samples the token from it.

    Latents are token-major everywhere: [B, N, C], N tokens of C channels.
    """

    policy: nn.Module
    head: Head
    num_tokens: int
    token_channels: int

    @property
    def device(self) -> torch.device:
        """Where the policy is."""
        return next(self.policy.parameters()).device

    @abstractmethod
    def encode(self, prompts: list[str]) -> Condition:
        """Run the frozen text side on P prompts; what it cannot take of a long one is cut off."""

    @abstractmethod
    def count_truncated(self, prompts: list[str]) -> int:
        """Count the prompts of which `encode` cuts something off."""

    @abstractmethod
    def unconditional(self) -> Condition:
        """Condition of the unconditional branch of guidance, one row."""

    @abstractmethod
    def prefix(self, policy: nn.Module, condition: Condition) -> Prefix:
        """Compute the part of the policy that does not depend on latents, once per prompt [P, ...]."""

    @abstractmethod
    def predict_condition(self, policy: nn.Module, latents: Tensor, known: Tensor, prefix: Prefix) -> Tensor:
        """Predict the condition z [B, N, E] of every token; the same function at rollout and at update.

        Args:
            policy: the policy or the reference.
            latents: [B, N, C]; only the known tokens are read.
            known: int64 [B, K], indices of the known tokens in any order.
            prefix: rows of `prefix`, one per image [B, ...].
        """

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Decode finished latents [B, N, C] to images uint8 [B, 3, H, W]."""

    @abstractmethod
    def mask_schedule(self, steps: int) -> list[int]:
        """Number of tokens predicted by each effective mask step; sums to N, without zeros."""

    @abstractmethod
    def transition(self, denoising_steps: int, noise_level: float, stochastic_steps: int | None) -> Transition:
        """Kernel of the head's sampler, from the scheduler in the checkpoint."""

    @abstractmethod
    def save_pretrained(self, path: Path) -> None:
        """Write the official layout of the family, with the current policy."""

    @abstractmethod
    def policy_parts(self) -> dict[str, nn.Module]:
        """Named parts of the policy whose gradient norms are worth watching apart."""

    def freeze(self, *, train_head: bool) -> None:
        """Leave gradients to the policy alone (and to the head when asked); everything else is a constant."""
        policy_trainable = [p for p in self.policy.parameters() if p.requires_grad]
        self.requires_grad_(False)
        for parameter in policy_trainable:
            parameter.requires_grad_(True)
        self.head.requires_grad_(train_head)


def repeat_rows(rows: dict[str, Tensor], repeats: int) -> dict[str, Tensor]:
    """Repeat every row of a condition or prefix in place: P rows become P * repeats, contiguous per prompt."""
    return {name: tensor.repeat_interleave(repeats, dim=0) for name, tensor in rows.items()}


def expand_row(row: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """View a one-row condition or prefix as `count` equal rows, without copying."""
    return {name: tensor.expand(count, *tensor.shape[1:]) for name, tensor in row.items()}


def concatenate_rows(first: dict[str, Tensor], second: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stack the rows of two conditions or prefixes; along dimension 1 the shorter rows are padded with zeros."""
    stacked = {}
    for name, tensor in first.items():
        length = max(tensor.shape[1], second[name].shape[1])
        stacked[name] = torch.cat([_padded(tensor, length), _padded(second[name], length)])
    return stacked


def _padded(rows: Tensor, length: int) -> Tensor:
    return F.pad(rows, (0, 0) * (rows.dim() - 2) + (0, length - rows.shape[1]))
