# SPDX-License-Identifier: Apache-2.0
"""The end of a session that fails, and folders beside checkpoints, without a trainer."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.integrations.small import Net, optimizer_of
from tests.pool import run_processes
from thinwire import CommTimeoutError
from thinwire.integrations.session import Session


def test_a_model_is_let_go_where_the_last_agreement_fails() -> None:
    model = Net()
    optimizer, trainer = optimizer_of(model), SimpleNamespace(teardown=lambda: None)
    session = Session(model, optimizer, "LocalSGD(period=2)", {})
    session.call_before(trainer, "teardown", lambda: None)

    def fails() -> Any:
        raise CommTimeoutError("rank 1 is not answering")

    session.worker.consensus = fails  # type: ignore[method-assign]
    own = trainer.teardown
    with pytest.raises(CommTimeoutError, match="not answering"):
        session.finish()
    assert getattr(trainer, "teardown", None) is not own
    Session(model, optimizer, "LocalSGD(period=2)", {}).finish()


def test_an_abandoned_session_puts_the_workers_own_parameters_back() -> None:
    model = Net()
    session = Session(model, optimizer_of(model), "LocalSGD(period=2)", {})
    own = [x.detach().clone() for x in model.parameters()]
    session.hold()
    with torch.no_grad():
        for x in model.parameters():
            x.zero_()
    session.abandon()
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), own, strict=True))


def own_disks(folder: str) -> list[str]:
    """Three checkpoints, of which one is removed, on ranks that do not share a disk and name them differently."""
    from thinwire.integrations.lightning import WorkerFolders

    rank = torch.distributed.get_rank()
    home = Path(folder, str(rank))
    home.mkdir()
    os.chdir(home)
    model = Net()
    session = Session(model, optimizer_of(model), "LocalSGD(period=2)", {})
    strategy = SimpleNamespace(save_checkpoint=lambda *_: None, remove_checkpoint=lambda *_: None)
    WorkerFolders(session, strategy)
    strategy.save_checkpoint({}, f"loss={rank}.ckpt")
    strategy.save_checkpoint({}, "second.ckpt")
    strategy.remove_checkpoint(f"loss={rank}.ckpt")
    first = sorted(each.name for each in home.iterdir())
    strategy.save_checkpoint({}, "third.ckpt")
    found = sorted(each.name for each in home.iterdir())
    session.finish()
    return [*first, *found]


@pytest.mark.slow
def test_folders_beside_checkpoints_have_one_name_and_are_removed_from_every_disk(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    rank0, rank1 = run_processes(2, own_disks, str(tmp_path))
    assert rank0 == ["second.ckpt.workers", "second.ckpt.workers", "third.ckpt.workers"]
    assert rank1 == ["loss=0.ckpt.workers", *rank0]
