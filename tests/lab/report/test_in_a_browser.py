# SPDX-License-Identifier: Apache-2.0
"""Pages in a real browser: nothing is wider than a telephone's screen, in the light and in the dark."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.browser import BROWSER, QUIET
from tests.lab.report.samples import SAMPLES, write_comparison
from thinwire.lab.report import write_report

needs_browser = pytest.mark.skipif(not BROWSER, reason="no chromium is installed")
# Written into a copy of the page: a report itself has no script. A frame is as narrow as a telephone; the window of a
# headless browser is not always.
PROBE = """<!doctype html><meta charset="utf-8"><body style="margin:0">
<iframe id="page" style="border:0;width:WIDTHpx;height:900px"></iframe><pre id="found"></pre>
<script>
const frame = document.getElementById("page");
frame.srcdoc = PAGE;
frame.onload = () => {
  const inner = frame.contentDocument, width = frame.clientWidth, wide = [];
  const scrolls = node => node && node.nodeType === 1 &&
    (/(auto|scroll)/.test(frame.contentWindow.getComputedStyle(node).overflowX) || scrolls(node.parentNode));
  for (const node of inner.body.querySelectorAll("*")) {
    const box = node.getBoundingClientRect();
    const shown = box.width > 1 && box.height > 1;
    if (shown && box.right > width + 1 && !scrolls(node)) wide.push(node.tagName + "." + node.getAttribute("class"));
  }
  const style = frame.contentWindow.getComputedStyle(inner.body.parentNode);
  const texts = [...inner.querySelectorAll("svg text")].map(node => node.getBoundingClientRect().height).filter(x => x);
  document.getElementById("found").textContent = JSON.stringify({
    scroll: inner.documentElement.scrollWidth, width, wide, background: style.backgroundColor,
    smallest: Math.min(...texts), hint: [...inner.querySelectorAll(".hint")].every(node => node.offsetHeight > 0),
  });
};
</script>"""


def seen(page: Path, folder: Path, *, width: int, dark: bool = False) -> dict[str, object]:
    """What a browser finds in a page at a width in pixels."""
    text = json.dumps(page.read_text(encoding="utf-8")).replace("</", "<\\/")
    probe = folder / f"probe-{width}-{dark}.html"
    probe.write_text(PROBE.replace("WIDTH", str(width)).replace("PAGE", text), encoding="utf-8")
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    profile = folder / f"profile-{width}-{dark}"
    done = subprocess.run(
        [BROWSER, *QUIET, f"--user-data-dir={profile}", scheme,
         "--window-size=1400,1000", "--virtual-time-budget=5000", "--dump-dom", probe.as_uri()],
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    found = re.search(r'<pre id="found">(\{.*?\})</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    return json.loads(found[1])


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_comparison(tmp_path_factory.mktemp("comparison"), SAMPLES, steps=60)
    return write_report(folder).report


@needs_browser
@pytest.mark.parametrize("width", [360, 400, 1280])
def test_a_report_needs_no_sideways_scrolling(report: Path, tmp_path: Path, width: int) -> None:
    found = seen(report, tmp_path, width=width)
    assert found["wide"] == [] and found["scroll"] == width
    # The one table that is wider says so.
    assert width > 400 or found["hint"]


@needs_browser
def test_words_in_drawings_can_be_read_on_a_telephone(report: Path, tmp_path: Path) -> None:
    assert seen(report, tmp_path, width=400)["smallest"] >= 9


@pytest.mark.slow
@needs_browser
def test_a_report_is_dark_in_the_dark(report: Path, tmp_path: Path) -> None:
    light, dark = (seen(report, tmp_path, width=400, dark=dark)["background"] for dark in (False, True))
    assert light == "rgb(246, 247, 249)" and dark == "rgb(15, 19, 25)"
