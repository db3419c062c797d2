# SPDX-License-Identifier: Apache-2.0
"""Where commands write: results to the standard output, everything else to the standard error."""

from rich.console import Console

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def print_error(problem: object) -> None:
    """Print one message about what went wrong to the standard error."""
    err.print("[bold red]thinwire:[/] ", end="")
    err.print(str(problem), markup=False)
