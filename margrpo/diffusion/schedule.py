"""Timesteps from a diffusers scheduler whose configuration a transition can reproduce."""

import copy
from typing import Any, TypeVar

from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler

Scheduler = TypeVar("Scheduler", DDPMScheduler, FlowMatchEulerDiscreteScheduler)


def with_timesteps(scheduler: Scheduler, num_steps: int, accepted: dict[str, tuple[Any, ...]]) -> Scheduler:
    """Copy a scheduler, with `num_steps` timesteps set; the given one is left as it is.

    Args:
        scheduler: as loaded from a checkpoint.
        num_steps: D, at least 1.
        accepted: configuration keys and the values that are supported.

    Raises:
        ValueError: a configured value is not accepted, or the scheduler cannot make D timesteps.
    """
    name = type(scheduler).__name__
    for key, values in accepted.items():
        if scheduler.config[key] not in values:
            allowed = " or ".join(map(repr, values))
            raise ValueError(f"{name}: {key}={scheduler.config[key]!r} is not supported, only {allowed}")
    if num_steps < 1:
        raise ValueError(f"number of denoising steps must be at least 1, got {num_steps}")
    scheduler = copy.copy(scheduler)
    scheduler.set_timesteps(num_steps)
    # Trailing spacing makes one timestep too many, -1, where its float stride rounds down (61 of 1000, for one).
    if len(scheduler.timesteps) != num_steps:
        raise ValueError(f"{name} cannot make {num_steps} denoising steps with its spacing, choose another number")
    return scheduler
