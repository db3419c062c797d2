# SPDX-License-Identifier: Apache-2.0
"""Where commands write: results to the standard output, everything else to the standard error."""

from typing import NoReturn

from rich.console import Console


class Output(Console):
    """The standard output; where nobody reads on, as after `| head`, `thinwire.cli.main` is told."""

    def on_broken_pipe(self) -> NoReturn:
        """Let the error through; rich would end the program with the exit code of a failure."""
        raise BrokenPipeError


# Without emoji: module:function:name is what it says, also where `:function:` is the name of a picture.
out = Output(highlight=False, soft_wrap=True, emoji=False)
err = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)


def print_error(problem: object) -> None:
    """Print one message about what went wrong to the standard error."""
    err.print("[bold red]thinwire:[/] ", end="")
    err.print(str(problem), markup=False)
