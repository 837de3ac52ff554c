"""Reading and writing checkpoints: safetensors, or pickles restricted to tensors; one file or shards."""

import json
import pickle
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

DATA_FILES = ["*.json", "*.txt", "*.safetensors", "*.bin", "*.model"]
"""What is fetched from a Hub repository: data, never code."""


class CheckpointError(ValueError):
    """A checkpoint that lacks something or does not fit; the message names the file or key."""


def local_directory(path_or_repo_id: str | Path) -> Path:
    """Return a local directory as it is, or download the data files of a Hub repository.

    Raises:
        CheckpointError: neither an existing directory nor the id of a repository that can be reached.
    """
    path = Path(path_or_repo_id)
    if path.is_dir():
        return path
    name = str(path_or_repo_id)
    if path.is_absolute() or name.startswith(".") or name.count("/") != 1:
        raise CheckpointError(f"{name}: no such directory (a Hub repository would be named owner/name)")
    try:
        return Path(snapshot_download(name, allow_patterns=DATA_FILES))
    except Exception as error:
        raise CheckpointError(
            f"{name}: no such directory, and the Hub repository could not be read: {error}"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raises CheckpointError naming the file when it is missing or malformed."""
    if not path.is_file():
        raise CheckpointError(f"{path}: missing")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def read_weights(path: Path, entry: str | None = None) -> dict[str, Tensor]:
    """Read one weight file on the CPU; pickles are read with `weights_only=True`.

    Args:
        path: the file.
        entry: key under which a pickle holds the weights; None when it holds nothing else.

    Raises:
        CheckpointError: the file is missing, truncated, or holds more than tensors.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: missing")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        weights = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise CheckpointError(f"{path}: cannot be read as weights: {error}") from error
    if entry is not None:
        if not isinstance(weights, dict) or entry not in weights:
            raise CheckpointError(f"{path}: no entry {entry!r}")
        weights = weights[entry]
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise CheckpointError(f"{path}: expected a dictionary of tensors")
    return weights


def read_weight_folder(folder: Path, stem: str) -> dict[str, Tensor]:
    """Read `<stem>.safetensors`, `<stem>.bin`, or the shards listed in `<stem>.<suffix>.index.json`.

    Raises:
        CheckpointError: none of them is there, or a listed shard is missing.
    """
    for suffix in ("safetensors", "bin"):
        single, index = folder / f"{stem}.{suffix}", folder / f"{stem}.{suffix}.index.json"
        if single.is_file():
            return read_weights(single)
        if index.is_file():
            shards = sorted(set(read_json(index).get("weight_map", {}).values()))
            missing = [name for name in shards if not (folder / name).is_file()]
            if missing or not shards:
                raise CheckpointError(f"{index}: missing shards {missing}" if shards else f"{index}: no weight_map")
            return {key: value for name in shards for key, value in read_weights(folder / name).items()}
    raise CheckpointError(f"{folder}: no {stem}.safetensors, {stem}.bin or index of shards")


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Hand out a directory to fill, which becomes `path` when the block ends, complete, or not at all.

    Raises:
        FileExistsError: `path` exists.
    """
    if path.exists():
        raise FileExistsError(f"{path}: already exists; name a new directory")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as scratch:
        target = Path(scratch) / "checkpoint"
        target.mkdir()
        yield target
        target.rename(path)


def strip_prefixes(weights: dict[str, Tensor], prefixes: Iterable[str]) -> dict[str, Tensor]:
    """Remove the prefixes that trainers put before every key, as long as all keys share one of them."""
    for prefix in prefixes:
        if weights and all(key.startswith(prefix) for key in weights):
            weights = {key.removeprefix(prefix): value for key, value in weights.items()}
    return weights


def check_weights(module: nn.Module, weights: dict[str, Tensor], source: str) -> None:
    """Check keys and shapes against a module before anything is loaded.

    Raises:
        CheckpointError: naming the first missing or unknown keys, or the key whose shape differs.
    """
    expected = module.state_dict()
    missing = [key for key in expected if key not in weights]
    unknown = [key for key in weights if key not in expected]
    for problem, keys in (("missing", missing), ("unknown", unknown)):
        if keys:
            more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
            raise CheckpointError(f"{source}: {problem} weights {', '.join(keys[:3])}{more}")
    for key, value in expected.items():
        if value.shape != weights[key].shape:
            raise CheckpointError(
                f"{source}: {key} has shape {tuple(weights[key].shape)}, the model needs {tuple(value.shape)}"
            )
