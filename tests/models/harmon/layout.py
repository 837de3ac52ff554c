"""Functions that rewrite a checkpoint in the official layout."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from margrpo.models.harmon import Harmon

WEIGHTS = "model.safetensors"


def edit_config(path: Path, entry: str | None = None, **changes: object) -> None:
    """Set keys of the configuration or of one of its entries; None removes one."""
    file = path / "config.json"
    config = json.loads(file.read_text())
    values = config if entry is None else config[entry]
    values.update(changes)
    for key in [key for key, value in values.items() if value is None]:
        del values[key]
    file.write_text(json.dumps(config))


def edit_weights(path: Path, change) -> None:
    weights = load_file(path / WEIGHTS)
    change(weights)
    save_file(weights, path / WEIGHTS, metadata={"format": "pt"})


def shard(folder: Path) -> list[Path]:
    """Replace the weights by two shards and their index; returns the shards."""
    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    keys = list(weights)
    shards = [folder / f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    weight_map = {}
    for path, part in zip(shards, (keys[::2], keys[1::2]), strict=True):
        save_file({key: weights[key] for key in part}, path, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, path.name)
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return shards


def original_pair(folder: Path, target: Path) -> tuple[Path, Path]:
    """Write the two files of the original release, and remove the weights of the directory."""
    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    model, vae = target / "harmon.pth", target / "kl16.ckpt"
    torch.save({key: value for key, value in weights.items() if not key.startswith("vae.")}, model)
    vae_weights = {key.removeprefix("vae."): value for key, value in weights.items() if key.startswith("vae.")}
    torch.save({"model": vae_weights, "epoch": 3}, vae)
    return model, vae


def files_of(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def assert_same_model(actual: Harmon, expected: Harmon) -> None:
    actual_state, expected_state = actual.state_dict(), expected.state_dict()
    assert actual_state.keys() == expected_state.keys()
    for key, value in expected_state.items():
        assert actual_state[key].dtype == value.dtype, key
        assert torch.equal(actual_state[key], value), key
