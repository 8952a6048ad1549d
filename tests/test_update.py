"""One optimiser step: what it changes, by how much, and what it must leave alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import ONE_UPDATE, SGD, Parts, gradients, nudge
from torch import nn

from lab import observe
from lab.recipe import Loop
from lab.roles import Steps
from lab.update import DivergedError, KLStop

WATCHED = ("clipping", "kl_old", "weights")
REINFORCE = {
    "advantage": "reinforce",
    "ratio": "none",
    "surrogate": "reinforce",
    "aggregate": "token_mean",
    "kl": "none",
}


@pytest.mark.parametrize(
    "loop",
    [{}, {"temperature": 0.6}, {"temperature": 1.7, "top_k": 4}, {"top_p": 0.8}, {"lag": 2}],
    ids=str,
)
@pytest.mark.parametrize("rows", [range(16), (13, 2, 7, 8, 0)], ids=["all", "shuffled"])
def test_the_first_minibatch_is_quiet(loop: dict[str, Any], rows: Any) -> None:
    """N7: ratio 1, outside 0, flat 0, KL(old) 0 on a fresh rollout.

    Wrong: a temperature or a support left out when scoring (R3, R4), rows of the step that are not
    the rows of the tokens, the ratio taken against another policy.
    """
    parts = Parts.of("dr_grpo", observers=WATCHED, **loop)
    seen = parts.update(*parts.rollout(), rows=rows).metrics
    assert (seen["outside"], seen["flat"]) == (0, 0)
    assert abs(seen["ratio_min"] - 1) < 1e-5
    assert abs(seen["ratio_max"] - 1) < 1e-5
    # k3 is about d^2/2, and |d| < 1e-5
    assert 0 <= seen["kl_old_k3"] < 1e-10


def test_what_a_rollout_made_stays_fixed() -> None:
    """C5, N5: wrong: old log-probs, values, advantages or targets made again from moved weights.

    Bit-equal after four updates that moved the policy, and nothing of it asks for a gradient.
    """
    parts = Parts.of("ppo", lr=1e-2)
    rollout, step = parts.rollout()
    tensors = {n: x for n, x in step.items() if isinstance(x, torch.Tensor)}
    tensors |= {f"samples.{n}": x for n, x in vars(rollout.scored.samples).items() if x is not None}
    before = {n: x.clone() for n, x in tensors.items()}
    weights = parts.weights()
    for rows in (range(8), range(8, 16)) * 2:
        parts.update(rollout, step, rows)
    assert not torch.equal(parts.weights(), weights)
    assert {"old_logp", "old_values", "advantages", "returns", "bootstrap"} <= tensors.keys()
    for name, x in tensors.items():
        assert torch.equal(x, before[name]), name
        assert not x.requires_grad, name


def _by_hand(parts: Parts, rollout: Any, step: Any) -> torch.Tensor:
    """The gradient of -sum(A log p)/N, with nothing of the lab's loss in it."""
    samples = rollout.scored.samples
    logp = parts.roles.policy.score(samples, 1.0).logp
    rest = step["token_rewards"].flip(1).cumsum(1).flip(1)  # the reward from each token on
    loss = -(rest * logp * samples.mask).sum() / samples.mask.sum()
    parts.roles.policy.model.zero_grad()
    torch.autograd.backward(loss)
    return gradients(parts.roles.policy).clone()


@pytest.mark.parametrize(("most", "scaled"), [(0.0, 1.0), (1e3, 1.0), (0.01, None)])
def test_sgd_moves_by_the_learning_rate_times_the_gradient(most: float, scaled: Any) -> None:
    """N22: theta' = theta - lr g, g scaled to a norm of `most` where it is longer.

    Wrong: a clip of each tensor, or of each value; a loss averaged twice; `grad_norm` after the
    clip; 0 taken as a norm of 0 instead of as no clip.
    """
    parts = Parts.of(REINFORCE, **{**SGD, **ONE_UPDATE, "max_grad_norm": most})
    rollout, step = parts.rollout()
    g = _by_hand(parts, rollout, step)
    before, norm = parts.weights(), float(g.norm())
    seen = parts.update(rollout, step).metrics
    assert seen["grad_norm"] == pytest.approx(norm, rel=1e-4)
    factor = scaled or most / norm
    assert norm > 0.02  # so that .01 clips
    assert seen["grad_norm_after"] == pytest.approx(factor * norm, rel=1e-4)
    assert seen["grad_clipped"] == float(scaled is None)
    moved = parts.weights() - before
    assert torch.allclose(moved, -0.1 * factor * g, rtol=1e-3, atol=1e-7)
    assert float(moved.norm()) == pytest.approx(0.1 * factor * norm, rel=1e-3)


@pytest.mark.parametrize(("g", "step"), [(1e-5, 0.999001), (1.0, 1.0), (-1e-5, -0.999001)])
def test_adams_first_step(g: float, step: float) -> None:
    """N22: g/(|g| + 1e-8) = 1/(1 + 1e-3) at 1e-5; with epsilon 1e-5 it would be .5.

    And no weight decay: a weight of 1 without a gradient stays 1.
    """
    moved, still = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.ones(1))
    steps = Steps.of([moved, still], Loop(lr=0.01))
    moved.grad, still.grad = torch.full((1,), g), torch.zeros(1)
    steps.optimiser.step()
    assert moved.item() / -0.01 == pytest.approx(step, abs=1e-5)
    assert still.item() == 1.0


def _after(updates: int, **loop: Any) -> tuple[Parts, list[dict[str, float]]]:
    spec = {"advantage": "gae", "normalize": "whiten", "kl": "none"}
    parts = Parts.of(spec, **loop)
    rollout, step = parts.rollout()
    return parts, [parts.update(rollout, step).metrics for _ in range(updates)]


def test_a_critic_of_its_own_gives_the_policy_no_gradient() -> None:
    """C19: the policy's steps are the same bits whatever the critic's loss weighs.

    Wrong: one clip over both: a critic's error would then scale the policy's step.
    """
    small, seen = _after(3, critic_coef=0.1, lr=1e-3)
    large, other = _after(3, critic_coef=1000.0, lr=1e-3)
    assert torch.equal(small.weights(), large.weights())
    assert [m["grad_norm"] for m in seen] == [m["grad_norm"] for m in other]
    assert other[0]["critic_grad_norm"] == pytest.approx(1e4 * seen[0]["critic_grad_norm"])
    assert other[0]["critic_loss"] == seen[0]["critic_loss"] > other[-1]["critic_loss"]


def test_a_shared_critic_does() -> None:
    """From the second update on: dV/d(hidden) is the head's weight, which starts at 0."""
    for updates, alike in ((1, True), (2, False)):
        small, seen = _after(updates, critic="shared", critic_coef=0.1, **SGD)
        large, _ = _after(updates, critic="shared", critic_coef=1.0, **SGD)
        assert torch.equal(small.weights(), large.weights()) is alike
        assert "critic_grad_norm" not in seen[0]


@pytest.mark.parametrize("critic", ["own", "shared"])
def test_warming_moves_the_critic_alone(critic: str) -> None:
    """Wrong: a shared backbone that the critic's loss moves: it is the policy."""
    parts = Parts.of("ppo", critic=critic, lr=1e-3)
    rollout, step = parts.rollout()
    before = parts.weights()
    losses = [parts.update(rollout, step, warming=True).metrics["critic_loss"] for _ in range(3)]
    assert torch.equal(parts.weights(), before)
    assert losses[0] > losses[1] > losses[2]
    parts.update(rollout, step)
    assert not torch.equal(parts.weights(), before)


@observe
def moved(values: torch.Tensor, old_values: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """The largest move of a value."""
    return {"moved": float((values - old_values).abs().max())}


@pytest.mark.parametrize("critic", ["own", "shared"])
def test_live_values_start_at_the_rollouts(critic: str) -> None:
    """Wrong: the live critic read one token later than the rollout's, or with other positions."""
    parts = Parts.of("ppo", plugins=[moved], observers=("moved",), critic=critic)
    head = parts.roles.head or (parts.roles.critic and parts.roles.critic.head)
    assert head
    torch.nn.init.normal_(head.weight)
    rollout, step = parts.rollout()
    assert float((step["old_values"][:, 1:] - step["old_values"][:, :-1]).abs().max()) > 0.1
    assert parts.update(rollout, step, (7, 3, 12)).metrics["moved"] < 1e-5


def test_the_value_clip_is_counted_from_the_unclipped_move() -> None:
    """N18, T4: a critic moved by .5 has moved beyond .2 on every token; after a clamp on none."""
    parts = Parts.of("ppo", observers=("critic",))
    rollout, step = parts.rollout()
    assert parts.roles.critic is not None
    with torch.no_grad():
        parts.roles.critic.head.bias += 0.5
    assert parts.update(rollout, step).metrics["value_clipped"] == 1.0


def test_kl_stop_leaves_the_step_unmade() -> None:
    """Wrong: the KL looked at after the step, or a stop at 0, which means off."""
    parts = Parts.of("dr_grpo", kl_stop=1e-3, lr=1e-2)
    rollout, step = parts.rollout()
    parts.update(rollout, step)  # fresh: KL 0
    nudge(parts.roles.policy)
    before = parts.weights()
    with pytest.raises(KLStop):
        parts.update(rollout, step)
    assert torch.equal(parts.weights(), before)
    off = Parts.of("dr_grpo", kl_stop=0.0)
    rollout, step = off.rollout()
    nudge(off.roles.policy)
    off.update(rollout, step)


def test_nothing_is_touched_by_a_gradient_that_is_not_finite() -> None:
    """K7: weights *and* the optimiser's moments are those of before, for policy and critic.

    Wrong: stepping the policy before the critic's norm is looked at.
    """
    parts = Parts.of("ppo")
    rollout, step = parts.rollout()
    parts.update(rollout, step)
    assert parts.roles.critic is not None
    assert parts.roles.critic_steps is not None
    saved = [x.clone() for x in _everything(parts)]
    bad: Any = {**step, "returns": torch.full_like(step["returns"], 1e30)}
    with pytest.raises(DivergedError) as found:
        parts.update(rollout, bad)
    assert found.value.hook == "critic_loss"
    assert all(torch.equal(a, b) for a, b in zip(saved, _everything(parts), strict=True))


def _everything(parts: Parts) -> list[torch.Tensor]:
    assert parts.roles.critic is not None
    found = [*parts.roles.policy.model.parameters(), *parts.roles.critic.parameters()]
    for steps in (parts.roles.policy_steps, parts.roles.critic_steps):
        assert steps is not None
        for state in steps.optimiser.state_dict()["state"].values():
            found += [state["step"], state["exp_avg"], state["exp_avg_sq"]]
    return [x.detach() for x in found]
