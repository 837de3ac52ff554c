"""Grids of held-out images with their prompts and rewards, always from the same noise."""

import math
import textwrap
from typing import Any, NamedTuple

import lightning as L
import numpy as np
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image, ImageDraw, ImageFont

from margrpo.callbacks.ranks import gather, run_directory
from margrpo.rollout.types import Evaluation

SMALLEST_SIDE = 128
LARGEST_SIDE = 256
PADDING = 6
FONT_SIZE = 12
LINE_HEIGHT = 15
MOST_PROMPT_LINES = 6


class Sample(NamedTuple):
    """An image of the grid and what is written under it."""

    picture: Image.Image
    prompt: str
    reward: float


class SampleGrid(L.Callback):
    """After every validation, shows the first held-out images as `samples/heldout` and `samples/step_000040.png`.

    The number is that of optimiser steps so far; step 0 is the validation ahead of training. Letters that Pillow's own
    font lacks show as boxes.

    Args:
        count: images in the grid.
        columns: images in a row.

    Raises:
        ValueError: one of them is below 1.
    """

    def __init__(self, count: int = 16, columns: int = 4) -> None:
        if count < 1 or columns < 1:
            raise ValueError(f"count is {count} and columns is {columns}; both must be at least 1")
        self.count = count
        self.columns = columns
        self.samples: dict[int, Sample] = {}

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start a new grid."""
        self.samples = {}

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Evaluation,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Collect those of the first images that are in this batch."""
        assert batch.rewards is not None
        for row, index in enumerate(batch.indices):
            if index < self.count:
                picture = fit(Image.fromarray(batch.images[row].permute(1, 2, 0).cpu().numpy()))
                self.samples[index] = Sample(picture, batch.prompts[row], batch.rewards[row].item())

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save the grid and hand it to TensorBoard."""
        folder = run_directory(trainer) / "samples"
        samples = {index: s for part in gather(self.samples, trainer.world_size) for index, s in part.items()}
        if not trainer.is_global_zero:
            return
        grid = draw_grid([samples[index] for index in sorted(samples)], self.columns)
        folder.mkdir(parents=True, exist_ok=True)
        grid.save(folder / f"step_{trainer.global_step:06d}.png")
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_image("samples/heldout", np.asarray(grid), trainer.global_step, dataformats="HWC")


def fit(picture: Image.Image) -> Image.Image:
    """Scale down to at most 256 pixels a side; enlarge what is below 128, so that text fits under it."""
    side = max(picture.size)
    wanted = min(max(side, SMALLEST_SIDE), LARGEST_SIDE)
    if side == wanted:
        return picture
    size = (round(picture.width * wanted / side), round(picture.height * wanted / side))
    return picture.resize(size, Image.Resampling.NEAREST if wanted > side else Image.Resampling.BOX)


def draw_grid(samples: list[Sample], columns: int) -> Image.Image:
    """Lay out pictures of one size row by row, with reward and prompt under each.

    Args:
        samples: at least one.
        columns: pictures in a row; fewer when there are fewer samples.
    """
    font = ImageFont.load_default(FONT_SIZE)
    width, height = samples[0].picture.size
    texts = [[f"reward {sample.reward:.3f}", *wrap(sample.prompt, width, font)] for sample in samples]
    cell_width = width + PADDING
    cell_height = height + LINE_HEIGHT * max(map(len, texts)) + PADDING
    columns = min(columns, len(samples))
    rows = math.ceil(len(samples) / columns)
    grid = Image.new("RGB", (columns * cell_width + PADDING, rows * cell_height + PADDING), "white")
    draw = ImageDraw.Draw(grid)
    for number, (sample, lines) in enumerate(zip(samples, texts, strict=True)):
        row, column = divmod(number, columns)
        left, top = PADDING + column * cell_width, PADDING + row * cell_height
        grid.paste(sample.picture, (left, top))
        for line_number, line in enumerate(lines):
            draw.text((left, top + height + line_number * LINE_HEIGHT), line, fill="black", font=font)
    return grid


def wrap(prompt: str, width: int, font: Any) -> list[str]:
    """Break a prompt into at most 6 lines of about `width` pixels; what is left out shows as an ellipsis."""
    text = " ".join(prompt.split())
    # The prompt's own mean width of a character, so that capitals and wide scripts fit too.
    characters = int(0.92 * width * len(text) / font.getlength(text))
    return textwrap.wrap(text, characters, max_lines=MOST_PROMPT_LINES, placeholder=" …")
