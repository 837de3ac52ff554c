"""Callbacks on two processes: nothing hangs, nothing is lost or written twice."""

import json

import numpy as np
import pytest
from PIL import Image

from margrpo.callbacks.ranks import gather, run_directory
from margrpo.callbacks.samples import SampleGrid
from margrpo.callbacks.stability import GradientNorms, KLTracker
from margrpo.callbacks.summary import RunSummary
from margrpo.callbacks.writer import ImageWriter
from tests.callbacks.conftest import Recorder

TWO = {"devices": 2, "strategy": "ddp_spawn"}


def assert_same_picture(first, second):
    pixels, others = (np.asarray(Image.open(file)).astype(int) for file in (first, second))
    assert pixels.shape == others.shape
    assert np.abs(pixels - others).max() <= 1, "processes with other numbers of threads may round differently"


def test_one_rank_gathers_its_own_value():
    assert gather({"a": 1}, world_size=1) == [{"a": 1}]


def test_a_logger_without_a_directory_is_refused(build):
    _, _, trainer = build([SampleGrid()])
    trainer.logger.save_dir = None
    with pytest.raises(ValueError, match="first logger has no directory"):
        run_directory(trainer)


@pytest.mark.slow
def test_two_ranks_write_the_images_and_the_list_of_one(build, tmp_path):
    for name, options in (("one", {}), ("two", TWO)):
        module, data, trainer = build([ImageWriter(str(tmp_path / name))], **options)
        trainer.predict(module, data, return_predictions=False)
    files = sorted(file.name for file in (tmp_path / "one").iterdir())
    assert len(files) == 6
    assert sorted(file.name for file in (tmp_path / "two").iterdir()) == files
    for file in files[:-1]:
        assert_same_picture(tmp_path / "one" / file, tmp_path / "two" / file)
    assert (tmp_path / "one" / files[-1]).read_text() == (tmp_path / "two" / files[-1]).read_text()


@pytest.mark.slow
def test_two_ranks_summarise_all_prompts_and_show_the_first(build, tmp_path):
    summaries = []
    for name, options in (("one", {}), ("two", TWO)):
        callbacks = [KLTracker(), GradientNorms(), SampleGrid(count=4), RunSummary()]
        module, data, trainer = build(callbacks, logger=Recorder(tmp_path / name), **options)
        trainer.fit(module, data)
        summaries.append(json.loads((tmp_path / name / "summary.json").read_text()))
    one, two = summaries
    assert_same_picture(*[tmp_path / name / "samples" / "step_000000.png" for name in ("one", "two")])
    assert two["heldout_prompts"] == one["heldout_prompts"] == 5
    assert two["steps"] == one["steps"] == 2
    assert two["heldout_reward_before"] == pytest.approx(one["heldout_reward_before"], abs=1e-6)
