# SPDX-License-Identifier: Apache-2.0
"""`python -m reproductions`: check a claim and show the result, or list the claims."""

from __future__ import annotations

import json as json_text
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from reproductions.shared.claims import MODULES, Attempt, Claim, Result, claim, last_result, last_verdict, write_result
from thinwire.cli.console import out
from thinwire.cli.progress import Watch
from thinwire.lab.runs import RunFolder


def reproduce(name: str | None, *, quick: bool, folder: Path | None, json: bool) -> int:
    """Check one claim, or list them all; the exit code, 1 when the claim does not hold.

    Raises:
        ConfigError: there is no claim of that name.
    """
    if name is None:
        return _list(json=json)
    which = claim(name)
    folder = folder or Path("runs") / f"reproduce-{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    result = _measure(which, folder, quick=quick)
    page = write_result(folder, which, result, quick=quick, when=time.strftime("%Y-%m-%d"))
    if json:
        out.print(json_text.dumps({"name": which.name, "verdict": result.verdict, **asdict(result)}), markup=False)
    else:
        _show(which, result, page)
    return 0 if result.holds else 1


def _measure(which: Claim, folder: Path, *, quick: bool) -> Result:
    RunFolder(folder).create()
    with ExitStack() as contexts:
        watches: list[Watch] = []

        def begin(recipe: str, place: int) -> None:
            contexts.close()
            watches[:] = [contexts.enter_context(Watch(f"[{place + 1}] {recipe}", None, None))]

        result = which.run(Attempt(folder, quick, lambda event: watches[0](event), begin))
    return replace(result, parts=which.decided_by_quick(result.parts)) if quick else result


def _list(*, json: bool) -> int:
    rows = [(claim(name), last_result(name)) for name in MODULES]
    if json:
        content = [{"name": each.name, "claim": each.sentence, "last": last} for each, last in rows]
        out.print(json_text.dumps(content), markup=False)
        return 0
    for each, last in rows:
        out.print(f"{each.name}: {each.sentence}", markup=False)
        out.print(f"  {each.paper}", markup=False)
        out.print(f"  {_last(each, last)}", markup=False)
    return 0


def _last(which: Claim, result: dict[str, Any] | None) -> str:
    verdict = last_verdict(which, result)
    return verdict if result is None else f"{verdict} ({result['measured']}; {result['thinwire']}, {result['when']})"


def _show(which: Claim, result: Result, page: Path) -> None:
    lines = {
        "claim": which.sentence,
        "paper": which.paper,
        "published": which.published,
        "measured": result.measured,
        "spread": f"{result.least:.4g} to {result.most:.4g}",
        **{name: f"{outcome}. It holds when {which.parts[name]}" for name, outcome in result.parts.items()},
        "verdict": result.verdict,
        "report": str(page),
    }
    for name, words in lines.items():
        out.print(f"{name + ':':<12}{words}", markup=False)
