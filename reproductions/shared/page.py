# SPDX-License-Identifier: Apache-2.0
"""`docs/claims.md`, the verdicts, and `reproductions/claims.md`, the protocols, from the claims and their results.

Run it with `python -m reproductions.shared.page`; with `--check` nothing is written, and the exit code is 1 if a page
is not what would be written.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from reproductions.shared.claims import MODULES, Claim, claim, is_present, last_result, last_verdict
from reproductions.shared.committed import filled, write_pages

_HERE = Path(__file__).parent
PAGE = _HERE.parents[1] / "docs" / "claims.md"
RULES = _HERE.parent / "claims.md"


def page() -> str:
    """Return the page of the docs: the figure, and the outcome of each part."""
    verdicts = "".join(_verdicts(which, last_result(which.name)) for which in map(claim, MODULES))
    return filled(_HERE / "page.md", {"verdicts": verdicts})


def rules() -> str:
    """Return the page with protocols, rules, earlier rules, and where each method does not pay."""
    protocols = "".join(_section(which, last_result(which.name)) for which in map(claim, MODULES))
    return filled(_HERE / "rules.md", {"protocols": protocols})


def _outcomes(which: Claim, result: dict[str, Any] | None) -> dict[str, str]:
    done = result.get("parts", {}) if result and is_present(which, result) else {}
    return {part: done.get(part, "not run yet") for part in which.parts}


def _verdicts(which: Claim, result: dict[str, Any] | None) -> str:
    parts: dict[str, list[str]] = {}
    for part, outcome in _outcomes(which, result).items():
        parts.setdefault(outcome, []).append(part)
    verdicts = "".join(f"- {outcome.capitalize()}: {'; '.join(parts[outcome])}.\n" for outcome in sorted(parts))
    figure = f"Measured: {result['measured']}.\n\n" if result else ""
    return f"\n## {which.name}\n\n{which.sentence}\n\n{figure}{verdicts}"


def _section(which: Claim, result: dict[str, Any] | None) -> str:
    outcomes = _outcomes(which, result)
    parts = "".join(f"| {name} | {rule} | {outcomes[name]} |\n" for name, rule in which.parts.items())
    full, quick = which.minutes
    made = f"{result['when']}{', the quick form' if result['quick'] else ''}" if result else "none yet"
    earlier = "".join(
        f"- *{each.rule}.* Verdict: {each.verdict}. Changed because {each.why}.\n" for each in which.earlier
    )
    return (
        f"\n## {which.name}\n\n{which.paper}. Published: {which.published}.\n\n"
        f"Verdict: {last_verdict(which, result)}.\n\n"
        f"Protocol: {which.protocol}.\n\n| Part | Holds when | Outcome |\n| --- | --- | --- |\n{parts}\n"
        f"`python -m reproductions {which.name}` takes about {full:g} minutes, with `--quick` {quick:g}. Committed "
        f"result: {made}; `reproductions/{which.name.replace('-', '_')}/report.md` has all figures.\n\n"
        f"Where it does not pay: {which.costs}.\n" + (f"\nEarlier rules:\n\n{earlier}" if earlier else "")
    )


if __name__ == "__main__":
    sys.exit(write_pages({PAGE: page, RULES: rules}, check="--check" in sys.argv[1:]))
