"""What the rollout and the update rely on in Harmon's policy, beyond the numbers of the published code."""

import copy

import pytest
import torch

from margrpo.models.base import concatenate_rows, expand_row
from margrpo.models.harmon.text import CLOSING, PromptTokenizer
from margrpo.rollout.config import RolloutConfig, SamplingConfig
from margrpo.rollout.denoising import TokenDenoiser
from margrpo.rollout.noise import SampleNoise
from margrpo.rollout.plan import draw_plan
from margrpo.rollout.sampler import generate, roll_out
from margrpo.rollout.types import Rollout
from margrpo.update import image_prefix, score

SHORT, LONG = "a small bird", "a red cube on top of a blue ball"
CONFIG = RolloutConfig(
    group_size=2,
    mask_steps=4,
    denoising_steps=4,
    guidance_scale=3.0,
    trained_mask_steps=4,
    trained_denoising_steps=3,
)


@pytest.fixture
def state():
    """Two half-finished images: (latents, known)."""
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(2, 64, 16, generator=generator)
    return latents, torch.rand(2, 64, generator=generator).argsort(dim=1)[:, :30]


def prefix_of(model, prompts):
    return model.prefix(model.policy, model.encode(prompts))


class Spy:
    """Keeps what a model's policy is shown, and what it answers."""

    def __init__(self, model, monkeypatch):
        self.calls = []
        predict = model.predict_condition

        def watched(policy, latents, known, prefix):
            z = predict(policy, latents, known, prefix)
            self.calls.append((policy, latents, known, z))
            return z

        monkeypatch.setattr(model, "predict_condition", watched)


def rolled_out(model, config=CONFIG, prompts=(SHORT, LONG)):
    """Roll out: (rollout, denoiser)."""
    transition = model.transition(config.denoising_steps, config.noise_level, config.stochastic_steps)
    plan = draw_plan(config, model.mask_schedule(config.mask_steps), transition.trainable_steps, seed=0, step=0)
    denoiser = TokenDenoiser(model.head, transition, score_guided=config.score_guided)
    batch = len(prompts) * config.group_size
    noise = SampleNoise(list(range(batch)), model.num_tokens, model.token_channels, torch.device("cpu"))
    condition = model.encode(list(prompts))
    sampled = roll_out(model, condition, config, plan, denoiser, noise)
    rewards = torch.arange(batch, dtype=torch.float32)
    images = torch.zeros(batch, 3, 1, 1, dtype=torch.uint8)
    fields = (sampled.order, sampled.latents, sampled.mask_steps, images, rewards, {})
    return Rollout(0, config, list(prompts), condition, *fields), denoiser


@torch.no_grad()
def test_a_prompt_gives_the_same_condition_alone_and_padded(harmon, state):
    latents, known = state
    together = prefix_of(harmon, [SHORT, LONG])
    alone = prefix_of(harmon, [SHORT])
    assert alone["keys"].shape[1] < together["keys"].shape[1]
    padded = harmon.predict_condition(harmon.policy, latents, known, together)[:1]
    expected = harmon.predict_condition(harmon.policy, latents[:1], known[:1], alone)
    torch.testing.assert_close(padded, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_cached_text_and_image_tokens_are_read_as_one_sequence(harmon, state):
    latents, known = state
    prefix = prefix_of(harmon, [SHORT, LONG])
    encoded = harmon.policy.encode(latents, known)
    actual = harmon.language_model(encoded, 4, prefix["keys"], prefix["values"], prefix["length"])
    part = harmon.language_model
    model = part.llm["model"]
    for row, prompt in enumerate([SHORT, LONG]):
        ids, _ = harmon.prompts.conditional([prompt])
        tokens = part.proj_in(torch.cat([encoded[row, 4:], encoded[row, :4]]))
        sequence = torch.cat([model.embed_tokens(ids[0]), tokens])[None]
        states = model(inputs_embeds=sequence, use_cache=False).last_hidden_state[0, ids.shape[1] :]
        expected = encoded[row] + part.proj_out(torch.cat([states[-4:], states[:-4]]))
        torch.testing.assert_close(actual[row], expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_rows_of_different_length_are_stacked_without_changing_a_condition(harmon, state):
    latents, known = state
    conditional = prefix_of(harmon, [LONG])
    unconditional = harmon.prefix(harmon.policy, harmon.unconditional())
    stacked = concatenate_rows(conditional, expand_row(unconditional, 1))
    z = harmon.predict_condition(harmon.policy, latents[:1].repeat(2, 1, 1), known[:1].repeat(2, 1), stacked)
    for row, prefix in enumerate((conditional, unconditional)):
        expected = harmon.predict_condition(harmon.policy, latents[:1], known[:1], prefix)
        torch.testing.assert_close(z[row : row + 1], expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_prefix_does_not_grow_when_it_is_used(harmon, state):
    latents, known = state
    prefix = prefix_of(harmon, [SHORT, LONG])
    before = {name: tensor.clone() for name, tensor in prefix.items()}
    first, second, third = (harmon.predict_condition(harmon.policy, latents, known, prefix) for _ in range(3))
    assert torch.equal(first, second)
    assert torch.equal(first, third)
    assert all(torch.equal(prefix[name], tensor) for name, tensor in before.items())


@torch.no_grad()
def test_conditions_depend_neither_on_the_order_of_known_tokens_nor_on_unknown_ones(harmon, state):
    latents, known = state
    prefix = prefix_of(harmon, [SHORT, LONG])
    expected = harmon.predict_condition(harmon.policy, latents, known, prefix)
    is_known = torch.zeros(2, 64, dtype=torch.bool).scatter(1, known, True)
    hidden = latents.masked_fill(~is_known[..., None], float("nan"))
    assert torch.equal(harmon.predict_condition(harmon.policy, hidden, known.flip(1), prefix), expected)


def test_gradients_flow_through_frozen_head_and_language_model_into_every_part_of_the_policy(fresh_harmon, state):
    latents, known = state
    model = fresh_harmon
    model.freeze(train_head=False)
    before = copy.deepcopy(model.state_dict())
    z = model.predict_condition(model.policy, latents, known, prefix_of(model, [SHORT, LONG])).flatten(0, 1)
    denoiser = TokenDenoiser(model.head, model.transition(4, 1.0, None), score_guided=False)
    x = torch.randn(len(z), 16, generator=torch.Generator().manual_seed(1))
    denoiser.score(denoiser.embed(z), x, 0.9 * x, torch.full((len(z),), 1)).log_prob.sum().backward()
    for key, parameter in model.named_parameters():
        if key.startswith("policy.") and key != "policy.class_emb.weight":
            assert parameter.grad is not None, key
            assert parameter.grad.abs().max() > 0, key
        else:
            assert not parameter.requires_grad, key
            assert parameter.grad is None, key
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_the_language_model_reads_the_known_tokens_before_the_buffer_and_causally(fresh_harmon, state):
    latents, known = state
    model = fresh_harmon
    model.freeze(train_head=False)
    encoded = model.policy.encode(latents, known).detach().requires_grad_(True)
    prefix = prefix_of(model, [SHORT, LONG])
    x = model.language_model(encoded, 4, prefix["keys"], prefix["values"], prefix["length"])
    (gradient,) = torch.autograd.grad(x[:, 0].sum(), encoded)
    assert (gradient[:, 4:].abs().amax(dim=2) > 0).all()
    assert (gradient[:, 1:4] == 0).all()


class TextCounter:
    """Counts the rows of text that run through the language model."""

    def __init__(self, model):
        self.rows = 0
        self.hook = model.language_model.llm["model"].register_forward_pre_hook(self._count)

    def _count(self, module, arguments):
        if arguments[0] is not None:
            self.rows += len(arguments[0])


@pytest.mark.parametrize("score_guided", [False, True])
def test_text_runs_through_the_language_model_once_per_prompt(fresh_harmon, score_guided):
    """Not once per mask step, image of a group, unconditional branch, or scoring."""
    config = RolloutConfig(**{**CONFIG.__dict__, "score_guided": score_guided})
    counter = TextCounter(fresh_harmon)
    rollout, denoiser = rolled_out(fresh_harmon, config)
    prefix = image_prefix(fresh_harmon, fresh_harmon.policy, rollout)
    for mask_step in rollout.mask_steps:
        score(fresh_harmon, fresh_harmon.policy, prefix, rollout, mask_step, denoiser)
    counter.hook.remove()
    assert counter.rows == 2


def test_both_branches_see_the_tokens_of_all_steps_before(fresh_harmon, monkeypatch):
    """The release shows its unconditional branch the tokens of the last step as zeros."""
    spy = Spy(fresh_harmon, monkeypatch)
    rollout, _ = rolled_out(fresh_harmon)
    assert len(spy.calls) == 4
    for (_, latents, known, _), start in zip(spy.calls, [0, 5, 19, 40], strict=True):
        conditional, unconditional = latents.chunk(2)
        assert torch.equal(conditional, unconditional)
        assert torch.equal(*known.chunk(2))
        assert torch.equal(known[:4], rollout.order[:, :start])
        shown = conditional.gather(1, known[:4, :, None].expand(-1, -1, 16))
        final = rollout.latents.gather(1, known[:4, :, None].expand(-1, -1, 16))
        assert torch.equal(shown, final)


def test_the_update_shows_the_policy_what_it_knew_before_the_step_and_trains_what_the_step_predicts(
    fresh_harmon, monkeypatch
):
    """The release shows it the mask after the step, and so trains none of the tokens that the step predicted."""
    spy = Spy(fresh_harmon, monkeypatch)
    rollout, denoiser = rolled_out(fresh_harmon)
    sampling = list(spy.calls)
    prefix = image_prefix(fresh_harmon, fresh_harmon.policy, rollout)
    for mask_step in rollout.mask_steps:
        with torch.no_grad():
            score(fresh_harmon, fresh_harmon.policy, prefix, rollout, mask_step, denoiser)
        _, _, known, z = spy.calls[-1]
        _, _, sampled_known, sampled_z = sampling[mask_step.index]
        assert torch.equal(known, sampled_known[:4])
        torch.testing.assert_close(z, sampled_z[:4], rtol=1e-4, atol=1e-5)
        trained = set(zip(mask_step.decisions.image.tolist(), mask_step.decisions.token.tolist(), strict=True))
        predicted = rollout.order[:, mask_step.start : mask_step.stop].tolist()
        assert trained >= {(image, token) for image, tokens in enumerate(predicted) for token in tokens}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"score_guided": True},
        {"trajectory_source": "per_step"},
        {"include_generating_trajectory": True},
        {"guidance_scale": 1.0},
    ],
    ids=str,
)
@torch.no_grad()
def test_the_update_scores_what_the_rollout_recorded(fresh_harmon, options):
    rollout, denoiser = rolled_out(fresh_harmon, RolloutConfig(**{**CONFIG.__dict__, **options}))
    prefix = image_prefix(fresh_harmon, fresh_harmon.policy, rollout)
    for mask_step in rollout.mask_steps:
        scores = score(fresh_harmon, fresh_harmon.policy, prefix, rollout, mask_step, denoiser)
        torch.testing.assert_close(scores.log_prob, mask_step.decisions.log_prob, rtol=1e-4, atol=1e-3)
        assert (mask_step.decisions.payload["step"] < 3).all()


@torch.no_grad()
def test_the_variance_of_the_rollout_is_a_constant_of_the_update(fresh_harmon):
    rollout, denoiser = rolled_out(fresh_harmon)
    mask_step = rollout.mask_steps[1]
    payload = dict(mask_step.decisions.payload)
    changed = copy.deepcopy(fresh_harmon.policy)
    changed.diffusion_pos_embed_learned.add_(0.1)
    prefix = image_prefix(fresh_harmon, changed, rollout)
    scores = score(fresh_harmon, changed, prefix, rollout, mask_step, denoiser)
    assert torch.equal(scores.std, payload["std"])
    assert payload["std"].shape == payload["x_t"].shape
    del payload["std"]
    z = fresh_harmon.predict_condition(changed, rollout.latents, rollout.order[:, : mask_step.start], prefix)
    decisions = mask_step.decisions
    conditions = denoiser.embed(z[decisions.image, decisions.token]).select(decisions.place)
    free = denoiser.score(conditions, **payload)
    assert torch.equal(free.mean, scores.mean)
    assert not torch.allclose(free.std, scores.std, rtol=1e-3)


def test_dropout_of_the_checkpoint_is_off(harmon):
    blocks = [*harmon.policy.encoder_blocks, *harmon.policy.decoder_blocks]
    assert {block.attn.attn_drop.p for block in blocks} == {0.1}
    assert {block.attn.proj_drop.p for block in blocks} == {0.1}
    assert not any(module.training for module in harmon.modules())


def test_the_smallest_samplers_work_without_guidance(harmon):
    sampling = SamplingConfig(mask_steps=1, denoising_steps=2, guidance_scale=1.0)
    denoiser = TokenDenoiser(harmon.head, harmon.transition(2, 1.0, None), score_guided=False)
    noise = SampleNoise([1, 2], 64, 16, torch.device("cpu"))
    latents = generate(harmon, harmon.policy, harmon.encode([SHORT]), sampling, denoiser, noise)
    assert latents.dtype == torch.float32
    assert latents.isfinite().all()
    assert (latents != 0).any(dim=2).all()
    assert denoiser.head_tokens == 2 * 2 * 64


def test_a_flow_option_is_refused(harmon):
    with pytest.raises(ValueError, match="stochastic_steps=3 needs a flow checkpoint; for Harmon use null"):
        harmon.transition(4, 0.7, 3)


def test_denoising_steps_are_spaced_as_the_checkpoint_says(harmon):
    assert harmon.transition(4, 0.7, None).timesteps.tolist() == [750, 500, 250, 0]


def test_a_prompt_that_is_too_long_is_cut_inside_the_template(harmon):
    tokenizer = PromptTokenizer(harmon.prompts.tokenizer, length=24)
    prompts = [SHORT, f"{LONG} and {LONG}"]
    assert tokenizer.count_truncated(prompts) == 1
    assert harmon.count_truncated(prompts) == 0
    ids, length = tokenizer.conditional(prompts)
    whole, _ = harmon.prompts.conditional(prompts)
    closing = tokenizer.tokenizer(CLOSING).input_ids
    assert length.flatten().tolist()[1] == 24
    assert ids[1].tolist() == whole[1, : 24 - len(closing)].tolist() + closing
