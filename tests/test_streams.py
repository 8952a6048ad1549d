"""lab.streams: one generator a purpose, none a neighbour of another."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest
import torch

from lab.streams import Streams

TASK: dict[str, Any] = {"name": "copy", "version": 1, "settings": {"digits": 5}}
PURPOSES = ("weights", "prompts", "sampling", "order", "evaluation", "held_out", "warm.prompts")


def first(streams: Streams, purpose: str, step: int = 0) -> list[float]:
    return torch.rand(4, generator=streams.torch(purpose, step)).tolist()


def test_the_number_is_the_hash_it_says() -> None:
    """sha256 of the JSON with sorted keys, its first 8 bytes without the lowest bit.

    Python's hash() differs from process to process, and another machine would draw other prompts.
    """
    text = '[{"name": "copy", "settings": {"digits": 5}, "version": 1}, 7, "prompts", 3]'
    whole = int(hashlib.sha256(text.encode()).hexdigest()[:16], 16)
    assert Streams(TASK, 7).number("prompts", 3) == whole // 2
    shuffled = {"settings": {"digits": 5}, "version": 1, "name": "copy"}
    assert Streams(shuffled, 7).number("prompts", 3) == whole // 2


def test_the_same_stream_begins_anew_each_time() -> None:
    streams, again = Streams(TASK, 0), Streams(TASK, 0)
    assert first(streams, "sampling", 4) == first(streams, "sampling", 4)
    assert first(streams, "sampling", 4) == first(again, "sampling", 4)
    assert streams.python("prompts").random() == again.python("prompts").random()


def test_task_seed_purpose_and_step_each_make_another_stream() -> None:
    """N24: a purpose left out of the hash gives sampling and evaluation the same numbers."""
    other = {**TASK, "settings": {"digits": 6}}
    every = [
        Streams(task, seed).number(purpose, step)
        for task in (TASK, other, {**TASK, "version": 2})
        for seed in (0, 1, 2)
        for purpose in PURPOSES
        for step in range(20)
    ]
    assert len(set(every)) == len(every) == 3 * 3 * 7 * 20


def test_parts_do_not_run_into_each_other() -> None:
    """Joined as text, ("a1", 1) and ("a", 11) are one."""
    assert Streams(TASK, 0).number("a1", 1) != Streams(TASK, 0).number("a", 11)
    assert Streams(TASK, 1).number("1", 0) != Streams(TASK, 11).number("", 0)


def test_neighbouring_seeds_share_nothing() -> None:
    """Never `seed + 1`: seed 0 at step 1 would be seed 1 at step 0."""
    drawn = {
        tuple(first(Streams(TASK, seed), "sampling", step))
        for seed in range(30)
        for step in range(30)
    }
    assert len(drawn) == 900
    numbers = [Streams(TASK, seed).number("sampling") for seed in range(30)]
    steps = [abs(b - a) for a, b in pairwise(numbers)]
    assert min(steps) > 2**40


def test_drawing_more_from_one_stream_moves_no_other() -> None:
    """One shared generator: a recipe that samples twice would see other prompts from then on."""
    streams = Streams(TASK, 0)
    untouched = first(streams, "evaluation"), streams.python("prompts", 1).random()
    before = torch.get_rng_state()
    greedy = streams.torch("sampling")
    torch.rand(1000, generator=greedy)
    streams.python("prompts").random()
    assert (first(streams, "evaluation"), streams.python("prompts", 1).random()) == untouched
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("seed", [0, 1, 2**31, 10**30])
def test_any_seed_gives_63_bits(seed: int) -> None:
    """manual_seed refuses 2**64 and more; a sign would make two seeds one."""
    numbers = [Streams(TASK, seed).number(p, step) for p in PURPOSES for step in range(50)]
    assert all(0 <= n < 2**63 for n in numbers)
    assert max(numbers) > 2**61  # and uses them
    assert Streams(TASK, seed).torch("weights").initial_seed() == numbers[0]


def test_prompts_need_no_torch() -> None:
    """Planning a study draws prompts; torch takes a second to come."""
    code = (
        "import sys; from lab.streams import Streams; "
        "Streams({}, 0).python('prompts').random(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
