"""What holds for every model family, through the same rollout, objective and module."""

import copy
import dataclasses
from functools import partial

import lightning as L
import pytest
import torch

from margrpo.models.harmon import Harmon
from margrpo.models.nova import NOVA
from margrpo.module import MARGRPO, OptimizerConfig
from margrpo.objective.loss import ObjectiveConfig
from margrpo.rewards.brightness import Brightness
from margrpo.rollout import datamodule
from margrpo.rollout.config import RolloutConfig
from margrpo.rollout.datamodule import RolloutDataModule
from margrpo.rollout.denoising import TokenDenoiser
from margrpo.rollout.noise import SampleNoise
from margrpo.rollout.prompts import PromptBatch
from margrpo.rollout.sampler import generate
from margrpo.rollout.types import Decisions
from margrpo.update import Reference, image_prefix, mask_step_loss, score

LOADERS = {"nova": NOVA.from_pretrained, "harmon": partial(Harmon.from_pretrained, image_size=128)}
FROZEN_IN_POLICY = {
    "nova": {"video_encoder.patch_embed.proj.weight", "video_encoder.patch_embed.proj.bias"},
    "harmon": {"class_emb.weight"},
}
ROLLOUT = RolloutConfig(
    group_size=2, mask_steps=6, denoising_steps=4, trained_mask_steps=3, trained_denoising_steps=2, guidance_scale=3.0
)
VARIANTS = [
    {},
    {"guidance_scale": 1.0},
    {"score_guided": True},
    {"trajectory_source": "per_step"},
    {"include_generating_trajectory": True},
    {"loss_tokens": "predicted", "critical_fraction": 0.0},
]
PROMPTS = ["a photo of a car below a zebra", "two candles"]


@pytest.fixture(params=LOADERS)
def family(request) -> str:
    return request.param


@pytest.fixture
def model(family, data_dir):
    return LOADERS[family](data_dir / family / "checkpoint")


@pytest.fixture
def data(tmp_path):
    """Return a function that builds a data module of the two prompts."""

    def run(rollout=ROLLOUT):
        prompts = tmp_path / "prompts.txt"
        prompts.write_text("\n".join(PROMPTS), encoding="utf-8")
        return RolloutDataModule(str(prompts), [Brightness()], rollout=rollout, prompts_per_step=2)

    return run


@pytest.fixture
def fit(data, tmp_path):
    """Return a function that trains a module on two rollouts; returns the trainer."""

    def run(module):
        trainer = L.Trainer(
            accelerator="cpu",
            max_steps=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(module, data())
        return trainer

    return run


def roll_out(model, data):
    records = [{"prompt": prompt} for prompt in PROMPTS]
    return data.roll_out(model, PromptBatch(0, [0, 1], records, laps=[0, 0]))


def denoiser_of(model, config):
    transition = model.transition(config.denoising_steps, config.noise_level, config.stochastic_steps)
    return TokenDenoiser(model.head, transition, score_guided=config.score_guided)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@torch.no_grad()
def test_before_any_update_the_ratio_is_one(model, data, options):
    config = dataclasses.replace(ROLLOUT, **options)
    rollout = roll_out(model, data(config))
    prefix = image_prefix(model, model.policy, rollout)
    for mask_step in rollout.mask_steps:
        scores = score(model, model.policy, prefix, rollout, mask_step, denoiser_of(model, config))
        torch.testing.assert_close(scores.log_prob, mask_step.decisions.log_prob, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@torch.no_grad()
def test_images_do_not_depend_on_what_is_kept(model, data, monkeypatch, options):
    config = dataclasses.replace(ROLLOUT, **options)
    made_with = []
    monkeypatch.setattr(datamodule, "SampleNoise", lambda *args: made_with.append(SampleNoise(*args)) or made_with[0])
    rollout = roll_out(model, data(config))
    denoiser = denoiser_of(model, config)
    plain = generate(model, model.policy, rollout.condition, config, denoiser, made_with[0], plain=False)
    torch.testing.assert_close(rollout.latents, plain, rtol=1e-4, atol=1e-4)


def test_training_changes_every_policy_parameter_and_nothing_frozen(model, family, fit):
    module = MARGRPO(model, optimizer=OptimizerConfig(learning_rate=1e-4))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    trainer = fit(module)
    assert trainer.global_step == 2
    assert trainer.callback_metrics["stability/ratio_deviation"] < 1e-2
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    policy = {f"model.policy.{name}" for name, _ in model.policy.named_parameters()}
    assert trained == policy - {f"model.policy.{name}" for name in FROZEN_IN_POLICY[family]}
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]) == (name not in trained), name


def test_a_trained_head_changes_and_leaves_the_initial_one_to_the_reference(model, fit):
    module = MARGRPO(model, optimizer=OptimizerConfig(learning_rate=1e-4), train_head=True)
    before = copy.deepcopy(model.head.state_dict())
    fit(module)
    for name, tensor in model.head.state_dict().items():
        assert not torch.equal(tensor, before[name]), name
        assert torch.equal(module.initial_head.state_dict()[name], before[name]), name


def test_what_training_made_is_saved_and_read_back(model, family, fit, tmp_path):
    fit(MARGRPO(model, optimizer=OptimizerConfig(learning_rate=1e-4)))
    model.save_pretrained(tmp_path / "saved")
    loaded = LOADERS[family](tmp_path / "saved")
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_the_same_seed_gives_the_same_numbers(model, data):
    first, second = (roll_out(model, data()) for _ in range(2))
    assert torch.equal(first.latents, second.latents)
    for a, b in zip(first.mask_steps, second.mask_steps, strict=True):
        assert torch.equal(a.decisions.log_prob, b.decisions.log_prob)


def test_a_mask_step_without_selected_tokens_has_no_loss_and_no_gradient(model, data):
    model.freeze(train_head=False)
    rollout = roll_out(model, data())
    decisions = rollout.mask_steps[0].decisions
    nothing = Decisions(
        *(getattr(decisions, name)[:0] for name in ("image", "token", "place", "weight", "log_prob")),
        payload={name: tensor[:0] for name, tensor in decisions.payload.items()},
    )
    mask_step = dataclasses.replace(rollout.mask_steps[0], decisions=nothing)
    denoiser = denoiser_of(model, ROLLOUT)
    with torch.no_grad():
        reference = Reference(copy.deepcopy(model.policy), denoiser, image_prefix(model, model.policy, rollout))
    loss, _ = mask_step_loss(
        model,
        reference,
        rollout,
        mask_step,
        torch.randn(4),
        ObjectiveConfig(),
        denoiser,
        on_policy=True,
        total_weight=nothing.weight.sum(),
    )
    loss.backward()
    assert loss.item() == 0.0
    assert all(p.grad is None or (p.grad == 0).all() for p in model.policy.parameters())


def test_under_bf16_autocast_scores_are_fp32_and_near_those_of_the_rollout(model, data):
    rollout = roll_out(model, data(dataclasses.replace(ROLLOUT, guidance_scale=1.0, critical_fraction=0.0)))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        prefix = image_prefix(model, model.policy, rollout)
        for mask_step in rollout.mask_steps:
            scores = score(model, model.policy, prefix, rollout, mask_step, denoiser_of(model, ROLLOUT))
            assert scores.log_prob.dtype == torch.float32
            assert scores.log_prob.isfinite().all()


def test_parts_of_the_policy_are_its_own(model):
    parameters = {id(parameter) for parameter in model.policy.parameters()}
    for name, part in model.policy_parts().items():
        assert {id(parameter) for parameter in part.parameters()} <= parameters, name
