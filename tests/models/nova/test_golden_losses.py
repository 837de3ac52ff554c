"""Transitions, losses and gradients of the published release, from the package's own modules and objective."""

import copy
import json
import math
from dataclasses import dataclass

import pytest
import torch
from diffusers import DDPMScheduler
from torch import Tensor

from margrpo.diffusion.dispatch import transition_from_scheduler
from margrpo.diffusion.transition import log_prob
from margrpo.models.nova import NOVA
from margrpo.models.nova.layers import patchify
from margrpo.objective.advantage import group_advantages
from margrpo.objective.loss import ObjectiveConfig, k3, policy_loss, weighted_mean
from margrpo.objective.selection import consistency_gain, consistent, uncertainty
from margrpo.rollout.denoising import Scores, TokenDenoiser
from tests.helpers import relative_error
from tests.models.nova.release import two_frame_context

GROUP, TOKENS, STEPS = 4, 64, 4
BETA = 0.01
TOLERANCE = 2e-4
DDPM_TOLERANCE = 1e-3


def tokens_of(latents: Tensor) -> Tensor:
    """Patchify latents [..., c, H, W] to tokens [..., N, C]."""
    return patchify(latents.flatten(0, -4), 2).unflatten(0, latents.shape[:-3])


def pixels_of(latents: Tensor) -> Tensor:
    """Lay out latents [..., c, H, W] as [..., H * W, c], so that every latent pixel counts as a token."""
    return latents.flatten(-2).transpose(-1, -2)


@dataclass
class Release:
    """The recorded rollout of a group with its policy, its reference and their head's transition."""

    golden: dict[str, Tensor]
    model: NOVA
    reference: NOVA
    denoiser: TokenDenoiser
    reference_denoiser: TokenDenoiser

    def start(self, step: int) -> int:
        return int(self.golden["num_preds"][:step].sum())

    def row(self, step: int) -> int:
        """Place of a mask step among the trained ones."""
        return self.golden["mask_steps"].tolist().index(step)

    def conditions(self, model: NOVA, step: int, *, two_frames: bool) -> Tensor:
        """Predict z [B, N, E] as the release's training does, or as its rollout (and this package) does."""
        x = self.golden["x_latent"][self.row(step)]
        prompt_embeds = self.golden["prompt_embed"].expand(GROUP, -1, -1)
        context = (
            two_frame_context(model.policy, prompt_embeds, x)
            if two_frames
            else model.prefix(model.policy, {"prompt_embeds": prompt_embeds})["context"]
        )
        known = self.golden["order"][:, : self.start(step)]
        return model.predict_condition(model.policy, tokens_of(x), known, {"context": context})

    def score(self, z: Tensor, trajectory: Tensor, steps: list[int], denoiser: TokenDenoiser) -> Scores:
        """Score all tokens of a trajectory [T + 1, B, c, H, W] at denoising steps; tensors are [K, B, N, ...]."""
        states = tokens_of(trajectory)
        x_t, x_prev = (torch.stack([states[step + after] for step in steps]) for after in (0, 1))
        rows = torch.arange(GROUP * TOKENS).repeat(len(steps))
        scores = denoiser.score(
            denoiser.embed(z.flatten(0, 1)).select(rows),
            x_t.flatten(0, 2),
            x_prev.flatten(0, 2),
            torch.tensor(steps).repeat_interleave(GROUP * TOKENS),
        )
        shape = x_t.shape[:3]
        log_probs = log_prob(x_prev.flatten(0, 2), scores.mean, scores.std)
        return Scores(*(tensor.unflatten(0, shape) for tensor in (log_probs, scores.mean, scores.std)))

    def unknown(self, step: int) -> Tensor:
        """Return bool [B, N], the tokens that are unknown before a mask step."""
        return torch.ones(GROUP, TOKENS).scatter(1, self.golden["order"][:, : self.start(step)], 0.0).bool()

    def predicted(self, step: int) -> Tensor:
        """Return bool [B, N], the tokens that a mask step predicts."""
        return self.unknown(step) & ~self.unknown(step + 1)


def load_release(recorded, checkpoint, name: str, scheduler=None) -> Release:
    model = NOVA.from_pretrained(checkpoint)
    scheduler = scheduler or model.scheduler
    reference = copy.deepcopy(model).requires_grad_(False)
    for part in (reference.policy, reference.head):
        for parameter in part.parameters():
            parameter.mul_(0.98)
    transition = transition_from_scheduler(scheduler, STEPS, 0.7, None)
    denoisers = (TokenDenoiser(m.head, transition, score_guided=False) for m in (model, reference))
    return Release(recorded(name), model, reference, *denoisers)


@pytest.fixture
def flow(recorded, checkpoint) -> Release:
    return load_release(recorded, checkpoint, "loss_flow")


@pytest.fixture(scope="module")
def ddpm(recorded, checkpoint, data_dir) -> Release:
    scheduler = DDPMScheduler.from_pretrained(data_dir / "nova" / "scheduler_ddpm")
    return load_release(recorded, checkpoint, "loss_ddpm", scheduler)


@pytest.fixture(scope="module")
def scalars(data_dir) -> dict:
    return json.loads((data_dir / "nova" / "loss_scalars.json").read_text())


def test_advantages_equal_the_published_ones(flow):
    advantages = group_advantages(flow.golden["rewards"], GROUP, "group")
    assert relative_error(advantages.values, flow.golden["advantages"]) < TOLERANCE


def test_masks_equal_the_published_ones(flow):
    for step in flow.golden["mask_steps"].tolist():
        for name, mask in (("completion_mask", flow.unknown(step)), ("completion_mask_next", flow.predicted(step))):
            published = tokens_of(flow.golden[f"full.step{step}.{name}"])
            assert torch.equal(published, mask[..., None].expand(-1, -1, 16).to(torch.uint8))


def test_uncertainty_of_latent_pixels_equals_the_published_one(flow):
    published = flow.golden["critic_std"].flatten(1)
    per_pixel = uncertainty(pixels_of(flow.golden["seed_traj"][:, -1]))
    assert relative_error(per_pixel, published) < TOLERANCE
    # The published mask is the top 30% and one random pixel, which may be among them.
    mask = flow.golden["critic_mask"].flatten(1).bool()
    top = per_pixel.topk(int(0.3 * 256), dim=1).indices
    assert mask.gather(1, top).all()
    assert set(mask.sum(dim=1).tolist()) <= {76, 77}


@pytest.mark.parametrize("step", [3, 4])
def test_consistency_of_latent_pixels_equals_the_published_one(flow, step):
    kept_steps = flow.golden["xs_last_steps"].tolist()
    current, previous = (flow.golden["xs_last"][kept_steps.index(i)] for i in (step, step - 1))
    gain = consistency_gain(*map(pixels_of, (current, previous, flow.golden["final_latents"])))
    assert relative_error(gain, flow.golden[f"full.step{step}.sim_map"].flatten(1)) < TOLERANCE
    per_pixel = (
        pixels_of(flow.golden[f"full.step{step}.{name}"]) for name in ("completion_mask", "completion_mask_next")
    )
    unknown, predicted = (mask[..., 0].bool() for mask in per_pixel)
    kept = consistent(gain, predicted, 0.0) & unknown
    assert torch.equal(kept, pixels_of(flow.golden[f"full.step{step}.sim_mask"])[..., 0].bool())


def recorded_rows(latents: Tensor) -> Tensor:
    """Tokens [K, B, N, C] of tensors recorded as [K * B, c, H, W], denoising step major."""
    return tokens_of(latents).unflatten(0, (-1, GROUP))


@torch.no_grad()
def test_flow_transitions_equal_the_published_ones(flow):
    golden = flow.golden
    steps = golden["full.step3.diff_idx"].tolist()
    z = flow.conditions(flow.model, 3, two_frames=True)
    assert relative_error(z, golden["full.step3.z"]) < TOLERANCE
    main = golden["traj"][flow.row(3)]
    scores = flow.score(z, main, steps, flow.denoiser)
    assert relative_error(scores.mean, recorded_rows(golden["full.step3.mean"])) < TOLERANCE
    assert relative_error(scores.log_prob, recorded_rows(golden["full.step3.logp"])) < TOLERANCE
    reference_z = flow.conditions(flow.reference, 3, two_frames=True)
    reference = flow.score(reference_z, main, steps, flow.reference_denoiser)
    assert relative_error(reference.mean, recorded_rows(golden["full.step3.ref_mean"])) < TOLERANCE
    seed = flow.score(z, golden["seed_traj"][0], steps, flow.denoiser)
    assert relative_error(seed.log_prob, recorded_rows(golden["full.step3.critic_logp_seed0"])) < TOLERANCE


def check_log_prob_sums(release: Release, step: int, tolerance: float) -> None:
    """Compare log-probabilities summed over each image, of the main trajectory and of the extra ones."""
    golden, trainable = release.golden, release.denoiser.transition.trainable_steps
    recorded_steps = golden[f"full.step{step}.diff_idx"].tolist()
    rows = [row for row, denoising_step in enumerate(recorded_steps) if denoising_step in trainable]
    steps = [recorded_steps[row] for row in rows]
    z = release.conditions(release.model, step, two_frames=True)
    trajectories = [golden["traj"][release.row(step)], *golden["seed_traj"]]
    published = [golden[f"full.step{step}.logp_sums"], *golden[f"full.step{step}.critic_logp_sums"].chunk(2)]
    for trajectory, sums in zip(trajectories, published, strict=True):
        scores = release.score(z, trajectory, steps, release.denoiser)
        expected = sums.unflatten(0, (-1, GROUP))[rows]
        assert relative_error(scores.log_prob.sum((-1, -2)) / 1024, expected / 1024) < tolerance


@pytest.mark.parametrize("step", [1, 3, 4])
@torch.no_grad()
def test_flow_log_prob_sums_equal_the_published_ones(flow, step):
    check_log_prob_sums(flow, step, TOLERANCE)


@torch.no_grad()
def test_ddpm_transitions_equal_the_published_ones(ddpm):
    golden = ddpm.golden
    assert torch.equal(ddpm.denoiser.transition.timesteps, golden["timesteps"].float())
    steps = golden["full.step3.diff_idx"].tolist()
    z = ddpm.conditions(ddpm.model, 3, two_frames=True)
    assert relative_error(z, golden["full.step3.z"]) < DDPM_TOLERANCE
    main = golden["traj"][ddpm.row(3)]
    scores = ddpm.score(z, main, steps, ddpm.denoiser)
    assert relative_error(scores.mean, recorded_rows(golden["full.step3.mean"])) < DDPM_TOLERANCE
    reference_z = ddpm.conditions(ddpm.reference, 3, two_frames=True)
    reference = ddpm.score(reference_z, main, steps, ddpm.reference_denoiser)
    assert relative_error(reference.mean, recorded_rows(golden["full.step3.ref_mean"])) < DDPM_TOLERANCE


@pytest.mark.parametrize("step", [1, 3])
@torch.no_grad()
def test_ddpm_log_prob_sums_equal_the_published_ones_but_for_the_last_step(ddpm, step):
    assert ddpm.denoiser.transition.trainable_steps == [0, 1, 2]
    check_log_prob_sums(ddpm, step, DDPM_TOLERANCE)


def token_losses(release: Release, step: int, *, two_frames: bool) -> tuple[Tensor, Tensor]:
    """Surrogate and KL of a mask step without critical tokens and consistency, each token one decision."""
    main = release.golden["traj"][release.row(step)]
    z = release.conditions(release.model, step, two_frames=two_frames)
    scores = release.score(z, main, list(range(STEPS)), release.denoiser)
    with torch.no_grad():
        reference_z = release.conditions(release.reference, step, two_frames=two_frames)
        reference = release.score(reference_z, main, list(range(STEPS)), release.reference_denoiser)
    log_probs = scores.log_prob.mean(-1)
    weight = release.unknown(step).float().expand_as(log_probs)
    loss, _ = policy_loss(
        log_probs.flatten(),
        log_probs.detach().flatten(),
        release.golden["advantages"][None, :, None].expand_as(log_probs).flatten(),
        weight.flatten(),
        ObjectiveConfig(),
        on_policy=True,
    )
    penalty = weighted_mean(k3(reference.mean - scores.mean).mean(-1).flatten(), weight.flatten())
    return loss, penalty


def channel_losses(release: Release, step: int, *, checks_consistency: bool, two_frames: bool) -> tuple[Tensor, Tensor]:
    """Surrogate and KL of a mask step as published: each latent element is one decision.

    Critical elements take the extra trajectories, the others the one that made the image; the KL divergence is
    that of the latter at all unknown tokens.
    """
    golden, steps = release.golden, list(range(STEPS))
    main = golden["traj"][release.row(step)]
    z = release.conditions(release.model, step, two_frames=two_frames)
    scores = release.score(z, main, steps, release.denoiser)
    with torch.no_grad():
        reference_z = release.conditions(release.reference, step, two_frames=two_frames)
        reference = release.score(reference_z, main, steps, release.reference_denoiser)
    unknown = release.unknown(step)[..., None].expand(-1, -1, 16).float()
    kept = tokens_of(golden[f"full.step{step}.sim_mask"]).float() if checks_consistency and step > 1 else unknown
    critical = tokens_of(golden["critic_mask"].expand(-1, 4, -1, -1)).float()
    trajectories = golden["seed_traj"]
    parts = [(scores.log_prob, kept * (1 - critical))]
    parts += [
        (release.score(z, trajectory, steps, release.denoiser).log_prob, kept * critical / len(trajectories))
        for trajectory in trajectories
    ]
    log_probs = torch.stack([part for part, _ in parts])
    weight = torch.stack([part.expand(STEPS, -1, -1, -1) for _, part in parts])
    loss, _ = policy_loss(
        log_probs.flatten(),
        log_probs.detach().flatten(),
        golden["advantages"][:, None, None].expand_as(log_probs).flatten(),
        weight.flatten(),
        ObjectiveConfig(),
        on_policy=True,
    )
    return loss, weighted_mean(k3(reference.mean - scores.mean), unknown.expand_as(scores.mean))


SETTINGS = {
    "plain": (token_losses, {}, True),
    "fix_head": (token_losses, {}, False),
    "fix_head_critic": (channel_losses, {"checks_consistency": False}, False),
    "fix_head_critic_sim": (channel_losses, {"checks_consistency": True}, False),
}


@pytest.mark.parametrize(
    ("name", "condition"),
    [
        ("plain", "two_frames"),
        ("fix_head", "two_frames"),
        ("fix_head_critic", "two_frames"),
        ("fix_head_critic_sim", "two_frames"),
        ("fix_head", "consistent_condition"),
        ("fix_head_critic_sim", "consistent_condition"),
    ],
)
def test_losses_and_gradients_equal_the_published_ones(flow, scalars, name, condition):
    losses, options, train_head = SETTINGS[name]
    two_frames = condition == "two_frames"
    published = scalars[f"flow.{name}" if two_frames else f"flow.{condition}.{name}"]
    flow.model.freeze(train_head=train_head)
    # Only the release's second frame passes through it.
    flow.model.policy.video_encoder.patch_embed.requires_grad_(two_frames)
    for step, expected in zip(flow.golden["mask_steps"].tolist(), published["per_mask_step"], strict=True):
        loss, penalty = losses(flow, step, two_frames=two_frames, **options)
        # Advantages of a group sum to 0: without a selection that differs between images, so does the value.
        assert -loss.item() == pytest.approx(expected["policy_loss"], rel=TOLERANCE, abs=1e-6)
        assert penalty.item() == pytest.approx(expected["kl_loss"], rel=2e-3)
        (loss + BETA * penalty).backward()

    policy = {key: p.grad for key, p in flow.model.policy.named_parameters() if not key.startswith("mask_embed.")}
    head = {f"image_decoder.{key}": p.grad for key, p in flow.model.head.named_parameters()}
    without = {key for key, gradient in policy.items() if gradient is None}
    assert without == {key for key in published["ar_params_without_grad"] if not key.startswith("mask_embed.")}
    gradients = {key: gradient for key, gradient in (policy | head).items() if gradient is not None}
    assert any(key in head for key in gradients) == train_head
    for part, norm in ((policy, "accumulated_grad_norm_ar"), (head, "accumulated_grad_norm_head")):
        total = math.sqrt(sum(gradients[key].square().sum().item() for key in part if key in gradients))
        assert total == pytest.approx(published[norm], rel=TOLERANCE)
    if "accumulated_param_grad_norms" in published:
        norms = {key: gradient.norm().item() for key, gradient in gradients.items()}
        assert norms == pytest.approx(published["accumulated_param_grad_norms"], rel=1e-3)
    if two_frames:
        prefix = f"grad.{name}."
        tensors = {key.removeprefix(prefix): value for key, value in flow.golden.items() if key.startswith(prefix)}
        assert tensors
        for key, value in tensors.items():
            assert (gradients[key] - value).norm() < 1e-3 * value.norm(), key
