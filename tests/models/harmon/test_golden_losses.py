"""Transitions, losses and gradients of the published release, from the package's own modules and objective.

The recorded variants show the policy the tokens that were known before the mask step, and train those it did not know.
The published numbers sum over the channels of a token, the package's are means: gradients differ by that factor.
"""

import copy
import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from margrpo.diffusion.transition import token_log_prob
from margrpo.models.base import repeat_rows
from margrpo.models.harmon import Harmon
from margrpo.objective.advantage import group_advantages
from margrpo.objective.loss import ObjectiveConfig, k3, policy_loss, weighted_mean
from margrpo.objective.selection import consistency_gain, consistent, top_fraction, uncertainty
from margrpo.rollout.denoising import TokenDenoiser
from tests.helpers import relative_error

GROUP, TOKENS, CHANNELS = 4, 64, 16
STARTS = [0, 5, 19, 40, 64]
BETA = 0.01
TOLERANCE = 2e-5
CRITICAL_FRACTION = 0.3


def published_parameters(policy: nn.Module, head: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of policy and head by the names of the published module that holds both."""
    named = dict(policy.named_parameters())
    return named | {f"diffloss.net.{key}": value for key, value in head.named_parameters()}


@dataclass
class Release:
    """The recorded rollout of a group with its policy and its reference."""

    rollout: dict[str, Tensor]
    model: Harmon
    reference: Harmon
    prefix: dict[str, Tensor]
    denoising_steps: list[int]
    advantages: Tensor

    def unknown(self, step: int) -> Tensor:
        """Return bool [B, N], the tokens that are unknown before a mask step."""
        return torch.ones(GROUP, TOKENS).scatter(1, self.known(step), 0.0).bool()

    def known(self, step: int) -> Tensor:
        """Return the tokens known before a mask step, int64 [B, K]; the published order lists them last."""
        return self.rollout["orders"].long().flip(1)[:, : STARTS[step]]

    def trajectory(self, name: str) -> Tensor:
        """States [1 + D, B, N, C] of a trajectory."""
        return torch.cat([self.rollout[f"{name}/init_noise"][None], self.rollout[f"{name}/xt_prev"]])

    def conditions(self, model: Harmon, step: int, known: Tensor) -> Tensor:
        """Predict z [B, N, E] from the tokens before a mask step, of which `known` are shown."""
        return model.predict_condition(model.policy, self.rollout[f"step{step}/tokens_in"], known, self.prefix)

    def score(self, model: Harmon, z: Tensor, trajectory: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities [K, B, N] and means [K, B, N, C] of all tokens, with the std of the rollout's own step."""
        transition = model.transition(4, 1.0, None)
        denoiser = TokenDenoiser(model.head, transition, score_guided=False)
        steps = torch.tensor(self.denoising_steps)
        x_t, x_prev = trajectory[steps], trajectory[steps + 1]
        rows = torch.arange(GROUP * TOKENS).repeat(len(steps))
        scores = denoiser.score(
            denoiser.embed(z.flatten(0, 1)).select(rows),
            x_t.flatten(0, 2),
            x_prev.flatten(0, 2),
            steps.repeat_interleave(GROUP * TOKENS),
        )
        mean = scores.mean.unflatten(0, x_t.shape[:3])
        # The release floors the variance that divides the square, but hardly the one whose logarithm it takes.
        std = self.rollout[f"step{step}/std"][steps]
        floored = std.clamp(min=1e-3)
        return token_log_prob(x_prev, mean, floored) + (floored / std).log().mean(-1), mean


@pytest.fixture
def release(recorded, scalars, checkpoint, fresh_harmon) -> Release:
    reference = copy.deepcopy(fresh_harmon).requires_grad_(False)
    for index, (_, parameter) in enumerate(sorted(published_parameters(reference.policy, reference.head).items())):
        wave = 0.02 * torch.cos(0.37 * torch.arange(parameter.numel(), dtype=torch.float64) + index)
        parameter.add_(wave.float().view_as(parameter))
    ids = torch.tensor([scalars["rollout_input_ids"]])
    prefix = repeat_rows(fresh_harmon._read(ids, torch.tensor([[ids.shape[1]]])), GROUP)
    advantages = group_advantages(torch.tensor(scalars["rewards"]), GROUP, "group").values
    return Release(recorded("rollout"), fresh_harmon, reference, prefix, scalars["denoising_steps"], advantages)


@pytest.fixture(scope="module")
def golden(recorded):
    return recorded("loss")


def test_advantages_equal_the_published_ones(release, scalars):
    assert relative_error(release.advantages, torch.tensor(scalars["advantages"])) < 1e-6


def test_critical_tokens_are_the_published_ones(release, golden):
    end_points = torch.stack([release.trajectory(f"seeds/{seed}")[-1] for seed in (0, 1)])
    by_token = uncertainty(end_points)
    assert relative_error(by_token, golden["critic_std"].squeeze(-1)) < TOLERANCE
    published = golden["critic_mask"].squeeze(-1).bool()
    assert torch.equal(top_fraction(by_token, CRITICAL_FRACTION), published)


@pytest.mark.parametrize("step", [2, 3])
def test_consistent_tokens_are_the_published_ones(release, golden, step):
    current, previous = (release.trajectory(f"step{i}")[-1] for i in (step, step - 1))
    gain = consistency_gain(current, previous, release.rollout["final_tokens"])
    name = f"fixhead_critic30_consist0/step{step}"
    assert relative_error(gain, golden[f"{name}/sim_diff"].squeeze(-1)) < TOLERANCE
    # The published mask takes the tokens known after the step for known before it.
    predicted = release.unknown(step) & ~release.unknown(step + 1) if step < 3 else release.unknown(step)
    later = release.unknown(step + 1) if step < 3 else torch.zeros_like(predicted)
    kept = consistent(gain, predicted, 0.0)
    published = golden[f"{name}/sim_mask"].squeeze(-1).bool()
    assert torch.equal(kept[later], published[later])
    assert published[predicted].all()


@torch.no_grad()
def test_log_probabilities_equal_the_published_ones(release, golden):
    """They were recorded with the tokens of the step itself shown, as zeros."""
    shown = release.known(3)
    z = release.conditions(release.model, 2, shown)
    assert relative_error(z[:1], golden["plain/step2/z_policy"]) < TOLERANCE
    reference_z = release.conditions(release.reference, 2, shown)
    assert relative_error(reference_z[:1], golden["plain/step2/z_ref"]) < TOLERANCE
    log_prob, mean = release.score(release.model, z, release.trajectory("step2"), 2)
    assert relative_error(log_prob.flatten(0, 1), golden["plain/step2/logp"].mean(-1)) < 1e-4
    assert relative_error(mean[0], golden["plain/step2/mean"]) < TOLERANCE
    _, reference_mean = release.score(release.reference, reference_z, release.trajectory("step2"), 2)
    assert relative_error(reference_mean[0], golden["plain/step2/ref_mean"]) < TOLERANCE
    assert relative_error(k3(reference_mean - mean)[0], golden["plain/step2/kl_elem"]) < TOLERANCE
    seed_log_prob, _ = release.score(release.model, z, release.trajectory("seeds/0"), 2)
    published = golden["fixhead_critic30/step2/seed0_logp"].mean(-1)
    assert relative_error(seed_log_prob[0], published) < 1e-4


def losses(release: Release, golden: dict[str, Tensor], step: int, *, critic: bool, consistency: bool):
    """Surrogate loss and KL of a mask step, means over tokens and channels, and the number of trained tokens."""
    known, unknown = release.known(step), release.unknown(step)
    z = release.conditions(release.model, step, known)
    main = release.trajectory(f"step{step}")
    log_prob, mean = release.score(release.model, z, main, step)
    with torch.no_grad():
        reference_z = release.conditions(release.reference, step, known)
        _, reference_mean = release.score(release.reference, reference_z, main, step)
    kept = unknown.float()
    if consistency and step > 1:
        kept = kept * golden[f"fixhead_critic30_consist0/step{step}/sim_mask"].squeeze(-1)
    parts = [(log_prob, kept)]
    if critic:
        critical = golden["critic_mask"].squeeze(-1)
        extra = [release.score(release.model, z, release.trajectory(f"seeds/{seed}"), step)[0] for seed in (0, 1)]
        parts = [(log_prob, kept * (1 - critical)), *((part, kept * critical / len(extra)) for part in extra)]
    log_probs = torch.stack([part for part, _ in parts])
    weight = torch.stack([part.expand_as(log_prob) for _, part in parts])
    loss, _ = policy_loss(
        log_probs.flatten(),
        log_probs.detach().flatten(),
        release.advantages[:, None].expand_as(log_probs).flatten(),
        weight.flatten(),
        ObjectiveConfig(),
        on_policy=True,
    )
    divergence = k3(reference_mean - mean).mean(-1)
    penalty = weighted_mean(divergence.flatten(), unknown.float().expand_as(divergence).flatten())
    return loss, penalty, weight.sum().item()


VARIANTS = {
    "plain_inputmask": {"critic": False, "consistency": False},
    "fixhead_critic30_inputmask": {"critic": True, "consistency": False},
    "fixhead_critic30_consist0_inputmask": {"critic": True, "consistency": True},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_losses_and_gradients_equal_the_published_ones(release, golden, scalars, name):
    published = scalars["losses"][name]
    release.model.freeze(train_head=not published["fix_head"])
    for expected in published["per_step"]:
        loss, penalty, count = losses(release, golden, expected["mask_step"], **VARIANTS[name])
        assert count == pytest.approx(expected["denominator"])
        # Advantages of a group sum to 0: without a selection that differs between images, so does the value.
        assert -CHANNELS * loss.item() == pytest.approx(expected["policy_loss"], rel=1e-4, abs=1e-4)
        assert CHANNELS * penalty.item() == pytest.approx(expected["kl_loss"], rel=1e-4)
        (CHANNELS * (loss + BETA * penalty)).backward()

    gradients = {
        key: parameter.grad for key, parameter in published_parameters(release.model.policy, release.model.head).items()
    }
    expected_norms = published["grad_norms"]
    if published["fix_head"]:
        gradients = {key: value for key, value in gradients.items() if not key.startswith("diffloss")}
        expected_norms = {key: value for key, value in expected_norms.items() if not key.startswith("diffloss")}
    assert gradients.keys() == expected_norms.keys()
    norms = {key: value.norm().item() for key, value in gradients.items() if value is not None}
    assert norms == pytest.approx({key: norm for key, norm in expected_norms.items() if norm is not None}, rel=1e-3)
    total = math.sqrt(sum(norm**2 for norm in norms.values()))
    assert total == pytest.approx(published["total_grad_norm"], rel=1e-3)
    recorded_gradients = {key: value for key, value in golden.items() if key.startswith(f"{name}/grad/")}
    assert recorded_gradients
    for key, value in recorded_gradients.items():
        gradient = gradients[key.removeprefix(f"{name}/grad/")]
        assert (gradient - value).norm() < 1e-3 * value.norm(), key
