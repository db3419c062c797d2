# SPDX-License-Identifier: Apache-2.0
"""Sealed objects in a folder, in memory and on real servers."""

from __future__ import annotations

import asyncio
import base64
import builtins
import random
import re
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("obstore")
pytest.importorskip("cryptography")

from tests.buckets import SERVERS, refusing, serve, set_environment, stalling, url_of
from tests.rules import for_each
from thinwire.core.storage import bucket as module
from thinwire.core.storage.bucket import KEY, SEAL_BYTES, Bucket, BucketStore, new_key
from thinwire.errors import CommError, ConfigError


@pytest.fixture(scope="module", params=["folder", "memory", *SERVERS])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY, new_key())
        if request.param == "folder":
            yield f"file://{tmp_path_factory.mktemp('folder')}/run"
        elif request.param == "memory":
            yield "memory://storage"
        else:
            with serve(request.param, tmp_path_factory.mktemp(request.param)) as endpoint:
                set_environment(patch, endpoint, request.param)
                yield f"{url_of(request.param)}/{request.param}"


@pytest.mark.slow
def test_objects_come_back_and_are_listed_and_deleted(url: str) -> None:
    bucket = Bucket.open(f"{url}/objects")
    content = random.Random(0).randbytes(300_000)
    bucket.wait(bucket.put("a/1", content))
    bucket.wait(bucket.put("a/1", b"again"))
    bucket.wait(bucket.put("a/2", b""))
    bucket.wait(bucket.put("b", content))
    assert bucket.wait(bucket.get("a/1", 100)) == b"again"
    assert bucket.wait(bucket.get("a/2", 0)) == b""
    assert bucket.wait(bucket.get("b", len(content))) == content
    assert bucket.wait(bucket.get("c", 10)) is None
    assert bucket.wait(bucket.list("a")) == ["a/1", "a/2"]
    bucket.wait(bucket.delete(["a/1", "a/2", "missing"]))
    assert bucket.wait(bucket.list("a")) == []


def _skip_where_two_may_win(url: str) -> None:
    if url == "s3://bucket/moto":
        pytest.skip("moto looks for an object and writes it in two steps: under load two of eight writers succeed")


def test_one_of_eight_writers_of_a_new_object_succeeds(url: str) -> None:
    _skip_where_two_may_win(url)
    buckets = [Bucket.open(f"{url}/races") for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for race in range(8):
            name = f"race/{race}"
            won = list(
                pool.map(
                    lambda rank, name=name: buckets[rank].wait(buckets[rank].create(name, bytes([rank]))), range(8)
                )
            )
            assert sum(won) == 1
            assert buckets[0].wait(buckets[0].get(name, 1)) == bytes([won.index(True)])


def test_of_eight_that_compare_and_set_one_key_one_succeeds(url: str) -> None:
    _skip_where_two_may_win(url)
    stores = [BucketStore(Bucket.open(f"{url}/versions"), "0", seconds=20) for _ in range(8)]
    first = stores[0].compare_set("once", "", "first")
    assert [each.compare_set("once", "", "other") for each in stores] == [first] * 8 == [b"first"] * 8
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda pair: pair[1].compare_set("race", "", str(pair[0])), enumerate(stores)))
    assert len(set(results)) == 1
    assert stores[3].compare_set("race", results[0], "next") == b"next"
    assert all(each.values(["race"]) == [b"next"] for each in stores)
    stores[1].set("beat/a", "1")
    stores[1].set("beat/a", "2")
    assert stores[2].values(["beat/a", "beat/b"]) == [b"2", b""]


def _flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@pytest.mark.slow
def test_damaged_moved_and_forged_objects_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, new_key())
    monkeypatch.setattr(module, "_FIRST_PAUSE", 0.0)  # between two reads of a damaged object
    draw = random.Random(7)
    bucket = Bucket.open(f"file://{tmp_path}/run")
    other = Bucket.open(f"file://{tmp_path}/other")
    contents = {f"calls/{i}": draw.randbytes(draw.randrange(200)) for i in range(10)}
    for name, content in contents.items():
        bucket.wait(bucket.put(name, content))
        other.wait(other.put(name, content))
    sealed = {name: (tmp_path / "run" / name).read_bytes() for name in contents}
    elsewhere = {name: (tmp_path / "other" / name).read_bytes() for name in contents}

    def refuse(name: str) -> None:
        with pytest.raises(CommError, match=f"run/{name}: this object is damaged, forged, or was moved here"):
            bucket.wait(bucket.get(name, 1000))
        (tmp_path / "run" / name).write_bytes(sealed[name])

    for _ in range(5000):
        name = draw.choice(list(contents))
        _flip(tmp_path / "run" / name, draw.randrange(8 * len(sealed[name])))
        refuse(name)
    for _ in range(500):
        name, another = draw.sample(list(contents), 2)
        forged = draw.choice(
            [
                sealed[another],  # of another place
                elsewhere[name],  # of another run with the same key
                draw.randbytes(len(sealed[name])),
                draw.randbytes(draw.randrange(SEAL_BYTES)),
                sealed[name][: draw.randrange(len(sealed[name]))],
                sealed[name] + b"\0",
            ]
        )
        (tmp_path / "run" / name).write_bytes(forged)
        refuse(name)
    assert all(bucket.wait(bucket.get(name, 200)) == content for name, content in contents.items())


def test_an_object_that_is_too_large_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY, new_key())
    bucket = Bucket.open(f"file://{tmp_path}/run")
    with (tmp_path / "run" / "large").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CommError, match=r"large: has 1099511627776 bytes, and at most 128 are expected"):
        bucket.wait(bucket.get("large", 100))
    assert bucket.traffic.bytes_down < 1000


def test_nothing_that_is_stored_can_be_read_without_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, key := new_key())
    bucket = Bucket.open(f"file://{tmp_path}/run")
    bucket.wait(bucket.put("a", b"secret" * 100))
    stored = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"secret" not in stored and key.encode() not in stored
    assert base64.urlsafe_b64decode(key + "=") not in stored


def test_another_key_is_refused(tmp_path: Path) -> None:
    Bucket.open(f"file://{tmp_path}/run", key=new_key())
    with pytest.raises(ConfigError, match=r"this key is not the key of the run at file://.*All machines of a run need"):
        Bucket.open(f"file://{tmp_path}/run", key=new_key())


@pytest.mark.parametrize("text", ["", "short", "x" * 44, "é" * 43, "=" * 43])
def test_a_text_that_is_no_key_is_refused_and_not_printed(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY, raising=False)
    with pytest.raises(ConfigError, match=r"is no run key .*It must be 43 characters") as caught:
        Bucket.open("file:///nowhere/run", key=text)
    assert not text or text not in str(caught.value)


@for_each(["", "s3://", "bucket/run", "/mnt/run", "ftp://bucket/run", "file://share/run"])
def test_a_url_of_no_known_store_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"rendezvous=.*(s3://bucket/run|must be absolute)"):
        Bucket.open(url, key=new_key())


def test_a_store_in_which_every_writer_wins_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    put = Bucket._put

    async def overwrite(self: Bucket, name: str, sealed: bytes, *, create: bool) -> bool:
        await put(self, name, sealed, create=False)
        return True

    monkeypatch.setattr(Bucket, "_put", overwrite)
    with pytest.raises(ConfigError, match=r"memory://wrong: 5 of 5 writers of one new object succeeded.*create-if-abs"):
        Bucket.open("memory://wrong")


def test_a_store_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, "http://127.0.0.1:9")
    with pytest.raises(CommError, match=r"s3://bucket/run: the store cannot be used: .*AWS_ENDPOINT_URL"):
        Bucket.open("s3://bucket/run", key=new_key(), timeout=5)


@pytest.mark.parametrize(
    ("status", "code", "message", "words"),
    [
        (403, "AccessDenied", "Access Denied.", "AccessDenied: Access Denied. Check the name"),
        (400, "ExpiredToken", "The token has expired.", "The token has expired. Get new credentials, and start"),
        (403, "RequestTimeTooSkewed", "Too far.", "RequestTimeTooSkewed: Too far. Set this machine's clock, for"),
    ],
)
def test_the_words_of_a_store_that_refuses_are_reported(
    status: int, code: str, message: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refusing(status, code, message) as endpoint:
        set_environment(monkeypatch, endpoint)
        with pytest.raises(CommError, match=re.escape(words)):
            Bucket.open("s3://bucket/run", key=new_key(), timeout=1)


def test_a_refusal_is_final_at_the_start_and_may_pass_later(monkeypatch: pytest.MonkeyPatch) -> None:
    request, left = Bucket._request, [3]

    async def refuse(bucket: Bucket, call: Any, nbytes: int) -> Any:
        if left[0] == 0:
            return await request(bucket, call, nbytes)
        left[0] -= 1
        call.close()
        raise module._RefusedError("RequestTimeTooSkewed")

    bucket = Bucket.open("memory://refuses")
    monkeypatch.setattr(Bucket, "_request", refuse)
    assert bucket.wait(bucket.create("a", b"first", seconds=20)) and left == [0]
    left[0] = 1
    with pytest.raises(CommError, match="RequestTimeTooSkewed"):
        Bucket.open("memory://refuses", timeout=20)


def test_an_object_that_is_not_found_soon_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    import obstore

    bucket = Bucket.open("memory://hangs")
    assert bucket.wait(bucket.create("a", b"first"))
    get, hangs = obstore.get_async, [True]

    def hang(*arguments: Any) -> Any:
        return asyncio.sleep(3600) if hangs and hangs.pop() else get(*arguments)

    monkeypatch.setattr(module, "_REQUEST_SECONDS", 0.2)
    monkeypatch.setattr(obstore, "get_async", hang)
    assert bucket.wait(bucket.get("a", 1 << 30, seconds=20), 10) == b"first"


def test_a_read_that_stops_in_the_middle_fails_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STALLED_SECONDS", 0.2)
    with stalling() as endpoint:
        set_environment(monkeypatch, endpoint)
        bucket = Bucket("s3://bucket/run", bytes(32), *module._stores_of("s3://bucket/run"))
        with pytest.raises(ConnectionError, match="GenericError"):
            bucket.wait(bucket.get("a", 1000), 10)


def test_a_bucket_that_does_not_exist_is_reported_at_once(url: str) -> None:
    scheme = url.partition("://")[0]
    if scheme not in SERVERS.values():
        pytest.skip("only servers have buckets")
    words = f"{scheme}://no-such-bucket/run: the store cannot be used.*Check the name of the bucket"
    with pytest.raises(CommError, match=words):
        Bucket.open(f"{scheme}://no-such-bucket/run", timeout=300)


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *arguments: Any, **named: Any) -> Any:
        if name.partition(".")[0] == "obstore":
            raise ImportError(name=name)
        return real(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigError, match=r"obstore is missing.*pip install 'thinwire\[bucket\]'"):
        Bucket.open("s3://bucket/run", key=new_key())


def test_a_write_whose_answer_was_lost_counts_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = Bucket.open("memory://lost-answer")
    put, calls = Bucket._put, list[str]()

    async def lose_first(self: Bucket, name: str, sealed: bytes, *, create: bool) -> bool:
        calls.append(name)
        written = await put(self, name, sealed, create=create)
        if len(calls) == 1:
            raise ConnectionError("the answer is lost")
        return written

    monkeypatch.setattr(Bucket, "_put", lose_first)
    assert bucket.wait(bucket.create("a", b"mine", seconds=5))
    assert len(calls) == 2
    assert not bucket.wait(bucket.create("a", b"mine", seconds=5))
