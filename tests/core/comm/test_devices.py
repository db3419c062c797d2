# SPDX-License-Identifier: Apache-2.0
"""Which GPU and which stream a rank's work is put on; nothing here needs a GPU."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.pretend_gpu import GPU, pretend_gpu
from thinwire import Comm, CommTimeoutError, run_threads
from thinwire.core.comm import rendezvous
from thinwire.core.comm.group import comm_for
from thinwire.core.comm.mailbox.base import Message
from thinwire.core.kernels.base import on_its_device


class Owner:
    """The object that a mailbox belongs to."""


@pytest.mark.parametrize(("device", "taken"), [("cuda:0", 0), ("cuda", 3)])
def test_a_group_that_is_made_here_takes_the_model_s_gpu(
    device: str, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[int] = []
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "3")
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(rendezvous, "_connect", lambda *_: None)
    rendezvous.init_process_group(torch.device(device), 1.0)
    assert chosen == [taken], "processes that see one GPU each have the first, whatever their number"


def test_over_nccl_alone_the_checks_lie_on_the_model_s_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(dist, "get_backend_config", lambda group=None: "cuda:nccl")
        assert comm_for(device=torch.device("cuda", 1)).check_device == torch.device("cuda", 1)
        monkeypatch.setattr(dist, "get_backend_config", lambda group=None: "cpu:gloo,cuda:nccl")
        assert comm_for(device=torch.device("cuda", 1)).check_device == torch.device("cpu")
    finally:
        dist.destroy_process_group()


def test_a_handler_s_work_is_in_the_stream_of_the_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[Any] = []

    def stream(which: Any) -> Any:
        entered.append(which)
        return nullcontext()

    def work(comm: Comm) -> None:
        own = Owner()
        box = comm.open_mailbox(own, torch.zeros(2, device=GPU))
        box.on_message(5, lambda message: True, like=torch.zeros(2, device=GPU), src=[1 - comm.rank])
        comm.all_reduce_(torch.zeros(1)).wait()
        now[comm.rank] = f"second of {comm.rank}"
        box = comm.mailbox(own)  # as each step does
        comm.all_reduce_(torch.zeros(1)).wait()
        if comm.rank == 0:
            box.send(1, torch.zeros(2, device=GPU), topic=5)  # handled in this thread, which is not rank 1's
        comm.all_reduce_(torch.zeros(1)).wait()

    now = {0: "first of 0", 1: "first of 1"}
    ranks = threading.local()

    def body(comm: Comm) -> None:
        ranks.number = comm.rank
        work(comm)

    with pretend_gpu():
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now[ranks.number])
        monkeypatch.setattr(torch.cuda, "stream", stream)
        run_threads(2, body, timeout=20)
    assert entered == ["second of 1"]


def test_errors_at_the_end_of_a_backward_pass_in_autograd_s_thread_are_the_training_s() -> None:
    def work(comm: Comm) -> list[str]:
        box = comm.open_mailbox(Owner(), torch.zeros(1))
        asked: list[str] = []

        def failure(waiting_for: str, problem: str, *, late: bool, closed: bool = False) -> CommTimeoutError:
            asked.append(waiting_for)
            return CommTimeoutError(waiting_for)

        comm.failure = failure  # type: ignore[method-assign]

        def in_autograd() -> None:
            box._timeout_error("before")
            with box.in_thread_of_owner():
                box._timeout_error("within")
            box._timeout_error("after")

        thread = threading.Thread(target=in_autograd)
        thread.start()
        thread.join()
        box._timeout_error("here")
        return asked

    assert run_threads(2, work, timeout=20) == [["within", "here"]] * 2


def test_a_kernel_is_launched_on_its_tensor_s_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[Tensor] = []

    def device_of(x: Tensor) -> Any:
        entered.append(x)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    x = torch.ones(2)
    assert on_its_device(lambda first, scale, *, shift: (first * scale + shift).tolist())(x, 2, shift=1) == [3, 3]
    assert len(entered) == 1
    assert entered[0] is x


def test_a_message_keeps_its_device() -> None:
    def work(comm: Comm) -> str:
        like, heard = torch.zeros(2, device=GPU), list[Message]()
        box = comm.open_mailbox(Owner(), like)
        # What comes over ZeroMQ lies in the host's memory.
        heard.append(box._checked(Message(1 - comm.rank, 0, 5, torch.zeros(2)), like))
        return str(heard[0].content.device)

    with pretend_gpu():
        assert run_threads(2, work, timeout=20) == ["cuda:0"] * 2
