"""Grids show the right images, with something to read under each."""

import numpy as np
import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image, ImageFont
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from margrpo.callbacks.samples import FONT_SIZE, LINE_HEIGHT, PADDING, Sample, SampleGrid, draw_grid, fit, wrap
from margrpo.rollout.prompts import PromptBatch


def picture(width=128, height=None, seed=0):
    size = (height or width, width, 3)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8))


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((128, 128), (128, 128)),
        ((256, 256), (256, 256)),
        ((512, 512), (256, 256)),
        ((32, 32), (128, 128)),
        ((512, 256), (256, 128)),
    ],
)
def test_pictures_are_between_128_and_256_pixels(size, expected):
    assert fit(picture(*size)).size == expected


def test_an_enlarged_picture_keeps_its_pixels_sharp():
    small = picture(32)
    assert np.array_equal(np.asarray(fit(small))[::4, ::4], np.asarray(small))


def test_a_grid_has_its_pictures_in_rows_and_text_under_each():
    samples = [Sample(picture(seed=seed), "a red circle above a blue square", seed / 10) for seed in range(5)]
    grid = np.asarray(draw_grid(samples, columns=4))
    lines = 1 + len(wrap(samples[0].prompt, 128, ImageFont.load_default(FONT_SIZE)))
    text_height = lines * LINE_HEIGHT
    assert grid.shape == (2 * (128 + text_height + PADDING) + PADDING, 4 * (128 + PADDING) + PADDING, 3)
    for number, sample in enumerate(samples):
        top = PADDING + number // 4 * (128 + text_height + PADDING)
        left = PADDING + number % 4 * (128 + PADDING)
        assert np.array_equal(grid[top : top + 128, left : left + 128], np.asarray(sample.picture))
        for line in range(lines):
            first = top + 128 + line * LINE_HEIGHT
            ink = (grid[first : first + LINE_HEIGHT, left : left + 128] < 128).all(-1)
            assert ink.sum() > 30, f"line {line} of sample {number} is blank"
    empty_place = grid[-(128 + text_height) :, PADDING + 128 + PADDING :]
    assert (empty_place == 255).all()


def test_the_reward_is_written():
    grids = [np.asarray(draw_grid([Sample(picture(), "a prompt", reward)], 4)) for reward in (0.123, 0.124)]
    changed = np.argwhere((grids[0] != grids[1]).any(-1))
    first_line = PADDING + 128
    assert len(changed) > 0
    assert changed[:, 0].min() >= first_line
    assert changed[:, 0].max() < first_line + LINE_HEIGHT


@pytest.mark.parametrize(
    "prompt",
    [
        "a photo of a car below a zebra",
        "A PHOTO OF A CAR BELOW A ZEBRA IN CAPITALS",
        "line one\nline two",
        "w" * 50,
        "一张红色圆形在蓝色方形上方的照片,背景是白色的,没有其他物体",
    ],
)
def test_lines_fit_under_the_picture(prompt):
    font = ImageFont.load_default(FONT_SIZE)
    lines = wrap(prompt, 128, font)
    assert "".join(lines).replace(" ", "") == "".join(prompt.split())
    assert max(map(font.getlength, lines)) <= 128 + PADDING


def test_a_long_prompt_ends_in_an_ellipsis():
    lines = wrap("one more word " * 40, 128, ImageFont.load_default(FONT_SIZE))
    assert len(lines) == 6
    assert lines[-1].endswith("…")


@pytest.mark.parametrize("options", [{"count": 0}, {"columns": 0}])
def test_a_grid_of_nothing_is_refused(options):
    with pytest.raises(ValueError, match="must be at least 1"):
        SampleGrid(**options)


def test_every_validation_shows_the_first_heldout_images(build, tmp_path):
    logger = TensorBoardLogger(tmp_path, name="run", version="")
    module, data, trainer = build([SampleGrid(count=3, columns=2)], steps=2, logger=logger)
    records = [{"prompt": f"prompt number {i}"} for i in range(3)]
    batch = PromptBatch(0, [0, 1, 2], records, laps=[0, 0, 0])
    before = data.evaluate(module.model, batch, score=True)
    trainer.fit(module, data)
    after = data.evaluate(module.model, batch, score=True)
    assert not before.images.equal(after.images)
    folder = tmp_path / "run" / "samples"
    assert sorted(file.name for file in folder.iterdir()) == [f"step_00000{step}.png" for step in range(3)]
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    assert [image.step for image in events.Images("samples/heldout")] == [0, 1, 2]
    for step, evaluation in ((0, before), (2, after)):
        samples = [
            Sample(Image.fromarray(image.permute(1, 2, 0).numpy()), f"prompt number {index}", reward.item())
            for index, image, reward in zip(evaluation.indices, evaluation.images, evaluation.rewards, strict=True)
        ]
        shown = np.asarray(Image.open(folder / f"step_{step:06d}.png")).astype(int)
        expected = np.asarray(draw_grid(samples, 2)).astype(int)
        assert shown.shape == expected.shape
        assert np.abs(shown - expected).max() <= 1, "the pictures may differ by rounding of another batch size"
