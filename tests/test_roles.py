"""Who does what in a run: policy, behaviour, reference, critic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import ONE_UPDATE, Parts, flat, nudge

from lab.hookspecs import StopReason
from lab.recipe import Loop
from lab.roles import Roles, Steps
from lab.samples import Samples


@pytest.mark.parametrize("lag", [0, 1, 2, 3])
def test_the_behaviour_is_the_policy_of_lag_rollouts_ago(lag: int) -> None:
    """And of the start, as long as there is nothing older.

    Wrong: one rollout too young or too old, or weights by reference: they would move on with the
    policy.
    """
    parts = Parts.of(lag=lag)
    policy, seen, weights = parts.roles.policy, [], []
    for number in range(5):
        weights.append(flat(policy))
        seen.append(flat(parts.roles.behaviour()))
        nudge(policy, seed=number)
    for number, x in enumerate(seen):
        assert torch.equal(x, weights[max(0, number - lag)])
    assert len(parts.roles.past) == (lag + 1 if lag else 0)


def test_old_logp_is_that_of_the_policy_that_sampled() -> None:
    """E5, R4: a stale rollout starts away from ratio 1, and says so before any update."""
    parts = Parts.of(lag=1, observers=("weights", "kl_old"), **ONE_UPDATE)
    parts.rollout()
    nudge(parts.roles.policy, by=0.1)
    rollout, step = parts.rollout(1)
    behaviour = parts.roles._behaviour
    assert behaviour is not None
    samples = rollout.scored.samples
    with torch.no_grad():
        said = {p: p.score(samples, 1.0).logp for p in (behaviour, parts.roles.policy)}
    assert torch.allclose(step["old_logp"], said[behaviour], atol=1e-5)
    assert not torch.allclose(step["old_logp"], said[parts.roles.policy], atol=1e-2)
    seen = parts.update(rollout, step).metrics
    ratio = (said[parts.roles.policy] - said[behaviour])[samples.mask > 0].exp()
    assert seen["ratio_mean"] == pytest.approx(float(ratio.mean()), rel=1e-4)
    assert seen["kl_old_k3"] > 1e-3


def test_the_behaviour_and_the_reference_train_nothing() -> None:
    parts = Parts.of("grpo", lag=1)
    reference, start = parts.roles.reference, parts.weights()
    assert reference is not None
    for policy in (reference, parts.roles.behaviour()):
        assert not any(p.requires_grad for p in policy.model.parameters())
        assert not policy.model.training
    rollout, step = parts.rollout()
    parts.update(rollout, step)
    assert torch.equal(flat(reference), start)
    assert not torch.equal(parts.weights(), start)


def test_only_what_somebody_names_is_there() -> None:
    """Wrong: a critic or a reference for every recipe: time, memory, and draws for nobody."""
    plain = Parts.of("dr_grpo")
    assert (plain.roles.reference, plain.roles.critic, plain.roles.critic_steps) == (None,) * 3
    assert not {"ref_logp", "old_values"} & plain.rollout()[1].keys()
    watched = Parts.of("dr_grpo", observers=("kl_ref",))
    assert watched.roles.reference is not None
    step = watched.rollout()[1]
    assert torch.allclose(step["ref_logp"], step["old_logp"], atol=1e-5)  # it is the start itself
    ppo = Parts.of("ppo")
    assert ppo.roles.critic is not None
    assert ppo.roles.head is None
    shared = Parts.of("ppo", critic="shared")
    assert (shared.roles.critic, shared.roles.critic_steps) == (None, None)
    assert shared.roles.head is not None


@pytest.mark.parametrize("critic", ["own", "shared"])
def test_a_critic_starts_by_saying_nothing(critic: str) -> None:
    """An untrained head would add noise to the first advantages: it is 0, so A is the return."""
    _, step = Parts.of("ppo", critic=critic).rollout()
    assert not step["old_values"].any()
    assert not step["bootstrap"].any()


def test_a_critic_of_its_own_is_a_copy_of_the_start() -> None:
    parts = Parts.of("ppo")
    critic = parts.roles.critic
    assert critic is not None
    pairs = zip(
        critic.backbone.parameters(), parts.roles.policy.model.base_model.parameters(), strict=True
    )
    for mine, theirs in pairs:
        assert torch.equal(mine, theirs)
        assert mine.data_ptr() != theirs.data_ptr()


@pytest.mark.parametrize("recipe", ["ppo", "grpo", "dr_grpo"])
def test_making_roles_draws_nothing(recipe: str) -> None:
    """R1: a head's initialisation would move the global generator for recipes with a critic."""
    parts = Parts.of(recipe)
    torch.manual_seed(3)
    Roles.of(parts.roles.policy, parts.bench)
    after = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(1), after)


@pytest.mark.parametrize("critic", ["own", "shared"])
def test_the_value_after_the_last_token_is_told_by_the_row(critic: str) -> None:
    """Rows of 1, 2 and 4 tokens in a width of 4, all cut: columns 1, 2 and 4 of the values.

    Wrong: the last column for all: the place behind padding.
    """
    parts = Parts.of("ppo", critic=critic)
    head = parts.roles.head or (parts.roles.critic and parts.roles.critic.head)
    assert head
    torch.nn.init.normal_(head.weight)
    ids = torch.tensor([[3, 1, 1, 1], [3, 4, 1, 1], [3, 4, 3, 5]])
    mask = torch.tensor([[1.0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]])
    prompt = torch.tensor([[4, 5]] * 3)
    cut = torch.full((3,), int(StopReason.LENGTH))
    samples = Samples(prompt, torch.ones_like(prompt), ids, mask, 0 * mask, cut)
    found = parts.roles.values(samples, 1.0)
    assert found is not None
    values, after = found
    assert values.shape == (3, 4)
    # a longer row's value before token k is a shorter one's after its last: causal attention
    assert torch.allclose(after[:2], values[2, 1:3], atol=1e-6)
    assert torch.allclose(values[:, 0], values[0, 0].expand(3), atol=1e-6)


def test_the_optimiser_is_the_loops() -> None:
    p = torch.nn.Parameter(torch.zeros(2))
    adam = Steps.of([p], Loop(lr=0.3)).optimiser
    sgd = Steps.of([p], Loop(lr=0.3, optimizer="sgd")).optimiser
    want: dict[str, Any] = {"lr": 0.3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    assert isinstance(adam, torch.optim.AdamW)
    assert {n: adam.defaults[n] for n in want} == want
    assert isinstance(sgd, torch.optim.SGD)
    assert (sgd.defaults["momentum"], sgd.defaults["weight_decay"]) == (0, 0)


@pytest.mark.parametrize(("most", "after"), [(0.0, 5.0), (10.0, 5.0), (1.0, 1.0)])
def test_the_clip_is_over_all_parameters_at_once(most: float, after: float) -> None:
    """Gradients (3) and (4): norm 5; clipped at 1 to (.6) and (.8). Each alone: (1) and (1)."""
    one, two = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    one.grad, two.grad = torch.tensor([3.0]), torch.tensor([4.0])
    assert Steps.of([one, two], Loop()).clip(most) == pytest.approx(5.0)
    assert one.grad.item() == pytest.approx(3 * after / 5, rel=1e-5)
    assert two.grad.item() == pytest.approx(4 * after / 5, rel=1e-5)
