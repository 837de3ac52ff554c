"""The surrogate, its clipping, the KL estimators, against definitions written as loops."""

import math

import pytest
import torch

from margrpo.objective.loss import ObjectiveConfig, gaussian_kl, k3, policy_loss, weighted_mean


def decisions(count=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    log_prob = torch.randn(count, generator=generator)
    old = log_prob + 0.5 * torch.randn(count, generator=generator)
    advantage = torch.randn(count, generator=generator)
    weight = torch.rand(count, generator=generator)
    return log_prob.requires_grad_(), old, advantage, weight


def test_off_policy_loss_equals_the_loop_written_clipped_surrogate():
    log_prob, old, advantage, weight = decisions()
    config = ObjectiveConfig(clip_low=0.1, clip_high=0.3)
    loss, metrics = policy_loss(log_prob, old, advantage, weight, config, on_policy=False)
    total, clipped = 0.0, 0.0
    for new, before, a, w in zip(log_prob.tolist(), old.tolist(), advantage.tolist(), weight.tolist(), strict=True):
        ratio = math.exp(new - before)
        bounded = min(max(ratio, 0.9), 1.3)
        total += w * min(ratio * a, bounded * a)
        clipped += w * (bounded * a < ratio * a)
    assert loss.item() == pytest.approx(-total / weight.sum().item(), rel=1e-5)
    assert metrics["clip_share"].item() == pytest.approx(clipped / weight.sum().item(), rel=1e-5)


def test_off_policy_gradient_vanishes_exactly_where_the_clip_binds():
    log_prob = torch.tensor([1.0, 1.0, -1.0, -1.0], requires_grad=True)
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0])
    loss, _ = policy_loss(
        log_prob, torch.zeros(4), advantage, torch.ones(4), ObjectiveConfig(), on_policy=False
    )
    loss.backward()
    # A good decision that became likelier and a bad one that became less likely have moved far enough.
    assert (log_prob.grad == 0).tolist() == [True, False, False, True]


def test_on_policy_gradient_is_the_advantage_times_the_score_and_its_value_the_mean_advantage():
    log_prob, old, advantage, weight = decisions()
    loss, metrics = policy_loss(log_prob, old, advantage, weight, ObjectiveConfig(), on_policy=True)
    loss.backward()
    torch.testing.assert_close(log_prob.grad, -advantage * weight / weight.sum())
    assert loss.item() == pytest.approx(-(advantage * weight).sum().item() / weight.sum().item(), rel=1e-5)
    expected = max(abs(math.exp(new - before) - 1) for new, before in zip(log_prob.tolist(), old.tolist(), strict=True))
    assert metrics["ratio_deviation"].item() == pytest.approx(expected, rel=1e-5)


def test_the_first_off_policy_pass_has_the_on_policy_gradient():
    log_prob, _, advantage, weight = decisions()
    gradients = []
    for on_policy in (True, False):
        loss, _ = policy_loss(log_prob, log_prob.detach(), advantage, weight, ObjectiveConfig(), on_policy=on_policy)
        gradients += torch.autograd.grad(loss, log_prob)
    torch.testing.assert_close(*gradients)


def test_s_rows_of_weight_one_over_s_average_the_surrogate_over_trajectories():
    single, critical = torch.tensor([0.3], requires_grad=True), torch.tensor([0.1, -0.2, 0.4], requires_grad=True)
    advantage = torch.tensor([2.0, -1.0, -1.0, -1.0])
    weight = torch.tensor([1.0, 1 / 3, 1 / 3, 1 / 3])
    flat = torch.cat([single, critical])
    loss, _ = policy_loss(flat, torch.zeros(4), advantage, weight, ObjectiveConfig(clip_high=9), on_policy=False)
    by_token = [2.0 * single.exp()[0], -critical.exp().mean()]
    expected = -(by_token[0] + by_token[1]) / 2
    torch.testing.assert_close(
        torch.autograd.grad(loss, [single, critical]), torch.autograd.grad(expected, [single, critical])
    )


def test_a_wild_log_ratio_is_clamped_before_the_exponential():
    log_prob = torch.tensor([1000.0], requires_grad=True)
    loss, _ = policy_loss(
        log_prob, torch.zeros(1), torch.tensor([-1.0]), torch.ones(1), ObjectiveConfig(max_log_ratio=3), on_policy=False
    )
    assert loss.item() == pytest.approx(math.exp(3))


@pytest.mark.parametrize("on_policy", [True, False])
def test_an_empty_selection_gives_zero_loss_and_zero_gradient(on_policy):
    z = torch.ones(3, requires_grad=True)
    empty = z[torch.zeros(3, dtype=torch.bool)]
    loss, metrics = policy_loss(empty, empty.detach(), empty.detach(), empty.detach(), ObjectiveConfig(), on_policy=on_policy)
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(z.grad, torch.zeros(3))
    assert all(value.item() == 0 for value in metrics.values())


def test_gaussian_kl_equals_the_textbook_formula_averaged_over_channels():
    mean, other = torch.randn(5, 3), torch.randn(5, 3)
    std, other_std = torch.rand(5, 1) + 0.5, torch.rand(5, 1) + 0.5
    p = torch.distributions.Normal(mean, std)
    q = torch.distributions.Normal(other, other_std)
    torch.testing.assert_close(gaussian_kl(mean, std, other, other_std), torch.distributions.kl_divergence(p, q).mean(-1))


def test_k3_is_zero_at_zero_and_never_negative():
    difference = torch.linspace(-2, 2, 9)
    expected = [math.exp(d) - d - 1 for d in difference.tolist()]
    assert k3(difference).tolist() == pytest.approx(expected, abs=1e-6)
    assert k3(torch.zeros(1)).item() == 0


def test_weighted_mean_ignores_the_scale_of_the_weights():
    values, weight = torch.tensor([1.0, 4.0]), torch.tensor([3.0, 1.0])
    assert weighted_mean(values, weight).item() == pytest.approx(1.75)
    assert weighted_mean(values, 10 * weight).item() == pytest.approx(1.75)


@pytest.mark.parametrize(
    ("option", "value", "accepted"),
    [("clip_low", 0.0, r"\(0, 1\]"), ("clip_high", -1.0, "positive"), ("max_log_ratio", 0.0, "positive"), ("kl_weight", -0.1, "negative")],
)
def test_a_bad_option_is_named_with_what_is_accepted(option, value, accepted):
    with pytest.raises(ValueError, match=f"{option} is {value}.*{accepted}"):
        ObjectiveConfig(**{option: value})
