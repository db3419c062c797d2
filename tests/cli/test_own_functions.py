# SPDX-License-Identifier: Apache-2.0
"""`thinwire train`, `compare` and `sweep` over the user's own model and data, and `--config`."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import pytest

from thinwire.cli import main
from thinwire.cli.commands import parse
from thinwire.lab.runs.folder import RunFolder

OWN = ["--model", "examples.own_task:model", "--data", "examples.own_task:data"]
LOSS = ["--loss", "torch.nn.functional:cross_entropy"]
SHORT = ["--workers", "2", "--steps", "8", "--lr", "0.01", "--save-every", "4"]


@pytest.fixture(autouse=True)
def _in_an_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # The workers find `examples` where this process does.
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parents[2])])


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 2
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    return " ".join(printed.err.split())


def train(*arguments: str) -> None:
    assert main(["train", *arguments]) == 0


def steps_of(folder: str) -> list[float]:
    return [line["loss"] for line in RunFolder(Path(folder)).lines("metrics.jsonl") if "loss" in line]


@pytest.mark.slow
def test_own_functions_are_trained_resumed_and_repeated_from_the_saved_configuration() -> None:
    train(*OWN, *LOSS, *SHORT, "--strategy", "LocalSGD(period=4)", "--out", "whole")
    summary = json.loads(Path("whole/summary.json").read_text())
    assert summary["metric"] == "accuracy" and summary["eval_targets"] == 200
    assert RunFolder(Path("whole")).settings().batch_size == 16
    assert len(steps_of("whole")) == 8

    train("--config", "whole", "--steps", "4", "--out", "half")
    assert steps_of("half") == steps_of("whole")[:4]
    train("--resume", "half", *OWN, *LOSS, "--steps", "8")
    # Bit for bit: shuffling goes on where it was.
    assert steps_of("half") == steps_of("whole")


@pytest.mark.slow
def test_a_run_of_own_functions_is_resumed_only_where_they_are_named_again(capsys) -> None:
    train(*OWN, *LOSS, *SHORT, "--out", "run")
    capsys.readouterr()
    err = refused(capsys, "train", "--resume", "run", "--steps", "9")
    assert "add --model examples.own_task:model --data examples.own_task:data --loss torch.nn.functional:cross" in err


@pytest.mark.slow
def test_own_functions_are_compared() -> None:
    arguments = ["--strategies", "ddp; LocalSGD(period=4)", "--workers", "2", "--steps", "4", "--out", "both"]
    assert main(["compare", *OWN, *LOSS, *arguments]) == 0
    saved = tomllib.loads(Path("both/run.toml").read_text())
    assert saved["strategies"] == "ddp; LocalSGD(period=4)" and saved["model"] == "examples.own_task:model"


@pytest.mark.slow
def test_own_functions_are_swept_with_every_optimizer() -> None:
    names = "sgd,adam,adamw,lamb,adagrad,rmsprop,adadelta"
    arguments = ["--optimizer", names, "--lr", "0.01", "--trials", "7", "--steps", "5", "--check", "--out", "sweep"]
    assert main(["sweep", *OWN, *LOSS, *arguments]) == 0
    summary = json.loads(Path("sweep/summary.json").read_text())
    assert summary["task"] == "examples.own_task:model" and summary["diverged"] == 0
    assert summary["largest_difference"] < 1e-4
    assert tomllib.loads(Path("sweep/run.toml").read_text())["optimizer"] == names


def test_a_sweep_of_own_functions_is_resumed_only_where_they_are_named_again(capsys) -> None:
    short = ["--lr", "0.01", "--trials", "2", "--steps", "4"]
    assert main(["sweep", *OWN, *LOSS, *short, "--out", "sweep"]) == 0
    capsys.readouterr()
    err = refused(capsys, "sweep", "--resume", "sweep")
    assert "add --model examples.own_task:model --data examples.own_task:data --loss torch.nn.functional:cross" in err
    err = refused(capsys, "sweep", "--resume", "sweep", *OWN[:2], "--data", "examples.own_task:model", *LOSS)
    assert "--data examples.own_task:model: the sweep began with examples.own_task:data" in err
    # A loss that only the journal names would be imported as well.
    err = refused(capsys, "sweep", "--resume", "sweep", *OWN)
    assert "files import nothing; if you trust them, add" in err and LOSS[1] in err
    assert main(["sweep", "--resume", "sweep", *OWN, *LOSS]) == 0


@pytest.mark.slow
def test_a_batch_that_does_not_fit_is_named_with_its_rank_and_step(capsys) -> None:
    Path("late_mistake.py").write_text(
        "import torch\n"
        "def model(): return torch.nn.Linear(4, 2)\n"
        "def data(rank, size, seed):\n"
        "    for number in range(9):\n"
        "        wide = 5 if (rank, number) == (1, 3) else 4\n"
        "        yield torch.ones(2, wide), torch.zeros(2, dtype=torch.int64)\n"
    )
    names = ["--model", "late_mistake:model", "--data", "late_mistake:data"]
    err = refused(capsys, "train", *names, *LOSS, "--workers", "2", "--steps", "8", "--out", "run")
    assert "rank 1, step 3: --data late_mistake:data gave a tuple of (a float32 tensor [2, 5]" in err


WRONG = {
    ("--model", "train"): "must be MODULE:FUNCTION, such as --model train:model, for model() in train.py",
    ("--model", "nowhere:model"): "--model nowhere:model: no module nowhere is installed or in",
    ("--model", "examples/own_task.py:model"): "write it as one would import it: --model examples.own_task:model",
    ("--model", "examples.own_task:modle"): "examples.own_task has no 'modle'; did you mean model?",
    ("--model", "examples.own_task:__name__"): "is a str. It must be a function model()",
    ("--loss", "torch.nn:CrossEntropyLoss"): "is a class, and its instances would be the losses. Name a function",
    ("--split", "label"): "--split label with --model examples.own_task:model: --data divides the data itself",
    ("--batch-size", "4"): "--data makes the batches. Leave it out",
    ("--task", "digits"): "the model and its data are the task. Leave it out",
}


@pytest.mark.parametrize("changed", WRONG)
def test_a_wrong_option_beside_own_functions_is_refused_before_anything_starts(capsys, changed) -> None:
    given = {"--model": OWN[1], "--data": OWN[3], "--loss": LOSS[1]} | {changed[0]: changed[1]}
    err = refused(capsys, "train", *(word for pair in given.items() for word in pair), "--out", "run")
    assert WRONG[changed].replace("write it as", "name the module as") in err
    assert not Path("run").exists()


def test_model_needs_data_and_loss_needs_model(capsys) -> None:
    assert "is --model-size 0.5m" in refused(capsys, "train", "--task", "text", "--model", "0.5m")
    assert "needs --data MODULE:FUNCTION too" in refused(capsys, "train", *OWN[:2])
    assert "belongs to a model of yours" in refused(capsys, "train", "--task", "digits", *LOSS)
    assert "Add --loss, such as --loss torch.nn.functional" in refused(capsys, "sweep", *OWN)


# -- --config ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_options_override_the_configuration() -> None:
    Path("run.toml").write_text('task = "digits"\nsteps = 5\nlr = 0.2\nbatch_size = 8\nworkers = 2\n')
    train("--config", "run.toml", "--steps", "2", "--lr=0.1", "--out", "run")
    settings = RunFolder(Path("run")).settings()
    assert (settings.task, settings.steps, settings.lr, settings.batch_size) == ("digits", 2, 0.1, 8)


@pytest.mark.slow
def test_a_run_is_repeated_from_its_configuration() -> None:
    train("--task", "digits", "--steps", "3", "--workers", "2", "--tensorboard", "--out", "one")
    train("--config", "one/run.toml", "--out", "two")
    one, two = (RunFolder(Path(name)).settings().to_json() for name in ("one", "two"))
    assert {**one, "command": ""} == {**two, "command": ""}


def test_a_flag_of_the_configuration_is_left_out() -> None:
    Path("run.toml").write_text("tensorboard = true\nlr = 0.2\n")
    path = ["train", "--config", "run.toml"]
    assert (parse(path).tensorboard, parse(path).lr) == (True, 0.2)
    parsed = parse([*path, "--no-tensorboard", "--no-elastic", "--lr", "0.1"])
    assert (parsed.tensorboard, parsed.elastic, parsed.lr) == (False, False, 0.1)


REFUSED = {
    "lr_rate = 1": "run.toml: 'lr_rate' is not an option of thinwire train; did you mean lr?",
    "banana = 1": "run.toml: 'banana' is not an option of thinwire train; thinwire train --help lists the options",
    "[plan]\nlr = 1": "'plan' is not an option",
    "lr = [1, 2]": "run.toml: lr = [1, 2]: must be text or a number",
    "lr = ": "--config run.toml: is not valid TOML",
    "tensorboard = 1": "tensorboard = 1: must be true or false",
    "out = 'runs/x'": "'out' is not an option",
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_mistake_in_a_configuration_is_named(capsys, text: str) -> None:
    Path("run.toml").write_text(text)
    assert REFUSED[text] in refused(capsys, "train", "--config", "run.toml")


def test_options_come_from_a_file_in_the_current_folder_unless_it_names_code(capsys) -> None:
    Path("thinwire.toml").write_text('[train]\nlr = 0.2\nlink = "100mbit,0:10mbit"\n[sweep]\ntrials = 7\n')
    assert (parse(["train"]).lr, parse(["sweep"]).trials, parse(["train", "--lr", "3"]).lr) == (0.2, 7, 3.0)
    assert "options of thinwire.toml: lr, link" in capsys.readouterr().err
    assert parse(["train", "--config", "thinwire.toml"]).lr == 0.2
    for line in ('model = "train:model"', 'strategy = "SlowMo(base=mine:Quiet())"'):
        Path("thinwire.toml").write_text(f"[train]\n{line}\n")
        assert "names code to import" in refused(capsys, "train")
    Path("thinwire.toml").write_text("[train]\nlearning = 1\n")
    assert "thinwire.toml: 'learning' is not an option of thinwire train" in refused(capsys, "train")


def test_every_command_with_many_options_takes_a_configuration() -> None:
    Path("run.toml").write_text('workers = 5\nlink = "10mbit"\n')
    for words in (["plan"], ["explain", "AllReduce()"], ["compare"]):
        assert (parse([*words, "--config", "run.toml"]).workers, parse([*words, "--workers", "6"]).workers) == (5, 6)


def test_a_missing_configuration_is_named(capsys) -> None:
    assert "--config nothing.toml: cannot be read" in refused(capsys, "train", "--config", "nothing.toml")
    assert "--config: needs a value" in refused(capsys, "train", "--config")
