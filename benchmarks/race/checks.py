# SPDX-License-Identifier: Apache-2.0
"""Whole runs to the target, beside the products of steps and seconds that they check."""

from __future__ import annotations

from benchmarks.race.racers import LINKS, SEEDS, Racer, named
from benchmarks.race.results import Fields, best_try, curve_of, result, steps_to, targets
from benchmarks.race.runs import curve, settings_of
from benchmarks.race.table import NOT_RUN, first, rows

WORKERS = 4
# Where and of whom the first one is checked.
WHERE = (("100mbit", True), ("100mbit", False), ("20mbit", True), ("1gbit", True), ("100mbit+50ms", True))
assert {link for link, _ in WHERE} <= set(LINKS)


def first_of(link: str, own: bool) -> Racer | None:
    """Who is first on a link, of thinwire's or of the others; None before enough has been run."""
    found = [row for row in rows(link, WORKERS) if row.racer.headline and (row.racer.whose == "thinwire") == own]
    return None if (row := first(found)) is None else row.racer


def check_name(link: str, own: bool) -> str:
    """The name of a check."""
    return f"checks/{link}-{'own' if own else 'peer'}"


def whole_run(link: str, own: bool) -> Fields:
    """Train the first one on a link for as many steps as its curve took to the target, and evaluate it once."""
    racer, goals = first_of(link, own), targets("text", SEEDS[0])
    assert racer is not None and goals is not None
    best, along = best_try(racer), curve_of(racer, SEEDS[0])
    assert best is not None and along is not None
    steps = steps_to(along, goals["losses"])
    assert steps is not None
    settings = settings_of(racer, best["rate"], best["outer"], steps=steps, seed=SEEDS[0], eval_every=steps, link=link)
    known = along["losses"][along["steps"].index(steps)]
    return {"link": link, "racer": racer.name, "curve_loss": known, **curve(settings)}


def check_lines() -> list[str]:
    """A line of the table for each check."""
    lines: list[str] = []
    for link, own in WHERE:
        found = result(check_name(link, own))
        if found is None:
            racer = first_of(link, own)
            lines.append(f"| {link} | {racer.name if racer else NOT_RUN} | {NOT_RUN} | {NOT_RUN} | | |")
            continue
        row = next(row for row in rows(link, WORKERS) if row.racer is named(found["racer"]))
        product = row.seconds_to(row.steps[:1])
        told = NOT_RUN if product is None else f"{product.median:.0f} s"
        whole = f"{found['seconds'][-1]:.0f} s" if found["seconds"] else f"failed: {found.get('failed')}"
        loss = f"{found['losses'][-1]:.3f}" if found["losses"] else ""
        lines.append(f"| {link} | {found['racer']} | {told} | {whole} | {loss} | {found['curve_loss']:.3f} |")
    return lines


def whole_runs() -> list[tuple[str, str, float]]:
    """Of each check that was run its link, racer and seconds."""
    checks = [found for link, own in WHERE if (found := result(check_name(link, own))) is not None]
    return [(found["link"], found["racer"], found["seconds"][-1]) for found in checks if found["seconds"]]
