"""The supervised warm start: a policy that already gets some answers right, for each seed its own.

From one checkpoint for all seeds every interval would be conditional on that checkpoint; from
random weights a small model never sees a reward. The weights are cached under a hash of all that
makes them, so the recipes of a study start from the same bits.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lab import policy as policies
from lab.errors import LabError
from lab.identity import core_hash, digest, environment, model_hash
from lab.policy import Policy
from lab.streams import Streams
from lab.task import Task
from lab.tokens import Sampling

#: Weights of this process's earlier runs, by their hash: a worker runs many recipes of one seed.
_IN_MEMORY: dict[str, tuple[dict[str, Tensor], Start]] = {}
_REMEMBERED = 16


@dataclass(frozen=True)
class Teaching:
    """How the warm start is trained. AdamW without decay, cross-entropy over answer and end token.

    Attributes:
        lr: learning rate.
        batch: examples a step.
        check_every: steps between looks at the accuracy.
        check_prompts: fresh training prompts a look, one sampled answer each.
        most_steps: an error beyond.
    """

    lr: float = 2e-3
    batch: int = 64
    check_every: int = 4
    check_prompts: int = 256
    most_steps: int = 2000


@dataclass(frozen=True)
class Start:
    """A starting policy: supervised steps taken, and the accuracy that ended them."""

    steps: int
    accuracy: float


def folder() -> Path:
    """Where warm starts are kept: $LAB_CACHE, or the user's cache folder."""
    given = os.environ.get("LAB_CACHE")
    if given:
        return Path(given)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "policy-gradient-lab"


def start(
    model: str, task: Task, target: float, streams: Streams, say: Callable[[str], None] = print
) -> tuple[Policy, Start]:
    """The policy that a run of this task and seed starts from.

    Args:
        model: a preset, a directory or a hub id.
        task: its examples are what is taught.
        target: sampled accuracy on training prompts at which teaching stops; 0: none is taught.
        streams: the run's.
        say: told where the time goes.

    Raises:
        LabError: if the model cannot be had, or the target is not reached.
    """
    policy = policies.build(model, task.characters, streams.number("weights"))
    if target <= 0:
        return policy, Start(0, 0.0)
    made_of = {
        "model": model_hash(model),
        "task": streams.task,
        "seed": streams.seed,
        "target": target,
        "teaching": asdict(Teaching()),
        "environment": environment(),
        "core": core_hash(),
    }
    key = digest(made_of, 32)
    found = _IN_MEMORY.get(key) or _read(key)
    if found is None:
        say(f"a supervised warm start, to an accuracy of {target:g}")
        reached = _teach(policy, task, target, streams)
        found = ({n: x.detach().clone() for n, x in policy.model.state_dict().items()}, reached)
        _write(key, found)
    while len(_IN_MEMORY) >= _REMEMBERED:
        _IN_MEMORY.pop(next(iter(_IN_MEMORY)))
    _IN_MEMORY[key] = found
    policy.model.load_state_dict(found[0])
    return policy, found[1]


def _teach(policy: Policy, task: Task, target: float, streams: Streams) -> Start:
    how = Teaching()
    optimiser = torch.optim.AdamW(policy.model.parameters(), lr=how.lr, weight_decay=0.0)
    accuracy = 0.0
    for step in range(1, how.most_steps + 1):
        examples = task.draw("train", streams.python("warm.prompts", step), how.batch)
        samples = policy.given(
            [e.prompt for e in examples], [e.answer for e in examples], task.budget, task.stops
        )
        logp = policy.score(samples, temperature=1.0).logp
        loss = -logp.sum() / samples.mask.sum()
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        optimiser.step()
        if step % how.check_every == 0:
            accuracy = _accuracy(policy, task, how.check_prompts, streams, step)
            if accuracy >= target:
                return Start(step, accuracy)
    raise LabError(
        f"the warm start on task {task.name} reached {accuracy:.2f} in {how.most_steps} steps; "
        f"{target} was due: take an easier setting of the task, or a larger model"
    )


def _accuracy(policy: Policy, task: Task, prompts: int, streams: Streams, step: int) -> float:
    examples = task.draw("train", streams.python("warm.check", step), prompts)
    samples = policy.sample(
        [e.prompt for e in examples],
        1,
        task.budget,
        Sampling(),
        streams.torch("warm.sampling", step),
        policy.stop_ids(task.stops),
    )
    scores = [task.score(e, t) for e, t in zip(examples, policy.texts(samples), strict=True)]
    return sum(s or 0.0 for s in scores) / len(scores)


def _read(key: str) -> tuple[dict[str, Tensor], Start] | None:
    file = folder() / f"{key}.safetensors"
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError):
        return None  # not there, or torn: it is made again
    steps, accuracy = tensors.pop("lab.start").tolist()
    return tensors, Start(int(steps), accuracy)


def _write(key: str, found: tuple[dict[str, Tensor], Start]) -> None:
    """Written beside and renamed: another worker reads a whole file or none."""
    weights, reached = found
    note = torch.tensor([reached.steps, reached.accuracy], dtype=torch.float64)
    try:
        folder().mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder(), suffix=".tmp")
        os.close(handle)
        save_file({**{n: x.contiguous() for n, x in weights.items()}, "lab.start": note}, name)
        Path(name).replace(folder() / f"{key}.safetensors")
    except OSError:
        return  # a cache that cannot be written costs time, nothing else
