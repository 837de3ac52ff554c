"""Checkpoints in the official layout: every form of weights is read, what is written is that layout again."""

import errno
import filecmp
import json
import os
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from margrpo.models.checkpoint import CheckpointError
from margrpo.models.harmon import Harmon
from margrpo.models.harmon import model as model_module
from margrpo.models.harmon.config import HarmonConfig
from margrpo.models.harmon.network import HarmonNetwork
from tests.models.harmon.conftest import IMAGE_SIZE
from tests.models.harmon.layout import (
    WEIGHTS,
    assert_same_model,
    edit_config,
    edit_weights,
    files_of,
    original_pair,
    shard,
)

LM_HEAD = "llm.lm_head.weight"
EMBEDDING = "llm.model.embed_tokens.weight"


def load(path, **options):
    return Harmon.from_pretrained(path, IMAGE_SIZE, **options)


def test_a_saved_model_is_the_checkpoint_it_came_from(harmon, checkpoint, tmp_path):
    saved = tmp_path / "new" / "saved"
    harmon.save_pretrained(saved)
    assert files_of(saved) == files_of(checkpoint)
    for file in files_of(checkpoint) - {WEIGHTS}:
        assert filecmp.cmp(saved / file, checkpoint / file, shallow=False), file
    written, official = load_file(saved / WEIGHTS), load_file(checkpoint / WEIGHTS)
    assert written.keys() == official.keys()
    for key, value in official.items():
        assert torch.equal(written[key], value), key
    assert_same_model(load(saved), harmon)
    assert os.listdir(saved.parent) == ["saved"]


def test_what_is_saved_is_the_current_policy_and_head(fresh_harmon, harmon, tmp_path):
    with torch.no_grad():
        for part in (fresh_harmon.policy, fresh_harmon.head):
            for parameter in part.parameters():
                parameter.add_(1.0)
    fresh_harmon.save_pretrained(tmp_path / "saved")
    loaded = load(tmp_path / "saved")
    assert_same_model(loaded, fresh_harmon)
    assert not torch.equal(loaded.policy.mask_token, harmon.policy.mask_token)


def test_bf16_survives_the_round_trip(checkpoint, tmp_path):
    model = load(checkpoint, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "saved")
    assert {tensor.dtype for tensor in load_file(tmp_path / "saved" / WEIGHTS).values()} == {torch.bfloat16}
    assert_same_model(load(tmp_path / "saved", dtype=torch.bfloat16), model)


def test_large_weights_are_written_in_shards(harmon, tmp_path, monkeypatch):
    whole = model_module.save_torch_state_dict
    monkeypatch.setattr(model_module, "save_torch_state_dict", lambda *args: whole(*args, max_shard_size="1MB"))
    harmon.save_pretrained(tmp_path / "saved")
    assert f"{WEIGHTS}.index.json" in files_of(tmp_path / "saved")
    assert WEIGHTS not in files_of(tmp_path / "saved")
    monkeypatch.undo()
    model = load(tmp_path / "saved")
    assert_same_model(model, harmon)
    model.save_pretrained(tmp_path / "again")
    assert files_of(tmp_path / "again") == files_of(harmon.source)


def test_shards_are_read(harmon, copied):
    shard(copied)
    assert_same_model(load(copied), harmon)


@pytest.mark.parametrize("change", [0.0, 1.0], ids=["tied", "untied"])
def test_an_output_layer_is_read_and_written_back(harmon, copied, tmp_path, change):
    edit_weights(copied, lambda weights: weights.update({LM_HEAD: weights[EMBEDDING] + change}))
    model = load(copied)
    assert_same_model(model, harmon)
    model.save_pretrained(tmp_path / "saved")
    written = load_file(tmp_path / "saved" / WEIGHTS)
    assert torch.equal(written[LM_HEAD], written[EMBEDDING] + change)


@pytest.mark.parametrize("with_output_layer", [False, True])
def test_the_original_pair_of_files_is_read(harmon, copied, tmp_path, with_output_layer):
    if with_output_layer:
        edit_weights(copied, lambda weights: weights.update({LM_HEAD: weights[EMBEDDING].clone()}))
    pair = original_pair(copied, tmp_path)
    model = load(copied, original_weights=pair)
    assert_same_model(model, harmon)
    model.save_pretrained(tmp_path / "saved")
    assert_same_model(load(tmp_path / "saved"), harmon)
    assert (LM_HEAD in load_file(tmp_path / "saved" / WEIGHTS)) == with_output_layer


@pytest.mark.parametrize("prefix", ["", "mar.", "module.mar."])
@pytest.mark.parametrize("given", ["file", "directory", "pickle"])
def test_weights_of_trainers_of_the_bare_mar_replace_policy_and_head(harmon, checkpoint, tmp_path, prefix, given):
    changed = {
        prefix + key.removeprefix("mar."): value + 1
        for key, value in load_file(checkpoint / WEIGHTS).items()
        if key.startswith("mar.")
    }
    path = tmp_path / ("weights.bin" if given == "pickle" else WEIGHTS)
    (torch.save if given == "pickle" else save_file)(changed, path)
    loaded = load(checkpoint, mar_weights=tmp_path if given == "directory" else path)
    for name, value in loaded.state_dict().items():
        added = 1 if name.startswith(("policy.", "head.")) else 0
        assert torch.equal(value, harmon.state_dict()[name] + added), name


SIZES = {
    "1.5B": ((1536, 28, 12, 2, 8960), "mar_huge", (12, 1536), (942.4, 151.2)),
    "0.5B": ((896, 24, 14, 2, 4864), "mar_base", (6, 1024), (207.9, 35.7)),
}


@pytest.mark.parametrize("size", SIZES)
def test_the_published_sizes_give_the_published_number_of_parameters(size):
    (hidden, layers, heads, kv_heads, ffn), mar, (head_depth, head_width), (whole, head) = SIZES[size]
    values = {
        "model_type": "harmon",
        "llm": {
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "intermediate_size": ffn,
            "vocab_size": 151936,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": True,
        },
        "mar": {
            "type": mar,
            "img_size": 256,
            "vae_stride": 16,
            "patch_size": 1,
            "vae_embed_dim": 16,
            "class_num": 1000,
            "attn_dropout": 0.1,
            "proj_dropout": 0.1,
            "buffer_size": 64,
            "diffloss_d": head_depth,
            "diffloss_w": head_width,
            "num_sampling_steps": "100",
        },
    }
    config = HarmonConfig.from_dict(values, "config.json")
    with torch.device("meta"):
        network = HarmonNetwork(config, grid=32)

    def millions(*parts):
        return sum(parameter.numel() for part in parts for parameter in part.parameters()) / 1e6

    assert millions(network.policy, network.head) == pytest.approx(whole, abs=0.05)
    assert millions(network.head) == pytest.approx(head, abs=0.05)
    assert millions(network.vae) == pytest.approx(66.5, abs=0.05)
    shapes = {key: tuple(value.shape) for key, value in network.state_dict().items()}
    width = config.mar.encoder.width
    assert shapes["llm.model.embed_tokens.weight"] == (151936, hidden)
    assert shapes[f"llm.model.layers.{layers - 1}.self_attn.k_proj.weight"] == (hidden // heads * kv_heads, hidden)
    assert shapes["proj_in.0.weight"] == (hidden, width)
    assert shapes["proj_out.2.weight"] == (width, hidden)
    assert shapes["mar.encoder_pos_embed_learned"] == (1, 320, width)
    assert shapes["mar.diffusion_pos_embed_learned"] == (1, 256, width)
    assert shapes["mar.diffloss.net.final_layer.linear.weight"] == (32, head_width)
    assert shapes["vae.encoder.down.4.attn.1.q.weight"] == (512, 512, 1, 1)
    assert shapes["vae.decoder.up.4.block.2.conv1.weight"] == (512, 512, 3, 3)


def test_code_in_a_checkpoint_is_copied_but_never_run(harmon, copied, tmp_path):
    marker = tmp_path / "executed"
    for module in ("configuration_harmon", "modeling_harmon", "__init__"):
        (copied / f"{module}.py").write_text(f"open({str(marker)!r}, 'w')\n")
    tokenizer_config = copied / "tokenizer_config.json"
    settings = json.loads(tokenizer_config.read_text())
    settings["auto_map"] = {"AutoTokenizer": ["modeling_harmon.Trap", "modeling_harmon.Trap"]}
    tokenizer_config.write_text(json.dumps(settings))
    model = load(copied)
    assert_same_model(model, harmon)
    model.save_pretrained(tmp_path / "saved")
    assert "modeling_harmon.py" in files_of(tmp_path / "saved")
    load(tmp_path / "saved")
    assert not marker.exists()


class Malicious:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("damaged", [0, 1])
def test_pickles_of_anything_but_tensors_are_refused(copied, tmp_path, damaged):
    marker = tmp_path / "executed"
    pair = original_pair(copied, tmp_path)
    pair[damaged].write_bytes(pickle.dumps({"model": {"weight": Malicious(marker)}}, protocol=2))
    with pytest.raises(CheckpointError, match=str(pair[damaged])):
        load(copied, original_weights=pair)
    assert not marker.exists()


def resize(key, shape):
    return lambda path: edit_weights(path, lambda weights: weights.update({key: torch.zeros(shape)}))


def drop(key):
    return lambda path: edit_weights(path, lambda weights: weights.pop(key))


QKV = "mar.encoder_blocks.0.attn.qkv.weight"
DAMAGES = {
    "missing shard": (lambda path: shard(path)[1].unlink(), "index.json: missing shards .'model-00002-of-00002"),
    "missing weights": (lambda path: (path / WEIGHTS).unlink(), r"copied: no model\.safetensors"),
    "truncated weights": (
        lambda path: (path / WEIGHTS).write_bytes((path / WEIGHTS).read_bytes()[:-100]),
        f"{WEIGHTS}: cannot be read as weights",
    ),
    "missing key of the policy": (drop(QKV), f"missing weights {QKV}"),
    "missing key of the head": (drop("mar.diffloss.net.input_proj.bias"), "weights mar.diffloss.net.input_proj.bias"),
    "missing key of the language model": (drop("llm.model.norm.weight"), "missing weights llm.model.norm.weight"),
    "missing key of the projections": (drop("proj_out.2.bias"), "missing weights proj_out.2.bias"),
    "missing key of the VAE": (drop("vae.quant_conv.bias"), "missing weights vae.quant_conv.bias"),
    "unknown key": (resize("mar.extra", (1,)), "unknown weights mar.extra"),
    "wrong shape": (resize(QKV, (192, 32)), rf"{QKV} has shape \(192, 32\), the model needs \(192, 64\)"),
    "missing config": (lambda path: (path / "config.json").unlink(), "config.json: missing"),
    "malformed config": (lambda path: (path / "config.json").write_text("{"), "config.json: not valid JSON"),
    "another family": (
        lambda path: edit_config(path, model_type="nova"),
        "config.json: model_type is 'nova', expected 'harmon'",
    ),
    "missing entry": (lambda path: edit_config(path, mar=None), "config.json: missing mar"),
    "missing size": (lambda path: edit_config(path, "mar", buffer_size=None), "config.json: mar: missing buffer_size"),
    "missing custom size": (
        lambda path: edit_config(path, "mar", decoder_depth=None),
        "config.json: mar: missing decoder_depth",
    ),
    "unknown type": (
        lambda path: edit_config(path, "mar", type="mar_tiny"),
        "mar: type 'mar_tiny' is unknown; accepted: mar_base, mar_large, mar_huge, mar_custom",
    ),
    "patches": (lambda path: edit_config(path, "mar", patch_size=2), "mar: patch_size 2 is not supported, only 1"),
    "unknown spacing": (
        lambda path: edit_config(path, "mar", num_sampling_steps="10,20"),
        "mar: num_sampling_steps: spacing '10,20' is not supported",
    ),
    "size that is no multiple": (
        lambda path: edit_config(path, "mar", img_size=60),
        "mar: img_size 60 is not a multiple of vae_stride 16",
    ),
    "stride of another VAE": (
        lambda path: edit_config(path, "vae", ch_mult=[1, 1]),
        "mar.vae_stride is 16, but the VAE has stride 2",
    ),
    "unknown key of the VAE": (
        lambda path: edit_config(path, "vae", width=3),
        "vae has an unknown key width; accepted: ch, ch_mult, num_res_blocks",
    ),
    "missing tokenizer": (
        lambda path: [(path / name).unlink() for name in ("tokenizer.json", "vocab.json", "merges.txt")],
        r"copied: no tokenizer\.json and no vocab\.json",
    ),
    "truncated tokenizer": (
        lambda path: (path / "tokenizer.json").write_text("{"),
        "copied: tokenizer cannot be loaded",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_name(copied, name):
    damage, message = DAMAGES[name]
    damage(copied)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(copied)
    assert str(copied) in str(caught.value)


def test_wrong_replacements_are_refused_by_name(checkpoint, copied, tmp_path):
    with pytest.raises(CheckpointError, match=r"nothing\.safetensors: missing"):
        load(checkpoint, mar_weights=tmp_path / "nothing.safetensors")
    save_file({"mask_token": torch.zeros(1, 1, 64)}, tmp_path / "some.safetensors")
    with pytest.raises(CheckpointError, match=r"some\.safetensors in .*: missing weights mar\."):
        load(checkpoint, mar_weights=tmp_path / "some.safetensors")
    model, vae = original_pair(copied, tmp_path)
    torch.save({"weights": {}}, vae)
    with pytest.raises(CheckpointError, match=r"kl16\.ckpt: no entry 'model'"):
        load(copied, original_weights=(model, vae))


@pytest.mark.parametrize("size", [0, 100])
def test_an_image_size_that_is_no_multiple_of_the_stride_is_named(checkpoint, size):
    with pytest.raises(ValueError, match=f"image_size is {size}; it must be a multiple of 16"):
        Harmon.from_pretrained(checkpoint, size)


def test_an_existing_path_is_not_overwritten(harmon, tmp_path):
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "note.txt").write_text("keep")
    with pytest.raises(FileExistsError, match="saved: already exists"):
        harmon.save_pretrained(tmp_path / "saved")
    assert files_of(tmp_path / "saved") == {"note.txt"}


def test_a_failed_save_leaves_nothing_behind(harmon, tmp_path, monkeypatch):
    def disk_full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(model_module, "save_torch_state_dict", disk_full)
    with pytest.raises(OSError, match="No space left"):
        harmon.save_pretrained(tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


def test_a_saved_copy_can_be_saved_again(harmon, tmp_path):
    harmon.save_pretrained(tmp_path / "first")
    load(tmp_path / "first").save_pretrained(tmp_path / "second")
    shutil.rmtree(tmp_path / "first")
    assert_same_model(load(tmp_path / "second"), harmon)
