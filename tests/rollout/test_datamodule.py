"""What the data module does around the sampler."""

import warnings

import lightning as L
import pytest
import torch

from margrpo.models.nova import NOVA
from margrpo.module import MARGRPO
from margrpo.rewards.brightness import Brightness
from margrpo.rollout.config import RolloutConfig
from margrpo.rollout.datamodule import RolloutDataModule, decode
from margrpo.rollout.prompts import PromptStream

ROLLOUT = RolloutConfig(
    group_size=2, mask_steps=4, denoising_steps=3, trained_mask_steps=2, trained_denoising_steps=2, guidance_scale=1.0
)
SHORT, LONG = "two candles", "a photo of a car below a zebra, " * 3


@pytest.fixture
def build(nova, tmp_path):
    """Return a function that builds a data module, and a trainer that is about to run a module on it."""

    def run(train=(SHORT,), heldout=(SHORT,), **options):
        for name, prompts in (("train", train), ("heldout", heldout)):
            (tmp_path / f"{name}.txt").write_text("\n".join(prompts))
        data = RolloutDataModule(
            str(tmp_path / "train.txt"),
            [Brightness()],
            heldout_prompts=str(tmp_path / "heldout.txt"),
            rollout=ROLLOUT,
            **options,
        )
        data.trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
        data.trainer.strategy.connect(MARGRPO(nova))
        return data

    return run


def setup_warnings(data):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data.setup("fit")
    return [str(warning.message) for warning in caught]


def test_setup_counts_the_prompts_of_each_file_that_the_text_encoder_cuts_off(build, tmp_path):
    data = build(train=[SHORT, LONG, SHORT, LONG], heldout=[LONG, SHORT, LONG], heldout_count=2)
    assert setup_warnings(data) == [
        f"{tmp_path}/{name}.txt: {counts} prompts are truncated, because the text encoder takes no more"
        for name, counts in (("train", "2 of 4"), ("heldout", "1 of 2"))
    ]


def test_prompts_that_fit_do_not_warn(build):
    assert setup_warnings(build()) == []


def test_groups_of_the_same_prompt_in_one_step_differ_and_the_first_keeps_its_noise(build, nova):
    data = build()
    records = [{"prompt": SHORT}]
    once, twice = (
        data.roll_out(nova, PromptStream(records, count, seed=0, rank=0, world_size=1).batch(0)) for count in (1, 2)
    )
    assert torch.equal(once.order, twice.order[:2])
    first, second = twice.latents.unflatten(0, (2, 2))
    for image in first:
        for other in second:
            assert not torch.allclose(image, other)


def test_two_ranks_that_draw_the_same_prompt_in_one_step_differ(build, nova):
    data = build()
    records = [{"prompt": SHORT}]
    orders = [
        data.roll_out(nova, PromptStream(records, 2, seed=0, rank=rank, world_size=2).batch(0)).order for rank in (0, 1)
    ]
    assert not torch.equal(*orders)


def test_latents_are_decoded_outside_the_autocast_of_the_trainer(nova: NOVA):
    latents = torch.randn(2, nova.num_tokens, nova.token_channels, generator=torch.Generator().manual_seed(0))
    expected = decode(nova, latents)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(decode(nova, latents), expected)
        assert not torch.equal(nova.decode(latents), expected)
