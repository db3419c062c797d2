# SPDX-License-Identifier: Apache-2.0
"""`thinwire completion`: a script with which a shell completes commands, options, their values and files."""

from __future__ import annotations

import sys
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from thinwire.cli.console import err
from thinwire.errors import ConfigError


@dataclass(frozen=True)
class Completion:
    """Print a script with which a shell completes commands, options, their values and files.

    Example: thinwire completion bash > ~/.local/share/bash-completion/completions/thinwire

    thinwire --install-completion writes the script to where your shell looks for it.

    Args:
        shell: bash, zsh or fish; the shell that you use unless given.
        install: write the script to where the shell looks for it, instead of printing it.
    """

    shell: Literal["bash", "zsh", "fish"] | None = None
    _: KW_ONLY
    install: bool = False

    def __call__(self) -> int:
        """Print or install the script; returns 0."""
        from cyclopts.completion.detect import ShellDetectionError

        from thinwire.cli.commands import program

        try:
            if self.install:
                path = program().install_completion(shell=self.shell)
                err.print(f"{path}: written. Start a new shell to complete with Tab")
            else:
                sys.stdout.write(program().generate_completion(shell=self.shell))
        except ShellDetectionError:
            raise ConfigError("SHELL: is missing, and this process does not say. Name bash, zsh or fish") from None
        return 0
