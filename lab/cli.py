"""The command line: arguments in, one call, text out. Heavy imports stand inside the commands."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from lab.errors import LabError

app = typer.Typer(
    help="Write a piece of a policy-gradient objective, and see what it does.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
PluginFiles = Annotated[
    list[Path] | None,
    typer.Option("--plugin", help="A Python file with components; may be given several times."),
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override a setting, for example surrogate.cap=3."),
]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable.")]


class _StoppedError(Exception):
    """A person has interrupted a command; the text says what is kept."""


@contextlib.contextmanager
def _kept(what: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise _StoppedError(what) from None


@app.command()
def plugins(plugin: PluginFiles = None, json: Json = False) -> None:
    """List the components, recipes and observers at hand."""
    from lab import listing
    from lab.shelf import Shelf

    shelf = Shelf.installed(plugin or ())
    typer.echo(listing.plugins_json(shelf) if json else listing.plugins_text(shelf))


@app.command()
def recipes(
    name: Annotated[
        str | None, typer.Argument(help="A recipe's name, or FILE.toml, or FILE.toml:NAME.")
    ] = None,
    set_: Sets = None,
    plugin: PluginFiles = None,
    json: Json = False,
) -> None:
    """List the recipes, or show one with all its constants."""
    from lab import listing
    from lab.shelf import Shelf

    shelf = Shelf.installed(plugin or ())
    if name is None:
        if set_:
            raise LabError("--set changes one recipe; name it: lab recipes NAME --set ...")
        typer.echo(listing.recipes_json(shelf) if json else listing.recipes_text(shelf))
        return
    from lab import recipe
    from lab.bench import Bench

    bench = Bench(recipe.load(name, shelf, set_ or ()), shelf)
    typer.echo(listing.recipe_json(bench) if json else listing.recipe_text(bench))


@app.command()
def sanity(
    stage: Annotated[
        list[str] | None, typer.Argument(help="Stages to run; all six if none.")
    ] = None,
    plugin: PluginFiles = None,
) -> None:
    """Run six checks by hand, from a bandit to CISPO."""
    from lab import listing
    from lab import sanity as checks
    from lab.shelf import Shelf

    stages = []
    for one in checks.run(Shelf.installed(plugin or ()), stage or ()):
        typer.echo(listing.stage_text(one))
        stages.append(one)
    failed = [s.title for s in stages if s.failures]
    if failed:
        typer.echo(f"{len(failed)} of {len(stages)} PPO sanity checks failed: {', '.join(failed)}.")
        raise typer.Exit(1)
    count = "All six" if len(stages) == len(checks.STAGES) else f"{len(stages)}"
    typer.echo(f"{count} PPO sanity checks passed.")


@app.command()
def tasks(
    name: Annotated[str | None, typer.Argument(help="A task's name.")] = None,
    set_: Sets = None,
    plugin: PluginFiles = None,
    json: Json = False,
) -> None:
    """List the tasks, or show one with its settings and an example."""
    from lab import showing
    from lab.settings import split_sets
    from lab.shelf import Shelf

    shelf = Shelf.installed(plugin or ())
    recipe, task, run = split_sets(set_ or ())
    if recipe or run or (task and name is None):
        raise LabError("--set changes one task: lab tasks NAME --set task.SETTING=VALUE")
    if json:
        typer.echo(showing.tasks_json(shelf, name, task))
    else:
        typer.echo(
            showing.tasks_text(shelf) if name is None else showing.task_text(name, task, shelf)
        )


@app.command()
def train(
    recipe: Annotated[str, typer.Option(help="A recipe's name, or FILE.toml, FILE.toml:NAME.")],
    task: Annotated[str, typer.Option(help="A task's name; --set task.digits=4 sets it up.")],
    seed: Annotated[int, typer.Option(help="Everything random follows from it.")] = 0,
    set_: Sets = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder.")] = None,
    plugin: PluginFiles = None,
) -> None:
    """Train one recipe on one task with one seed; a second call goes on where it ended."""
    from lab import showing, single
    from lab.console import Console

    kept = "the run's last checkpoint is kept, and the same command goes on from it"
    with Console("% of the budget") as console, _kept(kept):
        folder = single.train(recipe, task, seed, set_ or (), out, plugin or (), console)
    typer.echo(showing.run_text(folder))
    typer.echo(f"\nin {folder}; all of it: lab show {folder}")


@app.command()
def show(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    json: Json = False,
) -> None:
    """Show a run: its record, its numbers, prompts and sampled answers with their rewards."""
    from lab import showing

    typer.echo(showing.run_json(run) if json else showing.run_text(run))


@app.command()
def run(
    study: Annotated[str, typer.Argument(help="A study's name, or a file that ends in .toml.")],
    scale: Annotated[str, typer.Option(help="One that the study declares.")] = "small",
    workers: Annotated[int, typer.Option(min=0, help="Processes; 0: one a core.")] = 0,
    out: Annotated[Path | None, typer.Option(help="The results folder.")] = None,
    plugin: PluginFiles = None,
) -> None:
    """Run a study and write its report; a second call goes on where it ended."""
    from lab import report
    from lab import study as studies
    from lab.console import Console
    from lab.shelf import Shelf

    shelf = Shelf.installed(plugin or ())
    chosen = studies.find(study, shelf)
    folder = out or Path("results") / chosen.name
    kept = "finished runs are kept, and the same command goes on with the others"
    with Console("runs") as console, _kept(kept):
        studies.run(chosen, scale, folder, shelf, console, workers, plugin or ())
        console.say("writing tables, figures and the report")
        typer.echo(report.rebuild(folder))


@app.command()
def status(
    study: Annotated[
        str | None, typer.Argument(help="A study's name or a results folder; all, if none.")
    ] = None,
) -> None:
    """Say how far a study's runs are."""
    from lab import results

    for folder in results.folders(study):
        for line in results.state(folder):
            typer.echo(line)


@app.command()
def report(
    study: Annotated[str, typer.Argument(help="A study's name or a results folder.")],
) -> None:
    """Rebuild tables, figures and report from the run folders."""
    from lab import report as reports
    from lab import results

    for folder in results.folders(study):
        typer.echo(reports.rebuild(folder))


def main() -> None:
    """Run the command line. A mistake is one line on stderr and exit code 2; Ctrl-C is 130."""
    try:
        code = app(args=sys.argv[1:] or ["--help"], standalone_mode=False)
    except _StoppedError as e:
        print(f"lab: stopped; {e}", file=sys.stderr)
        raise SystemExit(130) from None
    except (LabError, typer.TyperException) as e:
        message = e.format_message() if hasattr(e, "format_message") else str(e)
        print(f"lab: {' '.join(message.split())}", file=sys.stderr)
        raise SystemExit(2) from None
    except OSError as e:  # --out where nothing can be written, a full disk
        if e.filename is None:
            raise
        print(f"lab: {e.filename}: {e.strerror}", file=sys.stderr)
        raise SystemExit(2) from None
    raise SystemExit(code or 0)
