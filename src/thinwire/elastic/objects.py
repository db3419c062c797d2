# SPDX-License-Identifier: Apache-2.0
"""Messages that any worker of a run can read later, as objects in a bucket or in the store of an elastic run."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from thinwire.core.comm.roll_call import Store
from thinwire.core.storage.bucket import Bucket, Traffic
from thinwire.elastic.records import Records
from thinwire.errors import CommError, CommTimeoutError

_CHUNK_BYTES = 3 << 20  # a value of a TCPStore may have 8 MiB, and base64 adds a third


class Objects(Protocol):
    """Named byte strings, each written once by one worker.

    Attributes:
        traffic: the requests so far; None if they are not counted.
    """

    traffic: Traffic | None

    def put(self, name: str, content: bytes) -> None:
        """Write an object."""
        ...

    def get(self, names: Sequence[str], most: int) -> list[bytes | None]:
        """Return objects of at most `most` bytes each; None for each that does not exist."""
        ...

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects; those that do not exist are ignored."""
        ...


class BucketObjects:
    """Objects in a bucket, encrypted and authenticated with the run key.

    Args:
        bucket: holds them.
        place: the first part of their names.
        timeout: how long failed requests are repeated, in seconds.
    """

    def __init__(self, bucket: Bucket, place: str, *, timeout: float) -> None:
        self._bucket, self._place, self._timeout = bucket, place, timeout
        self.traffic: Traffic | None = bucket.traffic

    def put(self, name: str, content: bytes) -> None:
        """Write an object."""
        with self._as_timeout():
            self._bucket.wait(self._bucket.put(f"{self._place}/{name}", content, seconds=self._timeout))

    def get(self, names: Sequence[str], most: int) -> list[bytes | None]:
        """Return objects, which are requested at the same time."""
        places = [f"{self._place}/{name}" for name in names]
        with self._as_timeout():
            return self._bucket.wait_all(self._bucket.get(place, most, seconds=self._timeout) for place in places)

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects."""
        with suppress(ConnectionError):  # `thinwire bucket clean` deletes what is left
            self._bucket.wait(self._bucket.delete([f"{self._place}/{name}" for name in names]))

    @contextmanager
    def _as_timeout(self) -> Generator[None]:
        try:
            yield
        except ConnectionError as error:
            raise CommTimeoutError(
                f"{self._bucket.url}: the store has not answered within {self._timeout:g} s ({error}). Start this "
                "worker again to let it join"
            ) from None


class StoreObjects:
    """Objects in the store of an elastic run: text in chunks, and a signed record with their number and hash.

    Args:
        store: a store that outlives every worker.
        token: the secret of the run.
    """

    def __init__(self, store: Store, token: bytes) -> None:
        self._store, self._records = store, Records(store, token)
        self.traffic: Traffic | None = None

    def put(self, name: str, content: bytes) -> None:
        """Write the chunks first, so that a reader of the record finds them."""
        chunks = [content[at : at + _CHUNK_BYTES] for at in range(0, len(content), _CHUNK_BYTES)]
        for number, chunk in enumerate(chunks):
            self._store.set(f"{name}/{number}", base64.b64encode(chunk).decode())
        self._records.write(name, [len(chunks), hashlib.sha256(content).hexdigest()])

    def get(self, names: Sequence[str], most: int) -> list[bytes | None]:
        """Return objects; one whose chunks were deleted counts as absent."""
        return [self._get(name, most) for name in names]

    def _get(self, name: str, most: int) -> bytes | None:
        found = self._records.read(name)
        if found is None:
            return None
        count, digest = found
        if count * _CHUNK_BYTES > most + _CHUNK_BYTES:
            raise CommError(f"{name}: has {count} chunks. At most {most} bytes are expected. Use a separate store")
        keys = [f"{name}/{number}" for number in range(count)]
        if not self._store.check(keys):
            return None
        content = b"".join(base64.b64decode(self._store.get(key)) for key in keys)
        if hashlib.sha256(content).hexdigest() != digest:
            raise CommError(f"{name}: the object is damaged. Another program has written to it. Use a separate store")
        return content

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects, if the store can delete."""
        delete_key: Any = getattr(self._store, "delete_key", None)
        if delete_key is None:
            return
        for name in names:
            with suppress(RuntimeError):  # a FileStore and some others cannot delete
                found = self._records.read(name)
                delete_key(name)
                for number in range(found[0] if found else 0):
                    delete_key(f"{name}/{number}")
