"""What callbacks ask of all ranks together: every rank has to call these functions, or the run hangs."""

from pathlib import Path
from typing import Any, TypeVar

import lightning as L
import torch

T = TypeVar("T")


def gather(value: T, world_size: int) -> list[T]:
    """Return the values of all ranks in the order of the ranks; they have to be picklable."""
    if world_size == 1:
        return [value]
    values: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(values, value)
    return values


def run_directory(trainer: L.Trainer) -> Path:
    """Return the directory of the run, the same on all ranks.

    Raises:
        ValueError: the logger keeps no files.
    """
    directory = trainer.log_dir
    if directory is None:
        raise ValueError("the first logger has no directory to write to; put a TensorBoardLogger or CSVLogger first")
    return Path(directory)
