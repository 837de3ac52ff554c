"""The relation and count rules, against hand-computed cases."""

import pytest

from margrpo.rewards.rules import DIRECTIONS, box_iou, count_score, direction_of, relation_score

SIZE = (480, 480)
CENTRE = (200.0, 200.0, 240.0, 240.0)
BESIDE = {
    "left": (100.0, 210.0, 140.0, 250.0),
    "right": (300.0, 210.0, 340.0, 250.0),
    "above": (210.0, 100.0, 250.0, 140.0),
    "below": (210.0, 300.0, 250.0, 340.0),
}


@pytest.mark.parametrize("locality", [name for name, direction in DIRECTIONS.items() if direction != "near"])
@pytest.mark.parametrize("place", BESIDE)
def test_a_direction_holds_on_its_own_side_only(locality: str, place: str) -> None:
    expected = 1.0 if place == direction_of(locality) else 0.0
    assert relation_score(locality, BESIDE[place], CENTRE, SIZE) == expected


@pytest.mark.parametrize(
    ("locality", "direction"),
    [("above", "above"), ("on top of", "above"), ("on the top of", "above"), ("on the bottom of", "below")],
)
def test_vertical_localities_of_the_training_data_are_known(locality: str, direction: str) -> None:
    assert direction_of(locality) == direction


def test_a_diagonal_is_no_direction() -> None:
    diagonal = (100.0, 100.0, 140.0, 140.0)
    assert [relation_score(name, diagonal, CENTRE, SIZE) for name in ("left of", "above")] == [0.0, 0.0]


def test_a_direction_counts_less_the_more_the_boxes_overlap() -> None:
    # Boxes of 40 x 40 shifted by 20: intersection 800, union 2400, iou 1/3.
    assert relation_score("left of", (180.0, 200.0, 220.0, 240.0), CENTRE, SIZE) == pytest.approx(0.3)


@pytest.mark.parametrize("locality", ["next to", "near", "on side of"])
def test_near_falls_with_the_larger_offset_once_both_are_far(locality: str) -> None:
    corner = (0.0, 0.0, 40.0, 40.0)
    assert relation_score(locality, corner, (300.0, 140.0, 340.0, 180.0), SIZE) == 1.0
    assert relation_score(locality, corner, (300.0, 200.0, 340.0, 240.0), SIZE) == pytest.approx(0.5)


def test_near_is_relative_to_the_longer_image_side() -> None:
    boxes = (0.0, 0.0, 40.0, 40.0), (200.0, 200.0, 240.0, 240.0)
    assert relation_score("near", *boxes, (480, 480)) == pytest.approx(0.75)
    assert relation_score("near", *boxes, (480, 960)) == 1.0


def test_an_unknown_locality_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown locality 'inside'; known are left of, .*on side of"):
        relation_score("inside", CENTRE, CENTRE, SIZE)


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ((0.0, 0.0, 10.0, 10.0), 1.0),
        ((5.0, 0.0, 15.0, 10.0), 1 / 3),
        ((10.0, 0.0, 20.0, 10.0), 0.0),
        ((2.0, 2.0, 7.0, 7.0), 0.25),
        ((3.0, 3.0, 3.0, 3.0), 0.0),
    ],
)
def test_box_iou(second: tuple[float, float, float, float], expected: float) -> None:
    first = (0.0, 0.0, 10.0, 10.0)
    assert box_iou(first, second) == box_iou(second, first) == pytest.approx(expected)


def test_two_empty_boxes_do_not_overlap() -> None:
    assert box_iou((3.0, 3.0, 3.0, 3.0), (3.0, 3.0, 3.0, 3.0)) == 0.0


@pytest.mark.parametrize(("found", "expected"), [(0, 0.0), (1, 0.2), (2, 0.2), (3, 1.0), (4, 0.2)])
def test_count_score_of_three_asked(found: int, expected: float) -> None:
    assert count_score(found, 3) == expected
