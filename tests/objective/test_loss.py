"""The surrogate with its ratio, clip and clamp, the KL estimators, and their reduction."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from margrpo.objective.loss import ObjectiveConfig, gaussian_kl, image_nats, k3, policy_loss, weighted_mean
from tests.helpers import relative_error

CONFIG = ObjectiveConfig()


def random_decisions(count: int = 40) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-probabilities with a gradient, recorded ones, advantages and weights."""
    generator = torch.Generator().manual_seed(0)
    log_prob, change, advantage = (torch.randn(count, generator=generator) for _ in range(3))
    weight = torch.rand(count, generator=generator)
    return log_prob.requires_grad_(), log_prob.detach() + 0.5 * change, advantage, weight


def one_decision(log_ratio: float, advantage: float, config: ObjectiveConfig = CONFIG) -> tuple[float, float, float]:
    """Return loss, gradient and clip share of one decision that has been updated by a log ratio."""
    log_prob = torch.tensor([log_ratio], requires_grad=True)
    loss, metrics = policy_loss(
        log_prob, torch.zeros(1), torch.tensor([advantage]), torch.ones(1), config, on_policy=False
    )
    (gradient,) = torch.autograd.grad(loss, log_prob)
    return loss.item(), gradient.item(), metrics["clip_share"].item()


def test_on_policy_the_value_is_the_mean_advantage_and_the_gradient_advantage_times_score() -> None:
    log_prob, old, advantage, weight = random_decisions()
    loss, metrics = policy_loss(log_prob, old, advantage, weight, CONFIG, on_policy=True)
    (gradient,) = torch.autograd.grad(loss, log_prob)
    assert loss.item() == pytest.approx(-((weight * advantage).sum() / weight.sum()).item(), rel=1e-5)
    assert relative_error(gradient, -weight * advantage / weight.sum()) < 1e-7
    assert metrics["clip_share"].item() == 0.0


def test_the_first_off_policy_pass_has_the_on_policy_loss_and_gradient() -> None:
    log_prob, _, advantage, weight = random_decisions()
    losses = [
        policy_loss(log_prob, log_prob.detach(), advantage, weight, CONFIG, on_policy=on_policy)[0]
        for on_policy in (True, False)
    ]
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(torch.autograd.grad(loss, log_prob)[0] for loss in losses))


@pytest.mark.parametrize("on_policy", [True, False])
def test_ratio_deviation_compares_with_the_recorded_log_probabilities(on_policy: bool) -> None:
    log_prob, old, advantage, weight = random_decisions()
    _, metrics = policy_loss(log_prob, old, advantage, weight, CONFIG, on_policy=on_policy)
    pairs = zip(log_prob.tolist(), old.tolist(), strict=True)
    expected = max(abs(math.exp(new - recorded) - 1) for new, recorded in pairs)
    assert metrics["ratio_deviation"].item() == pytest.approx(expected, rel=1e-5)
    assert not any(value.requires_grad for value in metrics.values())


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped_to"),
    [(1.5, 2.0, 1.3), (1.5, -2.0, None), (0.5, 2.0, None), (0.5, -2.0, 0.9), (1.1, 2.0, None), (0.95, -2.0, None)],
)
def test_the_clip_binds_only_where_a_decision_has_moved_far_enough_the_right_way(
    ratio: float, advantage: float, clipped_to: float | None
) -> None:
    config = ObjectiveConfig(clip_low=0.1, clip_high=0.3)
    loss, gradient, clip_share = one_decision(math.log(ratio), advantage, config)
    expected = ratio if clipped_to is None else clipped_to
    assert loss == pytest.approx(-expected * advantage, rel=1e-5)
    assert gradient == pytest.approx(-ratio * advantage if clipped_to is None else 0.0, rel=1e-5)
    assert clip_share == float(clipped_to is not None)


def test_clip_share_is_weighted() -> None:
    log_prob = torch.tensor([1.0, 0.0, 0.0])
    weight = torch.tensor([1.0, 2.0, 5.0])
    _, metrics = policy_loss(log_prob, torch.zeros(3), torch.ones(3), weight, CONFIG, on_policy=False)
    assert metrics["clip_share"].item() == pytest.approx(1 / 8)


@pytest.mark.parametrize(("log_ratio", "clamped"), [(1000.0, 3.0), (-1000.0, -3.0)])
def test_a_wild_log_ratio_is_clamped_before_the_exponential(log_ratio: float, clamped: float) -> None:
    # The sign of the advantage is the one that the clip lets through.
    advantage = -math.copysign(1.0, log_ratio)
    loss, gradient, _ = one_decision(log_ratio, advantage, ObjectiveConfig(max_log_ratio=3.0))
    assert loss == pytest.approx(-math.exp(clamped) * advantage, rel=1e-5)
    assert gradient == 0.0


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("count", [0, 3])
def test_an_empty_selection_gives_zero_loss_and_zero_gradients(on_policy: bool, count: int) -> None:
    log_prob = torch.ones(count, requires_grad=True)
    zeros = torch.zeros(count)
    loss, metrics = policy_loss(log_prob, log_prob.detach(), zeros + 1, zeros, CONFIG, on_policy=on_policy)
    total = loss + CONFIG.kl_weight * weighted_mean(k3(log_prob.detach() - log_prob + 1), zeros)
    total.backward()
    assert total.item() == 0.0
    assert log_prob.grad is not None
    assert log_prob.grad.tolist() == [0.0] * count
    assert [value.item() for value in metrics.values()] == [0.0, 0.0]


def test_weighted_mean_does_not_depend_on_the_scale_of_the_weights() -> None:
    values, weight = torch.tensor([1.0, 4.0, 9.0]), torch.tensor([3.0, 1.0, 0.0])
    for factor in (0.1, 1.0, 10.0):
        assert weighted_mean(values, factor * weight).item() == pytest.approx(1.75)


def test_over_ranks_the_mean_of_losses_is_the_loss_over_all_decisions() -> None:
    log_prob, old, advantage, weight = random_decisions()
    whole, metrics = policy_loss(log_prob, old, advantage, weight, CONFIG, on_policy=False)
    ranks = (slice(0, 7), slice(7, None))
    total_weight = torch.stack([weight[rank].sum() for rank in ranks]).mean()
    parts = [
        policy_loss(
            log_prob[rank],
            old[rank],
            advantage[rank],
            weight[rank],
            CONFIG,
            on_policy=False,
            total_weight=total_weight,
        )
        for rank in ranks
    ]
    torch.testing.assert_close(torch.stack([loss for loss, _ in parts]).mean(), whole)
    torch.testing.assert_close(torch.stack([part["clip_share"] for _, part in parts]).mean(), metrics["clip_share"])


@pytest.mark.parametrize("std_shape", [(), (5, 1), (5, 3)])
def test_gaussian_kl_is_the_divergence_of_two_gaussians_averaged_over_channels(std_shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    mean, reference_mean = (torch.randn(5, 3, generator=generator) for _ in range(2))
    std, reference_std = (torch.rand(std_shape, generator=generator) + 0.5 for _ in range(2))
    expected = torch.distributions.kl_divergence(
        torch.distributions.Normal(mean, std), torch.distributions.Normal(reference_mean, reference_std)
    )
    torch.testing.assert_close(gaussian_kl(mean, std, reference_mean, reference_std), expected.mean(-1))


@pytest.mark.parametrize("distance", [1.0, 1e-3, 1e-6])
def test_gaussian_kl_of_equal_stds_is_the_squared_distance_however_small(distance: float) -> None:
    mean, std = torch.zeros(2, 3), torch.tensor(0.7)
    kl = gaussian_kl(mean + distance, std, mean, std)
    assert kl.tolist() == pytest.approx([distance**2 / (2 * 0.7**2)] * 2, rel=1e-5)


@pytest.mark.parametrize("difference", [-3.0, -0.5, -1e-2, -1e-4, 1e-4, 1e-2, 0.5, 3.0])
def test_k3_is_accurate_for_small_differences(difference: float) -> None:
    series = math.fsum(difference**power / math.factorial(power) for power in range(2, 40))
    assert k3(torch.tensor(difference)).item() == pytest.approx(series, rel=2e-3)


def test_k3_is_zero_without_a_difference_and_then_has_no_gradient() -> None:
    difference = torch.zeros(3, requires_grad=True)
    value = k3(difference)
    (gradient,) = torch.autograd.grad(value.sum(), difference)
    assert value.tolist() == gradient.tolist() == [0.0] * 3


def test_k3_of_the_means_equals_the_kl_of_the_published_release(data_dir: Path) -> None:
    recorded = load_file(data_dir / "nova/loss_flow.safetensors")
    runs = json.loads((data_dir / "nova/loss_scalars.json").read_text())
    mask_steps = runs["flow.fix_head_critic_sim"]["per_mask_step"]
    expected = next(step["kl_loss"] for step in mask_steps if step["mask_step"] == 3)
    penalty = k3(recorded["full.step3.ref_mean"] - recorded["full.step3.mean"])
    # Rows are denoising step major, so the masks of the images repeat.
    masked = recorded["full.step3.completion_mask"].float()
    weight = masked.repeat(len(penalty) // len(masked), 1, 1, 1)
    assert weighted_mean(penalty.flatten(), weight.flatten()).item() == pytest.approx(expected, rel=1e-4)


def test_image_nats_is_the_sum_over_the_decisions_of_an_image() -> None:
    generator = torch.Generator().manual_seed(0)
    mean, reference_mean = (torch.randn(5, 7, 3, generator=generator) for _ in range(2))
    std = torch.tensor(0.7)
    by_channel = (mean - reference_mean).square() / (2 * 0.7**2)
    kl = gaussian_kl(mean, std, reference_mean, std).mean()
    assert image_nats(kl, channels=3, tokens=7, denoising_steps=5).item() == pytest.approx(by_channel.sum().item())


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("clip_low", 0.0, r"clip_low is 0.0; it must lie in \(0, 1\]"),
        ("clip_low", 1.5, r"clip_low is 1.5; it must lie in \(0, 1\]"),
        ("clip_high", -1.0, "clip_high is -1.0; it must be positive"),
        ("max_log_ratio", 0.0, "max_log_ratio is 0.0; it must be positive"),
        ("kl_weight", -0.1, "kl_weight is -0.1; it must not be negative"),
        ("kl_weight", math.nan, "kl_weight is nan; it must not be negative"),
        ("kl_estimator", "k2", "kl_estimator is 'k2'; accepted: gaussian, mean_k3, k3"),
        ("advantage_scale", "std", "advantage_scale is 'std'; accepted: group, batch, none"),
    ],
)
def test_a_bad_option_is_named_with_what_is_accepted(option: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ObjectiveConfig(**{option: value})
