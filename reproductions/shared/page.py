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
from reproductions.shared.committed import write_pages
from reproductions.shared.quick import told

PAGE = Path(__file__).parents[2] / "docs" / "claims.md"
RULES = Path(__file__).parents[1] / "claims.md"
_HEAD = """# The papers' claims

Each method of thinwire comes from a paper that claims something. A protocol, which is committed before its runs, says
what is run and when each part of the claim holds. Within noise means that some rounds or seeds meet the rule and others
do not.

`python -m reproductions NAME` repeats a claim in a checkout; `--quick` runs a smaller form in about three minutes.
`reproductions/claims.md` has the protocols, the rules with their earlier forms, and where each method does not pay.
[Speed at scale](scale.md) predicts the papers' own clusters.
"""
_RULES_HEAD = """# Protocols of the papers' claims

`docs/claims.md` has the verdicts in short. Rules about time are judged round by round, by ratios of runs that take
turns. Parts whose noise the quick form cannot tell from their limits are measured and left open there; the full form
decides them.
"""


def page() -> str:
    """Return the page of the docs: the figure, and the outcome of each part."""
    return _HEAD + "".join(_verdicts(which, last_result(which.name)) for which in map(claim, MODULES))


def rules() -> str:
    """Return the page with protocols, rules, earlier rules, and where each method does not pay."""
    return _RULES_HEAD + "".join(_section(which, last_result(which.name)) for which in map(claim, MODULES))


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
    (full, quick), words = which.minutes, told(which)
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
        f"{words[0].upper()}{words[1:]}. Where it does not pay: {which.costs}.\n"
        + (f"\nEarlier rules:\n\n{earlier}" if earlier else "")
    )


if __name__ == "__main__":
    sys.exit(write_pages({PAGE: page, RULES: rules}, check="--check" in sys.argv[1:]))
