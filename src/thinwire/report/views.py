# SPDX-License-Identifier: Apache-2.0
"""Elastic runs: which workers trained together from when on, and what the changes have cost."""

from html import escape

from thinwire.report import units
from thinwire.report.files import number
from thinwire.report.runs import Collection, Run


def views(collection: Collection) -> str:
    """A table of views for each elastic run, with its goodput; empty where there is none."""
    several = len(collection.runs) > 1
    return "".join(_run(run, named=several) for run in collection.runs)


def _run(run: Run, *, named: bool) -> str:
    found = run.summary.get("views")
    entries = [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
    if not entries:
        return ""
    head = f"<h3>{escape(run.label)}</h3>" if named else ""
    rows = "".join(
        f"<tr><td>{int(number(each, 'epoch') or 0)}</td><td>{units.count(number(each, 'step') or 0)}</td>"
        f"<td>{units.seconds(number(each, 'seconds') or 0.0)}</td><td>{len(_names(each, 'members'))}</td>"
        f"<td>{escape(', '.join(_names(each, 'joined')))}</td><td>{escape(', '.join(_names(each, 'lost')))}</td></tr>"
        for each in entries
    )
    headings = "".join(f"<th>{words}</th>" for words in ("view", "from step", "at", "workers", "came", "went"))
    return f"{head}{_goodput(run)}<table><thead><tr>{headings}</tr></thead><tbody>{rows}</tbody></table>{_told(run)}"


def _goodput(run: Run) -> str:
    goodput = number(run.summary, "goodput")
    if goodput is None:
        return ""
    return (
        f'<p class="intro">Goodput {100 * goodput:.0f} %: the batches trained on in a second, over those that the '
        "first view's workers would have trained on at its pace.</p>"
    )


def _told(run: Run) -> str:
    told = run.summary.get("told")
    if not isinstance(told, dict) or not told:
        return ""
    costs = ", ".join(f"{name.replace('_', ' ')} {cost:.6g}" for name, cost in told.items())
    return f'<p class="intro">What the changes have cost: {escape(costs)}.</p>'


def _names(view: dict[str, object], name: str) -> list[str]:
    """Of workers."""
    found = view.get(name)
    return [str(each) for each in found] if isinstance(found, list) else []
