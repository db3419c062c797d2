# SPDX-License-Identifier: Apache-2.0
"""Sealed objects of one run in an object store or a shared folder.

    run                 the salt of the run, and a text that proves that a key is the key of the run
    store/KEY/N         version N of a key of `BucketStore`; each version is created once
    hint/KEY            a key of `BucketStore` that is overwritten, such as a heartbeat
    calls/...           messages of `thinwire.core.comm.bucket`

Every object is encrypted and authenticated by ChaCha20-Poly1305. The key is derived by HKDF from the run key and the
salt, and the object's name is the associated data. So an object cannot be read, forged, or moved to another name or to
another run. Only create-if-absent, put, get, list and delete are used, and no clock.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlparse

from thinwire.core.validation import printable
from thinwire.errors import CommError, ConfigError

T = TypeVar("T")
KEY = "THINWIRE_KEY"
SCHEMES = ("s3", "gs", "az", "file", "memory")
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_MAGIC = b"thinwire bucket 1\n"
_SALT_BYTES, _NONCE_BYTES, _TAG_BYTES = 16, 12, 16
SEAL_BYTES = _NONCE_BYTES + _TAG_BYTES
_PROOF = b"this is the key of the run"
_NAME = re.compile(r"[A-Za-z0-9._=-]+(/[A-Za-z0-9._=-]+)*")
_OF_RUN = re.compile(r"run$|probe/[0-9a-f]{16}$|\d+/(store|hint|calls|late)/")
_MOST_RECORD_BYTES = 1 << 20
_REQUEST_SECONDS, _SLOWEST = 20.0, 50_000.0  # a request may take this long, plus its bytes at 50 kB/s
_STALLED_SECONDS = 10  # of a read from which nothing arrives
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0  # seconds between attempts of a failed request
_SHOWN_SECONDS = 1.0  # after which a store shows an object that it has refused to overwrite
_READS = 3  # of an object that is damaged, perhaps on the way
_RACERS = 4
_MOST_DELETES = 200  # requests at a time, each of which may need a connection
_SEALERS = 2  # threads
_FIXES = {
    "Skewed": "Set this machine's clock, for example by NTP",
    "Expired": "Get new credentials, and start this worker again",
}
"""By a part of the code of a store's error."""
_memory: dict[str, Any] = {}


def new_key() -> str:
    """Draw a run key: 32 random bytes as 43 characters, for THINWIRE_KEY on every machine of the run."""
    return secrets.token_urlsafe(32)


def check_url(url: str) -> str:
    """Return the scheme of a run's URL.

    Raises:
        ConfigError: it is no URL of a bucket or a folder.
    """
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in SCHEMES or not rest.strip("/"):
        known = ", ".join(f"{each}://" for each in SCHEMES)
        raise ConfigError(
            f"rendezvous={url!r}: is not the URL of a run. It must start with one of {known}, followed by a bucket "
            "and a path, as in s3://bucket/run, or by the absolute path of a folder, as in file:///mnt/share/run"
        )
    if scheme == "file" and not rest.startswith("/"):
        raise ConfigError(f"rendezvous={url!r}: the path must be absolute. Write file:///{rest}")
    return scheme


@dataclass
class Traffic:
    """The requests of this process to the store, and their bytes (seals included, HTTP headers not)."""

    puts: int = 0
    gets: int = 0
    lists: int = 0
    deletes: int = 0
    bytes_up: int = 0
    bytes_down: int = 0


class Bucket:
    """The sealed objects under one URL. `Bucket.open` checks the store and the key first.

    Every method is a coroutine; `wait` runs one from any thread. Failed requests raise a `ConnectionError`, and objects
    that are damaged or forged raise a `CommError`.

    Attributes:
        url: the URL of the run.
        traffic: the requests so far.
        seconds: how long one write and one read took at the start.

    Example:
        >>> from thinwire.core.storage.bucket import Bucket
        >>> bucket = Bucket.open("memory://example")
        >>> bucket.wait(bucket.create("a/0", b"first")), bucket.wait(bucket.create("a/0", b"second"))
        (True, False)
        >>> bucket.wait(bucket.get("a/0", 100))
        b'first'
    """

    def __init__(self, url: str, key: bytes, store: Any, reads: Any) -> None:
        self.url = url
        self.traffic = Traffic()
        self.seconds = 0.0
        self._is_open = False
        self._secret = key
        self._store, self._reads = store, reads
        self._cipher: Any = None

    @classmethod
    def open(cls, url: str, *, key: str | None = None, timeout: float = 30.0, reads_only: bool = False) -> Bucket:
        """Open a run, or create it if nothing exists at the URL.

        Args:
            url: s3://bucket/path, gs://bucket/path, az://container/path, file:///folder, or memory://name, which only
                this process sees. Credentials come from the usual variables of each provider, such as
                AWS_ACCESS_KEY_ID; AWS_ENDPOINT_URL, GOOGLE_BASE_URL and AZURE_STORAGE_ENDPOINT name other servers.
            key: the run key, from `new_key`; by default that of THINWIRE_KEY. memory:// needs none.
            timeout: how long the store may take to answer, in seconds.
            reads_only: refuse a URL at which no run exists, and write nothing.

        Raises:
            ConfigError: the URL or the key is invalid, a library is missing, the store has no create-if-absent, or the
                key is not that of the run.
            CommError: the store cannot be reached.
        """
        scheme = check_url(url)
        secret = bytes(32) if scheme == "memory" else _read_key(os.environ.get(KEY, "") if key is None else key)
        bucket = cls(url.rstrip("/"), secret, *_stores_of(url.rstrip("/")))
        end = time.monotonic() + timeout
        try:
            bucket.wait(bucket._unlock(timeout, creates=not reads_only), end - time.monotonic())
            if not reads_only:
                bucket.wait(bucket._check_create(timeout), end - time.monotonic())
        except (ConnectionError, TimeoutError) as error:
            problem = str(error) or f"no answer within {timeout:g} s"
            raise CommError(
                f"{url}: the store cannot be used: {problem}. Check the name of the bucket, the credentials and, for "
                "other servers, their address, such as AWS_ENDPOINT_URL"
            ) from None
        bucket._is_open = True
        return bucket

    def wait_all(self, calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        """Run coroutines of this object at the same time, and return their results."""

        async def of_all() -> list[T]:
            return list(await asyncio.gather(*calls))

        return self.wait(of_all())

    def wait(self, call: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        """Run a coroutine of this object and return its result.

        Raises:
            TimeoutError: it did not end within `seconds`; it is canceled.
        """
        future = asyncio.run_coroutine_threadsafe(call, loop())
        try:
            return future.result(None if seconds is None else max(0.0, seconds))
        except BaseException:
            future.cancel()
            raise

    # -- objects ---------------------------------------------------------------------------------------------------

    async def create(self, name: str, content: bytes, *, seconds: float = 0.0) -> bool:
        """Write an object if none with this name exists; return whether this call has written it.

        Failed attempts are repeated for `seconds`.
        """
        sealed = await self._seal(name, content)
        if await self.repeated(lambda: self._put(name, sealed, create=True), seconds):
            return True
        # An attempt may have succeeded without an answer. The nonce is random, so equal bytes are our own.
        return await self.repeated(lambda: self._is(name, sealed), max(seconds, _SHOWN_SECONDS))

    async def put(self, name: str, content: bytes, *, seconds: float = 0.0) -> None:
        """Write an object, and replace one with the same name."""
        sealed = await self._seal(name, content)
        await self.repeated(lambda: self._put(name, sealed, create=False), seconds)

    async def get(self, name: str, most: int, *, seconds: float = 0.0, reads: int = _READS) -> bytes | None:
        """Return the content of an object of at most `most` bytes; None if it does not exist.

        Failed attempts are repeated for `seconds`.

        Raises:
            CommError: the object is larger; or it is damaged, forged, or another object moved to this name, also when
                it is read `reads` times.
        """
        sealed = await self.repeated(lambda: self._get(name, most + SEAL_BYTES), seconds)
        try:
            return None if sealed is None else await _off_loop(len(sealed), lambda: self._unseal(name, sealed))
        except CommError:
            if reads == 1:
                raise
        await asyncio.sleep(_FIRST_PAUSE)
        return await self.get(name, most, seconds=seconds, reads=reads - 1)

    async def list(self, prefix: str) -> list[str]:
        """Return the sorted names of the objects under a prefix; names that thinwire does not write are left out."""
        import obstore

        async def request() -> list[str]:
            self.traffic.lists += 1
            found: list[str] = []
            async for batch in obstore.list(self._store, prefix):
                found += [each["path"] for each in batch]
            return sorted(name for name in found if _NAME.fullmatch(name))

        return await self._request(request(), 0)

    async def delete(self, names: Sequence[str]) -> None:
        """Delete objects; those that do not exist are ignored."""
        import obstore

        async def request(name: str) -> None:
            self.traffic.deletes += 1
            try:
                await obstore.delete_async(self._store, name)
            except FileNotFoundError:
                return

        await asyncio.gather(*(self._request(request(name), 0) for name in names))

    def clean(self, quiet_seconds: float = 12.0) -> int:
        """Delete all objects of the run, and return their number; objects that thinwire does not write are kept.

        Args:
            quiet_seconds: how long no worker may write; workers write a heartbeat every few seconds.

        Raises:
            CommError: a worker writes to the run, or the store cannot be reached.
        """
        try:
            before = self.wait(self._contents())
            time.sleep(quiet_seconds)
            names = [name for name in self.wait(self.list("")) if _OF_RUN.match(name)]
            if {name: before.get(name) for name in names} != self.wait(self._contents()):
                raise CommError(
                    f"{self.url}: a worker writes to this run. Only the objects of a run that has ended are deleted. "
                    "Stop all workers first"
                )
            # The start of the run is last: until then, an interrupted call can be repeated.
            others = [name for name in names if name != "run"]
            for at in range(0, len(others), _MOST_DELETES):
                self.wait(self.delete(others[at : at + _MOST_DELETES]))
            self._delete_unfinished()
            self.wait(self.delete(["run"]))
        except ConnectionError as error:
            raise CommError(f"{self.url}: the store does not answer ({error}). Try again") from None
        return len(names)

    def _delete_unfinished(self) -> None:
        """Delete what killed writers have left in a folder: NAME#N, which `list` does not show."""
        if self.url.startswith("file://"):
            folder = Path(unquote(urlparse(self.url).path))
            for path in folder.rglob("*#*"):
                if _OF_RUN.match(path.relative_to(folder).as_posix()):
                    path.unlink(missing_ok=True)

    async def _contents(self) -> dict[str, bytes | None]:
        """Return the names of the run's objects, with the sealed contents of those that are overwritten."""
        names = [name for name in await self.list("") if _OF_RUN.match(name)]
        hints = [name for name in names if "/hint/" in name]
        found = await asyncio.gather(*(self._get(name, _MOST_RECORD_BYTES) for name in hints))
        return {**dict.fromkeys(names), **dict(zip(hints, found, strict=True))}

    async def repeated(self, attempt: Callable[[], Coroutine[Any, Any, T]], seconds: float) -> T:
        """Return the result of an attempt; failed ones are repeated for `seconds`."""
        end, pause = time.monotonic() + seconds, _FIRST_PAUSE
        while True:
            begin = time.monotonic()  # this process may be stopped in an attempt
            try:
                return await attempt()
            except ConnectionError as error:
                # In a run that has started, also a refusal may pass: a clock is set, or a policy comes into effect.
                refused = isinstance(error, _RefusedError) and not self._is_open
                if refused or begin + pause > end:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    # -- requests --------------------------------------------------------------------------------------------------

    async def _put(self, name: str, sealed: bytes, *, create: bool) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError

        async def request() -> bool:
            self.traffic.puts += 1
            self.traffic.bytes_up += len(sealed)
            try:
                mode = "create" if create else "overwrite"
                # In several parts a write would not be conditional.
                await obstore.put_async(self._store, name, sealed, mode=mode, use_multipart=False)
            except AlreadyExistsError:
                return False
            return True

        return await self._request(request(), len(sealed))

    async def _get(self, name: str, most: int) -> bytes | None:
        import obstore

        async def request() -> bytes | None:
            self.traffic.gets += 1
            try:
                # An object that is not found soon is asked for again, however large it may be.
                async with asyncio.timeout(_REQUEST_SECONDS):
                    found = await obstore.get_async(self._reads, name)
            except FileNotFoundError:
                return None
            except TimeoutError:
                raise ConnectionError(f"a request took longer than {_REQUEST_SECONDS:g} s") from None
            if found.meta["size"] > most:
                raise CommError(
                    f"{self.url}/{name}: has {found.meta['size']} bytes, and at most {most} are expected. Another "
                    "program has written it, or a worker has another model. Use a separate path for each run"
                )
            content = bytes(await found.bytes_async())
            self.traffic.bytes_down += len(content)
            return content

        return await self._request(request(), most)

    async def _request(self, call: Coroutine[Any, Any, T], nbytes: int) -> T:
        """Make one request.

        Raises:
            ConnectionError: it failed, or took too long.
        """
        from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

        limit = _REQUEST_SECONDS + nbytes / _SLOWEST
        try:
            async with asyncio.timeout(limit):  # `wait_for` of Python 3.11 may ignore that the call is canceled
                return await call
        except (CommError, ConnectionError):
            raise
        except TimeoutError:
            raise ConnectionError(f"a request took longer than {limit:.0f} s") from None
        except Exception as error:  # obstore has errors of its own beside Python's
            problem = _described(error)
            final = isinstance(error, FileNotFoundError | PermissionDeniedError | UnauthenticatedError)
        raise _RefusedError(problem) if final else ConnectionError(problem)

    async def _is(self, name: str, sealed: bytes) -> bool:
        try:
            found = await self._get(name, len(sealed))
        except CommError:
            return False  # another object, which is longer
        if found is None:
            raise ConnectionError("the store has an object that it does not show yet")
        return found == sealed

    # -- seals -----------------------------------------------------------------------------------------------------

    async def _seal(self, name: str, content: bytes) -> bytes:
        assert _NAME.fullmatch(name), name
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return await _off_loop(len(content), lambda: nonce + self._cipher.encrypt(nonce, content, name.encode()))

    def _unseal(self, name: str, sealed: bytes) -> bytes:
        from cryptography.exceptions import InvalidTag

        try:
            return self._cipher.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], name.encode())
        except (InvalidTag, ValueError):
            raise CommError(
                f"{self.url}/{name}: this object is damaged, forged, or was moved here. Only objects that are sealed "
                "with the run key for their own name are accepted. Check who can write to the store"
            ) from None

    async def _unlock(self, seconds: float, *, creates: bool) -> None:
        """Derive the key from the salt of the run, which the first worker draws."""
        most = len(_MAGIC) + _SALT_BYTES + len(_PROOF) + SEAL_BYTES
        while True:
            found = await self.repeated(lambda: self._get("run", most), seconds)
            if found is None and not creates:
                raise ConfigError(
                    f"{self.url}: no run exists there. Give the URL that the workers of the run have, such as "
                    "s3://bucket/run"
                )
            if found is None:
                self._derive(salt := secrets.token_bytes(_SALT_BYTES))
                content = _MAGIC + salt + await self._seal("run", _PROOF)
                await self.repeated(lambda content=content: self._put("run", content, create=True), seconds)
                continue  # another worker may have been first
            start = len(_MAGIC) + _SALT_BYTES
            if not found.startswith(_MAGIC):
                raise ConfigError(
                    f"{self.url}/run: is not the start of a run that this version of thinwire can read. Use another "
                    "path, or the same version of thinwire on all machines"
                )
            self._derive(found[len(_MAGIC) : start])
            try:
                self._unseal("run", found[start:])
            except CommError:
                raise ConfigError(
                    f"{KEY}: this key is not the key of the run at {self.url}. All machines of a run need the same "
                    "key. Copy it from the machine that started the run, or use another path"
                ) from None
            return

    def _derive(self, salt: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        self._cipher = ChaCha20Poly1305(HKDF(SHA256(), 32, salt, _MAGIC).derive(self._secret))

    async def _check_create(self, seconds: float) -> None:
        """Check that of several writers of one object exactly one succeeds, and measure a request.

        Raises:
            ConfigError: the store has no create-if-absent.
        """
        name = f"probe/{secrets.token_hex(8)}"
        start = time.monotonic()
        written = await asyncio.gather(*(self.create(name, bytes([n]), seconds=seconds) for n in range(_RACERS)))
        found = await self.get(name, 1, seconds=seconds)
        self.seconds = time.monotonic() - start
        again = await self.create(name, b"again", seconds=seconds)
        await self.repeated(lambda: self.delete([name]), seconds)
        if sum(written) != 1 or again or found != bytes([written.index(True)]):
            raise ConfigError(
                f"{self.url}: {sum(written) + again} of {_RACERS + 1} writers of one new object succeeded. The store "
                "must support create-if-absent (If-None-Match: *), so that exactly one succeeds. AWS S3, Cloudflare "
                "R2, MinIO, SeaweedFS, Google Cloud Storage, Azure and local folders do"
            )


def _described(error: Exception) -> str:
    """Return the store's own words in place of the client's, if an error has them."""
    text = str(error) or "no text"
    code, message = (re.search(f"<{tag}>([^<]*)</{tag}>", text) for tag in ("Code", "Message"))
    if code is None:
        return f"{type(error).__name__}: {text.splitlines()[0][:300]}"
    words = printable(f"{code[1]}: {message[1] if message else 'no text'}"[:300]).rstrip(".")
    return words + next((f". {fix}" for part, fix in _FIXES.items() if part in code[1]), "")


class _RefusedError(ConnectionError):
    """The store refuses these requests: no such bucket, or no permission."""


async def _off_loop(nbytes: int, call: Callable[[], bytes]) -> bytes:
    """Seal large objects in a thread, so that other requests continue."""
    return await asyncio.to_thread(call) if nbytes > 1 << 16 else call()


def _read_key(text: str) -> bytes:
    try:
        found = base64.urlsafe_b64decode(text.strip() + "=")
    except (binascii.Error, ValueError):
        found = b""
    if len(found) != 32:
        given = "not set" if not text else f"{len(text.strip())} characters"
        raise ConfigError(
            f"{KEY}: is no run key ({given}). It must be 43 characters, as `thinwire bucket key` prints them. Draw "
            "one, and give it to all machines of the run, as THINWIRE_KEY or as attach(..., key=...)"
        )
    return found


def _stores_of(url: str) -> tuple[Any, Any]:
    """Return the clients for writes and for reads."""
    try:
        import cryptography  # noqa: F401  # pyright: ignore[reportUnusedImport]
        from obstore.store import MemoryStore, from_url
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        raise ConfigError(
            f"rendezvous={url!r}: {missing} is missing. Buckets need the extra: pip install 'thinwire[bucket]'"
        ) from None
    if url.startswith("memory://"):
        store = _memory.setdefault(url, MemoryStore())
        return store, store
    if url.startswith("file://"):
        store = from_url(url, mkdir=True)
        return store, store
    endpoints = (os.environ.get(name, "") for name in _ENDPOINTS[url.partition("://")[0]])
    plain = next((each for each in endpoints if each), "").startswith("http://")
    # Failed requests are repeated here, where the time that is left is known.
    retries: Any = {"max_retries": 0}
    options: Any = {"allow_http": plain, "connect_timeout": "10s", "timeout": "1h"}
    # A router that gets another address drops connections, and says so to nobody.
    options |= {"pool_idle_timeout": "10s"}
    # Not for writes, which read nothing while they upload.
    ends_stalled: Any = options | {"read_timeout": timedelta(seconds=_STALLED_SECONDS)}
    try:
        writes = from_url(url, client_options=options, retry_config=retries)
        return writes, from_url(url, client_options=ends_stalled, retry_config=retries)
    except Exception as error:
        raise ConfigError(
            f"rendezvous={url!r}: {str(error).splitlines()[0][:300]}. Check the URL, and your provider's variables, "
            "such as AZURE_STORAGE_ACCOUNT_NAME"
        ) from None


# -- the thread that makes the requests --------------------------------------------------------------------------------

_loops: dict[int, asyncio.AbstractEventLoop] = {}
_lock = threading.Lock()


def loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of this process's requests, which runs in a thread of its own."""
    with _lock:
        if os.getpid() not in _loops:  # also in a fork, where the parent's thread does not exist
            made = _loops[os.getpid()] = asyncio.new_event_loop()
            made.set_default_executor(ThreadPoolExecutor(_SEALERS, thread_name_prefix="thinwire-seal"))
            threading.Thread(target=made.run_forever, daemon=True, name="thinwire-bucket").start()
        return _loops[os.getpid()]


# -- a table of keys and values ----------------------------------------------------------------------------------------


class BucketStore:
    """A table of keys and values with compare-and-set: numbered versions of each key, each created once.

    A version never changes, so that a look at a key asks only for the version after the last known one. Keys that are
    overwritten (`set`) and keys that are compared (`compare_set`) are separate.

    Args:
        bucket: holds the objects.
        prefix: the first part of their names.
        seconds: how long failed requests are repeated.

    Example:
        >>> from thinwire.core.storage.bucket import Bucket, BucketStore
        >>> store = BucketStore(Bucket.open("memory://table"), "0")
        >>> store.compare_set("view/1", "", "a"), store.compare_set("view/1", "", "b")
        (b'a', b'a')
        >>> store.compare_set("view/1", "a", "c"), store.values(["view/1", "view/2"])
        (b'c', [b'c', b''])
    """

    def __init__(self, bucket: Bucket, prefix: str, *, seconds: float = 5.0) -> None:
        self._bucket, self._prefix, self._seconds = bucket, prefix, seconds
        self._known: dict[str, tuple[int, bytes]] = {}

    def set(self, key: str, value: str) -> None:
        """Overwrite a key that is never compared, such as a heartbeat."""
        self._bucket.wait(self._bucket.put(f"{self._prefix}/hint/{key}", value.encode(), seconds=self._seconds))

    def values(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys, b"" for none; all requests are made at the same time."""
        return [value for _, value in self._bucket.wait_all(map(self._look, keys))]

    def compare_set(self, key: str, expected: str | bytes, desired: str) -> bytes:
        """Store a value if the key has the expected one ("" for none); return the resulting value."""
        wanted = expected.encode() if isinstance(expected, str) else expected
        return self._bucket.wait(self._compare_set(key, wanted, desired.encode()))

    async def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        while True:
            number, value = await self._look(key)
            if value != expected:
                return value
            name = f"{self._prefix}/store/{key}/{number + 1}"
            if await self._bucket.create(name, desired, seconds=self._seconds):
                self._known[key] = number + 1, desired
                return desired

    async def _look(self, key: str) -> tuple[int, bytes]:
        """Return the last version of a key and its value; -1 and b"" if it has none."""
        number, value = self._known.get(key, (-1, b""))
        if _is_hint(key):
            found = await self._get(f"hint/{key}")
            number, value = (0, found) if found is not None else (number, value)
        else:
            while (found := await self._get(f"store/{key}/{number + 1}")) is not None:
                number, value = number + 1, found
        # Another thread may have found a later version meanwhile.
        if number >= self._known.get(key, (0, b""))[0]:
            self._known[key] = number, value
        return number, value

    async def _get(self, name: str) -> bytes | None:
        return await self._bucket.get(f"{self._prefix}/{name}", _MOST_RECORD_BYTES, seconds=self._seconds)


def _is_hint(key: str) -> bool:
    return key == "epoch" or key.startswith("beat/")


__all__ = ["KEY", "SEAL_BYTES", "Bucket", "BucketStore", "Traffic", "loop", "new_key"]
