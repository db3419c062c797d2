# SPDX-License-Identifier: Apache-2.0
"""`docs/claims.md`: every claim with its protocol, its verdict and what it costs, from the claims and their results.

Run it with `python -m reproductions.shared.page`; with `--check` nothing is written, and the exit code is 1 if the page
is not what would be written.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from reproductions.shared.claims import MODULES, Claim, claim, is_present, last_result, last_verdict
from reproductions.shared.quick import told
from thinwire.core.storage.files import write_atomically

PAGE = Path(__file__).parents[2] / "docs" / "claims.md"
_HEAD = """# The papers' claims, and what came of them here

Each method of thinwire comes from a paper that claims something. For every claim there is a protocol: what is run, and
when each part of the claim holds. It is committed before its runs. A verdict is one of four: **holds**, **holds in
part** (which), **does not hold**, or **cannot be decided here** (why). Rules about time are judged round by round, by
ratios of runs that take turns; where some rounds meet a rule and others do not, the part is *within noise*.

Rules that were changed stay below each claim, with the verdict that they had. `thinwire reproduce NAME` remakes a
result in a checkout, and `--quick` a smaller form of it, in about three minutes or less on two cores. Parts whose noise
so few rounds or seeds cannot tell from their limits are measured and left open there; the full form decides them.

This page is written by `python -m reproductions.shared.page` from the claims and their committed results.
"""


def page() -> str:
    """The page as Markdown."""
    claims = [(claim(name), last_result(name)) for name in MODULES]
    rows = "".join(_row(which, result) for which, result in claims)
    table = f"\n| Claim | Verdict | Figure |\n| --- | --- | --- |\n{rows}"
    return _HEAD + table + "".join(_section(which, result) for which, result in claims)


def _row(which: Claim, result: dict[str, Any] | None) -> str:
    figure = result["measured"] if result else ""
    return f"| [{which.name}](#{which.name}) | {last_verdict(which, result)} | {figure} |\n"


def _section(which: Claim, result: dict[str, Any] | None) -> str:
    outcomes = result.get("parts", {}) if result and is_present(which, result) else {}
    parts = "".join(
        f"| {name} | {rule} | {outcomes.get(name, 'not run yet')} |\n" for name, rule in which.parts.items()
    )
    (full, quick), words = which.minutes, told(which)
    made = f"{result['when']}{', the quick form' if result['quick'] else ''}" if result else "none yet"
    earlier = "".join(
        f"- *{each.rule}.* Verdict: {each.verdict}. Changed because {each.why}.\n" for each in which.earlier
    )
    return (
        f"\n## {which.name}\n\n{which.sentence}\n\n{which.paper}. Published: {which.published}.\n\n"
        f"Protocol: {which.protocol}.\n\n| Part | Holds when | Outcome |\n| --- | --- | --- |\n{parts}\n"
        f"Where it does not pay: {which.costs}.\n\n"
        f"`thinwire reproduce {which.name}` takes about {full:g} minutes, with `--quick` {quick:g}. Committed result: "
        f"{made}; `reproductions/{which.name.replace('-', '_')}/report.md` has all figures.\n\n"
        f"{words[0].upper()}{words[1:]}.\n" + (f"\nEarlier rules:\n\n{earlier}" if earlier else "")
    )


if __name__ == "__main__":
    text = page()
    if "--check" in sys.argv[1:]:
        sys.exit(PAGE.read_text(encoding="utf-8") != text)
    write_atomically(PAGE, text.encode())
