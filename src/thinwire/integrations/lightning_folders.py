# SPDX-License-Identifier: Apache-2.0
"""Where every rank's state lies beside a checkpoint of Lightning: under one name for all ranks."""

from __future__ import annotations

from shutil import rmtree
from typing import Any

from thinwire.integrations.session import Session
from thinwire.worker.checkpoint import gathered
from thinwire.worker.worker import internals_of


class WorkerFolders:
    """Keeps a folder `x.ckpt.workers` beside each checkpoint `x.ckpt` of a Lightning strategy.

    A name may be made of metrics, which Lightning does not average unless told to: each rank has its own then, and
    rank 0's is that of the checkpoint. Rank 0 also says which ones were removed; the others, whose disks may be their
    own, follow at the next save.

    Args:
        session: of the training; its end takes this off the strategy.
        strategy: Lightning's.
    """

    def __init__(self, session: Session, strategy: Any) -> None:
        self._session = session
        self._removed: list[str] = []
        session.call_before(strategy, "save_checkpoint", self._save)
        session.call_before(strategy, "remove_checkpoint", self._remove)

    def _save(self, checkpoint: Any, filepath: Any, *_: Any, **__: Any) -> None:
        told = gathered(internals_of(self._session.worker), {"path": str(filepath), "removed": self._removed})[0]
        self._removed.clear()
        for path in told["removed"]:
            _remove_folder(path)
        self._session.save(_folder_of(told["path"]))

    def _remove(self, filepath: Any) -> None:
        self._removed.append(str(filepath))
        if self._session.worker.comm.rank == 0:
            _remove_folder(filepath)


def _folder_of(filepath: Any) -> str:
    return f"{filepath}.workers"


def _remove_folder(filepath: Any) -> None:
    rmtree(_folder_of(filepath), ignore_errors=True)
