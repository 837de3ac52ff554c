"""Selection of tokens: against loops, and against the published release with latent pixels as tokens."""

import math
import statistics
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from margrpo.objective.selection import consistency_gain, consistent, top_fraction, uncertainty
from tests.helpers import relative_error


def random_tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pixels(tensor: Tensor) -> Tensor:
    """Turn [..., C, H, W] into [..., H W, C]."""
    return tensor.flatten(-2).transpose(-1, -2)


@pytest.fixture(scope="module")
def recorded(data_dir: Path) -> dict[str, Tensor]:
    return load_file(data_dir / "nova/loss_flow.safetensors")


def looped_selection(scores: list[float], fraction: float) -> list[bool]:
    candidates = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    chosen = candidates[: round(fraction * len(candidates))]
    return [token in chosen for token in range(len(scores))]


def test_uncertainty_is_the_std_over_trajectories_averaged_over_channels() -> None:
    end_points = random_tensor(3, 2, 4, 5)
    actual = uncertainty(end_points)
    assert actual.shape == (2, 4)
    for image in range(2):
        for token in range(4):
            by_channel = [statistics.pstdev(end_points[:, image, token, c].tolist()) for c in range(5)]
            assert actual[image, token].item() == pytest.approx(statistics.fmean(by_channel), rel=1e-5)


def test_one_trajectory_has_no_uncertainty() -> None:
    assert uncertainty(random_tensor(1, 2, 4, 5)).tolist() == [[0.0] * 4] * 2


def test_uncertainty_and_critical_tokens_equal_those_of_the_published_release(recorded: dict[str, Tensor]) -> None:
    scores = uncertainty(pixels(recorded["seed_traj"][:, -1]))
    assert relative_error(scores, pixels(recorded["critic_std"]).squeeze(-1)) < 1e-6
    critical = top_fraction(scores, 76 / 256)
    theirs = pixels(recorded["critic_mask"])[..., 0].bool()
    # The release adds one random pixel, which may be a critical one already.
    assert not (critical & ~theirs).any()
    assert ((theirs & ~critical).sum(1) <= 1).all()


def test_consistent_tokens_equal_those_of_the_published_release(recorded: dict[str, Tensor]) -> None:
    kept_steps = recorded["xs_last_steps"].tolist()
    final = pixels(recorded["final_latents"])
    for step in (3, 4):
        current, previous = (pixels(recorded["xs_last"][kept_steps.index(s)]) for s in (step, step - 1))
        gain = consistency_gain(current, previous, final)
        assert relative_error(gain, pixels(recorded[f"full.step{step}.sim_map"]).squeeze(-1)) < 1e-6
        masked, predicted, theirs = (
            recorded[f"full.step{step}.{name}"][:, 0].flatten(1).bool()
            for name in ("completion_mask", "completion_mask_next", "sim_mask")
        )
        assert torch.equal(masked & consistent(gain, predicted, 0.0), theirs)


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.25, 0.3, 0.5, 0.7, 1.0])
def test_the_top_fraction_equals_that_of_a_loop(fraction: float) -> None:
    # Rounded scores: many are equal.
    scores = random_tensor(8, 23).mul(2).round()
    actual = top_fraction(scores, fraction)
    assert actual.dtype == torch.bool
    for image in range(8):
        assert actual[image].tolist() == looped_selection(scores[image].tolist(), fraction)


def test_every_image_gets_exactly_the_fraction_with_halves_rounded_to_even() -> None:
    for tokens in range(1, 70):
        scores = random_tensor(2, tokens)
        for fraction in (0.0, 0.05, 0.1, 0.15, 0.25, 0.3, 0.45, 0.5, 0.75, 0.9, 1.0):
            assert top_fraction(scores, fraction).sum(1).tolist() == [round(fraction * tokens)] * 2


def test_the_lowest_tokens_win_a_tie() -> None:
    assert top_fraction(torch.ones(1, 6), 0.5).tolist() == [[True, True, True, False, False, False]]


def test_consistency_gain_is_the_gain_in_cosine_similarity() -> None:
    current, previous, final = (random_tensor(2, 3, 4, seed=seed) for seed in range(3))
    gain = consistency_gain(current, previous, final)

    def cosine(a: list[float], b: list[float]) -> float:
        return sum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b))

    for image in range(2):
        for token in range(3):
            now, before, end = (latents[image, token].tolist() for latents in (current, previous, final))
            assert gain[image, token].item() == pytest.approx(cosine(now, end) - cosine(before, end), abs=1e-6)


def test_a_zero_vector_has_similarity_zero() -> None:
    latents, zero = torch.ones(1, 1, 4), torch.zeros(1, 1, 4)
    assert consistency_gain(latents, zero, latents).item() == pytest.approx(1.0)
    assert consistency_gain(zero, latents, latents).item() == pytest.approx(-1.0)
    assert consistency_gain(latents, latents, zero).item() == 0.0


def test_a_token_is_kept_above_the_threshold_or_when_predicted() -> None:
    gain = torch.tensor([[0.3, 0.1, 0.0, -0.5, -0.5]])
    predicted = torch.tensor([[False, False, False, False, True]])
    assert consistent(gain, predicted, 0.1).tolist() == [[True, False, False, False, True]]
    assert consistent(gain, predicted, 0.0).tolist() == [[True, True, False, False, True]]
    assert consistent(gain, predicted, -2.0).all()
