"""`laconic demo`: what a slow network does to training, and what can be done about it, in under four minutes."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laconic.cli.compare import report, run, show, title
from laconic.cli.console import err, out
from laconic.cli.train import default_folder

if TYPE_CHECKING:
    from laconic.runs import Settings

STRATEGIES = ("ddp", "AllReduce()", "LocalSGD(period=8)", "SlowMo(period=8, momentum=0.5)", "PushSum()")
Fields = dict[str, Any]


@dataclass(frozen=True)
class Demo:
    """Train a small language model of Python's own sources with four workers over 100 Mbit links, in five ways.

    Each way gets the same seconds of training, the same first parameters and the same data in the same order. Where
    this machine does not allow network namespaces, the workers speak over its own loopback instead.

    Args:
        seconds: training time for each.
        link: of each worker.
        out: the folder; runs/text-demo-TIME unless given.
    """

    seconds: float = 24.0
    link: str = "100mbit"
    out: Path | None = None

    def __call__(self) -> int:
        """Run the five, print the table, and say how to read it."""
        settings = self._settings()
        folder = self.out or default_folder(settings.task, "demo")
        done = run(settings, STRATEGIES, folder, rounds=1, title=title(settings, len(STRATEGIES)))
        page = report(folder)
        show(done)
        out.print("\n" + reading(done.summaries), markup=False)
        if page is not None:
            out.print(f"\nThe report, with curves and a timeline of who waits when: {page}", markup=False)
        return 0

    def _settings(self) -> Settings:
        from laconic.emulate import available, parse_links
        from laconic.runs import resolve

        parse_links(self.link, 4)
        reason = available()
        if reason is not None:
            err.print(f"No slow links here: {reason}.", markup=False)
            err.print("The workers speak over this machine's own loopback, which nothing slows down.", markup=False)
        asked = {
            "task": "text",
            "model": "0.5m",
            "strategy": STRATEGIES[0],
            "workers": 4,
            "link": None if reason else self.link,
            "seconds": self.seconds,
            "batch_size": 4,
            "warmup_steps": 10,
            "eval_limit": 64,
        }
        return replace(resolve(asked), command=shlex.join(["laconic", *sys.argv[1:]]))


def reading(summaries: Sequence[Fields]) -> str:
    """One paragraph on what the figures say, whichever way they fell out.

    Args:
        summaries: of runs of equal training time; the first is the yardstick.
    """
    base, *others = summaries
    name = base["strategy"]
    waits = base["exposed_seconds_per_step"] / base["seconds_per_step"]
    sentences = [
        f"In {base['seconds']:.0f} s of training {name} took {base['steps']} steps and spent {waits:.0%} of them "
        f"waiting for the network; it sends {_megabytes(base)} per worker and step."
    ]
    fastest = min(others, key=lambda each: each["seconds_per_step"])
    ratio = base["seconds_per_step"] / fastest["seconds_per_step"]
    if ratio > 1.02:
        sentences.append(
            f"{_called(fastest)} made its steps {ratio:.1f} times as fast, at {_megabytes(fastest)}: "
            f"{fastest['steps']} steps in the same time."
        )
    else:
        sentences.append(f"Nothing here made its steps faster than {name}: the link is not what holds them back.")
    return " ".join([*sentences, *_quality(base, others)])


def _quality(base: Fields, others: Sequence[Fields]) -> list[str]:
    """What the time that was gained is worth, in held-out loss."""
    best = min([base, *others], key=lambda each: each["eval_loss"])
    worse = [each for each in others if each["eval_loss"] > base["eval_loss"]]
    if best is base:
        return [f"At equal time none reached a lower held-out loss than {base['strategy']} ({base['eval_loss']:.3f})."]
    sentences = [
        f"At equal time {_called(best)} has the lowest held-out loss, {best['eval_loss']:.3f} "
        f"against {base['eval_loss']:.3f}."
    ]
    if worse:
        names = " and ".join(_called(each) for each in worse)
        sentences.append(f"{names} did worse than {base['strategy']}: saying less is not free.")
    return sentences


def _called(summary: Fields) -> str:
    return str(summary["strategy"]).partition("(")[0]


def _megabytes(summary: Fields) -> str:
    return f"{summary['payload_bytes_per_worker_per_step'] / 1e6:.2f} MB"
