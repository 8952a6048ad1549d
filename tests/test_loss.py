"""lab.loss.evaluate: what it returns, what it is given, and where its gradients go."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import PLAIN, f64
from handmade import GAE, batch, bench, close
from torch import Tensor

import lab
from lab import LabError, evaluate
from lab.loss import Evaluation, pull_curve
from lab.recipe import Recipe
from lab.shelf import Shelf

#: Two rows of 3 and 2 tokens, the first with a gap; ratios and advantages of both signs.
MASK = f64([1, 1, 0, 1], [1, 1, 0, 0])
RATIO = f64([1.1, 0.6, 9, 1.5], [0.9, 1.3, 9, 9])
ADVANTAGES = f64([2, -1, 9, 0.5], [-2, 1, 9, 9])
ENTROPY = f64([1, 2, 9, 3], [1, 1, 9, 9])
ON = MASK.bool()
FULL = {
    "advantage": GAE,
    "surrogate": {"name": "ppo_clip", "eps_low": 0.2, "eps_high": 0.2},
    "kl": {"name": "in_loss", "estimator": "k2", "beta": 0.1},
    "extra": [{"name": "entropy", "coef": 0.01}],
    "aggregate": "token_mean",
}


def given(**more: Any) -> dict[str, Any]:
    """RATIO to the old policy, .5 above the reference, junk in the gap and behind the end."""
    return {
        "logp": -1 + RATIO.log(),
        "old_logp": torch.full_like(MASK, -1),
        "rollout_logp": torch.full_like(MASK, -1.25),
        "ref_logp": -1.5 + RATIO.log(),
        "entropy": ENTROPY,
        "mask": MASK,
        "advantages": ADVANTAGES,
        **more,
    }


def tensors(out: Evaluation) -> dict[str, Tensor]:
    return {n: x for n, x in vars(out).items() if isinstance(x, Tensor)}


# --- the result ----------------------------------------------------------------------------------


def test_the_fields_of_a_result() -> None:
    names = [f.name for f in fields(Evaluation)]
    assert names == [
        *("loss", "advantages", "returns", "critic_loss", "ratio", "surrogate", "share", "kl"),
        *("extra", "pull", "shares", "metrics"),
    ]
    out = evaluate(bench(**FULL), **given(values=0 * MASK))
    assert {n: x.shape for n, x in tensors(out).items()} == {
        n: (() if n == "loss" else MASK.shape) for n in names if n not in ("shares", "metrics")
    }
    assert out.shares.keys() == {"surrogate", "kl", "extra"}
    assert torch.equal(out.shares["surrogate"], out.share)


def test_observers_record_when_they_are_asked_for() -> None:
    """Kills: metrics of nobody, and an observer that is never called."""
    plain = evaluate("cispo", **given())
    out = evaluate("cispo", observers=["weights"], **given())
    assert plain.metrics == {}
    assert out.metrics["ratio_max"] == pytest.approx(float(RATIO[ON].max()), rel=1e-12)
    assert out.metrics["ratio_mean"] == pytest.approx(float(RATIO[ON].mean()), rel=1e-12)
    with pytest.raises(LabError, match=r"no observe 'wieghts'\. Did you mean 'weights'\?"):
        evaluate("cispo", observers=["wieghts"], **given())


def test_what_a_recipe_has_not_is_none() -> None:
    """A zero in place of None would say that there is a KL and it costs nothing."""
    b = bench(ratio="none", surrogate="reinforce")
    out = evaluate(b, **given())
    assert (out.ratio, out.kl, out.extra, out.returns, out.critic_loss) == (None,) * 5
    assert out.shares.keys() == {"surrogate"}


def test_off_the_mask_all_is_0_and_a_ratio_1() -> None:
    """9s and a ratio of 9 stand there: selected before exp, not multiplied after it."""
    out = evaluate(bench(**FULL), **given(values=MASK, returns=9 + 0 * MASK))
    for name, x in tensors(out).items():
        if name != "loss":
            assert bool((x[~ON] == (1 if name == "ratio" else 0)).all()), name
    close(out.ratio[ON], RATIO[ON])


def test_the_numbers_of_one_batch() -> None:
    """Every term by hand: ppo_clip .2, k2 of log-ratio .5, entropy bonus, 5 tokens.

    Surrogate: 1.1*2 = 2.2; min(-.6, -.8) = -.8; min(.75, .6) = .6; -1.8; min(1.3, 1.2) = 1.2.
    Pull r A or 0: 2.2, 0, 0, -1.8, 0. KL: .1 * .5^2 / 2 = .0125. Extra: -.01 H.
    Loss: (-(2.2 - .8 + .6 - 1.8 + 1.2) + 5 * .0125 - .01 * 8) / 5 = (-1.4 + .0625 - .08) / 5.
    """
    out = evaluate(bench(**FULL), **given(values=0 * MASK))
    close(out.surrogate[ON], [2.2, -0.8, 0.6, -1.8, 1.2])
    close(out.pull[ON], [2.2, 0, 0, -1.8, 0])
    close(out.kl[ON], [0.0125] * 5)
    close(out.extra[ON], [-0.01, -0.02, -0.03, -0.01, -0.01])
    close(out.share, MASK / 5)
    close(out.loss, -1.4175 / 5)


def test_the_loss_is_its_formula() -> None:
    """sum share * -surrogate + sum share_kl * kl + sum share_extra * extra; no critic term."""
    out = evaluate(bench(**FULL), **given(values=3 + MASK, returns=0 * MASK))
    by_hand = (
        -(out.share * out.surrogate).sum()
        + (out.shares["kl"] * out.kl).sum()
        + (out.shares["extra"] * out.extra).sum()
    )
    close(out.loss, by_hand, 1e-15)
    assert float(out.critic_loss.sum()) > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_precision_of_logp_is_returned(dtype: torch.dtype) -> None:
    cast = {n: x.to(dtype) for n, x in given(values=MASK, old_values=MASK).items()}
    out = evaluate(bench(**FULL), **cast)
    assert {x.dtype for x in [*tensors(out).values(), *out.shares.values()]} == {dtype}


@pytest.mark.parametrize("form", ["name", "table", "recipe", "bench", "file"])
def test_a_recipe_may_be_given_in_five_forms(form: str, shelf: Shelf, tmp_path: Path) -> None:
    recipe = Recipe.of({"base": "cispo"}, "cispo", shelf)
    (tmp_path / "mine.toml").write_text('[recipe.mine]\nbase = "cispo"\n', encoding="utf-8")
    forms: dict[str, Any] = {
        "name": "cispo",
        "table": {"base": "cispo"},
        "recipe": recipe,
        "bench": lab.load(recipe),
        "file": tmp_path / "mine.toml",
    }
    want = evaluate(lab.load("cispo"), **given())
    assert torch.equal(evaluate(forms[form], **given()).loss, want.loss)


def test_a_component_at_hand_may_be_given_beside_the_installed() -> None:
    @lab.surrogate
    def twice(logp: Tensor, advantages: Tensor) -> Tensor:
        """Pull 2 A."""
        return 2 * advantages * logp

    out = evaluate({**PLAIN, "surrogate": "twice"}, plugins=[twice], **given())
    close(out.pull, torch.where(ON, 2 * ADVANTAGES, 0.0))


def test_an_input_that_a_component_names_and_nobody_gave() -> None:
    with pytest.raises(LabError, match="'token' needs old_logp, which was not given"):
        evaluate(bench(), **given(old_logp=None))
    with pytest.raises(LabError, match="'reinforce' needs token_rewards, which was not given"):
        evaluate(bench(), **given(advantages=None))


# --- given advantages and returns ----------------------------------------------------------------


def test_given_advantages_are_final() -> None:
    """No filter, shaping, KL cost or normalisation touches them, not even per minibatch."""
    for per in ("rollout", "minibatch"):
        b = bench(
            filter=["overlong"],
            shape=["soft_overlong"],
            kl={"name": "in_reward", "when": "after"},
            normalize={"name": "whiten", "per": per},
        )
        out = evaluate(b, **given(rewards=f64(1, 1), stop_reason=torch.tensor([2, 2]), budget=2))
        close(out.advantages, torch.where(ON, ADVANTAGES, 0.0))
        close(out.pull[ON], (RATIO * ADVANTAGES)[ON])


def test_given_advantages_and_returns_come_back_as_they_were_seen_detached() -> None:
    """What the surrogate saw has no graph: a logged advantage must not keep a network alive."""
    live = {n: ADVANTAGES.clone().requires_grad_() for n in ("advantages", "returns")}
    out = evaluate(
        bench(**FULL), **given(**live, logp=given()["logp"].requires_grad_(), values=MASK)
    )
    assert not out.advantages.requires_grad
    assert not out.returns.requires_grad


def test_a_critics_targets_take_given_advantages_as_raw() -> None:
    """Target = A + V of the rollout, not of the live critic."""
    out = evaluate(bench(**FULL), **given(values=5 * MASK, old_values=0.5 * MASK))
    close(out.returns[ON], (ADVANTAGES + 0.5)[ON])


@pytest.mark.parametrize("with_advantages", [True, False])
def test_given_returns_replace_the_recipes_targets(with_advantages: bool) -> None:
    """With or without advantages: targets that were given and silently recomputed are lost."""
    more = {} if with_advantages else {"advantages": None, "rewards": f64(1, 2)}
    more |= {"stop_reason": torch.tensor([0, 0])}
    out = evaluate(bench(**FULL), **given(values=MASK, returns=7 * MASK, **more))
    close(out.returns, 7 * MASK)
    close(out.critic_loss, MASK * 0.5 * (1 - 7) ** 2)


# --- pull ----------------------------------------------------------------------------------------

SMOOTH = [
    {"ratio": "token", "surrogate": "ppo_unclipped"},
    {"ratio": "token", "surrogate": {"name": "ppo_clip", "eps_low": 0.25, "eps_high": 0.25}},
    {"ratio": "token", "surrogate": "sapo"},
    {"ratio": "sequence", "surrogate": "ppo_unclipped", "aggregate": "sequence_mean"},
    {"ratio": "sequence_product", "surrogate": "sapo", "aggregate": "sequence_mean"},
    {"ratio": "none", "surrogate": "reinforce"},
    {"ratio": "token", "surrogate": "ppo_unclipped", "wrap": ["dual_clip", "token_tis"]},
]


@pytest.mark.parametrize("slots", SMOOTH, ids=lambda s: f"{s['ratio']}-{s['surrogate']}")
def test_the_pull_is_the_derivative_of_the_summed_surrogate(slots: dict[str, Any]) -> None:
    """Central differences, token by token: also through a ratio that spans the row.

    A pull of the loss would carry share and sign, one of the mean a factor 1/5.
    """
    b, h = bench(**slots), 1e-6
    out = evaluate(b, **given())
    for i, t in torch.ones_like(MASK).nonzero().tolist():
        step = torch.zeros_like(MASK)
        step[i, t] = h
        up = evaluate(b, **given(logp=given()["logp"] + step)).surrogate.sum()
        down = evaluate(b, **given(logp=given()["logp"] - step)).surrogate.sum()
        close(out.pull[i, t], float(up - down) / (2 * h), 1e-8)


def test_a_pull_has_no_graph_and_leaves_the_losss_graph_intact() -> None:
    logp = given()["logp"].requires_grad_()
    out = evaluate(bench(), **given(logp=logp))
    assert not out.pull.requires_grad
    (gradient,) = torch.autograd.grad(out.loss, logp)
    close(gradient, -out.share * out.pull)


def test_a_curve_is_the_pull_of_one_token() -> None:
    """ppo_clip .2, A = +1: r up to 1.2, 0 above; A = -1: 0 below .8, -r above."""
    b = bench(surrogate="ppo_clip")
    close(torch.tensor(pull_curve(b, (0.5, 1, 2, 10), 1.0)).double(), [0.5, 1, 0, 0])
    close(torch.tensor(pull_curve(b, (0.5, 1, 2, 10), -1.0)).double(), [0, -1, -2, -10])


def test_values_of_surrogates_are_not_comparable_but_pulls_are() -> None:
    """r 1, A 1, log p = log .13: surrogate 1 (PPO-Clip), -2.040221 (CISPO); both pull 1."""
    one = torch.full((1, 1), math.log(0.13), dtype=torch.float64)
    same = {"logp": one, "old_logp": one, "advantages": 0 * one + 1, "mask": 0 * one + 1}
    for name, value in (("ppo_clip", 1), ("cispo", math.log(0.13))):
        out = evaluate(bench(surrogate=name), **same)
        close(out.surrogate, [[value]])
        close(out.pull, [[1]])


def test_on_a_fresh_full_batch_four_objectives_have_one_gradient() -> None:
    """PPO-Clip, unclipped, CISPO with cap >= 1 and REINFORCE differ after the first update only."""
    surrogates = ["ppo_clip", "ppo_unclipped", {"name": "cispo", "cap": 1.0}, "reinforce"]
    logp = torch.full_like(MASK, -1).requires_grad_()
    found = []
    for surrogate in surrogates:
        out = evaluate(bench(surrogate=surrogate), **given(logp=logp))
        found.append(torch.autograd.grad(out.loss, logp)[0])
    for gradient in found:
        close(gradient, -MASK * ADVANTAGES / 2)  # sequence_sum: two rows


# --- callers without a graph ---------------------------------------------------------------------


def test_a_caller_under_no_grad_gets_the_same_numbers() -> None:
    """The pull is a derivative: without a graph of its own it would be 0."""
    live = {"logp": given()["logp"].requires_grad_(), "values": MASK.clone().requires_grad_()}
    b = bench(**FULL)
    want = evaluate(b, **given(**live))
    with torch.no_grad():
        out = evaluate(b, **given(**live))
    for name, x in tensors(out).items():
        assert torch.equal(x, getattr(want, name)), name
        assert not x.requires_grad, name


def test_a_caller_under_inference_mode_gets_the_same_pull() -> None:
    """Inference mode makes autograd a no-op: a pull of 0 is a wrong number, not a refusal."""
    b = bench()
    want = evaluate(b, **given()).pull
    with torch.inference_mode():
        close(evaluate(b, **given()).pull.clone(), want)


def test_a_logp_without_grad_stays_without_and_the_result_has_no_graph() -> None:
    logp = given()["logp"]
    out = evaluate(bench(**FULL), **given(logp=logp, values=MASK))
    assert not logp.requires_grad
    assert not any(x.requires_grad for x in tensors(out).values())
    close(out.pull[ON], [2.2, 0, 0, -1.8, 0])


def test_a_logp_may_be_the_output_of_a_network() -> None:
    weight = f64(0.5).requires_grad_()
    out = evaluate(bench(), **given(logp=weight * given()["logp"]))
    (gradient,) = torch.autograd.grad(out.loss, weight)
    close(gradient, [float((-out.share * out.pull * given()["logp"]).sum())])


# --- anchors and the critic ----------------------------------------------------------------------


def test_the_anchor_may_be_the_sampler_itself() -> None:
    """rollout = old - .25: every ratio grows by e^.25, in the KL's weight too."""
    kl = {"name": "in_loss", "estimator": "k2", "beta": 0.1, "weight": "detached"}
    b = bench(loop={"anchor": "rollout"}, kl=kl)
    for more in ({}, {"old_logp": None}):
        out = evaluate(b, **given(**more))
        close(out.ratio[ON], RATIO[ON] * math.exp(0.25))
        close(out.kl[ON], 0.0125 * RATIO[ON] * math.exp(0.25))
    with pytest.raises(LabError, match="needs rollout_logp, which was not given"):
        evaluate(b, **given(rollout_logp=None))


def test_a_critics_loss_has_its_gradient_in_the_live_values_only() -> None:
    """Targets, rollout values and the policy stay: V - R = .5 - A - 0 per token."""
    live = {
        **{
            n: x.requires_grad_()
            for n, x in given(advantages=ADVANTAGES.clone()).items()
            if n != "mask"
        },
        "values": (0.5 * MASK).requires_grad_(),
        "old_values": (0 * MASK).requires_grad_(),
    }
    out = evaluate(bench(**{**FULL, "critic_loss": "squared"}), **live, mask=MASK)
    names = [*live]
    found = dict(
        zip(
            names,
            torch.autograd.grad(out.critic_loss.sum(), [live[n] for n in names], allow_unused=True),
            strict=True,
        )
    )
    assert [n for n, g in found.items() if g is not None] == ["values"]
    close(found["values"], torch.where(ON, 0.5 - ADVANTAGES, 0.0))


def test_a_policys_loss_has_no_gradient_in_a_critic() -> None:
    values = MASK.clone().requires_grad_()
    logp = given()["logp"].requires_grad_()
    rewards = {"rewards": f64(1, 2), "stop_reason": torch.tensor([0, 0]), "advantages": None}
    out = evaluate(bench(**FULL), **given(logp=logp, values=values, **rewards))
    assert torch.autograd.grad(out.loss, values, allow_unused=True) == (None,)


# --- nothing left --------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 2])
@pytest.mark.parametrize("recipe", ["reinforce", "rloo", "ppo", "grpo", "cispo", "gspo", "dapo"])
def test_an_empty_batch_and_rows_without_a_token(recipe: str, rows: int) -> None:
    """Denominators of 0: the loss is 0 with a gradient of 0, and everything is finite."""
    mask = torch.zeros(rows, 3, dtype=torch.float64)
    logp = (mask - 1).requires_grad_()
    step = {
        **{n: x for n, x in batch(mask).items() if n not in ("logp", "lengths")},
        "rewards": torch.zeros(rows, dtype=torch.float64),
        "values": mask,
        "budget": 4,
    }
    out = evaluate(recipe, logp=logp, **step)
    assert float(out.loss.detach()) == 0
    assert all(bool(x.detach().isfinite().all()) for x in tensors(out).values())
    gradient = torch.autograd.grad(out.loss, logp, allow_unused=True)[0]
    assert gradient is None or bool((gradient == 0).all())


def test_a_row_without_a_token_changes_nothing_for_the_others() -> None:
    """Means over rows count those that have a token: the share stays 1/(n_i B)."""
    b = bench(aggregate="sequence_mean")
    three = given(advantages=None, entropy=None, rewards=f64(1, 2))
    empty = {n: torch.cat([x, 0 * x[:1]]) for n, x in three.items() if x is not None}
    close(evaluate(b, **empty).share[:2], evaluate(b, **three).share)
