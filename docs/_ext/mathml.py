# SPDX-License-Identifier: Apache-2.0
"""Mathematics as MathML, converted from TeX when the site is built, so that pages need no network and no JavaScript."""

import re

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.errors import SphinxError
from sphinx.util.math import get_node_equation_number
from sphinx.util.typing import ExtensionMetadata
from sphinx.writers.html5 import HTML5Translator

_SHORT_FRACTION = re.compile(r"\\([dt]?frac)\s*([0-9a-zA-Z])\s*([0-9a-zA-Z])")

_SIZE = re.compile(r"\\[bB]igg?[lr]?(?![a-zA-Z])")


def convert(tex: str, *, block: bool) -> str:
    """The MathML of one formula.

    Raises:
        SphinxError: the converter does not know a command.
    """
    # The converter would read the two digits of \\tfrac13 as one number.
    braced = _SHORT_FRACTION.sub(r"\\\1{\2}{\3}", tex)
    # Browsers size fences by themselves, and the converter does not know these two.
    braced = _SIZE.sub("", braced).replace(r"\dots", r"\ldots")
    try:
        return tex2mathml(braced, as_block=block)
    except MathError as error:
        raise SphinxError(f"cannot turn {tex!r} into MathML: {error}") from error


def visit_inline(translator: HTML5Translator, node: nodes.math) -> None:
    """A formula within a line."""
    translator.body.append(convert(node.astext(), block=False))
    raise nodes.SkipNode


def visit_block(translator: HTML5Translator, node: nodes.math_block) -> None:
    """A formula on its own line."""
    translator.body.append(translator.starttag(node, "div", CLASS="formula", role="math"))
    if node["number"]:
        translator.body.append(f'<span class="eqno">({get_node_equation_number(translator, node)})</span>')
    translator.body.append(f"{convert(node.astext(), block=True)}</div>\n")
    raise nodes.SkipNode


def setup(app: Sphinx) -> ExtensionMetadata:
    """Register the renderer."""
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
