"""The hook points of a policy-gradient objective, in the order in which a run meets them.

B sequences of T response tokens, right-padded. ``mask`` [B,T] is 0 or 1 in logp's dtype: 1 on the
tokens that the policy chose (a generated EOS included), 0 on prompt, padding and tool
observations, so it may have gaps. A component takes, by name, whichever of a hook's inputs it
needs; the loop computes only what somebody named. Off the mask the core sets every per-token
input to 0 before a component sees it, and every result to 0 after (a ratio to 1): an elementwise
component needs no care about junk, a reduction must use the mask.

A tensor hook has exactly one implementation per run. Hyperparameters are keyword-only and belong
to the component; the reserved keywords ``memory``, ``rng`` and ``progress`` are filled by the
loop. Three anchors, never one name for two: ``old_logp`` is the behaviour policy's, fixed for the
batch; ``rollout_logp`` is what the sampler itself reported; ``ref_logp`` is the reference model's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import pluggy

if TYPE_CHECKING:
    from torch import Tensor

    PerToken: TypeAlias = Tensor  # [B,T], float32 or float64
    PerRow: TypeAlias = Tensor  # [B], float32 or float64
    RowId: TypeAlias = Tensor  # [B], int64
    RowFlag: TypeAlias = Tensor  # [B], bool
    Interval: TypeAlias = tuple[float | None, float | None]

#: Raised when a hook's meaning changes; a new input or a new hook does not raise it.
VERSION = 1
PROJECT = "lab"
ENTRY_POINTS = "lab.plugins"
RESERVED = ("memory", "rng", "progress")

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class StopReason(IntEnum):
    """Why a row ended; ``stop_reason`` holds these. Only LENGTH is a cut: the others terminate."""

    EOS = 0
    STOP = 1
    LENGTH = 2


@hookspec(firstresult=True)
def keep(
    rewards: PerRow, group: RowId, truncated: RowFlag, lengths: RowId, mask: PerToken
) -> RowFlag:
    """Which rows stay in the rollout: [B] bool.

    Called first, on raw rewards; a list slot (`filter`) whose entries are and-ed, each of which
    sees all rows. No gradient. Example: `zero_variance`.
    """


@hookspec(firstresult=True)
def shape_reward(
    rewards: PerRow, lengths: RowId, truncated: RowFlag, stop_reason: RowId, budget: int
) -> PerRow:
    """The reward of each row after shaping: [B]; the change lands on the row's last mask token.

    Called once per rollout after `keep`; a list slot (`shape`), each entry sees what the one
    before returned. `budget` is the configured number of response tokens. No gradient.
    Example: `soft_overlong`.
    """


@hookspec(firstresult=True)
def kl_reward(old_logp: PerToken, ref_logp: PerToken, mask: PerToken) -> PerToken:
    """The cost that each token takes off the reward, beta included: [B,T].

    Called once per rollout; the slot's options say whether it is credited before or after the
    advantage, and to which tokens. No gradient: it is frozen with the rollout.
    Example: `in_reward`.
    """


@hookspec(firstresult=True)
def advantage(
    rewards: PerRow,
    token_rewards: PerToken,
    values: PerToken,
    bootstrap: PerRow,
    old_logp: PerToken,
    group: RowId,
    mask: PerToken,
) -> PerToken:
    """The raw advantage of each token: [B,T].

    Called once per rollout. `token_rewards` sum to `rewards`; `values` are the rollout's;
    `bootstrap` is the value after a truncated row's last token and 0 where the row terminated.
    No gradient. Examples: `group`, `gae`.
    """


@hookspec(firstresult=True)
def critic_target(
    rewards: PerRow,
    token_rewards: PerToken,
    values: PerToken,
    bootstrap: PerRow,
    advantages: PerToken,
    mask: PerToken,
) -> PerToken:
    """What the critic learns to predict: [B,T].

    Called once per rollout when there is a critic. `advantages` are the raw output of the
    `advantage` hook: normalised ones are no valid targets. No gradient. Example: `raw_plus_values`.
    """


@hookspec(firstresult=True)
def normalize(advantages: PerToken, rewards: PerRow, group: RowId, mask: PerToken) -> PerToken:
    """The advantages as the surrogate will see them: [B,T].

    Called after `critic_target`, over the rollout (or each minibatch, by the slot's option `per`).
    No gradient. Example: `whiten`.
    """


@hookspec(firstresult=True)
def ratio(logp: PerToken, old_logp: PerToken, mask: PerToken) -> PerToken:
    """The importance ratio of each token: [B,T].

    Called at each update when somebody names `ratio`. The gradient flows through `logp`;
    `old_logp` is fixed for the batch (where the loop says ``anchor = "rollout"``, every hook of the
    update gets rollout_logp under this name). Example: `token`.
    """


@hookspec(firstresult=True)
def surrogate(
    ratio: PerToken,
    logp: PerToken,
    old_logp: PerToken,
    rollout_logp: PerToken,
    advantages: PerToken,
    rewards: PerRow,
    entropy: PerToken,
    mask: PerToken,
    group: RowId,
) -> PerToken:
    """The objective of each token, to be maximised: [B,T].

    Called at each update. The gradient flows through `ratio` and `logp` only; everything else
    arrives detached (`entropy` too: a weight, not a bonus), `rewards` are raw. Example: `ppo_clip`.
    """


@hookspec(firstresult=True)
def kl_loss(
    logp: PerToken, old_logp: PerToken, ref_logp: PerToken, mask: PerToken, share: PerToken
) -> PerToken:
    """The penalty of each token, beta included, to be minimised: [B,T].

    Called at each update; summed with the recipe's shares unless the slot names its own
    aggregate. The gradient flows through `logp`. Example: `in_loss`.
    """


@hookspec(firstresult=True)
def extra_loss(
    logp: PerToken, entropy: PerToken, rewards: PerRow, mask: PerToken, share: PerToken
) -> PerToken:
    """A further loss of each token, to be minimised: [B,T].

    Called at each update; a list slot (`extra`) whose entries are summed. The gradient flows
    through `logp` and `entropy`, which is live here; `rewards` are raw. Example: `entropy`.
    """


@hookspec(firstresult=True)
def critic_loss(
    values: PerToken, old_values: PerToken, returns: PerToken, mask: PerToken
) -> PerToken:
    """The critic's loss of each token: [B,T].

    Called at each update when there is a critic. The gradient flows through `values`, the live
    critic's; `old_values` and the targets `returns` are the rollout's. Example: `squared`.
    """


@hookspec(firstresult=True)
def aggregate(mask: PerToken, group: RowId, budget: int) -> PerToken:
    """The share of each token in the scalar loss: [B,T], 0 off the mask.

    Called once over the whole optimisation batch, then sliced: `loss = (share * per_token).sum()`,
    so accumulation is exact. What is not linear in the token loss belongs into `ratio` or
    `surrogate`. No gradient. Example: `token_mean`.
    """


@hookspec
def observe(
    logp: PerToken,
    old_logp: PerToken,
    rollout_logp: PerToken,
    ref_logp: PerToken,
    ratio: PerToken,
    surrogate: PerToken,
    pull: PerToken,
    share: PerToken,
    kl: PerToken,
    extra: PerToken,
    advantages: PerToken,
    returns: PerToken,
    values: PerToken,
    old_values: PerToken,
    entropy: PerToken,
    rewards: PerRow,
    token_rewards: PerToken,
    group: RowId,
    lengths: RowId,
    truncated: RowFlag,
    stop_reason: RowId,
    bootstrap: PerRow,
    mask: PerToken,
    interval: Interval,
    bounds: Interval,
) -> Mapping[str, float]:
    """Numbers to record: a mapping from name to float.

    Any number of observers, at each update, rollout or evaluation (`@observe(at=...)`); read-only
    and detached. `pull` is the derivative of the summed surrogate by each logp; `ratio` is the
    recipe's, or exp(logp - old_logp) where it has none; `interval` is the ratio interval that
    counts as inside, `bounds` the one that the surrogate declares (None: that side is inactive).
    An observer whose tensors do not exist records nothing.
    Example: `clipping`.
    """


@hookspec
def recipes() -> Mapping[str, Mapping[str, Any]]:
    """Named algorithms: name -> what stands in a recipe's TOML table. Example: `grpo`.

    Called when the shelf is read. Any number of plugins; a name given twice is an error.
    """


@hookspec
def tasks() -> Mapping[str, Any]:
    """Named tasks: name -> task. Called when the shelf is read."""


@hookspec
def executors() -> Mapping[str, Any]:
    """Named ways to run many runs: name -> executor. Called when the shelf is read."""


@dataclass(frozen=True)
class Option:
    """A slot's switch, written beside the component's parameters and read by the loop."""

    name: str
    type: Any
    default: Any
    doc: str


@dataclass(frozen=True)
class Slot:
    """A place in a recipe: the hooks its component may implement, in call order."""

    hooks: tuple[str, ...]
    many: bool = False
    required: bool = False


OPTIONS: Mapping[str, tuple[Option, ...]] = {
    "keep": (
        Option(
            "stats",
            Literal["kept", "all"],
            "kept",
            "rows that advantage, and normalize per rollout, see",
        ),
        Option(
            "mode",
            Literal["renormalise", "drop"],
            "renormalise",
            "rows that the shares count: those kept, or all",
        ),
        Option("refill", bool, False, "sample again until the batch is full (the loop)"),
        Option("refill_cap", float, 3.0, "rollouts at most, in batches, when refilling (the loop)"),
    ),
    "kl_reward": (
        Option(
            "credit",
            Literal["to_go", "own", "sequence"],
            "to_go",
            "a token pays for the rest of the row, for itself, or for the whole row",
        ),
        Option(
            "when",
            Literal["before", "after"],
            "before",
            "taken off the reward before the advantage, or off the advantage after it",
        ),
        Option("centre", bool, False, "less the batch mean of the credited cost (when='after')"),
    ),
    "normalize": (
        Option("per", Literal["rollout", "minibatch"], "rollout", "what the statistics are over"),
    ),
    "kl_loss": (
        Option("aggregate", object, None, "an aggregate of its own (default: the recipe's)"),
    ),
    "extra_loss": (
        Option("aggregate", object, None, "an aggregate of its own (default: the recipe's)"),
    ),
}

SLOTS: Mapping[str, Slot] = {
    "filter": Slot(("keep",), many=True),
    "shape": Slot(("shape_reward",), many=True),
    "kl": Slot(("kl_reward", "kl_loss")),
    "advantage": Slot(("advantage",), required=True),
    "critic_target": Slot(("critic_target",)),
    "normalize": Slot(("normalize",)),
    "ratio": Slot(("ratio",)),
    "surrogate": Slot(("surrogate",), required=True),
    "extra": Slot(("extra_loss",), many=True),
    "critic_loss": Slot(("critic_loss",)),
    "aggregate": Slot(("aggregate",), required=True),
    "wrap": Slot((), many=True),
}

SPECS: Mapping[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        *(keep, shape_reward, kl_reward, advantage, critic_target, normalize, ratio, surrogate),
        *(kl_loss, extra_loss, critic_loss, aggregate, observe, recipes, tasks, executors),
    )
}
NAMED_DATA = ("recipes", "tasks", "executors")
TENSOR_HOOKS = tuple(h for h in SPECS if h not in NAMED_DATA and h != "observe")
COMPONENT_HOOKS = (*TENSOR_HOOKS, "observe")
SLOT_OF: Mapping[str, str] = {hook: slot for slot, s in SLOTS.items() for hook in s.hooks}


#: The inputs through which a gradient flows; all else arrives detached, so no component can train
#: its own weights (advantages, shares), an anchor or a rollout's frozen cost by accident.
LIVE: Mapping[str, tuple[str, ...]] = {
    "ratio": ("logp",),
    "surrogate": ("ratio", "logp"),
    "kl_loss": ("logp",),
    "extra_loss": ("logp", "entropy"),
    "critic_loss": ("values",),
}


def inputs(hook: str) -> tuple[str, ...]:
    """A hook's vocabulary, in its order."""
    return tuple(name for name in SPECS[hook].__annotations__ if name != "return")


#: What each input is (PerToken, PerRow, RowId, RowFlag, int, Interval), read off the specs.
KINDS: Mapping[str, str] = {
    name: SPECS[hook].__annotations__[name] for hook in COMPONENT_HOOKS for name in inputs(hook)
}
#: What each tensor hook returns, of the same kinds.
RETURNS: Mapping[str, str] = {hook: SPECS[hook].__annotations__["return"] for hook in TENSOR_HOOKS}
