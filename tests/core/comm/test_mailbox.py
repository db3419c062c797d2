# SPDX-License-Identifier: Apache-2.0
"""Mailboxes over threads and over ZeroMQ: order, capacity, handlers, and what is dropped or refused."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.core.comm.test_mailbox_frames import framed
from thinwire import (
    Comm,
    CommError,
    CommTimeoutError,
    ConfigError,
    CountingComm,
    MismatchError,
    PeerLostError,
    run_threads,
)
from thinwire.core.comm.mailbox import zeromq
from thinwire.core.comm.mailbox.base import Mailbox, Message

LIKE = torch.zeros(1000)
HANDLED = 5
BACKENDS = ["threads", "zeromq"]
Open = Callable[..., Mailbox]


class Owner:
    """The object that a mailbox belongs to."""


@contextmanager
def mailbox(comm: Comm, backend: str, *, like: Tensor = LIKE, capacity: int = 4) -> Iterator[Mailbox]:
    """A mailbox of either backend between threads; ZeroMQ's goes over the loopback."""
    owner = Owner()
    if backend == "threads":
        yield comm.open_mailbox(owner, like, capacity=capacity)
        return
    box = zeromq.ZeroMqMailbox(comm, 1, like, capacity)
    try:
        yield box
    finally:
        comm.all_reduce_(torch.zeros(1)).wait()
        box.close()


def between(size: int, backend: str, work: Callable[[Comm, Mailbox], Any], **settings: Any) -> list[Any]:
    """What `work` returns on each of `size` threads, with a mailbox."""
    timeout = settings.pop("timeout", 10)

    def body(comm: Comm) -> Any:
        with mailbox(comm, backend, **settings) as box:
            return work(comm, box)

    return run_threads(size, body, timeout=timeout)


def soon(ready: Callable[[], bool], seconds: float = 5) -> bool:
    end = time.monotonic() + seconds
    while not ready() and time.monotonic() < end:
        time.sleep(0.005)
    return ready()


def around(comm: Comm, box: Mailbox) -> list[Any]:
    """Three messages to the next rank, and three from the one before."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for i in range(3):
        comm.step = 10 + i
        box.send(after, torch.tensor([comm.rank, i]).double())
    messages = [box.expect(before, torch.zeros(2).double()).wait() for _ in range(3)]
    assert [message.src for message in messages] == [before] * 3
    return [(message.step, message.topic, message.content.tolist()) for message in messages]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [2, 3])
def test_messages_arrive_in_order_with_step_and_sender(backend: str, size: int) -> None:
    for rank, found in enumerate(between(size, backend, around)):
        assert found == [(10 + i, 0, [(rank - 1) % size, i]) for i in range(3)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_dtype_travels_as_it_is(backend: str) -> None:
    kinds = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool]
    sent = [torch.tensor([0, 1, 3]).to(kind) for kind in kinds] + [torch.empty(0)]

    def work(comm: Comm, box: Mailbox) -> list[bool]:
        if comm.rank == 0:
            for x in sent:
                box.send(1, x)
            return []
        return [torch.equal(box.expect(0, x).wait().content, x) for x in sent]

    assert between(2, backend, work, capacity=len(sent))[1] == [True] * len(sent)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_vector_that_was_sent_and_the_one_received_may_be_changed(backend: str) -> None:
    def work(comm: Comm, box: Mailbox) -> list[float]:
        x = torch.full((1000,), float(comm.rank))
        box.send(1 - comm.rank, x)
        x.fill_(-1)
        box.send(1 - comm.rank, x[::2])
        got = [box.expect(1 - comm.rank, like).wait().content for like in (x, x[::2])]
        got[0].add_(5)
        return [float(got[0].min()), float(got[0].max()), float(got[1].max())]

    assert between(2, backend, work) == [[6, 6, -1], [5, 5, -1]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_message_is_ready_once_it_has_arrived(backend: str) -> None:
    posted = threading.Event()

    def work(comm: Comm, box: Mailbox) -> list[bool]:
        if comm.rank == 0:
            comm.all_reduce_(torch.zeros(1)).wait()
            box.send(1, LIKE)
            posted.set()
            return []
        first, second = box.expect(0, LIKE), box.expect(0, LIKE).then(lambda message: message.content)
        before = first.ready
        comm.all_reduce_(torch.zeros(1)).wait()
        found = [before, soon(lambda: first.ready), second.ready]
        first.wait()
        return [*found, first.ready]

    assert between(2, backend, work)[1] == [False, True, False, True]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sender_beyond_the_capacity_waits_until_a_message_is_consumed(backend: str) -> None:
    full = threading.Event()

    def work(comm: Comm, box: Mailbox) -> list[float]:
        if comm.rank == 0:
            for i in range(2):
                box.send(1, torch.tensor([float(i)]))
            full.set()
            box.send(1, torch.tensor([2.0]))
            comm.all_reduce_(torch.zeros(1)).wait()
            return [comm.meter.exposed_seconds]
        full.wait(5)
        time.sleep(0.1)
        edge = box._edges[0]
        assert soon(lambda: edge.received == 2)
        time.sleep(0.05)
        assert edge.received == 2
        got = [float(box.expect(0, torch.zeros(1)).wait().content) for _ in range(3)]
        comm.all_reduce_(torch.zeros(1)).wait()
        return got

    waited, got = between(2, backend, work, capacity=2)
    assert got == [0, 1, 2]
    assert waited[0] > 0.05


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_send_into_a_full_mailbox_times_out(backend: str) -> None:
    def work(comm: Comm, box: Mailbox) -> None:
        comm.step = 3
        if comm.rank == 0:
            box.send(1, LIKE)
            with pytest.raises(
                CommTimeoutError, match=r"rank 0 waited 0\.4 s for room for a message to rank 1 at step 3"
            ):
                box.send(1, LIKE)
        time.sleep(0.6 if comm.rank else 0)

    between(2, backend, work, capacity=1, timeout=0.4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_message_that_never_arrives_times_out_in_wait_and_in_ready(backend: str) -> None:
    def work(comm: Comm, box: Mailbox) -> None:
        comm.step = 7
        if comm.rank == 0:
            words = r"rank 0 waited 0\.4 s for a message from rank 1 at step 7"
            with pytest.raises(CommTimeoutError, match=words):
                box.expect(1, LIKE).wait()
            expected = box.expect(1, LIKE)
            assert not expected.ready
            time.sleep(0.45)
            with pytest.raises(CommTimeoutError, match=words):
                _ = expected.ready
        time.sleep(1.0 if comm.rank else 0)

    between(2, backend, work, timeout=0.4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_has_closed_its_mailbox_is_named(backend: str) -> None:
    def work(comm: Comm, box: Mailbox) -> None:
        if comm.rank == 1:
            box.send(0, LIKE)
            assert box.expect(0, LIKE).wait()
            box.close()
            box.close()
            with pytest.raises(CommError, match="rank 1: this mailbox is closed"):
                box.expect(0, LIKE).wait()
            return
        box.send(1, LIKE)
        assert box.expect(1, LIKE).wait()
        with pytest.raises(
            PeerLostError, match=r"rank 0, step 0, messages: rank 1 has closed its mailbox\. End training on all ranks"
        ):
            box.expect(1, LIKE).wait()

    between(2, backend, work)


def test_a_thread_that_fails_ends_the_waits_for_its_messages() -> None:
    ends: list[str] = []

    def work(comm: Comm, box: Mailbox) -> None:
        if comm.rank == 1:
            raise ZeroDivisionError("on purpose")
        try:
            box.expect(1, LIKE).wait()
        except PeerLostError as error:
            ends.append(str(error))
            raise

    with pytest.raises(ZeroDivisionError):
        between(2, "threads", work)
    assert ends == ["rank 1 was lost at step 0 (ZeroDivisionError: on purpose)"]


# -- handlers ----------------------------------------------------------------------------------------------------------


def serve(box: Mailbox, handler: Callable[[Message], bool], src: tuple[int, ...] = (0,)) -> None:
    box.on_message(HANDLED, handler, like=torch.zeros(1), src=src)


@pytest.mark.parametrize("backend", BACKENDS)
def test_messages_are_handled_while_the_receiver_is_busy(backend: str) -> None:
    asked = threading.Event()

    def work(comm: Comm, box: Mailbox) -> Any:
        if comm.rank == 0:
            box.send(1, torch.tensor([20.0]), topic=HANDLED)
            got = box.expect(1, torch.zeros(1)).wait()
            asked.set()
            return float(got.content)

        def double(message: Message) -> bool:
            box.send(message.src, 2 * message.content)
            return True

        serve(box, double)
        assert asked.wait(5)
        box.process_deferred()
        return comm.meter.by_operation["send_recv"]

    assert between(2, backend, work) == [40.0, 4.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_messages_are_deferred_until_their_handler_accepts_them(backend: str) -> None:
    seen: list[float] = []
    willing = False

    def work(comm: Comm, box: Mailbox) -> None:
        nonlocal willing
        if comm.rank == 0:
            for x in (1.0, 2.0):
                box.send(1, torch.tensor([x]), topic=HANDLED)
            comm.all_reduce_(torch.zeros(1)).wait()
            comm.all_reduce_(torch.zeros(1)).wait()
            return
        comm.all_reduce_(torch.zeros(1)).wait()
        assert soon(lambda: len(box._deferred) == 2)  # the topic has no handler yet
        serve(box, lambda message: willing and not seen.append(float(message.content)))
        box.process_deferred()
        assert seen == []
        willing = True
        box.process_deferred()
        box.process_deferred()
        comm.all_reduce_(torch.zeros(1)).wait()

    between(2, backend, work)
    assert seen == [1, 2]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("flaw", ["fails", "sender", "size"])
def test_an_error_in_a_handler_is_raised_on_the_receiving_rank(backend: str, flaw: str) -> None:
    expected = {
        "fails": (ZeroDivisionError, "on purpose"),
        "sender": (MismatchError, "rank 1: no handler accepts messages on topic 5 from rank 0"),
        "size": (MismatchError, "rank 0 sent 2 x float32 at its step 0, rank 1 expects 1 x float32"),
    }

    def fail(message: Message) -> bool:
        raise ZeroDivisionError("on purpose")

    def work(comm: Comm, box: Mailbox) -> None:
        if comm.rank == 0:
            comm.all_reduce_(torch.zeros(1)).wait()
            box.send(1, torch.zeros(2 if flaw == "size" else 1), topic=HANDLED)
            return
        serve(box, fail, () if flaw == "sender" else (0,))
        comm.all_reduce_(torch.zeros(1)).wait()
        assert soon(lambda: box._fault is not None)
        for call in (box.process_deferred, lambda: box.expect(0, LIKE).ready, box.expect(0, LIKE).wait):
            with pytest.raises(expected[flaw][0], match=expected[flaw][1]):
                call()

    between(2, backend, work)


# -- order, duplicates, capacity ---------------------------------------------------------------------------------------


def message(value: float, topic: int = 0) -> Message:
    return Message(1, 0, topic, torch.tensor([value]))


def box_of_rank_0(capacity: int = 4) -> Mailbox:
    comm = CountingComm(0, 2, timeout=0.2)
    return comm.open_mailbox(comm, LIKE, capacity=capacity)


def received(box: Mailbox) -> list[float]:
    return [float(box._edges[1].inbox[n].content) for n in sorted(box._edges[1].inbox)]


def test_messages_that_overtake_each_other_are_put_in_order() -> None:
    box = box_of_rank_0()
    for number in (2, 0, 3, 1):
        box._deliver(message(float(number)), number)
    assert received(box) == [0, 1, 2, 3]
    assert box.duplicates == 0


def test_messages_that_arrive_twice_are_dropped_and_counted() -> None:
    box = box_of_rank_0()
    seen: list[float] = []
    box.on_message(HANDLED, lambda each: not seen.append(float(each.content)), like=torch.zeros(1), src=[1])
    for number, topic in ((0, 0), (0, 0), (2, HANDLED), (2, HANDLED), (1, 0), (1, 0), (2, HANDLED)):
        box._deliver(message(float(number), topic), number)
    assert received(box) == [0, 1]
    assert seen == [2]
    assert box.duplicates == 4


def test_a_message_beyond_the_capacity_shows_that_one_was_lost() -> None:
    box = box_of_rank_0(capacity=2)
    box._deliver(message(1.0), 1)
    box._deliver(message(2.0), 2)
    with pytest.raises(CommError, match=r"rank 0: message 0 of rank 1 was lost on the way"):
        box.process_deferred()


def test_acknowledgements_that_are_late_or_too_large_add_no_capacity() -> None:
    box = box_of_rank_0()
    edge = box._edges[1]
    edge.sent, edge.acknowledged = 5, 3
    box._on_acknowledgement(1, 2)
    assert edge.acknowledged == 3
    box._on_acknowledgement(1, 99)
    assert edge.acknowledged == 5


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_messages_that_cannot_be_sent_are_refused() -> None:
    box = box_of_rank_0()
    for dst in (0, 2, -1):
        with pytest.raises(ConfigError, match=rf"a message from rank 0 to rank {dst}: the destination must be another"):
            box.send(dst, LIKE)
    with pytest.raises(ConfigError, match="a message of 8000 bytes: this mailbox was opened for at most 4000"):
        box.send(1, LIKE.double())


def test_a_mailbox_has_a_capacity_and_an_owner() -> None:
    comm, owner = CountingComm(0, 2), Owner()
    with pytest.raises(ConfigError, match="capacity=0: must be at least 1 message"):
        comm.open_mailbox(owner, LIKE, capacity=0)
    with pytest.raises(
        ConfigError, match=r"rank 0: no mailbox is open for .*Owner.*\. Call open_mailbox\(\.\.\.\) on all"
    ):
        comm.mailbox(owner)
    first = comm.open_mailbox(owner, LIKE)
    second = comm.open_mailbox(owner, LIKE)
    assert comm.mailbox(owner) is second is not first
    assert first._closed
    comm.close_mailbox(owner)
    comm.close_mailbox(owner)
    with pytest.raises(ConfigError, match="no mailbox is open"):
        comm.mailbox(owner)


def test_a_comm_without_mailboxes_is_named() -> None:
    class Plain(CountingComm):
        _open_mailbox = Comm._open_mailbox

    with pytest.raises(ConfigError, match=r"Plain has no mailboxes\. Use a process group, threads or a counter"):
        Plain(0, 2).open_mailbox(Owner(), LIKE)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_message_of_another_dtype_is_named_by_its_receiver(backend: str) -> None:
    def work(comm: Comm, box: Mailbox) -> None:
        if comm.rank == 0:
            comm.step = 4
            box.send(1, torch.zeros(3))
            return
        with pytest.raises(MismatchError, match="rank 0 sent 3 x float32 at its step 4, rank 1 expects 3 x float64"):
            box.expect(0, torch.zeros(3).double()).wait()

    between(2, backend, work)


def test_without_zeromq_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ConfigError, match=r"messages between processes need pyzmq\. Install it with pip install"):
        zeromq.ZeroMqMailbox(CountingComm(0, 2), 1, LIKE, 4)


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_meter_counts_messages_and_not_acknowledgements(backend: str) -> None:
    def work(comm: Comm, box: Mailbox) -> tuple[float, int, list[tuple[str, str]]]:
        before = comm.meter.payload_bytes
        comm.meter.tracing = True
        around(comm, box)
        kinds = [(each.kind, each.name) for each in comm.meter.intervals]
        return comm.meter.payload_bytes - before, comm.meter.messages, kinds

    for nbytes, messages, kinds in between(2, backend, work):
        assert nbytes == 3 * 16
        assert messages == 3 + (backend == "zeromq")  # its ranks exchange their addresses
        assert kinds == [("communication", "message"), ("wait", "message")] * 3


def test_counting_has_every_message_at_once_and_counts_both_directions() -> None:
    class Recording(CountingComm):
        def _send_recv(self, x: Tensor, dst: Any, src: Any) -> Any:
            exchanges.append((x.numel(), tuple(dst), tuple(src)))
            return super()._send_recv(x, dst, src)

    exchanges: list[Any] = []
    comm = Recording(1, 4)
    owner, x = Owner(), torch.empty(1_000_000_000, device="meta")
    box = comm.open_mailbox(owner, x, capacity=1)
    for _ in range(3):
        box.send(2, x)
    expected = box.expect(3, x)
    assert expected.ready
    assert expected.wait().content.shape == x.shape
    box.on_message(HANDLED, lambda each: box.send(each.src, each.content) is None, like=x, src=[0, 2])
    box.on_message(HANDLED + 1, lambda each: False, like=x, src=[0, 2])
    box.process_deferred()
    box.process_deferred()
    assert comm.meter.by_operation == {"send_recv": 20e9}
    n = x.numel()
    assert exchanges[:4] == [(n, (2,), ())] * 3 + [(n, (), (3,))]
    assert exchanges[4:] == [(n, (), (0,)), (n, (0,), ()), (n, (), (2,)), (n, (2,), ())]


# -- scripted delay ----------------------------------------------------------------------------------------------------


def test_a_delayed_message_is_ready_that_many_steps_later_whichever_thread_is_faster() -> None:
    def work(comm: Comm) -> list[list[bool]]:
        owner = Owner()
        box = comm.open_mailbox(owner, LIKE, capacity=8)
        seen: list[list[bool]] = []
        works = []
        for step in range(6):
            comm.step = step
            if comm.rank == 0:
                time.sleep(0.01)
                box.send(1, torch.tensor([float(step)]))
            else:
                works.append(box.expect(0, torch.zeros(1)))
                seen.append([each.ready for each in works])
        if comm.rank:
            assert [float(each.wait().content) for each in works] == [0, 1, 2, 3, 4, 5]
        return seen

    seen = run_threads(2, work, delay=lambda src, dst, step: 2 + step % 2)[1]
    assert seen == [[k >= s + 2 + s % 2 for s in range(k + 1)] for k in range(6)]


# -- what is not to be trusted -----------------------------------------------------------------------------------------


def frames_of_rank_1(work: Callable[[Mailbox, Callable[..., None]], None]) -> None:
    """Call `work` on rank 0 with a function that sends any parts from rank 1's authenticated socket."""

    def body(comm: Comm, box: Mailbox) -> None:
        assert isinstance(box, zeromq.ZeroMqMailbox)
        sockets[comm.rank] = box._sockets
        comm.all_reduce_(torch.zeros(1)).wait()
        if comm.rank == 1:
            comm.all_reduce_(torch.zeros(1)).wait()
            return

        def send(x: Tensor, **changes: Any) -> None:
            sockets[1].connect(0, box._addresses[0])
            parts = framed(x, **{"run": box._run, "epoch": 1, "dst": 0, "src": 1, "number": 0, "topic": 0} | changes)
            assert sockets[1].send(0, parts)

        work(box, send)
        comm.all_reduce_(torch.zeros(1)).wait()

    sockets: dict[int, zeromq.Sockets] = {}
    between(2, "zeromq", body)


def test_frames_for_others_or_in_another_s_name_are_dropped_and_counted() -> None:
    def work(box: Mailbox, send: Callable[..., None]) -> None:
        assert isinstance(box, zeromq.ZeroMqMailbox)
        for changes in ({"epoch": 2}, {"dst": 1}, {"run": 5}, {"src": 0}, {"src": 99}):
            send(LIKE, **changes)
        assert soon(lambda: box.foreign_frames == 5)
        send(LIKE)
        assert torch.equal(box.expect(1, LIKE).wait().content, LIKE)

    frames_of_rank_1(work)


@pytest.mark.parametrize(
    ("x", "changes", "words"),
    [
        (LIKE, {"nbytes": 5}, "from rank 1: message 0 of rank 1 is damaged: it has .* bytes. Its header announces 5. "),
        (LIKE[:3].to(torch.int8), {"dtype": 0}, "message 0 of rank 1 is damaged: 3 bytes are not a vector of float32"),
        (LIKE[:3].to(torch.int8), {"dtype": 2}, "message 0 of rank 1 is damaged: 3 bytes are not a vector of bfloat16"),
        (LIKE, {"number": 4}, "message 0 of rank 1 was lost on the way"),
    ],
    ids=["size", "fp32", "bf16", "number"],
)
def test_a_damaged_frame_is_an_error_that_names_its_sender(x: Tensor, changes: dict[str, int], words: str) -> None:
    def work(box: Mailbox, send: Callable[..., None]) -> None:
        send(x, **changes)
        assert soon(lambda: box._fault is not None)
        with pytest.raises(CommError, match=f"rank 0.*{words}"):
            box.process_deferred()

    frames_of_rank_1(work)


def test_a_rank_that_sends_on_without_acknowledgements_is_stopped() -> None:
    def work(box: Mailbox, send: Callable[..., None]) -> None:
        for number in range(5):
            send(LIKE, number=number)
        assert soon(lambda: box._fault is not None)
        assert box._edges[1].received == 4
        with pytest.raises(CommError, match="rank 0: rank 1 sent more than 4 messages that were not consumed yet"):
            box.process_deferred()

    frames_of_rank_1(work)


def test_a_vector_of_many_parts_arrives_whole() -> None:
    x = torch.arange(300_000.0)

    def work(comm: Comm, box: Mailbox) -> bool:
        box.send(1 - comm.rank, x + comm.rank)
        return torch.equal(box.expect(1 - comm.rank, x).wait().content, x + 1 - comm.rank)

    assert between(2, "zeromq", work, like=x) == [True, True]


def test_a_pyzmq_without_encryption_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import zmq

    monkeypatch.setattr(zmq, "has", lambda capability: False)
    with pytest.raises(ConfigError, match="this pyzmq was built without CURVE"):
        zeromq.ZeroMqMailbox(CountingComm(0, 2), 1, LIKE, 4)


def test_an_owner_that_tolerates_losses_asks_drops_and_dismisses() -> None:
    def body(comm: Comm) -> list[object]:
        box = comm.open_mailbox(owner := Owner(), torch.zeros(1))
        comm.all_gather(torch.zeros(1)).wait()
        if comm.rank == 2:
            box.close()
            comm.all_gather(torch.zeros(1)).wait()
            return []
        box.tolerant = True
        comm.all_gather(torch.zeros(1)).wait()
        found: list[object] = [box.lost_among([1 - comm.rank, 2]), box.has_ended(2), box.has_ended(1 - comm.rank)]
        for _ in range(9):
            box.send(2, torch.ones(1))  # more than its capacity
        box.send(1 - comm.rank, torch.ones(1))
        found.append(box.expect(1 - comm.rank, torch.zeros(1)).wait().src)
        box.dismiss([2])
        with box.changed, pytest.raises(PeerLostError, match="rank 2 has closed its mailbox"):
            box.wait_until(lambda: [2], "a rank that is dismissed")
        del owner
        return found

    assert run_threads(3, body, timeout=10)[:2] == [[[2], True, False, 1], [[2], True, False, 0]]
