"""The summary says what happened to held-out rewards, in the right units."""

import json
import math
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import margrpo.callbacks.summary
from margrpo.callbacks.stability import GradientNorms, KLTracker
from margrpo.callbacks.summary import RunSummary, compare
from margrpo.module import MARGRPO
from margrpo.rewards.brightness import Brightness


class Collector(L.Callback):
    """Keeps rewards by validation and prompt, and the seconds of the phases."""

    def __init__(self):
        self.validations, self.steps = [], []
        self.seconds = {"rollout": 0.0, "reward": 0.0, "update": 0.0}

    def on_validation_start(self, trainer, pl_module):
        self.validations.append({})
        self.steps.append(trainer.global_step)

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.validations[-1] |= dict(zip(batch.indices, batch.rewards.tolist(), strict=True))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for phase, seconds in {**batch.seconds, "update": outputs["seconds"]}.items():
            self.seconds[phase] += seconds

    def before_and_after(self, prompts):
        """Return the rewards of some prompts in the first and in the last validation."""
        return [[self.validations[which][prompt] for prompt in prompts] for which in (0, -1)]


class Darkness(Brightness):
    """Gives no reward to some prompts."""

    name = "darkness"
    unscored = frozenset()

    def __call__(self, images, prompts, metadata):
        rewards = 1 - 2 * super().__call__(images, prompts, metadata)
        without = torch.tensor([prompt in self.unscored for prompt in prompts])
        return rewards.masked_fill(without, math.nan)


def read(folder):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads((folder / "summary.json").read_text(), parse_constant=refuse)


def test_the_standard_error_is_that_of_paired_differences():
    generator = np.random.default_rng(0)
    before = generator.random(50)
    after = before + 0.1 + 0.05 * generator.standard_normal(50)
    before_by_prompt = {index: before[index] for index in range(50)}
    after_by_prompt = {index: after[index] for index in reversed(range(50))}
    comparison = compare(before_by_prompt, after_by_prompt)
    assert comparison.before == pytest.approx(before.mean())
    assert comparison.after == pytest.approx(after.mean())
    assert comparison.standard_error == pytest.approx((after - before).std(ddof=1) / math.sqrt(50))
    assert comparison[3:] == (50, 0)


def test_a_prompt_without_a_finite_score_on_either_side_is_left_out():
    before = {0: 0.1, 1: math.nan, 2: 0.3, 3: 0.5, 4: 0.2}
    after = {0: 0.2, 1: 0.9, 2: 0.6, 3: math.nan, 4: math.inf}
    comparison = compare(before, after)
    assert comparison == pytest.approx((0.2, 0.4, np.std([0.1, 0.3], ddof=1) / math.sqrt(2), 2, 3))


def test_one_pair_has_no_standard_error():
    assert math.isnan(compare({0: 0.1}, {0: 0.2}).standard_error)


def test_the_summary_of_a_run_equals_what_its_validations_saw(build, tmp_path, capsys):
    collector, norms = Collector(), GradientNorms()
    callbacks = [norms, KLTracker(), RunSummary(), collector]
    module, data, trainer = build(callbacks, steps=4, rewards=[Brightness(), Darkness()], val_check_interval=2)
    trainer.fit(module, data)
    printed = capsys.readouterr().out.splitlines()[-1]
    summary = read(tmp_path)
    first, last = collector.before_and_after(range(5))
    difference = np.subtract(last, first)
    assert np.abs(difference).min() > 0
    error = difference.std(ddof=1) / math.sqrt(5)
    assert collector.steps == [0, 2, 4]
    assert summary["heldout_prompts"] == 5
    assert summary["heldout_prompts_left_out"] == 0
    assert summary["heldout_reward_before"] == pytest.approx(np.mean(first))
    assert summary["heldout_reward_after"] == pytest.approx(np.mean(last))
    assert summary["paired_standard_error"] == pytest.approx(error)
    assert summary["steps"] == 4
    assert {phase: summary[f"seconds_{phase}"] for phase in collector.seconds} == pytest.approx(collector.seconds)
    assert sum(collector.seconds.values()) < summary["seconds_total"]
    assert summary["images_per_second"] < 4 * 4 / sum(collector.seconds.values())
    assert summary["images_per_second"] > 4 * 4 / summary["seconds_total"]
    assert summary["kl_final"] == pytest.approx(trainer.logger.curve("stability/kl")[3], rel=1e-5)
    assert summary["kl_image_nats_final"] == pytest.approx(trainer.logger.curve("stability/kl_image_nats")[3], rel=1e-5)
    assert summary["gradient_norm_median"] == pytest.approx(np.median(norms.history))
    bright, dark = summary["heldout_by_scorer"]["brightness"], summary["heldout_by_scorer"]["darkness"]
    for side in ("before", "after"):
        assert dark[side] == pytest.approx(1 - 2 * bright[side], abs=1e-6)
        assert bright[side] + dark[side] == pytest.approx(summary[f"heldout_reward_{side}"], abs=1e-6)
    assert dark["paired_standard_error"] == pytest.approx(2 * bright["paired_standard_error"], rel=1e-3)
    before, after = np.mean(first), np.mean(last)
    assert printed == f"held-out reward {before:.3f} -> {after:.3f} ({after - before:+.3f} +- {error:.3f}, 5 prompts)"


def test_the_validation_ahead_of_training_is_on_the_curves(build):
    collector = Collector()
    module, data, trainer = build([RunSummary(), collector], rewards=[Brightness()])
    trainer.fit(module, data)
    step, values = trainer.logger.rows[0]
    expected = np.mean(list(collector.validations[0].values()))
    assert step == 0
    assert values == pytest.approx({"reward/heldout": expected, "reward/heldout_brightness": expected})


def test_prompts_without_a_reward_are_counted_and_left_out(build, tmp_path):
    reward, collector = Darkness(), Collector()
    reward.unscored = {"prompt number 1", "prompt number 3"}
    module, data, trainer = build([RunSummary(), collector], rewards=[reward])
    trainer.fit(module, data)
    summary = read(tmp_path)
    first, last = collector.before_and_after([0, 2, 4])
    assert (summary["heldout_prompts"], summary["heldout_prompts_left_out"]) == (3, 2)
    assert summary["heldout_reward_before"] == pytest.approx(np.mean(first))
    assert summary["heldout_reward_after"] == pytest.approx(np.mean(last))


def test_a_number_that_does_not_exist_is_null(build, tmp_path):
    module, data, trainer = build([RunSummary()], heldout=1)
    trainer.fit(module, data)
    summary = read(tmp_path)
    assert summary["paired_standard_error"] is None
    assert "gradient_norm_median" not in summary


class SkipsFirst(MARGRPO):
    """Has a gradient that is not finite in the first rollout."""

    def mask_step_loss(self, rollout, *arguments):
        loss, metrics = super().mask_step_loss(rollout, *arguments)
        return (loss * math.nan if rollout.step == 0 else loss), metrics


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"steps": 3, "val_check_interval": 2}, [0, 2, 3]),
        ({"steps": 2, "val_check_interval": 2}, [0, 2]),
        ({"steps": 6, "val_check_interval": 2, "options": {"mask_steps_per_update": 1}}, [0, 4, 6]),
        ({"steps": 2, "val_check_interval": 2, "module_class": SkipsFirst}, [0, 1, 2]),
        ({"steps": 2, "val_check_interval": 9}, [0, 2]),
    ],
    ids=["not a multiple", "multiple", "two optimiser steps a rollout", "skipped update", "shorter than the interval"],
)
def test_the_last_step_is_validated_once_whatever_the_interval(build, tmp_path, options, steps):
    collector = Collector()
    module, data, trainer = build([RunSummary(), collector], **options)
    trainer.fit(module, data)
    assert collector.steps == steps
    summary = read(tmp_path)
    assert summary["steps"] == steps[-1]
    assert summary["heldout_reward_after"] == pytest.approx(np.mean(list(collector.validations[-1].values())))


def test_times_leave_validations_out_of_the_training_loop(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(margrpo.callbacks.summary, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    trainer = SimpleNamespace(world_size=2, max_steps=5, global_step=1, should_stop=False)
    outputs = {"kl": {0: torch.tensor(1.0), 3: torch.tensor(2.0)}, "kl_image_nats": torch.tensor(30.0), "seconds": 1.0}
    batch = SimpleNamespace(seconds={"rollout": 2.0, "reward": 0.5}, rewards=torch.zeros(6))
    summary = RunSummary()
    summary.before = {"reward/heldout": {0: 1.0}}
    for hook, moment in [("fit_start", 5), ("train_start", 25), ("batch", 29), ("validation_end", 129), ("batch", 135)]:
        clock.now = float(moment)
        if hook == "batch":
            summary.on_train_batch_end(trainer, None, outputs, batch, 0)
        else:
            getattr(summary, f"on_{hook}")(trainer, None)
    clock.now = 140.0
    seconds = {"rollout": 4.0, "reward": 1.0, "update": 2.0, "loop": 10.0}
    state = summary.state_dict()
    assert state["seconds"] == {**seconds, "before_resume": 135.0}
    assert state["images"] == 24
    assert summary.kl.tolist() == [1.5, 30.0]
    resumed = RunSummary()
    resumed.load_state_dict(state)
    clock.now = 1000.0
    resumed.on_fit_start(trainer, None)
    clock.now = 1010.0
    assert resumed.state_dict()["seconds"] == {**seconds, "before_resume": 145.0}


class Stop(L.Callback):
    """Ends the run after the third step, as a kill would."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 3:
            raise RuntimeError("killed")


@pytest.mark.parametrize("when", [{"every_n_train_steps": 1}, {"every_n_epochs": 1}], ids=["steps", "validations"])
def test_a_resumed_run_writes_the_same_summary(build, tmp_path, when):
    def run(folder, *callbacks, checkpoint=None):
        checkpoints = ModelCheckpoint(tmp_path / folder, save_top_k=-1, filename="{step}", **when)
        module, data, trainer = build(
            [GradientNorms(), RunSummary(), checkpoints, *callbacks],
            steps=4,
            val_check_interval=2,
            enable_checkpointing=True,
        )
        trainer.fit(module, data, ckpt_path=checkpoint)
        summary = read(tmp_path)
        (tmp_path / "summary.json").unlink()
        return {key: value for key, value in summary.items() if not key.startswith(("seconds", "images"))}

    whole = run("whole")
    with pytest.raises(RuntimeError, match="killed"):
        run("killed", Stop())
    assert not (tmp_path / "summary.json").exists()
    resumed = run("resumed", checkpoint=tmp_path / "killed" / "step=2.ckpt")
    assert whole["steps"] == 4
    assert resumed == whole


def test_resuming_with_other_heldout_prompts_is_refused(build, tmp_path):
    checkpoints = ModelCheckpoint(tmp_path, filename="{step}")
    module, data, trainer = build([RunSummary(), checkpoints], enable_checkpointing=True)
    trainer.fit(module, data)
    module, data, trainer = build([RunSummary()], steps=3, heldout=3)
    with pytest.raises(ValueError, match=r"not those that were scored before training.*data\.heldout_count"):
        trainer.fit(module, data, ckpt_path=tmp_path / "step=2.ckpt")


def test_a_partial_validation_ahead_of_training_is_refused(build):
    module, data, trainer = build([RunSummary()], num_sanity_val_steps=2)
    with pytest.raises(ValueError, match=r"trainer\.num_sanity_val_steps is 2.*set it to -1"):
        trainer.fit(module, data)


def test_no_validation_ahead_of_training_is_refused(build):
    module, data, trainer = build([RunSummary()], limit_val_batches=0)
    with pytest.raises(ValueError, match=r"no reward before training: set data\.heldout_prompts"):
        trainer.fit(module, data)
    assert data.next_step == 0
