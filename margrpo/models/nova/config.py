"""Sizes of a NOVA transformer, read from the `transformer/config.json` of a checkpoint."""

import re
from dataclasses import dataclass
from typing import Any

from margrpo.models.checkpoint import CheckpointError

HEADS_OF_WIDTH = {64: 4, 96: 4, 128: 4, 768: 12, 1024: 16, 1536: 16}
"""Attention heads are not in the published configurations; they follow from the width's name."""

FREQUENCY_CHANNELS = 256
NULL_TEXT_ROWS = 512


@dataclass(frozen=True)
class NOVAConfig:
    """Sizes of the transformer; one field per key of the published `transformer/config.json`.

    Args:
        image_dim: channels of the VAE latents.
        image_size: image side in pixels.
        image_stride: pixels per latent pixel.
        text_token_dim: width of the text encoder.
        text_token_len: longest prompt in tokens; longer ones are truncated.
        video_base_size: frames, rows and columns of the grid of the video encoder; frames is 1 for image models.
        image_base_size: rows and columns of the token grid.
        arch: names of video encoder, image encoder and head, such as `vit_d16w1024`, `vit_d32w1024`, `mlp_d3w1280`.
    """

    image_dim: int
    image_size: int
    image_stride: int
    text_token_dim: int
    text_token_len: int
    video_base_size: tuple[int, int, int]
    image_base_size: tuple[int, int]
    arch: tuple[str, str, str]

    @classmethod
    def from_dict(cls, values: dict[str, Any], source: str) -> "NOVAConfig":
        """Validate the content of a `config.json`; `source` names it in errors.

        Raises:
            CheckpointError: a key is missing, or asks for something only the video models have.
        """
        values = {key: value for key, value in values.items() if not key.startswith("_")}
        missing = [name for name in cls.__dataclass_fields__ if name not in values]
        if missing:
            raise CheckpointError(f"{source}: missing {', '.join(missing)}")
        for name in ("rotary_pos_embed", "video_mixer_rank"):
            if values.get(name):
                raise CheckpointError(f"{source}: {name} belongs to the video models; only image models are supported")
        config = cls(**{name: _as_tuple(values[name]) for name in cls.__dataclass_fields__})
        config.validate(source)
        return config

    def validate(self, source: str) -> None:
        """Check that the sizes fit together; raises CheckpointError naming `source` and the key."""
        if not isinstance(self.image_size, int):
            raise CheckpointError(
                f"{source}: image_size {self.image_size} is not square; only image models are supported"
            )
        if self.video_base_size[0] != 1:
            raise CheckpointError(f"{source}: video_base_size {self.video_base_size} has more than one frame")
        side = self.image_size // self.image_stride // self.patch
        if self.image_base_size != (side, side):
            raise CheckpointError(
                f"{source}: image_base_size {self.image_base_size} does not fit image_size {self.image_size} "
                f"and image_stride {self.image_stride}, which give ({side}, {side})"
            )
        if self.text_token_len > NULL_TEXT_ROWS:
            raise CheckpointError(f"{source}: text_token_len {self.text_token_len} is more than {NULL_TEXT_ROWS}")
        if len(self.arch) != 3:
            raise CheckpointError(f"{source}: arch {self.arch} does not name video encoder, image encoder and head")
        for name, kind in zip(self.arch, ("vit", "vit", "mlp"), strict=True):
            parse_architecture(name, kind, source)
        if self.video_width != self.width:
            raise CheckpointError(f"{source}: the two encoders of arch {self.arch} have different widths")

    def to_dict(self) -> dict[str, Any]:
        """Return the published form, ready for JSON."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in ((name, getattr(self, name)) for name in self.__dataclass_fields__)
        }

    @property
    def patch(self) -> int:
        """Side of a token in latent pixels."""
        return 15 // self.image_stride + 1

    @property
    def latent_size(self) -> int:
        """Side of the latents in latent pixels."""
        return self.image_size // self.image_stride

    @property
    def token_channels(self) -> int:
        """C: channels of a token, patch x patch x image_dim."""
        return self.patch**2 * self.image_dim

    @property
    def num_tokens(self) -> int:
        """N: tokens of an image."""
        return self.image_base_size[0] * self.image_base_size[1]

    @property
    def video_depth(self) -> int:
        """Blocks of the video encoder."""
        return parse_architecture(self.arch[0], "vit")[0]

    @property
    def video_width(self) -> int:
        """Width of the video encoder."""
        return parse_architecture(self.arch[0], "vit")[1]

    @property
    def depth(self) -> int:
        """Blocks of the image encoder; the first half sees the known tokens only."""
        return parse_architecture(self.arch[1], "vit")[0]

    @property
    def width(self) -> int:
        """E: width of the image encoder and of the conditions."""
        return parse_architecture(self.arch[1], "vit")[1]

    @property
    def head_depth(self) -> int:
        """Blocks of the head."""
        return parse_architecture(self.arch[2], "mlp")[0]

    @property
    def head_width(self) -> int:
        """W: width of the head."""
        return parse_architecture(self.arch[2], "mlp")[1]


def parse_architecture(name: str, kind: str, source: str = "arch") -> tuple[int, int]:
    """Read depth and width from a name such as `vit_d16w1024`; raises CheckpointError naming what would be accepted."""
    match = re.fullmatch(rf"{kind}_d(\d+)w(\d+)", str(name))
    if match is None:
        raise CheckpointError(f"{source}: arch {name!r} is not of the form {kind}_d<depth>w<width>")
    depth, width = int(match[1]), int(match[2])
    if kind == "vit" and width not in HEADS_OF_WIDTH:
        raise CheckpointError(f"{source}: arch {name!r} has width {width}; known widths are {sorted(HEADS_OF_WIDTH)}")
    return depth, width


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
