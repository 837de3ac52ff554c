"""Which tokens are trained: the uncertain ones, and those that move towards the final image."""

import torch
import torch.nn.functional as F
from torch import Tensor


def uncertainty(end_points: Tensor) -> Tensor:
    return end_points.std(dim=0, correction=0).mean(-1)


def top_fraction(scores: Tensor, fraction: float, eligible: Tensor | None = None) -> Tensor:
    count = round(fraction * scores.shape[1])
    chosen = scores.argsort(dim=1, descending=True, stable=True)[:, :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True)


def consistency_gain(current: Tensor, previous: Tensor, final: Tensor) -> Tensor:
    return F.cosine_similarity(current, final, dim=-1) - F.cosine_similarity(previous, final, dim=-1)


def consistent(gain: Tensor, predicted: Tensor, threshold: float) -> Tensor:
    return (gain > threshold) | predicted
