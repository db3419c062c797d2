# SPDX-License-Identifier: Apache-2.0
"""`thinwire emulate`: any command, once per worker."""

import json

import pytest

import thinwire.cli.emulate as command_module
from tests.lab.emulate.samples import BARE_PYTHON, SLEEP
from tests.rules import refusals
from thinwire.cli.emulate import Emulate
from thinwire.cli.parsing import parse_command
from thinwire.errors import CommTimeoutError
from thinwire.lab.emulate import available

HELLO = (*BARE_PYTHON, "import os, sys; print('hello', os.environ.get('THINWIRE_SLOW')); print('oh', file=sys.stderr)")


def test_everything_after_the_dashes_is_the_command():
    arguments = ["--workers", "2", "--link", "0:10mbit", "--", "python", "train.py", "--json", "--", "-x"]
    command = parse_command("thinwire emulate", Emulate, arguments)
    assert command == Emulate(("python", "train.py", "--json", "--", "-x"), workers=2, link="0:10mbit")


def test_lines_are_prefixed_and_a_table_ends_the_run(capsys):
    assert Emulate(HELLO, workers=2, slow="1:3x")() == 0
    printed = capsys.readouterr()
    assert printed.out.count("[0] hello 1:3x") == printed.out.count("[1] hello 1:3x") == 1
    assert printed.err.count("[0] oh") == printed.err.count("[1] oh") == 1
    assert "MB sent" in printed.out and "CPU seconds" in printed.out


def test_json_has_the_standard_output_for_itself(capsys):
    assert Emulate(HELLO, workers=2, json=True)() == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert [row["exit"] for row in report["workers"]] == ["0", "0"]
    assert (report["workers"][0]["sent_bytes"] is None) == (available() is not None)
    assert "[1] hello" in printed.err


def test_a_failing_worker_is_named(capsys):
    code = "import os, sys; sys.exit(5 * (os.environ['RANK'] == '1'))"
    assert Emulate((*BARE_PYTHON, code), workers=2)() == 1
    assert "worker 1 ended with exit code 5" in capsys.readouterr().err


def test_without_namespaces_an_unlimited_run_goes_on_with_a_warning(monkeypatch, capsys):
    monkeypatch.setattr(command_module, "available", lambda: "this kernel is too small")
    assert Emulate(HELLO, workers=1)() == 0
    printed = capsys.readouterr()
    assert "no bytes are counted: this kernel is too small" in printed.err
    assert "[0] hello" in printed.out


def test_a_deadline_ends_the_run():
    with pytest.raises(CommTimeoutError, match="workers 0, 1"):
        Emulate(tuple(SLEEP), workers=2, timeout=0.2)()


def test_a_command_has_a_deadline_unless_one_is_given():
    assert Emulate(tuple(SLEEP)).timeout == 86_400


test_bad_flags_are_refused_before_anything_starts = refusals(
    [
        ({"link": "fast"}, "link 'fast'"),
        ({"slow": "9:3x"}, "no worker '9'"),
        ({"stall": "often"}, "stall 'often'"),
        ({"workers": 0}, "workers=0: must be at least 1"),
        ({"timeout": 0.0}, "timeout=0.0: must be positive"),
        ({"timeout": float("nan")}, "timeout=nan"),
        ({"seed": -1}, "seed=-1: must be at least 0"),
        ({"command": ()}, "Write it after --"),
        ({"command": ("no-such-program",)}, "'no-such-program'"),
    ],
    lambda flags: Emulate(**({"command": ("true",), "workers": 4} | flags))(),
)
