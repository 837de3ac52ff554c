"""What ships with the package: the tiny model and the prompts of the embedded task."""

from pathlib import Path

import torch

import margrpo
from margrpo.models.nova import NOVA
from margrpo.rollout.config import SamplingConfig
from margrpo.rollout.denoising import TokenDenoiser
from margrpo.rollout.noise import SampleNoise
from margrpo.rollout.prompts import read_prompts
from margrpo.rollout.sampler import generate
from margrpo.shapes.grammar import asked_things, is_held_out

ASSETS = Path(margrpo.__file__).parent / "assets"


def test_the_assets_are_small_and_hold_no_code_and_no_pickles():
    files = [file for file in ASSETS.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 8e6
    assert {file.suffix for file in files} <= {".json", ".jsonl", ".txt", ".csv", ".safetensors"}


def test_training_and_held_out_prompts_are_distinct_disjoint_and_can_be_verified():
    train, heldout = (read_prompts(ASSETS / "prompts" / f"{name}.jsonl") for name in ("train", "heldout"))
    for records, part in ((train, False), (heldout, True)):
        texts = [record["prompt"] for record in records]
        assert len(set(texts)) == len(texts)
        assert all(is_held_out(text) == part for text in texts)
        assert all(asked_things(record) for record in records)
    assert len(heldout) >= 256


def test_the_tiny_model_is_pretrained_its_images_depend_on_the_prompt():
    model = NOVA.from_pretrained(ASSETS / "nova-tiny")
    assert (model.num_tokens, model.token_channels) == (64, 16)
    denoiser = TokenDenoiser(model.head, model.transition(8, 0.7, None), score_guided=False)
    sampling = SamplingConfig(mask_steps=8, denoising_steps=8, guidance_scale=3.0)
    shares = []
    for colour in ("red", "blue"):
        noise = SampleNoise(list(range(8)), model.num_tokens, model.token_channels, torch.device("cpu"))
        condition = model.encode([f"three {colour} squares"] * 8)
        images = model.decode(generate(model, model.policy, condition, sampling, denoiser, noise))
        red, blue = images[:, 0].float().mean(), images[:, 2].float().mean()
        shares.append((red / (red + blue)).item())
    assert shares[0] > 0.55 > 0.45 > shares[1]
