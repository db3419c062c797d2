# SPDX-License-Identifier: Apache-2.0
"""`attach(..., rendezvous=URL)`: training over a folder and over S3 servers equals training on threads, bit for bit."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("obstore")
pytest.importorskip("cryptography")

from tests.buckets import Process, environment, faulty, serve, url_of
from tests.problems import flat
from thinwire import Comm, Worker, attach, run_threads
from thinwire.core.storage.bucket import KEY, Bucket, BucketStore, new_key
from thinwire.errors import CommTimeoutError, ConfigError, MismatchError, ThinwireError

FOUR_BITS = "codec=ErrorFeedback(Nearest(bits=4))"
RECIPES = [
    "LocalSGD(period=4)",
    "DiLoCo(period=4)",
    f"DiLoCo(period=4, delay=2, {FOUR_BITS})",
    f"OverlapLocalSGD(period=4, {FOUR_BITS})",
    "NoLoCo(period=4)",
    "Budget(LocalSGD(period=2, codec=ErrorFeedback(Nearest())), '100B/step')",
]
MORE = [
    "SlowMo(period=4)",
    "CoCoD(period=4)",
    f"DiLoCo(period=8, fragments=2, delay=2, mixing=0.5, {FOUR_BITS})",
]
STEPS, SAVED_AT = 14, 6  # in the middle of a round


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, new_key())


def build(width: int = 6) -> tuple[nn.Module, torch.optim.Optimizer]:
    draw = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 1))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=draw))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(worker: Worker, model: nn.Module, optimizer: torch.optim.Optimizer, until: int) -> None:
    while worker.step < until:
        x = torch.randn(8, 5, generator=torch.Generator().manual_seed(100 * worker.step + worker.rank))
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()


def run(
    recipe: str, folder: Path, comm: Comm | None = None, **settings: Any
) -> tuple[int, Tensor, Tensor, list[float]]:
    """Train, save in the middle of a round, and load that again; returns what `found_by` returns."""
    model, optimizer = build()
    worker = attach(model, optimizer, recipe, comm=comm, timeout=30, **settings)
    train(worker, model, optimizer, SAVED_AT)
    worker.save(folder)
    train(worker, model, optimizer, STEPS)
    first = flat(model)
    worker.load(folder)
    train(worker, model, optimizer, STEPS)
    assert torch.equal(first, flat(model))
    return found_by(worker, model, optimizer)


def resume(recipe: str, folder: Path, **settings: Any) -> tuple[int, Tensor, Tensor, list[float]]:
    """Continue in the middle of a round, as a worker that was started again."""
    model, optimizer = build()
    worker = attach(model, optimizer, recipe, timeout=30, **settings)
    worker.load(folder)
    assert worker.step == SAVED_AT
    train(worker, model, optimizer, STEPS)
    return found_by(worker, model, optimizer)


def found_by(
    worker: Worker, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[int, Tensor, Tensor, list[float]]:
    """Detach; returns rank, parameters, consensus and moments."""
    with worker.consensus():
        agreed = flat(model)
    moments = [float(each["momentum_buffer"].sum()) for each in optimizer.state.values()]
    found = worker.rank, flat(model), agreed, moments
    worker.detach()
    return found


def same(found: Any, expected: Any) -> bool:
    return all(
        a[0] == b[0] and torch.equal(a[1], b[1]) and torch.equal(a[2], b[2]) and a[3] == b[3]
        for a, b in zip(sorted(found, key=lambda each: each[0]), expected, strict=True)
    )


def on_threads(size: int, work: Callable[[int], Any]) -> list[Any]:
    def body(rank: int) -> Any:
        with torch.autograd.set_multithreading_enabled(False):
            return work(rank)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(body, range(size)))


@pytest.mark.parametrize(
    "size", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("recipe", [*RECIPES, *MORE])
@pytest.mark.slow
def test_training_over_a_bucket_equals_training_on_threads(recipe: str, size: int, tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}"
    found = on_threads(size, lambda _: run(recipe, tmp_path / "ours", rendezvous=url, workers=size))
    assert same(found, run_threads(size, lambda comm: run(recipe, tmp_path / "theirs", comm)))


def test_a_second_strategy_and_an_export_work_over_a_bucket(tmp_path: Path) -> None:
    def work(_: int) -> Tensor:
        model, optimizer = build()
        worker = attach(model, optimizer, "LocalSGD(period=4)", rendezvous="memory://switch", workers=2)
        train(worker, model, optimizer, 6)
        worker.switch(f"DiLoCo(period=3, {FOUR_BITS})")
        train(worker, model, optimizer, 12)
        with pytest.raises(ConfigError, match=r"AllReduce\(\) over a bucket: it sends at every step"):
            worker.switch("AllReduce()")
        worker.export(tmp_path / "model.safetensors")
        with worker.consensus():
            agreed = flat(model)
        worker.detach()
        return agreed

    first, second = on_threads(2, work)
    assert torch.equal(first, second) and (tmp_path / "model.safetensors").exists()


def test_workers_at_different_paces_equal_threads() -> None:
    def work(rank: int, comm: Comm | None) -> Tensor:
        model, optimizer = build()
        given: dict[str, Any] = {"comm": comm} if comm else {"rendezvous": "memory://paced", "workers": 2}
        worker = attach(model, optimizer, "Paced(LocalSGD(period=4), steps=(4, 2))", timeout=30, **given)
        train(worker, model, optimizer, 12)
        worker.detach()
        return flat(model)

    expected = run_threads(2, lambda comm: work(comm.rank, comm))
    assert all(torch.equal(found, expected[0]) for found in on_threads(2, lambda rank: work(rank, None)))


@pytest.mark.parametrize(
    "recipe", ["Paced(LocalSGD(period=8))", "Budget(LocalSGD(period=2, codec=ErrorFeedback(Nearest())), '500B/s')"]
)
def test_workers_agree_if_messages_depend_on_measured_times(recipe: str) -> None:
    x = torch.randn(64, 5, generator=torch.Generator().manual_seed(1))

    def loss(model: nn.Module) -> float:
        with torch.no_grad():
            return float((model(x) - x.sum(1, keepdim=True)).square().mean())

    def work(_: int) -> tuple[int, int, float, Tensor, dict[str, float]]:
        model, optimizer = build()
        before, own = loss(model), 0
        worker = attach(model, optimizer, recipe, rendezvous=f"memory://timed-{recipe[:5]}", workers=2, timeout=30)
        while worker.step < 48:
            time.sleep(0.01 if worker.rank else 0.002)
            train(worker, model, optimizer, worker.step + 1)
            own += 1
        metrics = worker.metrics()
        with worker.consensus():
            found = worker.rank, own, loss(model) / before, flat(model), metrics
        worker.detach()
        return found

    (_, fast, fell, first, metrics), (_, slow, _, second, others) = sorted(on_threads(2, work), key=lambda x: x[0])
    assert torch.equal(first, second) and fell < 0.5
    if recipe.startswith("Paced"):
        assert slow < fast
    else:
        assert slow == fast == 48 and metrics == others and 0 < metrics["budget_used"] <= 1 and "bits" in metrics


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ("AllReduce()", r"sends at every step.*took 0\.\d\d s, so that every step would take at least"),
        ("PushSum()", "sends at every step"),
        ("PushSum(staleness=3)", r"took 0\.\d\d s, .* longer where it waits for them\. Use"),
        ("LocalSGD(period=1)", "sends at every step"),
        ("SlowMo(base=PushSum(), period=48)", "sends at every step"),
        ("DiLoCo(period=4, fragments=4)", "sends at every step"),
        ("AsyncLeaderSGD()", "its workers send messages that no other rank waits for"),
    ],
)
def test_a_strategy_that_a_bucket_cannot_carry_is_refused_with_the_reason(recipe: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"over a bucket: .*{reason}"):
        attach(*build(), recipe, rendezvous="memory://refused", workers=2)
    attach(*build(), "LocalSGD(period=2)", rendezvous="memory://refused", workers=1).detach()


def test_a_strategy_that_no_elastic_run_can_have_asks_for_the_number_of_workers() -> None:
    with pytest.raises(ConfigError, match=r"NodeAverage: its nodes.*a run is elastic: give workers=N"):
        attach(*build(), "NodeAverage(node_size=1)", rendezvous="memory://inelastic")
    attach(*build(), "NodeAverage(node_size=1)", rendezvous="memory://inelastic", workers=1).detach()


def test_a_process_may_attach_again_after_a_refusal(tmp_path: Path) -> None:
    """The runs of a process are numbered, and a refused one must not count: other machines have not seen it."""
    url = f"file://{tmp_path}/run"
    with pytest.raises(ConfigError, match="sends at every step"):
        attach(*build(), "AllReduce()", rendezvous=url, workers=1)
    with pytest.raises(CommTimeoutError, match="rank 1 of 2 initial workers did not arrive"):
        attach(*build(), "LocalSGD(period=2)", rendezvous=url, workers=2, timeout=1)
    attach(*build(), "LocalSGD(period=2)", rendezvous=url, workers=1).detach()
    assert not (tmp_path / "run" / "1").exists() and (tmp_path / "run" / "0").exists()


def test_settings_that_a_bucket_cannot_carry_are_refused() -> None:
    model, optimizer = build()
    url = "memory://settings"
    with pytest.raises(ConfigError, match="rendezvous with a GradScaler"):
        attach(model, optimizer, "LocalSGD()", rendezvous=url, scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ConfigError, match="rendezvous with find_unused=True"):
        attach(model, optimizer, "LocalSGD()", rendezvous=url, find_unused=True)
    with pytest.raises(ConfigError, match="strategy='auto' with rendezvous"):
        attach(model, optimizer, "auto", rendezvous=url)
    with pytest.raises(ConfigError, match="rendezvous with a comm, a mesh"):
        run_threads(1, lambda comm: attach(model, optimizer, "LocalSGD()", rendezvous=url, comm=comm))
    with pytest.raises(ConfigError, match=r"workers=0: must be at least 1"):
        attach(model, optimizer, "LocalSGD()", rendezvous=url, workers=0)
    with pytest.raises(ConfigError, match=r"workers=2 without rendezvous"):
        attach(model, optimizer, "LocalSGD()", workers=2)
    attach(model, optimizer, "LocalSGD()", rendezvous=url, workers=1).detach()


def test_a_worker_with_another_model_is_refused_on_all_ranks() -> None:
    def work(rank: int) -> str:
        model, optimizer = build(6 + rank)
        with pytest.raises(MismatchError) as caught:
            attach(model, optimizer, "LocalSGD(period=2)", rendezvous="memory://models", workers=2)
        return str(caught.value)

    first, second = on_threads(2, work)
    assert first == second and "parameter 0.weight is" in first and "6x5 float32" in first and "7x5 float32" in first


def test_workers_that_expect_other_numbers_of_workers_are_refused() -> None:
    def enter(workers: int) -> str:
        model, optimizer = build()
        with pytest.raises(MismatchError) as caught:
            attach(model, optimizer, "LocalSGD(period=4)", rendezvous="memory://numbers", workers=workers, timeout=30)
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(enter, (2, 3)))
    assert found[0] == found[1] and "the number of workers is " in found[0]


@pytest.mark.parametrize("fixed_first", [False, True])
def test_a_fixed_and_an_elastic_worker_do_not_train_alone(fixed_first: bool) -> None:
    """As if THINWIRE_WORKERS were set on one of two machines."""
    url, entered = f"memory://one-number-{fixed_first}", threading.Event()

    def enter(workers: int | None, timeout: float) -> str:
        model, optimizer = build()
        try:
            worker = attach(model, optimizer, "LocalSGD(period=4)", rendezvous=url, workers=workers, timeout=timeout)
        except ThinwireError as error:
            return f"{type(error).__name__}: {error}"
        entered.wait(20)
        worker.detach()
        return f"alone of {worker.size}"

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(enter, 2 if fixed_first else None, 3)
        bucket = Bucket.open(url)
        place = BucketStore(bucket, "0")
        while place.values(["first/0/0"]) == [b""]:
            time.sleep(0.01)
        second = pool.submit(enter, None if fixed_first else 2, 30)
        assert (
            second.result(20).startswith("ConfigError: ") and "Set THINWIRE_WORKERS on all machines" in second.result()
        )
        entered.set()
        words = (
            "CommTimeoutError: this worker: rank 1 of 2 initial workers did not arrive" if fixed_first else "alone of 1"
        )
        assert first.result(20).startswith(words)


def test_a_run_that_has_its_workers_refuses_another_one() -> None:
    def attached() -> Worker:
        return attach(*build(), "LocalSGD(period=2)", rendezvous="memory://full", workers=1, timeout=1)

    worker = attached()
    with pytest.raises(ConfigError, match="this run has 1 workers already, and all of them run"):
        attached()
    worker.detach()
    attached().detach()  # it has ended, so it starts again


def test_a_missing_worker_is_named() -> None:
    with pytest.raises(CommTimeoutError, match="rank 1 of 2 initial workers did not arrive in 1 s"):
        attach(*build(), "LocalSGD(period=2)", rendezvous="memory://alone", workers=2, timeout=1)


def test_the_url_and_the_number_of_workers_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THINWIRE_RENDEZVOUS", "memory://environment")
    monkeypatch.setenv("THINWIRE_WORKERS", "2")

    def work(_: int) -> tuple[int, int]:
        worker = attach(*build(), "LocalSGD(period=2)")
        found = worker.rank, worker.size
        worker.detach()
        return found

    assert sorted(on_threads(2, work)) == [(0, 2), (1, 2)]


# -- processes ---------------------------------------------------------------------------------------------------------


def answer_runs(outbox: Any, url: str, size: int, recipes: list[str], folder: Path) -> None:
    """Run the recipes one after the other, and answer with the result of each, and that of a worker that resumes it."""
    for i, recipe in enumerate(recipes):
        for call, place in ((run, f"{url}/{i}"), (resume, f"{url}/{i}-resumed")):
            rank, x, agreed, moments = call(recipe, folder / str(i), rendezvous=place, workers=size)
            outbox.send((rank, x.tolist(), agreed.tolist(), moments))


def train_until_an_error(outbox: Any, url: str) -> None:
    """Train until another worker is lost."""
    model, optimizer = build()
    worker = attach(model, optimizer, "LocalSGD(period=2)", rendezvous=url, workers=2, timeout=60)
    outbox.send("attached")
    for until in range(1, 100_000):
        train(worker, model, optimizer, until)
        time.sleep(0.02)


def check_processes(url: str, extra: dict[str, str], size: int, recipes: list[str], folder: Path) -> None:
    extra = {**extra, KEY: os.environ[KEY]}
    # Each continues its own part of a checkpoint.
    ranks = [{**extra, "THINWIRE_RANK": str(rank)} for rank in range(size)]
    workers = [Process(answer_runs, url, size, recipes, folder, extra=each) for each in ranks]
    try:
        for i, recipe in enumerate(recipes):
            theirs = run_threads(size, lambda comm, r=recipe, i=i: run(r, folder / f"threads{i}", comm))
            for _ in range(2):
                found = [each.receive(100) for each in workers]
                assert not any(isinstance(each, str) for each in found), found
                tensors = [(rank, torch.tensor(x), torch.tensor(agreed), moments) for rank, x, agreed, moments in found]
                assert same(tensors, theirs), recipe
    finally:
        for each in workers:
            each.end(5)


def test_processes_over_a_folder_equal_threads(tmp_path: Path) -> None:
    check_processes(f"file://{tmp_path}/run", {}, 2, RECIPES, tmp_path)


@pytest.mark.parametrize("server", ["weed", "azurite", "fake-gcs-server"])
def test_processes_over_a_server_equal_threads(server: str, tmp_path: Path) -> None:
    with serve(server, tmp_path) as endpoint:
        check_processes(f"{url_of(server)}/run", environment(endpoint, server), 2, RECIPES[2:3], tmp_path)


@pytest.mark.slow
def test_failed_slow_and_lost_requests_change_nothing(tmp_path: Path) -> None:
    """Also writes that have succeeded although the answer says otherwise."""
    with serve("moto", tmp_path) as endpoint, faulty(endpoint, seed=3, share=0.3) as proxy:
        check_processes("s3://bucket/faulty", environment(proxy.endpoint), 2, RECIPES[2:3], tmp_path)
        assert min(proxy.faults[kind] for kind in ("500 before", "500 after", "closed after", "slow")) > 3, proxy.faults


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
# On a loaded machine the check at the start has refused moto, a development server.
@pytest.mark.parametrize("server", ["weed"])
def test_processes_over_s3_servers_equal_threads_for_all_recipes(server: str, size: int, tmp_path: Path) -> None:
    with serve(server, tmp_path) as endpoint:
        check_processes(f"s3://bucket/{size}", environment(endpoint), size, RECIPES, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3, 4, 5])
def test_any_number_of_processes_over_a_folder_equals_threads_for_all_recipes(size: int, tmp_path: Path) -> None:
    check_processes(f"file://{tmp_path}/run", {}, size, RECIPES, tmp_path)


def test_a_killed_worker_is_reported_and_the_run_starts_again(tmp_path: Path) -> None:
    url, extra = f"file://{tmp_path}/run", {KEY: os.environ[KEY]}
    workers = [Process(train_until_an_error, url, extra=extra) for _ in range(2)]
    try:
        assert [each.receive(60) for each in workers] == ["attached"] * 2
        assert workers[1].process.pid is not None
        os.kill(workers[1].process.pid, signal.SIGKILL)
        told = workers[0].receive(55)  # before its timeout
        assert told.startswith("PeerLostError: ") and "a worker is gone" in told and "has not written" in told
        workers += [Process(train_until_an_error, url, extra=extra) for _ in range(2)]
        assert [each.receive(60) for each in workers[2:]] == ["attached"] * 2
    finally:
        for each in workers:
            each.end()
