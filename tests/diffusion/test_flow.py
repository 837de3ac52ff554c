"""Flow transitions against the published release, diffusers and a slow reference."""

import math
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from margrpo.diffusion.flow import FlowTransition
from margrpo.diffusion.transition import log_prob
from tests.helpers import relative_error

TOLERANCE = 2e-4


def flow(num_steps: int, shift: float = 1.0, **options: Any) -> FlowTransition:
    return FlowTransition.from_scheduler(FlowMatchEulerDiscreteScheduler(shift=shift), num_steps, **options)


def slow_moments(
    velocity: float, x_t: float, sigmas: list[float], step: int, noise_level: float
) -> tuple[float, float]:
    """One number at a time, in double precision, as the paper writes it: drift and diffusion of the SDE."""
    sigma = sigmas[step]
    dt = sigmas[step + 1] - sigma
    denominator = 1 - (sigmas[1] if sigma == 1 else sigma)
    diffusion = noise_level * math.sqrt(sigma / denominator)
    clean_direction = x_t + (1 - sigma) * velocity
    drift = velocity + diffusion**2 / (2 * sigma) * clean_direction
    return x_t + drift * dt, diffusion * math.sqrt(-dt)


@pytest.mark.parametrize("num_steps", [4, 10, 25])
def test_timesteps_equal_the_published_ones(golden: dict[str, Tensor], num_steps: int) -> None:
    transition = flow(num_steps)
    assert torch.equal(transition.timesteps, golden[f"flow{num_steps}.timesteps"])
    assert relative_error(transition.timesteps, torch.linspace(1000, 1, num_steps)) < 1e-6


def test_transitions_equal_the_published_ones(golden: dict[str, Tensor]) -> None:
    transition = flow(25)
    velocity, x_t, noise = golden["in.model_output"], golden["in.sample"], golden["in.noise"]
    for step in range(25):
        mean, std = transition.moments(velocity, x_t, step)
        assert relative_error(mean, golden["flow25.mean"][step]) < TOLERANCE
        # std falls to 7e-4: compare it relative to itself.
        assert std.item() == pytest.approx(golden["flow25.std"][step].item(), rel=TOLERANCE)
        logp = log_prob(golden["in.prev_sample"], mean, std)
        assert relative_error(logp, golden["flow25.logp"][step]) < TOLERANCE
        x_prev, mean, std = transition.sample(velocity, x_t, step, noise)
        assert relative_error(x_prev, golden["flow25.sampled"][step]) < TOLERANCE
        assert relative_error(log_prob(x_prev, mean, std), golden["flow25.sampled_logp"][step]) < TOLERANCE
        plain = transition.plain_step(velocity, x_t, step, noise)
        assert relative_error(plain, golden["flow25.deterministic"][step]) < TOLERANCE


def test_bf16_transitions_equal_the_published_ones(golden: dict[str, Tensor]) -> None:
    transition = flow(25)
    velocity, x_t, x_prev = (golden[f"in.{name}"].bfloat16() for name in ("model_output", "sample", "prev_sample"))
    # The release rounds its results to the 8 significant bits of bf16, which alone moves them by up to 2^-8.
    bf16_tolerance = 2**-8 + TOLERANCE
    for row, step in enumerate(golden["flow25.bf16_idx"].tolist()):
        mean, std = transition.moments(velocity, x_t, step)
        assert relative_error(mean, golden["flow25.bf16_mean"][row]) < bf16_tolerance
        assert relative_error(log_prob(x_prev, mean, std), golden["flow25.bf16_logp"][row]) < bf16_tolerance


@pytest.mark.parametrize("shift", [1.0, 3.0, 0.5])
@pytest.mark.parametrize("noise_level", [0.3, 0.7])
def test_moments_equal_a_slow_reference(shift: float, noise_level: float) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(7)
    sigmas = scheduler.sigmas.tolist()
    transition = flow(7, shift, noise_level=noise_level)
    assert torch.equal(transition.timesteps, scheduler.timesteps)
    velocity = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
    x_t = torch.randn(7, 3, generator=torch.Generator().manual_seed(1))
    mean, std = transition.moments(velocity, x_t, torch.arange(7))
    for step in range(7):
        for channel in range(3):
            expected_mean, expected_std = slow_moments(
                velocity[step, channel].item(), x_t[step, channel].item(), sigmas, step, noise_level
            )
            assert mean[step, channel].item() == pytest.approx(expected_mean, rel=1e-5, abs=1e-6)
            assert std[step].item() == pytest.approx(expected_std, rel=1e-5)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_plain_sampling_equals_diffusers(shift: float) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(9)
    transition = flow(9, shift)
    generator = torch.Generator().manual_seed(0)
    expected = actual = torch.randn(5, 4, generator=generator)
    for step, timestep in enumerate(scheduler.timesteps):
        velocity = torch.randn(5, 4, generator=generator)
        expected = scheduler.step(velocity, timestep, expected).prev_sample
        actual = transition.plain_step(velocity, actual, step, torch.full_like(actual, math.nan))
    assert relative_error(actual, expected) < 1e-6


def test_sde_and_ode_have_the_same_marginals() -> None:
    # Data N(1, 0.5^2): the exact velocity is known, so the spread of both samplers' results is too.
    num_steps, draws, data_mean, data_std = 200, 20_000, 1.0, 0.5
    transition = flow(num_steps)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(draws, 1, generator=generator)
    stochastic, plain = start, start

    def velocity(x: Tensor, sigma: float) -> Tensor:
        variance = (1 - sigma) ** 2 * data_std**2 + sigma**2
        residual = (x - (1 - sigma) * data_mean) / variance
        return sigma * residual - (data_mean + (1 - sigma) * data_std**2 * residual)

    for step, timestep in enumerate(transition.timesteps.tolist()):
        sigma = timestep / 1000
        noise = torch.randn(draws, 1, generator=generator)
        stochastic = transition.sample(velocity(stochastic, sigma), stochastic, step, noise)[0]
        plain = transition.plain_step(velocity(plain, sigma), plain, step, noise)
    for x in (stochastic, plain):
        assert x.mean().item() == pytest.approx(data_mean, abs=0.02)
        assert x.std().item() == pytest.approx(data_std, abs=0.02)


def test_gradient_of_log_prob_equals_the_derived_formula() -> None:
    sigmas = torch.linspace(1000, 1, 5) / 1000
    sigmas = torch.cat([sigmas, torch.zeros(1)]).double()
    transition = flow(5)
    generator = torch.Generator().manual_seed(0)
    for step in range(5):
        velocity, x_t, x_prev = (torch.randn(4, 3, generator=generator) for _ in range(3))
        velocity.requires_grad_(True)
        mean, std = transition.moments(velocity, x_t, step)
        log_prob(x_prev, mean, std).sum().backward()
        sigma, dt = sigmas[step], sigmas[step + 1] - sigmas[step]
        squared_noise = 0.49 * sigma / (1 - (sigmas[1] if step == 0 else sigma))
        # Chain rule: d log p / d mean = (x_prev - mean) / variance, and the mean is linear in the velocity.
        slope = dt * (1 + squared_noise * (1 - sigma) / (2 * sigma))
        expected = (x_prev - mean.detach()).double() / (squared_noise * -dt) * slope
        assert velocity.grad is not None
        assert relative_error(velocity.grad, expected) < 1e-5


def test_stochastic_steps_leaves_the_later_steps_to_euler() -> None:
    full, mixed = flow(6), flow(6, stochastic_steps=2)
    assert full.trainable_steps == [0, 1, 2, 3, 4, 5]
    assert mixed.trainable_steps == [0, 1]
    velocity = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    x_t = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    noise = torch.ones(4, 3)
    for step in range(6):
        actual = mixed.sample(velocity, x_t, step, noise)[0]
        if step < 2:
            assert torch.equal(actual, full.sample(velocity, x_t, step, noise)[0])
        else:
            assert torch.equal(actual, full.plain_step(velocity, x_t, step, noise))


def test_one_denoising_step_goes_from_noise_to_data() -> None:
    transition = flow(1)
    x_t = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(transition.plain_step(x_t, x_t, 0, x_t), torch.zeros(4, 3))
    assert transition.trainable_steps == [0]


def test_the_given_scheduler_is_left_as_it_is() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler()
    before = scheduler.timesteps.clone()
    FlowTransition.from_scheduler(scheduler, num_steps=5)
    assert torch.equal(scheduler.timesteps, before)


@pytest.mark.parametrize(
    ("num_steps", "options", "message"),
    [
        (0, {}, "number of denoising steps must be at least 1, got 0"),
        (5, {"noise_level": 0.0}, "noise_level must be positive, got 0.0"),
        (5, {"noise_level": math.nan}, "noise_level must be positive, got nan"),
        (5, {"stochastic_steps": 0}, r"stochastic_steps must be in 1\.\.5 or null for all, got 0"),
        (5, {"stochastic_steps": 6}, r"stochastic_steps must be in 1\.\.5 or null for all, got 6"),
    ],
)
def test_values_out_of_range_are_refused(num_steps: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flow(num_steps, **options)


@pytest.mark.parametrize("key", ["use_dynamic_shifting", "invert_sigmas", "stochastic_sampling"])
def test_unsupported_configurations_are_refused(key: str) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(**{key: True})
    with pytest.raises(ValueError, match=f"FlowMatchEulerDiscreteScheduler: {key}=True is not supported, only False"):
        FlowTransition.from_scheduler(scheduler, 5)
