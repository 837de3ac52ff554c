"""The transition that belongs to the scheduler of a checkpoint."""

from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.schedulers.scheduling_utils import SchedulerMixin

from margrpo.diffusion.ddpm import AncestralTransition
from margrpo.diffusion.flow import FlowTransition
from margrpo.diffusion.transition import Transition


def transition_from_scheduler(
    scheduler: SchedulerMixin, num_steps: int, noise_level: float, stochastic_steps: int | None
) -> Transition:
    """Build the transition of a diffusers scheduler.

    Args:
        scheduler: FlowMatchEulerDiscreteScheduler or DDPMScheduler.
        num_steps: number of denoising steps D, at least 1.
        noise_level: scale of the flow SDE's noise, positive; a DDPM brings its own.
        stochastic_steps: flow only: the first so many steps, 1..D, add noise; None for all.

    Raises:
        ValueError: a value is out of range, or the scheduler or its configuration is not supported.
    """
    if isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
        return FlowTransition.from_scheduler(scheduler, num_steps, noise_level, stochastic_steps)
    if isinstance(scheduler, DDPMScheduler):
        if stochastic_steps is not None:
            raise ValueError(f"stochastic_steps={stochastic_steps} needs a flow checkpoint; for DDPMScheduler use null")
        return AncestralTransition.from_scheduler(scheduler, num_steps)
    raise ValueError(
        f"scheduler {type(scheduler).__name__} is not supported, only FlowMatchEulerDiscreteScheduler or DDPMScheduler"
    )
