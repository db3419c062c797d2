# SPDX-License-Identifier: Apache-2.0
"""`python -m thin_gpt run|submit|verify|table|page|rank`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from thin_gpt import VERSION
from thin_gpt.checks import verify
from thin_gpt.jobs import Job, entered, estimate, run_job, work
from thin_gpt.page import compare, page, table
from thin_gpt.racers import RACERS
from thin_gpt.referee import Entry, Run, local_step_seconds
from thin_gpt.results import Results
from thin_gpt.task import RANKED, SIZES, START_OUTER, TRACKS, TUNING_SEED, WORKERS, load_text

_HERE = Path(__file__).parent


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns 1 if a submission does not count, or if two rankings differ too much."""
    asked = _parser().parse_args(arguments)
    if asked.command == "rank":
        lines, agree = compare(Results(asked.first), Results(asked.second), asked.size)
        print("\n".join(lines))
        return int(not agree)
    if asked.command in ("run", "submit") and os.geteuid() and not asked.track.startswith("loopback"):
        # Namespaces need root, which every user can be in a namespace of users.
        os.execvp("unshare", ["unshare", "-Ur", sys.executable, "-m", "thin_gpt", *(arguments or sys.argv[1:])])
    text = load_text(asked.text)
    results = Results(asked.results, text.fingerprint)
    if asked.command == "run":
        names = entered(asked.racer)
        tracks = [asked.track] if asked.track else list(RANKED)
        if asked.plan:
            print("\n".join(estimate(results, asked.size, names, tracks)))
            return 0
        left = work(results, asked.size, names, text, minutes=asked.minutes, tracks=tracks)
        print(f"{left} runs are known to be left" if left else "nothing is left to run")
        return 0
    if asked.command == "submit":
        return submit(asked, results)
    if asked.command == "verify":
        return verify_all(results, asked)
    if asked.command == "table":
        print(table(results, asked.size, asked.track or RANKED[0]))
        return 0
    for path in page(results, asked.size, Path(asked.results)):
        print(path)
    return 0


def submit(asked: argparse.Namespace, results: Results) -> int:
    """Tune a file by the rule, run it on a track, verify it, and print the outcome."""
    text, size = load_text(asked.text), SIZES[asked.size]
    entry = Entry(
        asked.name or Path(asked.file).stem,
        asked.file,
        outer=asked.outer,
        allow=tuple(asked.allow),
        period=asked.period,
        elastic=asked.elastic,
        replayable=not asked.timing,
    )
    plain = Run(entry, asked.size, workers=asked.workers)
    while asked.rate is None and (following := results.next_try(entry, asked.size)) is not None:
        kind, rate, outer = following
        decay = size.tuning // 5
        tried = replace(
            plain, seed=TUNING_SEED, rate=rate, outer=outer, trunk=size.tuning - decay, decay=decay, every=0
        )
        record = run_job(Job(kind, tried, 0), text, 0.0)
        results.append(record)
        print(f"{kind} {record['outer' if kind == 'tune-outer' else 'rate']:g}: {record.get('final', 'failed')}")
    chosen = results.rates(entry, asked.size) if asked.rate is None else None
    rate, outer = (asked.rate, START_OUTER if entry.outer else None) if chosen is None else chosen[:2]
    whole = replace(plain, track=asked.track or RANKED[0], rate=rate, outer=outer, trunk=size.trunk, decay=size.decay)
    local = local_step_seconds(asked.size, workers=asked.workers, text=text)
    record = run_job(Job("whole", replace(whole, every=size.every), 0), text, local)
    told = {"file": str(Path(asked.file).resolve()), "elastic": entry.elastic, "replayable": entry.replayable}
    results.append(record | told | {"allow": entry.allow, "submission": True})
    for name, reason in record["checks"].items():
        print(f"does not count: {name}: {reason}")
    if not record["checks"]:
        print(f"{VERSION} {record['track']}: final loss {record['final']:.4f} after {record['seconds']:.0f} s")
    return int(bool(record["checks"]))


def verify_all(results: Results, asked: argparse.Namespace) -> int:
    """Replay the runs of a folder, and print which do not count."""
    bad = 0
    for record in results.records:
        if record["kind"] not in ("curve", "whole") or (asked.name and record["racer"] != asked.name):
            continue
        told = {key: record[key] for key in ("file", "elastic", "replayable", "allow") if key in record}
        entry = Entry(record["racer"], **told) if told else RACERS[record["racer"]]
        if "step_ends" not in record:
            found = {"completed": record["failed"].splitlines()[0]}
        else:
            found = verify(record, entry, load_text(asked.text))
        bad += bool(found)
        outcome = "; ".join(f"{name}: {reason}" for name, reason in found.items()) or "counts"
        print(f"{record['racer']} {record['track']} seed {record['seed']}: {outcome}")
    return int(bad > 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m thin_gpt", description=f"{VERSION}: see README.md and RULES.md")
    commands = parser.add_subparsers(dest="command", required=True)
    helps = {
        "run": "run the racers that come with the benchmark",
        "submit": "tune, run and verify a file of yours",
        "verify": "replay and check the results of a folder",
        "table": "print the table of a track",
        "page": "write page.md and three pictures into the folder of the results",
    }
    for name, told in helps.items():
        command = commands.add_parser(name, help=told)
        command.add_argument("--size", choices=SIZES, default="6m")
        command.add_argument(
            "--track", choices=[*TRACKS, "loopback/equal"], default="", help="default: all ranked ones"
        )
        command.add_argument("--results", default=str(_HERE / "results"), help="folder of results.jsonl")
        command.add_argument("--text", help="a file to train on, instead of the standard library's sources")
        command.add_argument("--name", default="", help="of the submission; default: that of the file")
        if name == "run":
            command.add_argument("--racer", nargs="*", default=[], choices=RACERS, metavar="NAME", help="only these")
            command.add_argument("--minutes", type=float, default=1e9, help="start no run that would end later")
            command.add_argument("--plan", action="store_true", help="print the hours that are left, and run nothing")
        if name == "submit":
            command.add_argument("file", help="with a class Racer")
            command.add_argument("--rate", type=float, help="learning rate; default: tuned by the rule")
            command.add_argument("--outer", action="store_true", help="the class takes `outer`, which is tuned too")
            command.add_argument("--period", type=int, default=1, help="steps after which its communication repeats")
            command.add_argument("--workers", type=int, default=WORKERS, help="only 4 are ranked")
            command.add_argument("--allow", nargs="*", default=[], choices=("disk", "processes"), help="permissions")
            command.add_argument("--elastic", action="store_true", help="the class survives a killed worker by itself")
            command.add_argument("--timing", action="store_true", help="its parameters depend on the workers' speeds")
    command = commands.add_parser("rank", help="compare the rankings of two days, or of two machines")
    command.add_argument("first", help="a results.jsonl, or its folder")
    command.add_argument("second")
    command.add_argument("--size", choices=SIZES, default="6m")
    return parser


if __name__ == "__main__":
    sys.exit(main())
