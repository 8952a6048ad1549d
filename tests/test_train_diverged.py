"""What is not finite ends a run as `diverged`: named, counted, no weight touched by that step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small import ONE_UPDATE, SGD, flat, go, moments
from torch import Tensor

from lab import (
    advantage,
    critic_loss,
    critic_target,
    extra_loss,
    kl_loss,
    kl_reward,
    normalize,
    records,
    shape_reward,
    surrogate,
    train,
)
from lab.errors import LabError
from lab.records import RESULT, read_json
from lab.update import DivergedError

INF = torch.inf


@surrogate
def late(ratio: Tensor, advantages: Tensor, *, progress: float) -> Tensor:
    """r A, and infinity from the second rollout on."""
    return ratio * advantages + (INF if progress > 0 else 0.0)


@surrogate
def rooted(ratio: Tensor, advantages: Tensor) -> Tensor:
    """r A + sqrt |r - 1|: finite at r = 1, and its slope is not."""
    return ratio * advantages + (ratio - 1).abs().sqrt()


@surrogate(wrapper=True)
def broken(advantages: Tensor, *, progress: float) -> Any:
    """A wrapper that breaks what it surrounds."""
    return (yield) + (INF if progress > 0 else 0.0)


@advantage
def sunk(rewards: Tensor, mask: Tensor, *, progress: float) -> Tensor:
    """NaN advantages."""
    return rewards[:, None] * mask * (torch.nan if progress > 0 else 1.0)


@normalize
def halved(advantages: Tensor, *, progress: float) -> Tensor:
    """A / 0 from the second rollout on."""
    return advantages / (0.0 if progress > 0 else 2.0)


@shape_reward
def shaped(rewards: Tensor, *, progress: float) -> Tensor:
    """An infinite bonus."""
    return rewards + (INF if progress > 0 else 0.0)


@kl_reward
def charged(old_logp: Tensor, *, progress: float) -> Tensor:
    """An infinite cost."""
    return old_logp * (INF if progress > 0 else 1.0)


@kl_loss
def pulled(logp: Tensor, *, progress: float) -> Tensor:
    """An infinite penalty."""
    return logp * (INF if progress > 0 else 1.0)


@extra_loss
def added(logp: Tensor, *, progress: float) -> Tensor:
    """An infinite loss."""
    return logp * (INF if progress > 0 else 0.1)


@extra_loss
def steep(logp: Tensor, *, progress: float) -> Tensor:
    """A finite loss without a finite slope: sqrt(logp - logp)."""
    return (logp - logp.detach()).abs().sqrt() if progress > 0 else 0.1 * logp


@critic_target
def dreamt(values: Tensor, *, progress: float) -> Tensor:
    """Infinite returns."""
    return values + (INF if progress > 0 else 0.0)


@critic_loss
def lost(values: Tensor, returns: Tensor, *, progress: float) -> Tensor:
    """An infinite critic's loss."""
    return (values - returns) ** 2 * (INF if progress > 0 else 1.0)


PLUGINS = (late, rooted, broken, sunk, halved, shaped, charged, pulled, added, steep, dreamt, lost)
GAE = {"advantage": "gae", "kl": "none"}
#: slots -> the hook and the component to be named, and how many updates are made before.
CASES: dict[str, tuple[dict[str, Any], str, str, int]] = {
    "surrogate": ({"surrogate": "late"}, "surrogate", "surrogate 'late'", 4),
    "its slope": ({"surrogate": "rooted"}, "surrogate", "surrogate 'rooted'", 0),
    "a wrapper": ({"wrap": ["broken"]}, "surrogate", "'broken'", 4),
    "advantage": ({"advantage": "sunk"}, "advantage", "advantage 'sunk'", 4),
    "normalize": ({"normalize": "halved"}, "normalize", "normalize 'halved'", 4),
    "per minibatch": (
        {"normalize": {"name": "halved", "per": "minibatch"}},
        *("normalize", "normalize 'halved'", 4),
    ),
    "shape": ({"shape": ["shaped"]}, "shape_reward", "'shaped'", 4),
    "kl in the reward": ({"kl": "charged"}, "kl_reward", "kl 'charged'", 4),
    "kl in the reward, after": (
        {"kl": {"name": "charged", "when": "after"}},
        *("kl_reward", "kl 'charged'", 4),
    ),
    "kl in the loss": ({"kl": "pulled"}, "kl_loss", "kl 'pulled'", 4),
    "extra": ({"extra": ["entropy", "added"]}, "extra_loss", "'added'", 4),
    "a slope alone": ({"extra": ["steep"]}, "gradient", "", 4),
    "critic target": ({**GAE, "critic_target": "dreamt"}, "critic_target", "'dreamt'", 4),
    "critic loss": ({**GAE, "critic_loss": "lost"}, "critic_loss", "'lost'", 4),
}


@pytest.fixture
def untouched(monkeypatch: Any) -> list[bool]:
    """Whether each step that failed left the policy and the critic as they were."""
    found: list[bool] = []
    honest = train.update

    def weights(roles: Any) -> Tensor:
        critic = [p.detach().flatten() for p in roles.critic.parameters()] if roles.critic else []
        return torch.cat([flat(roles.policy), *critic])

    def kept(bench: Any, roles: Any, *rest: Any) -> Any:
        before = weights(roles)
        try:
            return honest(bench, roles, *rest)
        except DivergedError:
            found.append(torch.equal(weights(roles), before))
            raise

    monkeypatch.setattr(train, "update", kept)
    return found


@pytest.mark.parametrize("case", CASES)
def test_what_is_not_finite_is_named(tmp_path: Path, untouched: list[bool], case: str) -> None:
    """D4, K7: the hook that made it, its component and what was seen stand in the result.

    Wrong: a step skipped and the run gone on, the clip that turns a NaN norm into NaN weights, a
    cause that is always the last hook of the chain, weights moved by half of a step.
    """
    given, hook, component, updates = CASES[case]
    given = {"kl": "none", **given}
    more: dict[str, Any] = {"observers": (), "rollouts": 3, "loop": {"lr": 1e-3}}
    result = go(tmp_path, given, plugins=PLUGINS, **more)
    assert result.status == "diverged"
    body = read_json(tmp_path / RESULT)
    assert body["status"] == "diverged"
    failure = body["failure"]
    assert (failure["update"], failure["hook"]) == (updates, hook)
    assert component in failure["component"]
    assert "not finite" in failure["statistic"]
    assert body["counters"]["update"] == updates == len(moments(tmp_path, "update"))
    assert untouched in ([True], [])  # a rollout's hooks fail before any step
    assert body["final"] == moments(tmp_path, "eval")[-1].metrics


@pytest.mark.parametrize(
    ("loop", "hook"), [({}, "ratio"), (ONE_UPDATE, "sampling")], ids=["in a rollout", "at its end"]
)
def test_a_policy_that_explodes(
    tmp_path: Path, untouched: list[bool], loop: dict[str, Any], hook: str
) -> None:
    """One step of 1e30: finite weights, and no finite logits any more.

    Wrong: torch's own exception from the next sample: a crash that a study runs again.
    """
    result = go(tmp_path, "dr_grpo", rollouts=3, loop={**SGD, "lr": 1e30, **loop})
    assert result.status == "diverged"
    assert result.failure is not None
    assert result.failure["hook"] == hook
    assert result.failure["update"] == 1
    assert result.counters["generated_tokens"] > 0


def test_a_diverged_run_is_a_result(tmp_path: Path, monkeypatch: Any) -> None:
    """D4: it is not made again, and its rows say what it was."""
    given: dict[str, Any] = {"plugins": PLUGINS, "rollouts": 3}
    first = go(tmp_path, {"surrogate": "late"}, **given)
    table = records.run_table(tmp_path, dict.fromkeys(records.COLUMNS[:8], "x"))
    assert set(table["status"]) == {"diverged"}
    assert table[table["metric"] == "loss"]["update"].tolist() == [4]
    monkeypatch.setattr(train.warm, "start", None)
    assert go(tmp_path, {"surrogate": "late"}, **given) == first


def test_a_component_that_raises_is_no_divergence(tmp_path: Path) -> None:
    """Its mistake, not the objective's: an error that names it, and no result."""

    @surrogate
    def odd(ratio: Tensor, advantages: Tensor, *, progress: float) -> Tensor:
        """Raises from the second rollout on."""
        if progress > 0:
            raise ValueError("out of ideas")
        return ratio * advantages

    with pytest.raises(LabError, match="surrogate 'odd': out of ideas"):
        go(tmp_path, {"surrogate": "odd"}, plugins=[odd])
    assert not records.finished(tmp_path)
