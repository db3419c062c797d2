"""The documentation site: MyST pages, docstrings by autodoc, and mathematics as MathML."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

from thinwire import __version__

project = "thinwire"
author = "The thinwire developers"
copyright = "The thinwire developers"
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "mathml",
    "docstrings",
    "command_help",
]
exclude_patterns = ["_build", "_ext"]
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(?!thinwire\.).*"),
    (r"py:class", r"thinwire\..*\.([TU]|Batch|Network)"),
]

myst_enable_extensions = ["dollarmath", "deflist", "fieldlist"]
myst_heading_anchors = 3

default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = "thinwire"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_copy_source = False
html_show_sourcelink = False
