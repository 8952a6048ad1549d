"""One run, one result: on the second try, in another process, after other runs, beside others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small import SIGNAL, Parts, flat, go, moments, series

from lab import warm
from lab.recipe import Use
from lab.records import TIME
from lab.shelf import installed

#: As much as there is in a run: critic, controller, stale behaviour, truncated support.
FULL: dict[str, Any] = {
    "given": {"base": "ppo", "kl": {"name": "adaptive", "horizon": 20.0}},
    "loop": {"lag": 1, "temperature": 0.9, "top_p": 0.95, "lr": 1e-3},
    "rollouts": 2,
}
RECIPES = sorted(installed().names("recipes"))


def full(folder: Path, **more: Any) -> dict[str, bytes]:
    go(folder, **{**FULL, **more})
    return contents(folder)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a run but its times."""
    return {f.name: f.read_bytes() for f in sorted(folder.iterdir()) if f.name != TIME}


def test_a_used_worker_repeats_a_run_byte_for_byte(tmp_path: Path, monkeypatch: Any) -> None:
    """C4, D2: other recipes, seeds and draws in between, and another folder.

    Wrong: a global generator, a cache or a controller that remembers earlier runs, a time or a
    path in a record.
    """
    monkeypatch.setenv("LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(warm, "_IN_MEMORY", {})
    task = Use(name="reverse", settings={"digits": 1})
    first = full(tmp_path / "first", task=task, warm_start=0.2)
    torch.manual_seed(1234)
    go(tmp_path / "between", "grpo", rollouts=1)
    full(tmp_path / "other", seed=7)
    torch.rand(99)
    assert full(tmp_path / "deep" / "second", task=task, warm_start=0.2) == first
    assert {"metrics.jsonl", "answers.jsonl", "result.json", "run.json"} <= first.keys()


SCRIPT = """
import sys
import torch

torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import test_train_repeat

test_train_repeat.full(Path(sys.argv[2]))
"""


@pytest.mark.slow
def test_a_fresh_process_repeats_it_too(tmp_path: Path) -> None:
    """Wrong: an order from a set or from `hash`, which differ between processes."""
    go(tmp_path / "before", "grpo", rollouts=1)
    here = full(tmp_path / "here")
    for seed in ("1", "2"):
        folder = tmp_path / seed
        env = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parent), str(folder)]
        subprocess.run(command, check=True, env=env, capture_output=True)
        assert contents(folder) == here


def test_another_seed_is_another_run(tmp_path: Path) -> None:
    one, two = full(tmp_path / "1"), full(tmp_path / "2", seed=2)
    assert all(one[n] != two[n] for n in ("metrics.jsonl", "answers.jsonl", "run.json"))
    starts = [moments(tmp_path / n, "eval")[0].metrics for n in ("1", "2")]
    assert starts[0] != starts[1]


# -- two recipes with one seed


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_share_start_prompts_and_first_rollout(name: str) -> None:
    """R1, E1: bit for bit, with or without a critic, a reference or a filter.

    Wrong: weights made before seeding, a head or a reference that draws from their stream, a
    stream that hangs on the recipe.
    """
    plain, other = Parts.of("dr_grpo"), Parts.of(name, observers=("kl_ref", "entropy"))
    assert torch.equal(plain.weights(), other.weights())
    if other.roles.reference is not None:
        assert torch.equal(flat(other.roles.reference), plain.weights())
    one = plain.rollout()[0].scored
    two = other.rollout()[0].sampled.rows(torch.arange(16))  # a filter may sample more
    assert [e.prompt for e in two.examples] == [e.prompt for e in one.examples]
    assert two.texts == one.texts
    assert torch.equal(two.samples.logp, one.samples.logp)
    assert torch.equal(two.rewards, one.rewards)


def test_recipes_share_their_warm_start_and_first_evaluation(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(warm, "_IN_MEMORY", {})
    task = Use(name="reverse", settings={"digits": 1})
    first = []
    for name in ("ppo", "cispo", "reinforce"):
        go(tmp_path / name, name, task=task, warm_start=0.2, rollouts=1)
        first.append([moments(tmp_path / name, at)[0].metrics for at in ("start", "eval")])
    assert first[0] == first[1] == first[2]
    assert first[0][0]["accuracy"] >= 0.2
    assert len({tuple(series(tmp_path / n, "update", "loss")) for n in ("ppo", "cispo")}) == 2


def test_the_second_rollout_differs_by_the_weights_alone() -> None:
    """Prompts of each rollout are the seed's; equal weights would give equal samples."""
    one, two = Parts.of("dr_grpo"), Parts.of("reinforce")
    for parts in (one, two):
        parts.rollout()
    first, second = one.rollout(1)[0].scored, two.rollout(1)[0].scored
    assert first.texts == second.texts
    assert first.texts != one.rollout(2)[0].scored.texts


# -- streams that do not touch each other


@pytest.mark.parametrize(
    "more",
    [
        {"observers": ()},
        {"eval_prompts": 40, "eval_every": 1},
        pytest.param({"checkpoint_every": 1}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_looking_changes_nothing(tmp_path: Path, more: dict[str, Any]) -> None:
    """N24: an observer's forward pass, a larger or a further evaluation, a checkpoint.

    Wrong: one generator for all: whoever draws more for one purpose moves the others.
    """
    go(tmp_path / "a", **FULL)
    go(tmp_path / "b", **{**FULL, **more})
    for at, name in (("update", "loss"), ("update", "grad_norm"), ("rollout", "reward")):
        assert series(tmp_path / "a", at, name) == series(tmp_path / "b", at, name)


def test_more_prompts_begin_with_the_same() -> None:
    """A larger rollout is a smaller one and more, so batch sizes are compared on one ground."""
    few, many = Parts.of(prompts=3), Parts.of(prompts=6)
    one, two = (p.rollout()[0].scored.examples for p in (few, many))
    assert one[::4] == two[::4][:3]


def test_the_anchor_is_one_where_sampler_and_trainer_are(tmp_path: Path) -> None:
    """In float32 the sampler's log-probs are old_logp: both anchors give one run."""
    for anchor in ("old", "rollout"):
        go(tmp_path / anchor, "cispo", loop={"anchor": anchor, "lr": 1e-3}, task=SIGNAL)
    one, two = (contents(tmp_path / a)["metrics.jsonl"] for a in ("old", "rollout"))
    assert one == two
