# SPDX-License-Identifier: Apache-2.0
"""`thinwire reproduce`: check a paper's claim at the scale of one machine, from a checkout of the repository."""

from __future__ import annotations

import os
import sys
from dataclasses import KW_ONLY, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError


@dataclass(frozen=True)
class Reproduce:
    """Check a paper's claim against the paper's own baselines; without a name, list the claims that can be checked.

    Example: thinwire reproduce slowmo --quick

    The reproductions are not part of the installed package: run this in a checkout of the repository. The exit code is
    0 when the claim holds and 1 when it does not.

    Args:
        name: the name of the reproduction; lists all of them unless given.
        quick: take fewer steps and rounds, for a first look.
        out: the folder for results; runs/reproduce-NAME-TIME unless given.
        json: print the result, or the list, as JSON.
    """

    name: str | None = None
    _: KW_ONLY
    quick: bool = False
    out: Path | None = None
    json: bool = False

    def __call__(self) -> int:
        """Check one claim, or list them all."""
        home = str(checkout())
        # The environment too: the worker processes that a reproduction starts import it as well.
        sys.path.insert(0, home)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))
        command: Any = import_module("reproductions.shared.command")
        code: int = command.reproduce(self.name, quick=self.quick, folder=self.out, json=self.json)
        return code


def checkout() -> Path:
    """The repository's folder, looked for above the current folder and then above this file.

    Raises:
        ConfigError: there is none.
    """
    here = Path.cwd()
    for folder in (here, *here.parents, *Path(__file__).resolve().parents):
        if (folder / "reproductions" / "shared" / "claims.py").is_file():
            return folder
    raise ConfigError(
        f"thinwire reproduce: {here} is not in a checkout of the repository, and the reproductions are not part of the "
        "installed package. Clone the repository, `pip install -e '.[all]'` there, and run this in it"
    )
