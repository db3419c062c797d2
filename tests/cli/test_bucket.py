# SPDX-License-Identifier: Apache-2.0
"""`thinwire bucket`: a key, and the removal of a run that has ended."""

import json
import os
import threading

import pytest

from tests.buckets import Process
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
    tmp_path = tmp_path / "a folder"
    url = (tmp_path / "run").as_uri()
    bucket = Bucket.open(url)
    for name in ("0/store/view/1", "0/hint/beat/w-1", "0/calls/0-ab/3/1"):
        bucket.wait(bucket.put(name, b"content"))
    for name in ("notes.txt", "2024/photo", "2024/store", "probe/photo"):
        (tmp_path / "run" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "run" / name).write_text("not of thinwire")
    (tmp_path / "run" / "0" / "calls" / "0-ab" / "3" / "2#1").write_text("of a writer that was killed")
    assert main(["bucket", "clean", url, "--quiet", "0.1"]) == 0
    assert capsys.readouterr().out.strip() == f"deleted 4 objects of {url}"
    left = [path.relative_to(tmp_path / "run") for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert sorted(map(str, left)) == ["2024/photo", "2024/store", "notes.txt", "probe/photo"]
    assert main(["bucket", "clean", url]) == 2
    assert "no run exists there" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run" / "run").exists()


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


def train_as_one(outbox, arguments):
    """Run `thinwire train` as one of the workers; answers with its exit code."""
    outbox.send(main(["train", *arguments]))


OPTIONS = ["--task", "digits", "--strategy", "LocalSGD(period=4)", "--save-every", "6", "--eval-every", "6"]


def train_over_bucket(url, folder, *more):
    workers = [
        Process(train_as_one, [*OPTIONS, "--rendezvous", url, *more], extra={KEY: os.environ[KEY]}) for _ in range(2)
    ]
    try:
        assert [each.receive(90) for each in workers] == [0, 0]
    finally:
        for each in workers:
            each.end(5)
    return json.loads((folder / "summary.json").read_text())


def test_train_over_a_bucket_equals_train_on_one_machine(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(KEY, new_key(capsys))
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    found = train_over_bucket((tmp_path / "run").as_uri(), ours, "--workers", "2", "--steps", "6", "--out", str(ours))
    assert main(["train", *OPTIONS, "--workers", "2", "--steps", "6", "--out", str(theirs)]) == 0
    expected = json.loads((theirs / "summary.json").read_text())
    assert found["eval_loss"] == expected["eval_loss"] and found["steps"] == expected["steps"] == 6


@pytest.mark.slow
def test_train_over_a_bucket_resumes(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(KEY, new_key(capsys))
    url, folder, whole = (tmp_path / "run").as_uri(), tmp_path / "run-6", tmp_path / "run-12"
    train_over_bucket(url, folder, "--workers", "2", "--steps", "6", "--out", str(folder))
    found = train_over_bucket(url, folder, "--resume", str(folder), "--steps", "12")
    expected = train_over_bucket(f"{url}-2", whole, "--workers", "2", "--steps", "12", "--out", str(whole))
    assert found["eval_loss"] == expected["eval_loss"] and found["steps"] == expected["steps"] == 12


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "needs --workers, the number of machines that train together"),
        (["--workers", "2", "--strategy", "ddp"], "which needs a process group"),
        (["--workers", "2", "--strategy", "AllReduce()"], "it sends at every step"),
        (["--workers", "2", "--elastic"], "--elastic with --rendezvous"),
        (["--workers", "2", "--link", "1mbit"], "over a bucket the links are real"),
    ],
)
def test_train_refuses_what_a_bucket_does_not_carry(tmp_path, capsys, monkeypatch, arguments, words):
    # The variable has the same effect as the option.
    monkeypatch.setenv("THINWIRE_RENDEZVOUS", "memory://refused")
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--task", "digits", *arguments]) == 2
    assert words in " ".join(capsys.readouterr().err.split())
