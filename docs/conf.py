# SPDX-License-Identifier: Apache-2.0
"""The documentation site: MyST pages, docstrings by autodoc, and mathematics as MathML."""

import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

from thinwire import __version__

project = "thinwire"
author = "The thinwire developers"
copyright = "The thinwire developers"
version = release = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "mathml",
    "docstrings",
    "command_help",
    "hyperparameters",
]
exclude_patterns = ["_build", "_ext"]
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(?!thinwire\.).*"),
    (
        r"py:class",
        r"thinwire\..*\.([TU]|Array|Batch|Built|Chosen|Elastic(?:Worker|Options)?|Fleet|Followers|Logger|Mapped|ModelArray|Network|Parts|Policy|Progress|"
        r"Segment|Switched)",
    ),
    (r"py:class", r"thinwire\.coreset\.similarity\.SparseMatrix"),  # a union of SciPy's and torch's types
    # A function of an internal module, which has no page.
    (r"py:obj", r"thinwire\..*\.(write_whole|pull_mean_|tracked_mean)"),
]

myst_enable_extensions = ["dollarmath", "deflist", "fieldlist"]
myst_heading_anchors = 3

nb_execution_mode = "force"
nb_execution_timeout = 300
nb_execution_raise_on_error = True

default_role = "py:obj"
autodoc_member_order = "bysource"
# Trainers that are not installed here; their integrations have pages all the same.
autodoc_mock_imports = [name for name in ("accelerate", "lightning", "ray", "transformers") if find_spec(name) is None]
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = "thinwire"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["tables.js"]
html_math_renderer = "mathml"
html_copy_source = False
html_show_sourcelink = False
