"""`thinwire reproduce`: a paper's claim, checked at the scale of one machine, from a checkout of the repository."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from thinwire.errors import ConfigError


@dataclass(frozen=True)
class Reproduce:
    """Check a paper's claim against the paper's own baselines; without a name, list what can be checked.

    The reproductions are not part of the installed package: run this in a checkout of the repository. The exit code is
    1 when the claim does not hold.

    Args:
        name: of the reproduction.
        quick: fewer steps and rounds.
        out: the folder; runs/reproduce-NAME-TIME unless given.
        json: print the result as JSON.
    """

    name: Positional[str | None] = None
    quick: bool = False
    out: Path | None = None
    json: bool = False

    def __call__(self) -> int:
        """Check one, or list them all."""
        home = str(checkout())
        # Workers that a reproduction starts import it too.
        sys.path.insert(0, home)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))
        command: Any = import_module("reproductions.shared.command")
        code: int = command.reproduce(self.name, quick=self.quick, folder=self.out, json=self.json)
        return code


def checkout() -> Path:
    """The checkout that the reproductions lie in: around the current folder, or around this file.

    Raises:
        ConfigError: there is none.
    """
    here = Path.cwd()
    for folder in (here, *here.parents, *Path(__file__).resolve().parents):
        if (folder / "reproductions" / "shared" / "claims.py").is_file():
            return folder
    raise ConfigError(
        f"thinwire reproduce: {here} is not in a checkout of the repository, and the reproductions are not part of the "
        "installed package; clone the repository, `pip install -e '.[all]'` there, and run this in it"
    )
