# SPDX-License-Identifier: Apache-2.0
"""Start Python workers as forks of a process that has imported what they need; importing torch takes seconds.

That process is the fork server, and runs `main`. It forks a worker for each request that it reads from a Unix socket,
until the socket ends. `ForkServer` is the launcher's end of it.

A worker is the child of the launcher, as one that the launcher has started itself: the server forks a process that
forks the worker and ends, and the launcher asks the kernel for such orphans.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from thinwire.lab.emulate.namespaces import CLONE_NEWNET, CLONE_NEWUSER, PR_SET_PDEATHSIG, call
from thinwire.lab.emulate.worker import Started

PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37
_LENGTH_BYTES = 4
_MOST_DESCRIPTORS = 4
_PROGRAM = f"import sys; from {__name__} import main; main(sys.argv[1:])"
# From a request to the answer; a fork takes milliseconds.
_ANSWER_SECONDS = 30.0
# What the interpreter, torch and their libraries read once, when they are imported.
_READ_ONCE = ("PYTHON", "LD_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TORCH", "ATEN_", "CUDA_", "PATH", "HOME")


class ForkServer:
    """The launcher's end of a fork server.

    Args:
        modules: imported by the server.
        environment: of the server; a worker may have other variables, but for those that are read once.

    Raises:
        OSError: the server cannot be started, or ended before it was ready; also where workers cannot be forks.
    """

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        if sys.platform != "linux":
            raise OSError("workers are forks on Linux only")
        self.modules, self._environment = tuple(modules), read_once(environment)
        self._socket, other = socket.socketpair()
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(other.fileno()), str(os.getpid()), *modules],
                env=dict(environment),
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._owner, self._ready = os.getpid(), False

    @property
    def pid(self) -> int:
        """Of the server."""
        return self._process.pid

    def serves(self, modules: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Return True if it can start such workers."""
        alive = os.getpid() == self._owner and self._process.poll() is None
        return alive and self.modules == tuple(modules) and self._environment == read_once(environment)

    def ready(self, seconds: float) -> bool:
        """Wait for so long until everything has been imported; returns whether it has.

        Raises:
            OSError: the server has ended, or workers cannot be its forks.
        """
        if not self._ready and select.select([self._socket], [], [], seconds)[0]:
            self._answer()
            self._ready = True
        return self._ready

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        descriptors: Sequence[int | None],
    ) -> Started:
        """Start a worker that runs a module as `python -m` does; the server must be ready.

        Args:
            module: its name.
            arguments: of the command line.
            environment: the whole environment.
            descriptors: of the user and the network namespace that it enters; None is the present one.

        Raises:
            OSError: the server has ended, or cannot fork.
        """
        held = [each for each in descriptors if each is not None]
        request = {
            "module": module,
            "arguments": list(arguments),
            "environment": dict(environment),
            "folder": str(Path.cwd()),
            "namespaces": [each is not None for each in descriptors],
        }
        outputs = [os.pipe() for _ in range(2)]
        try:
            with _adopting_orphans():
                _send(self._socket, request, [*(write for _, write in outputs), *held])
                pid = self._answer()["pid"]
        except BaseException:
            for read, _ in outputs:
                os.close(read)
            self.close()
            raise
        finally:
            for _, write in outputs:
                os.close(write)
        stdout, stderr = (os.fdopen(read, "rb", buffering=0) for read, _ in outputs)
        return Started(pid, stdout, stderr)

    def close(self) -> None:
        """End the server; its workers continue."""
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        self._socket.settimeout(_ANSWER_SECONDS)
        found = _receive(self._socket)
        if found is None:
            raise OSError("the fork server has ended")
        if "error" in found[0]:
            raise OSError(found[0]["error"])
        return found[0]


def read_once(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that matter when modules are imported."""
    return {name: value for name, value in environment.items() if name.startswith(_READ_ONCE)}


_lock = threading.Lock()
_kept: list[ForkServer] = []


def fork_server(modules: Sequence[str], environment: Mapping[str, str]) -> ForkServer:
    """Return the server of this process for such workers: the one of the last call, or a new one in its place.

    It ends with this process.

    Raises:
        OSError: there can be none.
    """
    with _lock:
        if not (_kept and _kept[0].serves(modules, environment)):
            for server in _kept:
                server.close()
            _kept[:] = []
            _kept.append(ForkServer(modules, environment))
            atexit.register(_kept[0].close)
        return _kept[0]


def kept() -> list[int]:
    """Return the processes that stay until this one ends: the server, if there is one."""
    return [server.pid for server in _kept]


@contextmanager
def _adopting_orphans() -> Generator[None]:
    """A context in which processes whose parent ends become children of this one."""
    before = ctypes.c_int()
    call("prctl", PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        call("prctl", PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


# -- messages: a length, JSON, and open files --------------------------------------------------------------------------


def _send(connection: socket.socket, content: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    data = json.dumps(content).encode()
    socket.send_fds(connection, [len(data).to_bytes(_LENGTH_BYTES, "big")], descriptors)
    connection.sendall(data)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    head, descriptors, _, _ = socket.recv_fds(connection, _LENGTH_BYTES, _MOST_DESCRIPTORS)
    data, length = b"", int.from_bytes(head, "big")
    while len(data) < length:
        piece = connection.recv(length - len(data))
        if not piece:
            return None
        data += piece
    return (json.loads(data), descriptors) if head else None


# -- the server --------------------------------------------------------------------------------------------------------


def serve(connection: socket.socket, launcher: int, modules: Sequence[str]) -> None:
    """Import the modules, and fork a worker for each request; returns when the launcher's end has been closed."""
    for name in modules:
        import_module(name)
    if reason := _cannot_fork():
        _send(connection, {"error": reason})
        return
    # A collection in a worker would copy every page that holds an object.
    gc.collect()
    gc.freeze()
    _send(connection, {"ready": True})
    while (request := _receive(connection)) is not None:
        content, descriptors = request
        child = os.fork()
        if child == 0:
            if os.fork() == 0:
                _become(connection, launcher, content, descriptors)
            os._exit(0)
        os.waitpid(child, 0)
        for each in descriptors:
            os.close(each)


def _cannot_fork() -> str:
    """Why a fork of this process would not be as good as a new one; empty if it is."""
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        return f"{threads} threads run after the imports, and a fork would lose them"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return "CUDA cannot be used in a fork of a process that has looked for devices"
    return ""


def _become(connection: socket.socket, launcher: int, content: dict[str, Any], descriptors: Sequence[int]) -> NoReturn:
    """Turn this fork into a worker, run it, and exit."""
    try:
        stdout, stderr, *namespaces = descriptors
        os.setpgid(0, 0)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        for there, kind in zip(content["namespaces"], (CLONE_NEWUSER, CLONE_NEWNET), strict=True):
            if there:
                call("setns", namespaces.pop(0), kind)
        for each in descriptors:
            os.close(each)
        os.chdir(content["folder"])
        while os.getppid() != launcher:
            if not _is_alive(launcher):
                os._exit(1)
            time.sleep(0.001)  # until the process between this one and the server has ended
        call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.environ.clear()
        os.environ.update(content["environment"])
        sys.argv = [content["module"], *content["arguments"]]
        if not sys.flags.safe_path:
            sys.path[0] = content["folder"]
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed()  # as in a process of its own; Python's own generator does so by itself
        _send(connection, {"pid": os.getpid()})
        connection.close()
    except BaseException as error:
        with suppress(OSError):
            _send(connection, {"error": f"a worker could not be forked: {error}"})
        os._exit(1)
    _run(content["module"])


def _run(module: str) -> NoReturn:
    """Run a module as `python -m` does, and exit as the interpreter would."""
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
    sys.exit(0)


def _is_alive(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def main(arguments: Sequence[str]) -> None:
    """Serve until the launcher is gone; the arguments are the socket, the launcher's process, and the modules."""
    descriptor, launcher, *modules = arguments
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    with socket.socket(fileno=int(descriptor)) as connection:
        serve(connection, int(launcher), modules)
