# SPDX-License-Identifier: Apache-2.0
"""What there is on Linux alone is asked for where it is used: everything can be imported elsewhere, and says so."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

# Hides what this system has and another has not; torch itself was made for this one, so it comes first.
ELSEWHERE = """
import sys
import torch, torch.distributed, torch.utils._pytree, numpy, ctypes, os, signal, socket, pathlib
import torch.nn.parallel, torch.optim, torch.distributed.fsdp, torch.distributed.tensor, torch.nn.utils.parametrize
import importlib.metadata, multiprocessing, subprocess, asyncio, cyclopts, rich.console, safetensors.torch
import matplotlib.figure, matplotlib.backends.backend_agg, selectors, tempfile, shutil, platform, http.server
import torch._dynamo, torch.distributed.checkpoint, rich.progress
import torch.func, torch._functorch.predispatch, sklearn.datasets

HIDDEN = {
    "win32": {"fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "syslog"},
    "darwin": set(),
}[sys.argv[1]] | {"lightning", "accelerate", "transformers", "ray"}  # which were made for this system too
ABSENT = {
    "darwin": {os: ["sched_getaffinity", "sched_setaffinity", "memfd_create", "unshare", "setns", "pidfd_open"],
               signal: ["pidfd_send_signal"], socket: ["AF_PACKET", "AF_NETLINK"]},
    "win32": {os: ["sched_getaffinity", "sched_setaffinity", "memfd_create", "unshare", "setns", "pidfd_open", "fork",
                   "getuid", "geteuid", "getgid", "getegid", "killpg", "setsid", "getpgid", "sysconf", "O_NONBLOCK",
                   "openpty", "waitid", "wait4", "posix_spawn", "forkpty", "WNOHANG", "uname", "getloadavg", "setpgid"],
              signal: ["SIGKILL", "SIGSTOP", "SIGCONT", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGCHLD", "alarm",
                       "pthread_sigmask", "setitimer", "pidfd_send_signal", "sigwait", "pthread_kill", "SIGPIPE"],
              socket: ["AF_UNIX", "send_fds", "recv_fds", "AF_PACKET", "AF_NETLINK"]},
}[sys.argv[1]]
for module, names in ABSENT.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hide())
for name in HIDDEN:
    sys.modules.pop(name, None)
load = ctypes.CDLL.__init__
def without_whole_process(self, name, *more, **named):
    if name is None and sys.argv[1] == "win32":
        raise TypeError("LoadLibrary() argument 1 must be str, not None")
    if name is not None:
        raise OSError(f"{name}: not for this system")
    load(self, name, *more, **named)
ctypes.CDLL.__init__ = without_whole_process
real = pathlib.Path.open
def without_proc(self, *more, **named):
    if str(self).startswith(("/proc", "/sys")):
        raise FileNotFoundError(2, "No such file or directory", str(self))
    return real(self, *more, **named)
pathlib.Path.open = without_proc
exists = pathlib.Path.exists
pathlib.Path.exists = lambda self: not str(self).startswith(("/proc", "/sys")) and exists(self)
sys.platform = sys.argv[1]
"""


def elsewhere(system: str, code: str) -> str:
    """What a program prints where this system seems to be another one."""
    program = ELSEWHERE + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", program, system], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_every_module_is_imported_and_a_model_trains_elsewhere(system: str) -> None:
    printed = elsewhere(
        system,
        """
        import pkgutil, importlib, thinwire
        for name in thinwire.__all__:
            getattr(thinwire, name)
        wanted = {"triton", "ray", "optuna", "tensorboard", "datasets", "lightning", "accelerate", "transformers"}
        for found in pkgutil.walk_packages(thinwire.__path__, "thinwire."):
            if found.name.endswith("__main__"):
                continue
            try:
                importlib.import_module(found.name)
            except ModuleNotFoundError as missing:
                assert missing.name.partition(".")[0] in wanted, (found.name, missing)
        def train(comm):
            model = torch.nn.Linear(3, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            worker = thinwire.attach(model, optimizer, "LocalSGD(period=2)", comm=comm)
            for _ in range(4):
                model(torch.ones(3)).sum().backward()
                optimizer.step()
            return worker.step
        print(thinwire.run_threads(2, train))
        """,
    )
    assert printed == "[4, 4]\n"


@pytest.mark.parametrize("system", ["win32", pytest.param("darwin", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_what_needs_linux_says_so_elsewhere(system: str) -> None:
    printed = elsewhere(
        system,
        """
        from thinwire.cli import main
        from thinwire.lab.emulate import available
        print(available())
        sys.argv[1:] = []
        print(main(["train", "--task", "digits", "--link", "100mbit"]), main(["tools"]))
        print(main(["sweep", "--task", "digits", "--trials", "1", "--steps", "1", "--out", "/dev/null/x"]))
        """,
    )
    lines = printed.splitlines()
    assert "it needs Linux" in lines[0]
    # A limited link is refused, the list of tools is printed, and a sweep's folder is refused.
    assert "2 0" in lines and lines[-1] == "2"
