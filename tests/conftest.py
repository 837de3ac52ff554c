"""Fixtures shared by all tests."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Directory of the recorded reference tensors."""
    return Path(__file__).parent / "data"
