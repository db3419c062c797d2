# SPDX-License-Identifier: Apache-2.0
"""The frame of an HTML page: head, colours for light and dark, style. Without scripts or links to other files."""

from html import escape
from importlib import resources

from thinwire.lab.report.palette import TONES
from thinwire.lab.report.picture import Picture

_PAGE_LIGHT = {"--page": "#f6f7f9", "--line": "#e2e6ec", "--link": "#0a5fa8", "--best": "#1a8f63"}
_PAGE_DARK = {"--page": "#0f1319", "--line": "#2a313c", "--link": "#7dbdf5", "--best": "#3ecf98"}


def document(title: str, command: str, main: str, *, below: str = "", foot: str = "") -> str:
    """The whole file.

    Args:
        title: of the page, as plain text.
        command: that made it.
        main: HTML of the page's body.
        below: HTML beneath the title.
        foot: HTML at the end.
    """
    words = escape(title)
    light = _declared({tone.variable: tone.light for tone in TONES} | _PAGE_LIGHT)
    dark = _declared({tone.variable: tone.dark for tone in TONES} | _PAGE_DARK)
    # Only on screens: paper is light.
    colours = f":root {{{light}}}\n@media screen and (prefers-color-scheme: dark) {{ :root {{{dark}}} }}"
    style = resources.files("thinwire.lab.report").joinpath("style.css").read_text(encoding="utf-8")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{words}</title>
<style>
{colours}
{style}</style>
</head>
<body>
<header>
<p class="brand">{escape(command)}</p>
<h1>{words}</h1>
{below}
</header>
<main>
{main}
</main>
{foot}
</body>
</html>
"""


def card(title: str, body: str, anchor: str | None = None) -> str:
    """One section, as HTML; `anchor` is what links lead to."""
    place, heading = ("", "")
    if anchor is not None:
        place, heading = f' id="{anchor}" aria-labelledby="{anchor}-title"', f' id="{anchor}-title"'
    return f'<section class="card"{place}><h2{heading}>{escape(title)}</h2>{body}</section>\n'


def figure(picture: Picture, narrow: Picture | None = None, *, titled: bool = False, captioned: bool = True) -> str:
    """A picture with its title and caption, as HTML; a caption that is not shown is still there for screen readers.

    Args:
        picture: for wide screens and for paper.
        narrow: the same for narrow screens; None shows the wide one there too.
        titled: whether its title is shown.
        captioned: whether its caption is shown.
    """
    drawn = picture.svg()
    if narrow is not None:
        drawn = f'<div class="on-wide">{drawn}</div><div class="on-narrow">{narrow.svg()}</div>'
    title = f"<h3>{escape(picture.title)}</h3>" if titled else ""
    words = escape(picture.caption)
    caption = f"<figcaption>{words}</figcaption>" if captioned else f'<figcaption class="unseen">{words}</figcaption>'
    return f"<figure>{title}{drawn}{caption}</figure>\n"


def _declared(values: dict[str, str]) -> str:
    return " ".join(f"{name}: {value};" for name, value in values.items())
