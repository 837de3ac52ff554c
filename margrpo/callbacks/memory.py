"""The curve of the peak memory, so that the price of a variant shows beside what it buys."""

import resource
import sys
from typing import Any

import lightning as L
import torch

GIB = 2**30


class PeakMemory(L.Callback):
    """Logs `memory/peak_gib`: the most memory so far, in GiB, on the rank that needed most.

    That is what torch has allocated on a GPU, and on a CPU the resident memory of the process, libraries included.
    """

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log after the update, which is where the peak is."""
        peak = torch.tensor(peak_gib(pl_module.device), device=pl_module.device)
        pl_module.log("memory/peak_gib", trainer.strategy.reduce(peak, reduce_op="max"))


def peak_gib(device: torch.device) -> float:
    """Return the peak memory of this process in GiB; see `PeakMemory`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    # The kernels disagree on the unit.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB
