"""Small functions shared by the tests."""

from torch import Tensor


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest absolute difference of two tensors of one shape, relative to max(1, largest absolute expected value)."""
    assert actual.shape == expected.shape, f"shapes differ: {tuple(actual.shape)} and {tuple(expected.shape)}"
    actual, expected = actual.detach().double(), expected.detach().double()
    return ((actual - expected).abs().max() / expected.abs().max().clamp(min=1)).item()
