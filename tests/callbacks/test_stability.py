"""The stability curves equal what the update computed."""

import numpy as np
import pytest
import torch

from margrpo.callbacks.stability import GradientNorms, KLTracker
from margrpo.module import MARGRPO


class Watched(MARGRPO):
    """Keeps what it returned, and the gradient at each optimiser step before and after clipping."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.outputs, self.unclipped, self.clipped_norms = [], [], []

    def training_step(self, rollout, batch_idx):
        outputs = super().training_step(rollout, batch_idx)
        self.outputs.append(outputs)
        return outputs

    def gradients(self):
        return {n: p.grad.clone().numpy() for n, p in self.model.named_parameters() if p.grad is not None}

    def on_before_optimizer_step(self, optimizer):
        self.unclipped.append(self.gradients())
        super().on_before_optimizer_step(optimizer)
        self.clipped_norms.append(norm(self.gradients().values()))


def norm(arrays):
    return np.sqrt(sum(np.square(array, dtype=np.float64).sum() for array in arrays))


def test_kl_is_logged_as_mean_per_image_and_by_mask_step(build):
    module, data, trainer = build([KLTracker()], module_class=Watched)
    trainer.fit(module, data)
    for step, outputs in enumerate(module.outputs):
        values = {index: value.item() for index, value in outputs["kl"].items()}
        assert len(values) == 2
        assert trainer.logger.curve("stability/kl")[step] == pytest.approx(np.mean(list(values.values())))
        assert trainer.logger.curve("stability/kl_image_nats")[step] == pytest.approx(outputs["kl_image_nats"].item())
        logged = {
            name: value
            for logged_step, metrics in trainer.logger.rows
            for name, value in metrics.items()
            if logged_step == step and name.startswith("kl_by_mask_step/")
        }
        assert logged == pytest.approx({f"kl_by_mask_step/step_{index:02d}": v for index, v in values.items()})
    assert trainer.logger.curve("stability/kl")[0] < 1e-9
    assert trainer.logger.curve("stability/kl")[1] > 1e-7
    assert trainer.progress_bar_metrics["kl"] == pytest.approx(trainer.logger.curve("stability/kl")[1])


def test_kl_by_mask_step_keeps_to_the_logging_interval(build):
    module, data, trainer = build([KLTracker()], steps=3, log_every_n_steps=2)
    trainer.fit(module, data)
    steps = {step for step, metrics in trainer.logger.rows if any(name.startswith("kl_by") for name in metrics)}
    assert steps == {1}


def test_gradient_norms_are_those_before_clipping(build):
    norms = GradientNorms()
    module, data, trainer = build([norms], module_class=Watched)
    trainer.fit(module, data)
    assert module.clipped_norms == pytest.approx([1e-3, 1e-3], rel=1e-3)
    assert norms.history == pytest.approx([norm(gradients.values()) for gradients in module.unclipped], rel=1e-5)
    assert min(norms.history) > 2e-3
    prefixes = {
        "video_encoder": "policy.video_encoder.",
        "image_encoder": "policy.image_encoder.",
        "text_projection": "policy.text_embed.",
    }
    for step, gradients in enumerate(module.unclipped):
        assert trainer.logger.curve("stability/gradient_norm")[step] == pytest.approx(norms.history[step])
        for part, prefix in prefixes.items():
            expected = norm(gradient for name, gradient in gradients.items() if name.startswith(prefix))
            assert expected > 0
            assert trainer.logger.curve(f"gradient_norm/{part}")[step] == pytest.approx(expected, rel=1e-5)
    assert trainer.logger.curve("gradient_norm/head") == {}


def test_a_trained_head_has_its_own_gradient_norm_and_counts_in_the_whole(build):
    norms = GradientNorms()
    module, data, trainer = build([norms], steps=1, module_class=Watched, options={"train_head": True})
    trainer.fit(module, data)
    (gradients,) = module.unclipped
    expected = norm(gradient for name, gradient in gradients.items() if name.startswith("head."))
    assert trainer.logger.curve("gradient_norm/head")[0] == pytest.approx(expected, rel=1e-5)
    assert norms.history == pytest.approx([norm(gradients.values())], rel=1e-5)


def test_the_history_of_gradient_norms_survives_a_resume():
    first, second = GradientNorms(), GradientNorms()
    first.history = [1.0, 3.0]
    second.load_state_dict(first.state_dict())
    second.history.append(2.0)
    assert second.history == [1.0, 3.0, 2.0]
    assert first.history == [1.0, 3.0]


def test_an_update_whose_gradient_is_not_finite_is_not_in_the_history(build):
    class Poisoned(MARGRPO):
        def mask_step_loss(self, rollout, *arguments):
            loss, metrics = super().mask_step_loss(rollout, *arguments)
            return (loss * torch.nan if rollout.step == 0 else loss), metrics

    norms = GradientNorms()
    module, data, trainer = build([norms], steps=1, module_class=Poisoned)
    trainer.fit(module, data)
    assert data.next_step == 2
    assert len(norms.history) == 1
