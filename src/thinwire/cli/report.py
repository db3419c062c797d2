# SPDX-License-Identifier: Apache-2.0
"""`thinwire report`: a run folder or a comparison folder as one HTML page."""

import webbrowser
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from thinwire.cli.console import out, print_json
from thinwire.lab.report import read, write_report, write_trace


@dataclass(frozen=True)
class Report:
    """Draw a run or a comparison: write report.html and plots/*.png into its folder, and print the page's path.

    Example: thinwire report runs/text-compare-20260101-120000 --trace

    Args:
        folder: the folder that `thinwire train --out` or `thinwire compare --out` wrote.
        trace: also write the timeline of each run that recorded one as trace.json, which ui.perfetto.dev opens.
        json: print the paths as JSON.
        open: show the page in the browser.
    """

    folder: Path
    _: KW_ONLY
    trace: bool = False
    json: bool = False
    open: bool = False

    def __call__(self) -> int:
        """Write the files and print their paths; returns 0."""
        written = write_report(self.folder)
        traces = _write_traces(self.folder) if self.trace else []
        if self.json:
            print_json({"report": written.report, "plots": written.plots, "traces": traces})
        else:
            for path in (written.report, *traces):
                out.print(str(path))
        if self.open:
            webbrowser.open(written.report.resolve().as_uri())
        return 0


def _write_traces(folder: Path) -> list[Path]:
    """Write one trace per run with a timeline.

    Raises:
        ConfigError: no run has a timeline; the message is that of the first run.
    """
    runs = read(folder).runs
    return [write_trace(run.folder) for run in runs if run.spans] or [write_trace(runs[0].folder)]
