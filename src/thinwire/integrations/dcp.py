# SPDX-License-Identifier: Apache-2.0
"""`torch.distributed.checkpoint`: save a worker as any other state, and load it with any number of ranks.

    dcp.save({"worker": worker.state_dict(model=True, optimizer=True)}, checkpoint_id=folder)    # or async_save
    thinwire.integrations.dcp.load(worker, folder)

The names in it are of one rank each, so that every rank's state is kept.

torch reads back a pickle, as all of its checkpoints' metadata are: load only what you trust. `Worker.save` writes files
without any.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from thinwire.core.storage.files import local_path
from thinwire.errors import CheckpointError
from thinwire.worker.replica_state import part_name
from thinwire.worker.worker import Worker, internals_of


def load(worker: Worker, folder: str | Path, *, name: str = "worker", **options: Any) -> None:
    """Continue from a checkpoint that `torch.distributed.checkpoint.save` wrote; every rank must call.

    The number of ranks that wrote it continues bit for bit. Another number continues from the consensus, by the rules
    of `Worker.load`; every rank then reads the parts of all.

    Args:
        worker: from `attach`, of the same recipe, model, seed and optimizer.
        folder: the checkpoint, as `checkpoint_id`.
        name: the worker's key in the saved dict; with dots, where it was nested.
        options: more for `torch.distributed.checkpoint.load`, such as `process_group`.

    Raises:
        CheckpointError: it has no worker of that name, or the worker does not fit; nothing has changed.
        ConfigError: the folder is a URL.
    """
    folder = local_path(folder)
    reader = FileSystemReader(folder)
    try:
        metadata = reader.read_metadata().state_dict_metadata
    except OSError as error:
        raise CheckpointError(f"{folder}: holds no checkpoint of torch.distributed.checkpoint ({error})") from error
    own = part_name(internals_of(worker), worker.comm.rank)
    stem = own[: -len("0000")]
    keys = [key for key in metadata if key.startswith(f"{name}.{stem}")]
    parts = {key: key.removeprefix(f"{name}.").partition("/")[0] for key in keys}
    if not parts:
        known = ", ".join(sorted({key.partition(".")[0] for key in metadata})[:8])
        raise CheckpointError(f"{folder}: holds no worker with {own} under {name!r}, but {known}. Pass name=")
    same_size = len(set(parts.values())) == worker.comm.size and own in parts.values()
    # Flat keys, which the planner need not take apart.
    state = {key: _empty_like(metadata[key]) for key in keys if parts[key] == own or not same_size}
    dcp_load(state, storage_reader=reader, **options)
    worker.load_state_dict({key.removeprefix(f"{name}."): value for key, value in state.items()})


def _empty_like(saved: Any) -> Any:
    """Return what the planner reads into: a tensor, or anything for a rank's part as earlier versions wrote it."""
    if isinstance(saved, TensorStorageMetadata):
        return torch.empty(saved.size, dtype=saved.properties.dtype, device="cpu")
    return ()
