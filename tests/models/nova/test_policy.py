"""What the rollout and the update rely on in NOVA's policy, beyond the numbers of the published code."""

import copy
import math

import pytest
import torch

from margrpo.models.base import concatenate_rows, expand_row, repeat_rows
from margrpo.rollout.denoising import TokenDenoiser
from tests.models.nova.release import PROMPTS


@pytest.fixture
def state(nova):
    """Two half-finished images: (latents, known, prefix)."""
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(2, 64, 16, generator=generator)
    known = torch.rand(2, 64, generator=generator).argsort(dim=1)[:, :30]
    with torch.no_grad():
        return latents, known, nova.prefix(nova.policy, nova.encode(PROMPTS))


def test_gradients_flow_through_the_frozen_head_into_every_part_of_the_policy(fresh_nova, state):
    latents, known, _ = state
    model = fresh_nova
    model.freeze(train_head=False)
    before = copy.deepcopy(model.head.state_dict())
    prefix = model.prefix(model.policy, model.encode(PROMPTS))
    z = model.predict_condition(model.policy, latents, known, prefix).flatten(0, 1)
    denoiser = TokenDenoiser(model.head, model.transition(4, 0.7, None), score_guided=False)
    x = torch.randn(len(z), 16, generator=torch.Generator().manual_seed(1))
    denoiser.score(denoiser.embed(z), x, 0.9 * x, torch.full((len(z),), 1)).log_prob.sum().backward()

    trained = {key for key, parameter in model.policy.named_parameters() if parameter.requires_grad}
    frozen = {"video_encoder.patch_embed.proj.weight", "video_encoder.patch_embed.proj.bias"}
    assert trained == {key for key, _ in model.policy.named_parameters()} - frozen
    for key, parameter in model.named_parameters():
        if key.removeprefix("policy.") in trained:
            assert parameter.grad is not None, key
            assert parameter.grad.abs().max() > 0, key
        else:
            assert parameter.grad is None, key
    assert all(torch.equal(value, before[key]) for key, value in model.head.state_dict().items())


@pytest.mark.parametrize("train_head", [False, True])
def test_freeze_leaves_gradients_to_the_policy_and_to_the_head_when_asked(fresh_nova, train_head):
    fresh_nova.freeze(train_head=train_head)
    trained = {key.split(".")[0] for key, p in fresh_nova.named_parameters() if p.requires_grad}
    assert trained == ({"policy", "head"} if train_head else {"policy"})


def test_the_empty_prompt_is_the_unconditional_row_and_both_are_the_null_rows(nova):
    unconditional = nova.unconditional()["prompt_embeds"]
    null_rows = nova.policy.text_embed.weight[:24]
    assert unconditional.shape == (1, 24, 32)
    assert torch.equal(unconditional[0], null_rows)
    assert torch.equal(nova.encode([""])["prompt_embeds"], unconditional)


def test_rows_after_a_prompt_are_null_rows(nova):
    short, long = "two candles", "a photo of a car"
    embeds = nova.encode([short, long, ""])["prompt_embeds"]
    null_rows = nova.policy.text_embed.weight[:24]
    for row, prompt in zip(embeds, (short, long, ""), strict=True):
        count = len(nova.text_encoder.tokenizer(prompt).input_ids)
        assert torch.equal(row[count:], null_rows[count:])
        assert all(not torch.equal(a, b) for a, b in zip(row[:count], null_rows[:count], strict=True))


def test_a_prompt_is_encoded_the_same_alone_and_beside_a_longer_one(nova):
    alone = nova.encode(["two candles"])["prompt_embeds"]
    beside = nova.encode(["two candles", "a photo of a car"])["prompt_embeds"]
    torch.testing.assert_close(beside[:1], alone)


def test_long_prompts_are_truncated_and_counted(nova):
    prompt = PROMPTS[1]
    assert len(nova.text_encoder.tokenizer(prompt).input_ids) > 24
    embeds = nova.encode(["two candles", prompt, prompt])["prompt_embeds"]
    assert nova.count_truncated(["two candles", prompt, prompt]) == 2
    assert embeds.shape == (3, 24, 32)
    null_rows = nova.policy.text_embed.weight[:24]
    assert not (embeds[1] == null_rows).all(dim=-1).any()


@torch.no_grad()
def test_a_prefix_computed_once_per_prompt_equals_those_of_repeated_prompts(nova):
    condition = nova.encode(PROMPTS)
    once = repeat_rows(nova.prefix(nova.policy, condition), 3)
    many = nova.prefix(nova.policy, repeat_rows(condition, 3))
    assert once.keys() == many.keys()
    for name in once:
        torch.testing.assert_close(once[name], many[name])


@torch.no_grad()
def test_the_guidance_branches_do_not_see_each_other(nova, state):
    latents, known, prefix = state
    null = expand_row(nova.prefix(nova.policy, nova.unconditional()), 2)
    both = nova.predict_condition(
        nova.policy, latents.repeat(2, 1, 1), known.repeat(2, 1), concatenate_rows(prefix, null)
    )
    for rows, half in zip(both.chunk(2), (prefix, null), strict=True):
        torch.testing.assert_close(rows, nova.predict_condition(nova.policy, latents, known, half))


@torch.no_grad()
def test_the_order_of_known_tokens_does_not_matter(nova, state):
    latents, known, prefix = state
    shuffled = known[:, torch.randperm(30, generator=torch.Generator().manual_seed(2))]
    assert not torch.equal(shuffled, known)
    z, z_shuffled = (nova.predict_condition(nova.policy, latents, ids, prefix) for ids in (known, shuffled))
    torch.testing.assert_close(z_shuffled, z, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("count", [0, 30])
@torch.no_grad()
def test_latents_of_unknown_tokens_are_never_read(nova, state, count):
    latents, known, prefix = state
    known = known[:, :count]
    is_known = torch.zeros(2, 64, 1).scatter(1, known[..., None], 1.0).bool()
    unreadable = torch.where(is_known, latents, math.nan)
    z = nova.predict_condition(nova.policy, unreadable, known, prefix)
    assert torch.equal(z, nova.predict_condition(nova.policy, latents, known, prefix))


@torch.no_grad()
def test_latents_of_known_tokens_are_read_at_their_place(nova, state):
    latents, known, prefix = state
    z = nova.predict_condition(nova.policy, latents, known, prefix)
    changed = latents.clone()
    changed[0, known[0, 5]] += 1.0
    z_changed = nova.predict_condition(nova.policy, changed, known, prefix)
    assert not torch.allclose(z_changed[0], z[0])
    torch.testing.assert_close(z_changed[1], z[1])
    swapped = latents.clone()
    swapped[0, known[0, :2]] = latents[0, known[0, :2].flip(0)]
    assert not torch.allclose(nova.predict_condition(nova.policy, swapped, known, prefix)[0], z[0])
