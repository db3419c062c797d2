# SPDX-License-Identifier: Apache-2.0
"""`{command-help}`: what `thinwire --help` and `thinwire COMMAND --help` print, run when the site is built."""

import os
import subprocess
import sys
import textwrap

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.typing import ExtensionMetadata

from thinwire.cli.commands import COMMANDS

WIDTH = "84"


class CommandHelp(SphinxDirective):
    """The help of the program, then a section with the help of each command."""

    def run(self) -> list[nodes.Node]:
        """The help as literal blocks, in a section for each command."""
        return [self._block(help_of()), *(self._section(name) for name in COMMANDS)]

    def _section(self, name: str) -> nodes.Node:
        title = f"thinwire {name}"
        section = nodes.section("", nodes.title(title, title), self._block(help_of(name)), names=[title])
        self.state.document.note_implicit_target(section)
        return section

    def _block(self, text: str) -> nodes.Node:
        block = nodes.literal_block(text, text, language="text")
        self.set_source_info(block)
        return block


def help_of(*command: str) -> str:
    """The help as plain text.

    Raises:
        CalledProcessError: there is no such command.
    """
    environment = {**os.environ, "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": WIDTH}
    arguments = [sys.executable, "-m", "thinwire.cli", *command, "--help"]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True, timeout=120)
    lines = done.stdout.strip("\n").split("\n")
    return "\n".join(textwrap.fill(line.rstrip(), int(WIDTH)) for line in lines)


def setup(app: Sphinx) -> ExtensionMetadata:
    """Register the directive."""
    app.add_directive("command-help", CommandHelp)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
