"""The rollout keeps exactly what the update needs, and nothing about an image depends on what is kept."""

import pytest
import torch

from margrpo.models.base import repeat_rows
from margrpo.rollout.config import SamplingConfig
from margrpo.rollout.denoising import TokenDenoiser
from margrpo.rollout.noise import SampleNoise
from margrpo.rollout.sampler import generate
from tests.rollout.conftest import PROMPTS

VARIANTS = [
    {},
    {"guidance_scale": 1.0},
    {"trajectory_source": "per_step"},
    {"include_generating_trajectory": True},
    {"loss_tokens": "predicted"},
    {"score_guided": True},
    {"critical_fraction": 0.0, "consistency_threshold": None},
    {"critical_fraction": 1.0},
    {"stochastic_steps": 3},
]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_images_do_not_depend_on_what_is_kept(nova, small_rollout, options):
    config, _, sampled, _ = small_rollout(**options)
    denoiser = TokenDenoiser(
        nova.head, nova.transition(4, config.noise_level, config.stochastic_steps), score_guided=False
    )
    noise = SampleNoise([1, 2, 3, 4], nova.num_tokens, nova.token_channels, torch.device("cpu"))
    plain = generate(nova, nova.policy, nova.encode(PROMPTS), config, denoiser, noise, plain=False)
    torch.testing.assert_close(sampled.latents, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_every_decision_is_a_transition_of_a_selected_token_at_a_drawn_step(small_rollout, options):
    config, plan, sampled, _ = small_rollout(**options)
    assert [step.index for step in sampled.mask_steps] == list(plan.trained)
    for step in sampled.mask_steps:
        decisions = step.decisions
        drawn = plan.trained[step.index]
        assert set(decisions.payload["step"].tolist()) <= set(drawn)
        per_place = torch.zeros(len(decisions.image)).index_add(0, decisions.place, decisions.weight)
        torch.testing.assert_close(per_place, torch.full_like(per_place, float(len(drawn))))
        known = sampled.order[:, : step.start]
        for image, token in zip(decisions.image.tolist(), decisions.token.tolist(), strict=True):
            assert token not in known[image]
        places = decisions.image * 64 + decisions.token
        assert len(places.unique()) == len(places)
        if config.loss_tokens == "predicted":
            assert len(places) == 4 * (step.stop - step.start)


def test_predicted_tokens_are_always_trained_and_others_only_when_consistent(small_rollout):
    _, _, sampled, _ = small_rollout(consistency_threshold=2.0)
    for step in sampled.mask_steps:
        trained = set(zip(step.decisions.image.tolist(), step.decisions.token.tolist(), strict=True))
        unknown = sampled.order[:, step.start :] if step.index == 0 else sampled.order[:, step.start : step.stop]
        assert trained == {(image, token) for image, row in enumerate(unknown.tolist()) for token in row}


def test_critical_tokens_take_all_trajectories_and_others_one_never_both(small_rollout):
    _, _, sampled, _ = small_rollout(critical_fraction=0.25, num_trajectories=3, consistency_threshold=None)
    first = next(step for step in sampled.mask_steps)
    decisions = first.decisions
    steps = len(set(decisions.payload["step"].tolist()))
    counts = decisions.place.bincount() // steps
    assert set(counts.tolist()) == {1, 3}
    if first.index == 0:
        assert torch.equal((counts == 3).view(4, -1).sum(dim=1), torch.full((4,), 16))


def test_without_extra_trajectories_every_decision_made_the_image(small_rollout):
    _, _, sampled, _ = small_rollout(critical_fraction=0.0, loss_tokens="predicted", trained_denoising_steps=4)
    for step in sampled.mask_steps:
        decisions = step.decisions
        last = decisions.payload["step"] == 3
        place = decisions.place[last]
        made = sampled.latents[decisions.image[place], decisions.token[place]]
        assert torch.equal(decisions.payload["x_prev"][last], made)


def test_consecutive_transitions_of_a_token_are_one_trajectory(small_rollout):
    _, _, sampled, _ = small_rollout(critical_fraction=0.0, trained_denoising_steps=4)
    decisions = sampled.mask_steps[0].decisions
    x_t, x_prev = (decisions.payload[name].unflatten(0, (4, -1)) for name in ("x_t", "x_prev"))
    assert torch.equal(x_prev[:-1], x_t[1:])


@pytest.mark.parametrize(
    ("options", "expected"), [({"loss_tokens": "predicted"}, 0), ({"consistency_threshold": None}, 1)]
)
def test_unknown_tokens_are_denoised_only_where_they_are_asked_for(nova, small_rollout, options, expected):
    config, plan, _, denoiser = small_rollout(critical_fraction=0.0, guidance_scale=1.0, **options)
    starts = [sum(plan.schedule[:index]) for index in range(len(plan.schedule))]
    needed = sum(64 - starts[i] if expected and i in plan.trained else count for i, count in enumerate(plan.schedule))
    assert denoiser.head_tokens == 4 * config.denoising_steps * needed


def test_a_sample_is_the_same_alone_and_in_a_batch(nova):
    condition = nova.encode(PROMPTS)
    sampling = SamplingConfig(mask_steps=6, denoising_steps=4, guidance_scale=3.0)
    denoiser = TokenDenoiser(nova.head, nova.transition(4, 0.7, None), score_guided=False)

    def images(rows, seeds):
        chosen = {name: tensor[rows] for name, tensor in condition.items()}
        noise = SampleNoise(seeds, nova.num_tokens, nova.token_channels, torch.device("cpu"))
        return generate(nova, nova.policy, chosen, sampling, denoiser, noise)

    together = images([0, 1], [11, 12])
    torch.testing.assert_close(together[1:], images([1], [12]), rtol=1e-4, atol=1e-4)


def test_the_same_seed_gives_the_same_numbers(small_rollout):
    first, second = (small_rollout()[2] for _ in range(2))
    assert torch.equal(first.latents, second.latents)
    for a, b in zip(first.mask_steps, second.mask_steps, strict=True):
        assert torch.equal(a.decisions.log_prob, b.decisions.log_prob)


def test_repeat_rows_keeps_the_images_of_a_prompt_together():
    assert repeat_rows({"a": torch.tensor([[1], [2]])}, 2)["a"].flatten().tolist() == [1, 1, 2, 2]
