"""The tiny NOVA checkpoint of the recorded tensors, and those tensors."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from margrpo.models.nova import NOVA


@pytest.fixture(scope="session")
def checkpoint(data_dir: Path) -> Path:
    """Directory in the official layout; tests copy it before they change anything."""
    return data_dir / "nova" / "checkpoint"


@pytest.fixture
def copied(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint to damage."""
    return Path(shutil.copytree(checkpoint, tmp_path / "copied"))


@pytest.fixture(scope="session")
def nova(checkpoint: Path) -> NOVA:
    """The model; tests that train or freeze it load their own with `fresh_nova`."""
    return NOVA.from_pretrained(checkpoint)


@pytest.fixture
def fresh_nova(checkpoint: Path) -> NOVA:
    return NOVA.from_pretrained(checkpoint)


@pytest.fixture(scope="session")
def recorded(data_dir: Path) -> Callable[[str], dict[str, Tensor]]:
    """Return a function that loads the tensors recorded from the published code under a name."""
    return lambda name: load_file(data_dir / "nova" / f"{name}.safetensors")
