"""Writes the images of `margrpo predict`."""

import json
from pathlib import Path
from typing import Any

import lightning as L
from PIL import Image

from margrpo.callbacks.ranks import gather
from margrpo.rollout.types import Evaluation


class ImageWriter(L.Callback):
    """Writes `000042.png` for the 43rd prompt of the file, and `prompts.jsonl`, which says what the images show.

    A line of it is `{"index": 42, "file": "000042.png", "record": {"prompt": …}}`, in the order of the prompt file.
    Rank 0 writes it for all ranks once the images of all are there. Existing files are replaced.

    Args:
        output_dir: directory to write to, the same for all ranks; made when missing.
    """

    def __init__(self, output_dir: str) -> None:
        self.output_dir = Path(output_dir)
        self.entries: list[dict[str, Any]] = []

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Make the directory."""
        self.output_dir.mkdir(parents=True, exist_ok=True)
        self.entries = []

    def on_predict_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Evaluation,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Write the images of a batch."""
        images = batch.images.permute(0, 2, 3, 1).cpu().numpy()
        for index, pixels, record in zip(batch.indices, images, batch.metadata, strict=True):
            file = f"{index:06d}.png"
            Image.fromarray(pixels).save(self.output_dir / file)
            self.entries.append({"index": index, "file": file, "record": record})

    def on_predict_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the list of them."""
        entries = [entry for part in gather(self.entries, trainer.world_size) for entry in part]
        if trainer.is_global_zero:
            lines = [json.dumps(e, ensure_ascii=False) + "\n" for e in sorted(entries, key=lambda e: e["index"])]
            (self.output_dir / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
