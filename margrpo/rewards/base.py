"""What a reward is: a scorer of images given their prompts."""

import re
from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor


class Reward(ABC):
    """Scores images; higher is better.

    One class in one file is a reward: name it in the configuration with `class_path` and `init_args`. A scorer that
    owns a network inherits `nn.Module` too, before this class, and defines `forward`: it is then frozen and moved to
    the device with everything else.

    `name`, under which scores are logged, is the class name in snake case unless the class or its instance sets it.
    """

    name: str

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            cls.name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", cls.__name__).lower()

    @abstractmethod
    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
        """Score B images.

        Args:
            images: uint8 [B, 3, H, W].
            prompts: B prompts, those of a group repeated.
            metadata: B records of the prompt file, with the fields it carries.

        Returns:
            Scores, float [B]; NaN for an image that cannot be judged, which then takes no part in its group.
        """
