# SPDX-License-Identifier: Apache-2.0
"""`thinwire up`: scripts for one process, run on two, with the losses of the same scripts attached by hand."""

from __future__ import annotations

import ast
import io
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

from tests.pool import run_processes
from thinwire.cli import main
from thinwire.core.storage.bucket import new_key
from thinwire.errors import ConfigError, ThinwireError
from thinwire.integrations.script import ADD_LINES, run_script

SCRIPTS = Path(__file__).parent / "scripts"
MNIST = Path(__file__).parents[2] / "examples" / "single_process.py"
LOSS = re.compile(r"oss:? (\d\.\d+)")


def run_up(script: str, strategy: str, arguments: list[str], export: str | None = None) -> tuple[str, list[str]]:
    """One rank of `run_script`: what it prints, and its notes or its error."""
    printed, notes = io.StringIO(), []
    try:
        with redirect_stdout(printed):
            run_script(script, arguments, strategy, note=notes.append, export=export)
    except ThinwireError as error:
        notes.append(f"{type(error).__name__}: {error}")
    return printed.getvalue(), notes


def run_in_bucket(
    script: str, url: str, key: str, arguments: list[str], workers: int | None = 2
) -> tuple[str, list[str]]:
    """One worker of two that meet in a folder."""
    printed, notes = io.StringIO(), list[str]()
    try:
        with redirect_stdout(printed):
            run_script(
                script, arguments, "LocalSGD(period=5)", note=notes.append, rendezvous=url, workers=workers, key=key
            )
    except ThinwireError as error:
        notes.append(f"{type(error).__name__}: {error}")
    return printed.getvalue(), notes


def run_first_or_later(script: str, url: str, key: str, begun: str) -> tuple[str, list[str]]:
    """One worker of two that meet in a folder: rank 1 trains first and for longer, and rank 0 joins it."""
    first = os.environ["RANK"] == "1"
    while not first and not Path(begun).exists():
        time.sleep(0.01)
    return run_in_bucket(script, url, key, ["500" if first else "40", begun], workers=None)


def run_by_hand(script: str, arguments: list[str]) -> str:
    """One rank of a script that attaches its model itself."""
    printed, sys.argv = io.StringIO(), [script, *arguments]
    torch.manual_seed(0)
    with redirect_stdout(printed):
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()


def losses(printed: str) -> list[str]:
    return LOSS.findall(printed)


def edited(text: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return f"import os\nimport torch.distributed as dist\nfrom itertools import islice\nimport thinwire\n{text}"


def mnist_by_hand(text: str, strategy: str) -> str:
    """Every second batch of the first ten, and another learning rate schedule than none: both as in the script."""
    return edited(
        text,
        (
            "enumerate(train_loader)",
            "enumerate(islice(train_loader, dist.get_rank(), len(train_loader) // 2 * 2, 2))",
        ),
        (
            "    scheduler = StepLR",
            f"    worker = thinwire.attach(model, optimizer, {strategy!r})\n    scheduler = StepLR",
        ),
    )


def nanogpt_by_hand(text: str, strategy: str) -> str:
    """Random numbers of its own for rank 1, from the first step on."""
    return edited(
        text.replace("assert not ddp\n", ""),
        ("checkpoint = None\n", f"worker = thinwire.attach(model, optimizer, {strategy!r}, scaler=None)\n"),
        (
            "    for _ in range(gradient_accumulation_steps):\n",
            "    if iter_num == 0 and dist.get_rank():\n        torch.manual_seed(1337 + dist.get_rank())\n"
            "    for _ in range(gradient_accumulation_steps):\n",
        ),
    )


def mingpt_by_hand(text: str, strategy: str) -> str:
    """Every second batch of one order, which is drawn from the script's seed."""
    return edited(
        text,
        (
            "replacement=True, num_samples=int(1e5)",
            "replacement=True, num_samples=int(1e5), generator=order",
        ),
        (
            "        train_loader = DataLoader(",
            f"        worker = thinwire.attach(model, self.optimizer, {strategy!r})\n"
            "        first = torch.Generator().manual_seed(3407)\n"
            "        drawn = torch.empty((), dtype=torch.int64).random_(generator=first)\n"
            "        order = torch.Generator().manual_seed(int(drawn))\n"
            "        train_loader = DataLoader(",
        ),
        (
            "        model.train()\n        data_iter = iter(train_loader)\n",
            "        model.train()\n        data_iter = islice(train_loader, dist.get_rank(), None, 2)\n",
        ),
    )


@pytest.mark.parametrize(
    ("script", "by_hand"),
    [
        (MNIST, mnist_by_hand),
        (SCRIPTS / "nanogpt_style.py", nanogpt_by_hand),
        (SCRIPTS / "mingpt_style.py", mingpt_by_hand),
    ],
    ids=lambda value: value.stem if isinstance(value, Path) else "",
)
@pytest.mark.parametrize("strategy", ["AllReduce()", "LocalSGD(period=2, codec=Quantize(4))"])
def test_a_script_trains_as_if_it_was_attached_by_hand(
    tmp_path: Path, script: Path, by_hand: Callable[[str, str], str], strategy: str
) -> None:
    hand = tmp_path / "by_hand.py"
    hand.write_text(by_hand(script.read_text(), strategy))
    found = run_processes(2, run_up, str(script), strategy, [])
    assert not any("Error" in note or "cannot be compared" in note for _, notes in found for note in notes), found
    wanted = run_processes(2, run_by_hand, str(hand), [])
    for (printed, _), expected in zip(found, wanted, strict=True):
        assert losses(printed) == losses(expected) and len(losses(printed)) >= 8
    assert losses(found[0][0]) != losses(found[1][0])  # other data


def test_a_shuffled_loader_is_shared_in_every_epoch_and_evaluation_is_whole(tmp_path: Path) -> None:
    saved, exported = tmp_path / "model.pt", tmp_path / "model.safetensors"
    arguments = ["--shuffle", "--epochs", "3", "--save-model", str(saved)]
    found = run_processes(2, run_up, str(MNIST), "AllReduce()", arguments, str(exported))
    assert len({printed for printed, _ in found}) == 2
    for printed, _ in found:
        assert printed.count("/5] Loss") == 15 and printed.count("/32") == 3
    assert saved.is_file() and exported.is_file()
    (_, notes), _ = found
    assert any("each of 2 workers reads 5 of its 11 batches" in note for note in notes)
    assert any("torch.save writes on rank 0 only" in note for note in notes)


PERSISTENT = """
import os
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = TensorDataset(x, torch.arange(64))
loader = DataLoader(rows, 4, shuffle=True, num_workers=1, persistent_workers=True)
seen = [[], []]
for epoch in seen:
    for batch, numbers in loader:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        epoch += numbers.tolist()
with torch.no_grad():
    seen.append([len(batch) for batch, _ in loader])
open(f"{__file__}.{os.environ['THINWIRE_RANK']}", "w").write(repr(seen))
"""


def test_a_loader_with_persistent_workers_is_shared_in_another_order_in_each_epoch(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(HEAD + PERSISTENT)
    command = [sys.executable, "-m", "thinwire", "up", str(script), "--processes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first, other = (ast.literal_eval(Path(f"{script}.{rank}").read_text()) for rank in range(2))
    for epoch in range(2):
        assert sorted(first[epoch] + other[epoch]) == list(range(64))
    assert first[0] != first[1] and sum(first[2]) == 64


def test_workers_that_meet_in_a_folder_read_the_data_in_orders_of_their_own(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    arguments = (str(MNIST), (tmp_path / "run").as_uri(), new_key(), list[str]())
    (first, notes), (second, _) = run_processes(2, run_in_bucket, *arguments, seconds=120)
    assert losses(first) != losses(second) and first.count("/11] Loss") == second.count("/11] Loss") == 22
    assert any("each worker reads all 11 batches in its own order" in note for note in notes)


LONG = """
import sys, time
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    time.sleep(0.02)
    if step == 3:
        open(sys.argv[2], "w").close()
print("done")
"""


def test_a_worker_may_join_and_leaves_when_its_script_ends_and_the_others_continue(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    script = tmp_path / "train.py"
    script.write_text(LONG)
    arguments = (str(script), (tmp_path / "run").as_uri(), new_key(), str(tmp_path / "begun"))
    (joined, notes), (first, others) = run_processes(2, run_first_or_later, *arguments, seconds=120)
    assert not any("Error" in note for note in [*notes, *others]), (notes, others)
    assert joined == first == "done\n"
    assert any("joins at step" in note for note in notes) and any("at their own pace" in note for note in notes)
    with pytest.raises(ConfigError, match=r"export='m\.safetensors' with rendezvous: workers that join and leave"):
        run_script(script, strategy="LocalSGD(period=5)", export="m.safetensors", rendezvous="memory://any")


def test_workers_that_meet_in_a_folder_and_read_the_same_batches_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    script = tmp_path / "train.py"
    script.write_text(HEAD + "optimizer = torch.optim.SGD(model.parameters())" + LOOP)
    arguments = (str(script), (tmp_path / "run").as_uri(), new_key(), list[str]())
    (_, notes), _ = run_processes(2, run_in_bucket, *arguments, seconds=120)
    assert "they read the same batches" in notes[-1] and notes[-1].endswith("draws batches of its own")


HEAD = """
import torch, numpy as np
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
model, other = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
x = torch.randn(64, 4)
draws = np.random.default_rng(0)
"""
LOOP = """
for step in range(6):
    batch = x[torch.from_numpy(draws.integers(0, 64, 8))]
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
"""
SKEWED = """
class Skewed(torch.optim.SGD):
    def step(self, closure=None):
        scale = 1.0 if all(p.storage_offset() == 0 for g in self.param_groups for p in g["params"]) else 0.5
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-scale * group["lr"])
optimizer = Skewed(model.parameters(), lr=0.1)
"""


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "first, optimizer = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (other, model))" + LOOP,
            "the script has 2 optimizers: SGD over 2 tensors; SGD over 2 tensors",
        ),
        (
            "parameters = [*model.parameters(), *other.parameters()]\noptimizer = torch.optim.SGD(parameters)" + LOOP,
            "no module has all parameters of SGD over 4 tensors, such as Linear",
        ),
        (
            "one, two = torch.nn.Sequential(model), torch.nn.Sequential(model, other)\n"
            "optimizer = torch.optim.SGD(model.parameters())" + LOOP,
            "the script has 2 models with all parameters of SGD over 2 tensors: Sequential, Sequential",
        ),
        ("optimizer = torch.optim.SGD(model.parameters())" + LOOP, "they read the same batches"),
        ("model(x)", "the script has ended without training a model"),
        (
            "class Rows(torch.utils.data.IterableDataset):\n    __iter__ = lambda self: iter(x)\n"
            "optimizer = torch.optim.SGD(model.parameters())\nfor batch in DataLoader(Rows(), 8):\n"
            "    optimizer.zero_grad()\n    model(batch).square().mean().backward()\n    optimizer.step()\n",
            "they read the same batches",
        ),
        (
            "optimizer = torch.optim.SGD([torch.zeros(2, requires_grad=True)])\noptimizer.step()",
            "SGD takes a step, but",
        ),
        (SKEWED + LOOP, "the first step differs from that of the unmodified script: in 2 of 2 parameters"),
        (
            "optimizer = torch.optim.SGD(model.parameters())\n"
            "for batch, in DataLoader(TensorDataset(x), 64): model(batch).sum().backward()",
            "a DataLoader has 1 batches for 2 workers",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_in_words(tmp_path: Path, body: str, words: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(HEAD + body)
    for printed, notes in run_processes(2, run_up, str(script), "AllReduce()", []):
        assert words in notes[-1] and printed == ""


@pytest.mark.slow
def test_optimizers_and_scalers_that_the_process_had_before_are_not_the_script_s(tmp_path: Path) -> None:
    from thinwire.integrations.script import run_script

    own = torch.nn.Linear(2, 1)
    held = [torch.optim.SGD(own.parameters(), lr=0.1), *(torch.amp.GradScaler("cpu") for _ in range(2))]
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(3):\n"
        "    optimizer.zero_grad()\n"
        "    model(torch.randn(4, 2)).square().mean().backward()\n"
        "    optimizer.step()\n"
    )
    assert run_script(script, strategy="LocalSGD(period=2)").stats.steps == 3
    assert len(held) == 3


def test_the_lines_that_the_refusal_names_give_each_rank_its_own_data(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    body = (
        "import os\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "dataset, batch_size = TensorDataset(x), 8\n"
        f"{ADD_LINES}\n"
        "for batch, in loader:\n    print(len(loader), batch.sum().item())\n    optimizer.zero_grad()\n"
        "    model(batch).square().mean().backward()\n    optimizer.step()\n"
    )
    script.write_text(HEAD + body)
    (first, notes), (second, _) = run_processes(2, run_up, str(script), "AllReduce()", [])
    assert len(first.splitlines()) == len(second.splitlines()) == 4 and first.startswith("4 ")
    assert not set(first.splitlines()) & set(second.splitlines())
    assert not any("Error" in note for note in notes)


def test_the_command_starts_processes_and_prints_the_line_for_other_machines() -> None:
    command = [sys.executable, "-m", "thinwire", "up", str(MNIST), "--processes", "2"]
    done = subprocess.run(
        [*command, "--strategy", "LocalSGD(period=2)", "--", "--epochs", "1"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Train Epoch: 1") == 5 and "5 steps; each worker sent" in done.stderr
    line = next(each for each in done.stderr.splitlines() if "torchrun" in each)
    assert line.endswith("single_process.py --strategy 'LocalSGD(period=2)' -- --epochs 1")


@pytest.mark.slow
def test_an_interrupt_is_reported_once() -> None:
    command = [sys.executable, "-m", "thinwire", "up", str(MNIST), "--processes", "2", "--", "--epochs", "1000"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None and "Epoch" in process.stdout.readline()
        os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C in a terminal
        _, told = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130 and told.count("interrupted") == 1, told


def test_the_url_of_the_environment_is_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("THINWIRE_RENDEZVOUS", "ftp://bucket/run")
    assert main(["up", str(MNIST), "--strategy", "LocalSGD(period=8)"]) == 2
    assert "'ftp://bucket/run': is not the URL of a run" in " ".join(capsys.readouterr().err.split())


def test_mistakes_in_the_call_are_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    for arguments, words in (
        (["none.py", "--processes", "2"], "none.py: no such file"),
        ([str(script), "--processes", "0"], "--processes 0: must be at least 1"),
        ([str(script)], "Give --processes 2 for two on this machine"),
        ([str(script), "--processes", "2", "--strategy", "LocalSGB()"], "did you mean LocalSGD"),
    ):
        script.write_text("")
        assert main(["up", *arguments]) == 2
        assert words in " ".join(capsys.readouterr().err.split())
