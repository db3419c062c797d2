"""`thinwire report`: a run folder or a comparison folder as one page to look at."""

import json
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from thinwire.cli.console import out
from thinwire.report import read, write_report, write_trace


@dataclass(frozen=True)
class Report:
    """Write report.html and plots/*.png into the folder of a run or of a comparison, and print the path."""

    folder: Positional[Path]
    """The folder that `thinwire train --out` or `thinwire compare --out` wrote."""

    trace: bool = False
    """Also write trace.json for each run that recorded a timeline; open it at ui.perfetto.dev."""

    json: Annotated[bool, arg(name="json")] = False
    """Print the paths as JSON."""

    open: Literal["yes", "no"] = "no"
    """Show the page in the browser."""

    def __call__(self) -> int:
        """Write the files and say where they are."""
        written = write_report(self.folder)
        traces = _traces(self.folder) if self.trace else []
        if self.json:
            paths = {"report": written.report, "plots": written.plots, "traces": traces}
            out.print(json.dumps(paths, default=_plain), markup=False)
        else:
            for path in (written.report, *traces):
                out.print(str(path), markup=False)
        if self.open == "yes":
            webbrowser.open(written.report.resolve().as_uri())
        return 0


def _traces(folder: Path) -> list[Path]:
    """One trace per run with a timeline; a folder without any is told so by the first run's error."""
    runs = read(folder).runs
    return [write_trace(run.folder) for run in runs if run.spans] or [write_trace(runs[0].folder)]


def _plain(value: object) -> object:
    return str(value)
