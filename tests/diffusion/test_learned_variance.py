"""The cosine process, its respacing and the kernels with a predicted variance, against their definitions."""

import math

import pytest
import torch
from safetensors.torch import load_file

from margrpo.diffusion.learned_variance import (
    LearnedVarianceTransition,
    cosine_alphas_cumprod,
    respaced_timesteps,
)
from tests.helpers import relative_error

SPACINGS = ["4", "ddim4", "25", "100"]


@pytest.fixture(scope="module")
def schedule(data_dir):
    return load_file(data_dir / "harmon" / "schedule.safetensors")


def test_the_process_is_the_published_one(schedule):
    alphas = cosine_alphas_cumprod()
    assert alphas.dtype == torch.float64
    index = schedule["1000/idx"].long()
    torch.testing.assert_close(alphas[index], schedule["1000/alphas_cumprod@idx"], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("spacing", SPACINGS)
def test_respaced_timesteps_are_the_published_ones(schedule, spacing):
    assert respaced_timesteps(spacing) == schedule[f"{spacing}/timestep_map"].tolist()


@pytest.mark.parametrize("spacing", SPACINGS)
def test_constants_are_the_published_ones(schedule, spacing):
    transition = LearnedVarianceTransition(respaced_timesteps(spacing))
    steps = torch.arange(transition.num_steps).flip(0)
    constants = transition.constants(steps, torch.device("cpu"))
    names = [
        "sqrt_recip_alphas_cumprod",
        "sqrt_recipm1_alphas_cumprod",
        "posterior_mean_coef1",
        "posterior_mean_coef2",
        "betas",
        "posterior_log_variance_clipped",
    ]
    for name, actual in zip(names, constants, strict=True):
        published = schedule[f"{spacing}/{name}"]
        expected = published.log() if name == "betas" else published
        torch.testing.assert_close(actual[:, 0].double(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("spacing", "message"),
    [
        ("", "spacing '' is not supported"),
        ("10,15", "spacing '10,15' is not supported"),
        ("25.0", "accepted: a number such as '25'"),
        ("1", "must be in 2..1000"),
        ("1001", "must be in 2..1000"),
        ("ddim999", "no integer stride gives 999"),
    ],
)
def test_a_spacing_that_is_not_supported_is_named(spacing, message):
    with pytest.raises(ValueError, match=message):
        respaced_timesteps(spacing)


def slow_kernel(timesteps, step, noise, variance, x_t):
    """Mean and std of one channel in plain floats, from the posterior of the forward process."""
    alphas = cosine_alphas_cumprod().tolist()
    index = len(timesteps) - 1 - step
    alpha = alphas[timesteps[index]]
    next_alpha = alphas[timesteps[index - 1]] if index else 1.0
    clean = (x_t - math.sqrt(1 - alpha) * noise) / math.sqrt(alpha)
    beta = 1 - alpha / next_alpha
    mean = math.sqrt(next_alpha) * beta / (1 - alpha) * clean
    mean += math.sqrt(alpha / next_alpha) * (1 - next_alpha) / (1 - alpha) * x_t
    smallest = beta * (1 - next_alpha) / (1 - alpha)
    if index == 0:
        following = alphas[timesteps[1]]
        smallest = (1 - following / alpha) * (1 - alpha) / (1 - following)
    share = (variance + 1) / 2
    return mean, math.exp(0.5 * (share * math.log(beta) + (1 - share) * math.log(smallest)))


@pytest.mark.parametrize("timesteps", [[0, 250, 500, 750], [3, 400, 401]], ids=str)
def test_moments_are_those_of_the_posterior(timesteps):
    transition = LearnedVarianceTransition(timesteps)
    assert transition.timesteps.tolist() == timesteps[::-1]
    generator = torch.Generator().manual_seed(0)
    for step in range(len(timesteps)):
        prediction, x_t = torch.randn(5, 6, generator=generator), torch.randn(5, 3, generator=generator)
        mean, std = transition.moments(prediction, x_t, step)
        for token in range(5):
            for channel in range(3):
                values = (prediction[token, channel], prediction[token, 3 + channel], x_t[token, channel])
                expected = slow_kernel(timesteps, step, *(value.item() for value in values))
                actual = (mean[token, channel].item(), std[token, channel].item())
                assert actual == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_a_step_for_each_token_gives_the_moments_of_that_step():
    transition = LearnedVarianceTransition([0, 250, 500, 750])
    prediction, x_t = torch.randn(2, 4, 6), torch.randn(2, 4, 3)
    together = transition.moments(prediction, x_t, torch.tensor([2, 0, 3, 1]))
    for token, step in enumerate([2, 0, 3, 1]):
        alone = transition.moments(prediction[:, token], x_t[:, token], step)
        for a, b in zip(together, alone, strict=True):
            torch.testing.assert_close(a[:, token], b)


def test_the_last_step_adds_no_noise_and_is_never_trained():
    transition = LearnedVarianceTransition([0, 250, 500, 750])
    assert transition.trainable_steps == [0, 1, 2]
    prediction, x_t, noise = torch.randn(4, 6), torch.randn(4, 3), torch.randn(4, 3)
    for step in range(4):
        x_prev, mean, std = transition.sample(prediction, x_t, step, noise)
        expected = mean if step == 3 else mean + std * noise
        torch.testing.assert_close(x_prev, expected)
        assert torch.equal(transition.plain_step(prediction, x_t, step, noise), x_prev)
    torch.testing.assert_close(x_prev, transition.x_start(prediction, x_t, 3))


def test_guidance_moves_the_noise_alone():
    transition = LearnedVarianceTransition([0, 500])
    conditional, unconditional = torch.randn(4, 6), torch.randn(4, 6)
    guided = transition.guide(conditional, unconditional, 3.0)
    noise = unconditional[:, :3] + 3.0 * (conditional[:, :3] - unconditional[:, :3])
    torch.testing.assert_close(guided[:, :3], noise)
    assert torch.equal(guided[:, 3:], conditional[:, 3:])


def test_half_precision_inputs_are_computed_in_fp32():
    transition = LearnedVarianceTransition([0, 500])
    prediction, x_t = torch.randn(4, 6).bfloat16(), torch.randn(4, 3).bfloat16()
    for actual, expected in zip(
        transition.moments(prediction, x_t, 0), transition.moments(prediction.float(), x_t.float(), 0), strict=True
    ):
        assert actual.dtype == torch.float32
        assert relative_error(actual, expected) == 0
