"""The roles of a run: policy, behaviour, reference, critic. Roles, not models.

Saved log-probabilities replace a behaviour copy unless the rollout is to be stale (`lag`); the
reference is a copy of the starting weights; the critic has a backbone of its own, copied from the
start, unless the recipe shares the policy's.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lab.bench import Bench
from lab.policy import Critic, Policy, value_head
from lab.recipe import Loop
from lab.samples import Samples

State = dict[str, Tensor]


@dataclass
class Steps:
    """Parameters that are clipped and stepped together, with their optimiser."""

    parameters: list[nn.Parameter]
    optimiser: torch.optim.Optimizer

    @classmethod
    def of(cls, parameters: list[nn.Parameter], loop: Loop) -> Steps:
        """AdamW without weight decay, or plain SGD, which shows gradient scale."""
        if loop.optimizer == "sgd":
            return cls(parameters, torch.optim.SGD(parameters, lr=loop.lr))
        made = torch.optim.AdamW(parameters, lr=loop.lr, weight_decay=0.0, eps=1e-8, fused=True)
        return cls(parameters, made)

    def forget(self) -> None:
        """Drop the gradients."""
        for p in self.parameters:
            p.grad = None

    def clip(self, most: float) -> float:
        """Scale the gradient down to a norm of `most` (0: leave it); the norm before."""
        limit = most if most > 0 else torch.inf
        return float(nn.utils.clip_grad_norm_(self.parameters, limit))


@dataclass
class Roles:
    """Who does what in a run.

    Attributes:
        policy: what is trained.
        reference: the starting weights; None where nobody names ``ref_logp``.
        critic: on a backbone of its own; None without a critic or where the backbone is shared.
        head: the shared critic's head; None otherwise.
        policy_steps: the policy's optimiser (a shared critic's head is in it).
        critic_steps: the critic's optimiser; its gradient is clipped apart, so that a critic's
            error does not scale the policy's step.
        past: weights of the last `lag` rollouts, oldest first.
    """

    policy: Policy
    reference: Policy | None
    critic: Critic | None
    head: nn.Linear | None
    policy_steps: Steps
    critic_steps: Steps | None
    lag: int
    past: deque[State] = field(default_factory=deque)
    _behaviour: Policy | None = None

    @classmethod
    def of(cls, policy: Policy, bench: Bench) -> Roles:
        """The roles that a bench's components ask for."""
        loop = bench.recipe.loop
        shared = bench.has_critic and loop.critic == "shared"
        critic = Critic(policy) if bench.has_critic and not shared else None
        head = value_head(policy) if shared else None
        trained = [*policy.model.parameters(), *(head.parameters() if head else ())]
        return cls(
            policy=policy,
            reference=policy.copy() if bench.has_reference else None,
            critic=critic,
            head=head,
            policy_steps=Steps.of(trained, loop),
            critic_steps=Steps.of(list(critic.parameters()), loop) if critic else None,
            lag=loop.lag,
        )

    def behaviour(self) -> Policy:
        """The policy that samples: the one of `lag` rollouts ago, or as old as there is."""
        if not self.lag:
            return self.policy
        state = {n: x.detach().clone() for n, x in self.policy.model.state_dict().items()}
        self.past.append(state)
        while len(self.past) > self.lag + 1:
            self.past.popleft()
        if self._behaviour is None:
            self._behaviour = self.policy.copy()
        self._behaviour.model.load_state_dict(self.past[0])
        return self._behaviour

    @torch.no_grad()
    def values(self, samples: Samples, temperature: float) -> tuple[Tensor, Tensor] | None:
        """The rollout's values [B,T] and the value after each row's last token [B]."""
        if self.critic is not None:
            both = self.critic(samples)
        elif self.head is not None:
            scored = self.policy.score(samples, temperature, head=self.head)
            assert scored.values is not None
            both = scored.values
        else:
            return None
        # the column after the row's last token, whoever wrote it: the width says nothing of its end
        last = samples.present.sum(1).long()
        return both[:, :-1], both.gather(1, last[:, None]).squeeze(1)
