"""Diffusion head of Harmon: MAR's MLP over single tokens, modulated by the sum of condition and timestep."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from margrpo.models.base import Head

FREQUENCY_CHANNELS = 256
NORM_EPS = 1e-6


def timestep_frequencies(timesteps: Tensor) -> Tensor:
    """Sinusoidal embedding fp32 [K, 256] of timesteps fp32 [K] among the 1000 of training; cosines first."""
    half = FREQUENCY_CHANNELS // 2
    steps = torch.arange(half, dtype=torch.float32, device=timesteps.device)
    angles = timesteps.float()[:, None] * torch.exp(-math.log(10000.0) * steps / half)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class TimestepEmbedding(nn.Module):
    """Two linear layers on the frequencies of a timestep."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(FREQUENCY_CHANNELS, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, frequencies: Tensor) -> Tensor:
        """Embed `timestep_frequencies` [K, 256] to [K, W]."""
        return self.mlp(frequencies)


class ResidualBlock(nn.Module):
    """Gated residual MLP whose shift, scale and gate come from the embedding (adaLN)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_ln = nn.LayerNorm(width, eps=NORM_EPS)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 3 * width))

    def forward(self, h: Tensor, embedding: Tensor) -> Tensor:
        """Transform h [..., W] under the embedding [..., W]; leading dimensions broadcast."""
        shift, scale, gate = self.adaLN_modulation(embedding).chunk(3, dim=-1)
        return h + gate * self.mlp(self.in_ln(h) * (1 + scale) + shift)


class FinalLayer(nn.Module):
    """Modulated norm without parameters of its own, then a linear layer to noise and variance."""

    def __init__(self, width: int, channels: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, h: Tensor, embedding: Tensor) -> Tensor:
        """Map h [..., W] under the embedding [..., W] to [..., channels]."""
        shift, scale = self.adaLN_modulation(embedding).chunk(2, dim=-1)
        return self.linear(F.layer_norm(h, h.shape[-1:], eps=NORM_EPS) * (1 + scale) + shift)


class HarmonHead(Head):
    """Predicts the noise of a token and the interpolation of its variance: [M, 2 C].

    Args:
        channels: C of a token.
        condition_width: E of the conditions.
        width: W of the head.
        depth: residual blocks.
    """

    def __init__(self, channels: int, condition_width: int, width: int, depth: int) -> None:
        super().__init__()
        self.time_embed = TimestepEmbedding(width)
        self.cond_embed = nn.Linear(condition_width, width)
        self.input_proj = nn.Linear(channels, width)
        self.res_blocks = nn.ModuleList(ResidualBlock(width) for _ in range(depth))
        self.final_layer = FinalLayer(width, 2 * channels)

    def embed_condition(self, z: Tensor) -> Tensor:
        """Map conditions z [M, E] to [M, W]."""
        return self.cond_embed(z)

    def embed_timestep(self, timesteps: Tensor) -> Tensor:
        """Map timesteps fp32 [K] to [K, W]."""
        return self.time_embed(timestep_frequencies(timesteps).to(self.input_proj.weight.dtype))

    def denoise(self, x: Tensor, embedding: Tensor) -> Tensor:
        """Predict noise and variance [..., 2 C] from noisy tokens x [..., C] and the summed embedding [..., W].

        Leading dimensions broadcast; the modulation is done once per row of the embedding.
        """
        h = self.input_proj(x)
        for block in self.res_blocks:
            h = block(h, embedding)
        return self.final_layer(h, embedding)
