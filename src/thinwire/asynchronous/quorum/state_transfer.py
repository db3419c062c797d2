# SPDX-License-Identifier: Apache-2.0
"""A rank's state for late ranks: packed as bytes, sent in chunks, and unpacked to the bit."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from thinwire.asynchronous.quorum.messages import StateChunk
from thinwire.core.replica.replica import Replica
from thinwire.core.replica.state import load_optimizer, pack_optimizer, parameter_names
from thinwire.core.storage.tree import from_bytes, to_bytes
from thinwire.errors import CheckpointError, ConfigError

_MAX_CHUNKS = 24


def pack(r: Replica, names: Sequence[str]) -> Tensor:
    """Pack the parameters, the optimizer state and the strategy's state into bytes.

    Args:
        r: a replica between two steps.
        names: entries of its state to pack.

    Raises:
        ConfigError: the optimizer state contains a value that is neither a tensor nor JSON.
    """
    optimizer, own = r.moments.optimizer, _own_names(r)
    state: dict[str, Any] = {"x": r.x.detach(), "state": {name: r.state[name] for name in names}}
    try:
        if optimizer is not None:
            state["optimizer"] = pack_optimizer(optimizer, parameter_names(optimizer, own), only=own.values())
        return to_bytes(state)
    except CheckpointError as error:
        raise ConfigError(
            f"{type(optimizer).__name__}: its state cannot be sent to a late worker ({error}). "
            "Use an optimizer whose state consists of tensors and numbers, such as those of torch.optim, or wait for "
            "all workers"
        ) from None


def unpack_(r: Replica, data: Tensor) -> None:
    """Restore a result of `pack` bitwise; values that were not packed are unchanged."""
    packed, optimizer, own = from_bytes(data), r.moments.optimizer, _own_names(r)
    r.x.copy_(packed["x"])
    r.state.update(packed["state"])
    if optimizer is not None:
        names = parameter_names(optimizer, own)
        rest = {name for name in names if name not in own.values()}
        kept = pack_optimizer(optimizer, names, only=rest)["state"]
        load_optimizer(optimizer, names, {**packed["optimizer"], "state": {**kept, **packed["optimizer"]["state"]}})


def _own_names(r: Replica) -> dict[int, str]:
    return {id(p): f"own {i}" for i, p in enumerate(r.moments.parameters)}


def digest(r: Replica) -> int:
    """Return a number that is equal on all ranks as long as their optimizers' settings are."""
    optimizer = r.moments.optimizer
    if optimizer is None:
        return 0
    settings = [
        (name, value.tolist() if isinstance(value, Tensor) else value)
        for group in optimizer.param_groups
        for name, value in sorted(group.items())
        if name != "params"
    ]
    return zlib.crc32(repr(settings).encode())


def split_state(step: int, data: Tensor, nbytes: int) -> list[StateChunk]:
    """Return a packed state as chunks.

    Args:
        step: the step whose state it is.
        data: from `pack`.
        nbytes: the most in one chunk.

    Raises:
        ConfigError: there are more chunks than a mailbox has room for.
    """
    chunks = data.split(nbytes)
    if len(chunks) > _MAX_CHUNKS:
        raise ConfigError(
            f"a late worker needs a state of {len(chunks)} times the size of the parameters: it must be at most "
            f"{_MAX_CHUNKS} times. Use an optimizer with less state"
        )
    return [StateChunk(step, len(chunks), number, data.numel(), content) for number, content in enumerate(chunks)]
