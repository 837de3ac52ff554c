"""Small runs of the tiny NOVA with chosen callbacks."""

import lightning as L
import pytest
from lightning.pytorch.loggers.logger import Logger

from margrpo.models.nova import NOVA
from margrpo.module import MARGRPO, OptimizerConfig
from margrpo.rewards.brightness import Brightness
from margrpo.rollout.config import RolloutConfig
from margrpo.rollout.datamodule import RolloutDataModule

ROLLOUT = RolloutConfig(
    group_size=2, mask_steps=4, denoising_steps=3, trained_mask_steps=2, trained_denoising_steps=2, guidance_scale=1.0
)


class Recorder(Logger):
    """Logger that keeps (step, metrics)."""

    name = version = None

    save_dir = None

    def __init__(self, save_dir):
        super().__init__()
        self.save_dir = save_dir
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, metrics))

    def log_hyperparams(self, *arguments, **options):
        pass

    def curve(self, name):
        """Return step to value of one curve."""
        return {step: metrics[name] for step, metrics in self.rows if name in metrics}


@pytest.fixture
def build(data_dir, tmp_path):
    """Return a function that builds module, data module and trainer."""

    def run(callbacks, steps=2, rewards=None, heldout=5, module_class=MARGRPO, options=None, **trainer_options):
        prompts = tmp_path / "prompts.txt"
        prompts.write_text("\n".join(f"prompt number {i}" for i in range(5)))
        module = module_class(
            NOVA.from_pretrained(data_dir / "nova" / "checkpoint"),
            optimizer=OptimizerConfig(learning_rate=1e-2, max_gradient_norm=1e-3),
            **(options or {}),
        )
        data = RolloutDataModule(
            str(prompts),
            rewards or [Brightness()],
            heldout_prompts=str(prompts) if heldout else None,
            predict_prompts=str(prompts),
            heldout_count=heldout,
            evaluation_batch=2,
            rollout=ROLLOUT,
            prompts_per_step=2,
        )
        defaults = {
            "logger": Recorder(tmp_path),
            "val_check_interval": 1,
            "num_sanity_val_steps": -1,
            "log_every_n_steps": 1,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
        }
        trainer = L.Trainer(
            accelerator="cpu",
            max_steps=steps,
            check_val_every_n_epoch=None,
            callbacks=callbacks,
            enable_model_summary=False,
            **{**defaults, **trainer_options},
        )
        return module, data, trainer

    return run
