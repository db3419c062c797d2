# SPDX-License-Identifier: Apache-2.0
"""HTML pages without scripts or links to other files, from the templates beside this file."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from thinwire.lab.report.palette import TONES
from thinwire.planning import units

_HERE = Path(__file__).parent
_PAGE_LIGHT = {"--page": "#f6f7f9", "--line": "#e2e6ec", "--link": "#0a5fa8", "--best": "#1a8f63"}
_PAGE_DARK = {"--page": "#0f1319", "--line": "#2a313c", "--link": "#7dbdf5", "--best": "#3ecf98"}
_TEMPLATES = Environment(
    loader=FileSystemLoader(_HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
)
_FILTERS: dict[str, Any] = {"zip": zip, "count_of": units.count, "duration": units.seconds}
_TESTS: dict[str, Any] = {"filled": lambda body: bool(str(body).strip())}
_TEMPLATES.filters.update(_FILTERS)
_TEMPLATES.tests.update(_TESTS)


def render(template: str, title: str, command: str, **values: Any) -> str:
    """Return the whole file.

    Args:
        template: name of the template, which extends `frame.html`.
        title: of the page, as plain text.
        command: that made it.
        values: of the template's variables.
    """
    light = _declared({tone.variable: tone.light for tone in TONES} | _PAGE_LIGHT)
    dark = _declared({tone.variable: tone.dark for tone in TONES} | _PAGE_DARK)
    style = (_HERE / "style.css").read_text(encoding="utf-8")
    page = _TEMPLATES.get_template(template)
    return page.render(title=title, command=command, light=light, dark=dark, style=style, **values) + "\n"


def _declared(values: dict[str, str]) -> str:
    return " ".join(f"{name}: {value};" for name, value in values.items())
