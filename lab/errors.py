"""The one error a person can mend, and the words that help them to."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LabError(Exception):
    """A mistake the user can fix. The command line prints it in one line, without a traceback."""


class ComponentError(LabError):
    """A mistake in a component, whose message names it already."""


def nearest(given: object, allowed: Iterable[str]) -> str:
    """`` Did you mean 'cispo'?``, with its leading blank, or nothing when no name is near."""
    close = difflib.get_close_matches(str(given), list(allowed), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def one_of(names: Iterable[str]) -> str:
    """The names in one line, sorted; ``none`` when there are none."""
    return ", ".join(sorted(names)) or "none"
