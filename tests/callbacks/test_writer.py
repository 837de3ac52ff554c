"""What `margrpo predict` leaves in a directory."""

import json

import lightning as L
import numpy as np
from PIL import Image

from margrpo.callbacks.writer import ImageWriter


class Collector(L.Callback):
    """Keeps the batches."""

    def __init__(self):
        self.batches = []

    def on_predict_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.batches.append(batch)


def test_predict_writes_an_image_per_prompt_and_a_list(build, tmp_path):
    output = tmp_path / "images"
    output.mkdir()
    (output / "prompts.jsonl").write_text("of an earlier run\n")
    collector = Collector()
    module, data, trainer = build([ImageWriter(str(output)), collector])
    trainer.predict(module, data)
    assert sorted(file.name for file in output.iterdir()) == [*[f"00000{i}.png" for i in range(5)], "prompts.jsonl"]
    for batch in collector.batches:
        for index, image in zip(batch.indices, batch.images, strict=True):
            written = np.asarray(Image.open(output / f"{index:06d}.png"))
            assert np.array_equal(written, image.permute(1, 2, 0).numpy())
    lines = (output / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [
        {"index": i, "file": f"{i:06d}.png", "record": {"prompt": f"prompt number {i}"}} for i in range(5)
    ]
