"""The supervised warm start: taught to a stated accuracy, per seed, cached by all that makes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from small import flat
from torch import Tensor

from lab import warm
from lab.errors import LabError
from lab.policy import Policy
from lab.streams import Streams
from lab.task import Chain, Reverse, Task, record
from lab.tokens import Sampling

EASY = Reverse(digits=1)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: Any) -> Path:
    """A cache of its own; nothing remembered from earlier tests."""
    monkeypatch.setenv("LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(warm, "_IN_MEMORY", {})
    return tmp_path / "cache"


def start(seed: int = 1, target: float = 0.2, task: Task = EASY) -> tuple[Policy, warm.Start]:
    return warm.start("nano", task, target, Streams(record(task), seed), lambda text: None)


def weights(seed: int = 1, target: float = 0.2, task: Task = EASY) -> Tensor:
    return flat(start(seed, target, task)[0])


def untaught(monkeypatch: Any) -> None:
    """From now on, teaching anything is a mistake."""

    def never(*given: Any) -> Any:
        raise AssertionError("taught again")

    monkeypatch.setattr(warm, "_teach", never)


def test_no_target_no_teaching(cache: Path, monkeypatch: Any) -> None:
    untaught(monkeypatch)
    policy, reached = start(target=0.0)
    assert reached == warm.Start(0, 0.0)
    assert torch.equal(flat(policy), weights(target=0.0))
    assert not torch.equal(flat(policy), weights(seed=2, target=0.0))
    assert not cache.exists()


def test_teaching_ends_at_the_accuracy(cache: Path) -> None:
    """The first look at or above the target ends it, and a fresh sample agrees with that look.

    256 sampled answers each: their difference has a standard deviation below sqrt(2/4/256) = .045.
    """
    policy, reached = start(target=0.3)
    assert 0.3 <= reached.accuracy < 0.6
    assert 0 < reached.steps <= 300
    assert reached.steps % warm.Teaching().check_every == 0
    streams = Streams(record(EASY), 99)
    examples = EASY.draw("train", streams.python("again"), 256)
    given = ([e.prompt for e in examples], 1, EASY.budget, Sampling(), streams.torch("again"))
    texts = policy.texts(policy.sample(*given, policy.stop_ids(EASY.stops)))
    right = sum(t == e.answer for e, t in zip(examples, texts, strict=True)) / 256
    assert abs(right - reached.accuracy) < 4 * 0.045
    assert start(target=0.5)[1].steps > reached.steps


def test_one_seed_is_one_start_wherever_it_comes_from(cache: Path, monkeypatch: Any) -> None:
    """R1: taught, remembered, read from the file and taught once more elsewhere: the same bits.

    Wrong: cached weights that the first run has trained on since, a draw from a global generator.
    """
    policy, reached = start()
    taught = flat(policy)
    with torch.no_grad():
        for p in policy.model.parameters():
            p.zero_()  # what a run does to its policy is not the cache's
    torch.manual_seed(5)
    with monkeypatch.context() as later:
        untaught(later)
        assert torch.equal(weights(), taught)
        later.setattr(warm, "_IN_MEMORY", {})
        again, said = start()
        assert torch.equal(flat(again), taught)
        assert said == reached
    monkeypatch.setattr(warm, "_IN_MEMORY", {})
    monkeypatch.setenv("LAB_CACHE", str(cache / "other"))
    assert torch.equal(weights(), taught)


def test_what_makes_it_tells_it_apart(cache: Path) -> None:
    """Wrong: one checkpoint for all seeds: every interval would be conditional on it."""
    made = [weights(), weights(seed=2), weights(target=0.3), weights(task=Chain(length=1))]
    assert len(list(cache.glob("*.safetensors"))) == 4
    assert len({x.sum().item() for x in made}) == 4


def test_other_code_is_another_start(cache: Path, monkeypatch: Any) -> None:
    weights()
    monkeypatch.setattr(warm, "core_hash", lambda: "edited")
    monkeypatch.setattr(warm, "_IN_MEMORY", {})
    weights()
    assert len(list(cache.glob("*"))) == 2


def test_the_cache_is_tensors_and_no_pickle(cache: Path) -> None:
    weights()
    (file,) = cache.iterdir()
    with safe_open(file, "pt") as opened:
        assert "lab.start" in opened.keys()  # noqa: SIM118  # no mapping


def test_a_torn_cache_is_made_again(cache: Path, monkeypatch: Any) -> None:
    taught = weights()
    (file,) = cache.iterdir()
    file.write_bytes(file.read_bytes()[:100])
    monkeypatch.setattr(warm, "_IN_MEMORY", {})
    assert torch.equal(weights(), taught)
    assert file.stat().st_size > 100


def test_a_cache_that_cannot_be_written_costs_time_only(cache: Path, monkeypatch: Any) -> None:
    cache.parent.joinpath("file").write_text("no folder")
    monkeypatch.setenv("LAB_CACHE", str(cache.parent / "file"))
    assert start()[1].accuracy >= 0.2


def test_the_folder_is_the_one_named(monkeypatch: Any, tmp_path: Path) -> None:
    assert warm.folder() == tmp_path / "cache"
    monkeypatch.delenv("LAB_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert warm.folder() == Path("/x/policy-gradient-lab")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/who")
    assert warm.folder() == Path("/home/who/.cache/policy-gradient-lab")


def test_memory_does_not_grow_with_seeds(monkeypatch: Any) -> None:
    monkeypatch.setattr(warm, "_REMEMBERED", 1)
    for seed in range(2):
        start(seed)
    assert len(warm._IN_MEMORY) == 1


def test_a_target_out_of_reach_is_an_error(monkeypatch: Any) -> None:
    short = warm.Teaching(most_steps=2)
    monkeypatch.setattr(warm, "Teaching", lambda: short)
    line = r"task reverse reached 0\.\d\d in 2 steps; 0.99 was due: take an easier setting"
    with pytest.raises(LabError, match=line):
        start(target=0.99)


def test_only_training_prompts_are_taught(monkeypatch: Any) -> None:
    """Wrong: teaching on held-out prompts: their score would be memory."""
    splits = []
    honest = Chain.draw

    def kept(self: Any, split: Any, *given: Any) -> Any:
        splits.append(split)
        return honest(self, split, *given)

    monkeypatch.setattr(Chain, "draw", kept)
    start(task=Chain(length=1, symbols=4), target=0.3)
    assert set(splits) == {"train"}
    assert len(splits) >= 3


def test_a_verifier_without_a_score_is_no_right_answer(monkeypatch: Any) -> None:
    """G7: None is not 1, and not an exception after a minute of teaching."""
    short = warm.Teaching(most_steps=2)
    monkeypatch.setattr(warm, "Teaching", lambda: short)
    monkeypatch.setattr(Reverse, "score", lambda self, example, response: None)
    with pytest.raises(LabError, match=r"reached 0\.00"):
        start(target=0.3)
