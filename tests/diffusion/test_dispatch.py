"""Choice of the transition by the class of the scheduler."""

import pytest
from diffusers import DDIMScheduler, DDPMScheduler, FlowMatchEulerDiscreteScheduler

from margrpo.diffusion.ddpm import AncestralTransition
from margrpo.diffusion.dispatch import transition_from_scheduler
from margrpo.diffusion.flow import FlowTransition


def test_flow_scheduler_gives_a_flow_transition_with_its_options() -> None:
    transition = transition_from_scheduler(FlowMatchEulerDiscreteScheduler(), 6, noise_level=0.3, stochastic_steps=2)
    assert isinstance(transition, FlowTransition)
    assert transition.trainable_steps == [0, 1]


def test_ddpm_scheduler_gives_an_ancestral_transition() -> None:
    transition = transition_from_scheduler(DDPMScheduler(), 6, noise_level=0.7, stochastic_steps=None)
    assert isinstance(transition, AncestralTransition)
    assert transition.num_steps == 6


def test_stochastic_steps_is_refused_for_ddpm() -> None:
    with pytest.raises(ValueError, match="stochastic_steps=2 needs a flow checkpoint; for DDPMScheduler use null"):
        transition_from_scheduler(DDPMScheduler(), 6, noise_level=0.7, stochastic_steps=2)


def test_other_schedulers_are_refused_by_name() -> None:
    message = "DDIMScheduler is not supported, only FlowMatchEulerDiscreteScheduler or DDPMScheduler"
    with pytest.raises(ValueError, match=message):
        transition_from_scheduler(DDIMScheduler(), 6, noise_level=0.7, stochastic_steps=None)
