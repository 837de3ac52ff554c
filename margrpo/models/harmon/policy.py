"""Harmon's policy: the encoder of known tokens and the decoder of all tokens, from MAR (arXiv 2406.11838)."""

from typing import Any

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from margrpo.models.harmon.config import MARConfig, StackConfig


class Norm(nn.LayerNorm):
    """Layer norm with the epsilon of the published model."""

    def __init__(self, width: int, **options: Any) -> None:
        super().__init__(width, eps=1e-6, **options)


class MARPolicy(nn.Module):
    """Encoder and decoder, without the head; the language model stands between them.

    The class embedding belongs to the layout but has no part in image generation: it is carried along, frozen.

    Args:
        config: sizes.
        grid: rows and columns of tokens of an image; the position tables are resized to it.
    """

    def __init__(self, config: MARConfig, grid: int) -> None:
        super().__init__()
        encoder, decoder = config.encoder, config.decoder
        native, slots = config.native_grid**2, config.buffer_size
        self.buffer_size = slots
        self.native_grid = config.native_grid
        self.grid = grid
        self.class_emb = nn.Embedding(config.class_num, encoder.width).requires_grad_(False)
        self.fake_latent = nn.Parameter(torch.zeros(1, encoder.width))
        self.z_proj = nn.Linear(config.channels, encoder.width)
        self.z_proj_ln = Norm(encoder.width)
        self.encoder_pos_embed_learned = nn.Parameter(torch.zeros(1, slots + native, encoder.width))
        self.encoder_blocks = self._blocks(encoder, config)
        self.encoder_norm = Norm(encoder.width)
        self.decoder_embed = nn.Linear(encoder.width, decoder.width)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, decoder.width))
        self.decoder_pos_embed_learned = nn.Parameter(torch.zeros(1, slots + native, decoder.width))
        self.decoder_blocks = self._blocks(decoder, config)
        self.decoder_norm = Norm(decoder.width)
        self.diffusion_pos_embed_learned = nn.Parameter(torch.zeros(1, native, decoder.width))

    @staticmethod
    def _blocks(stack: StackConfig, config: MARConfig) -> nn.ModuleList:
        return nn.ModuleList(
            Block(
                stack.width,
                stack.heads,
                qkv_bias=True,
                attn_drop=config.attn_dropout,
                proj_drop=config.proj_dropout,
                norm_layer=Norm,
            )
            for _ in range(stack.depth)
        )

    def encode(self, latents: Tensor, known: Tensor) -> Tensor:
        """Encode the known tokens.

        Args:
            latents: [B, N, C]; only known tokens are read.
            known: int64 [B, K], indices of the known tokens; their order is kept.

        Returns:
            [B, slots + K, width], the buffer first.
        """
        slots, positions = self._positions(self.encoder_pos_embed_learned)
        tokens = self.z_proj(latents.gather(1, known[..., None].expand(-1, -1, latents.shape[2])))
        buffer = (self.fake_latent + slots).expand(latents.shape[0], -1, -1)
        x = self.z_proj_ln(torch.cat([buffer.to(tokens.dtype), tokens + positions[known]], dim=1))
        for block in self.encoder_blocks:
            x = block(x)
        return self.encoder_norm(x)

    def decode(self, x: Tensor, known: Tensor) -> Tensor:
        """Predict the conditions z [B, N, E] of all tokens from those of `encode` after the language model."""
        slots, positions = self._positions(self.decoder_pos_embed_learned)
        x = self.decoder_embed(x)
        buffer, tokens = x[:, : self.buffer_size], x[:, self.buffer_size :]
        unknown = self.mask_token.to(x.dtype).expand(x.shape[0], self.grid**2, -1)
        tokens = unknown.scatter(1, known[..., None].expand(-1, -1, x.shape[2]), tokens)
        x = torch.cat([buffer + slots, tokens + positions], dim=1)
        for block in self.decoder_blocks:
            x = block(x)
        return self.decoder_norm(x)[:, self.buffer_size :] + self._resized(self.diffusion_pos_embed_learned)[0]

    def _positions(self, table: Tensor) -> tuple[Tensor, Tensor]:
        """Split a table into positions of the buffer [slots, width] and of the image [N, width]."""
        return table[0, : self.buffer_size], self._resized(table[:, self.buffer_size :])[0]

    def _resized(self, table: Tensor) -> Tensor:
        """Resize a table [1, native N, width] to the grid of the image: [1, N, width]."""
        if self.grid == self.native_grid:
            return table
        image = table.unflatten(1, (self.native_grid, self.native_grid)).permute(0, 3, 1, 2)
        return F.interpolate(image, size=(self.grid, self.grid), mode="bilinear").flatten(2).mT
