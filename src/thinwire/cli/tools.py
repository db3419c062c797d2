# SPDX-License-Identifier: Apache-2.0
"""`thinwire tools`: what runs natively here, and what is missing."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from importlib.util import find_spec

from thinwire.cli.console import out, print_json


@dataclass(frozen=True, kw_only=True)
class Tools:
    """List which implementation each part uses on this machine, and why it is not the fast one.

    Example: thinwire tools

    Args:
        json: print the list as JSON.
    """

    json: bool = False

    def __call__(self) -> int:
        """Print the list; returns 0 also where something is missing, since all of it is optional."""
        codes = _native("codes, sketches, arrays of models", "base", "kernels")
        coresets = _native("selection of coresets", "nearest", "nearest")
        rows = [codes, coresets, _on_gpus(), _messages(), _links()]
        if self.json:
            print_json(rows)
            return 0
        out.table("", ("what for", "what runs", "details"), (tuple(row.values()) for row in rows))
        return 0


def _native(purpose: str, name: str, library: str) -> dict[str, str]:
    """Return which implementation `thinwire.core.kernels.NAME` uses."""
    from torch import empty

    from thinwire.core.kernels import base, native, nearest

    with warnings.catch_warnings(action="ignore"):
        found = {"base": base, "nearest": nearest}[name].compiled(empty(0))
    if found:
        return _row(purpose, "C", found._name)
    problem = "THINWIRE_NATIVE=0" if os.environ.get("THINWIRE_NATIVE") == "0" else native.problems.get(library)
    return _row(purpose, "PyTorch, slower", problem or "not on this kind of processor")


def _on_gpus() -> dict[str, str]:
    from torch import cuda

    if not cuda.is_available():
        return _row("the same on GPUs", "nothing", "PyTorch finds no GPU")
    if find_spec("triton") is None:
        return _row("the same on GPUs", "PyTorch, slower", "pip install triton")
    return _row("the same on GPUs", "Triton", cuda.get_device_name())


def _messages() -> dict[str, str]:
    from thinwire.core.comm.mailbox.zeromq import import_zmq
    from thinwire.errors import ConfigError

    try:
        zmq = import_zmq()
    except ConfigError as error:
        return _row("messages of asynchronous methods", "nothing", str(error))
    return _row("messages of asynchronous methods", "ZeroMQ with CURVE", f"pyzmq {zmq.__version__}")


def _links() -> dict[str, str]:
    from thinwire.lab.emulate import available

    reason = available()
    return _row("emulated links", "nothing" if reason else "network namespaces", reason or "limits and counts bytes")


def _row(purpose: str, runs: str, details: str) -> dict[str, str]:
    return {"for": purpose, "runs": runs, "details": details}
