# SPDX-License-Identifier: Apache-2.0
"""`thinwire completion`: a script by which a shell completes commands, options and their values."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from importlib import import_module
from typing import Literal

from tyro.conf import Positional

from thinwire.cli.values import options_of


@dataclass(frozen=True)
class Completion:
    """Print a script by which a shell completes commands and options.

    Example: thinwire completion bash > ~/.local/share/bash-completion/completions/thinwire

    For zsh, add `source <(thinwire completion zsh)` to ~/.zshrc, below compinit; for fish, write it to
    ~/.config/fish/completions/thinwire.fish.

    Args:
        shell: bash, zsh or fish.
    """

    shell: Positional[Literal["bash", "zsh", "fish"]]

    def __call__(self) -> int:
        """Print the script; returns 0."""
        options = options_by_command()
        sys.stdout.write(_fish(options) if self.shell == "fish" else _bash(options, zsh=self.shell == "zsh"))
        return 0


def options_by_command() -> dict[str, dict[str, tuple[str, ...]]]:
    """The options of every command, each with the values that it has a list of."""
    from thinwire.cli.commands import COMMANDS, installed

    found: dict[str, dict[str, tuple[str, ...]]] = {}
    for name in installed():
        kind = getattr(import_module(COMMANDS[name].module), COMMANDS[name].kind)
        options = {f"--{each.name}": each.choices for each in options_of(kind) if not each.positional}
        found[name] = {"--help": ()} | options
    return found


def _bash(options: dict[str, dict[str, tuple[str, ...]]], *, zsh: bool) -> str:
    """One function; zsh understands it through bashcompinit."""
    cases = "\n".join(
        f"    {command}) options={shlex.quote(' '.join(each))} ;;" for command, each in sorted(options.items())
    )
    pairs = {
        (command, option): values for command, each in options.items() for option, values in each.items() if values
    }
    values = "\n".join(
        f"    {command}:{option}) values={shlex.quote(' '.join(each))} ;;" for (command, option), each in pairs.items()
    )
    head = "autoload -U +X bashcompinit && bashcompinit\n" if zsh else ""
    return f"""{head}_thinwire() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" options="" values=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W {shlex.quote(" ".join(options))} -- "$word"))
    return
  fi
  case "${{COMP_WORDS[1]}}" in
{cases}
  esac
  case "${{COMP_WORDS[1]}}:$before" in
{values}
  esac
  if [ -n "$values" ]; then
    COMPREPLY=($(compgen -W "$values" -- "$word"))
  elif [ "${{word#-}}" != "$word" ]; then
    COMPREPLY=($(compgen -W "$options" -- "$word"))
  else
    COMPREPLY=($(compgen -f -- "$word"))
  fi
}}
complete -o filenames -F _thinwire thinwire
"""


def _fish(options: dict[str, dict[str, tuple[str, ...]]]) -> str:
    from thinwire.cli.commands import COMMANDS

    lines: list[str] = []
    for command, each in options.items():
        summary = shlex.quote(COMMANDS[command].summary)
        lines.append(f"complete -c thinwire -n __fish_use_subcommand -f -a {command} -d {summary}")
        seen = f"'__fish_seen_subcommand_from {command}'"
        for option, values in each.items():
            known = f" -x -a {shlex.quote(' '.join(values))}" if values else ""
            lines.append(f"complete -c thinwire -n {seen} -l {option.removeprefix('--')}{known}")
    return "\n".join(lines) + "\n"
