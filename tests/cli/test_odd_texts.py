# SPDX-License-Identifier: Apache-2.0
"""Whatever text an option is given, a command works or refuses it with exit code 2; it never ends in a traceback."""

from __future__ import annotations

import io
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import thinwire.arrays.sweep.sweeping
import thinwire.cli.compare
import thinwire.cli.demo
import thinwire.lab.emulate
import thinwire.lab.runs
from thinwire.cli import main
from thinwire.errors import ConfigError

RECIPES = [
    *("ddp", "ddp()", "ddp() + (1)", "ddp+powersgd(rank=----1)", "ddp+powersgd(rank=1e9)", "ddp+powersgd(rank='a')"),
    *(
        "post-local-sgd(period=True)",
        "SlowMo(base=ddp)",
        "LocalSGD(period=10**30)",
        "LocalSGD(period=" + "9" * 25 + ")",
    ),
    *(
        "AllReduce(codec=ErrorFeedback(ErrorFeedback(OneBit())))",
        "TopK(fraction=nan)",
        "QSGD(bits=99)",
        "AllReduce() # x",
    ),
    *("Gossip(FromGraph([(0, 1), (1, 2)]))", "Gossip(FromGraph([(0,)]))", "Gossip(FromGraph({0: 1}))", "Ring()()"),
    *("FromGraph(edges='ab')", "FromGraph(((0, 1, 2, 3),))", "FromGraph([(0, 'a')])", "FromGraph([(-1, 0)])", "Torus("),
    *(
        "Hierarchical(node_size=0)",
        "Hierarchical(node_size=" + "9" * 25 + ")",
        "a.b:c",
        "os:system",
        "torch:nn",
        "..:a",
    ),
    *("Craig(", "Craig(fraction=2)", "Craig(every=0)", "lambda: 0", "(1", "[", "{}", "()", "(" * 300, "'''", "\\", "#"),
]
NUMBERS = [
    *("", " ", "-1", "0", "1.5", "1e999", "nan", "inf", "-inf", "0x10", "9" * 20, "true", "None", "-0", "1e-320", "٣"),
    *(
        "log:0:1",
        "log:1:0",
        "log:nan:1",
        "whole:1:0",
        "whole:1.5:2",
        "log:a:b",
        "log:",
        "1:",
        "-1:-1",
        "1,,2",
        ",",
        ":",
    ),
]
PLACES = [
    *("100mbit+", "+5ms", "0:10mbit,0:10mbit", "1e400mbit", "-5mbit", "0mbit", "nanmbit", "9:10mbit", "2:3x", "0:0x"),
    *(
        "infx",
        "0.5:200ms",
        "2:0.1:",
        "1:1s:1s",
        "0:-1s:1s",
        "2x2",
        "0x0",
        "1x",
        "dirichlet(",
        "dirichlet(0)",
        "dirichlet(nan)",
    ),
    *(
        "/dev/null",
        "/nonexistent",
        "/",
        ".",
        "a/b/c",
        "a" * 5000,
        "é",
        "💥",
        "\udcff",
        "\n",
        "--",
        "-",
        "---",
        ";",
        "=",
    ),
]
ODD = [*RECIPES, *NUMBERS, *PLACES]

SETTINGS = [
    *("strategy", "workers", "tensor-parallel", "steps", "seconds", "target-loss", "batch-size", "optimizer", "lr"),
    *(
        "momentum",
        "weight-decay",
        "warmup-steps",
        "schedule",
        "split",
        "coreset",
        "seed",
        "link",
        "slow",
        "stall",
        "stop",
    ),
    *("data", "device", "threads", "eval-every", "eval-limit", "save-every", "timeout", "task", "model-size"),
]
SWEPT = [
    *("task", "trials", "steps", "lr", "momentum", "weight-decay", "beta1", "beta2", "eps", "optimizer", "batch-size"),
    *("model-size", "schedule", "sampler", "halving", "keep", "together", "seed"),
    *("eval-limit", "threads", "data"),
]
SELECTED = ["fraction", "budget", "cover", "labels", "method", "neighbours", "seed"]
CALLS: list[list[str]] = [
    *([], ["report"], ["tools"], ["train", "--resume"], ["sweep", "--resume"], ["select", "--data"]),
    *(["train", "--task", "digits", f"--{name}"] for name in SETTINGS),
    *(["compare", "--task", "digits", f"--{name}"] for name in ("strategies", "rounds", "workers")),
    *(["sweep", "--task", "digits", "--steps", "50", "--out", "sweep", "--overwrite", f"--{name}"] for name in SWEPT),
    *(["select", "--data", "points.npy", "--out", "chosen", f"--{name}"] for name in SELECTED),
    *(["demo", f"--{name}"] for name in ("link", "seconds")),
    ["explain", "--parameters", "1000"],
    *(
        ["explain", "AllReduce", "--parameters", "1e3", f"--{name}"]
        for name in ("link", "workers", "dtype", "optimizer")
    ),
    *(["explain", "AllReduce", f"--{name}"] for name in ("parameters", "task", "model", "model-size", "data")),
    ["topology"],
    *(["topology", "Ring", f"--{name}"] for name in ("workers", "out")),
]


@pytest.fixture(autouse=True)
def nothing_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ConfigError("it would start now")

    monkeypatch.setattr(thinwire.lab.runs, "launch", refuse)
    monkeypatch.setattr(thinwire.cli.compare, "run", refuse)
    monkeypatch.setattr(thinwire.cli.demo, "run", refuse)
    monkeypatch.setattr(thinwire.arrays.sweep.sweeping, "sweep", refuse)
    monkeypatch.chdir(tmp_path)
    # So that --threads of a sweep does not reach the other tests.
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    np.save("points.npy", np.random.default_rng(0).normal(size=(30, 3)))


def is_taken_or_refused(call: list[str], text: str) -> None:
    # A text that begins with a hyphen would be an option of its own.
    *before, last = call or [""]
    option = last.startswith("--") and text.startswith("-")
    arguments = [*before, f"{last}={text}"] if option else [*call, text]
    # 1 is a checkpoint that is not there.
    assert main(arguments) in ((0, 1, 2) if "--resume" in call else (0, 2)), (arguments, "has another exit code")


def test_odd_texts_are_taken_or_refused() -> None:
    draw = random.Random(23)
    for call in CALLS:
        is_taken_or_refused(call, draw.choice(ODD))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(8))
def test_every_odd_text_is_taken_or_refused_by_every_option(part: int) -> None:
    for call in CALLS[part::8]:
        for text in ODD:
            is_taken_or_refused(call, text)


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--task", "digits", "--workers", "9" * 20],
        ["sweep", "--task", "digits", "--threads", "9" * 20],
        ["sweep", "--task", "digits", "--seed", "9" * 20],
        ["select", "--data", "points.npy", "--seed", "9" * 20],
        ["select", "--data", "a" * 5000],
        ["explain", "AllReduce", "--parameters", "9" * 20],
    ],
)
def test_what_once_ended_in_a_traceback_or_never_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr().err
    assert printed.count("thinwire:") == 1 and "would start" not in printed


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_an_output_that_is_not_utf_8_gets_plain_characters(errors: str, monkeypatch: pytest.MonkeyPatch) -> None:
    output, mistakes = (io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors=errors) for _ in range(2))
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(sys, "stderr", mistakes)
    assert main(["topology", "Ring(", "--workers", "4"]) == 2
    sys.stdout.write("0.50 ms × 4 → 3 µs…\n")
    sys.stderr.write("größer\n")
    output.flush()
    mistakes.flush()
    assert output.buffer.getvalue().decode() == "0.50 ms x 4 -> 3 us...\n"  # pyright: ignore[reportAttributeAccessIssue]
    assert b"gr??er" in mistakes.buffer.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
