"""Prompts: the files they come from, and the order in which training and validation go through them."""

import csv
import io
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from margrpo.rollout.noise import stable_seed

Record = dict[str, Any]
"""One prompt: the text under "prompt" and whatever else the file says about it, which rewards may read."""

EXAMPLE = '{"prompt": "a red circle"}'


class PromptFileError(ValueError):
    """A prompt file that cannot be used; the message names the file, the line and what is accepted."""


def read_prompts(path: str | Path) -> list[Record]:
    """Read a prompt file (UTF-8, with or without a byte order mark, any line ends) in file order.

    Equal prompts stay separate records, because each is a group of its own. Blank lines are skipped.

    Args:
        path: `.txt`, one prompt a line; `.csv`, comma-separated with a header that has a column `prompt`, every cell
            a string; `.json` or `.jsonl`, an array of objects or one object a line, whichever the content is.

    Returns:
        At least one record, each with a non-empty string under "prompt".

    Raises:
        PromptFileError: the file is missing, of another kind, not UTF-8, without prompts, or has a bad record.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in (".txt", ".csv", ".json", ".jsonl"):
        raise PromptFileError(f"{path}: unknown suffix {path.suffix!r}; prompt files are .txt, .csv, .jsonl or .json")
    text = _read_text(path)
    if suffix == ".txt":
        numbered = [(f"line {number}", {"prompt": line.strip()}) for number, line in _filled_lines(text)]
    elif suffix == ".csv":
        numbered = _parse_csv(path, text)
    elif text.lstrip().startswith("["):
        numbered = _parse_json_array(path, text)
    else:
        numbered = _parse_json_lines(path, text)
    if not numbered:
        raise PromptFileError(f"{path}: no prompts in it")
    for place, record in numbered:
        _check_record(record, f"{path}, {place}")
    return [record for _, record in numbered]


def _read_text(path: Path) -> str:
    if not path.is_file():
        raise PromptFileError(f"{path}: {'not a file' if path.exists() else 'no such file'}; expected a prompt file")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise PromptFileError(f"{path}, line {line}: not UTF-8 ({error.reason}); save the file as UTF-8") from error
    if not text:
        raise PromptFileError(f"{path}: the file is empty; expected at least one prompt")
    if not text.strip():
        raise PromptFileError(f"{path}: only blank lines; expected at least one prompt")
    return text


def _filled_lines(text: str) -> list[tuple[int, str]]:
    # Not str.splitlines: it also breaks at U+2028, U+0085 and others, which JSON strings may contain.
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]


def _csv_rows(path: Path, text: str) -> Iterator[tuple[str, list[str]]]:
    # Strict, because a forgotten closing quote would otherwise make one prompt of the rest of the file.
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    while True:
        place = f"line {reader.line_num + 1}"
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise PromptFileError(f"{path}, {place}: {error}; expected comma-separated cells") from error
        if any(cell.strip() for cell in row):
            yield place, row


def _parse_csv(path: Path, text: str) -> list[tuple[str, Record]]:
    rows = list(_csv_rows(path, text))
    if not rows:
        return []
    place, names = rows[0]
    header = [name.strip() for name in names]
    if header.count("prompt") != 1:
        raise PromptFileError(
            f"{path}, {place}: the header {','.join(names)!r} needs commas and one column named 'prompt'"
        )
    for place, row in rows[1:]:
        if len(row) != len(header):
            raise PromptFileError(
                f"{path}, {place}: {len(row)} cells under {len(header)} columns ({', '.join(header)}); "
                'write a prompt that contains a comma in double quotes, "like, this"'
            )
    return [(place, dict(zip(header, row, strict=True))) for place, row in rows[1:]]


def _parse_json_array(path: Path, text: str) -> list[tuple[str, Any]]:
    try:
        items = json.loads(text)
    except json.JSONDecodeError as error:
        raise PromptFileError(
            f"{path}, line {error.lineno}, column {error.colno}: {error.msg}; "
            f"the file starts with '[', so expected a JSON array of objects like {EXAMPLE}"
        ) from error
    return [(f"item {number} of the array", item) for number, item in enumerate(items, start=1)]


def _parse_json_lines(path: Path, text: str) -> list[tuple[str, Any]]:
    numbered: list[tuple[str, Any]] = []
    for number, line in _filled_lines(text):
        try:
            numbered.append((f"line {number}", json.loads(line)))
        except json.JSONDecodeError as error:
            raise PromptFileError(
                f"{path}, line {number}, column {error.colno}: {error.msg}; "
                f"expected one JSON object a line like {EXAMPLE}"
            ) from error
    return numbered


def _check_record(record: Any, place: str) -> None:
    if not isinstance(record, dict):
        raise PromptFileError(f"{place}: expected a JSON object like {EXAMPLE}, found {json.dumps(record):.80}")
    if "prompt" not in record:
        found = ", ".join(record) or "none"
        raise PromptFileError(f'{place}: no "prompt" among its fields ({found}); expected an object like {EXAMPLE}')
    prompt = record["prompt"]
    if not isinstance(prompt, str) or not prompt.strip():
        raise PromptFileError(f'{place}: "prompt" is {json.dumps(prompt):.80}; expected a non-empty string')


@dataclass
class PromptBatch:
    """The prompts of one rank in one step; each stands for its whole group, so that no group is ever split.

    Args:
        step: number of the step (of the batch, for held-out prompts), the same on every rank of a training step.
        indices: P positions in the prompt file, the identity of the prompts.
        records: P records.
        laps: how often the step has gone round all prompts before each; it tells apart the groups of a prompt that
            occurs more than once in a step.
    """

    step: int
    indices: list[int]
    records: list[Record]
    laps: list[int]


def prompts_per_rank(prompts_per_step: int, world_size: int) -> int:
    """Share the prompts of a step evenly.

    Raises:
        ValueError: `prompts_per_step` is not a positive multiple of `world_size`; names the nearest ones that are.
    """
    if prompts_per_step < 1 or prompts_per_step % world_size:
        below = max(prompts_per_step, 0) // world_size * world_size
        nearest = " or ".join(str(count) for count in (below, below + world_size) if count)
        raise ValueError(
            f"prompts_per_step is {prompts_per_step}, which does not divide over {world_size} ranks; use {nearest}"
        )
    return prompts_per_step // world_size


class PromptStream:
    """Endless training order, a pure function of the seed: a run resumed at `start_step` continues it exactly.

    The prompts are shuffled anew for every epoch and the epochs laid end to end; a step takes the next
    `prompts_per_step` of them and every rank its slice. Needs no DataLoader: there is nothing to load.

    Args:
        records: all training prompts, the same on every rank.
        prompts_per_step: prompts of one step, over all ranks.
        seed: any integer.
        rank: of this process, in [0, world_size).
        world_size: number of ranks.
        start_step: first step that iteration yields.

    Raises:
        ValueError: `prompts_per_step` is not a positive multiple of `world_size`.
    """

    def __init__(
        self, records: list[Record], prompts_per_step: int, seed: int, rank: int, world_size: int, start_step: int = 0
    ) -> None:
        self.records = records
        self.prompts_per_step = prompts_per_step
        self.share = prompts_per_rank(prompts_per_step, world_size)
        self.seed = seed
        self.rank = rank
        self.start_step = start_step

    def batch(self, step: int) -> PromptBatch:
        """Return this rank's prompts of a step."""
        first_of_step = step * self.prompts_per_step
        first = first_of_step + self.rank * self.share
        places = [divmod(position, len(self.records)) for position in range(first, first + self.share)]
        orders = {epoch: self._order(epoch) for epoch in {epoch for epoch, _ in places}}
        indices = [orders[epoch][offset] for epoch, offset in places]
        # Counted from the epoch of the first prompt, not of the step: a lap holds every prompt at most once.
        laps = [epoch - first_of_step // len(self.records) for epoch, _ in places]
        return PromptBatch(step, indices, [self.records[index] for index in indices], laps)

    def _order(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(stable_seed(self.seed, epoch))
        return torch.randperm(len(self.records), generator=generator).tolist()

    def __iter__(self) -> Iterator[PromptBatch]:
        return map(self.batch, itertools.count(self.start_step))


class HeldOutPrompts:
    """Every prompt once, in file order, for validation and prediction; rank r takes the batches r, r + world_size, ...

    Needs no DataLoader, into which Lightning would put a second split over ranks.

    Args:
        records: all prompts, the same on every rank.
        batch_size: prompts of one batch; the last may be smaller.
        rank: of this process, in [0, world_size).
        world_size: number of ranks.

    Raises:
        ValueError: `batch_size` is below 1, or some rank would get no batch.
    """

    def __init__(self, records: list[Record], batch_size: int, rank: int, world_size: int) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; expected at least 1 prompt a batch")
        batches = -(-len(records) // batch_size)
        if batches < world_size:
            raise ValueError(
                f"{len(records)} prompts in batches of {batch_size} are {batches} batches for {world_size} ranks; "
                "every rank needs one: use a smaller batch_size or fewer devices"
            )
        self.records = records
        self.batch_size = batch_size
        self.steps = range(rank, batches, world_size)

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[PromptBatch]:
        for step in self.steps:
            first = step * self.batch_size
            records = self.records[first : first + self.batch_size]
            yield PromptBatch(step, list(range(first, first + len(records))), records, laps=[0] * len(records))
