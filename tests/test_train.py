"""The core loop: how often rows are used, when a run ends, what moves when, what is written."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small import ONE_UPDATE, SILENT, go, moments, series, spec
from torch import Tensor

from lab import surrogate, train
from lab.errors import LabError
from lab.records import METRICS, PULLS, RESULT, RUN, TIME, read_json
from lab.settings import Budget
from lab.shelf import installed
from lab.train import run

Indices = list[list[int]]


@pytest.fixture
def used(monkeypatch: Any) -> Indices:
    """The rows of each update, in the order of a run."""
    found: Indices = []
    honest = train.update

    def kept(bench: Any, roles: Any, samples: Any, step: Any, index: Tensor, *more: bool) -> Any:
        found.append(index.tolist())
        return honest(bench, roles, samples, step, index, *more)

    monkeypatch.setattr(train, "update", kept)
    return found


def test_three_rollouts_of_two_epochs_of_four_minibatches(tmp_path: Path, used: Indices) -> None:
    """E2, N23: 3 * 2 * 4 = 24 updates, each row once an epoch, in a fresh order each time.

    Wrong: E and M exchanged, one order for all epochs, sampling with replacement, minibatches as
    rows of one prompt, a token of a second epoch that is not counted.
    """
    result = go(tmp_path, "dr_grpo", rollouts=3, loop={"epochs": 2, "minibatches": 4})
    assert result.counters["update"] == len(used) == len(moments(tmp_path, "update")) == 24
    assert [len(rows) for rows in used] == [4] * 24
    epochs = [tuple(itertools.chain(*used[i : i + 4])) for i in range(0, 24, 4)]
    assert all(sorted(rows) == list(range(16)) for rows in epochs)
    assert len(set(epochs)) == 6
    assert result.counters["trained_tokens"] == 2 * result.counters["generated_tokens"]
    assert series(tmp_path, "rollout", "updates") == [8.0] * 3


@pytest.mark.parametrize(("minibatches", "sizes"), [(3, [6, 5, 5]), (1, [16]), (20, [1] * 16)])
def test_rows_that_do_not_divide(
    tmp_path: Path, used: Indices, minibatches: int, sizes: list[int]
) -> None:
    """No row is dropped, and there is no update on nothing."""
    go(tmp_path, "dr_grpo", rollouts=1, loop={"epochs": 1, "minibatches": minibatches})
    assert [len(rows) for rows in used] == sizes
    assert sorted(itertools.chain(*used)) == list(range(16))


@surrogate(needs_group=2)
def in_groups(ratio: Tensor, advantages: Tensor, group: Tensor) -> Tensor:
    """r A, of whole groups."""
    return ratio * advantages


@pytest.mark.parametrize(
    "given",
    [
        {"surrogate": "in_groups"},
        {"aggregate": "prompt_mean"},
        {"kl": {"aggregate": "prompt_mean"}},
    ],
    ids=str,
)
def test_groups_stay_whole_where_the_update_reads_them(
    tmp_path: Path, used: Indices, given: Any
) -> None:
    """Three of six groups a minibatch, shuffled. Wrong: half a prompt's rows taken for the prompt:
    its mean, and its weight, would depend on who else is in the minibatch.
    """
    go(tmp_path, given, plugins=[in_groups], loop={"prompts": 6})
    for rows in used:
        assert len(rows) == 12
        assert all({4 * (r // 4) + i for i in range(4)} <= set(rows) for r in rows)
    assert len({tuple(sorted(rows)) for rows in used}) > 2


def test_groups_are_mixed_where_it_does_not(tmp_path: Path, used: Indices) -> None:
    """The baseline is the rollout's: rows of one prompt in one minibatch only add noise."""
    go(tmp_path, {"normalize": "whiten"}, rollouts=1)
    assert any(len({r // 4 for r in rows}) > 2 for rows in used)


# -- when a run ends


@pytest.mark.parametrize(
    ("budget", "counter"),
    [
        ({"rollouts": 3}, "rollout"),
        ({"updates": 9}, "update"),
        ({"generated_tokens": 130}, "generated_tokens"),
        ({"trained_tokens": 150}, "trained_tokens"),
    ],
    ids=str,
)
def test_a_run_ends_with_the_rollout_that_reaches_its_budget(
    tmp_path: Path, budget: dict[str, int], counter: str
) -> None:
    """Each counter is its own; the last evaluation stands at the end whatever eval_every is.

    Wrong: one rollout more or fewer, padding counted as tokens, generated for trained.
    """
    shares: list[float] = []
    made = spec(budget=Budget(**budget), eval_every=7)
    result = run(made, tmp_path, progress=shares.append)
    (limit,) = budget.values()
    lines = moments(tmp_path, "rollout")
    assert [m.counters[counter] >= limit for m in lines] == [False] * (len(lines) - 1) + [True]
    assert shares == [min(1.0, m.counters[counter] / limit) for m in lines]
    length = series(tmp_path, "rollout", "response_length")
    tokens = [round(16 * x) for x in itertools.accumulate(length)]
    assert [m.counters["generated_tokens"] for m in lines] == tokens
    assert [m.counters["trained_tokens"] for m in lines] == [2 * n for n in tokens]
    assert [m.counters["update"] for m in lines] == [4 * (i + 1) for i in range(len(lines))]
    assert moments(tmp_path, "eval")[-1].counters == result.counters == lines[-1].counters


def test_trained_tokens_are_those_that_pull(tmp_path: Path) -> None:
    """Rows that a filter refuses were generated, and are not trained on."""
    result = go(tmp_path, {"filter": ["zero_variance"]}, task=SILENT)
    assert result.counters["trained_tokens"] == 0 < result.counters["generated_tokens"]
    assert result.counters["update"] == 8


# -- what moves when


def test_kl_stop_ends_a_rollouts_updates(tmp_path: Path) -> None:
    """Looked at before each step: the first, at KL 0, is always made. 0 is off."""
    for stop, most in ((1e-4, 3), (0.0, 4)):
        loop = {"kl_stop": stop, "lr": 3e-3}
        result = go(tmp_path / str(stop), "dr_grpo", loop=loop)
        made = series(tmp_path / str(stop), "rollout", "updates")
        assert all(1 <= n <= most for n in made)
        assert sum(made) == result.counters["update"]
        assert (made == [4.0, 4.0]) is (stop == 0)


@pytest.mark.parametrize("critic", ["own", "shared"])
@pytest.mark.parametrize(("rollouts", "still"), [(2, True), (3, False)])
def test_the_policy_stands_still_while_the_critic_warms_up(
    tmp_path: Path, critic: str, rollouts: int, still: bool
) -> None:
    """critic_warmup = 2: bit-equal to the reference after two rollouts, moved after the third.

    Wrong: warm-up counted in updates, or a shared backbone moved by the critic's loss.
    """
    loop = {"critic_warmup": 2, "critic": critic, "lr": 1e-3, **ONE_UPDATE}
    go(tmp_path, "ppo", rollouts=rollouts + 1, loop=loop, checkpoint_every=rollouts)
    saved = load_file(tmp_path / "checkpoint" / "state.safetensors")
    pairs = [(x, saved[f"reference.{n[7:]}"]) for n, x in saved.items() if n.startswith("policy.")]
    assert len(pairs) > 5
    assert all(torch.equal(a, b) for a, b in pairs) is still
    head = "critic.head.weight" if critic == "own" else "head.weight"
    assert saved[head].any()


Call = tuple[int, float, float]


def _spy(calls: list[Call]) -> Any:
    def count(memory: Mapping[str, Any], step: Mapping[str, Any]) -> dict[str, Any]:
        assert step["mask"].shape[0] == step["advantages"].shape[0] == 16  # the whole rollout
        return {"n": memory.get("n", 0) + 1}

    @surrogate(remember=count)
    def spy(ratio: Tensor, advantages: Tensor, *, memory: Any, progress: float, rng: Any) -> Tensor:
        """r A, and what it was told."""
        calls.append((memory.get("n", 0), progress, float(torch.rand(1, generator=rng))))
        return ratio * advantages

    return spy


def test_memory_progress_and_draws_move_on(tmp_path: Path) -> None:
    """Memory and progress once a rollout, after its last update; a draw of its own each update,
    the same when the run is repeated.

    Wrong: a controller called once per update (beta moves E x M times too fast) or before them.
    """
    every: list[list[Call]] = [[], []]
    for calls in every:
        go(tmp_path / str(len(every[0])), {"surrogate": "spy"}, plugins=[_spy(calls)], observers=())
    calls = every[0][-8:]  # before them: the probe, the pull curve
    assert [n for n, _, _ in calls] == [0] * 4 + [1] * 4
    assert [p for _, p, _ in calls] == [0.0] * 4 + [0.5] * 4
    assert len({x for _, _, x in calls}) == 8
    assert every[1][-8:] == calls


# -- what is written


def test_the_lines_of_a_run(tmp_path: Path) -> None:
    """In the order in which things happen, each with the counters of its moment."""
    result = go(tmp_path, "ppo", rollouts=2, eval_every=1, loop={"epochs": 1})
    lines = [(json.loads(x)["at"], json.loads(x)["update"]) for x in open_lines(tmp_path)]
    assert lines == [
        *[("start", 0), ("eval", 0)],
        *[("update", 1), ("update", 2), ("rollout", 2), ("eval", 2)],
        *[("update", 3), ("update", 4), ("rollout", 4), ("eval", 4)],
    ]
    first = moments(tmp_path, "update")[0].metrics
    recorded = {"loss", "critic_loss", "grad_norm", "grad_norm_after", "grad_clipped"}
    recorded |= {"critic_grad_norm", "outside", "flat", "capped", "kl_old_k3", "kl_ref_k3"}
    assert recorded | {"entropy", "ratio_ess", "explained_variance"} <= first.keys()
    found = read_json(tmp_path / RESULT)
    assert found == {
        "status": "ok",
        "counters": dict(result.counters),
        "final": dict(result.final),
        "failure": None,
    }


def open_lines(folder: Path) -> list[str]:
    return (folder / METRICS).read_text().splitlines()


def test_a_runs_record_says_all_that_it_was(tmp_path: Path) -> None:
    given = {"surrogate": {"name": "cispo", "cap": 2.0}}
    result = go(tmp_path, given)
    body = read_json(tmp_path / RUN)
    assert body["key"] == result.key
    assert body["spec"] == spec(given).data()
    row = next(r for r in body["record"]["components"] if r["slot"] == "surrogate")
    assert row["parameters"] == {"cap": 2.0, "floor": None}
    assert body["bounds"] == body["interval"] == [None, 2.0]
    assert {"core", "libraries", "device", "threads"} <= body["environment"].keys()
    pulls = read_json(tmp_path / PULLS)
    at = dict(
        zip(pulls["ratio"], zip(pulls["positive"], pulls["negative"], strict=True), strict=True)
    )
    assert at[1.0] == (1.0, -1.0)
    assert at[10.0] == (2.0, -2.0)  # held at the cap
    assert at[0.1] == pytest.approx((0.1, -0.1))


def test_times_stand_in_a_file_of_their_own(tmp_path: Path) -> None:
    """D2."""
    go(tmp_path)
    names = sorted(f.name for f in tmp_path.iterdir())
    assert names == ["answers.jsonl", METRICS, PULLS, RESULT, RUN, TIME]
    seconds = read_json(tmp_path / TIME)["seconds"]
    assert seconds.keys() == {"start", "sampling", "updates", "evaluation"}
    assert all(x > 0 for x in seconds.values())
    for name in set(names) - {TIME}:
        assert "second" not in (tmp_path / name).read_text()


def test_a_finished_run_is_not_made_again(tmp_path: Path, monkeypatch: Any) -> None:
    first = go(tmp_path)
    before = {f.name: f.read_bytes() for f in tmp_path.iterdir()}
    monkeypatch.setattr(train.warm, "start", None)
    assert go(tmp_path) == first
    assert {f.name: f.read_bytes() for f in tmp_path.iterdir()} == before


@pytest.mark.parametrize("done", [True, False])
def test_the_folder_of_another_run_is_refused(tmp_path: Path, done: bool) -> None:
    """Wrong: its lines continued, or overwritten; the message names the way out."""
    go(tmp_path)
    if not done:
        (tmp_path / RESULT).unlink()
    before = {f.name: f.read_bytes() for f in tmp_path.iterdir()}
    with pytest.raises(LabError, match=r"holds another run .*; give another --out"):
        go(tmp_path, seed=2)
    assert {f.name: f.read_bytes() for f in tmp_path.iterdir()} == before


@pytest.mark.parametrize("name", sorted(installed().names("recipes")))
def test_every_recipe_runs(tmp_path: Path, name: str) -> None:
    """One rollout, with all observers; nothing that is recorded is infinite."""
    result = go(tmp_path, name, rollouts=1, loop=ONE_UPDATE)
    assert (result.status, result.counters["update"]) == ("ok", 1)
    for moment in moments(tmp_path, "update") + moments(tmp_path, "rollout"):
        odd = {n: x for n, x in moment.metrics.items() if not abs(x) < 1e6}
        assert odd.keys() <= {"explained_variance"}  # undefined where all returns are equal


def test_observers_look_at_every_third_update(tmp_path: Path) -> None:
    """2 rollouts x 4 updates: 0, 3, 6 of 0..7; the loop's own numbers stand in each line.

    And what is learnt does not depend on who looks: kills an entropy that is part of the graph.
    """
    folders = {every: tmp_path / str(every) for every in (1, 3)}
    for every, folder in folders.items():
        go(folder, rollouts=2, observers=("clipping", "entropy"), observe_every=every)
    lines = [m.metrics for m in moments(folders[3], "update")]
    assert [i for i, m in enumerate(lines) if "outside" in m] == [0, 3, 6]
    assert [i for i, m in enumerate(lines) if "entropy" in m] == [0, 3, 6]
    assert all({"loss", "grad_norm"} <= m.keys() for m in lines)
    whole = [m.metrics for m in moments(folders[1], "update")]
    assert [m["grad_norm"] for m in lines] == [m["grad_norm"] for m in whole]
