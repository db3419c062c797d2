# SPDX-License-Identifier: Apache-2.0
"""Create the default process group from the variables that torchrun sets."""

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
# PyTorch's own timeout comes first, since its error names the address. It does not apply if the host has stopped.
_LINGER_SECONDS = 5.0
_POLL_SECONDS = 0.02


def started_by_torchrun() -> bool:
    """Return True if torchrun, or a launcher that sets the same variables, started this process."""
    return set(_NAMES) <= os.environ.keys()


def init_process_group(device: torch.device, timeout: float) -> None:
    """Create the default process group from the environment; of one process without torchrun's variables.

    Args:
        device: the CPU for Gloo; a GPU for NCCL, with Gloo for tensors on the CPU. The GPU becomes the current one;
            without an index, the process's local rank is the index.
        timeout: how long the ranks wait for each other, now and in each wait, in seconds.

    Raises:
        CommTimeoutError: not all ranks connected in time.
    """
    # Data that is not trained stays on the CPU, so CUDA runs need Gloo too.
    backend, limit = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timedelta(seconds=timeout)
    if not started_by_torchrun():
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=limit)
        return
    if device.type == "cuda":
        # If each process sees only one GPU, all of them use the first, whatever their local rank.
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
            f"rank {rank}: not all {size} workers connected to {host}:{port} in {timeout:g} s ({first}). See the "
            f"output of the other ranks, and check that this rank can reach that address{hint}"
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
    """Return True if torchrun's agent hosts the store, which then keeps the keys of restarted workers."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def start_of_ranks(store: Store, rank: int, size: int, timeout: float) -> str:
    """Agree on a random name for this start of all ranks, so that no rank reads keys of an earlier start.

    torchrun's restart count does not suffice: each node counts its own, and joining nodes are not counted.

    Args:
        store: the rendezvous store; may hold keys of earlier starts.
        rank: the rank of this process.
        size: the number of ranks.
        timeout: how long to wait for the others, in seconds.

    Returns:
        The name, equal on all ranks of this start.

    Raises:
        TimeoutError: not all ranks arrived in time; the error names the missing ones that this rank knows of.
    """
    end, own, proposed, name = time.monotonic() + timeout, secrets.token_hex(8), [""], ""
    if size == 1:
        return own
    store.set(f"present/{rank}", own)
    others = [f"present/{each}" for each in range(1, size)]
    while True:
        if rank == 0:
            # A restarted rank replaces the value of its predecessor. Every rank whose value was proposed must confirm,
            # so that ranks never agree on a start with a predecessor in it.
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
            raise TimeoutError(f"rank {ranks} did not arrive")
        time.sleep(_POLL_SECONDS)


def open_store(timeout: timedelta) -> Store:
    """Open the rendezvous store of torchrun's variables; rank 0 hosts it, unless torchrun's agent does.

    If all ranks are on this machine, it listens on the loopback interface only.

    Args:
        timeout: how long to try to reach the store.

    Raises:
        RuntimeError: the store cannot be reached.
        OSError: its port is taken.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if _is_local(address):
        return _local_store(address, port, size, timeout, hosts=rank == 0)
    hosts = rank == 0 and not store_outlives_workers()
    return TCPStore(address, port, size, hosts, timeout, wait_for_workers=False)


def _is_local(address: str) -> bool:
    """Return True if rank 0 hosts the store for this machine only."""
    if store_outlives_workers():
        return False
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _local_store(address: str, port: int, size: int | None, timeout: timedelta, *, hosts: bool = True) -> TCPStore:
    """Open a store that listens on one address; torch's own would listen on every interface."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family, backlog=512) if hosts else None
    return TCPStore(
        address,
        port if listener is None else int(listener.getsockname()[1]),
        size,
        is_master=hosts,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),  # the store closes it
    )


def view_store(prefix: str, store: Store | None, *, several: bool, timeout: float) -> Store:
    """Open the part of a store in which elastic workers agree on their views; it outlives every worker.

    Args:
        prefix: the prefix of the keys.
        store: the user's store; None uses that of `THINWIRE_STORE=host:port`, or of torchrun's agent.
        several: whether the run starts with more than this process.
        timeout: how long to try to reach it, in seconds.

    Raises:
        ConfigError: no store outlives the workers.
        CommTimeoutError: the store cannot be reached.
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
            "elastic=True needs a store that outlives the workers: rank 0 would host this one, and its loss would end "
            "the run. Start `thinwire store` and set THINWIRE_STORE to the address that it prints, or use torchrun"
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
    """Make a store that the threads of this process share."""
    return HashStore()


def host_store(host: str, port: int) -> TCPStore:
    """Host a store for elastic workers in this process; it lives as long as the object.

    Args:
        host: the address to listen on.
        port: the port; 0 takes any free one.

    Raises:
        OSError: the address cannot be used.
    """
    return _local_store(host, port, None, timedelta(seconds=30))
