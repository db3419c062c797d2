# SPDX-License-Identifier: Apache-2.0
"""A rank's state for late ranks: packed as bytes, sent in chunks, and unpacked to the bit."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.quorum.messages import StateChunk
from thinwire.replica.replica import Replica

_PLAIN = "plain"
_MOMENTS = "moments"
_MAX_CHUNKS = 24
Place = tuple[str, dict[str, Any], bool]
"""A name, a dictionary of the optimizer, and whether entries that a packed state lacks are to be deleted from it."""


def pack(r: Replica, names: Sequence[str], *, x: bool = True, moments: bool = True) -> Tensor:
    """Everything that the next steps depend on, as bytes on the CPU: parameters, optimizer, and the strategy's state.

    Args:
        r: a replica between two steps.
        names: entries of its state to be packed.
        x: with the parameters.
        moments: with the optimizer's state; its settings are always there.

    Raises:
        ConfigError: the optimizer's state holds something that is neither a tensor nor JSON.
    """
    tensors = {f"state/{name}": r.state[name] for name in names} | ({"x": r.x.detach()} if x else {})
    plain: dict[str, Any] = {_MOMENTS: moments}
    for where, content, _ in _places(r, moments=moments):
        for name, value in content.items():
            if isinstance(value, Tensor):
                tensors[f"{where}/{name}"] = value.detach()
            elif name != "params":
                plain[f"{where}/{name}"] = value
    try:
        encoded = json.dumps(plain).encode()
    except TypeError as error:
        raise ConfigError(
            f"{type(r.moments.optimizer).__name__}: its state cannot be sent to a late worker ({error}); "
            "use an optimizer whose state is tensors and numbers, as those of torch.optim, or wait for all workers"
        ) from None
    tensors[_PLAIN] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    data = _safetensors().save({name: x.cpu().contiguous().clone() for name, x in tensors.items()})
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def unpack_(r: Replica, data: Tensor) -> None:
    """Make a replica what another one was when it was packed, to the bit; what was not packed stays."""
    # What is empty, safetensors makes on the default device.
    with torch.device("cpu"):
        tensors = _safetensors().load(data.numpy().tobytes())
    plain = json.loads(tensors.pop(_PLAIN).numpy().tobytes())
    if "x" in tensors:
        r.x.copy_(tensors["x"])
    for name, x in tensors.items():
        if name.startswith("state/"):
            r.state[name.removeprefix("state/")] = x
    for where, content, is_state in _places(r, moments=plain.pop(_MOMENTS)):
        prefix = f"{where}/"
        values = {name.removeprefix(prefix): x for name, x in (tensors | plain).items() if name.startswith(prefix)}
        if is_state:
            for name in content.keys() - values.keys():
                del content[name]
        for name, value in values.items():
            held = content.get(name)
            if isinstance(held, Tensor) and isinstance(value, Tensor) and held.shape == value.shape:
                held.copy_(value)  # in place: views of it may be held elsewhere
            elif isinstance(value, Tensor):
                # Step counters stay on the CPU, where torch's optimizers keep them; moments lie with the parameters.
                content[name] = value.to(r.x.device) if value.dim() else value
            else:
                # A tuple, such as Adam's betas, has become a list in JSON.
                content[name] = tuple(value) if isinstance(held, tuple) else value


def digest(r: Replica) -> int:
    """A number that is equal on all ranks as long as their optimizers' settings are."""
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
    """A packed state as chunks.

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
            f"a late worker needs a state {len(chunks)} times the size of the parameters; must be at most "
            f"{_MAX_CHUNKS} times; use an optimizer with less state"
        )
    return [StateChunk(step, len(chunks), number, data.numel(), content) for number, content in enumerate(chunks)]


def _places(r: Replica, *, moments: bool) -> list[Place]:
    """Where an optimizer keeps its state of each parameter, if that is asked for, and the settings of its groups."""
    optimizer, parameters = r.moments.optimizer, r.moments.parameters
    if optimizer is None:
        return []
    states = [(f"parameter {i}", optimizer.state[p], True) for i, p in enumerate(parameters if moments else ())]
    return [*states, *((f"group {i}", group, False) for i, group in enumerate(optimizer.param_groups))]


def _safetensors() -> Any:
    """Imported when it is first needed, so that `import thinwire` needs torch alone."""
    return import_module("safetensors.torch")
