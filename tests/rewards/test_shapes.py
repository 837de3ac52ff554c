"""The verifier as a reward."""

import pytest
import torch

from margrpo.rewards.base import Reward
from margrpo.rewards.shapes import ShapesReward
from margrpo.shapes.renderer import render_batch
from margrpo.shapes.verifier import score
from tests.shapes.helpers import draw


def test_it_returns_the_graded_score_of_every_image() -> None:
    records, scenes = draw(6, seed=3)
    images = render_batch(scenes)
    reward = ShapesReward()
    values = reward(images, [record["prompt"] for record in records], records)
    assert isinstance(reward, Reward)
    assert reward.name == "shapes"
    assert values.dtype == torch.float32
    assert torch.equal(values, torch.tensor(score(images, records)))


def test_a_prompt_without_task_fields_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"prompt 'a red circle': needs .*attr_nouns"):
        ShapesReward()(render_batch([[]]), ["a red circle"], [{"prompt": "a red circle"}])
