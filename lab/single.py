"""One run from the command line: its settings put together, its folder found."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lab import recipe as recipes
from lab import train as loop
from lab.console import Console
from lab.recipe import Use
from lab.settings import OBSERVERS, Settings, Spec, checked, split_sets, with_changes
from lab.shelf import Shelf

#: Rollouts between checkpoints of a run that is trained alone.
CHECKPOINT_EVERY = 10


def train(
    recipe: str,
    task: str,
    seed: int,
    sets: Iterable[str],
    out: Path | None,
    plugins: Iterable[Path],
    console: Console,
) -> Path:
    """Train one run and say where it is; where its folder holds a part of it, go on from there.

    Args:
        recipe: a name, FILE.toml or FILE.toml:NAME.
        task: a name.
        seed: of the run.
        sets: ``surrogate.cap=3`` and ``loop.lr=1e-3`` for the recipe, ``task.digits=4`` for the
            task, ``run.model=tiny`` or ``run.budget.rollouts=20`` for the run.
        out: its folder; runs/TASK-RECIPE-SEED-KEY when left out.
        plugins: files.
        console: told how far it is.

    Raises:
        LabError: for a mistake in any of them.
    """
    plugins = list(plugins)
    shelf = Shelf.installed(plugins)
    for_recipe, for_task, for_run = split_sets(sets)
    usual = Settings(checkpoint_every=CHECKPOINT_EVERY)
    body = {
        "recipe": recipes.load(recipe, shelf, for_recipe),
        "task": Use(name=task, settings=for_task),
        "seed": seed,
        "settings": with_changes(usual, for_run, "--set run"),
        "observers": tuple(Use(name=n) for n in OBSERVERS),
        "stage": "train",
    }
    spec: Spec = checked(Spec, body, "run")
    key = loop.prepared(spec, shelf).key
    name = spec.recipe.name.replace(":", "-")
    folder = out or Path("runs") / f"{task}-{name}-{seed}-{key[:8]}"
    limits = spec.settings.budget.declared()
    total = max(limits.values())

    def progress(spent: float) -> None:
        console.progress(round(spent * total), total, "")

    console.say(f"{name} on {task}, seed {seed}: preparing the start")
    loop.run(spec, folder, plugins, progress, console.say)
    return folder
