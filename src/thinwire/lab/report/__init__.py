# SPDX-License-Identifier: Apache-2.0
"""Reports of run folders: an HTML page, plots, tables and traces.

This package reads JSON files and imports nothing of training. Drawings need matplotlib and the terminal's table needs
rich; both are imported where they are used.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.errors import ConfigError
from thinwire.lab.report.folder import read
from thinwire.lab.report.runs import Collection, Run
from thinwire.lab.report.table import markdown, rich_table, rows
from thinwire.lab.report.trace import write_trace

if TYPE_CHECKING:
    from thinwire.lab.report.page import Written

__all__ = ["Collection", "Run", "markdown", "read", "rich_table", "rows", "write_report", "write_trace"]


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
