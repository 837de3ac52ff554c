"""Prompt files as people write them, and the order in which every rank goes through the prompts."""

import itertools
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from margrpo.rollout.prompts import HeldOutPrompts, PromptFileError, PromptStream, prompts_per_rank, read_prompts

CAFE = "un café ☕ à côté d'une 猫"


def write(tmp_path: Path, name: str, content: str | bytes) -> Path:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def texts(path: Path) -> list[str]:
    return [record["prompt"] for record in read_prompts(path)]


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("final_newline", [True, False])
@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("p.txt", ["a red circle", "", "  ", f"  {CAFE} ", "a red circle"]),
        ("p.csv", ["task_type, prompt", "color,a red circle", "", " , ", f'non,"{CAFE}"', "color,a red circle"]),
        (
            "p.jsonl",
            ['{"prompt": "a red circle"}', "", "  ", json.dumps({"prompt": CAFE}), '{"prompt": "a red circle"}'],
        ),
        (
            "p.json",
            [
                "",
                "[",
                '{"prompt": "a red circle"},',
                "",
                json.dumps({"prompt": CAFE}) + ",",
                '{"prompt": "a red circle"}]',
            ],
        ),
    ],
)
def test_every_kind_of_file_is_read_whatever_its_line_ends(
    tmp_path: Path, name: str, lines: list[str], newline: str, bom: bytes, final_newline: bool
) -> None:
    content = newline.join(lines) + (newline if final_newline else "")
    assert texts(write(tmp_path, name, bom + content.encode())) == ["a red circle", CAFE, "a red circle"]


@pytest.mark.parametrize("name", ["p.json", "p.jsonl", "p.JSON"])
@pytest.mark.parametrize("as_array", [True, False])
def test_json_content_counts_not_its_suffix_and_fields_are_kept(tmp_path: Path, name: str, as_array: bool) -> None:
    records = [
        {"prompt": "a photo of a kettle below a kite", "nouns": ["kettle", "kite"], "task_type": "spatial"},
        {"prompt": CAFE, "numeracy_info": [{"obj_name": "lantern", "num": 3}]},
    ]
    lines = "\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    content = json.dumps(records, indent=2, ensure_ascii=False) if as_array else lines
    assert read_prompts(write(tmp_path, name, content)) == records


def test_csv_cells_are_strings_as_written(tmp_path: Path) -> None:
    path = write(tmp_path, "p.csv", 'prompt,nouns,num\n"a ""big"" circle, red","[""circle""]",3\n"two\nlines",,\n')
    assert read_prompts(path) == [
        {"prompt": 'a "big" circle, red', "nouns": '["circle"]', "num": "3"},
        {"prompt": "two\nlines", "nouns": "", "num": ""},
    ]


def test_unicode_line_separator_inside_a_prompt_does_not_split_it(tmp_path: Path) -> None:
    path = write(tmp_path, "p.jsonl", json.dumps({"prompt": "one\u2028prompt"}, ensure_ascii=False))
    assert texts(path) == ["one\u2028prompt"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", "", ": the file is empty; expected at least one prompt"),
        ("p.txt", b"\xef\xbb\xbf", ": the file is empty; expected at least one prompt"),
        ("p.jsonl", "\n \r\n\t\n", ": only blank lines; expected at least one prompt"),
        ("p.csv", "prompt,nouns\n", ": no prompts in it"),
        ("p.csv", ",,\n,,\n", ": no prompts in it"),
        ("p.json", "[]", ": no prompts in it"),
        ("p.yaml", "a", ": unknown suffix '.yaml'; prompt files are .txt, .csv, .jsonl or .json"),
        ("p", "a", ": unknown suffix ''; prompt files are .txt, .csv, .jsonl or .json"),
        ("p.txt", b"good\ncaf\xe9 \n", ", line 2: not UTF-8 (invalid continuation byte); save the file as UTF-8"),
        ("p.txt", "a red circle".encode("utf-16"), ", line 1: not UTF-8 (invalid start byte); save the file as UTF-8"),
        (
            "p.jsonl",
            '{"prompt": "a"}\n\n{"prompt": b}\n',
            ', line 3, column 12: Expecting value; expected one JSON object a line like {"prompt": "a red circle"}',
        ),
        (
            "p.json",
            '[{"prompt": "a"},\n {"prompt": b}]',
            ", line 2, column 13: Expecting value; the file starts with '[', "
            'so expected a JSON array of objects like {"prompt": "a red circle"}',
        ),
        (
            "p.jsonl",
            '{"prompt": "a"}\n{"text": "b", "n": 1}',
            ', line 2: no "prompt" among its fields (text, n); expected an object like {"prompt": "a red circle"}',
        ),
        (
            "p.json",
            '[{"prompt": "a"}, {"prompt": ""}]',
            ', item 2 of the array: "prompt" is ""; expected a non-empty string',
        ),
        ("p.jsonl", '{"prompt": " "}', ', line 1: "prompt" is " "; expected a non-empty string'),
        ("p.jsonl", '{"prompt": 3}', ', line 1: "prompt" is 3; expected a non-empty string'),
        (
            "p.jsonl",
            '{"prompt": "a"}\n"b"',
            ', line 2: expected a JSON object like {"prompt": "a red circle"}, found "b"',
        ),
        ("p.csv", "text;n\na;1\n", ", line 1: the header 'text;n' needs commas and one column named 'prompt'"),
        (
            "p.csv",
            "prompt,n,prompt\na,1,b\n",
            ", line 1: the header 'prompt,n,prompt' needs commas and one column named 'prompt'",
        ),
        (
            "p.csv",
            "prompt,n\n\na,1\na red circle, and a blue one,1\n",
            ", line 4: 3 cells under 2 columns (prompt, n); "
            'write a prompt that contains a comma in double quotes, "like, this"',
        ),
        ("p.csv", 'prompt,n\n"two\nlines",1\n,2\n', ', line 4: "prompt" is ""; expected a non-empty string'),
        ("p.csv", 'prompt\na\n"b\nc\nd\n', ", line 3: unexpected end of data; expected comma-separated cells"),
    ],
)
def test_bad_file_is_refused_naming_file_line_and_what_is_accepted(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    path = write(tmp_path, name, content)
    with pytest.raises(PromptFileError, match="^" + re.escape(f"{path}{message}") + "$"):
        read_prompts(path)


def test_missing_file_and_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(PromptFileError, match=r"none\.txt: no such file; expected a prompt file$"):
        read_prompts(tmp_path / "none.txt")
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(PromptFileError, match=r"folder\.txt: not a file; expected a prompt file$"):
        read_prompts(str(tmp_path / "folder.txt"))


RECORDS = [{"prompt": f"prompt {index}"} for index in range(7)]


def stream(seed: int = 0, rank: int = 0, world_size: int = 1, start_step: int = 0, per_step: int = 4) -> PromptStream:
    return PromptStream(RECORDS, per_step, seed, rank, world_size, start_step)


def drawn(prompts: PromptStream, steps: int) -> list[int]:
    return [index for batch in itertools.islice(prompts, steps) for index in batch.indices]


def test_every_epoch_holds_every_prompt_once_in_its_own_order() -> None:
    order = drawn(stream(), 7)
    epochs = [order[first : first + 7] for first in range(0, 28, 7)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(7))] * 4
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_batches_carry_their_step_and_the_records_of_their_indices() -> None:
    for step, batch in zip(range(5, 9), stream(start_step=5), strict=False):
        assert batch.step == step
        assert batch.records == [RECORDS[index] for index in batch.indices]


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_together_draw_what_one_rank_draws(world_size: int) -> None:
    ranks = [stream(rank=rank, world_size=world_size) for rank in range(world_size)]
    for step in range(10):
        together = [index for rank in ranks for index in rank.batch(step).indices]
        assert together == stream().batch(step).indices


def test_two_ranks_never_share_a_prompt_inside_an_epoch() -> None:
    ranks = [stream(rank=rank, world_size=2, per_step=2) for rank in range(2)]
    for step in range(3):  # the first epoch ends within step 3
        assert not set(ranks[0].batch(step).indices) & set(ranks[1].batch(step).indices)


def test_resumed_stream_continues_the_uninterrupted_one() -> None:
    assert drawn(stream(start_step=3), 6) == drawn(stream(), 9)[3 * 4 :]


def test_order_depends_on_the_seed_alone() -> None:
    assert drawn(stream(seed=1), 7) == drawn(stream(seed=1), 7)
    assert drawn(stream(seed=1), 7) != drawn(stream(seed=2), 7)


def test_step_larger_than_the_file_goes_round_it() -> None:
    assert Counter(stream(per_step=21).batch(2).indices) == Counter(list(range(7)) * 3)


@pytest.mark.parametrize("world_size", [1, 3])
def test_prompt_and_lap_tell_all_groups_of_a_step_apart(world_size: int) -> None:
    for step in range(4):
        batches = [stream(rank=rank, world_size=world_size, per_step=18).batch(step) for rank in range(world_size)]
        groups = [group for batch in batches for group in zip(batch.indices, batch.laps, strict=True)]
        assert len(set(groups)) == 18
        assert min(lap for _, lap in groups) == 0


@pytest.mark.parametrize(
    ("prompts_per_step", "world_size", "nearest"),
    [(10, 4, "8 or 12"), (3, 4, "4"), (0, 2, "2"), (-3, 2, "2")],
)
def test_prompts_that_do_not_divide_over_ranks_name_the_nearest_that_do(
    prompts_per_step: int, world_size: int, nearest: str
) -> None:
    message = f"^prompts_per_step is {prompts_per_step}, which does not divide over {world_size} ranks; use {nearest}$"
    with pytest.raises(ValueError, match=message):
        stream(per_step=prompts_per_step, world_size=world_size)


def test_prompts_that_divide_are_shared_evenly() -> None:
    assert prompts_per_rank(12, 4) == 3


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_held_out_prompts_are_all_visited_once_in_file_order(world_size: int) -> None:
    ranks = [HeldOutPrompts(RECORDS, 2, rank, world_size) for rank in range(world_size)]
    assert [len(rank) for rank in ranks] == [len(list(rank)) for rank in ranks]
    batches = [batch for rank in ranks for batch in rank]
    assert all(batch.step % world_size == number for number, rank in enumerate(ranks) for batch in rank)
    batches.sort(key=lambda batch: batch.step)
    assert [batch.indices for batch in batches] == [[0, 1], [2, 3], [4, 5], [6]]
    assert [record for batch in batches for record in batch.records] == RECORDS


def test_held_out_prompts_too_few_for_the_ranks_are_refused() -> None:
    message = r"^7 prompts in batches of 4 are 2 batches for 3 ranks; .+ use a smaller batch_size or fewer devices$"
    with pytest.raises(ValueError, match=message):
        HeldOutPrompts(RECORDS, 4, 0, 3)


def test_held_out_batch_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^batch_size is 0; expected at least 1 prompt a batch$"):
        HeldOutPrompts(RECORDS, 0, 0, 1)
