"""Prompts of the embedded task and the scenes that fulfil them: coloured shapes, pairs, relations and counts."""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from margrpo.rewards.rules import direction_of

Record = dict[str, Any]
"""A prompt with the fields of the published training data: prompt, task_type, nouns and, where they apply, attr_nouns,
spatial_info {obj1, obj2, locality} and numeracy_info [{obj_name, num}]."""

SIDE = 128
"""Side of an image in pixels."""

BACKGROUND = (40, 42, 48)
COLOURS = {
    "red": (215, 45, 45),
    "green": (60, 165, 65),
    "blue": (50, 90, 225),
    "yellow": (240, 215, 50),
    "purple": (150, 55, 190),
    "orange": (240, 125, 25),
    "cyan": (60, 205, 215),
    "white": (240, 240, 240),
}
SHAPES = ("circle", "square", "triangle", "cross")
PHRASES = {
    "left of": "{} to the left of {}",
    "on the left of": "{} on the left of {}",
    "right of": "{} to the right of {}",
    "on the right of": "{} on the right of {}",
    "above": "{} above {}",
    "on top of": "{} on top of {}",
    "below": "{} below {}",
    "on the bottom of": "{} on the bottom of {}",
    "next to": "{} next to {}",
}
"""How a prompt words each locality."""

LOCALITIES = {locality: direction_of(locality) for locality in PHRASES}
"""The direction that each locality asks for."""
NUMBERS = ("one", "two", "three", "four")
MOST_OBJECTS = 4
RADIUS = (14.0, 20.0)
SQUARE_REACH = 1.2
GAP = 4.0
MARGIN = 4.0
HELD_OUT_SHARE = 0.15


@dataclass(frozen=True)
class Thing:
    """A kind of object a prompt asks for, `count` times; colour None leaves it open."""

    shape: str
    colour: str | None
    count: int = 1

    @property
    def name(self) -> str:
        """Singular name, such as `red circle`."""
        return f"{self.colour} {self.shape}" if self.colour else self.shape


@dataclass(frozen=True)
class Placed:
    """An object of a scene; centre and radius of its circle in pixels, y downwards."""

    shape: str
    colour: str
    x: float
    y: float
    radius: float

    @property
    def reach(self) -> float:
        """Distance of its farthest point from the centre."""
        return self.radius * (SQUARE_REACH if self.shape == "square" else 1.0)


Scene = list[Placed]


KINDS = {"object": 0.05, "color": 0.1, "pair": 0.2, "spatial": 0.4, "numeracy": 0.25}
"""Share of each kind of prompt."""


def is_held_out(text: str) -> bool:
    """Whether a prompt belongs to the held-out part, by a hash of its text that is the same everywhere."""
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") / 2**32 < HELD_OUT_SHARE


def prompts(count: int, seed: int, held_out: bool) -> list[Record]:
    """Draw `count` prompts of one part; kinds are balanced, prompts may repeat."""
    rng = np.random.default_rng(seed)
    records: list[Record] = []
    while len(records) < count:
        record = sample_prompt(rng)
        if is_held_out(record["prompt"]) == held_out:
            records.append(record)
    return records


def sample_prompt(rng: np.random.Generator) -> Record:
    """Draw one prompt of either part: an object, a coloured one, a pair, a relation, or counts."""
    kind = rng.choice(list(KINDS), p=list(KINDS.values()))
    if kind == "object":
        return _record("object", [Thing(_pick(rng, SHAPES), None)], rng)
    if kind == "color":
        return _record("color", [_coloured(rng)], rng)
    if kind == "pair":
        return _record("color", _two_things(rng), rng)
    if kind == "spatial":
        first, second = _two_things(rng)
        locality = _pick(rng, tuple(LOCALITIES))
        return {
            "prompt": PHRASES[locality].format(_with_article(first), _with_article(second)),
            "task_type": "spatial",
            "nouns": [first.shape, second.shape],
            "attr_nouns": [first.name, second.name],
            "spatial_info": {"obj1": first.name, "obj2": second.name, "locality": locality},
        }
    if rng.random() < 0.6:
        thing = Thing(_pick(rng, SHAPES), _pick(rng, tuple(COLOURS)), int(rng.integers(2, MOST_OBJECTS + 1)))
        return _record("numeracy", [thing], rng)
    first, second = _two_things(rng)
    count = int(rng.integers(1, MOST_OBJECTS))
    rest = int(rng.integers(1, MOST_OBJECTS - count + 1))
    return _record("numeracy", [Thing(first.shape, first.colour, count), Thing(second.shape, second.colour, rest)], rng)


def asked_things(record: Record) -> list[Thing]:
    """Read from a prompt's fields which objects it asks for.

    Raises:
        ValueError: a field is missing, or names something that is not of this task.
    """
    task_type = _field(record, "task_type")
    if task_type == "numeracy":
        return [parse_thing(item["obj_name"], record, int(item["num"])) for item in _field(record, "numeracy_info")]
    if task_type == "spatial":
        relation = _field(record, "spatial_info")
        if relation["locality"] not in LOCALITIES:
            raise ValueError(
                f"prompt {record.get('prompt')!r}: unknown locality {relation['locality']!r}; "
                f"known are {', '.join(LOCALITIES)}"
            )
        return [parse_thing(relation[key], record) for key in ("obj1", "obj2")]
    if task_type not in ("color", "object"):
        raise ValueError(
            f"prompt {record.get('prompt')!r}: task_type {task_type!r} is not of this task; "
            "known are object, color, spatial, numeracy"
        )
    return [parse_thing(name, record) for name in _field(record, "attr_nouns" if task_type == "color" else "nouns")]


def parse_thing(name: str, record: Record, count: int = 1) -> Thing:
    """Parse a singular name; raises ValueError naming the prompt and the known words."""
    *colours, shape = name.split()
    if shape not in SHAPES or len(colours) > 1 or any(colour not in COLOURS for colour in colours):
        raise ValueError(
            f"prompt {record.get('prompt')!r}: {name!r} is not an object of this task; known are "
            f"{', '.join(SHAPES)}, each plain or {', '.join(COLOURS)}"
        )
    return Thing(shape, colours[0] if colours else None, count)


def sample_scene(record: Record, rng: np.random.Generator) -> Scene:
    """Place the objects a prompt asks for: inside the image, apart from one another, the relation fulfilled."""
    wanted = [thing for thing in asked_things(record) for _ in range(thing.count)]
    relation = LOCALITIES[record["spatial_info"]["locality"]] if record.get("spatial_info") else None
    while True:
        scene = _try_placing(wanted, rng)
        if scene is not None and (relation is None or fulfils(relation, scene[0], scene[1])):
            return scene


def fulfils(relation: str, first: Placed, second: Placed) -> bool:
    """Whether two objects clearly stand in a relation: left, right, above, below or near."""
    dx, dy = first.x - second.x, first.y - second.y
    reach = first.radius + second.radius
    if relation == "near":
        return abs(dy) < 12 and abs(dx) < reach + 20
    along, across = (dx, dy) if relation in ("left", "right") else (dy, dx)
    sign = 1 if relation in ("right", "below") else -1
    return sign * along > reach and abs(along) > 1.3 * abs(across)


def _field(record: Record, name: str) -> Any:
    if not record.get(name):
        raise ValueError(
            f"prompt {record.get('prompt')!r}: needs {name} to be verified; a prompt of this task has task_type and, "
            "by its type, nouns (object), attr_nouns (color), spatial_info (spatial) or numeracy_info (numeracy)"
        )
    return record[name]


def _try_placing(wanted: list[Thing], rng: np.random.Generator) -> Scene | None:
    scene: Scene = []
    for thing in wanted:
        radius = rng.uniform(*RADIUS)
        x, y = rng.uniform(radius + MARGIN, SIDE - radius - MARGIN, size=2)
        colour = thing.colour or _pick(rng, tuple(COLOURS))
        placed = Placed(thing.shape, colour, float(x), float(y), float(radius))
        if any(np.hypot(x - other.x, y - other.y) < placed.reach + other.reach + GAP for other in scene):
            return None
        scene.append(placed)
    return scene


def _record(task_type: str, things: list[Thing], rng: np.random.Generator) -> Record:
    if task_type == "numeracy":
        text = " and ".join(f"{NUMBERS[thing.count - 1]} {thing.name}{'s' * (thing.count > 1)}" for thing in things)
        text = text.replace("crosss", "crosses")
    else:
        text = " and ".join(_with_article(thing) for thing in things)
        if rng.random() < 0.3:
            text = f"a photo of {text}"
    record: Record = {"prompt": text, "task_type": task_type, "nouns": [thing.shape for thing in things]}
    if all(thing.colour for thing in things):
        record["attr_nouns"] = [thing.name for thing in things]
    if task_type == "numeracy":
        record["numeracy_info"] = [{"obj_name": thing.name, "num": thing.count} for thing in things]
    return record


def _with_article(thing: Thing) -> str:
    return f"{'an' if thing.name[0] in 'aeiou' else 'a'} {thing.name}"


def _coloured(rng: np.random.Generator) -> Thing:
    return Thing(_pick(rng, SHAPES), _pick(rng, tuple(COLOURS)))


def _two_things(rng: np.random.Generator) -> list[Thing]:
    first = _coloured(rng)
    while (second := _coloured(rng)) == first:
        pass
    return [first, second]


def _pick(rng: np.random.Generator, options: tuple[str, ...]) -> str:
    return options[int(rng.integers(len(options)))]
