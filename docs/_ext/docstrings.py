# SPDX-License-Identifier: Apache-2.0
"""Mathematics in docstrings for autodoc: `$x$` and `$$x$$` become roles and directives. Links to public names."""

import re
from contextlib import suppress
from typing import Any, get_type_hints

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.typing import ExtensionMetadata

PUBLIC = ("thinwire", "thinwire.lab.tasks", "thinwire.lab.emulate", "thinwire.lab.report")
WIDEST = 150
"""Formulas side by side that have more characters of TeX than this are put on separate lines."""

_BLOCK = re.compile(r"[ \t]*\$\$(.+?)\$\$", re.DOTALL)
_INLINE = re.compile(r"(?<![\\$])\$([^$]+?)\$(?!\$)", re.DOTALL)


def translate(text: str) -> str:
    """One docstring, its mathematics marked up for Sphinx."""
    return _INLINE.sub(lambda m: f":math:`{' '.join(m[1].split())}`", _BLOCK.sub(_block, text))


def _block(found: re.Match[str]) -> str:
    indent = re.match(r"[ \t]*", found[0])
    margin = indent[0] if indent else ""
    tex = " ".join(found[1].split())
    parts = tex.split(r"\qquad") if len(tex) > WIDEST else [tex]
    return "".join(f"\n{margin}.. math:: {part.strip()}\n\n" for part in parts)


def _process(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    lines[:] = translate("\n".join(lines)).split("\n")


def _leave_out_ranges(app: Sphinx, thing: Any, bound: bool) -> None:
    """Show the types of fields in signatures without the ranges of their annotations."""
    with suppress(AttributeError, NameError, TypeError):
        thing.__annotations__ = get_type_hints(thing)


def resolve(app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.TextElement) -> nodes.Node | None:
    """Resolve a reference to a name in the module that defines it, as a link to where the name is public."""
    home, _, name = str(node.get("reftarget", "")).rpartition(".")
    if not home.startswith("thinwire."):
        return None
    places = (f"{public}.{name}" for public in PUBLIC if public != home)
    resolve_xref = env.domains["py"].resolve_xref
    found = (resolve_xref(env, node["refdoc"], app.builder, "obj", place, node, content) for place in places)
    return next((link for link in found if link is not None), None)


def setup(app: Sphinx) -> ExtensionMetadata:
    """Connect the handlers."""
    # Before napoleon, whose priority is 500.
    app.connect("autodoc-process-docstring", _process, priority=400)
    app.connect("autodoc-before-process-signature", _leave_out_ranges)
    app.connect("missing-reference", resolve)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
