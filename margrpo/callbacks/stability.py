"""Curves that tell a stable run from a collapsing one: KL divergence from the reference, and gradient norms."""

from typing import Any

import lightning as L
import torch
from torch import Tensor

from margrpo.module import MARGRPO
from margrpo.rollout.types import Rollout


class KLTracker(L.Callback):
    """Logs the KL divergence of the trained decisions from the reference, in nats.

    `stability/kl` is the mean over channels, tokens and denoising steps; it looks small even when a policy has moved
    far, because it counts a single channel. `stability/kl_image_nats` is the same summed over an image.
    `kl_by_mask_step/…` has one curve per trained mask step.
    """

    def __init__(self) -> None:
        self.last: dict[str, float] = {}

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Rollout, batch_idx: int
    ) -> None:
        """Log the divergences that the update returned."""
        kl: dict[int, Tensor] = outputs["kl"]
        values = {"stability/kl": torch.stack(list(kl.values())).mean(), "stability/kl_image_nats": outputs["kl_image_nats"]}
        self.last = {name: value.item() for name, value in values.items()}
        pl_module.log("kl", values["stability/kl"], prog_bar=True, logger=False)
        pl_module.log_dict(values)
        # Not through the module: Lightning repeats the last value of a curve at steps that did not log it.
        by_mask_step = {f"kl_by_mask_step/step_{index:02d}": value.item() for index, value in kl.items()}
        for logger in trainer.loggers:
            logger.log_metrics(by_mask_step, step=batch.step)


class GradientNorms(L.Callback):
    """Logs L2 norms of the gradient before clipping: overall, and for each part of the policy."""

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
        values = {f"gradient_norm/{name}": _norm(list(part.parameters())) for name, part in parts.items()}
        values["stability/gradient_norm"] = _norm([p for group in optimizer.param_groups for p in group["params"]])
        self.history.append(values["stability/gradient_norm"].item())
        pl_module.log_dict(values)

    def state_dict(self) -> dict[str, Any]:
        """Keep the history, whose median the summary reports."""
        return {"history": self.history}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the history of an interrupted run."""
        self.history = list(state_dict["history"])


def _norm(parameters: list[Tensor]) -> Tensor:
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
