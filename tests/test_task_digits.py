"""Copy, reverse, sort and addition against other ways to the same answers."""

from __future__ import annotations

import random

import pytest

from lab.task import SPLITS, Task
from lab.task.digits import Addition, Copy, Reverse, Sort


def pairs(task: Task, n: int = 200) -> list[tuple[str, str]]:
    """Prompts without their last character, which is `>` throughout, and answers."""
    drawn = [e for split in SPLITS for e in task.draw(split, random.Random(0), n)]
    assert {e.prompt[-1] for e in drawn} == {">"}
    return [(e.prompt[:-1], e.answer) for e in drawn]


@pytest.mark.parametrize(
    ("task", "given", "answer"),
    [
        (Copy(), "38291", "38291"),
        (Reverse(), "38291", "19283"),
        (Sort(), "382914", "123489"),
        (Sort(), "900109", "000199"),  # repeated digits stay
        (Addition(), "58+67", "521"),  # 125, lowest digit first
        (Addition(), "07+05", "210"),  # 012: the leading zero is written
        (Addition(), "00+00", "000"),
        (Addition(reversed=False), "58+67", "125"),
        (Addition(reversed=False), "07+05", "012"),
        (Addition(digits=1), "9+9", "81"),
        (Addition(digits=3), "999+001", "0001"),  # 1000: the carry runs through
    ],
    ids=str,
)
def test_answers_by_hand(task: Copy | Reverse | Sort | Addition, given: str, answer: str) -> None:
    assert task.solve(given) == answer


@pytest.mark.parametrize("digits", [1, 2, 6, 32])
def test_sorting_against_counting(digits: int) -> None:
    """Kills a set (digits lost) and an order that is turned round."""
    for given, answer in pairs(Sort(digits=digits)):
        assert answer == "".join(d * given.count(d) for d in "0123456789")
        assert list(answer) == sorted(given)


@pytest.mark.parametrize("digits", [1, 5, 32])
def test_reversing_and_copying_digit_by_digit(digits: int) -> None:
    """Kills each taken for the other."""
    for given, answer in pairs(Reverse(digits=digits)):
        assert [answer[-1 - k] for k in range(digits)] == list(given)
    for given, answer in pairs(Copy(digits=digits)):
        assert answer == given


@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("digits", [1, 2, 5])
def test_addition_against_int(digits: int, turned: bool) -> None:
    """Kills a lost carry, a lost leading zero, and `reversed` the wrong way round."""
    for given, answer in pairs(Addition(digits=digits, reversed=turned)):
        a, b = given.split("+")
        assert (len(a), len(b), len(answer)) == (digits, digits, digits + 1)
        assert int("".join(answer[::-1]) if turned else answer) == int(a) + int(b)


def test_numbers_may_open_with_zero_and_are_drawn_evenly() -> None:
    """Kills randrange(10, 100): two digits without 00 to 09 are another set of prompts."""
    rng = random.Random(0)
    firsts = [Addition().example(rng).prompt[0] for _ in range(2000)]
    # 200 each; sd sqrt(2000 * .1 * .9) = 13.4
    assert all(abs(firsts.count(d) - 200) < 5 * 13.4 for d in "0123456789")


@pytest.mark.parametrize("task", [Copy(), Reverse(), Sort(), Addition()], ids=lambda t: t.name)
def test_a_wrong_digit_a_missing_one_or_one_more_earns_nothing(task: Task) -> None:
    """Kills startswith, `in`, int(response) == int(answer) and scores by matching positions."""
    for example in task.draw("train", random.Random(1), 50):
        right = example.answer
        for k, digit in enumerate(right):
            other = str((int(digit) + 1) % 10)
            assert task.score(example, right[:k] + other + right[k + 1 :]) == 0.0
        for response in (right[:-1], right[1:], "0" + right, right + "0", right + ">", f"{right} "):
            assert task.score(example, response) == 0.0
        assert task.token_rewards(example, right) is None
        assert task.responses() is None


def test_a_sum_is_not_accepted_in_the_other_order() -> None:
    """125 is 521 with the lowest digit first; only one of them is asked for."""
    (plain,) = Addition(reversed=False).draw("train", random.Random(2), 1)
    turned = plain.answer[::-1]
    assert turned != plain.answer
    assert Addition(reversed=False).score(plain, turned) == 0.0


@pytest.mark.parametrize(
    ("task", "budget"),
    [(Copy(), 6), (Reverse(), 6), (Sort(), 7), (Addition(), 4), (Addition(digits=3), 5)],
    ids=str,
)
def test_a_budget_is_the_answer_and_its_end_token(task: Task, budget: int) -> None:
    """5 + 1, 6 + 1; two digits add up to three: 2 + 1 + 1. Kills slack in which a cut row fits."""
    (example,) = task.draw("train", random.Random(0), 1)
    assert task.budget == budget == len(example.answer) + 1
