"""Options of a rollout that cannot work are refused with what would."""

import pytest

from margrpo.rollout.config import RolloutConfig, SamplingConfig
from margrpo.rollout.plan import draw_plan


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 1}, "group_size is 1.*at least 2"),
        ({"critical_fraction": 1.5}, r"critical_fraction is 1.5.*\[0, 1\]"),
        ({"critical_fraction": -0.1}, r"critical_fraction is -0.1.*\[0, 1\]"),
        ({"num_trajectories": 0}, "num_trajectories is 0.*at least 1"),
        ({"num_trajectories": 1}, "one trajectory gives no uncertainty.*critical_fraction of 0 or 1"),
        ({"trained_mask_steps": 65}, r"trained_mask_steps is 65.*\[1, 64\]"),
        ({"trained_denoising_steps": 26}, r"trained_denoising_steps is 26.*\[1, 25\]"),
        ({"trained_denoising_steps": 0}, r"trained_denoising_steps is 0.*\[1, 25\]"),
        ({"consistency_threshold": 3.0}, r"consistency_threshold is 3.0.*\[-2, 2\]"),
        ({"trajectory_source": "per-step"}, "trajectory_source is 'per-step'; accepted: composite, per_step"),
        ({"loss_tokens": "all"}, "loss_tokens is 'all'; accepted: masked, predicted"),
        ({"guidance_scale": 0.5}, "guidance_scale is 0.5.*at least 1"),
        ({"mask_steps": 0, "trained_mask_steps": 0}, "mask_steps is 0.*at least 1"),
    ],
)
def test_a_bad_option_is_named_with_what_is_accepted(options, message):
    with pytest.raises(ValueError, match=message):
        RolloutConfig(**options)


def test_more_trained_mask_steps_than_effective_ones_is_an_error():
    config = RolloutConfig(mask_steps=64, trained_mask_steps=60)
    with pytest.raises(ValueError, match="only 51 of the 64 mask steps predict a token"):
        draw_plan(config, [1] * 51, list(range(25)), seed=0, step=0)


def test_more_trained_denoising_steps_than_have_a_density_is_an_error():
    config = RolloutConfig(trained_denoising_steps=25)
    with pytest.raises(ValueError, match="only 24 of the 25 denoising steps have a density"):
        draw_plan(config, [1] * 20, list(range(24)), seed=0, step=0)


def test_guidance_of_one_is_no_guidance():
    assert not SamplingConfig(guidance_scale=1.0).guided
    assert SamplingConfig(guidance_scale=1.5).guided


def test_a_plan_depends_on_seed_and_step_alone_and_is_ascending():
    config = RolloutConfig()
    plans = [
        draw_plan(config, [1] * 61, list(range(25)), seed, step) for seed, step in ((1, 0), (1, 0), (1, 1), (2, 0))
    ]
    assert plans[0] == plans[1]
    assert plans[0].trained != plans[2].trained
    assert plans[0].trained != plans[3].trained
    assert list(plans[0].trained) == sorted(plans[0].trained)
    assert len(plans[0].trained) == 12
    assert all(len(set(steps)) == 10 and steps == sorted(steps) for steps in plans[0].trained.values())
