"""lab.policy: the critic, a head on the policy's own backbone, and copies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from small_models import absolute, nano, rollout, worst
from torch import Tensor, nn

from lab.policy import Critic, Policy, Samples, value_head
from lab.tokens import Sampling


@pytest.fixture(params=["rotary", "absolute"])
def policy(request: Any, tmp_path: Any) -> Policy:
    return nano() if request.param == "rotary" else absolute(tmp_path)


def opinion(head: nn.Module) -> None:
    """Weights for a head that starts at 0."""
    with torch.no_grad():
        for p in head.parameters():
            p.copy_(torch.linspace(-1, 1, p.numel()).reshape(p.shape))


def by_hand(policy: Policy, head: nn.Module, samples: Samples) -> Tensor:
    """The value after each prefix, 0 to T tokens of the response, alone through the backbone."""
    rows = []
    for i in range(len(samples)):
        prompt = samples.prompt_ids[i][samples.prompt_mask[i].bool()]
        row = []
        for t in range(samples.ids.shape[1] + 1):
            seen = torch.cat([prompt, samples.ids[i, :t]])[None]
            hidden = policy.model.base_model(input_ids=seen).last_hidden_state
            row.append(head(hidden[0, -1]))
        rows.append(torch.cat(row))
    return torch.stack(rows)


def full(policy: Policy) -> Samples:
    """Rows without padding behind, of prompts of 3 and 5 tokens."""
    return policy.given(["12>", "4444>"], ["123", "765"], budget=4)


def test_a_critic_says_0_at_the_start(policy: Policy) -> None:
    """Anything else would add noise to the first advantages of every seed."""
    values = Critic(policy)(full(policy))
    assert values.shape == (2, 5)
    assert torch.equal(values, torch.zeros(2, 5))
    assert torch.equal(value_head(policy)(torch.ones(policy.width)), torch.zeros(1))


@pytest.mark.parametrize("shared", [False, True], ids=["its own backbone", "the policy's"])
def test_values_stand_before_each_token_and_after_the_last(policy: Policy, shared: bool) -> None:
    """Column t has seen t tokens of the response, column T all of them: C12's bootstrap.

    Kills values taken one place late, which have seen the action, and a missing last column.
    """
    samples = full(policy)
    if shared:
        head = value_head(policy)
        opinion(head)
        values = policy.score(samples, 0.6, head=head).values
        assert values is not None
    else:
        critic = Critic(policy)
        head = critic.head
        opinion(head)
        values = critic(samples)
    want = by_hand(policy, head, samples)
    assert values.shape == want.shape == (2, 5)
    assert worst(values, want) < 1e-4
    assert worst(values[:, 1:], want[:, :-1]) > 0.1
    assert float(values.detach().diff(dim=1).abs().min()) > 1e-3


def test_the_value_after_the_last_token_of_a_short_row(policy: Policy) -> None:
    """N17: with 2 tokens of 6 it is column 2; what pads the row moves none of columns 0 to 2."""
    critic = Critic(policy)
    opinion(critic.head)
    samples = policy.given(["12>"], ["1"], budget=6)
    values = critic(samples)
    assert worst(values[:, :3], by_hand(policy, critic.head, samples)[:, :3]) < 1e-4
    ids = samples.ids.clone()
    ids[:, 2:] = 5
    assert torch.equal(critic(replace(samples, ids=ids))[:, :3], values[:, :3])


def test_the_critic_sees_a_tools_answer(policy: Policy) -> None:
    """Mask 1,1,0,1, seen 1,1,1,1: its state holds all that the row says."""
    critic = Critic(policy)
    opinion(critic.head)
    plain = policy.given(["12>"], ["345"], budget=4)
    turn = replace(plain, mask=torch.tensor([[1.0, 1, 0, 1]]), seen=plain.mask)
    assert torch.equal(critic(turn), critic(plain))


def test_a_critics_gradient_does_not_reach_the_policy(policy: Policy) -> None:
    """C19: and it does reach all of the critic, whatever the policy's own weights demand."""
    frozen = policy.copy()
    critic = Critic(frozen)
    opinion(critic.head)
    torch.autograd.backward((critic(full(policy)) - 1).square().sum())
    assert all(p.grad is None for p in (*policy.model.parameters(), *frozen.model.parameters()))
    backbone = {n: p.grad for n, p in critic.backbone.named_parameters()}
    assert all(g is not None and float(g.abs().max()) > 0 for g in backbone.values())
    assert critic.head.weight.grad is not None
    assert not critic.backbone.training


def test_a_critic_shares_no_weight_with_its_policy(policy: Policy) -> None:
    critic = Critic(policy)
    opinion(critic.head)
    samples = full(policy)
    before = critic(samples).detach()
    with torch.no_grad():
        for p in policy.model.parameters():
            p.zero_()
    assert torch.equal(critic(samples), before)


def test_a_shared_head_reaches_the_policy(policy: Policy) -> None:
    """M2: actor and critic may share a backbone; the value loss then moves both."""
    head = value_head(policy)
    opinion(head)
    scored = policy.score(full(policy), 1.0, head=head)
    assert scored.values is not None
    torch.autograd.backward(scored.values.square().sum())
    moved = [p for p in policy.model.base_model.parameters() if p.grad is not None]
    assert sum(float(p.grad.abs().sum()) for p in moved if p.grad is not None) > 0
    plain = policy.score(full(policy), 1.0)
    assert plain.values is None
    assert torch.equal(plain.logp, scored.logp)


def test_a_copy_does_not_follow(policy: Policy) -> None:
    """H1: a reference that is the policy itself has KL 0 for ever."""
    samples = rollout(policy, Sampling())
    before = policy.score(samples, 1.0).logp.detach()
    twin = policy.copy()
    assert torch.equal(twin.score(samples, 1.0).logp, before)
    with torch.no_grad():
        for p in policy.model.parameters():
            p.add_(0.1)
    assert torch.equal(twin.score(samples, 1.0).logp, before)
    assert worst(policy.score(samples, 1.0).logp, before) > 0.01


def test_a_copy_has_no_gradient_and_takes_none_from_the_policy(policy: Policy) -> None:
    twin = policy.copy()
    samples = full(policy)
    assert not twin.score(samples, 1.0).logp.requires_grad
    assert policy.score(samples, 1.0).logp.requires_grad
    assert all(p.requires_grad for p in policy.model.parameters())
    assert not twin.model.training
    assert (twin.limit, twin.width) == (policy.limit, policy.width)


def test_making_them_draws_nothing(policy: Policy) -> None:
    """N24: a recipe with a critic would sample other answers than one without."""
    before = torch.get_rng_state()
    Critic(policy)
    value_head(policy)
    policy.copy()
    assert torch.equal(torch.get_rng_state(), before)
