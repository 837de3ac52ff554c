"""The verifier against scenes whose truth is known, strictly and graded."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from margrpo.shapes.grammar import COLOURS, GAP, SHAPES, SIDE, Placed, Record, Scene
from margrpo.shapes.renderer import render, render_batch
from margrpo.shapes.verifier import score, verify
from tests.shapes.helpers import draw, scores, verdicts, with_object

COUNT = 250
CIRCLE: Record = {"prompt": "a red circle", "task_type": "color", "nouns": ["circle"], "attr_nouns": ["red circle"]}
LEFT: Record = {
    "prompt": "a red circle to the left of a blue square",
    "task_type": "spatial",
    "nouns": ["circle", "square"],
    "attr_nouns": ["red circle", "blue square"],
    "spatial_info": {"obj1": "red circle", "obj2": "blue square", "locality": "left of"},
}


@pytest.fixture(scope="module")
def drawn() -> tuple[list[Record], list[Scene]]:
    return draw(COUNT, seed=21)


@pytest.fixture(scope="module")
def clean_scores(drawn: tuple[list[Record], list[Scene]]) -> torch.Tensor:
    return scores(*drawn)


def possible(scene: Scene) -> bool:
    """Whether all objects lie inside the image and apart."""
    within = all(o.reach < min(o.x, o.y) and max(o.x, o.y) < SIDE - o.reach for o in scene)
    return within and all(
        np.hypot(a.x - b.x, a.y - b.y) >= a.reach + b.reach + GAP for i, a in enumerate(scene) for b in scene[:i]
    )


def test_scenes_are_accepted_and_score_close_to_one(
    drawn: tuple[list[Record], list[Scene]], clean_scores: torch.Tensor
) -> None:
    assert all(verdicts(*drawn))
    assert clean_scores.mean() > 0.98
    assert clean_scores.min() > 0.85
    assert clean_scores.max() <= 1.0


@pytest.mark.parametrize("change", ["colour", "shape", "missing", "surplus", "exchanged"])
def test_one_wrong_attribute_is_rejected_and_scores_lower(
    drawn: tuple[list[Record], list[Scene]], clean_scores: torch.Tensor, change: str
) -> None:
    rng = np.random.default_rng(5)
    records, right, wrong = [], [], []
    for record, scene, clean in zip(*drawn, clean_scores, strict=True):
        index = int(rng.integers(len(scene)))
        obj = scene[index]
        if change == "colour":
            other = with_object(scene, index, colour=str(rng.choice([c for c in COLOURS if c != obj.colour])))
        elif change == "shape":
            other = with_object(scene, index, shape=str(rng.choice([s for s in SHAPES if s != obj.shape])))
        elif change == "missing":
            other = scene[:index] + scene[index + 1 :]
        elif change == "surplus":
            x, y = rng.uniform(20, SIDE - 20, size=2)
            other = [*scene, Placed("circle", obj.colour, float(x), float(y), 14.0)]
        else:
            other = [replace(a, x=b.x, y=b.y) for a, b in zip(scene, scene[::-1], strict=True)]
        directed = "spatial_info" in record and record["spatial_info"]["locality"] != "next to"
        uncoloured = change == "colour" and "attr_nouns" not in record
        if possible(other) and not uncoloured and (change != "exchanged" or directed):
            records.append(record)
            right.append(clean)
            wrong.append(other)
    assert len(records) > 50
    assert not any(verdicts(records, wrong))
    assert (scores(records, wrong) < torch.stack(right) - 0.05).all()


def test_the_scene_of_another_prompt_scores_far_below_one(drawn: tuple[list[Record], list[Scene]]) -> None:
    records, scenes = drawn
    assert scores(records[1:] + records[:1], scenes).mean() < 0.3


def test_an_empty_image_scores_nothing() -> None:
    assert score(render_batch([[], []]), [CIRCLE, LEFT]) == [0.0, 0.0]


def test_a_wrong_colour_costs_three_quarters_and_a_wrong_shape_one() -> None:
    images = render_batch([[Placed("circle", "green", 64.0, 64.0, 17.0)], [Placed("cross", "red", 64.0, 64.0, 17.0)]])
    assert score(images, [CIRCLE, CIRCLE]) == pytest.approx([0.25, 0.75], abs=0.03)


def test_the_relation_score_rises_with_the_signed_distance() -> None:
    scenes = [
        [Placed("circle", "red", 64.0 - offset, 40.0, 15.0), Placed("square", "blue", 64.0 + offset, 90.0, 15.0)]
        for offset in (-25.0, -10.0, -3.0, 3.0, 10.0, 25.0)
    ]
    values = score(render_batch(scenes), [LEFT] * len(scenes))
    assert values == sorted(values)
    assert values[0] == pytest.approx(0.6, abs=0.03)
    assert len({round(value, 3) for value in values[1:5]}) == 4


def test_each_missing_object_of_a_count_costs_its_share() -> None:
    record: Record = {
        "prompt": "three green triangles",
        "task_type": "numeracy",
        "nouns": ["triangle"],
        "attr_nouns": ["green triangle"],
        "numeracy_info": [{"obj_name": "green triangle", "num": 3}],
    }
    placed = [Placed("triangle", "green", x, 64.0, 16.0) for x in (24.0, 64.0, 104.0)]
    values = score(render_batch([placed[:n] for n in range(4)]), [record] * 4)
    assert values == pytest.approx([0.0, 1 / 3, 2 / 3, 1.0], abs=0.03)


def test_surplus_costs_more_the_larger_it_is() -> None:
    scenes = [[Placed("circle", "red", 34.0, 64.0, 17.0)]]
    scenes += [[*scenes[0], Placed("triangle", "blue", 94.0, 64.0, radius)] for radius in (5.0, 9.0, 14.0)]
    values = score(render_batch(scenes), [CIRCLE] * 4)
    assert values == sorted(values, reverse=True)
    assert len(set(values)) == 4


def test_images_of_a_group_differ_in_score() -> None:
    rng = np.random.default_rng(1)
    scenes = [[Placed("circle", "red", *rng.uniform(30, 98, size=2).tolist(), rng.uniform(14, 20))] for _ in range(16)]
    noisy = render_batch(scenes).float() + 12 * torch.randn(
        16, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0)
    )
    assert len(set(score(noisy.clamp(0, 255).to(torch.uint8), [CIRCLE] * 16))) == 16


def test_blur_and_noise_make_no_phantom_objects(drawn: tuple[list[Record], list[Scene]]) -> None:
    records, scenes = drawn[0][:100], drawn[1][:100]
    images = F.avg_pool2d(render_batch(scenes).float(), 3, stride=1, padding=1, count_include_pad=False)
    images += 6 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    assert all(verify(images.clamp(0, 255).to(torch.uint8), records))


def test_a_score_depends_on_its_own_image_alone(drawn: tuple[list[Record], list[Scene]]) -> None:
    records, scenes = drawn[0][:8], drawn[1][:8]
    alone = [score(render(scene)[None], [record])[0] for record, scene in zip(records, scenes, strict=True)]
    assert score(render_batch(scenes), records) == pytest.approx(alone, abs=1e-5)
