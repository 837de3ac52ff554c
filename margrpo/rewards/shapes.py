"""The exact verifier of the embedded task as a reward."""

from typing import Any

import torch
from torch import Tensor

from margrpo.rewards.base import Reward
from margrpo.shapes import verifier


class ShapesReward(Reward):
    """Graded score of the shapes task in [0, 1]; needs the task fields that `margrpo.shapes.grammar` gives a prompt."""

    name = "shapes"

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
        """Score images uint8 [B, 3, 128, 128]; returns fp32 [B].

        Raises:
            ValueError: a record lacks the fields, or names objects or a locality that the task does not have.
        """
        return torch.tensor(verifier.score(images, metadata), dtype=torch.float32, device=images.device)
