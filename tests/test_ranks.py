"""Two processes do together what one does alone on the same samples."""

import csv
import math
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from margrpo.callbacks.stability import GradientNorms, KLTracker
from margrpo.models.nova import NOVA
from margrpo.module import MARGRPO
from margrpo.objective.loss import ObjectiveConfig
from margrpo.rewards.base import Reward
from margrpo.rollout.config import RolloutConfig
from margrpo.rollout.datamodule import RolloutDataModule

ROLLOUT = RolloutConfig(
    group_size=3, mask_steps=6, denoising_steps=4, trained_mask_steps=3, trained_denoising_steps=3, guidance_scale=1.0
)
TRAIN = ["a photo of a car below a zebra", "two candles"]
HELD_OUT = ["a", "two", "three", "seven", "eleven apples"]
UNSCORED = HELD_OUT[1::2]
"""All the held-out prompts of the second rank."""

pytestmark = pytest.mark.slow


class Length(Reward):
    """Rewards long prompts and late images of a group: by much, and whatever rounding does to the pixels."""

    def __call__(self, images, prompts, metadata):
        return torch.tensor([len(prompt) * (row % ROLLOUT.group_size + 1.0) for row, prompt in enumerate(prompts)])


class SomeLength(Length):
    """Gives no reward to some prompts."""

    def __call__(self, images, prompts, metadata):
        unscored = torch.tensor([prompt in UNSCORED for prompt in prompts])
        return super().__call__(images, prompts, metadata).masked_fill(unscored, math.nan)


class Watched(MARGRPO):
    """Saves the gradient of the update, and how much the decisions of each mask step weigh."""

    def training_step(self, rollout, batch_idx):
        weights = torch.stack([mask_step.decisions.weight.sum() for mask_step in rollout.mask_steps])
        torch.save(weights, Path(self.trainer.default_root_dir) / f"weights_{self.global_rank}.pt")
        return super().training_step(rollout, batch_idx)

    def on_before_optimizer_step(self, optimizer):
        gradients = {name: p.grad for name, p in self.named_parameters() if p.grad is not None}
        torch.save(gradients, Path(self.trainer.default_root_dir) / f"gradients_{self.global_rank}.pt")
        super().on_before_optimizer_step(optimizer)


def run(data_dir, folder, **ranks):
    folder.mkdir()
    train, heldout = folder / "train.txt", folder / "heldout.txt"
    train.write_text("\n".join(TRAIN))
    heldout.write_text("\n".join(HELD_OUT))
    module = Watched(
        NOVA.from_pretrained(data_dir / "nova" / "checkpoint"), objective=ObjectiveConfig(advantage_scale="batch")
    )
    data = RolloutDataModule(
        str(train),
        [Length(), SomeLength()],
        heldout_prompts=str(heldout),
        evaluation_batch=1,
        rollout=ROLLOUT,
        prompts_per_step=2,
    )
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=1,
        val_check_interval=1,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        logger=CSVLogger(folder, name="", version=""),
        callbacks=[KLTracker(), GradientNorms()],
        default_root_dir=folder,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **ranks,
    )
    trainer.fit(module, data)
    return folder


@pytest.fixture(scope="module")
def runs(data_dir, tmp_path_factory):
    """Return the directories of the same run on one rank and on two."""
    folder = tmp_path_factory.mktemp("ranks")
    return run(data_dir, folder / "one"), run(data_dir, folder / "two", devices=2, strategy="ddp_spawn")


def curves(folder):
    values = {}
    for row in csv.DictReader((folder / "metrics.csv").open()):
        values |= {name: float(value) for name, value in row.items() if value and not name.startswith("time/")}
    return values


def test_the_update_of_two_ranks_is_that_of_one_rank_over_the_same_samples(runs):
    one, two = runs
    by_rank = torch.stack([torch.load(two / f"weights_{rank}.pt") for rank in (0, 1)])
    assert (by_rank[0] != by_rank[1]).any(), "the test needs ranks of different weight"
    assert by_rank.sum(0).tolist() == pytest.approx(torch.load(one / "weights_0.pt").tolist())
    expected = torch.load(one / "gradients_0.pt")
    for rank in (0, 1):
        for name, gradient in torch.load(two / f"gradients_{rank}.pt").items():
            error, size = (gradient - expected[name]).norm(), expected[name].norm()
            assert error <= 1e-5 * size, (name, (error / size).item())


def test_the_curves_of_two_ranks_are_those_of_one(runs):
    one, two = map(curves, runs)
    assert one["rollout/consistent_share"] < 1
    assert {
        "reward/train_some_length",
        "rollout/diversity",
        "rollout/head_tokens",
        "stability/gradient_norm",
    } < one.keys()
    assert two == pytest.approx(one, rel=1e-4, abs=1e-6)


def test_a_rank_without_any_held_out_reward_neither_hangs_the_others_nor_counts(runs):
    one, two = map(curves, runs)
    expected = {
        name: sum(map(len, prompts)) / len(prompts)
        for name, prompts in (("length", HELD_OUT), ("some_length", HELD_OUT[::2]))
    }
    for name, mean in expected.items():
        assert one[f"reward/heldout_{name}"] == two[f"reward/heldout_{name}"] == pytest.approx(mean)
