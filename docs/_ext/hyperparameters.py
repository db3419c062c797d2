# SPDX-License-Identifier: Apache-2.0
"""`{hyperparameters} PART`: a table of fields, defaults and meanings for each class, from the classes themselves."""

from class_fields import classes_of, table_of
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.typing import ExtensionMetadata


class Hyperparameters(SphinxDirective):
    """A table for each class of one part that recipes can name: strategies, codecs or topology."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """The sections, as if they had been written in Markdown."""
        text = "\n\n".join(table_of(kind) for kind in classes_of(self.arguments[0]))
        holder = nodes.section()
        holder.document = self.state.document
        self.state.nested_parse(StringList(text.split("\n"), source="hyperparameters"), 0, holder, match_titles=True)
        return holder.children


def setup(app: Sphinx) -> ExtensionMetadata:
    """Register the directive."""
    app.add_directive("hyperparameters", Hyperparameters)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
