"""Environments of other tools: each is made with pip at its first use, and kept."""

from __future__ import annotations

import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path


class NotInstalled(Exception):
    """A tool cannot be installed."""


def environment(
    place: Path,
    packages: Sequence[str],
    *,
    without_dependencies: str = "",
    unwanted: Sequence[str] = (),
) -> str:
    """Return the Python of an environment; make the environment if it does not exist.

    Args:
        place: folder of the environment.
        packages: what pip installs.
        without_dependencies: a package that pip installs without its dependencies.
        unwanted: packages that are removed again.

    Raises:
        NotInstalled: pip cannot install a package.
    """
    ready = place / "installed"
    python = str(
        place / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    )
    if not ready.exists():
        venv.create(place, with_pip=True)
        install = [python, "-m", "pip", "install", "-q"]
        run_installer([*install, *packages])
        if without_dependencies:
            run_installer([*install, "--no-deps", without_dependencies])
        if unwanted:
            run_installer([*install[:3], "uninstall", "-q", "-y", *unwanted])
        ready.touch()
    return python


def run_installer(command: Sequence[str], folder: Path | None = None) -> None:
    """Run an installer in a folder.

    Raises:
        NotInstalled: the installer fails; the message is its last line with an error.
    """
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=folder
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "ERR" in line.upper()]
        raise NotInstalled(
            lines[-1][:300] if lines else f"{command[0]} ends with an error"
        )
