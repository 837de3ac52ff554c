"""How much the images of a group differ: what a collapsing policy loses before its reward shows it."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def group_diversity(images: Tensor, group_size: int) -> Tensor:
    """Root-mean-square distance of two images of a group, averaged over pairs and groups.

    Args:
        images: uint8 [B, 3, H, W], those of a prompt contiguous.
        group_size: G, at least 2; B = P * G.

    Returns:
        fp32 scalar in [0, 1]; 0 where the images of every group are equal, 1 where one is black and the other white.
    """
    # Group by group, so that only one of them is in memory in fp32.
    groups = images.flatten(1).unflatten(0, (-1, group_size))
    distance = torch.stack([F.pdist(group.float()).mean() for group in groups]).mean()
    return distance / (255 * math.sqrt(groups.shape[2]))
