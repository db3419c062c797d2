# SPDX-License-Identifier: Apache-2.0
"""Which workers trained together from when on, what the changes have cost, and who was asked to leave."""

from html import escape

from thinwire.core import units
from thinwire.lab.report.files import number
from thinwire.lab.report.runs import Collection, Run


def views(collection: Collection) -> str:
    """A table of views for each elastic run, with its goodput, and who got notice; empty where there is neither."""
    several = len(collection.runs) > 1
    return "".join(_run(run, named=several) for run in collection.runs)


def _run(run: Run, *, named: bool) -> str:
    found = run.summary.get("views")
    entries = [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
    if not entries:
        return _notice(run, named=named)
    head = f"<h3>{escape(run.label)}</h3>" if named else ""
    rows = "".join(
        f"<tr><td>{int(number(each, 'epoch') or 0)}</td><td>{units.count(number(each, 'step') or 0)}</td>"
        f"<td>{units.seconds(number(each, 'seconds') or 0.0)}</td><td>{len(_names(each, 'members'))}</td>"
        f"<td>{escape(', '.join(_names(each, 'joined')))}</td><td>{escape(', '.join(_gone(each)))}</td></tr>"
        for each in entries
    )
    headings = "".join(f"<th>{words}</th>" for words in ("view", "from step", "at", "workers", "came", "went"))
    table = f"<table><thead><tr>{headings}</tr></thead><tbody>{rows}</tbody></table>"
    return f"{head}{_goodput(run)}{table}{_costs(run)}{_restarts(run)}"


def _goodput(run: Run) -> str:
    goodput = number(run.summary, "goodput")
    if goodput is None:
        return ""
    return (
        f'<p class="intro">Goodput {100 * goodput:.0f} %: the batches trained on in a second, over those that the '
        "first view's workers would have trained on at its pace.</p>"
    )


def _costs(run: Run) -> str:
    costs = run.summary.get("costs")
    if not isinstance(costs, dict) or not costs:
        return ""
    words = ", ".join(f"{name.replace('_', ' ')} {cost:.6g}" for name, cost in costs.items())
    return f'<p class="intro">What the changes have cost: {escape(words)}.</p>'


def _notice(run: Run, *, named: bool) -> str:
    """That a run has saved and ended, and why."""
    notice = run.summary.get("notice")
    if not isinstance(notice, dict) or not isinstance(reasons := notice.get("reasons"), dict):
        return ""
    words = " and ".join(f"rank {rank} got {reason}" for rank, reason in reasons.items())
    return (
        f'<p class="intro">{escape(f"{run.label}: " if named else "")}Saved and ended after step '
        f"{int(number(notice, 'step') or 0)}, as {escape(words)}.</p>"
    )


def _restarts(run: Run) -> str:
    found = run.summary.get("restarts")
    entries = [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
    if not entries:
        return ""
    again = "; ".join(f"{each.get('how')}, at {units.seconds(number(each, 'seconds') or 0.0)}" for each in entries)
    return f'<p class="intro">Started again: {escape(again)}.</p>'


def _gone(view: dict[str, object]) -> list[str]:
    """Who is no longer there, and why where that is known."""
    left = view.get("left")
    reasons = [f"{worker} ({reason})" for worker, reason in left.items()] if isinstance(left, dict) else []
    return [*_names(view, "lost"), *reasons]


def _names(view: dict[str, object], name: str) -> list[str]:
    """Of workers."""
    found = view.get(name)
    return [str(each) for each in found] if isinstance(found, list) else []
