# SPDX-License-Identifier: Apache-2.0
"""Full disks, damaged files, killed writers: the last good checkpoint is never lost."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine import attach, batches, flat, net, steps
from tests.grids import fast_where
from tests.worker.rotten import STEP, home, tensors_of
from thinwire import CheckpointError, Comm, LocalSGD, SlowMo, Worker, run_threads
from thinwire.core.storage.files import write_atomically

RECIPE = SlowMo(LocalSGD(2), period=3)


def saved(folder: Path, size: int = 2, count: int = STEP) -> None:
    run_threads(size, lambda comm: steps(attach(comm, RECIPE), batches(comm.rank, count)).save(folder))


def load(comm: Comm, folder: Path) -> str | int:
    """Load; returns the step, or the error's message after checking that nothing has changed."""
    worker = attach(comm, RECIPE, model=net(9))
    before = flat(worker.model)
    try:
        worker.load(folder)
    except CheckpointError as error:
        assert torch.equal(flat(worker.model), before)
        assert worker.step == 0
        return str(error)
    return worker.step


# -- damaged files -----------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 8
    path.write_bytes(content)


def test_without_the_damaged_checkpoint_the_one_before_is_loaded(tmp_path: Path) -> None:
    saved(tmp_path, count=2)
    saved(tmp_path)
    flip(tensors_of(tmp_path, 0))
    assert all("rank-0000" in str(message) for message in run_threads(2, lambda comm: load(comm, tmp_path)))
    for file in home(tmp_path).iterdir():
        file.unlink()
    assert run_threads(2, lambda comm: load(comm, tmp_path)) == [2, 2]


# -- disks that fill up ------------------------------------------------------------------------------------------------


class Faulty:
    """Fails at the given call of a function, counted in the chosen threads; other calls go through."""

    def __init__(self, call: Callable[..., Any], turn: int, error: int) -> None:
        self.call, self.turn, self.error = call, turn, error
        self.threads: set[int] = set()
        self.struck = False

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        if threading.get_ident() in self.threads:
            self.turn -= 1
            if self.turn == 0:
                self.struck = True
                raise OSError(self.error, os.strerror(self.error))
        return self.call(*arguments, **settings)


class Full:
    """A file on a full disk: half of what is written arrives."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def __enter__(self) -> Full:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, content: bytes) -> None:
        self.file.write(content[: len(content) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


CALLS: dict[str, tuple[Any, str]] = {
    "flush": (os, "fsync"),
    "open": (os, "fdopen"),
    "rename": (Path, "replace"),
    "name": (os, "open"),
    "folder": (Path, "mkdir"),
}


def save_with_fault(comm: Comm, folder: Path, fault: Faulty) -> tuple[str, int, list[str]]:
    """Save, break on rank 1, save again, and load what is there."""
    worker = steps(attach(comm, RECIPE), batches(comm.rank, 3))
    worker.save(folder)
    steps(worker, batches(comm.rank, 1, first=3))
    if comm.rank == 1:
        fault.threads.add(threading.get_ident())
    try:
        worker.save(folder)
        message = ""
    except CheckpointError as error:
        message = str(error)
    fault.threads.clear()
    loaded = load(comm, folder)
    assert isinstance(loaded, int)
    own = sorted(path.name for path in folder.glob(f"*/*rank-{comm.rank:04d}*"))
    return message, loaded, own


@pytest.mark.parametrize("error", fast_where(lambda error: error == errno.ENOSPC, [errno.ENOSPC, errno.EIO]))
@pytest.mark.parametrize("call", list(CALLS))
def test_a_failing_disk_leaves_the_checkpoint_before_and_is_named_on_every_rank(
    call: str, error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name = CALLS[call]
    original = getattr(owner, name)
    turn, halves = 0, list[bool]()
    while True:
        turn += 1
        fault = Faulty(original, turn, error)
        monkeypatch.setattr(owner, name, fault if owner is not Path else lambda *a, f=fault, **k: f(*a, **k))
        folder = tmp_path / str(turn)
        found = run_threads(2, lambda comm, f=folder, w=fault: save_with_fault(comm, f, w))
        if not fault.struck:
            break
        assert len({message for message, *_ in found}) == 1
        message = found[0][0]
        assert "rank 1" in message and os.strerror(error) in message and "step-00000004" in message
        assert len({loaded for _, loaded, _ in found}) == 1
        assert all(not name.startswith(".") for *_, own in found for name in own)
        halves.append((folder / "step-00000004" / "rank-0000.json").exists())
    assert found[0] == ("", 4, found[0][2])
    assert turn > 1
    # Only when the very last call fails has the other rank finished already.
    assert not any(halves[:-1])


def test_a_file_is_the_old_one_until_the_new_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")
    whole = os.fdopen
    monkeypatch.setattr(os, "fdopen", lambda *arguments: Full(whole(*arguments)))
    with pytest.raises(OSError, match="No space left on device"):
        write_atomically(path, b"new and longer")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"


def test_what_cannot_be_saved_is_refused_on_every_rank(tmp_path: Path) -> None:
    def work(comm: Comm) -> str:
        worker = steps(attach(comm, RECIPE), batches(comm.rank, 3))
        with pytest.raises(CheckpointError) as refused:
            worker.save(tmp_path, extra={"thing": object() if comm.rank == 1 else 0})
        return str(refused.value)

    message = run_threads(2, work)
    assert message[0] == message[1]
    assert "rank 1" in message[0] and "/extra/thing is a object" in message[0]
    assert not list(tmp_path.glob("*/rank-*"))


def test_a_failed_second_saving_of_a_step_leaves_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = steps(attach(None, RECIPE), batches(0, 3))
    worker.save(tmp_path, extra={"try": torch.tensor(1)})
    fault = Faulty(os.fsync, 3, errno.ENOSPC)
    fault.threads.add(threading.get_ident())
    monkeypatch.setattr(os, "fsync", fault)
    with pytest.raises(CheckpointError, match="No space left"):
        worker.save(tmp_path, extra={"try": torch.tensor(2)})
    monkeypatch.undo()
    assert fault.struck
    assert int(worker.load(tmp_path)["try"]) == 1
    assert len(list((tmp_path / "step-00000003").iterdir())) == 2


# -- writers that are killed -------------------------------------------------------------------------------------------


def suicidal(folder: str, turn: int) -> None:
    """Save one checkpoint; be killed at the given call to the disk while saving the next."""
    worker = steps(attach(None, RECIPE), batches(0, 3))
    worker.save(Path(folder))
    steps(worker, batches(0, 1, first=3))
    turns = [turn]

    def dying(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **settings: Any) -> Any:
            turns[0] -= 1
            if turns[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **settings)

        return counted

    os.fsync, os.fdopen, os.open = dying(os.fsync), dying(os.fdopen), dying(os.open)
    Path.replace, Path.mkdir = dying(Path.replace), dying(Path.mkdir)  # type: ignore[method-assign]
    worker.save(Path(folder))


def expected(count: int) -> Tensor:
    return flat(steps(attach(None, RECIPE), batches(0, count)).model)


def test_a_writer_killed_at_any_call_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    # Without a process group: one worker needs none, and twelve would look for free ports at once.
    context = multiprocessing.get_context("forkserver")
    outcomes: list[int] = []
    for turn in range(1, 13):
        process = context.Process(target=suicidal, args=(str(tmp_path / str(turn)), turn))
        process.start()
        process.join(120)
        code = process.exitcode
        process.kill()
        assert code in (0, -signal.SIGKILL)
        worker: Worker = attach(None, RECIPE, model=net(9))
        worker.load(tmp_path / str(turn))
        outcomes.append(worker.step)
        assert torch.equal(flat(worker.model), expected(worker.step))
        assert code != 0 or worker.step == 4
    assert outcomes[0] == 3 and outcomes[-1] == 4
    assert outcomes == sorted(outcomes)
