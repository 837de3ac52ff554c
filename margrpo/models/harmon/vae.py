"""Harmon's frozen autoencoder: the KL-16 VAE of latent diffusion (arXiv 2112.10752), under its own key names."""

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from margrpo.models.harmon.config import VAEConfig

LATENT_SCALE = 0.2325
"""Factor from the autoencoder's latents to tokens."""


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(32, channels, eps=1e-6)


class ResidualBlock(nn.Module):
    """Two convolutions around a shortcut."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.norm1 = _norm(in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.norm2 = _norm(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        is_equal = in_channels == out_channels
        self.nin_shortcut = nn.Identity() if is_equal else nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, in, H, W] to [B, out, H, W]."""
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return self.nin_shortcut(x) + h


class AttentionBlock(nn.Module):
    """Self-attention over pixels with one head."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = _norm(channels)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Attend among the pixels of each image [B, channels, H, W]."""
        h = self.norm(x)
        q, k, v = (layer(h).flatten(2).mT[:, None] for layer in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v)[:, 0].mT.unflatten(2, x.shape[2:])
        return x + self.proj_out(attended)


class Downsample(nn.Module):
    """Convolution that halves the resolution, padded on the right and at the bottom."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, channels, H, W] to [B, channels, H / 2, W / 2]."""
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class Upsample(nn.Module):
    """Convolution after doubling the resolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, channels, H, W] to [B, channels, 2 H, 2 W]."""
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class Level(nn.Module):
    """Blocks at one resolution, attention after each where the level has it, then the change of resolution."""

    def __init__(self, in_width: int, width: int, blocks: int) -> None:
        super().__init__()
        self.block = nn.ModuleList(ResidualBlock(in_width if i == 0 else width, width) for i in range(blocks))
        self.attn = nn.ModuleList()
        self.downsample: nn.Module = nn.Identity()
        self.upsample: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Transform [B, in_width, H, W]."""
        for index, block in enumerate(self.block):
            x = block(x)
            if self.attn:
                x = self.attn[index](x)
        return self.upsample(self.downsample(x))


class Middle(nn.Module):
    """Block, attention, block at the lowest resolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.block_1 = ResidualBlock(width, width)
        self.attn_1 = AttentionBlock(width)
        self.block_2 = ResidualBlock(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Transform [B, width, H, W]."""
        return self.block_2(self.attn_1(self.block_1(x)))


class Encoder(nn.Module):
    """Images to the moments of their latents."""

    def __init__(self, config: VAEConfig, channels: int) -> None:
        super().__init__()
        widths = [config.ch * factor for factor in config.ch_mult]
        self.conv_in = nn.Conv2d(3, config.ch, 3, padding=1)
        levels = [Level(before, width, config.num_res_blocks) for before, width in pairwise([config.ch, *widths])]
        for level, width in zip(levels[:-1], widths, strict=False):
            level.downsample = Downsample(width)
        levels[-1].attn.extend(AttentionBlock(widths[-1]) for _ in levels[-1].block)
        self.down = nn.ModuleList(levels)
        self.mid = Middle(widths[-1])
        self.norm_out = _norm(widths[-1])
        self.conv_out = nn.Conv2d(widths[-1], 2 * channels, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        """Map images [B, 3, H, W] in [-1, 1] to moments [B, 2 C, H / stride, W / stride]."""
        h = self.conv_in(images)
        for level in self.down:
            h = level(h)
        return self.conv_out(F.silu(self.norm_out(self.mid(h))))


class Decoder(nn.Module):
    """Latents to images."""

    def __init__(self, config: VAEConfig, channels: int) -> None:
        super().__init__()
        widths = [config.ch * factor for factor in config.ch_mult]
        self.conv_in = nn.Conv2d(channels, widths[-1], 3, padding=1)
        self.mid = Middle(widths[-1])
        pairs = pairwise([*widths, widths[-1]])
        levels = [Level(before, width, config.num_res_blocks + 1) for width, before in pairs]
        for level, width in zip(levels[1:], widths[1:], strict=True):
            level.upsample = Upsample(width)
        self.up = nn.ModuleList(levels)
        self.norm_out = _norm(widths[0])
        self.conv_out = nn.Conv2d(widths[0], 3, 3, padding=1)

    def forward(self, latents: Tensor) -> Tensor:
        """Map latents [B, C, h, w] to images [B, 3, stride h, stride w], about in [-1, 1]."""
        h = self.mid(self.conv_in(latents))
        for level in reversed(self.up):
            h = level(h)
        return self.conv_out(F.silu(self.norm_out(h)))


class VAE(nn.Module):
    """The autoencoder; tokens are its scaled latents, row-major.

    Args:
        config: sizes.
        channels: C of a token.
    """

    def __init__(self, config: VAEConfig, channels: int) -> None:
        super().__init__()
        self.encoder = Encoder(config, channels)
        self.decoder = Decoder(config, channels)
        self.quant_conv = nn.Conv2d(2 * channels, 2 * channels, 1)
        self.post_quant_conv = nn.Conv2d(channels, channels, 1)

    def encode(self, images: Tensor) -> Tensor:
        """Encode images [B, 3, H, W] in [-1, 1] to tokens [B, N, C], the means of their posteriors."""
        mean, _ = self.quant_conv(self.encoder(images)).chunk(2, dim=1)
        return (mean * LATENT_SCALE).flatten(2).mT

    def decode(self, tokens: Tensor, rows: int, columns: int) -> Tensor:
        """Decode tokens [B, N, C] to images [B, 3, stride rows, stride columns], about in [-1, 1]."""
        latents = (tokens / LATENT_SCALE).mT.unflatten(2, (rows, columns))
        return self.decoder(self.post_quant_conv(latents))
