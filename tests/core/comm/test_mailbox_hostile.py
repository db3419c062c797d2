# SPDX-License-Identifier: Apache-2.0
"""Strangers who reach a mailbox's port: they change nothing, and what they make it hold is bounded."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire
from tests.core.comm.hostile import Attacker
from tests.core.comm.test_mailbox import LIKE, frames_of_rank_1, soon
from tests.pool import start_processes
from tests.problems import flat, quadratic, train
from thinwire import CommError, GroupComm
from thinwire.core.comm.mailbox import zeromq
from thinwire.core.comm.mailbox.base import Mailbox
from thinwire.core.comm.mailbox.frame import PART_BYTES
from thinwire.methods.strategies.push_sum.eager_push_sum import EagerPushSum

DOUBLE = torch.float64
MOST_BYTES_EACH = 400_000  # what the module's docstring says of a connection
STEPS = 200


class Recorder:
    """Forwards connections to a port, and keeps what the first of them sent."""

    def __init__(self, address: str) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._target = host, int(port)
        self._listener = socket.create_server((host, 0))
        self.address = f"tcp://{host}:{self._listener.getsockname()[1]}"
        self.recorded = b""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        client, _ = self._listener.accept()
        with client, socket.create_connection(self._target) as server:
            back = threading.Thread(target=self._copy, args=(server, client, False), daemon=True)
            back.start()
            self._copy(client, server, True)
            back.join()

    def _copy(self, source: socket.socket, target: socket.socket, keep: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                self.recorded += data if keep else b""
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def close(self) -> None:
        self._listener.close()
        self._thread.join(5)


class Changer(Recorder):
    """Forwards connections, and changes one byte of the first long message."""

    def _run(self) -> None:
        for _ in range(2):
            super()._run()

    def _copy(self, source: socket.socket, target: socket.socket, keep: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                if keep and not self.recorded and len(data) > 1000:  # longer than all of the handshake
                    self.recorded, data = data, data[:500] + bytes([data[500] ^ 1]) + data[501:]
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


class Recorded(GroupComm):
    """A comm whose rank 1 sends to rank 0 through a recorder."""

    recorder: Recorder | None = None

    def _open_mailbox(self, *given: Any) -> Mailbox:
        box = super()._open_mailbox(*given)
        assert isinstance(box, zeromq.ZeroMqMailbox)
        if self.rank == 1:
            self.recorder = Recorder(box._addresses[0])
            box._addresses[0] = self.recorder.address
        return box


def be_attacked(folder: str) -> dict[str, Any]:
    """Train while strangers knock: the mean of the parameters must stay, since the learning rate is zero."""
    comm, home = Recorded(timeout=60), Path(folder)
    starts = torch.randn(comm.size, 400, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)
    before, most, ends = 0, 0, list[Any]()

    def observe(worker: thinwire.Worker) -> None:
        nonlocal before, most
        box = comm.mailbox(worker.replicas[0])
        assert isinstance(box, zeromq.ZeroMqMailbox)
        if worker.step == 1:
            before = resident_bytes()
            key = box._sockets.public_key.decode()
            if (recorder := comm.recorder) is not None:
                assert soon(lambda: len(recorder.recorded) > 1000, 20)
                (home / "recorded").write_bytes(recorder.recorded)
            (home / f"{comm.rank}.part").write_text(json.dumps([box._sockets.port, key]))
            (home / f"{comm.rank}.part").rename(home / f"{comm.rank}.json")
        if worker.step == STEPS - 20:
            assert soon((home / "over").exists, 300)
        time.sleep(0 if (home / "over").exists() else 0.02)
        most = max(most, resident_bytes() - before)
        if worker.step == STEPS:
            with worker.consensus() as model:
                ends.append(flat(model).tolist())
            ends.extend([box.refused_connections, box.foreign_frames])

    worker = train(
        comm, EagerPushSum(), quadratic(comm.size, DOUBLE, width=400), [0.0] * STEPS, starts=starts, after_step=observe
    )
    comm.close_mailbox(worker.replicas[0])
    return {"mean": starts.mean(0).tolist(), "end": ends, "grown": most}


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(400)])])
def test_hostile_inputs_change_nothing_and_hold_little_memory(count: int, tmp_path: Path) -> None:
    workers = start_processes(2, be_attacked, str(tmp_path))
    try:
        assert soon(lambda: all((tmp_path / f"{rank}.json").exists() for rank in range(2)), 30)
        for rank in range(2):
            port, key = json.loads((tmp_path / f"{rank}.json").read_text())
            # What rank 1 has sent to rank 0, replayed to both.
            recorded = (tmp_path / "recorded").read_bytes()
            attacker = Attacker("127.0.0.1", port, server_key=key.encode(), recorded=recorded, seed=rank)
            assert attacker.replay in attacker.kinds
            attacker.attack(count // 2)
            attacker.close()
    finally:
        (tmp_path / "over").touch()
        deadline = time.monotonic() + 60
        for worker in workers:
            worker.finish(deadline)
    assert [worker.error for worker in workers] == [None, None]
    for found in (worker.result for worker in workers):
        end, refused, foreign = found["end"]
        assert torch.allclose(torch.tensor(end), torch.tensor(found["mean"]), rtol=0, atol=1e-12)
        assert refused > 0
        assert foreign == 0
        assert found["grown"] < zeromq.max_connections(2) * MOST_BYTES_EACH


def test_a_recorded_connection_cannot_be_replayed() -> None:
    def work(box: Mailbox, send: Any) -> None:
        assert isinstance(box, zeromq.ZeroMqMailbox)
        recorder = Recorder(box._addresses[0])
        box._addresses[0] = recorder.address
        send(torch.ones(1000))
        assert float(box.expect(1, LIKE).wait().content.sum()) == 1000
        assert len(recorder.recorded) > 4000
        attacker = Attacker("127.0.0.1", box._sockets.port, recorded=recorder.recorded)
        for _ in range(5):
            attacker.replay()
            attacker.flipped_replay()
        send(torch.ones(1000), number=1)
        assert float(box.expect(1, LIKE).wait().content.sum()) == 1000
        assert (box.duplicates, box.foreign_frames) == (0, 0)
        recorders.append(recorder)

    recorders: list[Recorder] = []
    frames_of_rank_1(work)
    recorders[0].close()


def test_a_message_that_is_changed_on_the_way_is_refused() -> None:
    def work(box: Mailbox, send: Any) -> None:
        assert isinstance(box, zeromq.ZeroMqMailbox)
        changer = Changer(box._addresses[0])
        box._addresses[0] = changer.address
        send(torch.ones(1000))
        assert soon(lambda: bool(changer.recorded))
        # The connection is closed, nothing of the message is delivered, and it is missed over the next connection.
        send(torch.ones(1000), number=box.capacity)
        assert soon(lambda: box._fault is not None)
        with pytest.raises(CommError, match="rank 0: message 0 of rank 1 was lost on the way"):
            box.process_deferred()
        assert (box.duplicates, box.foreign_frames) == (0, 0)
        changers.append(changer)

    changers: list[Changer] = []
    frames_of_rank_1(work)
    changers[0].close()


def test_connections_above_the_limit_are_closed_and_a_rank_still_comes_in() -> None:
    def work(box: Mailbox, send: Any) -> None:
        assert isinstance(box, zeromq.ZeroMqMailbox)
        limit = zeromq.max_connections(2)
        address = "127.0.0.1", box._sockets.port
        held = [socket.create_connection(address, timeout=5) for _ in range(limit + 20)]
        assert soon(lambda: box.refused_connections == 20)
        assert soon(lambda: len(box._sockets._open_connections) == limit)
        for each in held[:30]:
            each.close()
        send(LIKE)
        assert torch.equal(box.expect(1, LIKE).wait().content, LIKE)
        for each in held:
            each.close()
        assert soon(lambda: len(box._sockets._open_connections) == 1)

    frames_of_rank_1(work)


def test_a_stranger_s_message_is_no_longer_than_a_part() -> None:
    def work(box: Mailbox, send: Any) -> None:
        import zmq

        assert isinstance(box, zeromq.ZeroMqMailbox)
        assert box._sockets.receiver.getsockopt(zmq.MAXMSGSIZE) < PART_BYTES + 5000 < MOST_BYTES_EACH

    frames_of_rank_1(work)
