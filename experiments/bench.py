"""Measures what a rollout and an update cost, against plain generation of the same images.

    python experiments/bench.py --json bench.json

One process, one thread, a NOVA with random weights: 256 tokens, width 128, group 4, 64 mask steps x 25 denoising steps,
guidance 5, three trajectories, 12 x 10 trained steps. CPU seconds are used because wall time depends on the neighbours.
"""

import argparse
import copy
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import nn

from margrpo.models.nova.config import NOVAConfig
from margrpo.models.nova.model import NOVA, NOVATransformer
from margrpo.objective.advantage import group_advantages
from margrpo.objective.loss import ObjectiveConfig
from margrpo.rollout.config import RolloutConfig
from margrpo.rollout.denoising import TokenDenoiser
from margrpo.rollout.noise import SampleNoise
from margrpo.rollout.plan import draw_plan
from margrpo.rollout.sampler import generate, roll_out
from margrpo.rollout.types import Rollout
from margrpo.update import Reference, image_prefix, mask_step_loss

PUBLISHED = {
    "rollout_ratio": 4.2,
    "update_ratio": 2.0,
    "rollout_head_tokens": 3_276_800,
    "update_head_tokens": 614_400,
    "peak_mb": 2359,
}
"""The published release on the same model, measured the same way."""

T = TypeVar("T")

ROLLOUT = RolloutConfig()
"""Its defaults are the published settings."""


def build_model() -> NOVA:
    """Build the bench model: random weights, no text encoder and no VAE, since neither is measured."""
    config = NOVAConfig(
        image_dim=4,
        image_size=256,
        image_stride=8,
        text_token_dim=64,
        text_token_len=32,
        video_base_size=(1, 8, 8),
        image_base_size=(16, 16),
        arch=("vit_d4w128", "vit_d8w128", "mlp_d3w128"),
    )
    return NOVA(
        config, NOVATransformer(config), nn.Identity(), nn.Identity(), FlowMatchEulerDiscreteScheduler(), Path()
    ).eval()


class Bench:
    """The three phases on one group."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.seed = seed
        self.model = build_model()
        self.model.freeze(train_head=False)
        self.reference = copy.deepcopy(self.model.policy).requires_grad_(False)
        self.condition = {"prompt_embeds": torch.randn(1, 32, 64)}
        self.transition = self.model.transition(ROLLOUT.denoising_steps, ROLLOUT.noise_level, ROLLOUT.stochastic_steps)

    def noise(self) -> SampleNoise:
        """Noise of the group."""
        seeds = [self.seed * 1000 + sample for sample in range(ROLLOUT.group_size)]
        return SampleNoise(seeds, self.model.num_tokens, self.model.token_channels, torch.device("cpu"))

    def denoiser(self) -> TokenDenoiser:
        """A fresh counter of head tokens."""
        return TokenDenoiser(self.model.head, self.transition, score_guided=ROLLOUT.score_guided)

    def plain(self) -> int:
        """Generate the group without keeping anything; returns head-token evaluations."""
        denoiser = self.denoiser()
        generate(self.model, self.model.policy, self.condition, ROLLOUT, denoiser, self.noise())
        return denoiser.head_tokens

    def roll_out(self) -> Rollout:
        """Roll out the group."""
        schedule = self.model.mask_schedule(ROLLOUT.mask_steps)
        plan = draw_plan(ROLLOUT, schedule, self.transition.trainable_steps, self.seed, step=0)
        sampled = roll_out(self.model, self.condition, ROLLOUT, plan, self.denoiser(), self.noise())
        rewards = torch.linspace(0, 1, ROLLOUT.group_size)
        return Rollout(
            step=0,
            config=ROLLOUT,
            prompts=["bench"],
            condition=self.condition,
            order=sampled.order,
            latents=sampled.latents,
            mask_steps=sampled.mask_steps,
            images=torch.empty(0),
            rewards=rewards,
            rewards_by_scorer={},
            head_tokens=sampled.head_tokens,
        )

    def update(self, rollout: Rollout) -> int:
        """Forward and backward over every trained mask step; returns head-token evaluations."""
        advantage = group_advantages(rollout.rewards, ROLLOUT.group_size, "group").values
        denoiser = self.denoiser()
        with torch.no_grad():
            reference = Reference(self.reference, self.denoiser(), image_prefix(self.model, self.reference, rollout))
        for mask_step in rollout.mask_steps:
            loss, _ = mask_step_loss(
                self.model,
                reference,
                rollout,
                mask_step,
                advantage,
                ObjectiveConfig(),
                denoiser,
                on_policy=True,
                total_weight=mask_step.decisions.weight.sum(),
            )
            (loss / len(rollout.mask_steps)).backward()
        self.model.zero_grad()
        return denoiser.head_tokens + reference.denoiser.head_tokens


def timed(phase: Callable[[], T]) -> tuple[float, T]:
    """Return CPU seconds of this process and the phase's result."""
    started = time.process_time()
    result = phase()
    return time.process_time() - started, result


def main() -> None:
    """Print the table; write the figures as JSON when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--seed", type=int, default=0, help="of weights, noise and drawn steps")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each phase; the fastest counts")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    bench = Bench(arguments.seed)
    best = {"plain": float("inf"), "rollout": float("inf"), "update": float("inf")}
    for _ in range(arguments.repeats):
        seconds, plain_tokens = timed(bench.plain)
        best["plain"] = min(best["plain"], seconds)
        seconds, rollout = timed(bench.roll_out)
        best["rollout"] = min(best["rollout"], seconds)
        seconds, update_tokens = timed(lambda rollout=rollout: bench.update(rollout))
        best["update"] = min(best["update"], seconds)
    figures = {
        "plain_cpu_s": round(best["plain"], 2),
        "rollout_cpu_s": round(best["rollout"], 2),
        "update_cpu_s": round(best["update"], 2),
        "rollout_ratio": round(best["rollout"] / best["plain"], 2),
        "update_ratio": round(best["update"] / best["plain"], 2),
        "plain_head_tokens": plain_tokens,
        "rollout_head_tokens": rollout.head_tokens,
        "update_head_tokens": update_tokens,
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    print(f"{'':24}{'margrpo':>12}{'published':>12}")
    for name, value in figures.items():
        print(f"{name:24}{value!s:>12}{PUBLISHED.get(name, '')!s:>12}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
