"""A rank's whole state as bytes: the parameters, what the optimizer remembers and is set to, and the strategy's own."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.errors import ConfigError
from thinwire.replica.replica import Replica

_PLAIN = "plain"
Found = Sequence[tuple[str, dict[str, Any], bool]]


def pack(r: Replica, names: Sequence[str]) -> Tensor:
    """Everything that moves the replica from here on, as bytes on the CPU.

    Args:
        r: between two steps.
        names: of its state, those that count.

    Raises:
        ConfigError: the optimizer remembers something that is neither a tensor nor JSON.
    """
    tensors = {"x": r.x.detach()} | {f"state/{name}": r.state[name] for name in names}
    plain: dict[str, Any] = {}
    for where, content, _ in _places(r):
        for name, value in content.items():
            if isinstance(value, Tensor):
                tensors[f"{where}/{name}"] = value.detach()
            elif name != "params":
                plain[f"{where}/{name}"] = value
    tensors[_PLAIN] = torch.frombuffer(bytearray(_json(plain, r)), dtype=torch.uint8)
    data = _safetensors().save({name: x.cpu().contiguous().clone() for name, x in tensors.items()})
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def unpack_(r: Replica, data: Tensor) -> None:
    """Make a replica what another was when it was packed, to the bit."""
    tensors = _safetensors().load(data.numpy().tobytes())
    plain = json.loads(tensors.pop(_PLAIN).numpy().tobytes())
    r.x.copy_(tensors["x"])
    for name, x in tensors.items():
        if name.startswith("state/"):
            r.state[name.removeprefix("state/")] = x
    for where, content, is_state in _places(r):
        begin = f"{where}/"
        news = {name.removeprefix(begin): x for name, x in (tensors | plain).items() if name.startswith(begin)}
        if is_state:
            for name in content.keys() - news.keys():
                del content[name]
        for name, value in news.items():
            _put(content, name, value, r.x)


def _put(content: dict[str, Any], name: str, value: Any, like: Tensor) -> None:
    """Into what is there, where it fits: others may hold it."""
    held = content.get(name)
    if isinstance(held, Tensor) and isinstance(value, Tensor) and held.shape == value.shape:
        held.copy_(value)
    elif isinstance(value, Tensor):
        # Counters stay on the CPU, as torch's optimizers have them; moments lie with the parameters.
        content[name] = value.to(like.device) if value.dim() else value
    else:
        # A tuple, such as Adam's betas, is a list in JSON.
        content[name] = tuple(value) if isinstance(held, tuple) else value


def _places(r: Replica) -> Found:
    """Where an optimizer keeps things: its state of each parameter, and the settings of its groups."""
    optimizer, parameters = optimizer_of(r), r.moments.parameters
    if optimizer is None:
        return []
    states = [(f"parameter {i}", optimizer.state[p], True) for i, p in enumerate(parameters)]
    return [*states, *((f"group {i}", group, False) for i, group in enumerate(optimizer.param_groups))]


def optimizer_of(r: Replica) -> Optimizer | None:
    """The optimizer that moves a replica; None where there is none."""
    return r.moments.optimizer


def digest(r: Replica) -> int:
    """A number that is equal on all ranks as long as their optimizers are set alike."""
    optimizer = optimizer_of(r)
    if optimizer is None:
        return 0
    told = [(name, _told(value)) for group in optimizer.param_groups for name, value in sorted(group.items())]
    return zlib.crc32(repr([each for each in told if each[0] != "params"]).encode())


def _told(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value


def _json(plain: Mapping[str, Any], r: Replica) -> bytes:
    try:
        return json.dumps(plain).encode()
    except TypeError as error:
        raise ConfigError(
            f"{type(optimizer_of(r)).__name__}: what it remembers cannot be sent to a late worker ({error}); "
            "use an optimizer whose state is tensors and numbers, as those of torch.optim, or backups=0"
        ) from None


def _safetensors() -> Any:
    """Imported when it is needed: `import thinwire` needs torch alone."""
    return import_module("safetensors.torch")
