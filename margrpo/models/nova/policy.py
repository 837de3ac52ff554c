"""NOVA's autoregressive transformer: text and video encoder once per prompt, image encoder at every mask step."""

import torch
from torch import Tensor, nn

from margrpo.models.nova.config import FREQUENCY_CHANNELS, HEADS_OF_WIDTH, NULL_TEXT_ROWS, NOVAConfig
from margrpo.models.nova.layers import Encoder, frequency_angles, space_table


class TextEmbedding(nn.Module):
    """Maps text-encoder states to the policy's width and holds the null prompt, a buffer of the checkpoint."""

    weight: Tensor

    def __init__(self, token_dim: int, width: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(NULL_TEXT_ROWS, token_dim))
        self.proj = nn.Linear(token_dim, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, prompt_embeds: Tensor) -> Tensor:
        """Embed [P, length, token_dim] to [P, length, E]."""
        return self.norm(self.proj(prompt_embeds))


class TimeEmbedding(nn.Module):
    """Embeds the position of a video frame; an image is the first frame."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.time_proj = nn.Sequential(nn.Linear(FREQUENCY_CHANNELS, width), nn.SiLU(), nn.Linear(width, width))
        self.norm = nn.LayerNorm(width)

    def forward(self, frames: int) -> Tensor:
        """Return the embedding [frames, 1, E] of `frames` equally spaced positions in [0, 1)."""
        weight = self.norm.weight
        angles = frequency_angles(torch.arange(frames, device=weight.device) / frames, FREQUENCY_CHANNELS)
        frequencies = torch.cat([angles.sin(), angles.cos()], dim=-1).to(weight.dtype)
        return self.norm(self.time_proj(frequencies))[:, None]


class MaskEmbedding(nn.Module):
    """The learned tokens that stand for the start of a video and for an unknown token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bos_token = nn.Parameter(torch.zeros(1, width))
        self.mask_token = nn.Parameter(torch.zeros(1, width))


class NOVAPolicy(nn.Module):
    """The AR transformer without the head.

    The patch embedding of the video encoder belongs to the checkpoint but has no part in image generation: it is
    carried along, frozen.
    """

    video_positions: Tensor
    image_positions: Tensor

    def __init__(self, config: NOVAConfig) -> None:
        super().__init__()
        width, heads = config.width, HEADS_OF_WIDTH[config.width]
        self.config = config
        self.text_embed = TextEmbedding(config.text_token_dim, width)
        self.video_pos_embed = TimeEmbedding(width)
        self.mask_embed = MaskEmbedding(width)
        self.video_encoder = Encoder(config.video_depth, width, heads, config.image_dim, 2 * config.patch)
        self.image_encoder = Encoder(config.depth, width, heads, config.image_dim, config.patch)
        self.video_encoder.patch_embed.requires_grad_(False)
        self.build_tables()

    def build_tables(self) -> None:
        """Compute the position tables; called again after weights were assigned to a model made on the meta device."""
        _, rows, columns = self.config.video_base_size
        self.register_buffer("video_positions", space_table(rows, columns, self.config.width), persistent=False)
        rows, columns = self.config.image_base_size
        self.register_buffer("image_positions", space_table(rows, columns, self.config.width), persistent=False)

    def encode_frames(self, frame_tokens: Tensor, text: Tensor) -> Tensor:
        """Run the video encoder on frame tokens [P, V, E] after text tokens [P, length, E]; returns [P, V, E]."""
        x = torch.cat([text, frame_tokens], dim=1)
        for block in self.video_encoder.blocks:
            x = block(x)
        return self.video_encoder.norm(x[:, text.shape[1] :])

    def prefix(self, prompt_embeds: Tensor) -> Tensor:
        """Compute the context of each prompt [P, V, E] from its text states [P, length, token_dim]."""
        text = self.text_embed(prompt_embeds)
        frame = self.mask_embed.bos_token + self.video_pos_embed(1)[0] + self.video_positions.to(text.dtype)
        return self.encode_frames(frame.expand(text.shape[0], -1, -1), text)

    def forward(self, latents: Tensor, known: Tensor, context: Tensor) -> Tensor:
        """Predict the condition of every token.

        Args:
            latents: [B, N, C]; only known tokens are read.
            known: int64 [B, K], indices of the known tokens.
            context: [B, V, E], one row of `prefix` per image.

        Returns:
            z [B, N, E].
        """
        positions = self.image_positions.to(context.dtype)
        channels, width, length = latents.shape[2], context.shape[2], context.shape[1]
        half = len(self.image_encoder.blocks) // 2
        known_latents = latents.gather(1, known[..., None].expand(-1, -1, channels))
        known_tokens = self.image_encoder.patch_embed(known_latents) + positions[known]
        x = torch.cat([context, known_tokens], dim=1)
        for block in self.image_encoder.blocks[:half]:
            x = block(x)
        unknown_tokens = (self.mask_embed.mask_token + positions).expand(latents.shape[0], -1, -1)
        tokens = unknown_tokens.scatter(1, known[..., None].expand(-1, -1, width), x[:, length:])
        x = torch.cat([x[:, :length], tokens], dim=1)
        for block in self.image_encoder.blocks[half:]:
            x = block(x)
        return self.image_encoder.norm(x[:, length:])
