"""Position tables, patches and transformer blocks of NOVA."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def space_table(rows: int, columns: int, width: int) -> Tensor:
    """Absolute sin-cos positions of a grid, fp32 [rows * columns, width]: [sin x, cos x, sin y, cos y], row-major."""
    quarter = width // 4
    frequencies = 10000.0 ** (-torch.arange(quarter, dtype=torch.float32) / quarter)
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    x_angles = x.flatten()[:, None] * frequencies
    y_angles = y.flatten()[:, None] * frequencies
    return torch.cat([x_angles.sin(), x_angles.cos(), y_angles.sin(), y_angles.cos()], dim=1)


def frequency_angles(positions: Tensor, channels: int) -> Tensor:
    """Angles of a sinusoidal embedding, fp32 [K, channels / 2], for positions [K] of any unit."""
    half = channels // 2
    steps = torch.arange(half, dtype=torch.float32, device=positions.device)
    frequencies = torch.exp(-math.log(10000.0) / half * steps)
    return positions.float()[:, None] * frequencies


def patchify(latents: Tensor, patch: int) -> Tensor:
    """Turn latents [B, c, H, W] into tokens [B, N, patch * patch * c]: row-major grid, channel order (dy, dx, c)."""
    batch, channels, height, width = latents.shape
    grid = latents.view(batch, channels, height // patch, patch, width // patch, patch)
    return grid.permute(0, 2, 4, 3, 5, 1).reshape(batch, -1, patch * patch * channels)


def unpatchify(tokens: Tensor, patch: int, rows: int, columns: int) -> Tensor:
    """Invert `patchify`: tokens [B, N, patch * patch * c] to latents [B, c, rows * patch, columns * patch]."""
    batch = tokens.shape[0]
    grid = tokens.view(batch, rows, columns, patch, patch, -1)
    return grid.permute(0, 5, 1, 3, 2, 4).reshape(batch, -1, rows * patch, columns * patch)


class PatchEmbedding(nn.Module):
    """Linear map of a patch, kept as the convolution `proj` of the official layout."""

    def __init__(self, channels: int, width: int, patch: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, width, patch, stride=patch)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed patchified tokens [..., patch * patch * channels] to [..., width]."""
        return F.linear(tokens, self.proj.weight.permute(0, 2, 3, 1).flatten(1), self.proj.bias)


class MLP(nn.Module):
    """Two linear layers with an activation between them."""

    def __init__(self, in_width: int, hidden: int, out_width: int, activation: nn.Module) -> None:
        super().__init__()
        self.fc1 = nn.Linear(in_width, hidden)
        self.fc2 = nn.Linear(hidden, out_width)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in_width] to [..., out_width]."""
        return self.fc2(self.activation(self.fc1(x)))


class Attention(nn.Module):
    """Full bidirectional self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend within each row of x [B, L, width]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Transformer block with the normalisation after each branch, inside the residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attn = Attention(width, heads)
        self.norm1 = nn.LayerNorm(width)
        self.mlp = MLP(width, 4 * width, width, nn.GELU())
        self.norm2 = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Transform x [B, L, width]."""
        x = x + self.norm1(self.attn(x))
        return x + self.norm2(self.mlp(x))


class Encoder(nn.Module):
    """Stack of blocks with its own patch embedding and final normalisation; the parts are called one by one."""

    def __init__(self, depth: int, width: int, heads: int, channels: int, patch: int) -> None:
        super().__init__()
        self.patch_embed = PatchEmbedding(channels, width, patch)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
