# SPDX-License-Identifier: Apache-2.0
"""Workers that are forks of a process which has imported what they need."""

import os
import signal
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.lab.emulate.samples import comes_true, is_alive, start_launcher
from thinwire.lab.emulate import Network, Workers, available, fork_server, parse_links
from thinwire.lab.emulate.fork_server import ForkServer
from thinwire.lab.emulate.guard import Guard

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forks on Linux only")

PROGRAM = """
import json, os, sys, tracemalloc
import random
rank = os.environ["RANK"]
print(rank, sys.argv[1:], os.getcwd(), __name__, "json" in sys.modules, os.getpgid(0) == os.getpid(), flush=True)
print("random", random.random(), flush=True)
print("error", rank, file=sys.stderr)
if "fail" in sys.argv:
    raise ValueError("no good")
if "exit" in sys.argv:
    sys.exit(3)
if "wait" in sys.argv:
    import time
    print("up", os.getpid(), flush=True)
    time.sleep(60)
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    yield tmp_path
    for server in fork_server._kept:
        server.close()
    fork_server._kept.clear()


def run(*arguments, workers=2, preload=("json",), **options):
    lines = []
    command = [sys.executable, "-m", "program", *arguments]
    with Workers(
        command,
        workers,
        on_line=lambda rank, stream, line: lines.append((rank, stream, line)),
        preload=preload,
        **options,
    ) as job:
        pids = job.pids
        exits = job.wait()
    return exits, lines, pids


def test_a_fork_runs_a_module_as_a_process_of_its_own_does(place, monkeypatch):
    started = []
    monkeypatch.setattr("thinwire.lab.emulate.launch.start_process", lambda *_: started.append("a process"))
    exits, lines, pids = run("a", "b c")
    for rank in range(2):
        told = f"{rank} ['a', 'b c'] {place} __main__ True True"
        assert (rank, "stdout", told) in lines and (rank, "stderr", f"error {rank}") in lines
    assert [each.code for each in exits] == [0, 0] and all(each.cpu_seconds > 0 for each in exits)
    assert len({line for _, _, line in lines if line.startswith("random")}) == 2
    assert started == [] and len(set(pids)) == 2 and not any(is_alive(pid) for pid in pids)


def test_it_ends_as_the_interpreter_would(place):
    exits, lines, _ = run("fail", workers=1)
    assert exits[0].code == 1 and (0, "stderr", "ValueError: no good") in lines
    exits, _, _ = run("exit", workers=1)
    assert exits[0].code == 3


def test_a_server_serves_again_unless_something_is_read_once(place, monkeypatch):
    run(workers=1)
    (first,) = fork_server._kept
    monkeypatch.setenv("SOMETHING", "else")
    run(workers=1)
    assert fork_server._kept == [first]
    monkeypatch.setenv("PYTHONPATH", str(place / "elsewhere"))
    run(workers=1)
    assert fork_server._kept != [first] and first._process.poll() is not None
    first = fork_server._kept[0]
    run(workers=1, preload=("json", "csv"))
    assert fork_server._kept[0].modules == ("json", "csv") and first._process.poll() is not None


def test_a_server_that_was_killed_is_started_anew(place):
    run(workers=1)
    fork_server._kept[0]._process.kill()
    fork_server._kept[0]._process.wait()
    exits, _, _ = run(workers=1)
    assert exits[0].code == 0


def test_without_a_server_workers_are_processes(place):
    exits, lines, _ = run(preload=("no_such_module",))
    assert [each.code for each in exits] == [0, 0] and (0, "stderr", "error 0") in lines
    with pytest.raises(OSError, match="has ended"):
        _wait(ForkServer(("no_such_module",), os.environ))


def test_a_process_with_threads_is_not_forked(place):
    (place / "threads.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n"
    )
    with pytest.raises(OSError, match="2 threads run after the imports"):
        _wait(ForkServer(("threads",), os.environ))


def _wait(server):
    try:
        while not server.ready(1.0):
            pass
    finally:
        server.close()


def test_a_signal_while_modules_are_imported_ends_the_call(place, monkeypatch):
    (place / "slow.py").write_text("import time\ntime.sleep(60)\n")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        enter = Guard.__enter__
        # Signals are recorded from before this on.
        monkeypatch.setattr(Guard, "__enter__", lambda self: (signal.raise_signal(signal.SIGINT), enter(self))[1])
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            run(preload=("slow",))
        assert time.monotonic() - start < 30
    finally:
        signal.signal(signal.SIGINT, before)


def test_forks_end_with_the_launcher(place):
    launcher = start_launcher(
        textwrap.dedent(
            """
            command = [sys.executable, "-m", "program", "wait"]
            def show(rank, stream, line):
                if line.startswith("up"):
                    print(line, flush=True)
            with Workers(command, 2, on_line=show, preload=("json",)) as job:
                print("server", job._forks.pid, flush=True)
                job.wait()
            """
        )
    )
    with launcher:
        assert launcher.stdout is not None
        pids = [int(launcher.stdout.readline().split()[1]) for _ in range(3)]
        assert all(is_alive(pid) for pid in pids)
        launcher.kill()
    assert comes_true(lambda: not any(is_alive(pid) for pid in pids))


@pytest.mark.skipif(available() is not None, reason="no namespaces here")
def test_forks_enter_their_networks(place):
    Path("program.py").write_text("import socket; print([name for _, name in socket.if_nameindex()], flush=True)")
    with Network(parse_links("100mbit", 2)) as network:
        _, lines, _ = run(network=network)
    assert sorted(line for _, _, line in lines) == ["['lo', 'eth0']"] * 2
