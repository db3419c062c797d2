# SPDX-License-Identifier: Apache-2.0
"""The command line: help, version, and refusals in one message."""

import dataclasses
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from reproductions.__main__ import main as reproduce
from reproductions.shared import claims, command
from reproductions.shared.claims import MODULES, Result, claim, judged, last_result, write_result
from tests.grids import fast_where
from thinwire import __version__
from thinwire.cli import commands, main
from thinwire.cli.compare import show
from thinwire.cli.demo import conclusions
from thinwire.cli.progress import Watch
from thinwire.cli.train import Train
from thinwire.errors import ConfigError
from thinwire.lab.emulate import Straggler
from thinwire.lab.runs import Settings, launch, worker
from thinwire.lab.runs.comparison import Comparison
from thinwire.lab.runs.folder import RunFolder
from thinwire.lab.runs.settings import option_name
from thinwire.methods.strategies.recipe import parse


def refused(capsys, *arguments, run=main):
    """The error for arguments that cannot work: one message, no traceback, exit code 2."""
    assert run(list(arguments)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("thinwire:") == 1 and "Traceback" not in printed.err
    return printed.err


@pytest.mark.parametrize(
    "arguments",
    fast_where(lambda line: line == "train --help", ["train --help", "--help", "topology Ring()"]),
)
def test_output_that_nobody_reads_is_no_failure(arguments):
    process = subprocess.Popen(
        [sys.executable, "-m", "thinwire.cli", *arguments.split()], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    with process.stderr:
        assert process.stderr.read() == b""
    assert process.wait(60) == 141


def test_a_store_s_port_is_one(capsys):
    assert "--port 70000: must be 0 to 65535" in refused(capsys, "store", "--port", "70000")


def test_a_connection_that_breaks_is_no_output_that_nobody_reads(monkeypatch):
    def broken(_):
        raise BrokenPipeError("a socket")

    monkeypatch.setattr(commands, "parse", broken)
    with pytest.raises(BrokenPipeError, match="a socket"):
        main(["train"])


@pytest.mark.parametrize(
    ("name", "option"),
    [("train", "strategy"), ("compare", "strategies"), ("plan", "strategies"), ("simulate", "strategy")],
)
def test_a_recipe_without_its_option_is_refused_with_the_option(capsys, name, option):
    assert f"thinwire {name} --{option} 'LocalSGD(period=8)'" in refused(capsys, name, "LocalSGD(period=8)")


def test_help_lists_the_commands(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in commands.COMMANDS)


def test_help_of_a_command_is_its_own_help(capsys):
    assert main(["train", "--help"]) == 0
    own = capsys.readouterr().out
    assert "--strategy" in own and main(["help", "train"]) == 0
    assert capsys.readouterr().out == own
    assert "trian: no such command; did you mean train?" in refused(capsys, "help", "trian")


def test_defaults_in_help_begin_small_but_recipes_keep_their_capitals(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    main(["train", "--help"])
    shown = capsys.readouterr().out
    assert "[default: AllReduce()]" in shown and "[default: the task's default]" in shown
    assert not re.search(r"\[default: [a-z]+[A-Z]", shown)


def test_help_names_recipes_to_begin_with(capsys):
    assert main(["help"]) == 0
    out = capsys.readouterr().out
    for recipe in commands.RECIPES:
        assert recipe in out
        assert parse(recipe)


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_each_command_has_help_that_does_not_show_none(capsys, name):
    assert main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"Usage: thinwire {name}" in out and f"Example: thinwire {name}" in out
    assert "None" not in out and "(default: )" not in out and "(default: False)" not in out


@pytest.mark.parametrize(
    ("name", "columns"),
    fast_where(lambda each: each[0] == "plan", [("simulate", "80"), ("plan", "84"), ("train", "100")]),
)
def test_help_has_no_empty_row_below_a_text_that_fills_its_line(monkeypatch, name, columns):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("PYTHONIOENCODING", "utf-8")
    rows = thinwire(name, "--help").stdout.split("\n")
    framed = [row for row in rows if row.startswith("│")]
    assert framed and all(row.strip("│ ") for row in framed)


@pytest.mark.parametrize("typed", ["LocalSGD(period=8,codec=Quantize(4))", "LocalSGD(period=8,\n codec=Quantize(4))"])
def test_a_recipe_is_headed_as_it_was_typed(monkeypatch, capsys, typed):
    name = "LocalSGD(period=8, codec=Quantize(4))"
    assert main(["explain", typed, "--parameters", "1000"]) == 0
    assert [line for line in capsys.readouterr().out.split("\n") if line.startswith("LocalSGD")] == [name, name]
    headed = []
    monkeypatch.setattr("thinwire.cli.train.Watch", lambda head, *_: headed.append(head))
    commands.parse(["train", "--strategy", typed])._watch(Settings("digits", "mlp", "x", steps=1))
    assert headed == [name]


def test_options_that_are_not_given_are_none():
    parsed = commands.parse(["train", "--workers", "3", "--model-size", "mlp"])
    assert isinstance(parsed, Train)
    given = parsed.given()
    assert (given["workers"], given["model"], given["optimizer"], given["lr"]) == (3, "mlp", None, None)


def test_the_version_is_printed(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"thinwire {__version__}\n"


def test_help_of_commands_imports_neither_training_nor_torch():
    names = ("train", "compare", "demo")
    calls = "".join(f"main(['{name}', '--help']); print('torch' in sys.modules); " for name in names)
    first = "main(['--help']); print('thinwire.lab.runs' in sys.modules)"
    probe = f"import sys; from thinwire.cli import main; {first}; {calls}"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert [line for line in done.stdout.split("\n") if line in ("True", "False")] == ["False"] * (1 + len(names))


def test_every_setting_is_an_option_of_train_with_its_help(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["train", "--help"]) == 0
    out = capsys.readouterr().out
    hidden = {"timeline_steps", "command"}
    named = {option_name(field.name) for field in dataclasses.fields(Settings) if field.name not in hidden}
    assert all(f"--{name} " in out for name in named)
    assert not any(f"--{name.replace('_', '-')}" in out for name in hidden)
    assert "steps over which the learning rate rises to its peak [default: 0]" in " ".join(out.replace("│", "").split())


def test_an_unknown_command_is_refused_with_the_nearest(capsys):
    assert "did you mean train?" in refused(capsys, "trian")


def test_an_unknown_flag_is_a_usage_error(capsys):
    assert main(["train", "--wrokers", "3"]) == 2
    printed = capsys.readouterr()
    assert "--workers" in printed.err + printed.out and "Traceback" not in printed.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--strategy", "SlowMoe()"], "did you mean SlowMo"),
        (["--strategy", "LocalSGD(period=0)"], "period=0"),
        (["--strategy", "LocalSGD(__import__('os'))"], "'__import__' is unknown"),
        (["--strategy", "Gossip(Hypercube())", "--workers", "3"], "power of two"),
        (["--link", "fast"], "link 'fast'"),
        (["--slow", "9:2x"], "slow '9:2x'"),
        (["--stall", "often"], "stall 'often'"),
        (["--task", "digit"], "did you mean 'digits'"),
        (["--task", "mnist", "--data", "/nonexistent/folder"], "/nonexistent/folder"),
        (["--task", "digits", "--model-size", "huge"], "'huge'"),
        (["--task", "digits", "--split", "alphabetical"], "alphabetical"),
        (["--task", "digits", "--workers", "0"], "--workers 0: must be"),
        (["--task", "digits", "--steps", "0"], "--steps 0: must be"),
        (["--task", "digits", "--batch-size", "-1"], "--batch-size -1: must be"),
        (["--task", "digits", "--lr", "nan"], "--lr nan: must be"),
        (["--task", "digits", "--schedule", "cosine", "--seconds", "3"], "needs steps"),
        (["--task", "digits", "--device", "cuda", "--link", "1gbit"], "cuda"),
    ],
)
def test_train_refuses_what_cannot_work_before_anything_starts(tmp_path, capsys, arguments, words):
    folder = tmp_path / "run"
    assert words in refused(capsys, "train", "--out", str(folder), *arguments)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--strategies", ";"], "at least one"),
        (["--strategies", "ddp; ddp"], "twice"),
        (["--strategies", "ddp; AllReduc()"], "did you mean AllReduce"),
        (["--strategies", "ddp; Gossip(Hypercube())", "--workers", "3"], "power of two"),
        (["--strategies", "ddp; SketchedSGD()", "--momentum", "0.9"], "SGD without momentum"),
        (["--strategies", "ddp; CompressedMomentum()", "--optimizer", "adamw"], "OneBitLamb or OneBitAdam"),
        (["--rounds", "0"], "--rounds 0"),
    ],
)
def test_compare_refuses_before_the_first_run(tmp_path, capsys, arguments, words):
    assert words in refused(capsys, "compare", "--task", "digits", "--out", str(tmp_path / "both"), *arguments)
    assert not (tmp_path / "both").exists()


def write_settings(folder, **others):
    settings = Settings(**{"task": "digits", "model": "mlp", "strategy": "LocalSGD(period=8)", "steps": 5, **others})
    RunFolder(folder).write_settings(settings)


def test_resume_keeps_what_decides_the_numbers(tmp_path, capsys):
    write_settings(tmp_path)
    error = refused(capsys, "train", "--resume", str(tmp_path), "--strategy", "AllReduce()")
    assert "LocalSGD(period=8)" in error and "cannot change" in error
    assert "Leave it out" in refused(capsys, "train", "--resume", str(tmp_path), "--out", "elsewhere")


def test_resume_of_no_run_is_one_message(tmp_path, capsys):
    assert main(["train", "--resume", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_under_torchrun_links_and_workers_are_real(monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert "torchrun has started 3" in refused(capsys, "train", "--workers", "2")
    assert "links are real" in refused(capsys, "train", "--link", "1gbit")


def test_under_torchrun_workers_are_as_slow_as_they_were_asked_to_be(monkeypatch, tmp_path):
    found = []
    for name in ("THINWIRE_SLOW", "THINWIRE_STALL", "THINWIRE_STALL_SEED"):
        # Set first, so that what the command sets is taken back.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("thinwire.lab.runs.work", lambda *_, **__: found.append(Straggler.from_environment()))
    call = ["train", "--task", "digits", "--out", str(tmp_path / "run"), "--seed", "7"]
    assert main([*call, "--slow", "1:3x", "--stall", "0.5:2s"]) == 0
    assert found == [Straggler(3.0, 0.5, 2.0, seed=7, rank=1)]


def test_reproductions_are_listed_with_their_last_result(capsys):
    assert reproduce([]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in MODULES)
    assert reproduce(["--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == list(MODULES)


def test_an_unknown_reproduction_is_refused_with_the_nearest(capsys):
    assert "did you mean local-sgd-bytes?" in refused(capsys, "local-sgd", run=reproduce)


def result(holds=True):
    parts = dict.fromkeys(claim("local-sgd-bytes").parts, judged(holds))
    return Result(parts, "8 times less", 8.0, 7.9, 8.1, {"link": None})


def test_a_result_is_kept_for_the_list(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "_HOME", tmp_path)
    folder = tmp_path / "made_up"
    folder.mkdir()
    write_result(folder, claim("local-sgd-bytes"), result(), quick=True, when="2026-01-01")
    found = last_result("made-up")
    assert found is not None and found["measured"] == "8 times less"
    assert "**Verdict: holds.**" in (folder / "report.md").read_text()


@pytest.mark.parametrize(("holds", "code"), [(True, 0), (False, 1)])
def test_a_claim_that_does_not_hold_is_exit_code_1(tmp_path, monkeypatch, capsys, holds, code):
    monkeypatch.setattr(command, "_measure", lambda *_, **__: (tmp_path / "out").mkdir() or result(holds))
    assert reproduce(["local-sgd-bytes", "--out", str(tmp_path / "out")]) == code
    out = capsys.readouterr().out
    assert "8 times less" in out and ("does not hold" in out) is not holds


def summary(strategy, seconds_per_step, loss, **others):
    return {
        "strategy": strategy,
        "seconds": 20.0,
        "steps": round(20 / seconds_per_step),
        "seconds_per_step": seconds_per_step,
        "exposed_seconds_per_step": seconds_per_step / 2,
        "payload_bytes_per_worker_per_step": 1e6,
        "eval_loss": loss,
        **others,
    }


def test_the_demo_s_conclusions_follow_its_figures():
    base, twin = summary("ddp", 0.4, 3.0), summary("AllReduce(codec=None)", 0.5, 3.2)
    quick = summary("LocalSGD(period=8)", 0.1, 2.5, payload_bytes_per_worker_per_step=1e5)
    slow = summary("X()", 0.5, 3.5, payload_bytes_per_worker_per_step=2e5)
    words = conclusions([base, twin, quick, slow])
    assert "took 50 steps and spent 50% of them waiting" in words
    assert "AllReduce sends the same and makes 0.80 times as many steps" in words
    assert "LocalSGD made its steps 4.0 times as fast, at 0.10 MB: 200 steps" in words
    assert "LocalSGD has the lowest held-out loss, 2.500 against 3.000" in words
    assert "X did worse than ddp" in words
    words = conclusions([base, slow])
    assert "Sending less made no steps faster" in words and "none reached a lower" in words
    twins = [
        summary(name, 0.1, loss, payload_bytes_per_worker_per_step=1e5) for name, loss in (("A", 2.5), ("B", 2.51))
    ]
    words = conclusions([base, *twins])
    assert "A (like B, within the noise) made its steps 4.0 times as fast" in words
    assert "A (like B, within the noise) has the lowest held-out loss" in words
    words = conclusions([base, summary("C", 0.39, 2.99, payload_bytes_per_worker_per_step=1e5)])
    assert "Sending less made no steps faster" in words and "none reached a lower" in words


def watched(terminal):
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=120)
    return text, Watch("LocalSGD", 100, None, console=console)


def step(number):
    return {"event": "step", "step": number, "seconds": 2.0, "loss": 1.5, "payload_bytes": 3e6}


def test_progress_without_a_terminal_is_a_plain_line_every_ten_seconds(monkeypatch):
    text, watch = watched(False)
    with watch:
        watch({"event": "start"})
        watch(step(10))
        assert text.getvalue() == ""
        monkeypatch.setattr("thinwire.cli.progress._PLAIN_SECONDS", 0.0)
        watch({"event": "evaluation", "eval_loss": 1.75})
    assert text.getvalue() == "LocalSGD: step 10/100, loss 1.500, held-out 1.750, 200 ms/step, 3.0 MB sent, 0:18 left\n"


def test_progress_on_a_terminal_goes_away_at_the_end():
    text, watch = watched(True)
    with watch:
        watch(step(50))
    assert "LocalSGD" in text.getvalue()


OWN = """
import thinwire

@thinwire.registered
class Quiet(thinwire.Strategy):
    parts: int = 2

@thinwire.registered
class Pairs(thinwire.Topology):
    def peers(self, rank, size, step):
        return thinwire.Ring().peers(rank, size, step)
"""


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """The current folder, with a module of classes for recipes."""
    (tmp_path / "quiet_methods.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def thinwire(*arguments):
    """The command line in another process, whose module path has no current folder, as the installed program's."""
    command = [sys.executable, "-P", "-m", "thinwire.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.usefixtures("own_folder")
@pytest.mark.slow
def test_explain_and_topology_take_classes_of_the_current_folder():
    assert "sent        nothing" in thinwire("explain", "quiet_methods:Quiet(parts=3)", "--parameters", "100").stdout
    done = thinwire("topology", "quiet_methods:Pairs", "--json")
    assert json.loads(done.stdout)["topology"] == "quiet_methods:Pairs()"
    failed = thinwire("explain", "quiet_methods:Quite")
    assert failed.returncode == 2
    assert "has no 'Quite'; it has Pairs, Quiet" in " ".join(failed.stderr.split())


@pytest.mark.slow
def test_train_takes_a_class_of_the_current_folder_and_resumes_only_where_it_is_named_again(own_folder):
    asked = ["--task", "digits", "--workers", "2", "--eval-limit", "16", "--threads", "1", "--save-every", "2"]
    done = thinwire("train", *asked, "--strategy", "quiet_methods:quiet(parts=3)", "--steps", "2", "--out", "run")
    assert done.returncode == 2 and "has no 'quiet'" in " ".join(done.stderr.split())
    recipe = "SlowMo(base=quiet_methods:Quiet(parts=3), period=2)"
    done = thinwire("train", *asked, "--strategy", recipe, "--steps", "2", "--out", "run", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["strategy"] == recipe
    resumed = thinwire("train", "--resume", "run", "--steps", "4")
    assert resumed.returncode == 2
    assert "is not imported, and a recipe that is read from a file" in " ".join(resumed.stderr.split())
    resumed = thinwire("train", "--resume", "run", "--steps", "4", "--strategy", recipe, "--json")
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout)["steps"] == 4


def test_a_run_of_a_class_that_workers_cannot_import_is_refused():
    from thinwire import Strategy, registered
    from thinwire.lab.runs.recipes import modules_of

    @registered
    class Hidden(Strategy):
        """Only this function has it."""

    with pytest.raises(ConfigError, match="Hidden is defined in the program itself or in a function"):
        modules_of(Hidden())
    settings = Settings(task="digits", model="mlp", strategy=repr(Hidden()), steps=2)
    with pytest.raises(ConfigError, match="Put it into a module"):
        launch(settings, Path("unused"))


@pytest.mark.parametrize(
    "text", ["ddp() + (1)", "ddp+powersgd(rank=----1)", "SlowMo(", "(" * 999, "ddp(*[1])", "a:b:c"]
)
def test_explain_refuses_what_is_no_recipe_in_one_message(capsys, text):
    assert "strategy" in refused(capsys, "explain", text)


def test_what_a_run_folder_names_is_not_imported(own_folder, capsys):
    settings = Settings(task="digits", model="mlp", strategy="quiet_methods:Quiet(parts=3)", steps=2)
    RunFolder(own_folder).write_settings(settings)
    assert worker.main([str(own_folder)]) == 2
    assert "quiet_methods:Quiet is not imported" in json.loads(capsys.readouterr().out)["message"]
    with pytest.raises(ConfigError, match="is not imported"):
        launch(settings, own_folder / "new")
    assert "quiet_methods" not in sys.modules


def test_a_demo_in_which_a_run_diverged_has_failed(capsys, monkeypatch):
    ended = {"seconds_per_step": 0.1, "eval_loss": None, "payload_bytes_per_worker_per_step": 1.0, "seconds": 1.0}
    rounds = [({"strategy": name, **ended, "diverged": "the loss is nan"},) for name in ("ddp", "PushSum()")]
    monkeypatch.setattr(
        "thinwire.cli.demo.run", lambda *_, **__: Comparison(Path(), ("ddp", "PushSum()"), tuple(rounds))
    )
    monkeypatch.setattr("thinwire.cli.demo.report", lambda _: None)
    assert main(["demo"]) == 1
    assert "PushSum() diverged: the loss is nan" in capsys.readouterr().err


def test_the_spread_over_rounds_is_of_those_that_took_a_step(capsys):
    rounds = [{"strategy": "AllReduce()", "seconds_per_step": pace} for pace in (None, 0.2, 0.1)]
    rounds[0]["diverged"] = "the loss is nan"
    show(Comparison(Path("nowhere"), ("AllReduce()",), (tuple(rounds),)))
    printed = capsys.readouterr()
    assert "AllReduce(): 0.1 to 0.2 s/step over 2 of 3 rounds\n" in printed.out
    assert "AllReduce(), round 1 diverged: the loss is nan" in printed.err
    show(Comparison(Path("nowhere"), ("AllReduce()",), (tuple(rounds[1:]),)))
    assert "s/step over 2 rounds\n" in capsys.readouterr().out
