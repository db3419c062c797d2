# SPDX-License-Identifier: Apache-2.0
"""Signed records in the store of an elastic run; everything else in the store is ignored."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, cast

from thinwire.core.comm.roll_call import Store
from thinwire.core.storage.bucket import BucketStore
from thinwire.errors import CommError, ConfigError

TOKEN = "THINWIRE_TOKEN"
_TOKEN_KEY = "token"
_TRIES = 100


def values_of(store: Store | BucketStore, keys: Sequence[str]) -> list[bytes]:
    """Return the values of keys, b"" for none; a bucket looks at all of them at the same time."""
    if isinstance(store, BucketStore):
        return store.values(keys)
    return [store.get(key) if store.check([key]) else b"" for key in keys]


class Records:
    """JSON values in a store, each with a message authentication code over its key and its value.

    A value without a valid code, such as a stray write of another program, counts as absent: it is never returned, and
    the next write replaces it.

    Args:
        store: a store that outlives every worker. A key of it is written by one method only, of those below.
        token: the secret of the run.

    Example:
        >>> from thinwire.core.comm.rendezvous import memory_store
        >>> store = memory_store()
        >>> records = Records(store, b"secret")
        >>> records.write("a", [1, 2])
        >>> records.propose("a", [3]), records.read("a")
        ([1, 2], [1, 2])
        >>> store.set("a", "[4]")
        >>> records.read("a"), records.propose("a", [3])
        (None, [3])
    """

    def __init__(self, store: Store | BucketStore, token: bytes) -> None:
        self._store = store
        self._token = token

    def read(self, key: str) -> Any:
        """Return the value of a key; None if it has no valid one."""
        return self.read_each([key])[0]

    def read_each(self, keys: Sequence[str]) -> list[Any]:
        """Return the values of keys, as `read` does."""
        return [self._decode(key, x) for key, x in zip(keys, values_of(self._store, keys), strict=True)]

    def write(self, key: str, value: object) -> None:
        """Store a value, and replace another one.

        Raises:
            CommError: another program keeps writing to the key.
        """
        text: Any = self._encode(key, value)
        expected: Any = ""
        for _ in range(_TRIES):
            stored = self._store.compare_set(key, expected, text)
            if stored == text.encode():
                return
            expected = stored
        raise _overwritten(key)

    def hint(self, key: str, value: object) -> None:
        """Store a value of a key that is written by this method only; it need not be the latest one."""
        self._store.set(key, self._encode(key, value))

    def propose(self, key: str, value: object, *, instead_of: object = None) -> Any:
        """Store a value if the key has none or `instead_of`; return the resulting value.

        Raises:
            CommError: another program keeps writing to the key.
        """
        text: Any = self._encode(key, value)
        expected: Any = "" if instead_of is None else self._encode(key, instead_of)
        for _ in range(_TRIES):
            stored = self._store.compare_set(key, expected, text)
            if (found := self._decode(key, stored)) is not None:
                return found
            expected = stored
        raise _overwritten(key)

    def _encode(self, key: str, value: object) -> str:
        content = json.loads(_canonical(value))
        code = {"mac": self._code(key, content)}
        return _canonical({**content, **code} if isinstance(content, dict) else {"value": content, **code})

    def _decode(self, key: str, stored: bytes) -> Any:
        try:
            content: Any = json.loads(stored)
            code = content.pop("mac")
            if content.keys() == {"value"}:
                content = content["value"]
            valid = hmac.compare_digest(self._code(key, content), code)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        return content if valid else None

    def _code(self, key: str, content: object) -> str:
        return hmac.new(self._token, f"{key}\n{_canonical(content)}".encode(), hashlib.sha256).hexdigest()


def _overwritten(key: str) -> CommError:
    return CommError(f"another program keeps writing {key!r} to the store of this run. Use a separate store")


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def run_token(store: Store) -> bytes:
    """Return the secret of the run in a store: THINWIRE_TOKEN, or one that its first worker draws and publishes there.

    Raises:
        ConfigError: THINWIRE_TOKEN is not the token of the run.
        CommError: the store has no valid token.
    """
    own = os.environ.get(TOKEN, "")
    mine = {"fingerprint": hashlib.sha256(own.encode()).hexdigest()} if own else {"token": secrets.token_hex(16)}
    stored = store.compare_set(_TOKEN_KEY, "", _canonical(mine))
    try:
        found: Any = json.loads(stored)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        content = cast(Mapping[str, Any], found)
        if own and content == mine:
            return own.encode()
        if not own and isinstance(content.get("token"), str):
            return content["token"].encode()
        if own or "fingerprint" in content:
            problem = "differs from that of the run" if own and "fingerprint" in content else "is not that of the run"
            raise ConfigError(
                f"{TOKEN}={'(set)' if own else '(not set)'} {problem} in this store. All workers of a run need "
                "the same value, or none. Set it on all of them, or name a new run with THINWIRE_RUN"
            )
    raise CommError(
        "the store of this run holds an unreadable token, written by another program. Use a separate store, "
        "or name a new run with THINWIRE_RUN"
    )


def hidden(token: bytes, name: str) -> str:
    """Return a name for keys that only programs with the token can guess."""
    return f"{name}-{hmac.new(token, name.encode(), hashlib.sha256).hexdigest()[:32]}"
