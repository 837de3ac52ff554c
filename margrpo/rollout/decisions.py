"""Selects which sampled transitions are trained, and lays them out as the flat decisions of a mask step."""

from dataclasses import dataclass

import torch
from torch import Tensor

from margrpo.objective.selection import consistency_gain, consistent, top_fraction, uncertainty
from margrpo.rollout.config import RolloutConfig
from margrpo.rollout.denoising import Conditions, TokenDenoiser, Trace
from margrpo.rollout.types import Decisions, MaskStep


@dataclass(frozen=True)
class Trajectories:
    """Extra trajectories of n tokens per image.

    Args:
        steps: the K denoising steps that were kept.
        end_points: fp32 [S, B, n, C].
        x_t: fp32 [K, S, B * n, C].
        x_prev: fp32 [K, S, B * n, C].
    """

    steps: list[int]
    end_points: Tensor
    x_t: Tensor
    x_prev: Tensor


@dataclass(frozen=True)
class StepRecord:
    """What was sampled at a trained mask step, for its n tokens in decoding order: predicted ones first.

    Args:
        index: the mask step.
        start: tokens known before it.
        stop: tokens known after it.
        conditions: of the B * n tokens.
        steps: the K trained denoising steps.
        trace: their transitions.
        end_points: fp32 [B, n, C], where the tokens ended.
        previous_end_points: fp32 [B, n, C], where they ended at the mask step before; None where nobody asks.
        trajectories: extra trajectories from this step's conditions; None when they are shared by all steps.
    """

    index: int
    start: int
    stop: int
    conditions: Conditions
    steps: list[int]
    trace: Trace
    end_points: Tensor
    previous_end_points: Tensor | None
    trajectories: Trajectories | None


def critical_tokens(config: RolloutConfig, trajectories: Trajectories | None, generated: Tensor) -> Tensor | None:
    """Return bool [B, n], the most uncertain tokens of each image; None when there are no extra trajectories.

    Args:
        config: settings of the rollout.
        trajectories: extra trajectories of the n tokens.
        generated: fp32 [B, n, C], end points of the trajectories that made the image.
    """
    if config.critical_fraction == 1.0 and config.extra_trajectories == 0:
        return torch.ones(generated.shape[:2], dtype=torch.bool, device=generated.device)
    if trajectories is None:
        return None
    end_points = trajectories.end_points
    if config.include_generating_trajectory:
        end_points = torch.cat([end_points, generated[None]])
    return top_fraction(uncertainty(end_points), config.critical_fraction)


def build_mask_step(
    record: StepRecord,
    order: Tensor,
    final: Tensor,
    shared: Trajectories | None,
    shared_critical: Tensor | None,
    config: RolloutConfig,
    denoiser: TokenDenoiser,
) -> MaskStep:
    """Apply the selections to a trained mask step.

    Args:
        record: what was sampled at it.
        order: int64 [B, N], decoding order.
        final: fp32 [B, N, C], finished latents in decoding order.
        shared: trajectories of all N tokens in decoding order, with `trajectory_source: composite`.
        shared_critical: bool [B, N] in decoding order, the critical tokens by those.
        config: settings of the rollout.
        denoiser: scores the extra trajectories under the mask step's own condition.
    """
    batch, count = record.end_points.shape[:2]
    window = slice(record.start, record.start + count)
    device = order.device
    predicted = (torch.arange(count, device=device) < record.stop - record.start).expand(batch, count)
    kept = torch.ones_like(predicted)
    if record.previous_end_points is not None:
        gain = consistency_gain(record.end_points, record.previous_end_points, final[:, window])
        assert config.consistency_threshold is not None
        kept = consistent(gain, predicted, config.consistency_threshold)

    trajectories = record.trajectories or shared
    critical = shared_critical
    if record.trajectories is not None:
        critical = critical_tokens(config, record.trajectories, record.end_points)
    elif critical is not None:
        critical = critical[:, window]
    critical = torch.zeros_like(kept) if critical is None else critical & kept

    share = 1.0 / config.num_trajectories
    main = kept if config.include_generating_trajectory else kept & ~critical
    main_weight = torch.ones_like(kept, dtype=torch.float32).masked_fill(critical, share)
    places = kept.flatten().nonzero().squeeze(1)
    place_of = kept.flatten().cumsum(0) - 1
    parts = [_main_rows(record, main.flatten().nonzero().squeeze(1), main_weight.flatten())]
    if trajectories is not None:
        offset = 0 if record.trajectories is not None else record.start
        tokens_per_image = trajectories.end_points.shape[2]
        parts.append(_trajectory_rows(record, trajectories, critical, offset, tokens_per_image, share, denoiser))
    rows = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    decisions = Decisions(
        image=places // count,
        token=order[:, window].flatten()[places],
        place=place_of[rows.pop("row")],
        weight=rows.pop("weight"),
        log_prob=rows.pop("log_prob"),
        payload=rows,
    )
    shares = {
        "critical": critical.float().mean().item(),
        "consistent": kept.float().mean().item(),
        "trained": kept.sum().item() / (batch * (order.shape[1] - record.start)),
    }
    return MaskStep(record.index, record.start, record.stop, decisions, shares)


def _main_rows(record: StepRecord, rows: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """Transitions of the trajectory that made the image, denoising step major; `rows` index the B * n tokens."""
    steps = torch.tensor(record.steps, device=rows.device)
    return {
        "row": rows.repeat(len(steps)),
        "weight": weight[rows].repeat(len(steps)),
        "log_prob": record.trace.log_prob[:, rows].flatten(),
        "x_t": record.trace.x_t[:, rows].flatten(0, 1),
        "x_prev": record.trace.x_prev[:, rows].flatten(0, 1),
        "step": steps.repeat_interleave(len(rows)),
        "std": record.trace.std[:, rows].flatten(0, 1),
    }


def _trajectory_rows(
    record: StepRecord,
    trajectories: Trajectories,
    critical: Tensor,
    offset: int,
    tokens_per_image: int,
    share: float,
    denoiser: TokenDenoiser,
) -> dict[str, Tensor]:
    """Transitions of the extra trajectories of critical tokens, trajectory major, then denoising step."""
    count = critical.shape[1]
    rows = critical.flatten().nonzero().squeeze(1)
    there = rows // count * tokens_per_image + rows % count + offset
    step_rows = torch.tensor([trajectories.steps.index(step) for step in record.steps], device=rows.device)
    x_t, x_prev = (
        states[step_rows].index_select(2, there).transpose(0, 1).flatten(1, 2)
        for states in (trajectories.x_t, trajectories.x_prev)
    )
    step = torch.tensor(record.steps, device=rows.device).repeat_interleave(len(rows))
    row = rows.repeat(len(record.steps))
    scores = denoiser.score(record.conditions.select(row), x_t, x_prev, step)
    log_prob = scores.log_prob.flatten()
    return {
        "row": row.repeat(len(x_t)),
        "weight": torch.full_like(log_prob, share),
        "log_prob": log_prob,
        "x_t": x_t.flatten(0, 1),
        "x_prev": x_prev.flatten(0, 1),
        "step": step.repeat(len(x_t)),
        "std": scores.std.expand(*x_t.shape[:-1], -1).flatten(0, 1),
    }
