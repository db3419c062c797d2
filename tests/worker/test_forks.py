# SPDX-License-Identifier: Apache-2.0
"""Forks of a process with an attached or a detached model: a DataLoader's workers, k-fold loops, notebooks."""

from __future__ import annotations

import atexit
import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine import attach, batches, sgd, steps
from tests.pool import run_processes
from thinwire import ConfigError
from thinwire.core.comm.group import GroupComm
from thinwire.elastic.notice import Notice
from thinwire.worker.worker import Worker

RECIPES = ["AllReduce()", "EagerPushSum()"]  # with a mailbox


def in_fork(work: Callable[[], object]) -> str:
    """Call a function in a fork, and its exit handlers; returns "" or what went wrong."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)  # ends a fork that hangs
        try:
            work()
            atexit._run_exitfuncs()
            os._exit(0)
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
            os._exit(1)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    status = os.waitpid(pid, 0)[1]
    return text or ("" if status == 0 else f"ended with status {status}")


def attached(recipe: str) -> tuple[nn.Module, Worker]:
    model = nn.Linear(3, 2)
    return model, attach(None, recipe, model=model, optimizer=sgd, timeout=20)


def fork_after_detach(recipe: str) -> list[str]:
    found: list[str] = []
    gc.freeze()  # so that a collection is quick
    gc.disable()  # so that a fork collects what the parent has left
    for _ in range(2):
        model, worker = attached(recipe)
        steps(worker, batches(worker.rank, 1))
        worker.detach()
        del model, worker
        found.append(in_fork(gc.collect))
    return found


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_fork_after_detach_ends_and_harms_nobody(recipe: str) -> None:
    assert run_processes(2, fork_after_detach, recipe) == [["", ""]] * 2


def fork_without_detach(recipe: str) -> tuple[str, str, str, bool]:
    gc.freeze()
    gc.disable()
    model, worker = attached(recipe)
    steps(worker, batches(worker.rank, 1))
    left: list[Any] = [model, worker]
    del model, worker
    dropped = in_fork(lambda: (left.clear(), gc.collect()))
    model, worker = left
    detached = in_fork(worker.detach)

    def save() -> None:
        with worker.consensus():
            pass

    used = in_fork(save)
    steps(worker, batches(worker.rank, 3))  # the parent continues
    with worker.consensus():
        norm = model.weight.detach().norm().reshape(1)
    others = [row.item() for row in worker.comm.all_gather(norm).wait()]
    worker.detach()
    return dropped, detached, used, len(set(others)) == 1


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_fork_of_an_attached_process_communicates_with_nobody(recipe: str) -> None:
    for rank, (dropped, detached, used, equal) in enumerate(run_processes(2, fork_without_detach, recipe)):
        assert dropped == detached == ""
        assert used.startswith("ConfigError: process "), used
        assert f"is a fork of rank {rank}: only the process that attached the model can communicate" in used
        assert equal


def leave_the_group_to_a_fork() -> str:
    """The comm is dropped while its process group was destroyed by its user."""
    comm = [GroupComm(timeout=20)]
    comm[0].all_reduce_(torch.ones(3)).wait()
    torch.distributed.destroy_process_group()
    return in_fork(comm.clear)


def test_a_fork_drops_a_comm_whose_group_was_destroyed() -> None:
    assert run_processes(2, leave_the_group_to_a_fork) == ["", ""]


def attach_and_detach_often(recipe: str) -> tuple[list[int], list[int]]:
    threads: list[int] = []
    descriptors: list[int] = []
    gc.disable()  # nothing is left to it
    for _ in range(4):
        _, worker = attached(recipe)
        steps(worker, batches(worker.rank, 1))
        worker.detach()
        worker.detach()  # does nothing
        threads.append(len(list(Path("/proc/self/task").iterdir())))
        descriptors.append(len(list(Path("/proc/self/fd").iterdir())))
    return threads, descriptors


@pytest.mark.parametrize("recipe", RECIPES)
def test_detach_closes_connections_and_ends_threads_at_once(recipe: str) -> None:
    for threads, descriptors in run_processes(2, attach_and_detach_often, recipe):
        assert threads[1:] == threads[:1] * 3
        assert max(descriptors) == descriptors[0]


def call_after_detach() -> str:
    model, worker = attached("LocalSGD(period=2)")
    own, comm = worker.comm, GroupComm(timeout=20)
    worker.detach()
    try:
        own.all_reduce_(torch.ones(1)).wait()
    except ConfigError as error:
        text = str(error)
    # One that the user has made stays open.
    attach(comm, "LocalSGD(period=2)", model=model).detach()
    return f"{text} {comm.all_reduce_(torch.ones(1)).wait().item()}"


def test_a_detached_worker_has_no_connections_but_its_users_comm_has() -> None:
    for rank, text in enumerate(run_processes(2, call_after_detach)):
        assert text == f"rank {rank}: this comm was disconnected. Attach the model again 2.0"


def test_signals_end_a_fork_as_before() -> None:
    _, worker = attached("AllReduce()")
    before = signal.getsignal(signal.SIGUSR1)
    notice = Notice(worker, signals=[signal.SIGUSR1])

    def check() -> None:
        assert signal.getsignal(signal.SIGUSR1) is before

    try:
        assert in_fork(check) == ""
        assert signal.getsignal(signal.SIGUSR1) is not before
    finally:
        notice.close()
