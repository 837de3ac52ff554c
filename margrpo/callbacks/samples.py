"""Grids of held-out images with prompt and reward, always from the same noise."""

import math
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from margrpo.rollout.types import Evaluation

LARGEST_SIDE = 256
PADDING = 6
TEXT_LINES = 3
FONT_SIZE = 11
BACKGROUND = "white"


class SampleGrid(L.Callback):
    """After every validation, shows the first held-out images in TensorBoard and as `samples/step_….png`.

    Args:
        count: images in the grid.
        columns: images in a row.
    """

    def __init__(self, count: int = 16, columns: int = 8) -> None:
        if count < 1 or columns < 1:
            raise ValueError(f"count is {count} and columns is {columns}; both must be at least 1")
        self.count = count
        self.columns = columns
        self.tiles: list[Image.Image] = []

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start a new grid."""
        self.tiles = []

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Evaluation,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Collect images until the grid is full."""
        missing = self.count - len(self.tiles)
        if missing <= 0 or not trainer.is_global_zero:
            return
        assert batch.rewards is not None
        rows = zip(batch.images[:missing].cpu(), batch.prompts, batch.rewards.tolist(), strict=False)
        self.tiles += [draw_tile(image, prompt, reward) for image, prompt, reward in rows]

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save the grid and hand it to TensorBoard."""
        if not self.tiles or trainer.log_dir is None:
            return
        grid = draw_grid(self.tiles, self.columns)
        folder = Path(trainer.log_dir) / "samples"
        folder.mkdir(parents=True, exist_ok=True)
        grid.save(folder / f"step_{trainer.global_step:06d}.png")
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                pixels = np.asarray(grid)
                logger.experiment.add_image("samples/heldout", pixels, trainer.global_step, dataformats="HWC")


def draw_tile(image: Tensor, prompt: str, reward: float) -> Image.Image:
    """Put prompt and reward under an image uint8 [3, H, W], which is scaled down to at most 256 pixels."""
    side = max(image.shape[1:])
    if side > LARGEST_SIDE:
        scaled = F.interpolate(image[None].float(), scale_factor=LARGEST_SIDE / side, mode="area")[0]
        image = scaled.round().to(torch.uint8)
    picture = Image.fromarray(image.permute(1, 2, 0).numpy())
    font = ImageFont.load_default(FONT_SIZE)
    line_height = FONT_SIZE + 3
    tile = Image.new("RGB", (picture.width, picture.height + (TEXT_LINES + 1) * line_height), BACKGROUND)
    tile.paste(picture, (0, 0))
    draw = ImageDraw.Draw(tile)
    lines = [*_wrap(prompt, font, picture.width)[:TEXT_LINES], f"reward {reward:.2f}"]
    for number, line in enumerate(lines):
        draw.text((0, picture.height + 1 + number * line_height), line, fill="black", font=font)
    return tile


def draw_grid(tiles: list[Image.Image], columns: int) -> Image.Image:
    """Lay out tiles of equal size row by row."""
    columns = min(columns, len(tiles))
    width, height = tiles[0].width + PADDING, tiles[0].height + PADDING
    grid = Image.new("RGB", (columns * width + PADDING, math.ceil(len(tiles) / columns) * height + PADDING), BACKGROUND)
    for number, tile in enumerate(tiles):
        row, column = divmod(number, columns)
        grid.paste(tile, (PADDING + column * width, PADDING + row * height))
    return grid


def _wrap(text: str, font: Any, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines
