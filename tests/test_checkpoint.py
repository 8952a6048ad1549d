"""A killed run goes on bit for bit; a checkpoint is tensors and JSON, and one run's own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small import SILENT, Parts, go, moments, nudge, spec
from torch import Tensor

from lab import checkpoint, records
from lab.errors import LabError
from lab.records import ANSWERS, METRICS, RUN
from lab.train import run

FILES = (METRICS, ANSWERS, RUN, "pulls.json", "result.json")
#: Everything that a resumed run has to know again: moments, critic, memory, past weights.
FULL = {
    "base": "ppo",
    "kl": {"name": "adaptive", "beta": 0.5, "target": 0.5, "horizon": 20.0},
}
SHARED = {"advantage": "gae", "kl": "none"}
CASES = {
    "all": (FULL, {"lag": 1, "lr": 1e-3}),
    "shared": (SHARED, {"critic": "shared", "lr": 1e-3, "critic_warmup": 2}),
    "sgd": ("dr_grpo", {"optimizer": "sgd", "lr": 0.1}),
}


class Killed(BaseException):
    """As a signal ends a run: nothing catches it."""


def after(rollouts: int) -> Callable[[float], None]:
    """A progress callback that ends the run after so many rollouts."""
    left = [rollouts]

    def tick(share: float) -> None:
        left[0] -= 1
        if not left[0]:
            raise Killed

    return tick


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES}


@pytest.mark.parametrize(
    ("case", "every", "killed"),
    [
        ("all", 2, 3),
        ("shared", 1, 2),
        pytest.param("all", 1, 2, marks=pytest.mark.slow),
        pytest.param("shared", 2, 3, marks=pytest.mark.slow),
        pytest.param("sgd", 2, 3, marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_goes_on_bit_for_bit(
    tmp_path: Path, case: str, every: int, killed: int
) -> None:
    """Killed after the third of four rollouts with the second's checkpoint, or right at one.

    Wrong: optimiser moments, the critic, the controller's beta, past weights or counters that start
    anew; a line written twice, or keys in another order. Keeping checkpoints changes no number.
    """
    recipe, loop = CASES[case]
    given = {"loop": loop, "rollouts": 4, "eval_every": 3}
    go(tmp_path / "whole", recipe, **given)
    made = spec(recipe, **given, checkpoint_every=every)
    with pytest.raises(Killed):
        run(made, tmp_path / "killed", progress=after(killed))
    before = len(moments(tmp_path / "killed", "update"))
    assert before == 4 * killed
    said: list[str] = []
    run(made, tmp_path / "killed", say=said.append)
    assert any("going on after rollout" in line for line in said)
    whole, resumed = contents(tmp_path / "whole"), contents(tmp_path / "killed")
    for name in set(FILES) - {RUN}:
        assert resumed[name] == whole[name], name
    one, two = (json.loads(x[RUN]) for x in (whole, resumed))
    assert one["key"] == two["key"]  # checkpoints are no part of what a run is


def test_a_run_without_a_checkpoint_starts_again(tmp_path: Path) -> None:
    """Wrong: lines of the first attempt left in front of the second's."""
    go(tmp_path / "whole")
    with pytest.raises(Killed):
        run(spec(), tmp_path / "killed", progress=after(1))
    run(spec(), tmp_path / "killed")
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_a_controllers_memory_survives(tmp_path: Path) -> None:
    """It moves once a rollout: 4 rows a minibatch would be 4 moves. beta *= 1 + .2 n/horizon.

    The KL at the start is 0, below the target: 1 - .2 * 16/20 = .84 a rollout, as long as the KL
    stays below .8 * target.
    """
    made = spec(FULL, rollouts=3, checkpoint_every=1, loop={"lr": 1e-5})
    with pytest.raises(Killed):
        run(made, tmp_path, progress=after(2))
    state = json.loads((tmp_path / "checkpoint" / "state.json").read_text())
    assert state["memory"] == {"kl_reward.adaptive": {"beta": pytest.approx(0.5 * 0.84**2)}}


# -- what is saved


def parts(seed: int = 1, **loop: Any) -> Parts:
    return Parts.of(FULL, lag=2, seed=seed, **loop)


def tensors(made: Parts) -> dict[str, Tensor]:
    return checkpoint._tensors(made.roles)


def moved() -> Parts:
    made = parts()
    for number in range(2):
        rollout, step = made.rollout(number)
        made.update(rollout, step)
    return made


def test_every_tensor_comes_back(tmp_path: Path) -> None:
    """Weights of all roles, Adam's moments and step counts, past weights in their order."""
    first, second = moved(), parts(seed=2)
    assert len(first.roles.past) == 2
    checkpoint.save(tmp_path, first.roles, {"counters": 1, "x": float("inf")})
    state = checkpoint.load(tmp_path, second.roles)
    assert state == {"counters": 1, "x": float("inf")}
    one, two = tensors(first), tensors(second)
    assert one.keys() == two.keys()
    assert all(torch.equal(x, two[n]) for n, x in one.items())
    kinds = {n.split(".")[0] for n in one}
    assert kinds == {"policy", "reference", "critic", "past", "policy_steps", "critic_steps"}
    nudge(second.roles.policy)  # and it is no view of what was saved
    assert not torch.equal(tensors(second)["policy.lm_head.weight"], one["policy.lm_head.weight"])


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert checkpoint.load(tmp_path, parts().roles) is None


def test_a_checkpoint_is_no_pickle(tmp_path: Path) -> None:
    """Loading one may run anybody's code; `tests/test_records.py` looks for it in the source."""
    checkpoint.save(tmp_path, parts().roles, {})
    names = sorted(f.name for f in (tmp_path / "checkpoint").iterdir())
    assert names == ["state.json", "state.safetensors"]


@pytest.mark.parametrize("at", ["old", "old and new", "new"])
def test_killed_while_saving(tmp_path: Path, at: str) -> None:
    """Between the two renames the last checkpoint stands under another name; a new one that is
    not in place does not count.
    """
    made = moved()
    checkpoint.save(tmp_path, made.roles, {"number": 1})
    if at != "new":
        (tmp_path / "checkpoint").rename(tmp_path / ".checkpoint.old")
    if at != "old":
        (tmp_path / ".checkpoint.new").mkdir()
        (tmp_path / ".checkpoint.new" / "state.json").write_text('{"numb')
    assert checkpoint.load(tmp_path, parts().roles) == {"number": 1}
    checkpoint.save(tmp_path, made.roles, {"number": 2})
    assert checkpoint.load(tmp_path, parts().roles) == {"number": 2}
    assert [f.name for f in tmp_path.iterdir()] == ["checkpoint"]


# -- whose it is


def test_the_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    """Of the same shapes, so every tensor fits: another seed's weights under this run's name."""
    for seed in (1, 2):
        with pytest.raises(Killed):
            run(spec(seed=seed, checkpoint_every=1), tmp_path / str(seed), progress=after(1))
    shutil.rmtree(tmp_path / "1" / "checkpoint")
    shutil.move(tmp_path / "2" / "checkpoint", tmp_path / "1" / "checkpoint")
    with pytest.raises(LabError, match="holds the checkpoint of another run; give another --out"):
        run(spec(seed=1, checkpoint_every=1), tmp_path / "1")


def test_a_checkpoint_of_other_shapes_is_refused(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, parts().roles, {})
    for other in (Parts.of("ppo", critic="shared"), Parts.of(FULL, task=SILENT)):
        with pytest.raises(LabError, match="is the checkpoint of another run"):
            checkpoint.load(tmp_path, other.roles)


def test_a_finished_folder_moves_with_its_checkpoint(tmp_path: Path) -> None:
    """C2: wrong: a folder inside the run's folder, opened as a file."""
    go(tmp_path / "a", rollouts=2, checkpoint_every=1)
    assert (tmp_path / "a" / "checkpoint").is_dir()
    records.finish(tmp_path / "a", tmp_path / "runs" / "b")
    assert records.finished(tmp_path / "runs" / "b")
