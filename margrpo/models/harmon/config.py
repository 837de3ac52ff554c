"""Sizes of a Harmon model, read from the `config.json` of a checkpoint."""

from dataclasses import dataclass
from typing import Any

from transformers import Qwen2Config

from margrpo.diffusion.learned_variance import respaced_timesteps
from margrpo.models.checkpoint import CheckpointError

MAR_SIZES = {"mar_base": (768, 12, 12), "mar_large": (1024, 16, 16), "mar_huge": (1280, 20, 16)}
"""Width, depth and attention heads of the published sizes; the same for encoder and decoder."""

CUSTOM_MAR = "mar_custom"
CUSTOM_KEYS = tuple(f"{part}_{size}" for part in ("encoder", "decoder") for size in ("embed_dim", "depth", "num_heads"))


@dataclass(frozen=True)
class StackConfig:
    """Sizes of a stack of transformer blocks.

    Args:
        width: of the tokens.
        depth: blocks.
        heads: attention heads.
    """

    width: int
    depth: int
    heads: int


@dataclass(frozen=True)
class MARConfig:
    """Sizes of encoder, decoder and head; the entry `mar` of the published `config.json`.

    Args:
        encoder: the stack that sees the known tokens.
        decoder: the stack that sees all tokens; its width is E, that of the conditions.
        native_grid: rows and columns of the position tables, img_size / vae_stride.
        vae_stride: pixels per token.
        channels: C of a token, vae_embed_dim.
        buffer_size: slots that precede the known tokens.
        class_num: rows of the class embedding, which is part of the layout and has no use.
        attn_dropout: dropout of attention weights, for pretraining.
        proj_dropout: dropout of block outputs, for pretraining.
        head_depth: diffloss_d, residual blocks of the head.
        head_width: diffloss_w, W of the head.
        spacing: what stands before the number of steps in num_sampling_steps: empty or `ddim`.
    """

    encoder: StackConfig
    decoder: StackConfig
    native_grid: int
    vae_stride: int
    channels: int
    buffer_size: int
    class_num: int
    attn_dropout: float
    proj_dropout: float
    head_depth: int
    head_width: int
    spacing: str

    @classmethod
    def from_dict(cls, values: dict[str, Any], source: str) -> "MARConfig":
        """Validate the entry `mar`; `source` names it in errors. Settings of pretraining alone are not read.

        Raises:
            CheckpointError: a key is missing, or has a value that is not supported.
        """
        name = require(values, "type", source)
        if name in MAR_SIZES:
            encoder = decoder = StackConfig(*MAR_SIZES[name])
        elif name == CUSTOM_MAR:
            sizes = [require(values, key, source) for key in CUSTOM_KEYS]
            encoder, decoder = StackConfig(*sizes[:3]), StackConfig(*sizes[3:])
        else:
            raise CheckpointError(f"{source}: type {name!r} is unknown; accepted: {', '.join(MAR_SIZES)}, {CUSTOM_MAR}")
        if require(values, "patch_size", source) != 1:
            raise CheckpointError(f"{source}: patch_size {values['patch_size']} is not supported, only 1")
        spacing = str(require(values, "num_sampling_steps", source))
        try:
            respaced_timesteps(spacing)
        except ValueError as error:
            raise CheckpointError(f"{source}: num_sampling_steps: {error}") from error
        size, stride = (require(values, key, source) for key in ("img_size", "vae_stride"))
        if size % stride:
            raise CheckpointError(f"{source}: img_size {size} is not a multiple of vae_stride {stride}")
        return cls(
            encoder=encoder,
            decoder=decoder,
            native_grid=size // stride,
            vae_stride=stride,
            channels=require(values, "vae_embed_dim", source),
            buffer_size=require(values, "buffer_size", source),
            class_num=require(values, "class_num", source),
            attn_dropout=require(values, "attn_dropout", source),
            proj_dropout=require(values, "proj_dropout", source),
            head_depth=require(values, "diffloss_d", source),
            head_width=require(values, "diffloss_w", source),
            spacing=spacing.rstrip("0123456789"),
        )


@dataclass(frozen=True)
class VAEConfig:
    """Sizes of the autoencoder; the published configuration does not name them, and means the defaults.

    Args:
        ch: base width.
        ch_mult: width of each level, as a multiple of the base; every level but the first halves the resolution.
        num_res_blocks: residual blocks of an encoder level; a decoder level has one more.
    """

    ch: int = 128
    ch_mult: tuple[int, ...] = (1, 1, 2, 2, 4)
    num_res_blocks: int = 2

    @property
    def stride(self) -> int:
        """Pixels per latent."""
        return 2 ** (len(self.ch_mult) - 1)


@dataclass(frozen=True)
class HarmonConfig:
    """Sizes of the whole model; one field per entry of the published `config.json`, the last of which is optional.

    Args:
        llm: of the language model.
        mar: of encoder, decoder and head.
        vae: of the autoencoder.
    """

    llm: Qwen2Config
    mar: MARConfig
    vae: VAEConfig

    @classmethod
    def from_dict(cls, values: dict[str, Any], source: str) -> "HarmonConfig":
        """Validate the content of a `config.json`; `source` names it in errors.

        Raises:
            CheckpointError: a key is missing, or has a value that is not supported.
        """
        if values.get("model_type") != "harmon":
            raise CheckpointError(f"{source}: model_type is {values.get('model_type')!r}, expected 'harmon'")
        vae = dict(values.get("vae", {}))
        unknown = vae.keys() - VAEConfig.__dataclass_fields__.keys()
        if unknown:
            accepted = ", ".join(VAEConfig.__dataclass_fields__)
            raise CheckpointError(f"{source}: vae has an unknown key {min(unknown)}; accepted: {accepted}")
        if "ch_mult" in vae:
            vae["ch_mult"] = tuple(vae["ch_mult"])
        config = cls(
            llm=Qwen2Config.from_dict(require(values, "llm", source)),
            mar=MARConfig.from_dict(require(values, "mar", source), f"{source}: mar"),
            vae=VAEConfig(**vae),
        )
        stride = config.mar.vae_stride
        if config.vae.stride != stride:
            raise CheckpointError(f"{source}: mar.vae_stride is {stride}, but the VAE has stride {config.vae.stride}")
        return config


def require(values: dict[str, Any], key: str, source: str) -> Any:
    """Look up a key; raises CheckpointError naming it and `source` when it is missing."""
    if key not in values:
        raise CheckpointError(f"{source}: missing {key}")
    return values[key]
