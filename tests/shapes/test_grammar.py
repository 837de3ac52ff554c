"""Prompts and scenes of the shapes task."""

import numpy as np
import pytest

from margrpo.shapes.grammar import (
    COLOURS,
    GAP,
    LOCALITIES,
    MOST_OBJECTS,
    SHAPES,
    SIDE,
    Record,
    asked_things,
    is_held_out,
    prompts,
    sample_scene,
)
from tests.shapes.helpers import draw


def test_training_and_held_out_prompts_are_disjoint_and_follow_the_hash() -> None:
    training = {record["prompt"] for record in prompts(2000, seed=3, held_out=False)}
    held_out = {record["prompt"] for record in prompts(600, seed=3, held_out=True)}
    assert not training & held_out
    assert not any(map(is_held_out, training))
    assert all(map(is_held_out, held_out))


def test_about_fifteen_percent_of_the_prompts_are_held_out() -> None:
    texts = [
        f"a {first} {shape} above a {second} {other}"
        for first in COLOURS
        for second in COLOURS
        for shape in SHAPES
        for other in SHAPES
    ]
    assert 0.12 < np.mean([is_held_out(text) for text in texts]) < 0.18


def test_the_split_is_the_same_in_every_process() -> None:
    texts = [f"prompt {number}" for number in range(40)]
    assert [number for number, text in enumerate(texts) if is_held_out(text)] == [2, 11, 16, 29, 35]


def test_there_are_enough_distinct_held_out_prompts_to_evaluate_on() -> None:
    assert len({record["prompt"] for record in prompts(1000, seed=1, held_out=True)}) >= 256


def test_equal_seeds_draw_equal_prompts_and_scenes() -> None:
    assert draw(20, seed=8) == draw(20, seed=8)
    assert draw(20, seed=8) != draw(20, seed=9)


def test_prompts_are_short_lower_case_english_of_few_words() -> None:
    texts = [record["prompt"] for record in prompts(2000, seed=2, held_out=False)]
    assert max(len(text.split()) for text in texts) <= 14
    assert all(text == text.lower() and text.isascii() for text in texts)
    assert len({word for text in texts for word in text.split()}) <= 40
    assert not any(" a orange" in f" {text}" or "crosss" in text for text in texts)


def test_every_kind_of_prompt_and_every_locality_is_drawn() -> None:
    records = prompts(2000, seed=4, held_out=False)
    assert {record["task_type"] for record in records} == {"object", "color", "spatial", "numeracy"}
    assert {r["spatial_info"]["locality"] for r in records if "spatial_info" in r} == set(LOCALITIES)


def test_fields_say_what_the_text_says() -> None:
    numbers = {"one": 1, "two": 2, "three": 3, "four": 4}
    for record in prompts(500, seed=6, held_out=False):
        things = asked_things(record)
        assert all(thing.name in record["prompt"] for thing in things)
        if record["task_type"] == "numeracy":
            assert [numbers[part.split()[0]] for part in record["prompt"].split(" and ")] == [t.count for t in things]
            assert sum(thing.count for thing in things) <= MOST_OBJECTS
        else:
            assert all(thing.count == 1 for thing in things)


def test_scenes_hold_the_asked_objects_inside_the_image_and_apart() -> None:
    for record, scene in zip(*draw(500, seed=7), strict=True):
        wanted = [thing for thing in asked_things(record) for _ in range(thing.count)]
        assert [obj.shape for obj in scene] == [thing.shape for thing in wanted]
        assert all(thing.colour in (None, obj.colour) for obj, thing in zip(scene, wanted, strict=True))
        for index, obj in enumerate(scene):
            assert obj.radius < min(obj.x, obj.y)
            assert max(obj.x, obj.y) < SIDE - obj.radius
            for other in scene[:index]:
                distance = np.hypot(obj.x - other.x, obj.y - other.y)
                assert distance >= obj.reach + other.reach + GAP


@pytest.mark.parametrize("locality", LOCALITIES)
def test_scenes_fulfil_the_relation(locality: str) -> None:
    record: Record = {
        "prompt": "a relation",
        "task_type": "spatial",
        "nouns": ["circle", "square"],
        "attr_nouns": ["red circle", "blue square"],
        "spatial_info": {"obj1": "red circle", "obj2": "blue square", "locality": locality},
    }
    rng = np.random.default_rng(0)
    for _ in range(20):
        first, second = sample_scene(record, rng)
        dx, dy = second.x - first.x, second.y - first.y
        if LOCALITIES[locality] == "near":
            assert abs(dx) > abs(dy)
            assert np.hypot(dx, dy) < 62
        else:
            along, across = {"left": (dx, dy), "right": (-dx, dy), "above": (dy, dx), "below": (-dy, dx)}[
                LOCALITIES[locality]
            ]
            assert along > abs(across)


@pytest.mark.parametrize("name", ["red cat", "pink circle", "red blue circle", "circles"])
def test_an_unknown_word_is_refused_with_the_prompt_and_the_known_words(name: str) -> None:
    with pytest.raises(ValueError, match=rf"prompt 'some text': '{name}' .*circle, square.*red, green"):
        asked_things({"prompt": "some text", "task_type": "color", "attr_nouns": [name]})


def test_a_record_without_fields_is_refused() -> None:
    with pytest.raises(ValueError, match=r"prompt 'a red circle': needs "):
        asked_things({"prompt": "a red circle"})
