"""The command line: arguments in, one call, text out. Heavy imports stand inside the commands."""

from __future__ import annotations

import sys
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


def main() -> None:
    """Run the command line. A user's mistake is one line on stderr and exit code 2."""
    try:
        code = app(args=sys.argv[1:] or ["--help"], standalone_mode=False)
    except (LabError, typer.TyperException) as e:
        message = e.format_message() if hasattr(e, "format_message") else str(e)
        print(f"lab: {' '.join(message.split())}", file=sys.stderr)
        raise SystemExit(2) from None
    raise SystemExit(code or 0)
