"""What every transition promises, checked on both kinds."""

import math

import pytest
import torch
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler
from torch import Tensor

from margrpo.diffusion.ddpm import AncestralTransition
from margrpo.diffusion.flow import FlowTransition
from margrpo.diffusion.transition import Transition, log_prob, token_log_prob
from tests.helpers import relative_error

TRANSITIONS = {
    "flow": FlowTransition.from_scheduler(FlowMatchEulerDiscreteScheduler(), num_steps=6),
    "flow-mixed": FlowTransition.from_scheduler(FlowMatchEulerDiscreteScheduler(), num_steps=6, stochastic_steps=2),
    "ddpm": AncestralTransition.from_scheduler(DDPMScheduler(clip_sample=False), num_steps=6),
    "ddpm-clipped": AncestralTransition.from_scheduler(DDPMScheduler(clip_sample=True), num_steps=6),
}


@pytest.fixture(params=TRANSITIONS)
def transition(request: pytest.FixtureRequest) -> Transition:
    return TRANSITIONS[request.param]


def random_tokens(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_step_for_each_token_gives_what_one_step_for_all_gives(transition: Transition) -> None:
    prediction, x_t = random_tokens(12, 5, seed=0), random_tokens(12, 5, seed=1)
    steps = torch.arange(transition.num_steps).repeat(2).flip(0)
    mean, std = transition.moments(prediction, x_t, steps)
    assert mean.shape == (12, 5)
    for row, step in enumerate(steps.tolist()):
        expected_mean, expected_std = transition.moments(prediction[row], x_t[row], step)
        assert torch.equal(mean[row], expected_mean)
        assert torch.equal(std[row].expand(5), expected_std.expand(5))


def test_steps_may_have_the_leading_shape_of_the_tokens(transition: Transition) -> None:
    prediction, x_t = random_tokens(4, 3, 5, seed=0), random_tokens(4, 3, 5, seed=1)
    steps = torch.arange(12).reshape(4, 3) % transition.num_steps
    mean, _ = transition.moments(prediction, x_t, steps)
    flat_mean, _ = transition.moments(prediction.flatten(0, 1), x_t.flatten(0, 1), steps.flatten())
    assert torch.equal(mean.flatten(0, 1), flat_mean)


def test_trainable_steps_are_those_with_positive_std(transition: Transition) -> None:
    x = torch.zeros(3)
    positive = [step for step in range(transition.num_steps) if transition.moments(x, x, step)[1] > 0]
    assert transition.trainable_steps == positive
    assert transition.timesteps.shape == (transition.num_steps,)
    assert transition.timesteps.dtype == torch.float32


def test_samples_have_the_mean_and_std_of_the_kernel(transition: Transition) -> None:
    draws = 100_000
    prediction, x_t = random_tokens(1, 3, seed=0), random_tokens(1, 3, seed=1)
    for step in transition.trainable_steps:
        noise = random_tokens(draws, 3, seed=step)
        x_prev, mean, std = transition.sample(prediction, x_t, step, noise)
        standard_error = std.item() / math.sqrt(draws)
        assert (x_prev.mean(0) - mean[0]).abs().max() < 5 * standard_error + 1e-6
        assert (x_prev.std(0) - std).abs().max() < 5 * standard_error / math.sqrt(2)


@pytest.mark.parametrize("name", ["flow-mixed", "ddpm", "ddpm-clipped"])
def test_deterministic_steps_do_not_read_the_noise(name: str) -> None:
    transition = TRANSITIONS[name]
    prediction, x_t = random_tokens(4, 3, seed=0), random_tokens(4, 3, seed=1)
    unreadable = torch.full_like(x_t, math.nan)
    deterministic = set(range(transition.num_steps)) - set(transition.trainable_steps)
    assert deterministic
    for step in deterministic:
        x_prev, mean, std = transition.sample(prediction, x_t, step, unreadable)
        assert torch.equal(x_prev, mean)
        assert std.item() == 0


def test_moments_are_fp32_and_samples_keep_the_dtype_of_the_latents(transition: Transition) -> None:
    prediction, x_t = random_tokens(4, 3, seed=0).bfloat16(), random_tokens(4, 3, seed=1).bfloat16()
    x_prev, mean, std = transition.sample(prediction, x_t, 1, random_tokens(4, 3, seed=2).bfloat16())
    assert (x_prev.dtype, mean.dtype, std.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert torch.equal(mean, transition.moments(prediction.float(), x_t.float(), 1)[0])
    plain = transition.plain_step(prediction, x_t, 1, torch.zeros_like(x_t))
    assert plain.dtype == torch.bfloat16
    # Mixed precision: a bf16 head on fp32 latents must not round the latents.
    assert transition.sample(prediction, x_t.float(), 1, torch.zeros_like(x_t))[0].dtype == torch.float32


def test_a_first_use_under_inference_mode_leaves_later_gradients_possible() -> None:
    # The meta device stands for any device other than the CPU: there the tables are moved on first use.
    transition = FlowTransition.from_scheduler(FlowMatchEulerDiscreteScheduler(), num_steps=6)
    x = torch.zeros(4, 3, device="meta")
    with torch.inference_mode():
        transition.moments(x, x, 0)
    prediction = torch.zeros(4, 3, device="meta", requires_grad=True)
    mean, std = transition.moments(prediction, x, 0)
    log_prob(x, mean, std).sum().backward()
    assert prediction.grad is not None


def test_log_prob_is_the_normal_log_density_in_fp32() -> None:
    x_prev = random_tokens(4, 3, seed=0).bfloat16()
    mean, std = random_tokens(4, 3, seed=1), random_tokens(4, 1, seed=2).abs() + 0.1
    actual = log_prob(x_prev, mean, std)
    expected = torch.distributions.Normal(mean.double(), std.double()).log_prob(x_prev.double())
    assert actual.dtype == torch.float32
    assert relative_error(actual, expected) < 1e-6
    assert relative_error(token_log_prob(x_prev, mean, std), expected.mean(-1)) < 1e-6
