# SPDX-License-Identifier: Apache-2.0
"""Make the default process group from the variables that torchrun sets."""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import socket
import time
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from thinwire.core.comm.roll_call import within
from thinwire.errors import CommTimeoutError, ConfigError

_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# PyTorch's own limit comes first, since its error names the address; a store whose host has stopped has no limit.
_LINGER_SECONDS = 5.0
_POLL_SECONDS = 0.02


def started_by_torchrun() -> bool:
    """Whether torchrun, or something that sets the same variables, started this process."""
    return set(_NAMES) <= os.environ.keys()


def init_process_group(device: torch.device, timeout: float) -> None:
    """Make the default process group from the environment; without torchrun's variables, one of this process alone.

    Args:
        device: the CPU for Gloo; a GPU for NCCL, with Gloo for tensors on the CPU. It becomes the current one; without
            an index it is the one of the process's number on this machine.
        timeout: how long the ranks wait for each other, now and in each wait, in seconds.

    Raises:
        CommTimeoutError: not all ranks connected in time.
    """
    # What is not trained stays on the CPU, so CUDA runs need Gloo too.
    backend, limit = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timedelta(seconds=timeout)
    if not started_by_torchrun():
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=limit)
        return
    if device.type == "cuda":
        # Where each process sees one GPU only, all of them have the first, whatever their number.
        own = cast("int | None", device.index)  # torch's stubs do not know None
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) if own is None else own)
    try:
        within(timeout + _LINGER_SECONDS, lambda: _connect(backend, limit))
    except (RuntimeError, OSError) as error:
        rank, size, host, port = (os.environ[name] for name in _NAMES)
        first = (str(error) or "timed out").splitlines()[0][:200]
        # The agents of some versions of torch then name different stores.
        hint = ". If nodes have joined (--nnodes MIN:MAX), start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
        hint = hint if store_outlives_workers() else ""
        raise CommTimeoutError(
            f"rank {rank}: not all {size} workers connected to {host}:{port} in {timeout:g} s ({first}); see what "
            f"the other ranks print, and whether this one can reach that address{hint}"
        ) from error


def _connect(backend: str, timeout: timedelta) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if store_outlives_workers():
        store = open_store(timeout)
        store = PrefixStore(start_of_ranks(PrefixStore("thinwire", store), rank, size, timeout.total_seconds()), store)
    elif _is_local(os.environ["MASTER_ADDR"]):
        store = open_store(timeout)
    else:
        dist.init_process_group(backend, timeout=timeout)
        return
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def store_outlives_workers() -> bool:
    """Whether torchrun's agent hosts the rendezvous store, which then holds the keys of workers that were restarted."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def start_of_ranks(store: Store, rank: int, size: int, timeout: float) -> str:
    """Agree on a random name for this start of all ranks, so that keys of an earlier start are never read.

    torchrun's count of restarts is no such name: each node counts its own, and none counts the nodes that join.

    Args:
        store: may hold keys of earlier starts.
        rank: of this process.
        size: the number of ranks.
        timeout: how long to wait for the others, in seconds.

    Returns:
        The name, equal on all ranks of this start.

    Raises:
        TimeoutError: not all ranks came in time; says which did not, as far as this rank knows.
    """
    end, own, proposed, name = time.monotonic() + timeout, secrets.token_hex(8), [""], ""
    if size == 1:
        return own
    store.set(f"present/{rank}", own)
    others = [f"present/{each}" for each in range(1, size)]
    while True:
        if rank == 0:
            # A rank that was restarted replaces what its predecessor has left. Who was proposed must confirm, so that
            # a start with a predecessor in it is never agreed on.
            if store.check(others) and (present := [own, *(store.get(each).decode() for each in others)]) != proposed:
                proposed, name = present, secrets.token_hex(8)
                store.set("proposal", json.dumps([name, *present]))
            if name and store.check([f"{name}/{each}" for each in others]):
                store.set(f"{name}/agreed", "")
                return name
        elif store.check(["proposal"]):
            found, *present = json.loads(store.get("proposal"))
            if len(present) == size and present[rank] == own:
                if found != name:
                    store.set(f"{found}/present/{rank}", "")
                    name = found
                if store.check([f"{name}/agreed"]):
                    return name
        if time.monotonic() > end:
            missing = [each for each in others if not store.check([f"{name}/{each}" if name else each])]
            ranks = ", ".join(each.rpartition("/")[2] for each in missing) if rank == 0 else "0, or one that it awaits,"
            raise TimeoutError(f"rank {ranks} has not come")
        time.sleep(_POLL_SECONDS)


def open_store(timeout: timedelta) -> Store:
    """The rendezvous store that torchrun's variables name; rank 0 hosts it, unless torchrun's agent does.

    Where all ranks are on this machine it listens on the loopback alone.

    Args:
        timeout: how long to try to reach it.

    Raises:
        RuntimeError: it cannot be reached.
        OSError: its port is taken.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if _is_local(address):
        return _loopback_store(address, port, rank, size, timeout)
    hosts = rank == 0 and not store_outlives_workers()
    return TCPStore(address, port, size, hosts, timeout, wait_for_workers=False)


def _is_local(address: str) -> bool:
    """Whether rank 0 hosts the store for this machine only."""
    if store_outlives_workers():
        return False
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _loopback_store(address: str, port: int, rank: int, size: int, timeout: timedelta) -> Store:
    """A store that listens on the loopback; torch's own listens on every interface, and serves anyone."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family, backlog=128) if rank == 0 else None
    return TCPStore(
        address,
        port,
        size,
        is_master=rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),  # the store closes it
    )


def view_store(prefix: str, store: Store | None, *, several: bool, timeout: float) -> Store:
    """A part of the store in which elastic workers agree on who they are; it outlives every worker.

    Args:
        prefix: of the keys.
        store: given by the user; None is that of `THINWIRE_STORE=host:port`, or of torchrun's agent.
        several: whether the run begins with more than this process.
        timeout: how long to try to reach it, in seconds.

    Raises:
        ConfigError: no store is named that outlives the workers.
        CommTimeoutError: it cannot be reached.
    """
    if store is not None:
        return PrefixStore(prefix, store)
    address = os.environ.get("THINWIRE_STORE")
    if address is None and store_outlives_workers():
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    if address is None:
        if not several:
            return PrefixStore(prefix, memory_store())
        raise ConfigError(
            "elastic=True without a store that outlives the workers: rank 0 would host it, and its loss would end the "
            "run; start `thinwire store` and set THINWIRE_STORE to the address that it prints, or use torchrun"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"THINWIRE_STORE={address}: must be HOST:PORT, as `thinwire store` prints it")
    limit = timedelta(seconds=timeout)
    try:
        found = within(
            timeout + _LINGER_SECONDS,
            lambda: TCPStore(host.strip("[]"), int(port), None, False, limit, wait_for_workers=False),
        )
    except (RuntimeError, OSError) as error:
        first = (str(error) or "timed out").splitlines()[0][:200]
        raise CommTimeoutError(
            f"the store of workers at {address} cannot be reached in {timeout:g} s ({first})"
        ) from None
    return PrefixStore(prefix, found)


def memory_store() -> Store:
    """A store that the threads of this process share."""
    return HashStore()


def host_store(host: str, port: int) -> TCPStore:
    """A store in this process, for elastic workers; it lives as long as the object.

    Args:
        host: the address that it listens on.
        port: 0 takes any free one.

    Raises:
        OSError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=512)
    found = int(listener.getsockname()[1])
    return TCPStore(
        host,
        found,
        None,
        is_master=True,
        timeout=timedelta(seconds=30),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store closes it
    )
