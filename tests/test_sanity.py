"""The six sanity checks: each number of ACCEPTANCE S stands there, and each mutant fails its stage.

Numbers by hand beside the table: pi = (.5,.3,.2), f = (1,0,.5), J = .5 + .1 = .6, pi (f - J).
"""

from __future__ import annotations

from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import lab
from lab import LabError, cli, sanity
from lab.hooks import MARK
from lab.shelf import Shelf
from lab.tools import masked_mean, masked_var

#: Stage -> what must stand in its protocol, in this order, as printed: six decimals.
PRINTED: dict[str, list[tuple[str, str]]] = {
    "bandit": [
        ("A8 p .5: p(1-p)", "0.25 -0.25"),
        ("A8 p .3", "0.21 -0.21"),
        ("A8 p .1", "0.09 -0.09"),
        ("A9 J = .5 * 1 + .2 * .5", "0.6"),
        ("A9 enumerated: .5 * .4, .3 * -.6, .2 * -.1", "0.2 -0.18 -0.02"),
        ("A9 expected estimator", "0.2 -0.18 -0.02"),
    ],
    "baseline": [
        ("A10 b -3", "0.2 -0.18 -0.02"),
        ("A10 trace", "7.4742"),
        ("A10 b 0", "0.2 -0.18 -0.02"),
        ("A10 trace", "0.1662"),
        ("A10 b .6", "0.2 -0.18 -0.02"),
        ("A10 trace", "0.0438"),
        ("A10 b 10", "0.2 -0.18 -0.02"),
        ("A10 trace", "56.4062"),
        ("A10 b*", "0.2 -0.18 -0.02"),
        ("A10 least trace", "0.032419"),
    ],
    "sequence": [
        ("C8 lambda .9", "0.695 0.55 0.5"),
        ("C8 targets", "0.895 0.95 1"),
        ("C9 lambda 0", "0.2 0.1 0.5"),
        ("C9 targets", "0.4 0.5 1"),
        ("C10 lambda 1", "0.8 0.6 0.5"),
        ("C10 targets", "1 1 1"),
        ("C15 ddof 1", "1.118972 -0.312654 -0.806318"),
        ("C15 targets stay", "0.895 0.95 1"),
    ],
    "frozen-batch": [
        ("E2 ratio", "1"),
        ("E6 slope onehot - pi", "0.5 -0.3 -0.2"),
        ("E1 .13/.10", "1.3"),
        ("M1 first update that has left 1", "2"),
        ("D8 SGD .05 crosses 1.2 and stays", "1.213392"),
    ],
    "clipping": [
        *(("D1 (+2,1.3): min(2.6,2.4)", "2.4"), ("flat", "0")),
        *(("D1 (+2,.7): min(1.4,1.6)", "1.4"), ("pull", "1.4")),
        *(("D1 (-2,.7): min(-1.4,-1.6)", "-1.6"), ("flat", "0")),
        *(("D1 (-2,1.3): min(-2.6,-2.4)", "-2.6"), ("pull", "-2.6")),
        ("D6 outside 4/4, flat 2/4", "1 0.5"),
    ],
    "stop-gradient": [
        ("I4 r A", "2.6 2.6 2.6"),
        ("I4 sg(r) A log .13", "-5.304574 2.6 0"),
        ("I5 cap 1.2", "2.4 1.4 -1.4 -2.4"),
        ("I5 floor .8", "2.4 1.6 -1.6 -2.4"),
    ],
}
#: The rest of what ACCEPTANCE S says that the checks assert.
ALSO = [
    ("bandit", "A9 E[grad log pi]", "0 0 0"),
    ("sequence", "C9 lambda .5: .1 + .5 * .5 = .35, .2 + .5 * .35 = .375", "0.375 0.35 0.5"),
    ("sequence", "C9 targets", "0.575 0.75 1"),
    ("sequence", "C10 lambda .95: .1 + .95 * .5, .2 + .95 * .575", "0.74625 0.575 0.5"),
    ("sequence", "C10 targets", "0.94625 0.975 1"),
    ("sequence", "C15 ddof 0", "1.370455 -0.382921 -0.987534"),
    ("stop-gradient", "I4 without sg: slope r A (1 + log p) = -2.704574", "-2.704574 -0.104574"),
]


def protocol(stage: sanity.Stage) -> list[str]:
    """The numbers of each line, as printed."""
    return [" ".join(line[44:].split()) for line in stage.lines]


def run(shelf: Shelf, name: str) -> sanity.Stage:
    (stage,) = sanity.run(shelf, [name])
    return stage


@pytest.fixture(scope="module")
def stages(shelf: Shelf) -> dict[str, sanity.Stage]:
    """All six, on the installed shelf."""
    return {s.name: s for s in sanity.run(shelf)}


def test_the_six_stages_are_the_articles(stages: dict[str, sanity.Stage]) -> None:
    assert list(stages) == list(PRINTED)


@pytest.mark.parametrize("name", PRINTED)
def test_a_stage_passes_and_shows_its_numbers(name: str, stages: dict[str, sanity.Stage]) -> None:
    """A stage that compares a wrong number with itself would pass: these are from the table."""
    stage = stages[name]
    assert stage.failures == []
    lines = iter(protocol(stage))
    for what, numbers in PRINTED[name]:
        assert numbers in lines, what  # in this order: `in` moves the iterator on


@pytest.mark.parametrize(("name", "what", "numbers"), ALSO)
def test_a_stage_asserts_all_that_the_table_names(
    name: str, what: str, numbers: str, stages: dict[str, sanity.Stage]
) -> None:
    assert any(numbers in line for line in protocol(stages[name])), what


def test_a_token_without_an_advantage_is_counted_apart(stages: dict[str, sanity.Stage]) -> None:
    """D6: A = 0 has nothing to be flat about: with a fifth such token the rates stay 1 and .5."""
    (line,) = (x for x in stages["clipping"].lines if "A = 0" in x)
    assert line.split()[-2:] == ["1", "0.5"]


def test_the_baseline_of_least_variance_is_not_the_value(stages: dict[str, sanity.Stage]) -> None:
    """b* = E[|s|^2 f]/E[|s|^2]: (.5*.38 + .2*.98*.5)/(.5*.38 + .3*.78 + .2*.98) = .288/.62."""
    lines = stages["baseline"].lines
    assert any("0.464516" in line and "V = .6" in line for line in lines)
    assert pytest.approx(0.464516, abs=1e-6) == 0.288 / 0.62


def test_an_unknown_stage_is_refused_with_the_nearest(shelf: Shelf) -> None:
    with pytest.raises(LabError, match=r"no stage 'cliping'\. Did you mean 'clipping'\?"):
        list(sanity.run(shelf, ["bandit", "cliping"]))


def test_a_stage_whose_component_is_missing_fails(shelf: Shelf) -> None:
    """A check that cannot be made has not passed."""
    assert run(Shelf(), "bandit").failures


# --- mutants -------------------------------------------------------------------------------------


def with_mutant(mutant: Any) -> Shelf:
    """The installed plugins, one component replaced by the mutant of its hook and name."""
    mark = getattr(mutant, MARK)
    shelf, replaced = Shelf(), 0
    for entry in entry_points(group="lab.plugins"):
        module, kept = entry.load(), {}
        for name, f in vars(module).items():
            if getattr(f, "__module__", "") != module.__name__ or not hasattr(f, "lab_impl"):
                continue
            old = getattr(f, MARK, None)
            same = old is not None and (old.hook, old.name) == (mark.hook, mark.name)
            kept[name] = mutant if same else f
            replaced += same
        shelf.add(SimpleNamespace(**kept), entry.value)
    assert replaced == 1
    return shelf


@lab.surrogate(name="reinforce")
def sign(logp: Tensor, advantages: Tensor) -> Tensor:
    """Minus A log p."""
    return -advantages * logp


@lab.advantage(name="reinforce")
def action_dependent(token_rewards: Tensor, mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """A baseline of (1,0,0): it takes off what the first answer earns."""
    first = torch.arange(len(mask))[:, None] == 0
    return lab.to_go(token_rewards, mask, gamma) - first.to(mask.dtype) * mask


@lab.advantage(name="reinforce")
def batch_std_scaling(token_rewards: Tensor, mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """Divided by the batch's std."""
    out = lab.to_go(token_rewards, mask, gamma)
    return out / (masked_var(out, mask, 0).sqrt() + 1e-6)


@lab.ratio(name="token")
def detached(logp: Tensor, old_logp: Tensor) -> Tensor:
    """No gradient."""
    return (logp - old_logp).exp().detach()


@lab.ratio(name="token")
def constant(logp: Tensor, old_logp: Tensor) -> Tensor:
    """A literal 1."""
    return torch.ones_like(logp)


@lab.ratio(name="token")
def both_attached(logp: Tensor, old_logp: Tensor) -> Tensor:
    """Numerator and denominator both attached: value right, slope 0."""
    return (logp - (old_logp + logp - logp.detach())).exp()


def clip_of(name: str, combine: Any) -> Any:
    def clip(
        ratio: Tensor, advantages: Tensor, *, eps_low: float = 0.2, eps_high: float = 0.2
    ) -> Tensor:
        """A wrong clip."""
        return combine(ratio, ratio.clamp(1 - eps_low, 1 + eps_high), advantages)

    clip.__name__ = name
    return lab.surrogate(
        name="ppo_clip", bounds=lambda eps_low, eps_high: (1 - eps_low, 1 + eps_high)
    )(clip)


clamp_only = clip_of("clamp_only", lambda r, near, a: near * a + 0 * r)
maximum = clip_of("maximum", lambda r, near, a: torch.maximum(r * a, near * a))
negative = clip_of("negative", lambda r, near, a: -torch.minimum(r * a, near * a))


@lab.observe(name="clipping")
def symmetric_flat(ratio: Tensor, interval: tuple[float, float]) -> dict[str, float]:
    """Flat := |r - 1| > eps."""
    outside = float(((ratio < interval[0]) | (ratio > interval[1])).double().mean())
    return {"outside": outside, "flat": outside, "no_advantage": 0.0}


def cispo_of(name: str, form: Any) -> Any:
    def cispo(
        ratio: Tensor,
        logp: Tensor,
        advantages: Tensor,
        *,
        cap: float | None = 5.0,
        floor: float | None = None,
    ) -> Tensor:
        """A wrong CISPO."""
        return form(ratio, logp, advantages, cap, floor)

    cispo.__name__ = name
    return lab.surrogate(name="cispo")(cispo)


def _weight(r: Tensor, cap: float | None, floor: float | None) -> Tensor:
    return r if cap is None and floor is None else r.clamp(floor, cap)


no_detach = cispo_of("no_detach", lambda r, p, a, cap, low: _weight(r, cap, low) * a * p)
floor_active = cispo_of(
    "floor_active", lambda r, p, a, cap, low: _weight(r, cap, low or 0.8).detach() * a * p
)
cap_as_eps = cispo_of(
    "cap_as_eps", lambda r, p, a, cap, low: _weight(r, cap and 1 + cap, low).detach() * a * p
)
no_log_pi = cispo_of("no_log_pi", lambda r, p, a, cap, low: _weight(r, cap, low) * a + 0 * p)


def gae_of(name: str, delta: Any) -> Any:
    def gae(
        token_rewards: Tensor,
        values: Tensor,
        bootstrap: Tensor,
        mask: Tensor,
        *,
        gamma: float = 1.0,
        lam: float = 0.95,
    ) -> Tensor:
        """A wrong GAE."""
        following = torch.cat([values[:, 1:], bootstrap[:, None]], 1)
        return lab.to_go(delta(token_rewards, values, following), mask, gamma * lam)

    gae.__name__ = name
    return lab.advantage(name="gae")(gae)


wrong_index = gae_of("wrong_index", lambda r, v, following: r)  # V_t - V_t: residuals (0,0,1)
discounted_rewards = gae_of("discounted_rewards", lambda r, v, following: r + 0.9 * following - v)
right = gae_of("right", lambda r, v, following: r + following - v)


@lab.critic_target(name="raw_plus_values")
def normalised_target(values: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Targets from whitened advantages."""
    std = masked_var(advantages, mask, 1).sqrt()
    return (advantages - masked_mean(advantages, mask)) / std + values


MUTANTS = [
    ("bandit", sign),
    ("baseline", action_dependent),
    ("baseline", batch_std_scaling),
    ("frozen-batch", detached),
    ("frozen-batch", constant),
    ("frozen-batch", both_attached),
    ("clipping", clamp_only),
    ("clipping", maximum),
    ("clipping", negative),
    ("clipping", symmetric_flat),
    ("stop-gradient", no_detach),
    ("stop-gradient", floor_active),
    ("stop-gradient", cap_as_eps),
    ("stop-gradient", no_log_pi),
    ("sequence", wrong_index),
    ("sequence", discounted_rewards),
    ("sequence", normalised_target),
]
WEIGHTS = {
    "no pi weight": torch.ones_like,
    "mean for expectation": lambda logits: torch.ones_like(logits) / len(logits),
    "minus": lambda logits: -logits.softmax(0),
}


def test_a_swap_alone_changes_nothing() -> None:
    """The shelf of the mutants with a right component in the built-in's place passes."""
    assert run(with_mutant(right), "sequence").failures == []


@pytest.mark.parametrize(("name", "mutant"), MUTANTS, ids=[m.__name__ for _, m in MUTANTS])
def test_a_mutant_fails_its_stage(name: str, mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    the_command_fails(name, with_mutant(mutant), monkeypatch)


@pytest.mark.parametrize("stage", ["bandit", "baseline"])
@pytest.mark.parametrize("weight", WEIGHTS)
def test_another_weight_than_pi_is_no_expectation(
    stage: str, weight: str, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without pi the gradient is (.25,-.45,.2), a mean's a third of it."""
    monkeypatch.setattr(sanity, "expectation", WEIGHTS[weight])
    the_command_fails(stage, shelf, monkeypatch)


def test_the_gradient_without_its_weight_is_the_tables(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sanity, "expectation", WEIGHTS["no pi weight"])
    assert "0.25 -0.45 0.2" in protocol(run(shelf, "bandit"))


def test_the_gradient_of_an_action_dependent_baseline_is_the_tables() -> None:
    """f - b = (0,0,.5): J = .1, pi (f - b - J) = (-.05,-.03,.08)."""
    assert "-0.05 -0.03 0.08" in protocol(run(with_mutant(action_dependent), "bandit"))


# --- the command ---------------------------------------------------------------------------------


def the_command_fails(name: str, shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """`lab sanity STAGE` names the check that failed and exits 1."""
    monkeypatch.setattr(Shelf, "installed", lambda plugins=(): shelf)
    result = CliRunner().invoke(cli.app, ["sanity", name])
    title, _ = sanity.STAGES[name]
    assert result.exit_code == 1
    assert f"{name}: {title} ... FAILED" in result.output
    assert result.output.rstrip().endswith(f"1 of 1 PPO sanity checks failed: {title}.")


def test_the_command_ends_with_its_line() -> None:
    result = CliRunner().invoke(cli.app, ["sanity"])
    assert result.exit_code == 0
    assert result.output.rstrip().splitlines()[-1] == "All six PPO sanity checks passed."


def test_the_command_names_those_that_failed_among_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong clip fails its own stage and the one whose updates it stops."""
    shelf = with_mutant(negative)
    monkeypatch.setattr(Shelf, "installed", lambda plugins=(): shelf)
    result = CliRunner().invoke(cli.app, ["sanity"])
    assert result.exit_code == 1
    assert "directional clipping" in result.output.rstrip().splitlines()[-1]
    assert "gradient identity ... ok" in result.output
    assert "All six" not in result.output


@pytest.mark.parametrize("name", PRINTED)
def test_each_stage_runs_alone(name: str) -> None:
    result = CliRunner().invoke(cli.app, ["sanity", name])
    assert result.exit_code == 0
    assert "... ok" in result.output
    assert "All six" not in result.output
