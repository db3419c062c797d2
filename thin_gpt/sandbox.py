# SPDX-License-Identifier: Apache-2.0
"""Limits of a worker's process: no writes, no held-out text, no other network, no other processes.

Landlock (Linux 5.13 or newer) enforces the file rules in the kernel. Python's audit hooks report attempts, so that a
racer that tries is disqualified, and enforce the rest. Code in the same process can evade a hook, but not Landlock.
"""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import stat
import struct
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

_EXECUTE, _WRITE, _READ, _LIST = 1, 2, 4, 8
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF, _NO_NEW_PRIVILEGES = 444, 445, 446, 38
_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system", "os.kill"}
_CHANGES = {"os.mkdir", "os.rename", "os.link", "os.symlink", "os.remove", "os.truncate", "shutil.copyfile"}
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")


def set_limits(memory: int, seconds: float, allow: Collection[str]) -> None:
    """Limit data memory and processor time, and without the permission `disk` the size of files, to nothing."""
    limits = {resource.RLIMIT_DATA: 2 * memory, resource.RLIMIT_CPU: int(seconds), resource.RLIMIT_CORE: 0}
    if "disk" not in allow:
        limits[resource.RLIMIT_FSIZE] = 0
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def enclose(held: Collection[str], allow: Collection[str], violations: list[str]) -> str:
    """Apply the rules to this process for good; returns what enforces them, `landlock` or `audit`.

    Args:
        held: files that may not be read.
        allow: permissions: `disk` to write files, `processes` to start processes.
        violations: attempts are appended here.
    """
    enforced = "landlock" if _landlock(held, allow) else "audit"
    hidden = {os.path.realpath(name) for name in held}

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        reason = _forbidden(event, arguments, hidden, allow)
        if reason:
            violations.append(reason)
            raise PermissionError(f"the benchmark's sandbox refused: {reason}")

    sys.addaudithook(hook)
    return enforced


def _forbidden(event: str, arguments: tuple[Any, ...], hidden: set[str], allow: Collection[str]) -> str:
    if event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
        path, flags = os.path.realpath(os.fsdecode(arguments[0])), arguments[2] or 0
        if path in hidden:
            return f"read of held-out text {path}"
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if writes and "disk" not in allow and path not in _DEVICES and not path.startswith("/proc/self"):
            return f"write to {path}"
    elif event in ("socket.connect", "socket.bind", "socket.sendto"):
        kind, where = arguments[0].family, arguments[1]
        host = where[0] if isinstance(where, tuple) and where else ""
        inside = host in ("", "0.0.0.0", "::", "::1", "localhost") or str(host).startswith(("10.77.0.", "127."))
        if kind == socket.AF_UNIX and "processes" not in allow:
            return f"a Unix socket {where!r}"
        if kind in (socket.AF_INET, socket.AF_INET6) and not inside:
            return f"network address {where!r}"
    elif event in _CHANGES and "disk" not in allow:
        return f"{event} {arguments[0]!r}"
    elif event in _STARTS and "processes" not in allow:
        return event
    return ""


def _landlock(held: Collection[str], allow: Collection[str]) -> bool:
    system = ctypes.CDLL(None, use_errno=True)
    version = system.syscall(_CREATE_RULESET, None, 0, 1)
    if version < 1:
        return False
    handled = (1 << {1: 13, 2: 14}.get(version, 15)) - 1 if "disk" not in allow else _READ
    scoped = 3 if version >= 6 and "processes" not in allow else 0
    attributes = struct.pack("QQQ", handled, 0, scoped)[: 24 if version >= 6 else 16 if version >= 4 else 8]
    ruleset = system.syscall(_CREATE_RULESET, attributes, len(attributes), 0)
    if ruleset < 0:
        return False
    hidden = {os.path.realpath(name) for name in held}
    above = {str(parent) for name in hidden for parent in Path(name).parents}

    def permit(path: str, access: int) -> None:
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            return
        if not stat.S_ISDIR(os.fstat(place).st_mode):
            access &= _EXECUTE | _WRITE | _READ
        if access & handled:
            system.syscall(_ADD_RULE, ruleset, 1, struct.pack("=Qi", access & handled, place), 0)
        os.close(place)

    def permit_below(folder: str) -> None:
        for entry in os.scandir(folder):
            if entry.path in above:
                permit_below(entry.path)
            elif entry.path not in hidden and not entry.is_symlink():
                permit(entry.path, _EXECUTE | _READ | _LIST)

    permit("/", _LIST)
    permit_below("/")
    for device in _DEVICES:
        permit(device, _READ | _WRITE)
    system.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    enclosed = system.syscall(_RESTRICT_SELF, ruleset, 0) == 0
    os.close(ruleset)
    return enclosed
