"""One run, from Python or from the command line: its settings put together, its folder found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lab import recipe as recipes
from lab import train as loop
from lab.console import Console
from lab.recipe import Recipe
from lab.settings import OBSERVERS, Settings, Spec, checked, split_sets, use_of, with_changes
from lab.shelf import Plugin, Shelf
from lab.train import Result

#: Rollouts between checkpoints of a run that is trained alone.
CHECKPOINT_EVERY = 10


def run(
    recipe: str | Path | Mapping[str, Any] | Recipe,
    task: str | Mapping[str, Any],
    *,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    observers: Iterable[str] = OBSERVERS,
    out: str | Path | None = None,
    plugins: Iterable[Plugin] = (),
    console: Console | None = None,
) -> Result:
    """Train one recipe on one task with one seed; a second call goes on where it ended.

    Args:
        recipe: a name, a TOML file (``FILE.toml`` or ``FILE.toml:NAME``), a table
            (``{"base": "grpo", "loop": {"lr": 1e-3}}``), or a Recipe.
        task: a name, or a table ``{"name": "sort", "digits": 4}``.
        seed: everything random follows from it.
        settings: of the run: model, budget, eval_every, eval_prompts, warm_start,
            checkpoint_every.
        observers: names of what is recorded beside the loop's own numbers.
        out: its folder; runs/TASK-RECIPE-SEED-KEY when left out.
        plugins: files, modules or component functions beside the installed ones.
        console: told how far it is; nobody is when left out.

    Returns:
        How it ended and where it is; `lab show FOLDER` prints it.

    Raises:
        LabError: for a mistake in any of them, and for a folder that holds another run.
    """
    shelf = Shelf.installed(plugins)
    usual = Settings(checkpoint_every=CHECKPOINT_EVERY)
    body = {
        "recipe": recipes.load(recipe, shelf),
        "task": use_of(task, "task"),
        "seed": seed,
        "settings": with_changes(usual, settings or {}, "run"),
        "observers": tuple(use_of(name, "observers") for name in observers),
        "stage": "train",
    }
    spec: Spec = checked(Spec, body, "run")
    this = loop.prepared(spec, shelf)
    name = spec.recipe.name.replace(":", "-")
    usual_place = Path("runs") / f"{spec.task.name}-{name}-{seed}-{this.key[:8]}"
    folder = Path(out) if out else usual_place
    if console is None:
        return loop.train(this, folder)
    told = console
    return loop.train(
        this, folder, lambda spent: told.progress(round(100 * spent), 100, ""), told.say
    )


def train(
    recipe: str,
    task: str,
    seed: int,
    sets: Iterable[str],
    out: Path | None,
    plugins: Sequence[Path],
    console: Console,
) -> Path:
    """`run` for the command line: ``--set`` values by where they go, progress on a console.

    ``surrogate.cap=3`` and ``loop.lr=1e-3`` go to the recipe, ``task.digits=4`` to the task,
    ``run.model=tiny`` and ``run.budget.rollouts=20`` to the run.

    Raises:
        LabError: for a mistake in any of them.
    """
    for_recipe, for_task, for_run = split_sets(sets)
    result = run(
        recipes.load(recipe, Shelf.installed(plugins), for_recipe),
        {"name": task, **for_task},
        seed=seed,
        settings=for_run,
        out=out,
        plugins=plugins,
        console=console,
    )
    return result.folder
