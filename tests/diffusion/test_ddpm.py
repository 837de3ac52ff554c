"""Ancestral transitions against the published release, diffusers and a slow reference."""

import math
from typing import Any

import pytest
import torch
from diffusers import DDPMScheduler
from torch import Tensor

from margrpo.diffusion.ddpm import AncestralTransition
from margrpo.diffusion.transition import log_prob
from tests.helpers import relative_error

TOLERANCE = 1e-3
RECORDED: dict[str, dict[str, Any]] = {
    "cos_trailing": {"beta_schedule": "squaredcos_cap_v2", "timestep_spacing": "trailing"},
    "slin_leading": {
        "beta_schedule": "scaled_linear",
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "timestep_spacing": "leading",
    },
}


def make_diffusers_draw(noise: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffusers.schedulers.scheduling_ddpm.randn_tensor", lambda *args, **kwargs: noise)


def slow_moments(
    epsilon: float, x_t: float, alphas: list[float], timesteps: list[int], step: int, clip_range: float | None
) -> tuple[float, float]:
    """One number at a time, in double precision: condition the forward process on x_0 by Bayes' rule."""
    alpha = alphas[timesteps[step]]
    alpha_prev = alphas[timesteps[step + 1]] if step + 1 < len(timesteps) else 1.0
    clean = (x_t - math.sqrt(1 - alpha) * epsilon) / math.sqrt(alpha)
    if clip_range is not None:
        clean = max(-clip_range, min(clip_range, clean))
    if alpha_prev == 1.0:
        return clean, 0.0
    # Prior x_prev ~ N(sqrt(alpha_prev) x_0, 1 - alpha_prev), likelihood x_t ~ N(gain x_prev, 1 - gain^2).
    gain = math.sqrt(alpha / alpha_prev)
    prior_precision, precision = 1 / (1 - alpha_prev), gain**2 / (1 - gain**2)
    variance = 1 / (prior_precision + precision)
    mean = variance * (prior_precision * math.sqrt(alpha_prev) * clean + precision * x_t / gain)
    return mean, math.sqrt(variance)


@pytest.mark.parametrize("name", RECORDED)
def test_transitions_equal_the_published_ones(golden: dict[str, Tensor], name: str) -> None:
    scheduler = DDPMScheduler(clip_sample=False, **RECORDED[name])
    assert torch.equal(scheduler.alphas_cumprod, golden[f"ddpm.{name}.alphas_cumprod"])
    transition = AncestralTransition.from_scheduler(scheduler, 25)
    assert torch.equal(transition.timesteps, golden[f"ddpm.{name}.timesteps"].float())
    epsilon, x_t, noise = golden["in.model_output"], golden["in.sample"], golden["in.noise"]
    for step in range(25):
        x_prev, mean, std = transition.sample(epsilon, x_t, step, noise)
        assert relative_error(mean, golden[f"ddpm.{name}.mean"][step]) < TOLERANCE
        assert relative_error(x_prev, golden[f"ddpm.{name}.prev_sample"][step]) < TOLERANCE
        assert std.item() ** 2 == pytest.approx(golden[f"ddpm.{name}.var"][step].item(), rel=TOLERANCE)
        if step in transition.trainable_steps:
            logp = log_prob(golden[f"ddpm.{name}.prev_sample"][step], mean, std)
            assert relative_error(logp, golden[f"ddpm.{name}.logp"][step]) < TOLERANCE


@pytest.mark.parametrize("spacing", ["leading", "trailing", "linspace"])
@pytest.mark.parametrize("steps_offset", [0, 1])
def test_the_last_step_has_no_density(spacing: str, steps_offset: int) -> None:
    scheduler = DDPMScheduler(timestep_spacing=spacing, steps_offset=steps_offset)
    transition = AncestralTransition.from_scheduler(scheduler, 10)
    assert transition.trainable_steps == list(range(9))
    x = torch.zeros(3)
    assert transition.moments(x, x, 9)[1].item() == 0.0
    assert AncestralTransition.from_scheduler(scheduler, 1).trainable_steps == []


@pytest.mark.parametrize("spacing", ["leading", "trailing", "linspace"])
@pytest.mark.parametrize(
    "options",
    [
        {"clip_sample": False},
        {"clip_sample": True},
        {"clip_sample": True, "clip_sample_range": 2.5},
        {"clip_sample": False, "steps_offset": 1},
        {"clip_sample": False, "variance_type": "fixed_small_log"},
    ],
)
def test_steps_equal_diffusers(monkeypatch: pytest.MonkeyPatch, spacing: str, options: dict[str, Any]) -> None:
    scheduler = DDPMScheduler(beta_schedule="scaled_linear", timestep_spacing=spacing, **options)
    transition = AncestralTransition.from_scheduler(scheduler, 13)
    scheduler.set_timesteps(13)
    generator = torch.Generator().manual_seed(0)
    expected = actual = torch.randn(5, 4, generator=generator)
    for step, timestep in enumerate(scheduler.timesteps):
        epsilon, noise = (torch.randn(5, 4, generator=generator) for _ in range(2))
        make_diffusers_draw(noise, monkeypatch)
        expected = scheduler.step(epsilon, timestep, expected).prev_sample
        plain = transition.plain_step(epsilon, actual, step, noise)
        actual = transition.sample(epsilon, actual, step, noise)[0]
        assert torch.equal(plain, actual)
        assert relative_error(actual, expected) < 1e-5


@pytest.mark.parametrize("clip_range", [None, 0.8])
def test_moments_equal_a_slow_reference(clip_range: float | None) -> None:
    scheduler = DDPMScheduler(clip_sample=clip_range is not None, clip_sample_range=clip_range or 1.0)
    transition = AncestralTransition.from_scheduler(scheduler, 7)
    timesteps = [int(timestep) for timestep in transition.timesteps]
    epsilon = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
    x_t = torch.randn(7, 3, generator=torch.Generator().manual_seed(1))
    mean, std = transition.moments(epsilon, x_t, torch.arange(7))
    for step in range(7):
        for channel in range(3):
            expected_mean, expected_std = slow_moments(
                epsilon[step, channel].item(),
                x_t[step, channel].item(),
                scheduler.alphas_cumprod.tolist(),
                timesteps,
                step,
                clip_range,
            )
            assert mean[step, channel].item() == pytest.approx(expected_mean, rel=1e-4, abs=1e-5)
            assert std[step].item() == pytest.approx(expected_std, rel=1e-4)


@pytest.mark.parametrize("clip_range", [None, 0.8])
def test_gradient_of_log_prob_equals_the_derived_formula(clip_range: float | None) -> None:
    scheduler = DDPMScheduler(clip_sample=clip_range is not None, clip_sample_range=clip_range or 1.0)
    transition = AncestralTransition.from_scheduler(scheduler, 5)
    alphas = scheduler.alphas_cumprod[transition.timesteps.long()].double()
    generator = torch.Generator().manual_seed(0)
    for step in transition.trainable_steps:
        epsilon, x_t, x_prev = (torch.randn(8, 3, generator=generator) for _ in range(3))
        epsilon.requires_grad_(True)
        mean, std = transition.moments(epsilon, x_t, step)
        log_prob(x_prev, mean, std).sum().backward()
        alpha, alpha_prev = alphas[step], alphas[step + 1]
        beta = 1 - alpha / alpha_prev
        variance = beta * (1 - alpha_prev) / (1 - alpha)
        # Chain rule through x_0, whose slope in epsilon is -sqrt((1 - alpha) / alpha), or 0 where it was clipped.
        slope = -(alpha_prev.sqrt() * beta / (1 - alpha)) * ((1 - alpha) / alpha).sqrt()
        expected = (x_prev - mean.detach()).double() / variance * slope
        if clip_range is not None:
            clean = (x_t - (1 - alpha).sqrt() * epsilon.detach()) / alpha.sqrt()
            expected = torch.where(clean.abs() <= clip_range, expected, 0.0)
        assert epsilon.grad is not None
        assert relative_error(epsilon.grad, expected) < 1e-4


def test_the_given_scheduler_is_left_as_it_is() -> None:
    scheduler = DDPMScheduler()
    AncestralTransition.from_scheduler(scheduler, num_steps=5)
    assert scheduler.num_inference_steps is None
    assert len(scheduler.timesteps) == 1000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prediction_type": "v_prediction"}, "prediction_type='v_prediction' is not supported, only 'epsilon'"),
        ({"prediction_type": "sample"}, "prediction_type='sample' is not supported, only 'epsilon'"),
        ({"thresholding": True}, "thresholding=True is not supported, only False"),
        (
            {"variance_type": "learned_range"},
            "variance_type='learned_range' is not supported, only 'fixed_small' or 'fixed_small_log'",
        ),
        ({"variance_type": "fixed_large"}, "only 'fixed_small' or 'fixed_small_log'"),
        ({"rescale_betas_zero_snr": True}, "rescale_betas_zero_snr=True is not supported, only False"),
    ],
)
def test_unsupported_configurations_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^DDPMScheduler: .*{message}"):
        AncestralTransition.from_scheduler(DDPMScheduler(**options), 5)


@pytest.mark.parametrize(
    ("num_steps", "message"),
    [
        (0, "number of denoising steps must be at least 1, got 0"),
        (61, "DDPMScheduler cannot make 61 denoising steps with its spacing, choose another number"),
        (1001, "cannot be larger than"),
    ],
)
def test_impossible_numbers_of_steps_are_refused(num_steps: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AncestralTransition.from_scheduler(DDPMScheduler(timestep_spacing="trailing"), num_steps)
