"""Settings of a rollout: how images are sampled, and which decisions are kept for the update."""

from dataclasses import dataclass
from typing import Literal, get_args

TrajectorySource = Literal["composite", "per_step"]
LossTokens = Literal["masked", "predicted"]


@dataclass(frozen=True)
class SamplingConfig:
    """How one image is generated.

    Args:
        mask_steps: autoregressive steps of the mask schedule; steps that predict no token are dropped.
        denoising_steps: D, steps of the head's sampler per token.
        guidance_scale: w of classifier-free guidance on the head's prediction, u + w (c - u); 1 runs no unconditional
            branch.
    """

    mask_steps: int = 64
    denoising_steps: int = 25
    guidance_scale: float = 5.0

    def __post_init__(self) -> None:
        if self.mask_steps < 1:
            raise ValueError(f"mask_steps is {self.mask_steps}; it must be at least 1")
        if self.denoising_steps < 2:
            raise ValueError(f"denoising_steps is {self.denoising_steps}; it must be at least 2")
        if not self.guidance_scale >= 1.0:
            raise ValueError(f"guidance_scale is {self.guidance_scale}; it must be at least 1 (1 is no guidance)")

    @property
    def guided(self) -> bool:
        """Whether the unconditional branch runs."""
        return self.guidance_scale != 1.0


@dataclass(frozen=True)
class RolloutConfig(SamplingConfig):
    """How groups are sampled for training, and what MAR-GRPO (arXiv 2604.06966) keeps of them.

    Args:
        group_size: G, images per prompt; advantages are relative to the group.
        noise_level: scale of the noise that turns the flow-matching sampler into an SDE (Flow-GRPO, arXiv 2505.05470);
            DDPM checkpoints have their own noise and ignore it.
        stochastic_steps: only the first so many denoising steps add noise and have a density, the rest are
            deterministic (MixGRPO, arXiv 2507.21802); null is all of them.
        trained_mask_steps: mask steps drawn for training, without repetition, from the effective ones.
        trained_denoising_steps: denoising steps drawn for training at each of them, from those with a density.
        num_trajectories: S, trajectories over which the surrogate of a critical token is averaged
            (multi-trajectory expectation).
        critical_fraction: share of an image's tokens (with `per_step`, of those the step denoises), the most uncertain
            ones, that take the S trajectories; 0 is none, 1 is all. The others take the one that made the image.
        consistency_threshold: keep a token that is not predicted at the mask step only if its cosine similarity to the
            final latents gains more than this over the mask step before; null keeps all.
        trajectory_source: condition the extra trajectories are drawn from. `composite`: each token's condition at the
            step that predicted it, one set per image, as published. `per_step`: the trained mask step's own, guided
            as the image was.
        include_generating_trajectory: count the trajectory that made the image among the S.
        loss_tokens: `masked`: every token unknown before the step, as published. `predicted`: only those the step
            puts into the image.
        score_guided: score with the guided prediction that sampled, not with the conditional one as published.
    """

    group_size: int = 4
    noise_level: float = 0.7
    stochastic_steps: int | None = None
    trained_mask_steps: int = 12
    trained_denoising_steps: int = 10
    num_trajectories: int = 3
    critical_fraction: float = 0.3
    consistency_threshold: float | None = 0.0
    trajectory_source: TrajectorySource = "composite"
    include_generating_trajectory: bool = False
    loss_tokens: LossTokens = "masked"
    score_guided: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, choices in (("trajectory_source", get_args(TrajectorySource)), ("loss_tokens", get_args(LossTokens))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}; accepted: {', '.join(choices)}")
        if self.group_size < 2:
            raise ValueError(f"group_size is {self.group_size}; advantages need at least 2 images per prompt")
        if not 0.0 <= self.critical_fraction <= 1.0:
            raise ValueError(f"critical_fraction is {self.critical_fraction}; it must lie in [0, 1]")
        if self.num_trajectories < 1:
            raise ValueError(f"num_trajectories is {self.num_trajectories}; it must be at least 1")
        if self.num_trajectories == 1 and 0.0 < self.critical_fraction < 1.0:
            raise ValueError(
                f"critical_fraction is {self.critical_fraction}, but one trajectory gives no uncertainty to rank "
                "tokens by; accepted: num_trajectories of at least 2, or a critical_fraction of 0 or 1"
            )
        if self.consistency_threshold is not None and not -2.0 <= self.consistency_threshold <= 2.0:
            raise ValueError(
                f"consistency_threshold is {self.consistency_threshold}; a gain in cosine similarity lies in [-2, 2]"
            )
        for name, limit in (("trained_mask_steps", "mask_steps"), ("trained_denoising_steps", "denoising_steps")):
            value, most = getattr(self, name), getattr(self, limit)
            if not 1 <= value <= most:
                raise ValueError(f"{name} is {value}; it must lie in [1, {most}], the {limit}")

    @property
    def checks_consistency(self) -> bool:
        """Whether end points of the mask step before a trained one are needed."""
        return self.consistency_threshold is not None and self.loss_tokens == "masked"

    @property
    def extra_trajectories(self) -> int:
        """Trajectories drawn beside the one that makes the image."""
        if self.critical_fraction == 0.0:
            return 0
        return self.num_trajectories - int(self.include_generating_trajectory)
