"""Which mask steps and denoising steps a rollout trains, drawn before it starts so that nothing else is kept."""

from dataclasses import dataclass
from random import Random

from margrpo.rollout.config import RolloutConfig
from margrpo.rollout.noise import stable_seed


@dataclass(frozen=True)
class RolloutPlan:
    """The drawn steps.

    Args:
        schedule: tokens predicted by each effective mask step.
        trained: ascending trained mask steps, each with its ascending trained denoising steps.
        complete: mask steps at which every unknown token is denoised, not only the predicted ones.
    """

    schedule: list[int]
    trained: dict[int, list[int]]
    complete: frozenset[int]


def draw_plan(
    config: RolloutConfig, schedule: list[int], trainable_steps: list[int], seed: int, step: int
) -> RolloutPlan:
    """Draw the trained steps of rollout `step`; the same on every rank.

    Raises:
        ValueError: more steps are to be trained than there are.
    """
    if config.trained_mask_steps > len(schedule):
        raise ValueError(
            f"trained_mask_steps is {config.trained_mask_steps}, but only {len(schedule)} of the "
            f"{config.mask_steps} mask steps predict a token"
        )
    if config.trained_denoising_steps > len(trainable_steps):
        raise ValueError(
            f"trained_denoising_steps is {config.trained_denoising_steps}, but only {len(trainable_steps)} of the "
            f"{config.denoising_steps} denoising steps have a density"
        )
    random = Random(stable_seed(seed, step))
    mask_steps = sorted(random.sample(range(len(schedule)), config.trained_mask_steps))
    trained = {i: sorted(random.sample(trainable_steps, config.trained_denoising_steps)) for i in mask_steps}
    complete: set[int] = set()
    if config.loss_tokens == "masked":
        complete.update(mask_steps)
    if config.checks_consistency:
        complete.update(i - 1 for i in mask_steps if i > 0)
    return RolloutPlan(schedule, trained, frozenset(complete))
