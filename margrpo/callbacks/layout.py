"""What TensorBoard opens with: the stability curves of all runs side by side, and the options to filter runs by."""

import dataclasses
import json
from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from torch.utils.tensorboard.summary import hparams

from margrpo.callbacks.ranks import run_directory
from margrpo.module import MARGRPO
from margrpo.rollout.datamodule import RolloutDataModule

LAYOUT = {
    "stability": {
        title: ["Multiline", [f"^{curve}$"]]
        for title, curve in {
            "held-out reward": "reward/heldout",
            "training reward": "reward/train",
            "KL divergence from the reference, nats per image": "stability/kl_image_nats",
            "gradient norm before clipping": "stability/gradient_norm",
        }.items()
    }
}
"""Category to chart to regular expressions for its curves, as `SummaryWriter.add_custom_scalars` takes it."""


class TensorBoardLayout(L.Callback):
    """Gives every run the tab "Custom Scalars", where "stability" comes first, and the options of "HParams".

    Rows of "HParams" that differ in nothing but the seed become one, with the mean of their last values. The held-out
    reward of a finished run is there as `final/heldout_reward` too, a name that sorts into the columns shown at first.
    """

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write both; TensorBoard merges those of all runs, and those of a resumed run."""
        assert isinstance(pl_module, MARGRPO)
        assert isinstance(trainer.datamodule, RolloutDataModule)  # type: ignore[attr-defined]
        variant = run_directory(trainer).parent.name
        options = {"variant": variant, **varied_options(pl_module, trainer.datamodule)}  # type: ignore[attr-defined]
        for logger in _tensorboard_loggers(trainer):
            logger.experiment.add_custom_scalars(LAYOUT)
            # Not logger.log_hyperparams: its description of the options is that of the first run alone, without the
            # values of the others, and it writes its metrics as further points of their curves.
            logger.experiment._get_file_writer().add_summary(hparams_pb(options))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Mark the run as finished, and repeat its held-out reward."""
        _, _, finished = hparams({}, {})
        for logger in _tensorboard_loggers(trainer):
            logger.experiment._get_file_writer().add_summary(finished)
            if "reward/heldout" in trainer.callback_metrics:
                final = trainer.callback_metrics["reward/heldout"].item()
                logger.log_metrics({"final/heldout_reward": final}, step=trainer.global_step)


def varied_options(module: MARGRPO, data: RolloutDataModule) -> dict[str, str]:
    """Return the options that experiments vary, by name, written as in YAML.

    Every value is a string: TensorBoard then offers the values of all runs to choose from, null among them.
    """
    options: dict[str, Any] = {
        "train_head": module.train_head,
        "head_lr_scale": module.head_lr_scale,
        "mask_steps_per_update": module.mask_steps_per_update,
        "num_iterations": module.num_iterations,
        **dataclasses.asdict(module.optimizer_config),
        **dataclasses.asdict(module.objective),
        **dataclasses.asdict(data.rollout),
    }
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in options.items()}


def _tensorboard_loggers(trainer: L.Trainer) -> list[TensorBoardLogger]:
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero]
