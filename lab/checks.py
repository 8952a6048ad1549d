"""What a recipe's components declare of themselves, checked against each other and the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from lab.binding import Bound
from lab.errors import LabError
from lab.probe import batch
from lab.recipe import Recipe


def check_declarations(recipe: Recipe, bound: Iterable[Bound]) -> None:
    """Groups large enough, one correction for the sampler, a KL that is credited where it can be.

    Raises:
        LabError: naming the component and the setting that contradicts it.
    """
    bound = list(bound)
    for b in bound:
        needed = b.declares("needs_group")
        if needed > recipe.loop.group_size:
            raise LabError(
                f"{b.component} needs groups of at least {needed} rows; "
                f"loop.group_size is {recipe.loop.group_size}"
            )
    correcting = [b for b in bound if b.declares("corrects") == "rollout"]
    if len(correcting) > 1:
        names = " and ".join(repr(b.component.name) for b in correcting)
        raise LabError(f"{names} both correct for the sampler; keep one")
    if correcting and recipe.loop.anchor == "rollout":
        raise LabError(
            f"{correcting[0].component} corrects for the sampler, "
            "and loop.anchor = 'rollout' does so already; keep one"
        )
    for b in bound:
        if b.options.get("when") == "before" and not _reads_rewards(bound):
            raise LabError(
                f"{b.component}: when = 'before' takes the cost off the rewards, "
                "and the advantage names none; say when = 'after'"
            )
        if b.options.get("when") == "before":
            for name, value in (("credit", "own"), ("centre", True)):
                if b.options[name] == value:
                    raise LabError(
                        f"{b.component}: {name} = {value!r} goes with when = 'after' only"
                    )


def _reads_rewards(bound: Iterable[Bound]) -> bool:
    on_advantage = [b for b in bound if b.component.hook == "advantage"]
    return any({"rewards", "token_rewards"} & set(b.component.inputs) for b in on_advantage)


def check_aggregation(recipe: Recipe, bound: Iterable[Bound], call: Callable[..., Tensor]) -> None:
    """A sequence-level component wants shares that weigh every row alike.

    With another aggregate a row weighs by its length: rows of 1 and 9 tokens with advantages 1 and
    -1 at ratio 1 give objective 0 under sequence_mean and -.8 under token_mean. Tried on the
    probe, so it holds for any aggregate, whatever its name.

    Raises:
        LabError: unless the recipe says ``length_weighted = true``.
    """
    level = [b for b in bound if b.declares("sequence_level")]
    if not level or recipe.length_weighted:
        return
    rows = call("aggregate", batch(4)).sum(1)
    if not torch.allclose(rows, rows[0].expand_as(rows), rtol=1e-4):
        raise LabError(
            f"{level[0].component} is one number a row, but aggregate {recipe.aggregate.name!r} "
            "weighs rows by their length; take sequence_mean, or say length_weighted = true"
        )
