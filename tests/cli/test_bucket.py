# SPDX-License-Identifier: Apache-2.0
"""`thinwire bucket`: a key, and the removal of a run that has ended."""

import threading

import pytest

from thinwire.cli import main
from thinwire.core.storage.bucket import KEY, Bucket

pytest.importorskip("obstore")


def new_key(capsys):
    assert main(["bucket", "key"]) == 0
    return capsys.readouterr().out.strip()


def test_a_key_opens_a_run_and_another_one_does_not(tmp_path, capsys, monkeypatch):
    first, second = new_key(capsys), new_key(capsys)
    assert first != second
    url = (tmp_path / "run").as_uri()
    Bucket.open(url, key=first)
    monkeypatch.setenv(KEY, second)
    assert main(["bucket", "clean", url, "--quiet", "0"]) == 2
    assert "this key is not the key of the run" in " ".join(capsys.readouterr().err.split())


def test_a_run_that_has_ended_is_deleted_and_other_files_are_kept(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(KEY, new_key(capsys))
    url = (tmp_path / "run").as_uri()
    bucket = Bucket.open(url)
    for name in ("0/store/view/1", "0/hint/beat/w-1", "0/calls/0-ab/3/1"):
        bucket.wait(bucket.put(name, b"content"))
    (tmp_path / "run" / "notes.txt").write_text("not of thinwire")
    assert main(["bucket", "clean", url, "--quiet", "0.1"]) == 0
    assert capsys.readouterr().out.strip() == f"deleted 4 objects of {url}"
    assert [path.name for path in (tmp_path / "run").rglob("*") if path.is_file()] == ["notes.txt"]


def test_a_run_to_which_a_worker_writes_is_kept(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(KEY, new_key(capsys))
    url = (tmp_path / "run").as_uri()
    bucket, ended = Bucket.open(url), threading.Event()

    def beat():
        while not ended.wait(0.05):
            bucket.wait(bucket.put("0/hint/beat/w-1", b"alive"))

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        assert main(["bucket", "clean", url, "--quiet", "1"]) == 1
    finally:
        ended.set()
        thread.join(30)
    assert "a worker writes to this run" in " ".join(capsys.readouterr().err.split())
    assert bucket.wait(bucket.get("0/hint/beat/w-1", 100)) == b"alive"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["key", "s3://bucket/run"], "a key belongs to no URL yet"),
        (["clean"], "URL is missing"),
        (["clean", "file:///x", "--quiet", "-1"], "--quiet -1: must be at least 0 seconds"),
    ],
)
def test_mistakes_are_one_message(capsys, arguments, words):
    assert main(["bucket", *arguments]) == 2
    assert words in " ".join(capsys.readouterr().err.split())
