"""The tiny Harmon checkpoint of the recorded tensors, and those tensors."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from margrpo.models.harmon import Harmon

IMAGE_SIZE = 128
"""The tensors were recorded at 8 x 8 tokens; the position tables have 4 x 4."""


@pytest.fixture(scope="session")
def checkpoint(data_dir: Path) -> Path:
    """Directory in the official layout; tests copy it before they change anything."""
    return data_dir / "harmon" / "checkpoint"


@pytest.fixture
def copied(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint to damage."""
    return Path(shutil.copytree(checkpoint, tmp_path / "copied"))


@pytest.fixture(scope="session")
def harmon(checkpoint: Path) -> Harmon:
    """The model; tests that train or freeze it load their own with `fresh_harmon`."""
    return Harmon.from_pretrained(checkpoint, IMAGE_SIZE)


@pytest.fixture
def fresh_harmon(checkpoint: Path) -> Harmon:
    return Harmon.from_pretrained(checkpoint, IMAGE_SIZE)


@pytest.fixture(scope="session")
def recorded(data_dir: Path) -> Callable[[str], dict[str, Tensor]]:
    """Return a function that loads the tensors recorded from the published code under a name."""
    return lambda name: load_file(data_dir / "harmon" / f"{name}.safetensors")


@pytest.fixture(scope="session")
def scalars(data_dir: Path) -> dict:
    return json.loads((data_dir / "harmon" / "scalars.json").read_text())
