"""The summary of a run: held-out reward before and after with its error, stability, time."""

import json
import math
import os
import statistics
import time
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from margrpo.callbacks.ranks import gather, run_directory
from margrpo.callbacks.stability import GradientNorms
from margrpo.rollout.types import Evaluation, Rollout

TOTAL = "reward/heldout"

Scores = dict[str, dict[int, float]]
"""Curve (`reward/heldout`, and `reward/heldout_<scorer>` for each scorer) to prompt index to score."""


class RunSummary(L.Callback):
    """Writes `summary.json` at the end of training, and prints its main line.

    "Before" is the validation that Lightning runs ahead of training, "after" the one at the last step, which this
    callback asks for if the interval of validations does not lead there. Both use the same prompts and the same noise,
    so that their differences are paired by prompt.

    Keys, null where there is no number:
        `heldout_prompts`: prompts with a finite reward before and after; the means below are over these.
        `heldout_prompts_left_out`: the others.
        `heldout_reward_before`, `heldout_reward_after`: mean combined reward.
        `paired_standard_error`: of the mean difference, see `compare`.
        `heldout_by_scorer`: `before`, `after` and `paired_standard_error` of each scorer.
        `steps`: optimiser steps.
        `seconds_total`: from the start of fit, validations included.
        `seconds_rollout`, `seconds_reward`, `seconds_update`: phases of training, on rank 0.
        `images_per_second`: images of the rollouts of all ranks per second of the training loop, without validations.
        `kl_final`, `kl_image_nats_final`: of the last rollout, as `KLTracker` logs them.
        `gradient_norm_median`: over all optimiser steps, before clipping; absent without `GradientNorms`.
    """

    def __init__(self) -> None:
        self.before: Scores = {}
        self.latest: Scores = {}
        self.seconds = {"rollout": 0.0, "reward": 0.0, "update": 0.0, "loop": 0.0, "before_resume": 0.0}
        self.images = 0
        self.kl = torch.zeros(2)
        self.fit_started = 0.0
        self.loop_time = 0.0
        self.headline = ""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Check that the whole held-out set is scored before training.

        Raises:
            ValueError: naming the trainer option to change.
        """
        if stage == "fit" and trainer.num_sanity_val_steps != math.inf:
            raise ValueError(
                f"trainer.num_sanity_val_steps is {trainer.num_sanity_val_steps}, but RunSummary compares with the "
                "reward before training: set it to -1, or remove RunSummary from trainer.callbacks"
            )

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock."""
        self.fit_started = time.perf_counter()

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
        by_scorer = {f"{TOTAL}_{name}": values for name, values in batch.rewards_by_scorer.items()}
        for curve, values in {TOTAL: batch.rewards, **by_scorer}.items():
            self.latest.setdefault(curve, {}).update(zip(batch.indices, values.tolist(), strict=True))

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Gather the ranks; log the validation ahead of training, which Lightning itself leaves out of the curves.

        Raises:
            ValueError: a resumed run has other held-out prompts or scorers than the run it continues.
        """
        parts = gather(self.latest, trainer.world_size)
        self.latest = {c: {k: v for part in parts for k, v in part[c].items()} for c in parts[0]}
        if trainer.sanity_checking:
            self.before = self.latest
            means = {curve: _mean(list(filter(math.isfinite, v.values()))) for curve, v in self.before.items()}
            for logger in trainer.loggers:
                logger.log_metrics(means, step=0)
        elif trainer.state.fn == TrainerFn.FITTING and _places(self.before) != _places(self.latest):
            raise ValueError(
                "the held-out prompts or scorers are not those that were scored before training; a resumed run has to "
                "keep data.heldout_prompts, data.heldout_count and data.rewards"
            )

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leave the validation out of the training loop's time."""
        self.loop_time = time.perf_counter()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Check that there is a "before".

        Raises:
            ValueError: nothing was validated.
        """
        if not self.before:
            raise ValueError(
                "RunSummary has no reward before training: set data.heldout_prompts, keep trainer.limit_val_batches "
                "above 0, and resume only from runs with RunSummary; or remove it from trainer.callbacks"
            )
        self.loop_time = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Rollout, batch_idx: int
    ) -> None:
        """Add up times; ask for a validation at the last step."""
        now = time.perf_counter()
        for phase, seconds in {**batch.seconds, "update": outputs["seconds"], "loop": now - self.loop_time}.items():
            self.seconds[phase] += seconds
        self.loop_time = now
        self.images += len(batch.rewards) * trainer.world_size
        self.kl = torch.stack([torch.stack(list(outputs["kl"].values())).mean(), outputs["kl_image_nats"]])
        if 0 < trainer.max_steps <= trainer.global_step:
            # Lightning validates before it stops early. The interval alone does not ensure it, since it counts rollouts
            # and max_steps optimiser steps: a rollout takes several, or none when its gradient is not finite.
            trainer.should_stop = True

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the summary, whole or not at all."""
        file = run_directory(trainer) / "summary.json"
        kl = trainer.strategy.reduce(self.kl, reduce_op="mean")
        if not trainer.is_global_zero:
            return
        total = compare(self.before[TOTAL], self.latest[TOTAL])
        file.parent.mkdir(parents=True, exist_ok=True)
        beside = file.with_suffix(".tmp")
        content = _without_nan(self._summarise(trainer, total, kl))
        beside.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(beside, file)
        self.headline = (
            f"held-out reward {total.before:.3f} -> {total.after:.3f} "
            f"({total.after - total.before:+.3f} +- {total.standard_error:.3f}, {total.prompts} prompts)"
        )

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print the main line, after the progress bar is gone."""
        if self.headline:
            print(self.headline)

    def _summarise(self, trainer: L.Trainer, total: "Comparison", kl: Tensor) -> dict[str, Any]:
        by_scorer = {
            curve.removeprefix(f"{TOTAL}_"): compare(scores, self.latest[curve])
            for curve, scores in self.before.items()
            if curve != TOTAL
        }
        summary = {
            "heldout_prompts": total.prompts,
            "heldout_prompts_left_out": total.left_out,
            "heldout_reward_before": total.before,
            "heldout_reward_after": total.after,
            "paired_standard_error": total.standard_error,
            "heldout_by_scorer": {
                name: {"before": c.before, "after": c.after, "paired_standard_error": c.standard_error}
                for name, c in by_scorer.items()
            },
            "steps": trainer.global_step,
            "seconds_total": self._seconds_total(),
            **{f"seconds_{phase}": self.seconds[phase] for phase in ("rollout", "reward", "update")},
            "images_per_second": self.images / self.seconds["loop"],
            "kl_final": kl[0].item(),
            "kl_image_nats_final": kl[1].item(),
        }
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, GradientNorms) and callback.history:
                summary["gradient_norm_median"] = statistics.median(callback.history)
        return summary

    def _seconds_total(self) -> float:
        return self.seconds["before_resume"] + time.perf_counter() - self.fit_started

    def state_dict(self) -> dict[str, Any]:
        """Keep what a resumed run cannot measure again."""
        seconds = {**self.seconds, "before_resume": self._seconds_total()}
        return {"before": self.before, "seconds": seconds, "images": self.images}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the sums of an interrupted run."""
        self.before = state_dict["before"]
        self.seconds = dict(state_dict["seconds"])
        self.images = state_dict["images"]


class Comparison(NamedTuple):
    """Scores of the same prompts before and after; the means are over the prompts that are not left out."""

    before: float
    after: float
    standard_error: float
    prompts: int
    left_out: int


def compare(before: dict[int, float], after: dict[int, float]) -> Comparison:
    """Compare scores by prompt index.

    A prompt is left out where either score is not finite. The standard error is that of the mean of the n differences,
    their unbiased standard deviation / sqrt(n); NaN below two of them.
    """
    pairs = [(score, after[index]) for index, score in before.items()]
    valid = [pair for pair in pairs if all(map(math.isfinite, pair))]
    differences = [second - first for first, second in valid]
    error = statistics.stdev(differences) / math.sqrt(len(valid)) if len(valid) > 1 else math.nan
    before_mean, after_mean = (_mean([pair[side] for pair in valid]) for side in (0, 1))
    return Comparison(before_mean, after_mean, error, len(valid), len(pairs) - len(valid))


def _mean(values: list[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def _places(scores: Scores) -> dict[str, set[int]]:
    return {curve: set(by_prompt) for curve, by_prompt in scores.items()}


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
