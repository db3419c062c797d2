# SPDX-License-Identifier: Apache-2.0
"""`python -m reproductions`: check a paper's claim at the scale of one machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from thinwire.cli import run
from thinwire.cli.parsing import parse_command


@dataclass(frozen=True)
class Reproduce:
    """Check a paper's claim against the paper's own baselines; without a name, list the claims that can be checked.

    Example: python -m reproductions slowmo --quick

    Run it in a checkout of the repository. The exit code is 0 when the claim holds and 1 when it does not.

    Args:
        name: the name of the reproduction; all of them are listed unless given.
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
        from reproductions.shared.command import reproduce

        # The worker processes that a reproduction starts import it as well.
        home = str(Path(__file__).parents[1])
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))
        return reproduce(self.name, quick=self.quick, folder=self.out, json=self.json)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    return run(lambda: parse_command("python -m reproductions", Reproduce, words))


if __name__ == "__main__":
    sys.exit(main())
