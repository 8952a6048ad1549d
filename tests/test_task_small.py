"""The bandit's table and the chain's rewards, by hand."""

from __future__ import annotations

import itertools
import random

import pytest

from lab.task import Example
from lab.task.small import Bandit, Chain

#: Stride 3 of eight letters from a: a=0, then 3=d, 6=g, 9-8=1=b, 4=e.
BY_3 = Example("3>a", "dgbe")


@pytest.mark.parametrize(
    ("arms", "table"),
    [
        (2, {"a": 1, "b": 0}),
        (3, {"a": 1, "b": 0, "c": 1 / 2}),  # TASKS X1: (1, 0, .5)
        (4, {"a": 1, "b": 0, "c": 1 / 3, "d": 2 / 3}),
        (5, {"a": 1, "b": 0, "c": 1 / 4, "d": 2 / 4, "e": 3 / 4}),
    ],
)
def test_the_arms_pay_by_the_table(arms: int, table: dict[str, float]) -> None:
    """Kills a table sorted by reward, whose best arm is the last and whose first pays 0."""
    task = Bandit(arms=arms)
    (example,) = task.draw("train", random.Random(0), 1)
    assert {r: task.score(example, r) for r in task.responses()} == table


def test_a_bandits_response_is_one_arm_and_nothing_else_pays() -> None:
    """Kills a score by the first character: a budget of one token is the core's to keep."""
    task = Bandit()
    (example,) = task.draw("held_out", random.Random(0), 1)
    assert (example.prompt, example.answer) == (">", "a")
    assert (task.stops, task.characters, task.budget) == ("abc", ">abc", 1)
    assert [task.score(example, r) for r in ("", ">", "d", "aa", "ac", "a ", "A")] == [0.0] * 7
    assert task.token_rewards(example, "c") is None


def test_the_bandits_list_makes_exact_sums() -> None:
    """TASKS X1: pi = (.5, .3, .2) gives J = .5 * 1 + .3 * 0 + .2 * .5 = .6."""
    task, pi = Bandit(), {"a": 0.5, "b": 0.3, "c": 0.2}
    (example,) = task.draw("train", random.Random(0), 1)
    assert sum(pi[r] * task.score(example, r) for r in task.responses()) == pytest.approx(0.6)
    texts = ["".join(t) for n in range(3) for t in itertools.product(task.characters, repeat=n)]
    earning = {t for t in texts if task.score(example, t) > 0}
    assert earning <= set(task.responses())


def test_a_chains_answers_follow_the_rule() -> None:
    """By a walk over the alphabet, letter by letter; kills a start that is the first action."""
    task = Chain(length=6, symbols=7)
    for example in task.draw("train", random.Random(0), 100):
        stride, at = int(example.prompt[0]), "abcdefg".index(example.prompt[2])
        walked = ""
        for _ in range(6):
            for _ in range(stride):
                at = 0 if at == 6 else at + 1
            walked += "abcdefg"[at]
        assert example.answer == walked


def test_a_chains_prompts_are_all_strides_and_starts() -> None:
    """Kills stride 0, under which repeating oneself is right, and a start that is never drawn."""
    task = Chain(symbols=4)
    drawn = {task.example(random.Random(seed)).prompt for seed in range(400)}
    assert drawn == {f"{stride}>{start}" for stride in (1, 2, 3) for start in "abcd"}


@pytest.mark.parametrize(
    ("response", "score"),
    [("dgbe", 1.0), ("dgb", 0.0), ("dgbf", 0.0), ("adgb", 0.0), ("dgbeh", 0.0), ("", 0.0)],
)
def test_a_terminal_chain_pays_for_all_or_nothing(response: str, score: float) -> None:
    task = Chain()
    assert task.score(BY_3, response) == score
    assert task.token_rewards(BY_3, response) is None


DENSE = [
    # all right: 4 * .25
    ("dgbe", [0.25, 0.25, 0.25, 0.25], 1.0),
    # a is wrong after a (d was due), but d is right after a, and so on: 3 * .25
    ("adgb", [0, 0.25, 0.25, 0.25], 0.75),
    # e is wrong after g (b was due), h is right after e: kills a comparison with the answer
    ("dgeh", [0.25, 0.25, 0, 0.25], 0.75),
    # one slip at the end: 3 * .25
    ("dgba", [0.25, 0.25, 0.25, 0], 0.75),
    # ended early: what was earned stays, 2 * .25; kills a mean over the response
    ("dg", [0.25, 0.25], 0.5),
    ("", [], 0.0),
    # h is right after e (4 + 3 = 7), but one too many: .25 * 4 - 1 = 0
    ("dgbeh", [0.25, 0.25, 0.25, 0.25, -1.0], 0.0),
    ("dgbfh>", [0.25, 0.25, 0.25, 0, -0.75, 0], 0.0),
    # nothing is right after what is no letter: g is not; b is again, after g
    ("d>gb", [0.25, 0, 0, 0.25], 0.5),
    ("3>ad", [0, 0, 0, 0.25], 0.25),
]


@pytest.mark.parametrize(("response", "rewards", "score"), DENSE, ids=str)
def test_a_dense_chain_pays_each_transition_from_the_policys_own_letter(
    response: str, rewards: list[float], score: float
) -> None:
    task = Chain(dense=True)
    assert task.token_rewards(BY_3, response) == rewards
    assert task.score(BY_3, response) == score == sum(rewards)


def test_a_dense_reward_depends_on_the_past_alone() -> None:
    """Kills rewards that a later letter changes: credit would flow backwards in time."""
    task, rng = Chain(dense=True), random.Random(0)
    for _ in range(200):
        response = "".join(rng.choices(task.characters, k=7))
        whole = task.token_rewards(BY_3, response) or []
        for k in range(8):
            assert task.token_rewards(BY_3, response[:k]) == whole[:k]


def test_both_forms_give_1_to_the_same_responses() -> None:
    """Over all 4^0 + ... + 4^4 = 341 responses: a dense optimum elsewhere would be another task."""
    dense, terminal = Chain(length=3, symbols=4, dense=True), Chain(length=3, symbols=4)
    (example,) = terminal.draw("train", random.Random(0), 1)
    texts = ["".join(t) for n in range(5) for t in itertools.product("abcd", repeat=n)]
    assert len(texts) == 341
    best = [t for t in texts if dense.score(example, t) == 1.0]
    assert best == [example.answer] == [t for t in texts if terminal.score(example, t) == 1.0]


def test_a_long_dense_chain_still_has_exactly_1() -> None:
    """Ten times .1 add up to .9999999999999999: a sum of floats would miss the optimum."""
    (example,) = Chain(length=32).draw("train", random.Random(0), 1)
    for length in range(1, 33):
        task = Chain(length=length, dense=True)
        assert task.score(example, example.answer[:length]) == 1.0


def test_the_control_of_a_chain_ties() -> None:
    """length = 1: dense and terminal pay the same for every response that can end in time."""
    dense, terminal = Chain(length=1, dense=True), Chain(length=1)
    for example in terminal.draw("held_out", random.Random(0), 10):
        for response in ("", *terminal.characters):
            assert dense.score(example, response) == terminal.score(example, response)
