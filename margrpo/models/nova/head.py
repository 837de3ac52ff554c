"""Diffusion head of NOVA: an MLP over single tokens, modulated by condition and timestep."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from margrpo.models.base import Head
from margrpo.models.nova.config import FREQUENCY_CHANNELS, NOVAConfig
from margrpo.models.nova.layers import MLP, PatchEmbedding, frequency_angles


class ModulatedNorm(nn.Module):
    """Layer norm without parameters whose scale, shift and further factors come from the embedding (adaLN)."""

    def __init__(self, width: int, factors: int) -> None:
        super().__init__()
        self.factors = factors
        self.proj = nn.Linear(width, factors * width)

    def forward(self, h: Tensor, activated: Tensor) -> tuple[Tensor, ...]:
        """Return the modulated norm of h [..., W] and the remaining factors, from the activated embedding [..., W]."""
        scale, shift, *rest = self.proj(activated).chunk(self.factors, dim=-1)
        return torch.addcmul(shift, F.layer_norm(h, h.shape[-1:], eps=1e-6), 1 + scale), *rest


class HeadBlock(nn.Module):
    """Gated residual MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = ModulatedNorm(width, factors=3)
        self.proj = MLP(width, width, width, nn.SiLU())
        self.norm2 = nn.LayerNorm(width)

    def forward(self, h: Tensor, activated: Tensor) -> Tensor:
        """Transform h [..., W], whose leading dimensions broadcast against those of `activated`."""
        u, gate = self.norm1(h, activated)
        return torch.addcmul(h, gate, self.norm2(self.proj(u)))


class TimeConditionEmbedding(nn.Module):
    """The two maps into the head's width: of the timestep and of the condition."""

    def __init__(self, condition_width: int, width: int) -> None:
        super().__init__()
        self.timestep_proj = MLP(FREQUENCY_CHANNELS, width, width, nn.SiLU())
        self.condition_proj = MLP(condition_width, width, width, nn.SiLU())


class NOVAHead(Head):
    """Predicts the velocity (flow checkpoints) or the noise (DDPM checkpoints) of a token."""

    def __init__(self, config: NOVAConfig) -> None:
        super().__init__()
        width = config.head_width
        self.patch_embed = PatchEmbedding(config.image_dim, width, config.patch)
        self.time_cond_embed = TimeConditionEmbedding(config.width, width)
        self.blocks = nn.ModuleList(HeadBlock(width) for _ in range(config.head_depth))
        self.norm = ModulatedNorm(width, factors=2)
        self.head = nn.Linear(width, config.token_channels)

    def embed_condition(self, z: Tensor) -> Tensor:
        """Map conditions z [M, E] to [M, W]."""
        return self.time_cond_embed.condition_proj(z)

    def embed_timestep(self, timesteps: Tensor) -> Tensor:
        """Map timesteps fp32 [K] to [K, W]; cosines first, the timestep unscaled."""
        angles = frequency_angles(timesteps, FREQUENCY_CHANNELS)
        frequencies = torch.cat([angles.cos(), angles.sin()], dim=-1)
        return self.time_cond_embed.timestep_proj(frequencies.to(self.head.weight.dtype))

    def denoise(self, x: Tensor, embedding: Tensor) -> Tensor:
        """Predict [..., C] from noisy tokens x [..., C] and the summed embedding [..., W].

        Their leading dimensions broadcast; the modulation, most of the work, is done once per row of the embedding.
        """
        activated = F.silu(embedding)
        h = self.patch_embed(x)
        for block in self.blocks:
            h = block(h, activated)
        (h,) = self.norm(h, activated)
        return self.head(h)
