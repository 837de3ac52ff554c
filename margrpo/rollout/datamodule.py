"""Data of a run: prompts go in, scored grouped rollouts (or held-out evaluations) come out."""

from collections.abc import Iterable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from margrpo.clock import time_when_done
from margrpo.diffusion.transition import Transition
from margrpo.models.base import HybridModel
from margrpo.rewards.base import Reward
from margrpo.rewards.combiner import RewardCombiner
from margrpo.rollout.config import RolloutConfig, SamplingConfig
from margrpo.rollout.denoising import TokenDenoiser
from margrpo.rollout.noise import SampleNoise, stable_seed
from margrpo.rollout.plan import RolloutPlan, draw_plan
from margrpo.rollout.prompts import HeldOutPrompts, PromptBatch, PromptStream, prompts_per_rank, read_prompts
from margrpo.rollout.sampler import generate, roll_out
from margrpo.rollout.types import Evaluation, Rollout

HELD_OUT = -1
"""Stands for the step in the noise seeds of images that are generated for evaluation, so that they never change."""


class RolloutDataModule(L.LightningDataModule):
    """Feeds a `MARGRPO` module.

    Args:
        train_prompts: prompt file for training (.txt, .csv, .jsonl, .json).
        heldout_prompts: prompt file for validation; null to train without.
        predict_prompts: prompt file for `margrpo predict`.
        rewards: scorers; each a class path with its arguments.
        reward_weights: one factor per reward; null is 1 for all.
        reward_micro_batch: images per call of a scorer; null is all at once.
        rollout: how groups are sampled for training and what is kept of them.
        evaluation: how held-out and predicted images are sampled; null takes mask steps, denoising steps and guidance
            of the rollout. The official sampler's steps are used, without the noise that training adds.
        prompts_per_step: P, prompts of a rollout over all ranks.
        heldout_count: only the first so many held-out prompts are used; null is all.
        evaluation_batch: prompts per batch of validation and prediction.
        seed: of prompt order, trained steps and every sample's noise.
    """

    def __init__(
        self,
        train_prompts: str,
        rewards: list[Reward],
        heldout_prompts: str | None = None,
        predict_prompts: str | None = None,
        reward_weights: list[float] | None = None,
        reward_micro_batch: int | None = None,
        rollout: RolloutConfig = RolloutConfig(),  # noqa: B008 - frozen
        evaluation: SamplingConfig | None = None,
        prompts_per_step: int = 1,
        heldout_count: int | None = None,
        evaluation_batch: int = 64,
        seed: int = 20,
    ) -> None:
        super().__init__()
        if heldout_count is not None and heldout_count < 1:
            raise ValueError(f"heldout_count is {heldout_count}; it must be at least 1, or null for all")
        self.train_prompts = train_prompts
        self.heldout_prompts = heldout_prompts
        self.predict_prompts = predict_prompts
        self.reward = RewardCombiner(rewards, reward_weights, reward_micro_batch)
        self.rollout = rollout
        self.evaluation = evaluation or rollout
        self.prompts_per_step = prompts_per_step
        self.heldout_count = heldout_count
        self.evaluation_batch = evaluation_batch
        self.seed = seed
        self.next_step = 0
        self.records: dict[str, list[dict[str, Any]]] = {}

    def setup(self, stage: str) -> None:
        """Read the prompt files and draw a plan, so that what is wrong stops the run before any compute is spent."""
        trainer = self._trainer()
        if stage == "fit":
            self._read("fit", self.train_prompts)
            prompts_per_rank(self.prompts_per_step, trainer.world_size)
            self.plan(self._model(), step=0)
        if stage in ("fit", "validate") and self.heldout_prompts is not None:
            self._read("validate", self.heldout_prompts, self.heldout_count)
        if stage == "predict":
            if self.predict_prompts is None:
                raise ValueError("predict_prompts is not set; name a prompt file with --data.predict_prompts")
            self._read("predict", self.predict_prompts)
        self.reward.to(trainer.strategy.root_device)

    def train_dataloader(self) -> Iterable[PromptBatch]:
        """Endless prompts of this rank, from the step after the last one that was trained."""
        trainer = self._trainer()
        return PromptStream(
            self.records["fit"],
            self.prompts_per_step,
            self.seed,
            trainer.global_rank,
            trainer.world_size,
            start_step=self.next_step,
        )

    def val_dataloader(self) -> Iterable[PromptBatch]:
        """Held-out prompts of this rank; none when there is no file."""
        return self._held_out("validate") if "validate" in self.records else []

    def predict_dataloader(self) -> Iterable[PromptBatch]:
        """Prompts of this rank to make images of."""
        return self._held_out("predict")

    def on_after_batch_transfer(self, batch: PromptBatch, dataloader_idx: int) -> Rollout | Evaluation:
        """Turn prompts into images and scores, with the policy as it is now."""
        trainer = self._trainer()
        model = self._model()
        with trainer.precision_plugin.forward_context():
            if trainer.training:
                rollout = self.roll_out(model, batch)
                self.next_step = batch.step + 1
                return rollout
            return self.evaluate(model, batch, score=not trainer.predicting)

    def plan(self, model: HybridModel, step: int) -> tuple[Transition, RolloutPlan]:
        """Draw the steps that a rollout trains, with the transition they belong to.

        Raises:
            ValueError: the model's schedules do not have the steps that the configuration asks for.
        """
        config = self.rollout
        transition = model.transition(config.denoising_steps, config.noise_level, config.stochastic_steps)
        schedule = model.mask_schedule(config.mask_steps)
        return transition, draw_plan(config, schedule, transition.trainable_steps, self.seed, step)

    @torch.no_grad()
    def roll_out(self, model: HybridModel, batch: PromptBatch) -> Rollout:
        """Sample G images per prompt, keep the decisions of the drawn steps, and score the images."""
        config = self.rollout
        started = time_when_done(model.device)
        prompts = [record["prompt"] for record in batch.records]
        condition = model.encode(prompts)
        transition, plan = self.plan(model, batch.step)
        seeds = [
            stable_seed(self.seed, batch.step, index, lap * config.group_size + sample)
            for index, lap in zip(batch.indices, batch.laps, strict=True)
            for sample in range(config.group_size)
        ]
        noise = SampleNoise(seeds, model.num_tokens, model.token_channels, model.device)
        denoiser = TokenDenoiser(model.head, transition, score_guided=config.score_guided)
        sampled = roll_out(model, condition, config, plan, denoiser, noise)
        images = decode(model, sampled.latents)
        sampling_done = time_when_done(model.device)
        repeated = [record for record in batch.records for _ in range(config.group_size)]
        result = self.reward(images, [record["prompt"] for record in repeated], repeated)
        seconds = {"rollout": sampling_done - started, "reward": time_when_done(model.device) - sampling_done}
        return Rollout(
            step=batch.step,
            config=config,
            prompts=prompts,
            condition=condition,
            order=sampled.order,
            latents=sampled.latents,
            mask_steps=sampled.mask_steps,
            images=images,
            rewards=result.total,
            rewards_by_scorer=result.per_reward,
            seconds=seconds,
            head_tokens=sampled.head_tokens,
        )

    @torch.no_grad()
    def evaluate(self, model: HybridModel, batch: PromptBatch, *, score: bool) -> Evaluation:
        """Generate one image per prompt, always from the same noise, and score it when asked."""
        sampling = self.evaluation
        prompts = [record["prompt"] for record in batch.records]
        transition = model.transition(sampling.denoising_steps, noise_level=1.0, stochastic_steps=None)
        seeds = [stable_seed(self.seed, HELD_OUT, index) for index in batch.indices]
        noise = SampleNoise(seeds, model.num_tokens, model.token_channels, model.device)
        denoiser = TokenDenoiser(model.head, transition, score_guided=False)
        latents = generate(model, model.policy, model.encode(prompts), sampling, denoiser, noise)
        images = decode(model, latents)
        if not score:
            return Evaluation(batch.indices, prompts, batch.records, images, None, {})
        result = self.reward(images, prompts, batch.records)
        return Evaluation(batch.indices, prompts, batch.records, images, result.total, result.per_reward)

    def state_dict(self) -> dict[str, Any]:
        """Keep the place in the prompt order."""
        return {"next_step": self.next_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on after the last trained step."""
        self.next_step = state_dict["next_step"]

    def _read(self, stage: str, path: str, count: int | None = None) -> None:
        self.records[stage] = records = read_prompts(path)[:count]
        truncated = self._model().count_truncated([record["prompt"] for record in records])
        if truncated:
            rank_zero_warn(
                f"{path}: {truncated} of {len(records)} prompts are truncated, because the text encoder takes no more"
            )

    def _held_out(self, stage: str) -> HeldOutPrompts:
        trainer = self._trainer()
        return HeldOutPrompts(self.records[stage], self.evaluation_batch, trainer.global_rank, trainer.world_size)

    def _model(self) -> HybridModel:
        model = self._trainer().lightning_module.model
        assert isinstance(model, HybridModel)
        return model

    def _trainer(self) -> L.Trainer:
        assert self.trainer is not None, "the data module works inside a Trainer"
        return self.trainer


def decode(model: HybridModel, latents: Tensor) -> Tensor:
    """Decode latents [B, N, C] to images uint8 [B, 3, H, W], outside the trainer's autocast, which shows in pixels."""
    with torch.autocast(latents.device.type, enabled=False):
        return model.decode(latents)
