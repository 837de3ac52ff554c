"""Every module of NOVA against tensors recorded from the published code."""

import pytest
import torch

from margrpo.models.nova.layers import patchify, unpatchify
from margrpo.models.nova.policy import NOVAPolicy
from margrpo.rollout.denoising import TokenDenoiser
from tests.helpers import relative_error
from tests.models.nova.release import PROMPTS, two_frame_context

TOLERANCE = 2e-4
SCHEDULE_STEPS = [4, 6, 8, 16, 25, 32, 64, 128]


@pytest.fixture(scope="module")
def golden(recorded):
    return recorded("modules")


def known_of(golden, state):
    return golden[f"state_{state}.prev_ids"].squeeze(-1)


def flat(tokens, rows):
    """Lay out tokens of two samples under four rows, those of both guidance branches, as one list."""
    return tokens[torch.arange(rows) % len(tokens)].flatten(0, 1)


def test_prompts_are_tokenised_as_published(nova, golden):
    token_ids = nova.text_encoder.tokenizer(PROMPTS, add_special_tokens=False).input_ids
    lengths = golden["text.lengths"].tolist()
    assert [min(len(ids), 24) for ids in token_ids] == lengths
    assert [len(ids) > 24 for ids in token_ids] == [False, True]
    for ids, length, published in zip(token_ids, lengths, golden["text.input_ids"].tolist(), strict=True):
        assert ids[:length] == published[:length]


@torch.no_grad()
def test_text_states_and_tokens_equal_the_published_ones(nova, golden):
    states = nova.text_encoder.encoder(golden["text.input_ids"]).last_hidden_state
    assert relative_error(states, golden["text.phi_last_hidden"]) < TOLERANCE
    conditional = nova.encode(PROMPTS)["prompt_embeds"]
    unconditional = nova.unconditional()["prompt_embeds"].expand(2, -1, -1)
    assert relative_error(torch.cat([conditional, unconditional]), golden["text.prompt_embed"]) < TOLERANCE
    assert relative_error(nova.policy.text_embed(golden["text.prompt_embed"]), golden["text.tokens"]) < TOLERANCE


@torch.no_grad()
def test_positions_equal_the_published_ones(nova, golden):
    assert relative_error(nova.policy.video_positions, golden["pos.video_space"]) < TOLERANCE
    assert relative_error(nova.policy.image_positions, golden["pos.image_space"]) < TOLERANCE
    for frames in (1, 2):
        assert relative_error(nova.policy.video_pos_embed(frames), golden[f"pos.video_time_T{frames}"]) < TOLERANCE


@torch.no_grad()
def test_the_prefix_equals_the_published_condition(nova, golden, monkeypatch):
    context = nova.policy.prefix(golden["text.prompt_embed"])
    assert relative_error(context, golden["video.c"]) < TOLERANCE
    monkeypatch.setattr(NOVAPolicy, "encode_frames", lambda self, frame_tokens, text: frame_tokens)
    frame_tokens = nova.policy.prefix(golden["text.prompt_embed"])
    assert relative_error(frame_tokens, golden["video.c_in"].expand(4, -1, -1)) < TOLERANCE


@pytest.mark.parametrize(("state", "known_count"), [("a", 0), ("b", 20), ("c", 63)])
@torch.no_grad()
def test_conditions_equal_the_published_ones(nova, golden, state, known_count):
    known = known_of(golden, state)
    assert known.shape == (2, known_count)
    expected = golden[f"state_{state}.z"]
    repeats = len(expected) // 2
    latents = patchify(golden[f"state_{state}.x"], 2)
    prefix = {"context": golden["video.c"][: len(expected)]}
    z = nova.predict_condition(nova.policy, latents.repeat(repeats, 1, 1), known.repeat(repeats, 1), prefix)
    assert relative_error(z, expected) < TOLERANCE


@torch.no_grad()
def test_tokens_entering_the_image_encoder_equal_the_published_ones(nova, golden):
    embedded = nova.policy.image_encoder.patch_embed(patchify(golden["state_b.x"], 2))
    is_known = torch.zeros(2, 64, dtype=torch.bool).scatter(1, known_of(golden, "b"), True)
    tokens = torch.where(is_known[..., None], embedded, nova.policy.mask_embed.mask_token)
    assert relative_error(tokens, golden["state_b.z_in"]) < TOLERANCE


@pytest.mark.parametrize("state", ["a", "b"])
@torch.no_grad()
def test_the_modules_reproduce_the_two_frame_condition_of_the_published_training(nova, golden, state):
    x = golden[f"state_{state}.x"]
    context = two_frame_context(nova.policy, golden["text.prompt_embed"][:2], x)
    if state == "b":
        assert relative_error(context, golden["state_b.c_train_release"]) < TOLERANCE
    z = nova.policy(patchify(x, 2), known_of(golden, state), context)
    assert relative_error(z, golden[f"state_{state}.z_train_release"]) < TOLERANCE


@torch.no_grad()
def test_head_outputs_equal_the_published_ones_at_every_timestep(nova, golden):
    x = flat(patchify(golden["head.x_t"], 2)[:1], 2)
    z = golden["state_b.z"][[0, 2]].flatten(0, 1)
    for timestep, expected in zip(golden["head.timesteps"], golden["head.out"], strict=True):
        output = nova.head(x, timestep.expand(len(x)), z)
        assert relative_error(output.unflatten(0, (2, 64)), expected) < TOLERANCE


@torch.no_grad()
def test_head_outputs_equal_the_published_ones_with_a_timestep_for_each_row(nova, golden):
    x = flat(patchify(golden["head.x_t"], 2), 4)
    output = nova.head(x, golden["head.t_vec"].repeat_interleave(64), golden["state_b.z"].flatten(0, 1))
    assert relative_error(output.unflatten(0, (4, 64)), golden["head.out_t_vec"]) < TOLERANCE


@torch.no_grad()
def test_the_head_on_some_tokens_equals_the_published_one(nova, golden):
    rows, tokens = torch.arange(4)[:, None], golden["head.pred_ids"].squeeze(-1)
    x = patchify(golden["head.x_t"], 2)
    timestep = golden["head.timesteps"][2].expand(tokens.numel())
    output = nova.head(
        x[rows % 2, tokens].flatten(0, 1), timestep, golden["state_b.z"][rows, tokens].flatten(0, 1)
    ).unflatten(0, tokens.shape)
    expected = golden["head.out_pred_ids"]
    assert relative_error(output, expected[rows, tokens]) < TOLERANCE
    others = torch.ones(4, 64, dtype=torch.bool).scatter(1, tokens, False)
    assert torch.equal(x.repeat(2, 1, 1)[others], expected[others])


@torch.no_grad()
def test_the_head_sees_the_published_timestep_frequencies(nova, golden):
    seen = []
    hook = nova.head.time_cond_embed.timestep_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    nova.head.embed_timestep(golden["head.timesteps"])
    hook.remove()
    assert relative_error(seen[0], golden["head.freq_embed"]) < TOLERANCE


def test_patches_are_laid_out_as_published(golden):
    latents = torch.arange(4 * 16 * 16, dtype=torch.float32).view(1, 4, 16, 16)
    tokens = torch.arange(64 * 16, dtype=torch.float32).view(1, 64, 16)
    assert torch.equal(patchify(latents, 2), golden["patchify.out"])
    assert torch.equal(unpatchify(tokens, 2, 8, 8), golden["unpatchify.out"])


@pytest.mark.parametrize("steps", SCHEDULE_STEPS)
@pytest.mark.parametrize("tokens", [64, 256, 1024, 4096])
def test_mask_schedules_are_the_published_ones_without_zeros(nova, golden, monkeypatch, tokens, steps):
    monkeypatch.setattr(nova, "num_tokens", tokens)
    published = golden[f"schedule.tokens{tokens}.steps{steps}"].tolist()
    assert nova.mask_schedule(steps) == [count for count in published if count]


class Replayed(torch.nn.Module):
    """A head that answers with recorded outputs."""

    def __init__(self, outputs):
        super().__init__()
        self.outputs = outputs

    def embed_condition(self, z):
        return z

    def embed_timestep(self, timesteps):
        return torch.zeros(len(timesteps), 1)

    def denoise(self, x, embedding):
        return self.outputs


def test_guidance_equals_the_published_one(nova, golden):
    transition = nova.transition(4, 0.7, None)
    guided, outputs = golden["cfg.out_s5"].flatten(0, 1), golden["cfg.in"].unflatten(0, (2, -1)).flatten(1, 2)
    denoiser = TokenDenoiser(Replayed(outputs), transition, score_guided=True)
    conditions = denoiser.embed(torch.zeros(2 * len(guided), 1), guidance_scale=5.0)
    x_t = torch.zeros_like(guided)
    for step in range(4):
        steps = torch.full((len(guided),), step)
        actual = denoiser.score(conditions, x_t, x_t, steps).mean
        assert relative_error(actual, transition.moments(guided, x_t, steps)[0]) < TOLERANCE


@torch.no_grad()
def test_decoded_images_equal_the_published_ones(nova, golden):
    decoded = nova.vae.decode(golden["vae.latents"] / nova.vae.config.scaling_factor).sample[:, :, ::4, ::4]
    assert relative_error(decoded, golden["vae.decoded"]) < TOLERANCE
    images = nova.decode(patchify(golden["vae.latents"], 2))
    assert images.shape == (2, 3, 128, 128)
    assert images.dtype == torch.uint8
    difference = images[:, :, ::4, ::4].permute(0, 2, 3, 1).int() - golden["vae.uint8"].int()
    assert difference.abs().max() <= 1
    assert (difference == 0).float().mean() > 0.999
