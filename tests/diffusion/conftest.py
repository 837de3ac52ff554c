"""Fixtures of the transition tests."""

from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor


@pytest.fixture(scope="session")
def golden(data_dir: Path) -> dict[str, Tensor]:
    """Single denoising steps recorded from the published release."""
    return load_file(data_dir / "nova" / "steps.safetensors")
