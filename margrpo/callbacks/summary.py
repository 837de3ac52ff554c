"""The summary of a run: held-out reward before and after with its error, stability, time."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from margrpo.callbacks.stability import GradientNorms, KLTracker
from margrpo.rollout.types import Evaluation, Rollout

Scores = dict[str, dict[int, float]]
"""Scorer name (`total` for the combined reward) to prompt index to score."""


class RunSummary(L.Callback):
    """Writes `summary.json` at the end of training, and prints its main line.

    "Before" is the validation that Lightning runs ahead of training, "after" the last one. Both use the same prompts
    and the same noise, so that their differences are paired by prompt.
    """

    def __init__(self) -> None:
        self.before: Scores = {}
        self.latest: Scores = {}
        self.validated_step = 0
        self.seconds = {"rollout": 0.0, "reward": 0.0, "update": 0.0}
        self.images = 0
        self.seconds_before_resume = 0.0
        self.started = 0.0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Check that there will be a "before" and an "after".

        Raises:
            ValueError: naming the trainer options to change.
        """
        if stage != "fit":
            return
        if trainer.num_sanity_val_steps != float("inf"):
            raise ValueError("RunSummary compares with the untrained policy: set trainer.num_sanity_val_steps to -1")
        interval = trainer.val_check_interval
        if not isinstance(interval, int) or trainer.max_steps < 1 or trainer.max_steps % interval:
            raise ValueError(
                f"RunSummary needs a validation at the last step: trainer.max_steps is {trainer.max_steps}, "
                f"trainer.val_check_interval is {interval}; use a positive max_steps that is a multiple of an integer interval"
            )

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock."""
        self.started = time.perf_counter()

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Forget the previous validation."""
        self.latest = {}

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Evaluation,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep the scores by prompt."""
        assert batch.rewards is not None
        for name, values in {"total": batch.rewards, **batch.rewards_by_scorer}.items():
            self.latest.setdefault(name, {}).update(zip(batch.indices, values.tolist(), strict=True))

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Gather the ranks; log the validation ahead of training, which Lightning itself leaves out of the curves."""
        self.latest = _gather(self.latest, trainer.world_size)
        self.validated_step = trainer.global_step
        if trainer.sanity_checking:
            self.before = self.latest
            for logger in trainer.loggers:
                curves = {"reward/heldout" + ("" if name == "total" else f"_{name}"): v for name, v in self.latest.items()}
                logger.log_metrics({name: _mean(list(values.values())) for name, values in curves.items()}, step=0)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Rollout, batch_idx: int
    ) -> None:
        """Add up the time of the phases."""
        for phase, seconds in {**batch.seconds, "update": outputs["seconds"]}.items():
            self.seconds[phase] += seconds
        self.images += len(batch.rewards) * trainer.world_size

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the summary, whole or not at all."""
        if not trainer.is_global_zero or trainer.log_dir is None:
            return
        summary = self.summarise(trainer)
        file = Path(trainer.log_dir) / "summary.json"
        beside = file.with_suffix(".tmp")
        beside.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        os.replace(beside, file)
        before, after = summary["heldout_reward_before"], summary["heldout_reward_after"]
        rank_zero_info(
            f"held-out reward {before:.3f} -> {after:.3f} ({after - before:+.3f} ± {summary['paired_standard_error']:.3f}, "
            f"{summary['heldout_prompts']} prompts); summary in {file}"
        )

    def summarise(self, trainer: L.Trainer) -> dict[str, Any]:
        """Compute the content of `summary.json`."""
        before, after, error, left_out = compare(self.before["total"], self.latest["total"])
        summary: dict[str, Any] = {
            "heldout_prompts": len(self.before["total"]) - left_out,
            "heldout_prompts_without_reward": left_out,
            "heldout_reward_before": before,
            "heldout_reward_after": after,
            "paired_standard_error": error,
            "steps": trainer.global_step,
            "seconds_total": self.seconds_before_resume + time.perf_counter() - self.started,
            **{f"seconds_{phase}": seconds for phase, seconds in self.seconds.items()},
            "images_per_second": self.images / max(sum(self.seconds.values()), 1e-9),
        }
        for name in self.before.keys() - {"total"}:
            scorer_before, scorer_after, _, _ = compare(self.before[name], self.latest[name])
            summary[f"heldout_{name}_before"], summary[f"heldout_{name}_after"] = scorer_before, scorer_after
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, KLTracker) and callback.last:
                summary["kl_final"] = callback.last["stability/kl"]
                summary["kl_image_nats_final"] = callback.last["stability/kl_image_nats"]
            if isinstance(callback, GradientNorms) and callback.history:
                summary["gradient_norm_median"] = torch.tensor(callback.history).median().item()
        return summary

    def state_dict(self) -> dict[str, Any]:
        """Keep what a resumed run cannot measure again."""
        return {
            "before": self.before,
            "seconds": self.seconds,
            "images": self.images,
            "seconds_total": self.seconds_before_resume + time.perf_counter() - self.started,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the sums of an interrupted run."""
        self.before = state_dict["before"]
        self.seconds = dict(state_dict["seconds"])
        self.images = state_dict["images"]
        self.seconds_before_resume = state_dict["seconds_total"]


def compare(before: dict[int, float], after: dict[int, float]) -> tuple[float, float, float, int]:
    """Compare scores by prompt: both means, the standard error of the paired difference, and the pairs left out.

    A pair is left out where either score is NaN.
    """
    pairs = [(before[index], after[index]) for index in before]
    valid = [pair for pair in pairs if not any(map(math.isnan, pair))]
    differences = torch.tensor([second - first for first, second in valid], dtype=torch.float64)
    error = (differences.std(correction=1) / math.sqrt(len(valid))).item() if len(valid) > 1 else math.nan
    return _mean([first for first, _ in valid]), _mean([second for _, second in valid]), error, len(pairs) - len(valid)


def _mean(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def _gather(scores: Scores, world_size: int) -> Scores:
    if world_size == 1:
        return scores
    parts: list[Scores] = [{} for _ in range(world_size)]
    torch.distributed.all_gather_object(parts, scores)
    return {name: {k: v for part in parts for k, v in part.get(name, {}).items()} for name in scores}
