"""Judges whether an image shows what its prompt asks for: strictly, and graded in small steps."""

import math
from dataclasses import dataclass

from torch import Tensor

from margrpo.shapes.components import Component, find_components
from margrpo.shapes.grammar import LOCALITIES, RADIUS, Record, Thing, asked_things
from margrpo.shapes.renderer import UNIT_AREA

BLURRED_OVERLAP = 0.62
CLEAN_OVERLAP = 0.83
"""Overlap with the ideal shape below which a component counts nothing as it, and above which it counts whole."""

OVERLAP_MARGIN = 0.03
"""Lead in overlap that makes one shape e times as credible as another; clean shapes lead by 0.1 and more."""

COLOUR_SHARE = 0.75
"""Part of an object's score that its colour earns; its shape, which blurs sooner, earns the rest."""

RELATION_SHARE = 0.4
"""Part of a spatial prompt's score that the relation earns."""

RAMP = 24.0
"""Pixels by which an object must lie on the asked side for the full relation score; half of it at 0."""

NEAR = 58.0
"""Largest distance of centres in pixels that is `next to`."""


@dataclass(frozen=True)
class Match:
    """A component taken for an asked object, and how well it fits in [0, 1]."""

    thing: Thing
    component: Component
    fit: float


def score(images: Tensor, records: list[Record]) -> list[float]:
    """Score images uint8 [B, 3, 128, 128] by their prompts' fields, in [0, 1]; 1 is a clean scene that fulfils it.

    The score is the mean fit of the asked objects (colour, shape, size), times the share of objects that were asked
    for; a spatial prompt gets 40% of it for its relation.

    Raises:
        ValueError: images of another size, or a prompt whose fields do not belong to the task.
    """
    return [_score(found, record) for found, record in zip(find_components(images), records, strict=True)]


def verify(images: Tensor, records: list[Record]) -> list[bool]:
    """Say whether images uint8 [B, 3, 128, 128] show exactly what was asked: nothing wrong, missing or in excess."""
    return [_verify(found, record) for found, record in zip(find_components(images), records, strict=True)]


def fit(thing: Thing, component: Component) -> float:
    """How well a component serves as an object, in [0, 1]."""
    overlap = component.overlap[thing.shape]
    rivals = sum(math.exp((other - overlap) / OVERLAP_MARGIN) for other in component.overlap.values())
    shape = _ramp(overlap, BLURRED_OVERLAP, CLEAN_OVERLAP) / rivals
    colour = 1.0 if thing.colour in (None, component.colour) else 0.0
    smallest, largest = (UNIT_AREA[thing.shape] * radius**2 for radius in RADIUS)
    size = min(1.0, component.area / (0.85 * smallest), 1.3 * largest / component.area)
    return size * (COLOUR_SHARE * colour + (1.0 - COLOUR_SHARE) * shape)


def match_objects(things: list[Thing], components: list[Component]) -> list[Match]:
    """Assign components to asked objects, best fit first; each of either is used once."""
    slots = [thing for thing in things for _ in range(thing.count)]
    pairs = sorted(
        (
            (fit(thing, component), slot, index)
            for slot, thing in enumerate(slots)
            for index, component in enumerate(components)
        ),
        key=lambda pair: -pair[0],
    )
    matches: dict[int, Match] = {}
    used: set[int] = set()
    for value, slot, index in pairs:
        if slot not in matches and index not in used:
            matches[slot] = Match(slots[slot], components[index], value)
            used.add(index)
    return [matches[slot] for slot in sorted(matches)]


def relation_score(locality: str, first: Component, second: Component) -> float:
    """How far the first object stands in the asked relation to the second, in [0, 1], by signed distance."""
    dx, dy = first.x - second.x, first.y - second.y
    relation = LOCALITIES[locality]
    if relation == "near":
        return 1.0 - _ramp((dx * dx + dy * dy) ** 0.5, NEAR, NEAR + 2 * RAMP)
    along, across = (dx, dy) if relation in ("left", "right") else (dy, dx)
    signed = along if relation in ("right", "below") else -along
    direction = _ramp(abs(along) / max(abs(across), 1.0), 0.5, 1.0)
    return _ramp(signed, -RAMP, RAMP) * (0.5 + 0.5 * direction)


def _score(components: list[Component], record: Record) -> float:
    things = asked_things(record)
    asked = sum(thing.count for thing in things)
    matches = match_objects(things, components)
    presence = sum(match.fit for match in matches) / asked
    smallest = UNIT_AREA["triangle"] * RADIUS[0] ** 2
    taken = {id(match.component) for match in matches}
    surplus = sum(min(1.0, part.area / smallest) for part in components if id(part) not in taken)
    objects = presence * asked / (asked + surplus)
    if not record.get("spatial_info"):
        return objects
    if len(matches) < 2:
        return (1.0 - RELATION_SHARE) * objects
    relation = relation_score(record["spatial_info"]["locality"], matches[0].component, matches[1].component)
    return objects * (1.0 - RELATION_SHARE + RELATION_SHARE * relation)


def _verify(components: list[Component], record: Record) -> bool:
    things = asked_things(record)
    matches = match_objects(things, components)
    if len(components) != sum(thing.count for thing in things) or len(matches) != len(components):
        return False
    for match in matches:
        if match.component.shape != match.thing.shape or match.thing.colour not in (None, match.component.colour):
            return False
    if not record.get("spatial_info"):
        return True
    return relation_score(record["spatial_info"]["locality"], matches[0].component, matches[1].component) > 0.75


def _ramp(value: float, low: float, high: float) -> float:
    return min(1.0, max(0.0, (value - low) / (high - low)))
