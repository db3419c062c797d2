# SPDX-License-Identifier: Apache-2.0
"""Tensors that say they are on a GPU, for machines without one: what a GPU refuses is refused, results are the CPU's.

Within `pretend_gpu()` the device "cuda:0" makes tensors that hold tensors of the CPU. An operation that mixes both
raises as on a GPU, and so do `numpy()` and generators of the CPU; their address is one that no process has, so that C
which is given it ends the process. (The device "cuda" without a number needs a torch with CUDA.)

Where there is a GPU the tensors are on it, and the same tests are asked of it.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from thinwire import Comm
from thinwire.core.kernels import base

GPU = torch.device("cuda", 0)
REAL = torch.cuda.is_available()
_BEYOND = 1 << 52  # added to addresses
_MOVES = {"copy_", "_to_copy", "_foreach_copy_", "set_"}
# Indices may be on the CPU; and of a tensor on the CPU they must be.
_INDEXED = {"index", "index_put_", "index_put", "_index_put_impl_", "_unsafe_index"}
# Elsewhere a number may be on the CPU.
_NO_NUMBERS = {"cat", "stack", "index_select", "gather", "scatter_", "mm", "addmm", "bmm", "mv", "dot", "embedding"}
# They return values of the GPU's memory to the host, or sizes that depend on them.
_READS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "is_nonzero"}
_WAITS = threading.local()

_CALLS = ("_all_reduce_", "_all_reduce_min_", "_broadcast_", "_all_gather", "_all_to_all", "_send_recv")


class Pretended(Tensor):
    """A tensor of which only `held` has values."""

    held: Tensor
    is_cuda, is_cpu, is_meta = True, False, False  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> Pretended:
        shape = torch.empty_strided(held.shape, held.stride(), dtype=held.dtype, device="meta")
        made = Tensor._make_subclass(cls, shape, False, device_for_backend_keys=GPU)  # type: ignore[call-arg]
        made.held = held
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return GPU

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, new: Tensor) -> None:
        assert isinstance(new, Pretended), "x.data = a tensor of the CPU"
        Tensor.data.__set__(self, new)  # type: ignore[attr-defined]
        self.held = new.held

    def __repr__(self, **_: Any) -> str:
        return f"Pretended({self.held!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made: Any = Pretended(self.held.detach().clone())
        is_parameter = isinstance(self, torch.nn.Parameter)
        made = torch.nn.Parameter(made, self.requires_grad) if is_parameter else made.requires_grad_(self.requires_grad)
        memo[id(self)] = made
        return made

    def __setitem__(self, where: Any, value: Any) -> None:
        if isinstance(value, Tensor):
            super().__setitem__(where, value)
        elif isinstance(where, Tensor):
            self.index_put_((where,), torch.tensor(value, dtype=self.dtype, device=GPU))
        else:
            self[where].fill_(value)

    def data_ptr(self) -> int:
        return self.held.data_ptr() + _BEYOND

    def untyped_storage(self) -> Any:
        return self.held.untyped_storage()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})


@contextmanager
def host_waits(found: list[str]) -> Iterator[None]:
    """Record the operations of this thread that wait for the GPU; where there is a GPU, they raise."""
    if REAL:
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return
    _WAITS.found = found
    try:
        yield
    finally:
        del _WAITS.found


def _record_wait(name: str, args: Any, kwargs: dict[str, Any]) -> None:
    """Record an operation after which a real GPU's host would know a value, or has copied memory."""
    flat = tree_flatten((args, kwargs))[0]
    waits = name in _READS and any(isinstance(x, Pretended) for x in flat)
    if name in _INDEXED and isinstance(args[0], Pretended):
        waits |= any(isinstance(x, Tensor) and x.dtype == torch.bool for x in tree_flatten(args[1])[0])
    if name == "_to_copy" and kwargs.get("device") is not None:
        moves = isinstance(args[0], Pretended) != (torch.device(kwargs["device"]).type == "cuda")
        waits |= moves and not kwargs.get("non_blocking")
    if name == "copy_":
        moves = isinstance(args[0], Pretended) != isinstance(args[1], Pretended)
        waits |= moves and not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
    if waits:
        stack = traceback.extract_stack()
        # Its copies are asynchronous, and waits for their events are counted by the tests.
        if not any(frame.name.startswith("host_copy") for frame in stack):
            where = [f"{frame.filename}:{frame.lineno}" for frame in stack if "/thinwire/" in frame.filename]
            _WAITS.found.append(f"{name} at {' '.join(where[-3:])}")


def _dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on what the tensors hold."""
    name, wanted = func._schema.name.split("::")[1], kwargs.get("device")
    if hasattr(_WAITS, "found"):
        _record_wait(name, args, kwargs)
    ours = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Pretended)]
    if name == "is_pinned":
        return False
    _check(name, args, kwargs, ours)
    if name == "scalar_tensor" and wanted is not None and torch.device(wanted).type == "meta":
        wanted = GPU  # torch's C++ takes ours for tensors of the meta device
    gpu = bool(ours) if wanted is None else torch.device(wanted).type == "cuda"
    known = {id(x.held): x for x in ours}
    given, named = tree_map(lambda x: x.held if isinstance(x, Pretended) else x, (args, kwargs))
    if gpu and wanted is not None:
        named["device"] = torch.device("cpu")
    if named.get("pin_memory"):
        named["pin_memory"] = False
    with _disable_current_modes():
        found = func(*given, **named)
    if name == "set_":
        args[0].held = given[0]

    def back(x: Any) -> Any:
        if not isinstance(x, Tensor) or isinstance(x, Pretended):
            return x
        if id(x) in known:
            return known[id(x)]
        return Pretended(x) if gpu and x.device.type == "cpu" else x

    return tree_map(back, found)


def _check(name: str, args: Any, kwargs: dict[str, Any], ours: list[Pretended]) -> None:
    """Refuse what a GPU would."""
    flat = tree_flatten((args, kwargs))[0]
    to_gpu = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda"
    if any(isinstance(x, torch.Generator) and x.device.type == "cpu" for x in flat) and (ours or to_gpu):
        raise RuntimeError(f"{name}: Expected a 'cuda' device type for generator but found 'cpu'")
    if not ours or name in _MOVES:
        return
    others = [x for x in flat if isinstance(x, Tensor) and not isinstance(x, Pretended) and x.device.type == "cpu"]
    if name in _INDEXED:
        if not isinstance(args[0], Pretended):
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
        others = [x for x in args[2:3] if not isinstance(x, Pretended)]
    writes_to_cpu = name.endswith("_") and not name.startswith("_") and not isinstance(args[0], Pretended)
    if any(x.dim() or name in _NO_NUMBERS for x in others) or (others and writes_to_cpu):
        raise RuntimeError(
            f"{name}: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
        )


class _Mode(TorchDispatchMode):
    """Makes what is asked for on a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})


def as_over_nccl(comm: Comm) -> Comm:
    """The same comm, which from now on sends nothing from the CPU, as with NCCL alone."""

    def refusing(name: str) -> Any:
        send = getattr(comm, name)

        def call(x: Any, *more: Any) -> Any:
            sent = [x] if isinstance(x, Tensor) else x
            assert all(each.is_cuda for each in sent), f"{name}: no backend for tensors of the CPU"
            return send(x, *more)

        return call

    for name in _CALLS:
        setattr(comm, name, refusing(name))
    comm.check_device = GPU
    return comm


@contextmanager
def pretend_gpu() -> Iterator[None]:
    """In this thread, and in those that are started within, "cuda:0" makes pretended tensors, unless there is a GPU."""
    if REAL:
        yield
        return
    run, make, adopt = threading.Thread.run, torch.tensor, torch.as_tensor

    def within(thread: threading.Thread) -> None:
        with _Mode():
            run(thread)

    # These two ask no mode.
    def tensor(data: Any, *, device: Any = None, **more: Any) -> Tensor:
        made = make(data, **more)
        return made if device is None else made.to(device)

    def as_tensor(data: Any, *, device: Any = None, **more: Any) -> Tensor:
        made = adopt(data, **more)
        return made if device is None else made.to(device)

    overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
    with (
        patch.object(torch.cuda, "_lazy_init", lambda: None),
        patch.object(torch.cuda, "current_stream", lambda device=None: None),
        patch.object(torch.cuda, "stream", lambda stream: nullcontext()),
        patch.object(torch.cuda, "synchronize", lambda device=None: None),
        patch.object(base, "_has_triton", lambda: False),  # torch computes; Triton would read memory
        patch.object(threading.Thread, "run", within),
        patch.multiple(torch, tensor=tensor, as_tensor=as_tensor),
    ):
        # Parameters are of a new class then.
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        try:
            with _Mode():
                yield
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(overwrites)
