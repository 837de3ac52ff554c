"""Curves that tell a stable run from a collapsing one: KL divergence from the reference, and gradient norms."""

from collections.abc import Iterable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from margrpo.module import MARGRPO
from margrpo.rollout.types import Rollout


class KLTracker(L.Callback):
    """Logs the KL divergence of the trained decisions from the reference, in nats, averaged over the ranks.

    `stability/kl` is the mean over channels, tokens and denoising steps; it looks small even when a policy has moved
    far, because it counts a single channel. `stability/kl_image_nats` is the same summed over an image.
    `kl_by_mask_step/step_07` is the mean of one trained mask step.
    """

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Rollout, batch_idx: int
    ) -> None:
        """Log the divergences that the update returned."""
        kl: dict[int, Tensor] = outputs["kl"]
        local = torch.stack([outputs["kl_image_nats"], *kl.values()])
        image_nats, *by_mask_step = trainer.strategy.reduce(local, reduce_op="mean").tolist()
        mean = sum(by_mask_step) / len(by_mask_step)
        pl_module.log_dict({"stability/kl": mean, "stability/kl_image_nats": image_nats})
        pl_module.log("kl", mean, prog_bar=True, logger=False)
        if trainer.log_every_n_steps and (batch.step + 1) % trainer.log_every_n_steps == 0:
            # Not through the module: Lightning repeats the last value of a curve at steps that did not log it.
            curves = {f"kl_by_mask_step/step_{index:02d}": v for index, v in zip(kl, by_mask_step, strict=True)}
            for logger in trainer.loggers:
                logger.log_metrics(curves, step=batch.step)


class GradientNorms(L.Callback):
    """Logs L2 norms of the gradient before clipping: overall, and for each part of the policy and a trained head.

    With several optimiser steps per rollout, the curves show the last of them. Steps that were skipped because the
    gradient was not finite do not count.
    """

    def __init__(self) -> None:
        self.history: list[float] = []

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Log before the module clips, which it does in its own hook, called after this one."""
        assert isinstance(pl_module, MARGRPO)
        parts = pl_module.model.policy_parts()
        if pl_module.train_head:
            parts["head"] = pl_module.model.head
        self.history.append(pl_module.gradient_norm.item())
        pl_module.log("stability/gradient_norm", pl_module.gradient_norm)
        pl_module.log_dict({f"gradient_norm/{name}": _gradient_norm(part.parameters()) for name, part in parts.items()})

    def state_dict(self) -> dict[str, Any]:
        """Keep the history, whose median the summary reports."""
        return {"history": self.history}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the history of an interrupted run."""
        self.history = list(state_dict["history"])


def _gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    return nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
