"""Writes the images of `margrpo predict`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import BasePredictionWriter
from PIL import Image

from margrpo.rollout.types import Evaluation


class ImageWriter(BasePredictionWriter):
    """Writes `000042.png` for the 43rd prompt of the file, and an index of them.

    The index has one JSON object a line, the prompt's record with `index` and `file`; each rank writes its own,
    `prompts.jsonl` or `prompts.rank1.jsonl`, ….

    Args:
        output_dir: directory to write to; made when missing.
    """

    def __init__(self, output_dir: str) -> None:
        super().__init__(write_interval="batch")
        self.output_dir = Path(output_dir)

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start an empty index."""
        self.output_dir.mkdir(parents=True, exist_ok=True)
        self._index(trainer).write_text("", encoding="utf-8")

    def write_on_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        prediction: Evaluation,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Write the images of a batch."""
        images = prediction.images.permute(0, 2, 3, 1).cpu().numpy()
        with self._index(trainer).open("a", encoding="utf-8") as index_file:
            for index, pixels, record in zip(prediction.indices, images, prediction.metadata, strict=True):
                file = f"{index:06d}.png"
                Image.fromarray(pixels).save(self.output_dir / file)
                line = {"index": index, "file": file, **record}
                index_file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def _index(self, trainer: L.Trainer) -> Path:
        rank = "" if trainer.global_rank == 0 else f".rank{trainer.global_rank}"
        return self.output_dir / f"prompts{rank}.jsonl"
