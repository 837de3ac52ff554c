"""What TensorBoard will open with, read back from the event files."""

import re

import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.hparams import metadata

from margrpo.callbacks.layout import TensorBoardLayout, varied_options
from margrpo.callbacks.stability import GradientNorms, KLTracker

RUN = ("my-variant", "seed3")


@pytest.fixture
def fit(build, tmp_path):
    """Return a function that trains and returns the module, the data and the events of the run directory."""

    def run(steps=1, options=None):
        logger = TensorBoardLogger(tmp_path, name=RUN[0], version=RUN[1])
        callbacks = [KLTracker(), GradientNorms(), TensorBoardLayout()]
        module, data, trainer = build(callbacks, steps=steps, options=options, logger=logger, num_sanity_val_steps=0)
        trainer.fit(module, data)
        return module, data, EventAccumulator(str(tmp_path.joinpath(*RUN))).Reload()

    return run


def layouts(events):
    return [Layout.FromString(event.tensor_proto.string_val[0]) for event in events.Tensors("custom_scalars__config__")]


def hparams(events):
    start = events.PluginTagToContent("hparams")[metadata.SESSION_START_INFO_TAG]
    return {k: v.string_value for k, v in metadata.parse_session_start_info_plugin_data(start).hparams.items()}


def test_stability_shows_reward_kl_and_gradient_norm_as_they_are_logged(fit):
    _, _, events = fit()
    (layout,) = layouts(events)
    (category,) = layout.category
    assert (category.title, category.closed) == ("stability", False)
    shown = [
        [tag for tag in events.Tags()["scalars"] for pattern in chart.multiline.tag if re.match(pattern, tag)]
        for chart in category.chart
    ]
    assert shown == [["reward/heldout"], ["reward/train"], ["stability/kl_image_nats"], ["stability/gradient_norm"]]


def test_a_run_can_be_found_by_its_variant_and_options(fit):
    module, data, events = fit(options={"train_head": True})
    options = hparams(events)
    assert options == {"variant": "my-variant", **varied_options(module, data)}
    assert options["train_head"] == "true"
    assert options["critical_fraction"] == str(data.rollout.critical_fraction)
    assert options["trajectory_source"] == "composite"
    assert options["kl_weight"] == "0.01"
    assert options["stochastic_steps"] == "null"
    assert "seed" not in options


def test_tensorboard_is_left_to_describe_the_options_over_all_runs(fit):
    _, _, events = fit()
    tags = events.PluginTagToContent("hparams").keys()
    assert tags == {metadata.SESSION_START_INFO_TAG, metadata.SESSION_END_INFO_TAG}


def test_no_curve_gets_points_that_training_did_not_log(fit):
    _, _, events = fit(steps=2)
    assert "hp_metric" not in events.Tags()["scalars"]
    assert [event.step for event in events.Scalars("reward/heldout")] == [0, 1]
    (final,) = events.Scalars("final/heldout_reward")
    assert final.value == events.Scalars("reward/heldout")[-1].value
    assert sorted(events.Tags()["scalars"]).index("final/heldout_reward") < 5, "TensorBoard shows five at first"


def test_a_resumed_run_writes_the_same_once_more(fit):
    _, _, first = fit()
    _, _, resumed = fit()
    before, after = layouts(resumed)
    assert before == after == layouts(first)[0]
    assert hparams(resumed) == hparams(first)


def test_a_run_without_tensorboard_trains_all_the_same(build):
    module, data, trainer = build([TensorBoardLayout()], steps=1, num_sanity_val_steps=0)
    trainer.fit(module, data)
    assert trainer.global_step == 1
