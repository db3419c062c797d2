# SPDX-License-Identifier: Apache-2.0
"""`thinwire watch`: a live run, its end, and its state once."""

import json
import threading
import time

import pytest
import torch

from tests.lab.report.samples import write_run
from thinwire import LateMerging, attach
from thinwire.cli import main
from thinwire.core.storage.bucket import new_key
from thinwire.lab.runs import launch, resolve


def test_a_live_run_is_shown_until_it_ends(tmp_path, capsys):
    settings = resolve(
        {"task": "digits", "strategy": "LocalSGD(period=4)", "workers": 2, "slow": "1:3x", "steps": 40, "eval_every": 4}
    )
    begun = threading.Event()
    run = threading.Thread(
        target=launch, args=(settings, tmp_path / "run"), kwargs={"listener": lambda event: begun.set()}, daemon=True
    )
    run.start()
    assert begun.wait(60)
    assert main(["watch", str(tmp_path / "run"), "--every", "0.1"]) == 0
    shown = capsys.readouterr().out.splitlines()
    run.join(60)
    assert shown[-1].startswith("ended, step 40 of 40") and "by each worker" in shown[-1]
    assert all(line.startswith("running, step ") for line in shown[:-1])
    assert main(["watch", str(tmp_path / "run"), "--json", "--once"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["members"] == ["0", "1"] and found["slowest"] == "1" and found["because"] == "compute"
    assert (found["state"], found["step"]) == ("ended", 40)


def test_the_state_fits_eighty_columns(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    folder = write_run(tmp_path / "run", steps=60)
    (folder / "workers.jsonl").write_text(
        json.dumps(
            {
                "step": 60,
                "workers": {
                    f"{rank}-0123456789": {"step_seconds": 1 + rank, "exposed_seconds": 0} for rank in range(9)
                },
            }
        )
    )
    assert main(["watch", str(folder), "--once"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "worker 8-0123456789, busy 2.0× as long" in " ".join(shown.split())
    assert "and 1 more" in " ".join(shown.split())


def test_a_run_that_diverged_is_exit_code_1(tmp_path, capsys):
    folder = write_run(tmp_path / "run", steps=4)
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "diverged": "the loss is nan"}))
    assert main(["watch", str(folder)]) == 1
    assert capsys.readouterr().out.startswith("diverged, step 4")


def _work(url, workers, may_continue, finished):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    worker = attach(
        model, torch.optim.SGD(model.parameters(), lr=0.1), "LocalSGD(period=2)", rendezvous=url, workers=workers
    )
    for _ in range(6):
        if worker.step == 3 and worker.rank == 1:
            assert may_continue.wait(60)
        worker.optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        worker.record_batch(loss=loss)
        worker.optimizer.step()
    assert finished.wait(60)
    worker.detach()


def test_a_run_over_a_bucket_shows_its_workers_and_who_is_late(capsys):
    pytest.importorskip("obstore")
    url, may_continue, finished = "memory://watched", threading.Event(), threading.Event()
    threads = [threading.Thread(target=_work, args=(url, 2, may_continue, finished), daemon=True) for _ in range(2)]
    for each in threads:
        each.start()

    def until(holds):
        while True:
            assert main(["watch", url, "--once", "--json"]) == 0
            found = json.loads(capsys.readouterr().out)
            if holds(found):
                return found
            time.sleep(0.1)

    while main(["watch", url, "--once", "--json"]) == 2:  # no run exists yet
        time.sleep(0.1)
    capsys.readouterr()
    found = until(lambda found: [each["late"] for each in found["workers"]] == ["", "awaited"])
    assert found["state"] == "running" and found["strategy"] == "LocalSGD(period=2)"
    may_continue.set()
    found = until(lambda found: [each["step"] for each in found["workers"]] == [6, 6])
    assert [each["rounds"] for each in found["workers"]] == [3, 3] and not any(
        each["late"] for each in found["workers"]
    )
    assert all(each["bytes_up"] > 0 and each["bytes_down"] > 0 for each in found["workers"])
    assert found["loss"] > 0 and len(found["members"]) == 2
    assert main(["watch", url, "--once"]) == 0
    assert "3 rounds, step 6, loss" in " ".join(capsys.readouterr().out.split())
    finished.set()
    for each in threads:
        each.join(60)
    assert main(["watch", url]) == 0
    assert capsys.readouterr().out.startswith("ended, step 6")


def test_rounds_that_close_without_late_workers_are_shown_with_the_workers_that_join(capsys):
    pytest.importorskip("obstore")
    url, goes, finished = "memory://watched-late", [threading.Event() for _ in range(3)], threading.Event()

    def work():
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        late = LateMerging(quorum=1.0)
        worker = attach(model, optimizer, "LocalSGD(period=2)", rendezvous=url, workers=2, elastic=late)
        name = worker.elastic.view.members.index(worker.elastic.worker_id)
        while not finished.is_set():
            assert goes[name].wait(60)
            time.sleep(0.01)
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
        worker.detach()

    def until(holds):
        while True:
            assert main(["watch", url, "--once", "--json"]) == 0
            found = json.loads(capsys.readouterr().out)["workers"]
            if holds(found):
                return found
            time.sleep(0.1)

    goes[0].set()
    threads = [threading.Thread(target=work, daemon=True) for _ in range(2)]
    for each in threads:
        each.start()
    while main(["watch", url, "--once", "--json"]) == 2:  # no run exists yet
        time.sleep(0.1)
    capsys.readouterr()
    until(lambda found: sorted(each["late"] for each in found) == ["", "awaited"])
    threads.append(threading.Thread(target=work, daemon=True))
    threads[-1].start()
    goes[1].set()
    goes[2].set()
    found = until(lambda found: len(found) == 3 and all(each["rounds"] > 2 and not each["late"] for each in found))
    assert all(each["bytes_up"] > 0 and each["bytes_down"] > 0 for each in found)
    finished.set()
    for each in threads:
        each.join(60)
    assert not any(each.is_alive() for each in threads)


def test_a_bucket_without_a_run_is_refused_and_stays_empty(tmp_path, capsys, monkeypatch):
    pytest.importorskip("obstore")
    monkeypatch.setenv("THINWIRE_KEY", new_key())
    assert main(["watch", f"file://{tmp_path}/none", "--once"]) == 2
    assert "no run exists there" in capsys.readouterr().err
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_mistakes_are_one_message(tmp_path, capsys):
    assert main(["watch", str(tmp_path / "none")]) == 2
    assert "no such folder" in capsys.readouterr().err
    assert main(["watch", str(tmp_path), "--every", "0"]) == 2
    assert "--every 0 is invalid: it must be at least 0.1 seconds" in capsys.readouterr().err
