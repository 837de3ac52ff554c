"""Every sample's noise is its own."""

import torch

from margrpo.rollout.noise import SampleNoise, Stream, stable_seed

CPU = torch.device("cpu")
TOKENS = torch.arange(6).expand(1, -1)


def test_a_sample_draws_the_same_whatever_batch_it_is_in():
    alone = SampleNoise([7], 16, 4, CPU)
    together = SampleNoise([5, 7, 9], 16, 4, CPU)
    assert torch.equal(alone.order()[0], together.order()[1])
    drawn = alone.normal(Stream.PREDICTED, 3, TOKENS, 2)[:, 0]
    assert torch.equal(drawn, together.normal(Stream.PREDICTED, 3, TOKENS, 2)[:, 1])


def test_streams_indices_and_seeds_are_independent():
    noise = SampleNoise([7, 8], 16, 4, CPU)
    draws = [
        noise.normal(stream, index, TOKENS, 2)
        for stream, index in ((Stream.PREDICTED, 0), (Stream.PREDICTED, 1), (Stream.UNKNOWN, 0), (Stream.TRAJECTORY, 0))
    ]
    rows = [draw[:, row] for draw in draws for row in range(2)]
    for first in range(len(rows)):
        for second in range(first):
            assert not torch.equal(rows[first], rows[second])


def test_the_order_of_calls_does_not_matter():
    noise = SampleNoise([7], 16, 4, CPU)
    first = noise.normal(Stream.UNKNOWN, 2, TOKENS, 3)
    noise.order()
    assert torch.equal(first, noise.normal(Stream.UNKNOWN, 2, TOKENS, 3))


def test_orders_are_permutations():
    order = SampleNoise([1, 2], 16, 4, CPU).order()
    assert torch.equal(order.sort(dim=1).values, torch.arange(16).expand(2, -1))


def test_noise_is_standard_normal():
    noise = SampleNoise([3], 4096, 16, CPU).normal(Stream.PREDICTED, 0, torch.zeros(1, 4096, dtype=torch.long), 2)
    assert abs(noise.mean()) < 0.01
    assert abs(noise.std() - 1) < 0.01


def test_stable_seed_never_changes():
    assert stable_seed(20, 0, 5, 1) == stable_seed(20, 0, 5, 1)
    assert stable_seed(20, 0, 5, 1) != stable_seed(20, 0, 51)
    assert 0 <= stable_seed(-1) < 2**63


def test_noise_and_order_do_not_follow_the_default_dtype():
    noise = SampleNoise([3], 64, 4, CPU)
    order, normal = noise.order(), noise.normal(Stream.PREDICTED, 0, TOKENS, 2)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(noise.order(), order)
        drawn = noise.normal(Stream.PREDICTED, 0, TOKENS, 2)
    finally:
        torch.set_default_dtype(default)
    assert drawn.dtype == torch.float32
    assert torch.equal(drawn, normal)
