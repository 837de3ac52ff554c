"""Names of the official layout, and functions that rewrite a checkpoint."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from margrpo.models.nova import NOVA

TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"
VAE = "vae/diffusion_pytorch_model.safetensors"
TEXT_ENCODER = "text_encoder/model.safetensors"


def edit_json(path: Path, **changes: object) -> None:
    """Set keys of a JSON file; None removes one."""
    values = {key: value for key, value in (json.loads(path.read_text()) | changes).items() if value is not None}
    path.write_text(json.dumps(values))


def files_of(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}


def shard(folder: Path, stem: str, suffix: str) -> list[Path]:
    """Replace `<stem>.safetensors` by two shards and their index; returns the shards."""
    weights = load_file(folder / f"{stem}.safetensors")
    (folder / f"{stem}.safetensors").unlink()
    keys = list(weights)
    shards = [folder / f"{stem}-0000{number}-of-00002.{suffix}" for number in (1, 2)]
    weight_map = {}
    for path, part in zip(shards, (keys[::2], keys[1::2]), strict=True):
        tensors = {key: weights[key] for key in part}
        if suffix == "safetensors":
            save_file(tensors, path, metadata={"format": "pt"})
        else:
            torch.save(tensors, path)
        weight_map |= dict.fromkeys(part, path.name)
    index = folder / f"{stem}.{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return shards


def assert_same_model(actual: NOVA, expected: NOVA) -> None:
    actual_state, expected_state = actual.state_dict(), expected.state_dict()
    assert actual_state.keys() == expected_state.keys()
    for key, value in expected_state.items():
        assert actual_state[key].dtype == value.dtype, key
        assert torch.equal(actual_state[key], value), key
