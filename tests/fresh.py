"""A fresh environment with the lab from its wheel, which borrows only the heavy packages.

The test environment's site-packages stand on its path by a line in a .pth file. Such a line is no
site directory: the .pth files in there are not read, so the editable project is not found.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import textwrap
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run(*command: object, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """A command in another process, with nothing of this one's paths."""
    left = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PIP_", "COV_"))}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**left, "COLUMNS": "80", "PYTHONWARNINGS": "default"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not check or done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def built(out: Path, *options: str) -> Path:
    """The wheel of the checkout, or with no option that of its source distribution."""
    run(sys.executable, "-m", "build", "--no-isolation", *options, "-o", out, ROOT, cwd=out.parent)
    (wheel,) = out.glob("*.whl")
    return wheel


@dataclass(frozen=True)
class Fresh:
    """An environment in a folder; commands run in `work`, outside of the checkout."""

    folder: Path

    @classmethod
    def of(cls, folder: Path, wheel: Path) -> Fresh:
        """With the lab installed from a wheel."""
        venv.create(folder / "env", with_pip=False)
        fresh = cls(folder)
        fresh.work.mkdir()
        # before the borrowed packages are on the path: pip would find the lab among them
        fresh.pip("install", wheel)
        (fresh.site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
        return fresh

    @property
    def work(self) -> Path:
        return self.folder / "work"

    @property
    def site(self) -> Path:
        base = str(self.folder / "env")
        return Path(sysconfig.get_path("purelib", "venv", {"base": base, "platbase": base}))

    def _bin(self, name: str) -> Path:
        base = str(self.folder / "env")
        return Path(sysconfig.get_path("scripts", "venv", {"base": base})) / name

    def pip(self, command: str, *what: object) -> None:
        """pip over this environment, without any index."""
        options = {
            "install": ["--no-index", "--no-deps", "--no-build-isolation"],
            "uninstall": ["--yes"],
        }
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        pip += ["--python", str(self._bin("python"))]
        run(*pip, command, *options[command], *what, cwd=self.work)

    def lab(self, *arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        """The installed `lab` command."""
        return run(self._bin("lab"), *arguments, cwd=self.work, check=check)

    def python(self, code: str) -> str:
        """What a piece of Python prints."""
        return run(self._bin("python"), "-c", textwrap.dedent(code), cwd=self.work).stdout
