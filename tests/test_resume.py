"""A run that is interrupted and resumed equals one that was not."""

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from margrpo.callbacks.stability import GradientNorms, KLTracker
from margrpo.models.nova import NOVA
from margrpo.module import MARGRPO, OptimizerConfig
from margrpo.rewards.brightness import Brightness
from margrpo.rollout.config import RolloutConfig
from margrpo.rollout.datamodule import RolloutDataModule

ROLLOUT = RolloutConfig(
    group_size=2, mask_steps=4, denoising_steps=3, trained_mask_steps=2, trained_denoising_steps=2, guidance_scale=1.0
)


class Stop(L.Callback):
    """Ends the run in the middle, as a kill would, one step after the last checkpoint."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 4:
            raise KeyboardInterrupt


def run(data_dir, folder, prompts, checkpoint=None, callbacks=()):
    module = MARGRPO(
        NOVA.from_pretrained(data_dir / "nova" / "checkpoint"),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=4),
    )
    data = RolloutDataModule(str(prompts), [Brightness()], rollout=ROLLOUT, prompts_per_step=2)
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=6,
        logger=CSVLogger(folder, name="", version=""),
        log_every_n_steps=1,
        callbacks=[
            KLTracker(),
            GradientNorms(),
            ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}"),
            *callbacks,
        ],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(module, data, ckpt_path=checkpoint)
    except SystemExit:  # Lightning turns a KeyboardInterrupt into an exit
        assert callbacks
    return module, data


def curves(folder):
    lines = (folder / "metrics.csv").read_text().splitlines()
    header = lines[0].split(",")
    rows = [dict(zip(header, line.split(","), strict=True)) for line in lines[1:]]
    return [{k: v for k, v in row.items() if not k.startswith("time/") and k != "epoch" and v} for row in rows]


def test_a_resumed_run_equals_the_uninterrupted_one(data_dir, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(f"prompt number {i}" for i in range(5)))
    whole, whole_data = run(data_dir, tmp_path / "whole", prompts)
    run(data_dir, tmp_path / "first", prompts, callbacks=[Stop()])
    resumed, resumed_data = run(data_dir, tmp_path / "second", prompts, checkpoint=tmp_path / "first" / "step=3.ckpt")
    for (name, expected), actual in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(expected, actual), name
    assert whole_data.next_step == resumed_data.next_step == 6
    expected_curves = [row for row in curves(tmp_path / "whole") if int(row["step"]) >= 3]
    assert curves(tmp_path / "second") == expected_curves
    assert {int(row["step"]) for row in expected_curves} == {3, 4, 5}


def test_a_checkpoint_of_another_configuration_is_refused(data_dir, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\ntwo\n")
    run(data_dir, tmp_path / "first", prompts)
    checkpoint = torch.load(tmp_path / "first" / "step=6.ckpt", weights_only=True)
    checkpoint["state_dict"].pop("model.policy.image_encoder.norm.weight")
    module = MARGRPO(NOVA.from_pretrained(data_dir / "nova" / "checkpoint"))
    with pytest.raises(ValueError, match=r"lacks model\.policy\.image_encoder\.norm\.weight"):
        module.on_load_checkpoint(checkpoint)


def test_a_checkpoint_holds_what_training_changes_and_can_be_read_without_unpickling_code(data_dir, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\ntwo\n")
    run(data_dir, tmp_path / "first", prompts)
    checkpoint = torch.load(tmp_path / "first" / "step=6.ckpt", weights_only=True)
    assert all(key.startswith("model.policy.") for key in checkpoint["state_dict"])
