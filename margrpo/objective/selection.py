"""Which tokens are trained: the uncertain ones, and those that move towards the finished image (arXiv 2604.06966)."""

import torch.nn.functional as F
from torch import Tensor


def uncertainty(end_points: Tensor) -> Tensor:
    """Standard deviation over S trajectories, averaged over channels.

    Args:
        end_points: fp32 [S, B, n, C], where the trajectories of each token ended.

    Returns:
        fp32 [B, n]; population standard deviation, so that S = 1 gives 0.
    """
    return end_points.std(dim=0, correction=0).mean(-1)


def top_fraction(scores: Tensor, fraction: float) -> Tensor:
    """Select the same share of every image's tokens, those with the highest scores.

    Args:
        scores: float [B, n], finite.
        fraction: share in [0, 1]; round(fraction * n) tokens are selected, halves to even.

    Returns:
        bool [B, n]; of equal scores the lowest token wins.
    """
    rank = scores.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return rank < round(fraction * scores.shape[1])


def consistency_gain(current: Tensor, previous: Tensor, final: Tensor) -> Tensor:
    """Gain in cosine similarity to the finished latents from one mask step to the next.

    Args:
        current: fp32 [B, n, C], end points at mask step i.
        previous: fp32 [B, n, C], end points at mask step i - 1.
        final: fp32 [B, n, C], finished latents.

    Returns:
        fp32 [B, n] in [-2, 2]; a zero vector has similarity 0.
    """
    return F.cosine_similarity(current, final, dim=-1) - F.cosine_similarity(previous, final, dim=-1)


def consistent(gain: Tensor, predicted: Tensor, threshold: float) -> Tensor:
    """Keep a token that gains more than the threshold, or that the mask step predicts.

    Args:
        gain: fp32 [B, n], of `consistency_gain`.
        predicted: bool [B, n].
        threshold: tau, in [-2, 2].

    Returns:
        bool [B, n].
    """
    return (gain > threshold) | predicted
