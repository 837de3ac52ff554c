"""The official sampler, and the log-probabilities of the published rollout, replayed from recorded noise and order."""

import pytest
import torch

from margrpo.rollout.config import SamplingConfig
from margrpo.rollout.denoising import TokenDenoiser
from margrpo.rollout.noise import Stream
from margrpo.rollout.sampler import generate
from tests.helpers import relative_error

TOLERANCE = 2e-5
STARTS = [0, 9, 32]
PROMPTS = ["a red cube on top of a blue ball", "a small bird"]


@pytest.fixture(scope="module")
def golden(recorded):
    return recorded("sample_official")


def gather_tokens(tensor, tokens):
    """Take tokens [B, n] out of [..., B, N, C]."""
    return tensor.gather(-2, tokens[..., None].expand(*tensor.shape[:-3], *tokens.shape, tensor.shape[-1]))


class RecordedNoise:
    """Order and noise of the recorded run, which lists the tokens of a step by image and then by position."""

    def __init__(self, golden):
        self.golden = golden

    def order(self):
        # The published order lists first what stays unknown longest.
        return self.golden["orders"][:2].long().flip(1)

    def normal(self, stream, index, tokens, draws):
        assert stream == Stream.PREDICTED
        initial, later = self.golden[f"step{index}/init_noise"], self.golden[f"step{index}/eps"]
        noise = torch.cat([initial[None], later]).unflatten(1, tokens.shape)
        assert len(noise) == draws
        return gather_tokens(noise, tokens.argsort(1).argsort(1))


class RecordingDenoiser(TokenDenoiser):
    """Keeps the conditions it embeds."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.embedded = []

    def embed(self, z, guidance_scale=None):
        self.embedded.append(z)
        return super().embed(z, guidance_scale)


@pytest.fixture(scope="module")
def replayed(harmon, golden):
    denoiser = RecordingDenoiser(harmon.head, harmon.transition(4, 1.0, None), score_guided=False)
    sampling = SamplingConfig(mask_steps=3, denoising_steps=4, guidance_scale=3.0)
    condition = harmon.encode(PROMPTS)
    return generate(harmon, harmon.policy, condition, sampling, denoiser, RecordedNoise(golden)), denoiser


def test_the_sampler_makes_the_published_latents(golden, replayed):
    latents, denoiser = replayed
    assert relative_error(latents, golden["final_tokens"][:2]) < TOLERANCE
    assert denoiser.head_tokens == 2 * 2 * 64 * 4


@pytest.mark.parametrize("step", [0, 1, 2])
def test_both_branches_predict_the_published_conditions_at_every_mask_step(golden, replayed, step):
    _, denoiser = replayed
    order = RecordedNoise(golden).order()
    tokens = order[:, STARTS[step] : [*STARTS, 64][step + 1]]
    published = golden[f"step{step}/z"].unflatten(0, (4, -1))
    by_rank = tokens.argsort(1).argsort(1).repeat(2, 1)
    actual = denoiser.embedded[step].unflatten(0, (4, -1))
    assert relative_error(actual, gather_tokens(published, by_rank)) < TOLERANCE


def test_the_sampler_makes_the_published_images(harmon, golden, replayed):
    latents, _ = replayed
    with torch.no_grad():
        decoded = harmon.vae.decode(latents[:1], 8, 8)
    assert relative_error(decoded, golden["image0"]) < TOLERANCE
    before = latents.clone()
    images = harmon.decode(latents)
    assert torch.equal(latents, before)
    difference = images[1].int() - golden["images_uint8_img1"][0].int()
    assert difference.abs().max() <= 1
    assert (difference == 0).float().mean() > 0.999


def test_guided_transitions_of_all_tokens_equal_the_published_ones(harmon, recorded):
    """With the conditions of the published rollout, whose unconditional branch saw tokens of one step before."""
    rollout = recorded("rollout")
    denoiser = TokenDenoiser(harmon.head, harmon.transition(4, 1.0, None), score_guided=True)
    conditions = denoiser.embed(rollout["step2/z_cond_uncond"].flatten(0, 1), 3.0)
    noise = torch.cat([rollout["step2/init_noise"][None, 0], rollout["step2/eps"][:, 0]])
    _, trace = denoiser.sample(conditions, noise, [0, 1, 2, 3])
    assert relative_error(trace.x_prev, rollout["step2/xt_prev"][:, 0]) < TOLERANCE
    assert relative_error(trace.log_prob, rollout["step2/log_prob"][:, 0].mean(-1)) < TOLERANCE
    steps = torch.arange(4).repeat_interleave(64)
    rows = torch.arange(64).repeat(4)
    moments = denoiser.score(conditions.select(rows), trace.x_t.flatten(0, 1), trace.x_prev.flatten(0, 1), steps)
    assert relative_error(moments.mean.unflatten(0, (4, 64)), rollout["step2/mean"][:, 0]) < TOLERANCE
    assert relative_error(moments.std.unflatten(0, (4, 64)), rollout["step2/std"][:, 0]) < TOLERANCE
