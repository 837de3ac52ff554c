"""Trajectories of the same tokens may be denoised and scored together, at the price of one modulation."""

import pytest
import torch

from margrpo.rollout.denoising import TokenDenoiser

TOKENS, TRAJECTORIES, STEPS = 6, 3, 4


@pytest.fixture(params=[None, 3.0], ids=["unguided", "guided"])
def guidance_scale(request):
    return request.param


@pytest.fixture
def sampled(nova, guidance_scale):
    """Denoise some tokens three times together: (denoiser, conditions, noise, end points, trace)."""
    denoiser = TokenDenoiser(nova.head, nova.transition(STEPS, 0.7, None), score_guided=True)
    generator = torch.Generator().manual_seed(0)
    branches = 1 if guidance_scale is None else 2
    conditions = denoiser.embed(torch.randn(branches * TOKENS, nova.config.width, generator=generator), guidance_scale)
    noise = torch.randn(1 + STEPS, TRAJECTORIES, TOKENS, nova.token_channels, generator=generator)
    return denoiser, conditions, noise, *denoiser.sample(conditions, noise, [1, 3])


def test_trajectories_sampled_together_equal_those_sampled_one_by_one(sampled):
    denoiser, conditions, noise, end_points, trace = sampled
    together = denoiser.head_tokens
    for index in range(TRAJECTORIES):
        alone, trace_alone = denoiser.sample(conditions, noise[:, index], [1, 3])
        torch.testing.assert_close(end_points[index], alone, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(trace.x_t[:, index], trace_alone.x_t, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(trace.x_prev[:, index], trace_alone.x_prev, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(trace.log_prob[:, index], trace_alone.log_prob, rtol=1e-4, atol=1e-4)
    assert denoiser.head_tokens == 2 * together


def test_trajectories_are_scored_together_as_they_were_sampled(sampled):
    denoiser, conditions, _, _, trace = sampled
    rows = torch.tensor([4, 0, 4])
    for kept, step in enumerate([1, 3]):
        scores = denoiser.score(
            conditions.select(rows), trace.x_t[kept][:, rows], trace.x_prev[kept][:, rows], torch.full((3,), step)
        )
        torch.testing.assert_close(scores.log_prob, trace.log_prob[kept][:, rows], rtol=1e-4, atol=1e-4)


def test_without_guidance_the_conditional_branch_alone_is_left(nova):
    denoiser = TokenDenoiser(nova.head, nova.transition(STEPS, 0.7, None), score_guided=False)
    z = torch.randn(2 * TOKENS, nova.config.width, generator=torch.Generator().manual_seed(0))
    conditions = denoiser.embed(z, 3.0).without_guidance()
    torch.testing.assert_close(conditions.embedded, denoiser.embed(z[:TOKENS]).embedded)
    assert conditions.guidance_scale is None
