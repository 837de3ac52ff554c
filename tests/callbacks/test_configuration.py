"""Every callback can be named in a configuration file."""

import jsonargparse
import lightning as L
import pytest

from margrpo.callbacks.layout import TensorBoardLayout
from margrpo.callbacks.memory import PeakMemory
from margrpo.callbacks.progress import StepProgressBar
from margrpo.callbacks.samples import SampleGrid
from margrpo.callbacks.stability import GradientNorms, KLTracker
from margrpo.callbacks.summary import RunSummary
from margrpo.callbacks.writer import ImageWriter


@pytest.mark.parametrize(
    ("callback", "options"),
    [
        (KLTracker, {}),
        (GradientNorms, {}),
        (PeakMemory, {}),
        (TensorBoardLayout, {}),
        (SampleGrid, {"count": 8, "columns": 2}),
        (RunSummary, {}),
        (ImageWriter, {"output_dir": "images"}),
        (StepProgressBar, {"refresh_rate": 5}),
    ],
)
def test_a_callback_is_built_from_its_class_path(callback, options):
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--callback", type=L.Callback)
    path = f"{callback.__module__}.{callback.__name__}"
    parsed = parser.parse_object({"callback": {"class_path": path, "init_args": options}})
    built = parser.instantiate(parsed).callback
    assert type(built) is callback
    assert {name: str(getattr(built, name)) for name in options} == {name: str(options[name]) for name in options}
    with pytest.raises(jsonargparse.ArgumentError):
        parser.parse_object({"callback": {"class_path": path, "init_args": {"no_such_option": 1}}})
