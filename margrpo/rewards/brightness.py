"""Mean brightness of an image, the smallest reward there is: for examples and for trying the machinery."""

from typing import Any

from torch import Tensor

from margrpo.rewards.base import Reward


class Brightness(Reward):
    """Mean of all pixels and colours, in [0, 1]; the prompt is not read."""

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
        """Score images uint8 [B, 3, H, W]; returns fp32 [B]."""
        return images.float().mean(dim=(1, 2, 3)) / 255
