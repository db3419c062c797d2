# SPDX-License-Identifier: Apache-2.0
"""`thinwire demo`: how a slow network slows training down, and how much five strategies help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.cli.compare import report, run, show, title
from thinwire.cli.console import err, out, print_json
from thinwire.cli.options import command_line, default_folder

STRATEGIES = ("ddp", "AllReduce()", "LocalSGD(period=8)", "SlowMo(period=8, momentum=0.5)", "PushSum()")
Fields = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Train a small language model on Python's own sources, with four workers over slow links, with five strategies.

    Example: thinwire demo --seconds 30 --link 20mbit

    Every strategy gets the same training time, the same initial parameters and the same data in the same order. Takes
    about two and a half minutes on two cores. Where this machine does not allow network namespaces, the workers use its
    loopback interface, which is not slow.

    Args:
        seconds: training time for each strategy, in seconds.
        link: the emulated link of each worker, RATE[+DELAY], such as 100mbit or 100mbit+5ms.
        out: the comparison's folder; runs/text-demo-TIME unless given.
        json: print the summaries as JSON.
    """

    seconds: float = 16.0
    link: str = "100mbit"
    out: Path | None = None
    json: bool = False

    def __call__(self) -> int:
        """Run the five strategies, print the table, and explain it; returns 0, or 1 where a run diverged."""
        from thinwire.lab.emulate import available, parse_links
        from thinwire.lab.runs import resolve

        # A link that cannot be read is refused even where it would not be used.
        parse_links(self.link, 4)
        reason = available()
        if reason is not None:
            err.print(f"Slow links cannot be emulated here: {reason}.")
            err.print("The workers use this machine's loopback interface at its full speed.")
        settings = resolve(
            {
                "task": "text",
                "model": "0.5m",
                "strategy": STRATEGIES[0],
                "workers": 4,
                "link": None if reason else self.link,
                "seconds": self.seconds,
                "batch_size": 4,
                "warmup_steps": 10,
                "eval_limit": 64,
                "command": command_line(),
            }
        )
        folder = self.out or default_folder(settings.task, "demo")
        done = run(settings, STRATEGIES, folder, rounds=1, title=title(settings, len(STRATEGIES)))
        page = report(folder)
        if self.json:
            print_json(done.summaries)
            return int(bool(done.diverged))
        show(done)
        # Without the losses of all, there is nothing to conclude.
        if not done.diverged:
            out.print("\n" + conclusions(done.summaries))
        if page is not None:
            out.print(f"\nThe report, with loss curves and a timeline of each worker: {page}")
        return int(bool(done.diverged))


def conclusions(summaries: Sequence[Fields]) -> str:
    """Return one paragraph on what the figures mean, whichever way they came out.

    Args:
        summaries: of runs with the same training time; the first is the baseline.
    """
    base, *others = summaries
    base_bytes, base_pace = base["payload_bytes_per_worker_per_step"], base["seconds_per_step"]
    rivals: list[Fields] = []
    words = [
        f"In {base['seconds']:.0f} s of training {base['strategy']} took {base['steps']} steps and spent "
        f"{base['exposed_seconds_per_step'] / base_pace:.0%} of them waiting for the network; it sends "
        f"{_megabytes(base)} per worker and step."
    ]
    for each in others:
        # Strategies with the same traffic differ only in how they overlap it; they are compared in speed alone.
        if abs(each["payload_bytes_per_worker_per_step"] - base_bytes) <= 0.01 * base_bytes:
            ratio = base_pace / each["seconds_per_step"]
            words.append(f"{_name(each)} sends the same and makes {ratio:.2f} times as many steps in a second.")
        else:
            rivals.append(each)
    if not rivals:
        return " ".join(words)
    fastest = min(rivals, key=lambda each: each["seconds_per_step"])
    ratio = base_pace / fastest["seconds_per_step"]
    # Times that differ by less than 5 %, and losses by less than 1 %, are within the noise of a short run.
    if ratio < 1.05:
        words.append(
            f"Sending less made no steps faster than those of {base['strategy']}: the link is not its bottleneck."
        )
    else:
        name = _named_with(rivals, fastest, "seconds_per_step", 0.05)
        words.append(
            f"{name} made its steps {ratio:.1f} times as fast, at {_megabytes(fastest)}: "
            f"{fastest['steps']} steps in the same time."
        )
    best = min(rivals, key=lambda each: each["eval_loss"])
    loss = base["eval_loss"]
    if best["eval_loss"] > 0.99 * loss:
        words.append(f"At equal time none reached a lower held-out loss than {base['strategy']} ({loss:.3f}).")
        return " ".join(words)
    name = _named_with(rivals, best, "eval_loss", 0.01)
    words.append(f"At equal time {name} has the lowest held-out loss, {best['eval_loss']:.3f} against {loss:.3f}.")
    worse = " and ".join(_name(each) for each in rivals if each["eval_loss"] > 1.01 * loss)
    if worse:
        words.append(f"{worse} did worse than {base['strategy']}: sending less is not free.")
    return " ".join(words)


def _name(summary: Fields) -> str:
    return str(summary["strategy"]).partition("(")[0]


def _named_with(rivals: Sequence[Fields], first: Fields, key: str, noise: float) -> str:
    """Return the name of the first, with those from which it differs by noise alone."""
    alike = [_name(each) for each in rivals if each is not first and each[key] <= (1 + noise) * first[key]]
    return f"{_name(first)} (like {' and '.join(alike)}, within the noise)" if alike else _name(first)


def _megabytes(summary: Fields) -> str:
    return f"{summary['payload_bytes_per_worker_per_step'] / 1e6:.2f} MB"
