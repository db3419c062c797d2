# SPDX-License-Identifier: Apache-2.0
"""Reports of run folders: an HTML page, plots, tables and traces.

This package reads JSON files and imports nothing of training. Drawings need matplotlib and the terminal's table needs
rich; both are imported where they are used. Names are imported when they are first used, so that help on the command
line, which needs `units` only, does not wait for the rest.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.errors import ConfigError

if TYPE_CHECKING:
    from thinwire.lab.report.folder import read
    from thinwire.lab.report.page import Written
    from thinwire.lab.report.runs import Collection, Run
    from thinwire.lab.report.table import markdown, rich_table, rows
    from thinwire.lab.report.trace import write_trace

_PLACES = {
    "Collection": "runs",
    "Run": "runs",
    "markdown": "table",
    "read": "folder",
    "rich_table": "table",
    "rows": "table",
    "write_trace": "trace",
}

__all__ = ["Collection", "Run", "markdown", "read", "rich_table", "rows", "write_report", "write_trace"]


def __getattr__(name: str) -> object:
    """Import a public name from where it is defined, once."""
    if name not in _PLACES:
        raise AttributeError(f"module 'thinwire.lab.report' has no attribute {name!r}")
    value: object = getattr(import_module(f"thinwire.lab.report.{_PLACES[name]}"), name)
    globals()[name] = value
    return value


def write_report(folder: Path) -> Written:
    """Write `report.html` and `plots/*.png` into a run folder or a comparison folder.

    Returns:
        The paths: `report`, and `plots` in the page's order.

    Raises:
        ConfigError: there is no such folder, it holds no run, it cannot be written to, or matplotlib is missing.
    """
    try:
        from thinwire.lab.report.page import write
    except ModuleNotFoundError as missing:
        raise ConfigError(
            f"thinwire report needs {missing.name} for its drawings; pip install 'thinwire[report]'"
        ) from None
    return write(folder)
