"""Plain generation and the rollout, replayed with recorded noise against tensors of the published code."""

import math

import pytest
import torch
from safetensors.torch import load_file

from margrpo.models.nova.layers import patchify
from margrpo.objective.selection import top_fraction, uncertainty
from margrpo.rollout.config import RolloutConfig, SamplingConfig
from margrpo.rollout.denoising import TokenDenoiser
from margrpo.rollout.noise import Stream
from margrpo.rollout.plan import draw_plan
from margrpo.rollout.sampler import generate, roll_out
from tests.helpers import relative_error

TOLERANCE = 2e-4
PROMPTS = [
    "a photo of a car below a zebra",
    "two candles, a cow, four balloons, and three fish created a relaxing atmosphere",
]
SAMPLING = {"mask_steps": 6, "denoising_steps": 4, "guidance_scale": 5.0}


def tokens_of(latents):
    """Patchify latents [..., c, H, W] to tokens [..., N, C]."""
    return patchify(latents.flatten(0, -4), 2).unflatten(0, latents.shape[:-3])


def gather_tokens(tensor, tokens):
    """Take tokens [B, n] out of [..., B, N, C]."""
    index = tokens[..., None].expand(*tensor.shape[:-3], *tokens.shape, tensor.shape[-1])
    return tensor.gather(-2, index)


class RecordedNoise:
    """Order and noise of a recorded run; draws it did not record are NaN and must not be read."""

    def __init__(self, golden):
        self.recorded_order = golden["order"]
        self.draws = {"": self._draws(golden, ""), "seeds.": self._draws(golden, "seeds.")}

    @staticmethod
    def _draws(golden, prefix):
        if f"{prefix}noise.init" not in golden:
            return None
        initial = tokens_of(golden[f"{prefix}noise.init"])[:, None]
        if f"{prefix}noise.step" not in golden:
            return torch.cat([initial, torch.full_like(initial, math.nan).expand(-1, 4, -1, -1, -1)], dim=1)
        return torch.cat([initial, tokens_of(golden[f"{prefix}noise.step"])], dim=1)

    def order(self):
        return self.recorded_order

    def normal(self, stream, index, tokens, draws):
        noise = self.draws["seeds." if stream == Stream.TRAJECTORY else ""][index]
        assert len(noise) == draws
        return gather_tokens(noise, tokens)


class RecordingDenoiser(TokenDenoiser):
    """Keeps the conditions it embeds and the transitions it samples."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.embedded, self.traces = [], []

    def embed(self, z, guidance_scale=None):
        self.embedded.append(z)
        return super().embed(z, guidance_scale)

    def sample(self, *args, **options):
        end_points, trace = super().sample(*args, **options)
        self.traces.append(trace)
        return end_points, trace


def test_plain_generation_equals_the_published_sampler(nova, data_dir):
    golden = load_file(data_dir / "nova" / "generate_plain_flow.safetensors")
    assert nova.mask_schedule(6) == golden["num_preds"].tolist()
    denoiser = TokenDenoiser(nova.head, nova.transition(4, 0.7, None), score_guided=False)
    latents = generate(
        nova,
        nova.policy,
        nova.encode(PROMPTS),
        SamplingConfig(**SAMPLING),
        denoiser,
        RecordedNoise(golden),
        plain=True,
    )
    assert relative_error(latents, tokens_of(golden["latents"].squeeze(2))) < TOLERANCE
    difference = nova.decode(latents)[:, :, ::2, ::2].permute(0, 2, 3, 1).int() - golden["image_uint8"].int()
    assert difference.abs().max() <= 1
    assert (difference == 0).float().mean() > 0.99
    assert denoiser.head_tokens == 2 * 2 * 64 * 4


@pytest.fixture(scope="module")
def golden(data_dir):
    return load_file(data_dir / "nova" / "generate_logp_flow.safetensors")


@pytest.fixture(scope="module")
def replayed(nova, golden):
    """Replay the published rollout, training everything it kept: (config, starts, sampled, denoiser)."""
    config = RolloutConfig(
        **SAMPLING,
        trained_mask_steps=6,
        trained_denoising_steps=4,
        num_trajectories=3,
        critical_fraction=0.3,
        consistency_threshold=None,
        score_guided=True,
    )
    transition = nova.transition(4, config.noise_level, config.stochastic_steps)
    denoiser = RecordingDenoiser(nova.head, transition, score_guided=True)
    plan = draw_plan(config, nova.mask_schedule(6), transition.trainable_steps, seed=0, step=0)
    assert plan.trained == {index: [0, 1, 2, 3] for index in range(6)}
    condition = nova.encode(PROMPTS)
    sampled = roll_out(nova, condition, config, plan, denoiser, RecordedNoise(golden))
    assert relative_error(condition["prompt_embeds"], golden["prompt_embed"]) < TOLERANCE
    starts = [sum(plan.schedule[:index]) for index in range(6)]
    return config, starts, sampled, denoiser


def test_the_rollout_makes_the_published_latents(golden, replayed):
    _, starts, sampled, _ = replayed
    assert relative_error(sampled.latents, tokens_of(golden["latents"])) < TOLERANCE
    for step, (start, entering) in enumerate(zip(starts, tokens_of(golden["x_latent"]), strict=True)):
        known = torch.zeros(2, 64, 1).scatter(1, sampled.order[:, :start, None], 1.0)
        assert relative_error(sampled.latents * known, entering) < TOLERANCE, step


def test_the_rollout_walks_the_published_trajectories_of_all_unknown_tokens(golden, replayed):
    _, starts, sampled, denoiser = replayed
    initial, end_points = tokens_of(golden["noise.init"]), tokens_of(golden["xs_last"])
    for step, start in enumerate(starts):
        trace, unknown = denoiser.traces[step], sampled.order[:, start:]
        assert relative_error(trace.x_t[0].unflatten(0, unknown.shape), gather_tokens(initial[step], unknown)) == 0
        ends = trace.x_prev[-1].unflatten(0, unknown.shape)
        assert relative_error(ends, gather_tokens(end_points[step], unknown)) < TOLERANCE
        assert torch.equal(trace.x_prev[:-1], trace.x_t[1:])


def test_the_sampler_records_the_published_transitions(golden, replayed):
    _, starts, sampled, denoiser = replayed
    trace, unknown = denoiser.traces[3], sampled.order[:, starts[3] :]
    x_prev = trace.x_prev.unflatten(1, unknown.shape)
    log_prob = trace.log_prob.unflatten(1, unknown.shape)
    assert relative_error(x_prev, gather_tokens(tokens_of(golden["step_mid.xs"]), unknown)) < TOLERANCE
    expected = gather_tokens(tokens_of(golden["step_mid.logp"]), unknown).mean(-1)
    assert relative_error(log_prob, expected) < TOLERANCE


def test_conditions_equal_the_published_ones_and_the_composite_takes_each_from_the_step_that_predicts(golden, replayed):
    _, starts, sampled, denoiser = replayed
    unknown = sampled.order[:, starts[3] :]
    middle = denoiser.embedded[3].unflatten(0, (4, -1))
    assert relative_error(middle, gather_tokens(golden["z_mid"], unknown.repeat(2, 1))) < TOLERANCE
    composite = denoiser.embedded[6].unflatten(0, (2, 64))
    assert relative_error(composite, gather_tokens(golden["ar_latents_composite"], sampled.order)) < TOLERANCE


def test_extra_trajectories_equal_the_published_ones(golden, replayed):
    _, _, sampled, denoiser = replayed
    trace = denoiser.traces[6]
    ends = gather_tokens(tokens_of(golden["seeds.latents"]), sampled.order)
    assert relative_error(trace.x_prev[-1].unflatten(1, (2, 64)), ends) < TOLERANCE
    # The published sums run over the elements of all tokens; ours is a mean over channels.
    per_image = trace.log_prob.unflatten(2, (2, 64)).mean(-1)
    assert relative_error(per_image, golden["seeds.logp_sums"].transpose(0, 1) / (64 * 16)) < TOLERANCE


def test_decisions_are_published_transitions_of_critical_and_other_tokens(golden, replayed):
    config, starts, sampled, _ = replayed
    ends, seed_ends = tokens_of(golden["xs_last"]), tokens_of(golden["seeds.latents"])
    by_token = uncertainty(gather_tokens(seed_ends, sampled.order))
    critical = torch.zeros(2, 64, dtype=torch.bool).scatter(
        1, sampled.order, top_fraction(by_token, config.critical_fraction)
    )
    assert critical.sum(dim=1).tolist() == [19, 19]
    for mask_step in sampled.mask_steps:
        decisions, index = mask_step.decisions, mask_step.index
        assert len(decisions.token) == 2 * (64 - starts[index])
        image, token = decisions.image[decisions.place], decisions.token[decisions.place]
        is_critical = critical[image, token]
        assert torch.equal(decisions.weight, torch.where(is_critical, 1.0 / 3.0, 1.0))
        last = decisions.payload["step"] == 3
        others = last & ~is_critical
        assert (
            relative_error(decisions.payload["x_prev"][others], ends[index, image[others], token[others]]) < TOLERANCE
        )
        # Critical decisions come trajectory major, hence in three equal parts.
        for seed, rows in enumerate((last & is_critical).nonzero().squeeze(1).chunk(3)):
            expected = seed_ends[seed, image[rows], token[rows]]
            assert relative_error(decisions.payload["x_prev"][rows], expected) < TOLERANCE
        if index == 3:
            expected = tokens_of(golden["step_mid.logp"]).mean(-1)[decisions.payload["step"], image, token]
            assert relative_error(decisions.log_prob[~is_critical], expected[~is_critical]) < TOLERANCE


def test_scores_of_all_tokens_equal_the_published_ones(nova, golden):
    # The published rollout denoises tokens that are known already, too; so does this.
    denoiser = TokenDenoiser(nova.head, nova.transition(4, 0.7, None), score_guided=True)
    prefix = nova.prefix(nova.policy, {"prompt_embeds": golden["prompt_embed"]})
    null = nova.prefix(nova.policy, nova.unconditional())
    context = {"context": torch.cat([prefix["context"], null["context"].expand(2, -1, -1)])}
    all_tokens = torch.arange(64).expand(2, -1)
    noise = RecordedNoise(golden)
    for index, start in enumerate([0, *golden["num_preds"].cumsum(0)[:-1].tolist()]):
        latents, known = tokens_of(golden["x_latent"])[index], golden["order"][:, :start]
        with torch.no_grad():
            z = nova.predict_condition(nova.policy, latents.repeat(2, 1, 1), known.repeat(2, 1), context)
            conditions = denoiser.embed(z.flatten(0, 1), 5.0)
            draws = noise.normal(Stream.PREDICTED, index, all_tokens, 5).flatten(1, 2)
            end_points, trace = denoiser.sample(conditions, draws, [0, 1, 2, 3])
            steps = torch.arange(4).repeat_interleave(128)
            scores = denoiser.score(
                conditions.select(torch.arange(128).repeat(4)),
                trace.x_t.flatten(0, 1),
                trace.x_prev.flatten(0, 1),
                steps,
            )
        assert relative_error(end_points.unflatten(0, (2, 64)), tokens_of(golden["xs_last"])[index]) < TOLERANCE
        sums = scores.log_prob.unflatten(0, (4, 2, 64)).mean(-1)
        assert relative_error(sums, golden["logp_sums"][index] / (64 * 16)) < TOLERANCE
        if index == 3:
            assert (
                relative_error(scores.mean.unflatten(0, (4, 2, 64)), tokens_of(golden["step_mid.out_means"]))
                < TOLERANCE
            )
            log_prob = tokens_of(golden["step_mid.logp"]).mean(-1)
            assert relative_error(scores.log_prob.unflatten(0, (4, 2, 64)), log_prob) < TOLERANCE
