# SPDX-License-Identifier: Apache-2.0
"""A script, run by path without the package: make network namespaces, and enter them.

A namespace exists as long as a process or an open file holds it. `make` creates namespaces without names, runs commands
in them, sends open files of them to its parent and ends. When the parent ends, for whatever reason, the kernel removes
the namespaces and every interface in them, so there is nothing to clean up. Where this user may not create network
namespaces, they are created inside a user namespace, which usually every user may create.

`enter PARENT USER NET COMMAND...`, as made by `enter_command`, executes the command inside the namespaces of two
descriptors, where `-` means the current namespace, and dies with its parent.

`make FD` uses a Unix socket. It reads one line of JSON, the plan: `count` of network namespaces; `user` to require a
user namespace; `tunnels`, the namespaces that get a tun device; `steps`, objects with `namespace`, `arguments`, `text`
for the standard input, in which `{n}` stands for a path to namespace n, and `optional`. It answers with one JSON
object that has either `error` or the `kinds` of the descriptors that are sent with it, in order.
"""

import ctypes
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1
TUNSETIFF = 0x400454CA
TUNSETOFFLOAD = 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 0x01, 0x02


class Refused(Exception):
    """This machine does not allow what the plan needs; the message says what."""


def call(name: str, *arguments: Any) -> None:
    """Call a function of the C library.

    Raises:
        OSError: when it returns -1.
    """
    # Here, as `enter_command` is imported on other systems too.
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def enter_command(user: int | None = None, net: int | None = None) -> list[str]:
    """Return the words to put before a command, so that it runs in these namespaces and dies with this process.

    On other systems than Linux there are none, and a command runs as it is.
    """
    if sys.platform != "linux":
        return []
    names = ["-" if descriptor is None else str(descriptor) for descriptor in (user, net)]
    return [sys.executable, "-I", "-S", __file__, "enter", str(os.getpid()), *names]


def enter(parent: int, user: str, net: str, command: list[str]) -> None:
    """Replace this process by ``command`` inside the namespaces, to be killed when ``parent`` dies."""
    for descriptor, kind in ((user, CLONE_NEWUSER), (net, CLONE_NEWNET)):
        if descriptor != "-":
            call("setns", int(descriptor), kind)
            os.close(int(descriptor))
    # After setns, because entering a user namespace clears this setting. A parent that died before this line sends no
    # signal, so this checks it.
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


def make(connection: socket.socket) -> None:
    """Carry out the plan read from ``connection``, and send back the open files or the error."""
    plan = json.loads(connection.makefile("r", encoding="utf-8").readline())
    try:
        files = carry_out(plan)
    except (OSError, Refused) as error:
        connection.sendall(json.dumps({"error": str(error)}).encode())
        return
    socket.send_fds(connection, [json.dumps({"kinds": [kind for kind, _ in files]}).encode()], [fd for _, fd in files])


def carry_out(plan: dict[str, Any]) -> list[tuple[str, int]]:
    """Carry out the plan; returns the open files with their kinds."""
    user, networks = make_namespaces(plan["count"], plan["user"])
    files = [] if user is None else [("user", user)]
    files += [("net", network) for network in networks]
    for index in plan["tunnels"]:
        call("setns", networks[index], CLONE_NEWNET)
        files.append(("tunnel", open_tunnel()))
    for step in plan["steps"]:
        call("setns", networks[step["namespace"]], CLONE_NEWNET)
        run_step(step, networks)
    for network in networks:
        call("setns", network, CLONE_NEWNET)
        files.append(("counters", os.open("/proc/self/net/dev", os.O_RDONLY)))
    return files


def make_namespaces(count: int, user: bool) -> tuple[int | None, list[int]]:
    """Create ``count`` network namespaces; returns descriptors of the user namespace, or None, and of them."""
    held = None
    try:
        if user:
            # As if this user were not allowed to make network namespaces directly.
            raise PermissionError
        call("unshare", CLONE_NEWNET)
    except PermissionError:
        enter_user_namespace()
        held = os.open("/proc/self/ns/user", os.O_RDONLY)
        call("unshare", CLONE_NEWNET)
    networks = [os.open("/proc/self/ns/net", os.O_RDONLY)]
    while len(networks) < count:
        call("unshare", CLONE_NEWNET)
        networks.append(os.open("/proc/self/ns/net", os.O_RDONLY))
    return held, networks


def enter_user_namespace() -> None:
    """Become root of a new user namespace in which only the current user exists."""
    user, group = os.geteuid(), os.getegid()
    call("unshare", CLONE_NEWUSER)
    # In this order: an unprivileged process may write gid_map only after it has denied setgroups.
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        Path("/proc/self", name).write_text(text)


def open_tunnel() -> int:
    """Make the tun device `eth0` here, with packet headers that allow packets of up to 64 KiB."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH22x", b"eth0", IFF_TUN | IFF_NO_PI | IFF_VNET_HDR)
    import fcntl

    fcntl.ioctl(descriptor, TUNSETIFF, request)
    fcntl.ioctl(descriptor, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
    return descriptor


def run_step(step: dict[str, Any], networks: list[int]) -> None:
    """Run one command of the plan in this process's current namespace.

    Raises:
        Refused: when the command is missing, or fails and is not optional.
    """
    paths = [f"/proc/self/fd/{network}" for network in networks]
    try:
        done = subprocess.run(
            step["arguments"], input=step["text"].format(*paths), pass_fds=networks, text=True, capture_output=True
        )
    except FileNotFoundError:
        raise Refused(f"the program {step['arguments'][0]} is missing") from None
    if done.returncode and not step["optional"]:
        raise Refused(f"{' '.join(step['arguments'])}: {' '.join(done.stderr.split()) or done.returncode}")


if __name__ == "__main__":
    if sys.argv[1] == "enter":
        enter(int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5:])
    else:
        make(socket.socket(fileno=int(sys.argv[2])))
