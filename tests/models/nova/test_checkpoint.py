"""Checkpoints in the official layout: every form of weights is read, and what is written is that layout again."""

import errno
import filecmp
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from margrpo.models.nova import NOVA
from margrpo.models.nova import model as model_module
from margrpo.models.nova.config import NOVAConfig
from margrpo.models.nova.model import NOVATransformer
from tests.models.nova.layout import TEXT_ENCODER, TRANSFORMER, VAE, assert_same_model, files_of, shard


def test_a_saved_model_is_the_checkpoint_it_came_from(nova, checkpoint, tmp_path):
    nova.save_pretrained(tmp_path / "new" / "saved")
    saved = tmp_path / "new" / "saved"
    assert files_of(saved) == files_of(checkpoint)
    for file in files_of(checkpoint) - {Path(TRANSFORMER)}:
        assert filecmp.cmp(saved / file, checkpoint / file, shallow=False), file
    written, official = load_file(saved / TRANSFORMER), load_file(checkpoint / TRANSFORMER)
    assert written.keys() == official.keys()
    for key, value in official.items():
        assert written[key].dtype == value.dtype
        assert torch.equal(written[key], value), key
    assert_same_model(NOVA.from_pretrained(saved), nova)
    assert os.listdir(saved.parent) == ["saved"]


def test_what_is_saved_is_the_current_policy_and_head(fresh_nova, nova, tmp_path):
    with torch.no_grad():
        for part in (fresh_nova.policy, fresh_nova.head):
            for parameter in part.parameters():
                parameter.add_(1.0)
    fresh_nova.save_pretrained(tmp_path / "saved")
    loaded = NOVA.from_pretrained(tmp_path / "saved")
    assert_same_model(loaded, fresh_nova)
    assert torch.equal(loaded.policy.text_embed.weight, nova.policy.text_embed.weight)
    assert not torch.equal(loaded.head.head.weight, nova.head.head.weight)


def test_a_saved_copy_can_be_saved_again(nova, tmp_path):
    nova.save_pretrained(tmp_path / "first")
    NOVA.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "second")
    shutil.rmtree(tmp_path / "first")
    assert_same_model(NOVA.from_pretrained(tmp_path / "second"), nova)


def test_bf16_survives_the_round_trip(checkpoint, tmp_path):
    model = NOVA.from_pretrained(checkpoint, dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.bfloat16}
    model.save_pretrained(tmp_path / "saved")
    assert {tensor.dtype for tensor in load_file(tmp_path / "saved" / TRANSFORMER).values()} == {torch.bfloat16}
    assert_same_model(NOVA.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16), model)


def test_a_file_mode_of_the_source_does_not_stop_a_save(nova, copied, tmp_path):
    for path in [copied, *copied.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    NOVA.from_pretrained(copied).save_pretrained(tmp_path / "saved")
    for path in [tmp_path / "saved", *(tmp_path / "saved").rglob("*")]:
        assert path.stat().st_mode & 0o200, path
    assert_same_model(NOVA.from_pretrained(tmp_path / "saved"), nova)


def test_transformer_weights_a_former_layout_left_behind_are_not_copied(nova, copied, tmp_path):
    shard(copied / "transformer", "diffusion_pytorch_model", "safetensors")
    NOVA.from_pretrained(copied).save_pretrained(tmp_path / "saved")
    assert {path.name for path in (tmp_path / "saved" / "transformer").glob("diffusion*")} == {Path(TRANSFORMER).name}
    assert_same_model(NOVA.from_pretrained(tmp_path / "saved"), nova)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_shards_are_read(nova, copied, suffix):
    shard(copied / "transformer", "diffusion_pytorch_model", suffix)
    shard(copied / "vae", "diffusion_pytorch_model", suffix)
    shard(copied / "text_encoder", "model", "safetensors")
    assert_same_model(NOVA.from_pretrained(copied), nova)


def test_pickles_of_tensors_are_read(nova, copied):
    for name, replacement in ((TRANSFORMER, None), (VAE, None), (TEXT_ENCODER, "pytorch_model.bin")):
        file = copied / name
        torch.save(load_file(file), file.with_name(replacement) if replacement else file.with_suffix(".bin"))
        file.unlink()
    assert_same_model(NOVA.from_pretrained(copied), nova)


@pytest.mark.parametrize("prefix", ["", "module.", "transformer.", "model.", "module.transformer."])
@pytest.mark.parametrize("given", ["file", "directory", "pickle"])
def test_bare_transformer_weights_of_trainers_replace_those_of_the_checkpoint(
    nova, checkpoint, tmp_path, prefix, given
):
    changed = {prefix + key: value + 1 for key, value in load_file(checkpoint / TRANSFORMER).items()}
    if given == "pickle":
        path = tmp_path / "pytorch_model.bin"
        torch.save(changed, path)
    else:
        path = tmp_path / "model.safetensors"
        save_file(changed, path)
    loaded = NOVA.from_pretrained(checkpoint, transformer_weights=tmp_path if given == "directory" else path)
    for name, value in loaded.policy.state_dict().items():
        assert torch.equal(value, nova.policy.state_dict()[name] + 1)
    for name, value in loaded.head.state_dict().items():
        assert torch.equal(value, nova.head.state_dict()[name] + 1)
    assert torch.equal(loaded.policy.image_positions, nova.policy.image_positions)


@pytest.mark.parametrize(("head", "parameters"), [("mlp_d3w1280", 641_493_008), ("mlp_d6w1024", 645_693_456)])
def test_the_published_sizes_give_the_published_number_of_parameters(head, parameters):
    values = {
        "image_dim": 4,
        "image_size": 512,
        "image_stride": 8,
        "text_token_dim": 2560,
        "text_token_len": 256,
        "video_base_size": [1, 16, 16],
        "image_base_size": [32, 32],
        "arch": ["vit_d16w1024", "vit_d32w1024", head],
    }
    config = NOVAConfig.from_dict(values, "config.json")
    assert config.to_dict() == values
    with torch.device("meta"):
        transformer = NOVATransformer(config)
    assert sum(parameter.numel() for parameter in transformer.parameters()) == parameters
    shapes = {key: tuple(value.shape) for key, value in transformer.state_dict().items()}
    width = config.head_width
    assert shapes["video_encoder.patch_embed.proj.weight"] == (1024, 4, 4, 4)
    assert shapes["image_encoder.blocks.31.attn.qkv.weight"] == (3072, 1024)
    assert shapes["image_decoder.time_cond_embed.condition_proj.fc1.weight"] == (width, 1024)
    assert shapes[f"image_decoder.blocks.{config.head_depth - 1}.norm1.proj.weight"] == (3 * width, width)
    assert shapes["image_decoder.norm.proj.weight"] == (2 * width, width)
    assert shapes["text_embed.weight"] == (512, 2560)
    assert shapes["mask_embed.mask_token"] == (1, 1024)


def test_an_existing_path_is_not_overwritten(nova, tmp_path):
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "note.txt").write_text("keep")
    with pytest.raises(FileExistsError, match="saved: already exists"):
        nova.save_pretrained(tmp_path / "saved")
    assert files_of(tmp_path) == {Path("saved/note.txt")}


def test_a_failed_save_leaves_nothing_behind(nova, tmp_path, monkeypatch):
    def disk_full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(model_module, "save_file", disk_full)
    with pytest.raises(OSError, match="No space left"):
        nova.save_pretrained(tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    nova.save_pretrained(tmp_path / "saved")
    assert_same_model(NOVA.from_pretrained(tmp_path / "saved"), nova)
