"""Damaged and hostile checkpoints: refused by name, with no code run and nothing half-loaded."""

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from margrpo.models import checkpoint as checkpoint_module
from margrpo.models.checkpoint import CheckpointError
from margrpo.models.nova import NOVA
from margrpo.models.nova.config import NOVAConfig
from margrpo.models.nova.model import NOVATransformer
from tests.models.nova.layout import TEXT_ENCODER, TRANSFORMER, VAE, assert_same_model, edit_json, shard


def test_code_in_a_checkpoint_is_never_run(nova, copied, tmp_path):
    """All five component folders offer code in every way that transformers and diffusers know of."""
    marker = tmp_path / "executed"
    code = f"open({str(marker)!r}, 'w')\nclass Trap:\n    pass\n"
    auto_map = dict.fromkeys(("AutoConfig", "AutoModel", "AutoModelForCausalLM"), "trap.Trap")
    configs = {
        "tokenizer": "tokenizer_config.json",
        "text_encoder": "config.json",
        "transformer": "config.json",
        "vae": "config.json",
        "scheduler": "scheduler_config.json",
    }
    for folder, config in configs.items():
        for module in ("trap", f"__{folder}__", "__init__"):
            (copied / folder / f"{module}.py").write_text(code)
        edit_json(copied / folder / config, auto_map=auto_map | {"AutoTokenizer": ["trap.Trap", "trap.Trap"]})
    assert_same_model(NOVA.from_pretrained(copied), nova)
    assert not marker.exists()


def test_a_tokenizer_that_needs_code_is_refused_without_asking(copied, tmp_path, monkeypatch):
    marker = tmp_path / "executed"
    (copied / "tokenizer" / "trap.py").write_text(f"open({str(marker)!r}, 'w')\nclass Trap:\n    pass\n")
    edit_json(
        copied / "tokenizer" / "tokenizer_config.json",
        tokenizer_class="Trap",
        auto_map={"AutoTokenizer": ["trap.Trap", "trap.Trap"]},
    )
    monkeypatch.setattr("builtins.input", lambda *args: "y")
    with pytest.raises(CheckpointError, match="tokenizer: tokenizer cannot be loaded"):
        NOVA.from_pretrained(copied)
    assert not marker.exists()


class Malicious:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("kind", ["torch", "pickle"])
@pytest.mark.parametrize(
    ("weights", "replacement"),
    [
        (TRANSFORMER, "diffusion_pytorch_model.bin"),
        (VAE, "diffusion_pytorch_model.bin"),
        (TEXT_ENCODER, "pytorch_model.bin"),
    ],
)
def test_pickles_of_anything_but_tensors_are_refused(copied, tmp_path, weights, replacement, kind):
    marker = tmp_path / "executed"
    path = (copied / weights).with_name(replacement)
    (copied / weights).unlink()
    if kind == "torch":
        torch.save({"weight": Malicious(marker)}, path)
    else:
        path.write_bytes(pickle.dumps({"weight": Malicious(marker)}))
    with pytest.raises(CheckpointError, match=str(path.parent)):
        NOVA.from_pretrained(copied)
    assert not marker.exists()
    if weights == TRANSFORMER:
        with pytest.raises(CheckpointError, match=str(path)):
            NOVA.from_pretrained(copied, transformer_weights=path)
        assert not marker.exists()


def test_only_data_files_are_downloaded(checkpoint, monkeypatch):
    asked = {}

    def download(name, allow_patterns):
        asked.update(name=name, allow_patterns=allow_patterns)
        return checkpoint

    monkeypatch.setattr(checkpoint_module, "snapshot_download", download)
    NOVA.from_pretrained("owner/name")
    assert asked["name"] == "owner/name"
    assert not any("py" in pattern or pattern == "*" for pattern in asked["allow_patterns"])


def edit_weights(path: Path, change) -> None:
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def replace(weights: dict, key: str, shape: tuple) -> None:
    weights[key] = torch.zeros(shape)


def rename_class(path: Path, component: str) -> None:
    edit_json(path, **{component: ["somewhere", "Unknown"]})


QKV = "image_encoder.blocks.0.attn.qkv.weight"
DAMAGES = {
    "missing shard": (
        lambda path: shard(path / "transformer", "diffusion_pytorch_model", "safetensors")[1].unlink(),
        "diffusion_pytorch_model.safetensors.index.json: missing shards .'diffusion_pytorch_model-00002-of-00002",
    ),
    "missing shard of the text encoder": (
        lambda path: shard(path / "text_encoder", "model", "safetensors")[1].unlink(),
        "text_encoder: text encoder cannot be loaded: .*model-00002-of-00002",
    ),
    "missing weights": (lambda path: (path / TRANSFORMER).unlink(), "transformer: no diffusion_pytorch_model"),
    "missing key": (
        lambda path: edit_weights(path / TRANSFORMER, lambda weights: weights.pop(QKV)),
        f"transformer: missing weights {QKV}",
    ),
    "missing key of the head": (
        lambda path: edit_weights(path / TRANSFORMER, lambda weights: weights.pop("image_decoder.head.bias")),
        "transformer: missing weights image_decoder.head.bias",
    ),
    "missing key of the VAE": (
        lambda path: edit_weights(path / VAE, lambda weights: weights.pop("decoder.conv_in.bias")),
        "vae: missing weights decoder.conv_in.bias",
    ),
    "missing key of the text encoder": (
        lambda path: edit_weights(path / TEXT_ENCODER, lambda weights: weights.pop("model.final_layernorm.bias")),
        "text_encoder: missing weights .*final_layernorm.bias",
    ),
    "unknown key": (
        lambda path: edit_weights(path / TRANSFORMER, lambda weights: replace(weights, "label_embed.weight", (1,))),
        "transformer: unknown weights label_embed.weight",
    ),
    "wrong shape": (
        lambda path: edit_weights(path / TRANSFORMER, lambda weights: replace(weights, QKV, (192, 32))),
        rf"transformer: {QKV} has shape \(192, 32\), the model needs \(192, 64\)",
    ),
    "wrong shape of the text encoder": (
        lambda path: edit_weights(
            path / TEXT_ENCODER, lambda weights: replace(weights, "model.final_layernorm.bias", (31,))
        ),
        "text_encoder: other shapes for .*final_layernorm.bias",
    ),
    "truncated weights": (lambda path: truncate(path / TRANSFORMER), f"{TRANSFORMER}: cannot be read as weights"),
    "truncated weights of the VAE": (lambda path: truncate(path / VAE), f"{VAE}: cannot be read as weights"),
    "truncated weights of the text encoder": (
        lambda path: truncate(path / TEXT_ENCODER),
        "text_encoder: text encoder cannot be loaded",
    ),
    "empty weights": (lambda path: (path / TRANSFORMER).write_bytes(b""), f"{TRANSFORMER}: cannot be read as weights"),
    "missing config key": (
        lambda path: edit_json(path / "transformer/config.json", image_stride=None),
        "transformer: missing image_stride",
    ),
    "malformed config": (
        lambda path: (path / "transformer/config.json").write_text("{"),
        "transformer/config.json: not valid JSON",
    ),
    "unknown width": (
        lambda path: edit_json(path / "transformer/config.json", arch=["vit_d2w80", "vit_d3w80", "mlp_d2w96"]),
        r"transformer: arch 'vit_d2w80' has width 80; known widths are \[64, 96, 128, 768, 1024, 1536\]",
    ),
    "malformed architecture": (
        lambda path: edit_json(path / "transformer/config.json", arch=["vit_d2w64", "vit_d3w64", "cnn"]),
        "transformer: arch 'cnn' is not of the form mlp_d<depth>w<width>",
    ),
    "architecture without a head": (
        lambda path: edit_json(path / "transformer/config.json", arch=["vit_d2w64", "vit_d3w64"]),
        "transformer: arch .* does not name video encoder, image encoder and head",
    ),
    "grid that does not fit": (
        lambda path: edit_json(path / "transformer/config.json", image_base_size=[16, 16]),
        r"transformer: image_base_size \(16, 16\) does not fit image_size 128",
    ),
    "text longer than the null prompt": (
        lambda path: edit_json(path / "transformer/config.json", text_token_len=600),
        "transformer: text_token_len 600 is more than 512",
    ),
    "video model": (
        lambda path: edit_json(path / "transformer/config.json", video_mixer_rank=24),
        "transformer: video_mixer_rank belongs to the video models",
    ),
    "text encoder of another width": (
        lambda path: edit_json(path / "text_encoder/config.json", hidden_size=64),
        "text_encoder: the text encoder is 64 wide, the transformer expects 32",
    ),
    "missing index": (lambda path: (path / "model_index.json").unlink(), "model_index.json: missing"),
    "missing component": (
        lambda path: edit_json(path / "model_index.json", vae=None),
        r"model_index.json: no \[module, class\] entry for vae",
    ),
    **{
        f"unknown class of the {component}": (
            lambda path, component=component: rename_class(path / "model_index.json", component),
            f"model_index.json: {component} is a Unknown; accepted: {accepted}",
        )
        for component, accepted in {
            "tokenizer": "CodeGenTokenizerFast",
            "text_encoder": "PhiEncoderModel",
            "transformer": "NOVATransformer3DModel",
            "vae": "AutoencoderKL",
            "scheduler": "FlowMatchEulerDiscreteScheduler, DDPMScheduler",
        }.items()
    },
    **{
        f"missing folder of the {component}": (
            lambda path, component=component: shutil.rmtree(path / component),
            f"{component}: missing",
        )
        for component in ("tokenizer", "text_encoder", "transformer", "vae", "scheduler")
    },
    **{
        f"missing {config}": (
            lambda path, config=config: (path / config).unlink(),
            f"{config}: missing",
        )
        for config in (
            "text_encoder/config.json",
            "transformer/config.json",
            "vae/config.json",
            "scheduler/scheduler_config.json",
        )
    },
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_name(copied, name):
    damage, message = DAMAGES[name]
    damage(copied)
    with pytest.raises(CheckpointError, match=message) as caught:
        NOVA.from_pretrained(copied)
    assert str(copied) in str(caught.value)


@pytest.mark.parametrize("name", ["/no/such/place", "./nothing", "nothing", "one/two/three", "owner/name"])
def test_a_place_that_is_no_checkpoint_is_named(name, monkeypatch):
    def unreachable(*args, **options):
        raise OSError("no route to host")

    monkeypatch.setattr(checkpoint_module, "snapshot_download", unreachable)
    with pytest.raises(CheckpointError, match=f"{name}: no such directory"):
        NOVA.from_pretrained(name)


def test_wrong_transformer_weights_are_refused_by_name(checkpoint, tmp_path):
    with pytest.raises(CheckpointError, match=r"nothing\.safetensors: missing"):
        NOVA.from_pretrained(checkpoint, transformer_weights=tmp_path / "nothing.safetensors")
    with pytest.raises(CheckpointError, match=f"{tmp_path}: no model.safetensors"):
        NOVA.from_pretrained(checkpoint, transformer_weights=tmp_path)
    torch.save([torch.zeros(1)], tmp_path / "list.bin")
    with pytest.raises(CheckpointError, match=r"list\.bin: expected a dictionary of tensors"):
        NOVA.from_pretrained(checkpoint, transformer_weights=tmp_path / "list.bin")


def test_weights_that_do_not_fit_leave_a_model_as_it_was(checkpoint):
    config = NOVAConfig.from_dict(json.loads((checkpoint / "transformer" / "config.json").read_text()), "config.json")
    weights = load_file(checkpoint / TRANSFORMER)
    transformer = NOVATransformer(config)
    before = {key: value.clone() for key, value in transformer.state_dict().items()}
    replace(weights, "image_decoder.head.bias", (3,))
    with pytest.raises(CheckpointError):
        transformer.assign(weights, "here")
    after = transformer.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())
