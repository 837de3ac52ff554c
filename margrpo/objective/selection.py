"""Which tokens are trained: the uncertain ones by many trajectories, and only those that move towards the final image."""

import torch
import torch.nn.functional as F
from torch import Tensor


def uncertainty(end_points: Tensor) -> Tensor:
    """Spread of where a token's trajectories end (arXiv 2604.06966).

    Args:
        end_points: [S, B, n, C].

    Returns:
        [B, n]: population standard deviation over the S trajectories, averaged over channels.
    """
    return end_points.std(dim=0, correction=0).mean(-1)


def top_fraction(scores: Tensor, fraction: float) -> Tensor:
    """Mark the highest scores of each row.

    Args:
        scores: [B, n].
        fraction: share to mark, in [0, 1].

    Returns:
        bool [B, n]; exactly round(fraction * n) per row are True, of equal scores the first ones.
    """
    count = round(fraction * scores.shape[1])
    chosen = scores.argsort(dim=1, descending=True, stable=True)[:, :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True)


def consistency_gain(current: Tensor, previous: Tensor, final: Tensor) -> Tensor:
    """How much closer to its final value a token's end point came from one mask step to the next.

    Args:
        current: [B, n, C], end points at the mask step.
        previous: [B, n, C], end points at the one before.
        final: [B, n, C], finished latents.

    Returns:
        [B, n] in [-2, 2]: gain in cosine similarity over channels; a zero vector is similar to nothing.
    """
    return F.cosine_similarity(current, final, dim=-1) - F.cosine_similarity(previous, final, dim=-1)


def consistent(gain: Tensor, predicted: Tensor, threshold: float) -> Tensor:
    """Mark the tokens that are trained: bool [B, n].

    Args:
        gain: [B, n].
        predicted: bool [B, n], tokens the mask step puts into the image; they stay whatever their gain.
        threshold: tau; the gain must exceed it.
    """
    return (gain > threshold) | predicted
