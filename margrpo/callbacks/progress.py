"""A progress bar that counts optimiser steps: the prompt stream has no end, so Lightning's own has no total."""

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import TQDMProgressBar

from margrpo.rollout.types import Rollout

LABELS = {"reward": "reward", "kl": "KL", "reward/heldout": "held-out"}


class StepProgressBar(TQDMProgressBar):
    """Shows steps of `trainer.max_steps`, the training reward, the KL divergence and the last held-out reward.

    Args:
        refresh_rate: rollouts between two updates of the bar; 0 hides it.
    """

    def __init__(self, refresh_rate: int = 1) -> None:
        super().__init__(refresh_rate)

    @property
    def sanity_check_description(self) -> str:
        """Name of the validation ahead of training."""
        return "Held-out, before"

    @property
    def validation_description(self) -> str:
        """Name of the other validations."""
        return "Held-out"

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Count from the step that a resumed run starts at."""
        bar = self.train_progress_bar
        bar.reset(total=trainer.max_steps if trainer.max_steps > 0 else None)
        bar.n = bar.initial = trainer.global_step
        bar.set_description("Step")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Rollout, batch_idx: int
    ) -> None:
        """Move on."""
        if self._should_update(batch_idx + 1, -1):
            self.train_progress_bar.n = trainer.global_step
            self.train_progress_bar.set_postfix(self.get_metrics(trainer, pl_module))

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Leave out the number of the dataloader."""
        super().on_validation_batch_start(trainer, pl_module, batch, batch_idx, dataloader_idx)
        name = self.sanity_check_description if trainer.sanity_checking else self.validation_description
        self.val_progress_bar.set_description(name)

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        """Select what is shown, with digits enough for a small KL divergence."""
        metrics = super().get_metrics(trainer, pl_module)
        return {label: f"{metrics[name]:.3g}" for name, label in LABELS.items() if name in metrics}
