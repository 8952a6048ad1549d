"""Every sound recipe learns, in seconds; a wrong one does not. Checks, no benchmark evidence (L9).

Settings: `nano`, 16 x 8 rows a rollout, the recipe's own objective. Two recipes are changed, since
the task would be another one with them: in `ppo`, whose advantages are whitened, the KL cost is all
that is left of a solved bandit's spread, and pulls it back; in `dapo` the penalty for long answers
takes the whole reward off a right one, which fills the budget of these tasks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small import go, series
from torch import Tensor

from lab import surrogate
from lab.recipe import Use
from lab.shelf import installed

pytestmark = pytest.mark.slow

SOUND = sorted(installed().names("recipes"))
BANDIT = Use(name="bandit", settings={"arms": 3})
REVERSE = Use(name="reverse", settings={"digits": 2})
CHANGED = {"dapo": {"shape": "none"}, "ppo": {"kl": "none"}}
BATCH = {"prompts": 16, "group_size": 8}
#: Without a ratio only a fresh rollout is unbiased; a critic of its own wants smaller steps.
LOOPS: dict[str, dict[str, Any]] = {
    "reinforce": {"epochs": 1, "minibatches": 1, "lr": 1e-3},
    "rloo": {"epochs": 1, "minibatches": 1, "lr": 1e-3},
    "ppo": {"epochs": 4, "minibatches": 4, "lr": 3e-4},
}
REUSED = {"epochs": 2, "minibatches": 2, "lr": 1e-3}


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("LAB_CACHE", str(tmp_path_factory.getbasetemp() / "warm"))


@surrogate
def backwards(ratio: Tensor, advantages: Tensor) -> Tensor:
    """-r A: what is worse than its group becomes likelier."""
    return -ratio * advantages


def learn(folder: Path, given: Any, task: Use, loop: dict[str, Any], **more: Any) -> None:
    result = go(
        folder, given, task=task, loop={**BATCH, **loop}, observers=(), plugins=[backwards], **more
    )
    assert result.status == "ok"


def bandit(folder: Path, given: Any) -> list[float]:
    """J at the start, every five rollouts and at the end: summed over the arms, no sample in it."""
    loop = {"epochs": 1, "minibatches": 1, "lr": 3e-3}
    learn(folder, given, BANDIT, loop, rollouts=20, eval_every=5)
    return series(folder, "eval", "exact_score")


def reverse(folder: Path, given: Any, loop: dict[str, Any]) -> tuple[float, float]:
    """The held-out score of a warm start at 15 %, and after 20 rollouts."""
    more: dict[str, Any] = {"eval_prompts": 256, "warm_start": 0.15, "seed": 2}
    learn(folder, given, REVERSE, loop, rollouts=20, **more)
    first, last = series(folder, "eval", "score")
    return first, last


def table(name: str) -> dict[str, Any]:
    return {"base": name, **CHANGED.get(name, {})}


@pytest.mark.parametrize("name", SOUND)
def test_the_bandit_is_solved(tmp_path: Path, name: str) -> None:
    """From about J = .25 over five tokens (1 + 0 + .5 of arms) to above .9, without a step back."""
    scores = bandit(tmp_path, table(name))
    assert scores[0] < 0.4
    assert scores[-1] > 0.9
    assert scores == sorted(scores)


@pytest.mark.parametrize("name", SOUND)
def test_two_digits_are_reversed(tmp_path: Path, name: str) -> None:
    """On prompts that were never trained on. A gain of .2 is five standard errors of 256 answers:
    sqrt(.25/256) = .031 each, .044 of a difference.
    """
    first, last = reverse(tmp_path, table(name), LOOPS.get(name, REUSED))
    assert last > first + 0.2


def test_a_wrong_sign_unlearns(tmp_path: Path) -> None:
    """A lab that learns by its warm start, by its evaluation or by luck would pass the others."""
    given = {"base": "dr_grpo", "surrogate": "backwards"}
    scores = bandit(tmp_path / "bandit", given)
    assert scores[-1] < 0.1 < scores[0]
    first, last = reverse(tmp_path / "reverse", given, REUSED)
    assert first > 0.1
    assert last < 0.02


def test_no_advantage_no_learning(tmp_path: Path) -> None:
    """A group of one has no siblings to be better than: J stays where it was, exactly."""
    given = {"base": "dr_grpo", "advantage": {"singleton": "zero"}}
    loop = {"prompts": 16, "group_size": 1, "epochs": 1, "minibatches": 1, "lr": 3e-3}
    learn(tmp_path, given, BANDIT, loop, rollouts=3)
    first, last = series(tmp_path, "eval", "exact_score")
    assert first == last
