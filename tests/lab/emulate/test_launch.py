# SPDX-License-Identifier: Apache-2.0
"""The local launcher: the environment of workers, their lines, and how they end."""

import os
import signal
import threading

import pytest

from tests.lab.emulate.samples import BARE_PYTHON, SLEEP, comes_true, is_alive, start_launcher
from tests.rules import refusals
from thinwire.errors import CommTimeoutError
from thinwire.lab.emulate import Workers, run_workers

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")


@pytest.fixture(autouse=True)
def interrupts_are_handled():
    """A shell starts its background processes with interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def run(code, workers, **options):
    lines = []
    exits = run_workers(
        [*BARE_PYTHON, code], workers, on_line=lambda rank, stream, line: lines.append((rank, stream, line)), **options
    )
    return exits, sorted(lines)


def test_workers_get_the_environment_of_torchrun(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    code = (
        f"import os; print(*(os.environ[name] for name in {NAMES}))\n"
        "assert 'TORCHELASTIC_USE_AGENT_STORE' not in os.environ"
    )
    exits, lines = run(code, 2)
    assert [record.code for record in exits] == [0, 0]
    words = [line.split() for _, _, line in lines]
    port = words[0][5]
    assert words == [[str(rank), str(rank), "2", "2", "127.0.0.1", port, "1"] for rank in range(2)]
    assert 1024 < int(port) < 65536


def test_inherited_threads_stay_and_given_variables_win(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    code = "import os; print(os.environ['OMP_NUM_THREADS'], os.environ['MASTER_PORT'])"
    _, lines = run(code, 1, environment={"MASTER_PORT": "4242"})
    assert lines == [(0, "stdout", "3 4242")]


def test_every_line_of_both_streams_is_handed_over():
    code = "import sys; print('a'); print('b', file=sys.stderr); print(200000 * 'x'); sys.stdout.write('no end')"
    _, lines = run(code, 2)
    for rank in range(2):
        own = [(stream, line) for who, stream, line in lines if who == rank]
        assert ("stdout", "a") in own and ("stderr", "b") in own and ("stdout", "no end") in own
        assert sum(len(line) for _, line in own if set(line) == {"x"}) == 200000


def test_bytes_that_are_no_text_are_replaced():
    _, lines = run("import os; os.write(1, b'caf\\xe9\\r\\n')", 1)
    assert lines == [(0, "stdout", "caf\ufffd")]


def test_an_exit_has_code_seconds_and_cpu_seconds():
    (record,), _ = run("import sys; sum(range(10**6)); sys.exit(7)", 1)
    assert (record.rank, record.code, record.signal, record.failed, record.stopped) == (0, 7, None, True, False)
    assert record.cpu_seconds > 0 and record.seconds > 0
    assert str(record) == "worker 0 ended with exit code 7"


def test_the_others_have_time_to_end_by_themselves_when_one_fails():
    code = "import os, sys, time; rank = int(os.environ['RANK']); time.sleep(0.3 * rank); sys.exit(2 * (rank == 0))"
    with Workers([*BARE_PYTHON, code], 2, grace_seconds=20) as job:
        exits = job.wait()
    assert [(record.code, record.stopped) for record in exits] == [(2, False), (0, False)]
    assert job.failure == exits[0]


@pytest.mark.slow
def test_those_that_do_not_are_stopped_even_when_they_ignore_sigterm():
    code = (
        "import os, signal, sys, time\n"
        "rank = os.environ['RANK']\n"
        "if rank == '1': signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "time.sleep(0.3 if rank == '0' else 60)\n"
        "sys.exit(3)"
    )
    with Workers([*BARE_PYTHON, code], 3, grace_seconds=0.3) as job:
        exits = job.wait()
    assert job.failure == exits[0] and exits[0].code == 3
    assert [(record.signal, record.stopped) for record in exits[1:]] == [(signal.SIGKILL, True), (signal.SIGTERM, True)]


def test_a_killed_worker_is_named():
    with Workers(SLEEP, 2, grace_seconds=0.0) as job:
        job.poll(0.1)
        os.kill(job.pids[1], signal.SIGKILL)
        job.wait()
    assert job.failure is not None
    assert str(job.failure) == "worker 1 was ended by SIGKILL"


def test_what_a_worker_starts_ends_with_it():
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-I', '-S', '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid)"
    )
    _, lines = run(code, 1)
    assert comes_true(lambda: not is_alive(int(lines[0][2])))


def test_an_exception_in_the_context_ends_the_workers():
    with pytest.raises(ZeroDivisionError), Workers(SLEEP, 2) as job:
        _ = 1 / 0
    assert not any(is_alive(pid) for pid in job.pids)


def test_an_error_of_the_listener_ends_the_workers():
    def fail(rank, stream, line):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), Workers(SLEEP, 1, on_line=fail) as job:
        job.wait()
    assert not any(is_alive(pid) for pid in job.pids)


def test_a_deadline_stops_workers_and_names_them():
    with pytest.raises(CommTimeoutError, match=r"timeout=0.2: workers 0, 1 had not ended"):
        run_workers(SLEEP, 2, timeout=0.2)


def test_workers_start_outside_the_main_thread_too():
    exits = []
    thread = threading.Thread(target=lambda: exits.extend(run("pass", 1)[0]))
    thread.start()
    thread.join(30)
    assert [record.code for record in exits] == [0]


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_leaving_the_context_raises_what_a_signal_asked_for(number, raised):
    before = signal.getsignal(number)
    with pytest.raises(raised), Workers(SLEEP, 2, grace_seconds=0.0) as job:
        os.kill(os.getpid(), number)
        job.wait()
    assert [record.stopped for record in job.exits] == [True, True]
    assert job.failure is None
    assert signal.getsignal(number) == before


def test_a_second_signal_does_not_wait():
    stubborn = [
        *BARE_PYTHON,
        "import signal, time\nsignal.signal(2, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(60)",
    ]
    up = []
    with (
        pytest.raises(KeyboardInterrupt),
        Workers(stubborn, 1, grace_seconds=60, on_line=lambda *words: up.append(words)) as job,
    ):
        while not up:
            job.poll(0.1)
        os.kill(os.getpid(), signal.SIGINT)
        assert job.poll(0.2)
        os.kill(os.getpid(), signal.SIGINT)
        job.wait()
    assert job.exits[0].signal == signal.SIGKILL


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 1), (signal.SIGTERM, 143)])
def test_a_signal_is_passed_on_and_nothing_stays(number, code):
    worker = (
        "import signal, time\ntry:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    print('interrupted', flush=True)"
    )
    body = f"""
command = [sys.executable, "-I", "-S", "-c", {worker!r}]
with Workers(command, 2, grace_seconds=5, on_line=lambda *words: print(*words, flush=True)) as job:
    print(*job.pids, flush=True)
    job.poll(0.5)
    print("ready", flush=True)
    job.wait()
"""
    launcher = start_launcher(body)
    pids = [int(word) for word in launcher.stdout.readline().split()]
    assert launcher.stdout.readline() == "ready\n"
    launcher.send_signal(number)
    printed, trouble = launcher.communicate(timeout=30)
    assert (printed.count("interrupted") == 2) == (number == signal.SIGINT)
    assert launcher.returncode in (code, -number), trouble
    assert not any(is_alive(pid) for pid in pids)


def test_workers_and_what_they_started_end_when_the_launcher_is_killed():
    worker = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-I', '-S', '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)"
    )
    body = f"""
command = [sys.executable, "-I", "-S", "-c", {worker!r}]
with Workers(command, 2, on_line=lambda rank, stream, line: print(line, flush=True)) as job:
    print(*job.pids, flush=True)
    job.wait()
"""
    launcher = start_launcher(body)
    pids = [int(word) for _ in range(3) for word in launcher.stdout.readline().split()]
    assert len(pids) == 4 and all(is_alive(pid) for pid in pids)
    launcher.kill()
    launcher.communicate(timeout=30)
    assert comes_true(lambda: not any(is_alive(pid) for pid in pids))


test_what_cannot_be_started_is_refused = refusals(
    [
        ([], 2, "no command"),
        (["no-such-program"], 2, "'no-such-program'"),
        (["true"], 0, "workers=0"),
    ],
    run_workers,
)


def test_a_killed_worker_is_started_again_while_another_runs(tmp_path):
    flag = tmp_path / "killed"
    code = (
        "import os, pathlib, signal, time\n"
        f"flag, again = pathlib.Path({str(flag)!r}), pathlib.Path({str(tmp_path / 'again')!r})\n"
        "if os.environ['RANK'] == '1' and not flag.exists():\n"
        "    flag.touch(); os.kill(os.getpid(), signal.SIGKILL)\n"
        "print('rank', os.environ['RANK'])\n"
        "while os.environ['RANK'] == '0' and not again.exists(): time.sleep(0.01)\n"
        "again.touch()\n"
    )
    asked, lines = [], []

    def restart(record):
        asked.append(record.how)
        return 0.05

    with Workers(
        [*BARE_PYTHON, code], 2, survives=True, restart=restart, on_line=lambda rank, stream, line: lines.append(line)
    ) as job:
        pids = job.pids
        exits = job.wait()
        assert job.pids[0] == pids[0] and job.pids[1] != pids[1]
    assert asked == ["SIGKILL"] and sorted(lines) == ["rank 0", "rank 1"]
    assert [(record.rank, record.how) for record in exits] == [(0, "0"), (1, "SIGKILL"), (1, "0")]


def test_nobody_is_started_again_where_nobody_runs():
    with Workers([*BARE_PYTHON, "import sys; sys.exit(1)"], 2, survives=True, restart=lambda _: 0.3) as job:
        exits = job.wait()
    assert len(exits) == 2


def test_a_notice_is_passed_on_and_ends_nothing():
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))\n"
        "print('ready', flush=True)\n"
        "time.sleep(20)"
    )
    ready = []

    def on_line(rank, stream, line):
        ready.append(rank)
        if len(ready) == 2:
            signal.raise_signal(signal.SIGUSR1)

    with Workers([*BARE_PYTHON, code], 2, notices=[signal.SIGUSR1], on_line=on_line, grace_seconds=0) as job:
        exits = job.wait()
    assert [(record.code, record.stopped) for record in exits] == [(0, False)] * 2


def test_a_second_notice_ends_the_workers():
    code = (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready', flush=True)\ntime.sleep(20)"
    )

    def on_line(rank, stream, line):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)

    job = Workers([*BARE_PYTHON, code], 1, notices=[signal.SIGTERM], on_line=on_line, grace_seconds=0)
    with pytest.raises(SystemExit), job:
        job.wait()
