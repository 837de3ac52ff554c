"""The update: what it changes, what it must not, and what it equals."""

import copy
import dataclasses
import math

import lightning as L
import pytest
import torch

from margrpo.callbacks.stability import GradientNorms
from margrpo.models.nova import NOVA
from margrpo.module import MARGRPO, NonFiniteError, OptimizerConfig
from margrpo.objective.loss import ObjectiveConfig
from margrpo.rewards.brightness import Brightness
from margrpo.rollout.config import RolloutConfig
from margrpo.rollout.datamodule import RolloutDataModule
from margrpo.rollout.denoising import TokenDenoiser
from margrpo.rollout.prompts import PromptBatch
from margrpo.update import Reference, image_prefix, score

EPSILON = 1e-4
ROLLOUT = RolloutConfig(
    group_size=3, mask_steps=6, denoising_steps=4, trained_mask_steps=3, trained_denoising_steps=3, guidance_scale=3.0
)
RECORDS = [{"prompt": text} for text in ("a photo of a car below a zebra", "two candles", "a red kite", "été")]


@pytest.fixture
def build(data_dir, tmp_path):
    """Return a function that builds module, data module and trainer."""

    def run(rollout=ROLLOUT, rewards=None, steps=2, module_class=MARGRPO, callbacks=(), **options):
        prompts = tmp_path / "prompts.txt"
        prompts.write_text("\n".join(record["prompt"] for record in RECORDS), encoding="utf-8")
        options.setdefault("optimizer", OptimizerConfig(learning_rate=1e-3))
        module = module_class(NOVA.from_pretrained(data_dir / "nova" / "checkpoint"), **options)
        data = RolloutDataModule(str(prompts), rewards or [Brightness()], rollout=rollout, prompts_per_step=2)
        trainer = L.Trainer(
            accelerator="cpu",
            max_steps=steps,
            logger=False,
            callbacks=list(callbacks),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        return module, data, trainer

    return run


@pytest.fixture
def rolled_out(build):
    """Return a function that makes one rollout, with the denoisers of the update."""

    def run(rollout=ROLLOUT, **options):
        module, data, _ = build(rollout, **options)
        made = data.roll_out(module.model, PromptBatch(0, [0, 1], RECORDS[:2], laps=[0, 0]))
        transition = module.model.transition(rollout.denoising_steps, rollout.noise_level, rollout.stochastic_steps)
        return module, made, TokenDenoiser(module.model.head, transition, score_guided=rollout.score_guided)

    return run


def rescore(module, rollout, mask_step, denoiser):
    """Score a mask step under the policy."""
    prefix = image_prefix(module.model, module.model.policy, rollout)
    return score(module.model, module.model.policy, prefix, rollout, mask_step, denoiser)


def fast_loss(module, rollout, mask_step, advantage, denoiser):
    """Loss of a mask step as the update computes it."""
    with torch.no_grad():
        reference = Reference(module.reference, denoiser, image_prefix(module.model, module.reference, rollout))
    total_weight = mask_step.decisions.weight.sum()
    return module.mask_step_loss(rollout, mask_step, total_weight, advantage, denoiser, reference)[0]


VARIANTS = [
    {},
    {"guidance_scale": 1.0},
    {"score_guided": True},
    {"trajectory_source": "per_step"},
    {"include_generating_trajectory": True},
    {"loss_tokens": "predicted", "critical_fraction": 0.0},
]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_before_any_update_the_ratio_is_one(rolled_out, options):
    module, rollout, denoiser = rolled_out(dataclasses.replace(ROLLOUT, **options))
    for mask_step in rollout.mask_steps:
        scores = rescore(module, rollout, mask_step, denoiser)
        torch.testing.assert_close(scores.log_prob, mask_step.decisions.log_prob, atol=1e-4, rtol=0)


def test_under_bf16_autocast_the_ratio_deviates_by_a_bounded_amount(rolled_out):
    module, rollout, denoiser = rolled_out()
    with torch.autocast("cpu", torch.bfloat16):
        for mask_step in rollout.mask_steps:
            scores = rescore(module, rollout, mask_step, denoiser)
            assert scores.log_prob.dtype == torch.float32
            deviation = (scores.log_prob - mask_step.decisions.log_prob).abs()
            assert 0 < deviation.max() < 0.5


def test_training_changes_every_policy_parameter_and_nothing_frozen(build):
    module, data, trainer = build()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    trainer.fit(module, data)
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert {name for name in trained if not name.startswith("model.policy.")} == set()
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]) == (name not in trained), name
    frozen_policy = {n for n, _ in module.model.policy.named_parameters() if f"model.policy.{n}" not in trained}
    assert frozen_policy == {"video_encoder.patch_embed.proj.weight", "video_encoder.patch_embed.proj.bias"}


def test_training_the_head_changes_it_and_leaves_the_initial_one_to_the_reference(build):
    module, data, trainer = build(train_head=True, head_lr_scale=0.5)
    before = copy.deepcopy(module.model.head.state_dict())
    trainer.fit(module, data)
    for name, tensor in module.model.head.state_dict().items():
        assert not torch.equal(tensor, before[name]), name
        assert torch.equal(module.initial_head.state_dict()[name], before[name]), name
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [1e-3, 5e-4]


def test_the_gradient_flows_through_the_frozen_head_into_the_policy(rolled_out):
    module, rollout, denoiser = rolled_out()
    loss = fast_loss(module, rollout, rollout.mask_steps[0], torch.randn(6), denoiser)
    loss.backward()
    assert all(parameter.grad is None for parameter in module.model.head.parameters())
    assert module.model.policy.image_encoder.blocks[0].attn.qkv.weight.grad.abs().sum() > 0
    assert module.model.policy.text_embed.proj.weight.grad.abs().sum() > 0


def slow_loss(module, rollout, mask_step, advantage, beta):
    """Plain GRPO with a fixed head, as loops over images, tokens and denoising steps."""
    model, config = module.model, rollout.config
    transition = model.transition(config.denoising_steps, config.noise_level, None)
    context, reference_context = (
        model.prefix(policy, rollout.condition)["context"].repeat_interleave(config.group_size, 0)
        for policy in (model.policy, module.reference)
    )
    known = rollout.order[:, : mask_step.start]
    z = model.policy(rollout.latents, known, context)
    reference_z = module.reference(rollout.latents, known, reference_context)
    payload = mask_step.decisions.payload
    terms = []
    for row in range(len(mask_step.decisions.place)):
        place = mask_step.decisions.place[row]
        image, token = mask_step.decisions.image[place], mask_step.decisions.token[place]
        step = int(payload["step"][row])
        timestep = transition.timesteps[step : step + 1]
        moments = []
        for conditions in (z, reference_z):
            prediction = model.head(payload["x_t"][row : row + 1], timestep, conditions[image, token][None])
            moments.append(transition.moments(prediction, payload["x_t"][row : row + 1], step))
        (mean, std), (reference_mean, _) = moments
        density = -((payload["x_prev"][row] - mean[0]) ** 2) / (2 * std**2) - std.log() - 0.5 * math.log(2 * math.pi)
        log_prob = density.mean()
        kl = ((mean - reference_mean) ** 2 / (2 * std**2)).mean()
        terms.append(-(log_prob - log_prob.detach()).exp() * advantage[image] + beta * kl)
    return torch.stack(terms).mean()


def test_without_the_methods_parts_the_update_is_plain_grpo_with_a_fixed_head(rolled_out):
    config = dataclasses.replace(
        ROLLOUT, num_trajectories=1, critical_fraction=0.0, consistency_threshold=None, trained_denoising_steps=2
    )
    module, rollout, denoiser = rolled_out(config, objective=ObjectiveConfig(kl_weight=0.3))
    with torch.no_grad():
        for parameter in module.reference.parameters():
            parameter.mul_(0.98)
    rewards = rollout.rewards.view(2, 3)
    advantage = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + EPSILON)).flatten()
    mask_step = rollout.mask_steps[-1]
    loss = fast_loss(module, rollout, mask_step, advantage, denoiser)
    expected = slow_loss(module, rollout, mask_step, advantage, 0.3)
    parameters = [p for p in module.model.policy.parameters() if p.requires_grad]
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-6)
    for fast, slow in zip(
        torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters), strict=True
    ):
        torch.testing.assert_close(fast, slow, rtol=1e-3, atol=1e-6)


class NaNReward(Brightness):
    """Gives no reward to some images."""

    name = "nan"

    def __call__(self, images, prompts, metadata):
        rewards = super().__call__(images, prompts, metadata)
        rewards[::2] = math.nan
        return rewards


def test_images_without_a_reward_do_not_stop_training(build):
    module, data, trainer = build(rewards=[NaNReward()])
    trainer.fit(module, data)
    assert trainer.callback_metrics["reward/invalid_images"] == 3
    assert all(parameter.isfinite().all() for parameter in module.model.policy.parameters())


class PoisonedModule(MARGRPO):
    """Has a gradient that is not finite in chosen updates."""

    poisoned = frozenset()

    def mask_step_loss(self, rollout, *arguments):
        loss, metrics = super().mask_step_loss(rollout, *arguments)
        return (loss * math.nan if rollout.step in self.poisoned else loss), metrics


def test_an_update_that_is_not_finite_is_skipped_and_counted(build):
    module, data, trainer = build(module_class=PoisonedModule, steps=2)
    module.poisoned = {0}
    trainer.fit(module, data)
    assert trainer.callback_metrics["stability/skipped_updates"] == 1
    assert all(parameter.isfinite().all() for parameter in module.model.policy.parameters())


def test_skipped_updates_are_counted_on_after_a_resume(build):
    interrupted, _, _ = build()
    interrupted.skipped_updates, interrupted.skipped_in_a_row = 3, 2
    checkpoint = {"state_dict": interrupted.state_dict()}
    interrupted.on_save_checkpoint(checkpoint)
    resumed, _, _ = build()
    resumed.on_load_checkpoint(checkpoint)
    assert (resumed.skipped_updates, resumed.skipped_in_a_row) == (3, 2)


def test_trained_steps_that_the_model_lacks_are_refused_before_anything_is_computed(build, monkeypatch):
    module, data, trainer = build(dataclasses.replace(ROLLOUT, mask_steps=64, trained_mask_steps=60))
    monkeypatch.setattr(module.model, "encode", None)
    with pytest.raises(ValueError, match="only 51 of the 64 mask steps predict a token"):
        trainer.fit(module, data)


def test_the_run_stops_after_too_many_updates_in_a_row_that_are_not_finite(build):
    module, data, trainer = build(module_class=PoisonedModule, steps=9, max_skipped_updates=3)
    module.poisoned = {2, 3, 4}
    with pytest.raises(NonFiniteError, match="3 updates in a row"):
        trainer.fit(module, data)


@pytest.mark.parametrize(
    ("options", "updates"),
    [
        ({}, 1),
        ({"mask_steps_per_update": 1}, 3),
        ({"num_iterations": 2}, 2),
        ({"num_iterations": 2, "mask_steps_per_update": 1}, 6),
    ],
    ids=str,
)
def test_optimiser_steps_per_rollout(build, options, updates):
    module, data, trainer = build(steps=updates, **options)
    trainer.fit(module, data)
    assert trainer.global_step == updates
    assert data.next_step == 1


def test_the_learning_rate_warms_up_linearly_and_stays(build):
    module, data, trainer = build(steps=4, optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=2))
    rates = []

    class Watch(L.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            rates.append(optimizer.param_groups[0]["lr"])

    trainer.callbacks.append(Watch())
    trainer.fit(module, data)
    assert rates == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3, 1e-3])


def test_gradients_are_clipped_to_the_configured_norm(build):
    norms = []

    class Watch(MARGRPO):
        def on_before_optimizer_step(self, optimizer):
            super().on_before_optimizer_step(optimizer)
            norms.append(
                torch.nn.utils.get_total_norm([p.grad for p in self.model.policy.parameters() if p.grad is not None])
            )

    optimizer = OptimizerConfig(learning_rate=1e-3, max_gradient_norm=1e-3)
    module, data, trainer = build(module_class=Watch, optimizer=optimizer)
    trainer.fit(module, data)
    assert [norm.item() for norm in norms] == pytest.approx([1e-3, 1e-3], rel=1e-3)


def test_the_norm_of_the_whole_gradient_is_computed_once(build, monkeypatch):
    sizes = []

    def count(gradients, *arguments, **options):
        gradients = list(gradients)
        sizes.append(len(gradients))
        return get_total_norm(gradients, *arguments, **options)

    get_total_norm = torch.nn.utils.get_total_norm
    monkeypatch.setattr(torch.nn.utils, "get_total_norm", count)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", None)
    module, data, trainer = build(steps=2, callbacks=[GradientNorms()])
    trainer.fit(module, data)
    assert sizes.count(sum(parameter.requires_grad for parameter in module.parameters())) == 2


@pytest.mark.parametrize(("options", "calls"), [({}, 1), ({"score_guided": True}, 2)], ids=["conditional", "guided"])
def test_the_prefix_of_the_reference_is_computed_once_an_update(build, monkeypatch, options, calls):
    module, data, trainer = build(dataclasses.replace(ROLLOUT, **options), steps=1)
    made = []
    prefix = module.reference.prefix
    monkeypatch.setattr(module.reference, "prefix", lambda embeds: made.append(embeds) or prefix(embeds))
    trainer.fit(module, data)
    assert len(made) == calls


def test_without_any_held_out_reward_the_mean_is_nan(build):
    module, data, trainer = build(rewards=[NaNReward()])
    data.heldout_prompts, data.evaluation_batch = data.train_prompts, 1
    (metrics,) = trainer.validate(module, data, verbose=False)
    assert metrics.keys() == {"reward/heldout", "reward/heldout_nan"}
    assert all(map(math.isnan, metrics.values()))


@pytest.mark.parametrize("precision", ["16-mixed", "16-true"])
def test_fp16_is_refused(build, monkeypatch, precision):
    module, data, trainer = build()
    monkeypatch.setattr(trainer.precision_plugin, "precision", precision)
    with pytest.raises(ValueError, match=rf"trainer\.precision is {precision}.*accepted: bf16-mixed, 32-true"):
        trainer.fit(module, data)


def test_same_seed_same_numbers(build):
    finals = []
    for _ in range(2):
        module, data, trainer = build()
        trainer.fit(module, data)
        finals.append(module.model.policy.state_dict())
    for name, tensor in finals[0].items():
        assert torch.equal(tensor, finals[1][name]), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_iterations": 0}, "num_iterations is 0"),
        ({"head_lr_scale": -1.0}, "head_lr_scale is -1.0"),
        ({"mask_steps_per_update": 4}, "mask_steps_per_update is 4; accepted: 'all', 1"),
        ({"max_skipped_updates": 0}, "max_skipped_updates is 0; it must be at least 1"),
    ],
)
def test_a_bad_option_is_named(data_dir, options, message):
    with pytest.raises(ValueError, match=message):
        MARGRPO(NOVA.from_pretrained(data_dir / "nova" / "checkpoint"), **options)


def test_a_bad_optimiser_option_is_named():
    with pytest.raises(ValueError, match="learning_rate is 0"):
        OptimizerConfig(learning_rate=0.0)
