"""Every module of Harmon against tensors recorded from the published code."""

import pytest
import torch

from margrpo.diffusion.learned_variance import LearnedVarianceTransition, respaced_timesteps
from margrpo.models.harmon import Harmon
from margrpo.rollout.denoising import TokenDenoiser
from tests.helpers import relative_error

TOLERANCE = 2e-5
STATES = [("all_masked", 0), ("half", 27), ("last", 63)]
SPACINGS = ["4", "ddim4", "25", "100"]


@pytest.fixture(scope="module")
def text(recorded):
    return recorded("text")


@pytest.fixture(scope="module")
def stages(recorded):
    return recorded("stages")


@pytest.fixture(scope="module")
def golden(recorded):
    return recorded("diffloss")


@pytest.fixture(scope="module")
def prefix(harmon, text):
    """The prefix of two prompts and of two unconditional rows, padded together as the published code does."""
    return harmon._read(text["input_ids"].long(), text["attention_mask"].sum(1, keepdim=True).long())


def known_of(stages, state):
    rows = [(row == 0).nonzero().squeeze(1) for row in stages[f"{state}/mask"]]
    return torch.stack(rows)


def prompt_of(template):
    return template.removeprefix("<|im_start|>user\nGenerate an image: ").split("<|im_end|>")[0]


def test_prompts_are_tokenised_as_published(harmon, text, scalars):
    lengths = text["attention_mask"].sum(1).tolist()
    ids, count = harmon.prompts.conditional([prompt_of(template) for template in scalars["prompts"][:2]])
    assert count.flatten().tolist() == lengths[:2]
    assert torch.equal(ids, text["input_ids"][:2])
    ids, count = harmon.prompts.unconditional()
    assert count.tolist() == [lengths[2:3]]
    assert torch.equal(ids[0], text["input_ids"][2, : lengths[2]])


@torch.no_grad()
def test_keys_and_values_of_the_text_equal_the_published_ones(prefix, text):
    for layer in range(2):
        for name, letter in (("keys", "k"), ("values", "v")):
            actual = prefix[name][:, :, layer].transpose(1, 2)
            assert relative_error(actual, text[f"{letter}{layer}"]) < TOLERANCE


@torch.no_grad()
def test_positions_are_resized_as_published(harmon, stages):
    policy = harmon.policy
    table = torch.cat(policy._positions(policy.encoder_pos_embed_learned))
    assert relative_error(table[None], stages["pos8x8/encoder"]) < TOLERANCE
    assert relative_error(policy._resized(policy.diffusion_pos_embed_learned), stages["pos8x8/diffusion"]) < TOLERANCE


@pytest.mark.parametrize(("state", "known_count"), STATES)
@torch.no_grad()
def test_every_stage_equals_the_published_one(harmon, stages, prefix, state, known_count):
    known, tokens = known_of(stages, state), stages[f"{state}/tokens"]
    assert known.shape == (4, known_count)
    rows = len(stages[f"{state}/mae_enc"])
    encoded = harmon.policy.encode(tokens, known)
    assert relative_error(encoded[:rows], stages[f"{state}/mae_enc"]) < TOLERANCE
    x = harmon.language_model(encoded, 4, prefix["keys"], prefix["values"], prefix["length"])
    assert relative_error(x[:rows], stages[f"{state}/x_res"]) < TOLERANCE
    z = harmon.policy.decode(x, known)
    assert relative_error(z[:rows], stages[f"{state}/z"]) < TOLERANCE


@pytest.mark.parametrize(("state", "known_count"), STATES)
@torch.no_grad()
def test_the_language_model_reads_the_published_tokens_at_the_published_positions(
    harmon, stages, prefix, state, known_count
):
    seen = {}
    model = harmon.language_model.llm["model"]
    hooks = [
        model.register_forward_pre_hook(lambda _, args: seen.update(positions=args[2], tokens=args[4])),
        model.register_forward_hook(lambda _, args, output: seen.update(states=output.last_hidden_state)),
    ]
    known = known_of(stages, state)
    harmon.predict_condition(harmon.policy, stages[f"{state}/tokens"], known, prefix)
    for hook in hooks:
        hook.remove()
    rows = len(stages[f"{state}/mae_enc"])
    assert torch.equal(seen["positions"], stages[f"{state}/position_ids"].long())
    assert relative_error(seen["tokens"][:rows], stages[f"{state}/proj_in_img_then_buf"]) < TOLERANCE
    assert relative_error(seen["states"][:rows], stages[f"{state}/llm_hidden_img_then_buf"]) < TOLERANCE


@torch.no_grad()
def test_conditions_at_the_native_grid_equal_the_published_ones(checkpoint, stages, prefix):
    model = Harmon.from_pretrained(checkpoint, image_size=64)
    assert model.num_tokens == 16
    known = known_of(stages, "native4x4")
    z = model.predict_condition(model.policy, stages["native4x4/tokens"], known, prefix)
    assert relative_error(z, stages["native4x4/z"]) < TOLERANCE


@torch.no_grad()
def test_head_outputs_equal_the_published_ones(harmon, golden):
    timesteps = golden["t"].float()
    assert relative_error(harmon.head.embed_timestep(timesteps), golden["t_emb"]) < TOLERANCE
    assert relative_error(harmon.head(golden["x"], timesteps, golden["c"]), golden["out"]) < TOLERANCE


@torch.no_grad()
def test_guided_head_outputs_equal_the_published_ones(harmon, golden):
    transition = LearnedVarianceTransition([0, 999])
    x, timesteps, z = golden["x"][:6], golden["t"][:6].float(), golden["c"]
    conditional, unconditional = harmon.head(x, timesteps, z[:6]), harmon.head(x, timesteps, z[6:])
    guided = transition.guide(conditional, unconditional, 3.0)
    assert relative_error(guided, golden["out_cfg3"][:6]) < TOLERANCE


@pytest.mark.parametrize("spacing", SPACINGS)
@torch.no_grad()
def test_posteriors_equal_the_published_ones(harmon, golden, spacing):
    transition = LearnedVarianceTransition(respaced_timesteps(spacing))
    step = transition.num_steps - 1 - golden[f"pmv/{spacing}/t_index"].long()
    prediction = harmon.head(golden["x"], transition.timesteps[step], golden["c"])
    mean, std = transition.moments(prediction, golden["x"], step)
    assert relative_error(mean, golden[f"pmv/{spacing}/mean"]) < TOLERANCE
    assert relative_error(2 * std.log(), golden[f"pmv/{spacing}/log_variance"]) < TOLERANCE
    clean = transition.x_start(prediction, golden["x"], step)
    assert relative_error(clean, golden[f"pmv/{spacing}/pred_xstart"]) < TOLERANCE


@pytest.mark.parametrize("spacing", ["4", "ddim4"])
@pytest.mark.parametrize(("guidance_scale", "temperature"), [(1.0, 1.0), (3.0, 1.0), (3.0, 0.8)])
def test_the_head_samples_the_published_trajectories(harmon, golden, spacing, guidance_scale, temperature):
    prefix = f"sample/{spacing}/cfg{guidance_scale}_temp{temperature}"
    guided = guidance_scale != 1.0
    rows = 4 if guided else 8
    denoiser = TokenDenoiser(harmon.head, LearnedVarianceTransition(respaced_timesteps(spacing)), score_guided=guided)
    conditions = denoiser.embed(golden["c"][:8], guidance_scale if guided else None)
    # A temperature is nothing but smaller noise.
    noise = torch.cat([golden[f"{prefix}/init_noise"][None], temperature * golden[f"{prefix}/eps"][:, :rows]])
    end_points, trace = denoiser.sample(conditions, noise, [0, 1, 2, 3])
    assert relative_error(end_points, golden[f"{prefix}/final"][:rows]) < TOLERANCE
    assert relative_error(trace.x_prev, golden[f"{prefix}/xt_prev"][:, :rows]) < TOLERANCE
    if temperature == 1.0:
        log_prob = golden[f"{prefix}/log_prob"][:, :rows].mean(-1)
        assert relative_error(trace.log_prob, log_prob) < TOLERANCE


@pytest.mark.parametrize(("tokens", "steps"), [(64, 3), (64, 4), (64, 5), (256, 64), (1024, 64), (1024, 32)])
def test_mask_schedules_are_the_published_ones(harmon, scalars, monkeypatch, tokens, steps):
    monkeypatch.setattr(harmon, "num_tokens", tokens)
    assert harmon.mask_schedule(steps) == scalars["mask_schedule"][f"L{tokens}_n{steps}"]


@pytest.mark.parametrize("steps", [1, 2, 64, 100])
def test_every_token_is_predicted_once_however_many_steps_there_are(harmon, steps):
    schedule = harmon.mask_schedule(steps)
    assert sum(schedule) == 64
    assert min(schedule) >= 1


@torch.no_grad()
def test_encoded_and_decoded_images_equal_the_published_ones(harmon, recorded):
    golden = recorded("vae")
    images = golden["image_uint8"].float() / 127.5 - 1
    moments = harmon.vae.quant_conv(harmon.vae.encoder(images))
    assert relative_error(moments, golden["moments"]) < TOLERANCE
    assert relative_error(harmon.vae.encode(images), golden["latents_scaled_bmnc"].flatten(1, 2)) < TOLERANCE
    decoded = harmon.vae.decode(golden["z_tokens_bmnc"].flatten(1, 2), 4, 4)
    assert relative_error(decoded, golden["decoded"]) < TOLERANCE
