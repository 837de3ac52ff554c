"""The combiner sums what scorers say, never learns from a bad answer, and leaves scorers as they are."""

import copy
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import jsonargparse
import pytest
import torch
from torch import Tensor, nn

from margrpo.rewards import combiner
from margrpo.rewards.base import Reward
from margrpo.rewards.brightness import Brightness
from margrpo.rewards.combiner import RewardCombiner, RewardError, RewardResult

PROMPTS = ["a red circle", "a red circle", "a blue square", "two dots", "a star"]
METADATA: list[dict[str, Any]] = [{"prompt": prompt, "target": index} for index, prompt in enumerate(PROMPTS)]
IMAGES = torch.randint(0, 256, (5, 3, 4, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


class FromFunction(Reward):
    """Reward that answers what it is told to, and remembers what it was asked."""

    def __init__(self, answer: Callable[[int], Any], name: str = "scripted") -> None:
        self.answer = answer
        self.name = name
        self.calls: list[tuple[Tensor, list[str], list[dict[str, Any]]]] = []

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
        self.calls.append((images, prompts, metadata))
        return self.answer(len(images))


class TargetReward(Reward):
    """Reward read from the metadata."""

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
        return torch.tensor([record["target"] for record in metadata])


class NetworkReward(nn.Module, Reward):
    """Reward that owns a network whose output and buffers change in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Flatten(), nn.LazyLinear(4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.network(torch.zeros(2, 3, 4, 6))

    def forward(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
        return self.network(images.float()).sum(dim=1)


def score(*rewards: Reward, **options: Any) -> RewardResult:
    return RewardCombiner(list(rewards), **options)(IMAGES, PROMPTS, METADATA)


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    slept: list[float] = []
    monkeypatch.setattr(combiner.time, "sleep", slept.append)
    return slept


def test_brightness_is_the_mean_over_white() -> None:
    images = torch.stack([torch.full((3, 2, 2), value, dtype=torch.uint8) for value in (0, 51, 255)])
    torch.testing.assert_close(Brightness()(images, [""] * 3, [{}] * 3), torch.tensor([0.0, 0.2, 1.0]))


def test_name_is_the_class_name_in_snake_case_unless_set() -> None:
    class Named(TargetReward):
        name = "mine"

    class Grandchild(Named):
        pass

    assert [cls.name for cls in (TargetReward, NetworkReward, Named, Grandchild)] == [
        "target_reward",
        "network_reward",
        "mine",
        "grandchild",
    ]
    assert FromFunction(torch.zeros, name="other").name == "other"


def test_total_is_the_weighted_sum_and_each_score_is_kept_unweighted() -> None:
    result = score(Brightness(), TargetReward(), weights=[2.0, -0.5])
    brightness = IMAGES.float().mean(dim=(1, 2, 3)) / 255
    target = torch.arange(5.0)
    assert list(result.per_reward) == ["brightness", "target_reward"]
    torch.testing.assert_close(result.per_reward["brightness"], brightness)
    torch.testing.assert_close(result.per_reward["target_reward"], target)
    torch.testing.assert_close(result.total, 2 * brightness - 0.5 * target)
    assert {scores.dtype for scores in (result.total, *result.per_reward.values())} == {torch.float32}


def test_weights_are_one_by_default() -> None:
    result = score(Brightness(), TargetReward())
    torch.testing.assert_close(result.total, sum(result.per_reward.values()))


@pytest.mark.parametrize("micro_batch", [1, 2, 5, 8])
def test_micro_batches_give_the_same_scores_and_keep_images_with_their_prompts(micro_batch: int) -> None:
    spy = FromFunction(torch.zeros)
    result = score(Brightness(), TargetReward(), spy, micro_batch=micro_batch)
    torch.testing.assert_close(result.total, score(Brightness(), TargetReward()).total)
    assert [len(images) for images, _, _ in spy.calls] == [
        min(micro_batch, 5 - first) for first in range(0, 5, micro_batch)
    ]
    assert torch.cat([images for images, _, _ in spy.calls]).equal(IMAGES)
    assert [prompt for _, prompts, _ in spy.calls for prompt in prompts] == PROMPTS
    assert [record for _, _, metadata in spy.calls for record in metadata] == METADATA


def test_nan_stays_nan_in_the_total_of_its_image_only() -> None:
    partly = FromFunction(lambda count: torch.tensor([1.0, math.nan, 1.0, 1.0, 1.0]))
    result = score(TargetReward(), partly, weights=[1.0, 0.0])
    assert result.total.isnan().tolist() == [False, True, False, False, False]
    assert result.per_reward["target_reward"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("answer", "found", "expected"),
    [
        (lambda count: torch.zeros(count + 1), "shape [6]", 5),
        (lambda count: torch.zeros(count, 1), "shape [5, 1]", 5),
        (lambda count: torch.tensor(0.5), "shape []", 5),
        (lambda count: [0.0] * count, "a list", 5),
        (lambda count: None, "a NoneType", 5),
    ],
)
def test_wrong_answer_names_scorer_what_came_what_was_expected_and_prompts(
    answer: Callable[[int], Any], found: str, expected: int
) -> None:
    scorer = FromFunction(answer)
    message = (
        f"reward 'scripted' returned {found}; expected a tensor of shape [{expected}], one score per image; "
        "prompts: 'a red circle', 'a blue square', 'two dots' and 1 more"
    )
    with pytest.raises(RewardError, match=f"^{re.escape(message)}$"):
        score(Brightness(), scorer)
    assert len(scorer.calls) == 1


def test_wrong_answer_in_a_later_micro_batch_names_its_own_prompts() -> None:
    scorer = FromFunction(lambda count: torch.zeros(2))
    message = "returned shape [2]; expected a tensor of shape [1], one score per image; prompts: 'a star'"
    with pytest.raises(RewardError, match=re.escape(message) + "$"):
        score(scorer, micro_batch=2)


@pytest.mark.parametrize("error", [OSError("busy"), ConnectionError("refused"), TimeoutError("10 s")])
def test_transient_failure_is_retried_with_growing_delays(
    error: OSError, delays: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    answers: Iterator[OSError | Tensor] = iter([error, error, torch.ones(5)])

    def answer(count: int) -> Tensor:
        outcome = next(answers)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    assert score(FromFunction(answer)).total.tolist() == [1.0] * 5
    assert delays == [0.5, 1.0]
    assert caplog.messages == [
        f"reward 'scripted' failed, trying again in {delay} s: {error!r}" for delay in ("0.5", "1")
    ]


def failing(error: BaseException) -> FromFunction:
    def answer(count: int) -> Tensor:
        raise error

    return FromFunction(answer)


@pytest.mark.parametrize(
    ("error", "retries", "calls"),
    [
        (TimeoutError("10 s"), 2, 3),
        (TimeoutError("10 s"), 0, 1),
        (KeyError("nouns"), 2, 1),
        (RuntimeError("shape"), 2, 1),
    ],
)
def test_lasting_failure_stops_naming_scorer_and_prompts_and_chains_the_cause(
    error: Exception, retries: int, calls: int, delays: list[float]
) -> None:
    scorer = failing(error)
    message = f"reward 'scripted' failed: {error!r}; prompts: 'a red circle', 'a blue square', 'two dots' and 1 more"
    with pytest.raises(RewardError, match=f"^{re.escape(message)}$") as caught:
        score(scorer, retries=retries)
    assert caught.value.__cause__ is error
    assert len(scorer.calls) == calls
    assert len(delays) == calls - 1


def test_interruption_by_the_user_passes_through() -> None:
    with pytest.raises(KeyboardInterrupt):
        score(failing(KeyboardInterrupt()))


@pytest.mark.parametrize(
    ("rewards", "options", "message"),
    [
        ([], {}, "no rewards are configured; expected at least one"),
        ([Brightness(), Brightness()], {}, "several rewards are named brightness; give each its own name"),
        (
            [Brightness(), TargetReward()],
            {"weights": [1.0]},
            "1 weights for 2 rewards (brightness, target_reward); expected one for each",
        ),
        ([Brightness()], {"weights": [math.nan]}, "the weight of reward 'brightness' is nan; expected a finite number"),
        ([Brightness()], {"weights": [math.inf]}, "the weight of reward 'brightness' is inf; expected a finite number"),
        ([Brightness()], {"micro_batch": 0}, "micro_batch is 0; expected at least 1 image, or null for all at once"),
        ([Brightness()], {"retries": -1}, "retries is -1; expected 0 or more"),
    ],
)
def test_bad_configuration_is_refused(rewards: list[Reward], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        RewardCombiner(rewards, **options)


def test_network_of_a_reward_is_frozen_and_unchanged_by_scoring_in_train_mode() -> None:
    reward = NetworkReward()
    reward.network(torch.randn(8, 3, 4, 6))  # give the batch statistics values of their own
    before = copy.deepcopy(reward.state_dict())
    both = RewardCombiner([reward, Brightness()]).train()
    first, second = both(IMAGES, PROMPTS, METADATA), both(IMAGES, PROMPTS, METADATA)
    assert first.total.equal(second.total)
    assert not first.total.requires_grad
    assert not any(parameter.requires_grad for parameter in both.parameters())
    assert all(before[key].equal(value) for key, value in reward.state_dict().items())


def test_scorers_run_outside_the_autocast_of_the_trainer() -> None:
    reward = NetworkReward()
    expected = score(reward).total
    with torch.autocast("cpu", torch.bfloat16):
        assert score(reward).total.equal(expected)


def test_network_of_a_reward_moves_with_the_combiner() -> None:
    reward = NetworkReward()
    RewardCombiner([Brightness(), reward]).to(torch.float64)
    assert {parameter.dtype for parameter in reward.parameters()} == {torch.float64}


def test_scoring_builds_no_graph() -> None:
    weight = torch.ones(5, requires_grad=True)
    assert not score(FromFunction(lambda count: weight * 2)).total.requires_grad


def test_rewards_are_configured_by_class_path_and_init_args() -> None:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(RewardCombiner, "rewards")
    config = parser.parse_object(
        {
            "rewards": {
                "rewards": [{"class_path": "margrpo.rewards.brightness.Brightness"}],
                "weights": [3.0],
            }
        }
    )
    combined = parser.instantiate(config).rewards
    result = combined(IMAGES, PROMPTS, METADATA)
    torch.testing.assert_close(result.total, 3 * Brightness()(IMAGES, PROMPTS, METADATA))
