"""The whole objective on flat decisions, against its definition written as loops over a dense rollout."""

import math
import statistics
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from margrpo.objective.advantage import group_advantages
from margrpo.objective.loss import KLEstimator, ObjectiveConfig, gaussian_kl, k3, policy_loss, weighted_mean
from margrpo.objective.selection import consistency_gain, consistent, top_fraction, uncertainty

PROMPTS, GROUP_SIZE, TOKENS, CHANNELS, STEPS = 2, 3, 7, 4, 5
IMAGES = PROMPTS * GROUP_SIZE


@dataclass(frozen=True)
class Switches:
    """What is varied: S (0: no extra trajectories), the critical fraction, tau, and the ObjectiveConfig."""

    num_trajectories: int = 3
    critical_fraction: float = 0.4
    threshold: float | None = 0.0
    on_policy: bool = True
    config: ObjectiveConfig = field(default_factory=ObjectiveConfig)


class DenseRollout:
    """One mask step of a toy policy whose transitions have mean x_t / 2 + z and one std per denoising step.

    Trajectory 0 made the image, the others are extra. Everything is kept for every token.
    """

    def __init__(self, num_trajectories: int) -> None:
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        paths = 1 + num_trajectories
        self.rewards = draw(IMAGES)
        self.z = draw(IMAGES, TOKENS, CHANNELS).requires_grad_()
        self.std = torch.linspace(1.0, 2.0, STEPS, dtype=torch.float64)
        self.reference_z = self.z.detach() + 0.3 * draw(IMAGES, TOKENS, CHANNELS)
        self.x_t = draw(paths, STEPS, IMAGES, TOKENS, CHANNELS)
        self.x_prev = draw(paths, STEPS, IMAGES, TOKENS, CHANNELS)
        self.end_points = draw(paths, IMAGES, TOKENS, CHANNELS)
        self.previous_end_points = draw(IMAGES, TOKENS, CHANNELS)
        self.final = draw(IMAGES, TOKENS, CHANNELS)
        self.unknown = draw(IMAGES, TOKENS) > -0.8
        self.predicted = self.unknown & (draw(IMAGES, TOKENS) > 0.5)
        self.old_log_prob = self.log_prob(self.z).detach() + 0.3 * draw(paths, STEPS, IMAGES, TOKENS)

    def mean(self, z: Tensor) -> Tensor:
        """Return the means of all transitions [1 + S, D, B, N, C]."""
        return self.x_t / 2 + z

    def log_prob(self, z: Tensor) -> Tensor:
        """Return the log-probabilities of all transitions [1 + S, D, B, N]."""
        std = self.std[:, None, None, None].expand(STEPS, IMAGES, TOKENS, CHANNELS)
        return torch.distributions.Normal(self.mean(z), std).log_prob(self.x_prev).mean(-1)


def flat_loss(rollout: DenseRollout, switches: Switches) -> Tensor:
    """Lay the selected transitions out as decisions and call the package."""
    kept = rollout.unknown
    if switches.threshold is not None:
        gain = consistency_gain(rollout.end_points[0], rollout.previous_end_points, rollout.final)
        kept = kept & consistent(gain, rollout.predicted, switches.threshold)
    critical = torch.zeros_like(kept)
    if switches.num_trajectories:
        critical = top_fraction(uncertainty(rollout.end_points[1:]), switches.critical_fraction)
    taken = torch.stack([kept & ~critical] + [kept & critical] * switches.num_trajectories)
    path, image, token = taken.nonzero().repeat(STEPS, 1).unbind(1)
    step = torch.arange(STEPS).repeat_interleave(len(path) // STEPS)
    shuffled = torch.randperm(len(path), generator=torch.Generator().manual_seed(1))
    rows = tuple(index[shuffled] for index in (path, step, image, token))

    advantage = group_advantages(rollout.rewards, GROUP_SIZE, switches.config.advantage_scale).values[rows[2]]
    weight = torch.where(rows[0] > 0, 1 / max(switches.num_trajectories, 1), 1.0).double()
    log_prob, reference_log_prob = rollout.log_prob(rollout.z)[rows], rollout.log_prob(rollout.reference_z)[rows]
    mean, reference_mean = rollout.mean(rollout.z)[rows], rollout.mean(rollout.reference_z)[rows]
    std = rollout.std[rows[1]].unsqueeze(1)
    kl = {
        "gaussian": gaussian_kl(mean, std, reference_mean, std),
        "mean_k3": k3(reference_mean - mean).mean(-1),
        "k3": k3(reference_log_prob - log_prob),
    }[switches.config.kl_estimator]
    old_log_prob = rollout.old_log_prob[rows]
    policy, _ = policy_loss(log_prob, old_log_prob, advantage, weight, switches.config, on_policy=switches.on_policy)
    return policy + switches.config.kl_weight * weighted_mean(kl, weight)


def looped_advantage(rollout: DenseRollout, image: int, config: ObjectiveConfig) -> float:
    rewards = rollout.rewards.tolist()
    first = image // GROUP_SIZE * GROUP_SIZE
    group = rewards[first : first + GROUP_SIZE]
    centred = rewards[image] - statistics.fmean(group)
    return centred / (statistics.stdev(group) + 1e-4) if config.advantage_scale == "group" else centred


def looped_critical(rollout: DenseRollout, image: int, fraction: float) -> list[int]:
    scores = {}
    for token in range(TOKENS):
        by_channel = [statistics.pstdev(rollout.end_points[1:, image, token, c].tolist()) for c in range(CHANNELS)]
        scores[token] = statistics.fmean(by_channel)
    return sorted(scores, key=lambda token: -scores[token])[: round(fraction * len(scores))]


def looped_is_kept(rollout: DenseRollout, image: int, token: int, threshold: float | None) -> bool:
    if threshold is None or rollout.predicted[image, token]:
        return True
    final = rollout.final[image, token].tolist()

    def similarity(latents: list[float]) -> float:
        return sum(a * b for a, b in zip(latents, final, strict=True)) / (math.hypot(*latents) * math.hypot(*final))

    now, before = rollout.end_points[0, image, token].tolist(), rollout.previous_end_points[image, token].tolist()
    return similarity(now) - similarity(before) > threshold


def looped_kl(rollout: DenseRollout, path: int, step: int, image: int, token: int, estimator: KLEstimator) -> Tensor:
    z, reference_z = rollout.z[image, token], rollout.reference_z[image, token]
    if estimator == "k3":
        x_t, x_prev = rollout.x_t[path, step, image, token], rollout.x_prev[path, step, image, token]
        current, reference = (
            -((x_prev - x_t / 2 - mu) ** 2 / (2 * rollout.std[step] ** 2)).mean() for mu in (z, reference_z)
        )
        return (reference - current).exp() - (reference - current) - 1
    total = torch.zeros((), dtype=torch.float64)
    for channel in range(CHANNELS):
        difference = reference_z[channel] - z[channel]
        if estimator == "gaussian":
            total = total + difference**2 / (2 * rollout.std[step] ** 2)
        else:
            total = total + difference.exp() - difference - 1
    return total / CHANNELS


def looped_loss(rollout: DenseRollout, switches: Switches) -> Tensor:
    """Take the mean over selected denoising steps, images and tokens of -(surrogate - beta KL)."""
    config = switches.config
    log_prob = rollout.log_prob(rollout.z)
    terms = []
    for image in range(IMAGES):
        advantage = looped_advantage(rollout, image, config)
        critical = looped_critical(rollout, image, switches.critical_fraction) if switches.num_trajectories else []
        for token in range(TOKENS):
            if not rollout.unknown[image, token] or not looped_is_kept(rollout, image, token, switches.threshold):
                continue
            paths = list(range(1, 1 + switches.num_trajectories)) if token in critical else [0]
            for step in range(STEPS):
                values = []
                for path in paths:
                    current = log_prob[path, step, image, token]
                    if switches.on_policy:
                        surrogate = (current - current.detach()).exp() * advantage
                    else:
                        ratio = (current - rollout.old_log_prob[path, step, image, token]).exp()
                        bounded = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
                        surrogate = min(ratio * advantage, bounded * advantage)
                    kl = looped_kl(rollout, path, step, image, token, config.kl_estimator)
                    values.append(surrogate - config.kl_weight * kl)
                terms.append(sum(values) / len(values))
    return -torch.stack(terms).mean()


def assert_same_loss_and_gradient(actual: Tensor, expected: Tensor, z: Tensor) -> None:
    # Advantages are fp32, the rest is fp64.
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)
    gradient, expected_gradient = (torch.autograd.grad(loss, z)[0] for loss in (actual, expected))
    assert expected_gradient.abs().max() > 1e-3
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-8)


CASES = {
    "default": Switches(),
    "no consistency": Switches(threshold=None),
    "no critical tokens": Switches(critical_fraction=0.0),
    "all tokens critical": Switches(critical_fraction=1.0, threshold=0.3),
    "off policy": Switches(num_trajectories=2, critical_fraction=0.5, on_policy=False),
    "narrow clip": Switches(on_policy=False, config=ObjectiveConfig(clip_low=0.05, clip_high=0.1, kl_weight=0.5)),
    "k3 of means": Switches(config=ObjectiveConfig(kl_estimator="mean_k3", kl_weight=0.5)),
    "k3 of log-probs": Switches(config=ObjectiveConfig(kl_estimator="k3", kl_weight=0.5)),
    "unscaled, no KL": Switches(config=ObjectiveConfig(advantage_scale="none", kl_weight=0.0)),
}


@pytest.mark.parametrize("switches", CASES.values(), ids=CASES)
def test_flat_decisions_give_the_loss_and_gradient_of_the_loops(switches: Switches) -> None:
    rollout = DenseRollout(switches.num_trajectories)
    assert_same_loss_and_gradient(flat_loss(rollout, switches), looped_loss(rollout, switches), rollout.z)


@pytest.mark.parametrize("num_trajectories", [0, 1])
def test_without_critical_tokens_and_consistency_it_is_plain_grpo(num_trajectories: int) -> None:
    rollout = DenseRollout(num_trajectories)
    switches = Switches(num_trajectories=num_trajectories, critical_fraction=0.0, threshold=None)
    rewards = rollout.rewards.view(PROMPTS, GROUP_SIZE)
    advantage = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).view(-1, 1)
    log_prob = rollout.log_prob(rollout.z)[0]
    kl = (rollout.z - rollout.reference_z).square().mean(-1) / (2 * rollout.std.square()[:, None, None])
    by_transition = (log_prob - log_prob.detach()).exp() * advantage - switches.config.kl_weight * kl
    assert_same_loss_and_gradient(flat_loss(rollout, switches), -by_transition[:, rollout.unknown].mean(), rollout.z)


def test_equal_rewards_leave_only_the_pull_to_the_reference() -> None:
    rollout = DenseRollout(3)
    rollout.rewards = torch.full((IMAGES,), 0.1)
    with_kl, without_kl = (flat_loss(rollout, Switches(config=ObjectiveConfig(kl_weight=beta))) for beta in (1.0, 0.0))
    assert without_kl.item() == 0.0
    assert not torch.autograd.grad(without_kl, rollout.z)[0].any()
    assert torch.autograd.grad(with_kl, rollout.z)[0].any()


def test_nothing_consistent_and_nothing_predicted_gives_zero_loss_and_zero_gradient() -> None:
    rollout = DenseRollout(3)
    rollout.predicted = torch.zeros_like(rollout.predicted)
    loss = flat_loss(rollout, Switches(threshold=2.0))
    assert loss.item() == 0.0
    assert not torch.autograd.grad(loss, rollout.z)[0].any()
