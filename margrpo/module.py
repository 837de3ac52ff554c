"""The LightningModule of MAR-GRPO: policy, frozen head, frozen reference, and the update on a rollout."""

import copy
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor, nn

from margrpo.clock import time_when_done
from margrpo.models.base import HybridModel
from margrpo.objective.advantage import Advantages, group_advantages
from margrpo.objective.loss import ObjectiveConfig, image_nats
from margrpo.rollout.denoising import TokenDenoiser
from margrpo.rollout.diversity import group_diversity
from margrpo.rollout.types import Evaluation, MaskStep, Rollout
from margrpo.update import Reference, image_prefix, mask_step_loss


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (arXiv 1711.05101) with a linear warm-up to a constant learning rate.

    Args:
        learning_rate: of the policy.
        betas: decay of the two moments.
        weight_decay: decoupled weight decay.
        warmup_steps: optimiser steps until the learning rate is reached; 0 starts at it.
        max_gradient_norm: gradients are scaled down to this norm over all trained parameters.
    """

    learning_rate: float = 2e-6
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    warmup_steps: int = 0
    max_gradient_norm: float = 1.0

    def __post_init__(self) -> None:
        for name in ("learning_rate", "max_gradient_norm"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")
        for name in ("weight_decay", "warmup_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative")


class NonFiniteError(RuntimeError):
    """Too many updates in a row had a gradient that is not finite."""


class MARGRPO(L.LightningModule):
    """Trains the policy of a hybrid model on rollouts.

    Args:
        model: the generator; a class path such as `margrpo.models.nova.from_pretrained` with its arguments.
        objective: advantages, clipping and KL.
        optimizer: AdamW and its schedule.
        train_head: train the diffusion head too. False is the method; True is the end-to-end baseline the paper starts
            from.
        head_lr_scale: learning rate of a trained head, as a factor of the policy's.
        mask_steps_per_update: `all`: one optimiser step per pass over a rollout. 1: one after each trained mask step,
            as the published runs did; later ones are then corrected by the recorded log-probabilities.
        num_iterations: passes over each rollout (GRPO's mu, arXiv 2402.03300).
        max_skipped_updates: an update whose gradient is not finite is skipped; the run stops after so many in a row.
    """

    gradient_norm: Tensor
    """L2 norm of the last gradient over all trained parameters, before clipping."""

    def __init__(
        self,
        model: HybridModel,
        objective: ObjectiveConfig = ObjectiveConfig(),  # noqa: B008 - frozen
        optimizer: OptimizerConfig = OptimizerConfig(),
        train_head: bool = False,
        head_lr_scale: float = 1.0,
        mask_steps_per_update: Literal["all", 1] = "all",
        num_iterations: int = 1,
        max_skipped_updates: int = 5,
    ) -> None:
        super().__init__()
        if num_iterations < 1:
            raise ValueError(f"num_iterations is {num_iterations}; it must be at least 1")
        if mask_steps_per_update not in ("all", 1):
            raise ValueError(f"mask_steps_per_update is {mask_steps_per_update!r}; accepted: 'all', 1")
        if max_skipped_updates < 1:
            raise ValueError(f"max_skipped_updates is {max_skipped_updates}; it must be at least 1")
        if head_lr_scale < 0:
            raise ValueError(f"head_lr_scale is {head_lr_scale}; it must not be negative")
        self.automatic_optimization = False
        self.strict_loading = False
        self.model = model
        self.model.freeze(train_head=train_head)
        self.reference = copy.deepcopy(model.policy).requires_grad_(False)
        self.initial_head = copy.deepcopy(model.head).requires_grad_(False) if train_head else None
        self.objective = objective
        self.optimizer_config = optimizer
        self.train_head = train_head
        self.head_lr_scale = head_lr_scale
        self.mask_steps_per_update = mask_steps_per_update
        self.num_iterations = num_iterations
        self.max_skipped_updates = max_skipped_updates
        self.skipped_in_a_row = 0
        self.skipped_updates = 0
        self.heldout_rewards: dict[str, list[Tensor]] = {}
        self.eval()

    def setup(self, stage: str) -> None:
        """Check the precision of training.

        Raises:
            ValueError: it is fp16.
        """
        if stage == "fit" and self.trainer.precision in ("16-mixed", "16-true"):
            raise ValueError(
                f"trainer.precision is {self.trainer.precision}, but fp16 needs a scaled loss, which the update does "
                "not support; accepted: bf16-mixed, 32-true"
            )

    def configure_optimizers(self) -> dict[str, Any]:
        """AdamW over the policy, and the head where it is trained."""
        config = self.optimizer_config
        groups = [
            {"params": [p for p in self.model.policy.parameters() if p.requires_grad], "lr": config.learning_rate}
        ]
        if self.train_head:
            groups.append(
                {"params": list(self.model.head.parameters()), "lr": config.learning_rate * self.head_lr_scale}
            )
        optimizer = torch.optim.AdamW(groups, betas=config.betas, weight_decay=config.weight_decay)
        warmup = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / (config.warmup_steps + 1))
        )
        return {"optimizer": optimizer, "lr_scheduler": warmup}

    def training_step(self, rollout: Rollout, batch_idx: int) -> dict[str, Any]:
        """Update on one rollout.

        Returns:
            `kl`: by trained mask step, closed-form KL divergence from the reference in nats, mean over the channels of
            the trained decisions; `kl_image_nats`: the same summed over the channels, tokens and stochastic denoising
            steps of an image; `seconds`: of the update.
        """
        started = time_when_done(self.device)
        config = rollout.config
        rewards = self._all_rewards(rollout)
        advantages = group_advantages(rewards["reward/train"], config.group_size, self.objective.advantage_scale)
        advantage = advantages.values.view(self.trainer.world_size, -1)[self.global_rank]
        transition = self.model.transition(config.denoising_steps, config.noise_level, config.stochastic_steps)
        denoiser = TokenDenoiser(self.model.head, transition, score_guided=config.score_guided)
        reference_denoiser = TokenDenoiser(
            self.initial_head or self.model.head, transition, score_guided=config.score_guided
        )
        with torch.no_grad():
            reference = Reference(self.reference, reference_denoiser, image_prefix(self.model, self.reference, rollout))
        # Ranks average their gradients: divided by the mean of their weights, that is the gradient over all samples.
        weights = torch.stack([mask_step.decisions.weight.sum() for mask_step in rollout.mask_steps])
        total_weights = self.trainer.strategy.reduce(weights, reduce_op="mean")
        steps = list(zip(rollout.mask_steps, total_weights, strict=True))
        per_update = len(steps) if self.mask_steps_per_update == "all" else 1
        metrics: dict[int, dict[str, Tensor]] = {}
        for _ in range(self.num_iterations):
            for first in range(0, len(steps), per_update):
                of_update = steps[first : first + per_update]
                for mask_step, total_weight in of_update:
                    loss, metrics[mask_step.index] = self.mask_step_loss(
                        rollout, mask_step, total_weight, advantage, denoiser, reference
                    )
                    self.manual_backward(loss / len(of_update))
                self.optimizer_step_if_finite()
        seconds = time_when_done(self.device) - started
        self._log_rollout(rollout, rewards, advantages)
        self._log_update(metrics, denoiser.head_tokens + reference_denoiser.head_tokens, seconds)
        kl = {index: values["kl"] for index, values in metrics.items()}
        mean_kl = torch.stack(list(kl.values())).mean()
        sizes = self.model.token_channels, self.model.num_tokens, len(transition.trainable_steps)
        return {
            "kl": kl,
            "kl_image_nats": image_nats(mean_kl, *sizes),
            "seconds": seconds,
        }

    def mask_step_loss(
        self,
        rollout: Rollout,
        mask_step: MaskStep,
        total_weight: Tensor,
        advantage: Tensor,
        denoiser: TokenDenoiser,
        reference: Reference,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of one trained mask step and its metrics; see `margrpo.update.mask_step_loss`."""
        return mask_step_loss(
            self.model,
            reference,
            rollout,
            mask_step,
            advantage,
            self.objective,
            denoiser,
            on_policy=self.num_iterations == 1 and self.mask_steps_per_update == "all",
            total_weight=total_weight,
        )

    def optimizer_step_if_finite(self) -> None:
        """Step, unless the gradient is not finite: then drop it and count.

        Raises:
            NonFiniteError: after `max_skipped_updates` in a row.
        """
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        assert isinstance(optimizer, L.pytorch.core.optimizer.LightningOptimizer)
        assert isinstance(schedule, torch.optim.lr_scheduler.LRScheduler)
        self.gradient_norm = nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        if torch.isfinite(self.gradient_norm):
            self.skipped_in_a_row = 0
            optimizer.step()
            schedule.step()
        else:
            self.skipped_in_a_row += 1
            self.skipped_updates += 1
        optimizer.zero_grad()
        if self.skipped_in_a_row >= self.max_skipped_updates:
            raise NonFiniteError(
                f"the gradient was not finite in {self.skipped_in_a_row} updates in a row (norm "
                f"{self.gradient_norm.item()}); lower the learning rate, or look at the rewards and "
                "stability/ratio_deviation"
            )

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip; callbacks have seen the gradient by then."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grads_with_norm_(parameters, self.optimizer_config.max_gradient_norm, self.gradient_norm)

    def on_validation_epoch_start(self) -> None:
        """Forget the previous validation."""
        self.heldout_rewards = {}

    def validation_step(self, evaluation: Evaluation, batch_idx: int) -> None:
        """Keep the held-out rewards, in all and by scorer."""
        assert evaluation.rewards is not None
        by_scorer = {f"reward/heldout_{name}": values for name, values in evaluation.rewards_by_scorer.items()}
        for name, values in {"reward/heldout": evaluation.rewards, **by_scorer}.items():
            self.heldout_rewards.setdefault(name, []).append(values)

    def on_validation_epoch_end(self) -> None:
        """Log the mean held-out rewards of all ranks; images without a reward are left out, NaN when none is left."""
        for name, parts in self.heldout_rewards.items():
            values = torch.cat(parts)
            known = values[values.isfinite()]
            # Not Lightning's own mean over ranks: it rounds the mean number of images down to an integer.
            sums = torch.stack([known.sum(), known.new_tensor(len(known))])
            total, count = self.trainer.strategy.reduce(sums, reduce_op="sum")
            self.log(name, total / count, sync_dist=True, prog_bar=name == "reward/heldout")

    def predict_step(self, evaluation: Evaluation, batch_idx: int) -> list[int]:
        """Say which prompts were drawn; the images themselves go to disk by a callback, they would fill the memory."""
        return evaluation.indices

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep what training changes; everything frozen is in the checkpoint the run started from."""
        checkpoint["state_dict"] = {key: checkpoint["state_dict"][key] for key in self._trained_keys()}
        checkpoint["skipped_updates"] = [self.skipped_updates, self.skipped_in_a_row]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check that a training checkpoint belongs to this configuration, and go on counting skipped updates.

        Raises:
            ValueError: naming the first weights that are missing, or not trained here.
        """
        expected, found = self._trained_keys(), checkpoint["state_dict"].keys()
        wrong = [f"lacks {key}" for key in expected if key not in found]
        wrong += [f"has {key}, which is not trained here" for key in found if key not in expected]
        if wrong:
            raise ValueError(f"the training checkpoint {wrong[0]}; is it from a run with another model or train_head?")
        self.skipped_updates, self.skipped_in_a_row = checkpoint["skipped_updates"]

    def _trained_keys(self) -> list[str]:
        prefixes = ("model.policy.", "model.head.") if self.train_head else ("model.policy.",)
        return [key for key in self.state_dict() if key.startswith(prefixes)]

    def _all_rewards(self, rollout: Rollout) -> dict[str, Tensor]:
        """Gather the rewards of all ranks, in all and by scorer, each fp32 [ranks * B] under the name of its curve."""
        by_scorer = {f"reward/train_{name}": values for name, values in rollout.rewards_by_scorer.items()}
        gathered = self.all_gather({"reward/train": rollout.rewards, **by_scorer})
        return {name: values.flatten() for name, values in gathered.items()}

    def _log_rollout(self, rollout: Rollout, rewards: dict[str, Tensor], advantages: Advantages) -> None:
        means = {name: values[values.isfinite()].mean() for name, values in rewards.items()}
        self.log("reward", means["reward/train"], prog_bar=True, logger=False)
        self.log_dict(
            {
                **means,
                "reward/group_std": advantages.group_std.mean(),
                "reward/zero_std_share": advantages.zero_std_groups / len(advantages.group_std),
                "reward/invalid_images": float(advantages.invalid),
            }
        )
        shares = [mask_step.shares for mask_step in rollout.mask_steps]
        self.log_dict(
            {
                **{f"rollout/{name}_share": fmean(share[name] for share in shares) for name in shares[0]},
                "rollout/diversity": group_diversity(rollout.images, rollout.config.group_size),
                **{f"time/{phase}": seconds for phase, seconds in rollout.seconds.items()},
            },
            sync_dist=True,
        )
        self.log("rollout/head_tokens", float(rollout.head_tokens), sync_dist=True, reduce_fx="sum")

    def _log_update(self, metrics: dict[int, dict[str, Tensor]], head_tokens: int, seconds: float) -> None:
        by_step = list(metrics.values())
        mean = {name: torch.stack([values[name] for values in by_step]).mean() for name in by_step[0]}
        worst = torch.stack([values["ratio_deviation"] for values in by_step]).max()
        self.log_dict(
            {
                "stability/policy_loss": mean["policy_loss"],
                "stability/loss": mean["loss"],
                "stability/clip_share": mean["clip_share"],
                "stability/skipped_updates": float(self.skipped_updates),
                "time/update": seconds,
            },
            sync_dist=True,
        )
        self.log("stability/ratio_deviation", worst, sync_dist=True, reduce_fx="max")
        self.log("rollout/update_head_tokens", float(head_tokens), sync_dist=True, reduce_fx="sum")
