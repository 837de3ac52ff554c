"""A tiny NOVA and small rollouts on it."""

from pathlib import Path

import pytest
import torch

from margrpo.models.nova import NOVA
from margrpo.rollout.config import RolloutConfig
from margrpo.rollout.denoising import TokenDenoiser
from margrpo.rollout.noise import SampleNoise
from margrpo.rollout.plan import draw_plan
from margrpo.rollout.sampler import roll_out

PROMPTS = ["a photo of a car below a zebra", "two candles"]
SMALL = {
    "group_size": 2,
    "mask_steps": 6,
    "denoising_steps": 4,
    "trained_mask_steps": 4,
    "trained_denoising_steps": 3,
}


@pytest.fixture(scope="session")
def nova(data_dir: Path) -> NOVA:
    return NOVA.from_pretrained(data_dir / "nova" / "checkpoint")


@pytest.fixture
def small_rollout(nova):
    """Return a function that rolls out with changed options: (config, plan, sampled, denoiser)."""

    def run(*, seed=0, step=0, seeds=(1, 2, 3, 4), prompts=PROMPTS, **options):
        config = RolloutConfig(**{**SMALL, **options})
        transition = nova.transition(config.denoising_steps, config.noise_level, config.stochastic_steps)
        plan = draw_plan(config, nova.mask_schedule(config.mask_steps), transition.trainable_steps, seed, step)
        denoiser = TokenDenoiser(nova.head, transition, score_guided=config.score_guided)
        noise = SampleNoise(list(seeds), nova.num_tokens, nova.token_channels, torch.device("cpu"))
        sampled = roll_out(nova, nova.encode(prompts), config, plan, denoiser, noise)
        return config, plan, sampled, denoiser

    return run
