"""Have the `namespaces` script carry out a plan, and take over the open files that it sends."""

import json
import socket
import subprocess
import sys
from collections.abc import Mapping

from thinwire.emulate import namespaces

BUILD_SECONDS = 60.0


class CannotBuildError(Exception):
    """Why this machine does not allow a network, and what to do about it."""


def build(plan: Mapping[str, object]) -> dict[str, list[int]]:
    """Carry out the plan, which is described in `namespaces`.

    Returns:
        The descriptors of the open files by their kind; the caller closes them.

    Raises:
        CannotBuildError: when it cannot be carried out here.
    """
    if sys.platform != "linux":
        raise CannotBuildError(f"it needs Linux, and this is {sys.platform}")
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            maker = _start(theirs.fileno())
        try:
            return _ask(ours, plan)
        finally:
            maker.kill()
            maker.communicate()


def _start(descriptor: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", namespaces.__file__, "make", str(descriptor)],
        pass_fds=[descriptor],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        process_group=0,
    )


def _ask(connection: socket.socket, plan: Mapping[str, object]) -> dict[str, list[int]]:
    connection.settimeout(BUILD_SECONDS)
    try:
        connection.sendall(json.dumps(plan).encode() + b"\n")
        text, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 253, socket.MSG_CMSG_CLOEXEC)
    except TimeoutError:
        raise CannotBuildError(f"ip and tc did not finish in {BUILD_SECONDS:.0f} seconds") from None
    answer = json.loads(text or '{"error": "the helper process ended early"}')
    if "error" in answer:
        raise CannotBuildError(_with_advice(answer["error"]))
    files: dict[str, list[int]] = {}
    for kind, descriptor in zip(answer["kinds"], descriptors, strict=True):
        files.setdefault(kind, []).append(descriptor)
    return files


def _with_advice(error: str) -> str:
    if "is missing" in error:
        return f"{error}; install iproute2"
    if "/dev/net/tun" in error:
        return f"{error}; a delay needs this device: load the module tun, or ask for links without a delay"
    if "tbf" in error:
        return f"{error}; the kernel needs the module sch_tbf"
    if any(word in error for word in ("unshare", "Operation not permitted", "Permission denied")):
        return f"{error}; run as root, in a privileged container, or where users may make user namespaces"
    return error
