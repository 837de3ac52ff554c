"""Random numbers of a rollout: each sample's own, whatever batch, rank or order it is drawn in."""

import hashlib
from collections.abc import Callable
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor


class Stream(IntEnum):
    """Independent uses of a sample's noise."""

    ORDER = 0
    PREDICTED = 1
    UNKNOWN = 2
    TRAJECTORY = 3


class Noise(Protocol):
    """Source of decoding orders and normal draws for B samples."""

    def order(self) -> Tensor:
        """Return decoding orders, int64 [B, N]."""
        ...

    def normal(self, stream: Stream, index: int, tokens: Tensor, draws: int) -> Tensor:
        """Return fp32 normal numbers [draws, B, n, C] for tokens int64 [B, n] at mask step or trajectory `index`."""
        ...


def stable_seed(*parts: int) -> int:
    """Mix integers into a seed in [0, 2^63); the same on every machine and in every process."""
    digest = hashlib.blake2b(",".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class SampleNoise:
    """Noise from one seed per sample.

    Args:
        seeds: B seeds, from `stable_seed(seed, step, prompt, sample)`.
        num_tokens: N.
        channels: C.
        device: where the numbers are drawn.
    """

    def __init__(self, seeds: list[int], num_tokens: int, channels: int, device: torch.device) -> None:
        self.seeds = seeds
        self.num_tokens = num_tokens
        self.channels = channels
        self.generator = torch.Generator(device=device)

    def order(self) -> Tensor:
        """Return a random permutation of the tokens per sample, int64 [B, N]."""
        rows = []
        for seed in self.seeds:
            self.generator.manual_seed(stable_seed(seed, Stream.ORDER))
            rows.append(self._draw(torch.rand, self.num_tokens))
        return torch.stack(rows).argsort(dim=1)

    def normal(self, stream: Stream, index: int, tokens: Tensor, draws: int) -> Tensor:
        """Return fp32 normal numbers [draws, B, n, C]; equal for equal seeds, stream, index and shape."""
        rows = []
        for seed in self.seeds:
            self.generator.manual_seed(stable_seed(seed, stream, index))
            rows.append(self._draw(torch.randn, draws, tokens.shape[1], self.channels))
        return torch.stack(rows, dim=1)

    def _draw(self, sampler: Callable[..., Tensor], *shape: int) -> Tensor:
        # Named, because Lightning's "true" half precisions change the default dtype.
        return sampler(*shape, generator=self.generator, device=self.generator.device, dtype=torch.float32)
