# SPDX-License-Identifier: Apache-2.0
"""Rounds that close without late workers: their work counts later, as a stacked oracle computes it."""

from __future__ import annotations

import itertools
import json
import os
import random
import secrets
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("obstore")
pytest.importorskip("cryptography")

from tests.buckets import Process
from tests.elastic.chaos import SILENT_SECONDS, be_elsewhere
from tests.oracles.late import Arrival, train, train_fragments
from tests.pretend_gpu import GPU, pretend_gpu
from thinwire import (
    AllReduce,
    CommError,
    CommTimeoutError,
    ConfigError,
    DiLoCo,
    ErrorFeedback,
    Gathered,
    LateMerging,
    LocalSGD,
    MismatchError,
    Nearest,
    OneBit,
    OverlapLocalSGD,
    Paced,
    PowerSGD,
    SlowMo,
    Strategy,
    Streaming,
    Worker,
    attach,
)
from thinwire.core.storage.bucket import KEY, Bucket, BucketStore, new_key
from thinwire.elastic.closing import Closing, Contribution, Phase
from thinwire.elastic.late_rounds import LateRounds
from thinwire.elastic.notice import Notice
from thinwire.elastic.objects import BucketObjects
from thinwire.elastic.threads import ThreadNetwork
from thinwire.planning.plan import explain, parse_store

PERIOD, RATE, SIZE, NUMEL = 4, 0.05, 3, 24
TARGETS = torch.randn(SIZE + 2, NUMEL, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
START = torch.randn(NUMEL, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def gradient(worker: int, step: int, x: Tensor) -> Tensor:
    return x - TARGETS[worker] * (1.0 + 0.1 * (step % 5))


def samples(worker: int) -> float:
    return 1.0 + worker


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(START.clone())

    def tensors(self) -> list[nn.Parameter]:
        return [self.x]


class Tensors(nn.Module):
    """As `Model`, in an embedding and two tensors."""

    def __init__(self) -> None:
        super().__init__()
        first, second, third = START.clone().split([6, 10, 8])
        self.vector, self.matrix = nn.Parameter(first), nn.Parameter(second.view(2, 5))
        self.embedding = nn.Embedding(4, 2, _weight=third.view(4, 2))

    def tensors(self) -> list[nn.Parameter]:
        return [self.vector, self.matrix, self.embedding.weight]


TURNED = (slice(6), slice(6, 16))
"""The tensors of `Tensors` without its embedding."""


def flat(model: Model | Tensors) -> Tensor:
    return torch.cat([x.detach().flatten() for x in model.tensors()]).cpu()


def name_of(worker: Worker) -> str:
    assert isinstance(worker.elastic, LateRounds)
    return worker.elastic._name


def run(
    fleet: Callable[[int], dict[str, Any]],
    strategy: Strategy,
    late: LateMerging,
    rounds: int,
    *,
    size: int = SIZE,
    period: int = PERIOD,
    pause: Callable[[int, int], float] = lambda name, step: 0.0,
    make: type[Model] | type[Tensors] = Model,
    device: str = "cpu",
) -> list[tuple[Tensor, list[Closing]]]:
    """Train threads up to a round; returns the consensus and the log of each."""

    def work(rank: int) -> tuple[Tensor, list[Closing]]:
        model = make().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        with attach(model, optimizer, strategy, timeout=30, **fleet(rank)) as worker:
            assert isinstance(worker.elastic, LateRounds)
            name, own = int(name_of(worker)), 0
            while worker.step < rounds * period:
                slopes = gradient(name, own, flat(model)).split([x.numel() for x in model.tensors()])
                for x, slope in zip(model.tensors(), slopes, strict=True):
                    x.grad = slope.view_as(x).to(device)
                worker.record_batch(samples(name))
                time.sleep(pause(name, own))
                optimizer.step()
                own += 1
            with worker.consensus():
                return flat(model), worker.elastic.closings

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, range(size)))


def in_bucket(late: LateMerging) -> Callable[[int], dict[str, Any]]:
    url = f"memory://{secrets.token_hex(8)}"
    return lambda _: {"rendezvous": url, "workers": SIZE, "elastic": late}


def in_store(late: LateMerging) -> Callable[[int], dict[str, Any]]:
    network = ThreadNetwork()
    return lambda rank: {"elastic": network.fleet(f"{rank}-x", rank, SIZE, late=late, timeout=30)}


def random_log(seed: int, rounds: int, delay: int, carry: str) -> tuple[Closing, ...]:
    """Closings as workers of random speeds could cause them; a late one leaves out steps of its next round."""
    draw, missed = random.Random(seed), dict.fromkeys(map(str, range(SIZE)), 0)
    underway: list[tuple[str, int]] = [(str(name), 0) for name in range(SIZE)]
    counts, log = dict.fromkeys(map(str, range(SIZE)), 0), list[Closing]()
    for number in range(rounds):
        taken, waiting = list[Contribution](), list[str]()
        while not taken or (underway and draw.random() < 0.6):
            if not underway:
                break
            name, started = underway.pop(draw.randrange(len(underway)))
            carried = carry != "off" and counts[name]
            steps = (PERIOD if carried else PERIOD - delay) - missed[name]
            missed[name] = 0 if started == number else draw.randrange(PERIOD - delay)
            taken.append(Contribution(started, name, steps * samples(int(name))))
            counts[name] += 1
            if started == number:
                waiting.append(name)
            else:  # a late worker starts again in the open round, or after it
                underway.append((name, number)) if draw.random() < 0.5 else waiting.append(name)
        log.append(Closing(number, tuple(sorted(taken))))
        underway += [(name, number + 1) for name in waiting]
    return tuple(log)


def random_log_of_fragments(
    seed: int, rounds: int, fragments: int, ends: Sequence[int], period: int, delay: int, carry: str
) -> tuple[Closing, ...]:
    """Closings of rounds that alternate between fragments, as workers of random speeds could cause them."""
    draw, log = random.Random(seed), list[Closing]()
    steps, at = [0] * SIZE, [list(range(fragments)) for _ in range(SIZE)]
    tokens, waits = [[0.0] * fragments for _ in range(SIZE)], [-1] * SIZE
    sent: list[Contribution] = []

    def restart(name: int, f: int) -> None:
        at[name][f] = len(log) + (f - len(log)) % fragments
        waits[name] = -1
        if carry == "off":
            tokens[name][f] = 0.0

    while len(log) < rounds:
        running = [name for name in range(SIZE) if waits[name] < 0]
        due = [each for each in sent if (len(log) - each.started) % fragments == 0]
        if due and (not running or draw.random() < 0.3):
            slow = {str(name) for name in range(SIZE) if draw.random() < 0.3}
            taken = [each for each in due if each.worker not in slow] or due
            sent = [each for each in sent if each not in taken]
            log.append(Closing(len(log), tuple(sorted(taken))))
            continue
        for name in range(SIZE):  # a worker that waits continues from the newest point that it knows
            if waits[name] >= 0 and len(log) > at[name][waits[name]] and draw.random() < 0.7:
                restart(name, waits[name])
        if not running:
            continue
        name = draw.choice(running[: draw.randint(1, len(running))])
        steps[name] += 1
        for f in range(fragments):
            tokens[name][f] += 1.0 + name
        for f, end in enumerate(ends):
            left = (end - steps[name]) % period
            if left == delay:
                others = tuple(x for g, x in enumerate(at[name]) if g != f)
                sent.append(Contribution(at[name][f], str(name), tokens[name][f], others))
                tokens[name][f] = 0.0
            if left == 0:
                waits[name] = f
                if len(log) > at[name][f]:
                    restart(name, f)
    return tuple(log)


def starts_of(each: Contribution) -> tuple[int, ...]:
    """Of all fragments, in their order."""
    starts = list(each.others)
    starts.insert(each.started % (1 + len(starts)), each.started)
    return tuple(starts)


def arrivals(log: Sequence[Closing]) -> list[list[Arrival]]:
    return [[(int(each.worker), each.started, each.tokens) for each in closing.contributions] for closing in log]


def nesterov(rate: float = 0.7, momentum: float = 0.9) -> Callable[[Tensor, Tensor], Tensor]:
    velocity = torch.zeros((), dtype=torch.float64)

    def step(x: Tensor, mean: Tensor) -> Tensor:
        nonlocal velocity
        velocity = momentum * velocity - mean
        return x - rate * (-mean + momentum * velocity)

    return step


def slow(momentum: float = 0.5) -> Callable[[Tensor, Tensor], Tensor]:
    velocity = torch.zeros((), dtype=torch.float64)

    def step(x: Tensor, mean: Tensor) -> Tensor:
        nonlocal velocity
        velocity = momentum * velocity - mean / RATE
        return x - RATE * velocity

    return step


STRATEGIES: dict[str, tuple[Strategy, Callable[[], Callable[[Tensor, Tensor], Tensor]]]] = {
    "DiLoCo": (DiLoCo(period=PERIOD), nesterov),
    "SlowMo": (SlowMo(period=PERIOD, momentum=0.5), slow),
    "LocalSGD": (LocalSGD(period=PERIOD), lambda: lambda x, mean: x + mean),
}


def code(x: Tensor) -> Tensor:
    """Nearest(8) in one block, from its definition."""
    codec = Nearest(bits=8)
    return codec.decode(codec.encode(x.float(), {}), x.float()).double()


CASES = list(
    itertools.product(STRATEGIES, ["off", "discounted", "full"], [(0, "off"), (1, "off"), (2, "full"), (2, "adaptive")])
)


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize(("base", "late", "delayed"), CASES)
def test_any_order_of_arrivals_equals_the_oracle(base: str, late: Any, delayed: tuple[int, Any], coded: bool) -> None:
    delay, carry = delayed
    log = random_log(CASES.index((base, late, delayed)) + 100 * coded, 7, delay, carry)
    codec = ErrorFeedback(Nearest(bits=8)) if coded else None
    options = LateMerging(late=late, codec=codec, delay=delay, carry=carry, replay=log)
    strategy, outer = STRATEGIES[base]
    found = run(in_store(options), strategy, options, len(log))
    expected = train(
        gradient,
        START,
        arrivals(log),
        samples=samples,
        rate=RATE,
        outer=outer(),
        exponent={"off": None, "discounted": 0.5, "full": 0.0}[late],
        code=code if coded else None,
        delay=delay,
        carry=carry,
    )
    for x, closings in found:
        assert torch.equal(x, found[0][0])
        assert closings == list(log)
    assert torch.allclose(found[0][0], expected, atol=1e-4 if coded else 1e-10), (found[0][0] - expected).abs().max()


@pytest.mark.parametrize("coded", [False, True])
def test_models_on_a_gpu_merge_late_work_as_on_the_cpu(coded: bool) -> None:
    log = random_log(5 + coded, 7, 2, "full")
    codec = ErrorFeedback(Nearest(bits=8)) if coded else None
    options = LateMerging(codec=codec, delay=2, carry="full", merge="radial", replay=log)
    strategy = DiLoCo(period=PERIOD)
    with pretend_gpu():
        found = run(in_store(options), strategy, options, len(log), make=Tensors, device=str(GPU))
    for (mine, _), (theirs, _) in zip(
        found, run(in_store(options), strategy, options, len(log), make=Tensors), strict=True
    ):
        assert torch.allclose(mine, theirs, rtol=1e-6 if coded else 1e-12)


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize(("delay", "carry"), [(0, "off"), (2, "full")])
def test_norms_and_directions_are_merged_as_in_the_oracle(delay: int, carry: Any, coded: bool) -> None:
    log = random_log(7 + coded, 7, delay, carry)
    codec = ErrorFeedback(Nearest(bits=8)) if coded else None
    options = LateMerging(codec=codec, delay=delay, carry=carry, merge="radial", replay=log)
    found = run(in_store(options), DiLoCo(period=PERIOD), options, len(log), make=Tensors)
    shared: dict[str, Any] = {"samples": samples, "rate": RATE, "exponent": 0.5, "delay": delay, "carry": carry}
    expected, mean = (
        train(gradient, START, arrivals(log), outer=nesterov(), code=code if coded else None, turned=turned, **shared)
        for turned in (TURNED, ())
    )
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][0], found[2][0])
    assert torch.allclose(found[0][0], expected, atol=1e-4 if coded else 1e-10), (found[0][0] - expected).abs().max()
    assert (expected - mean).norm() > 0.01


LONG = 6
"""A period that has room for a delay between the rounds of three fragments."""
FRAGMENTED: dict[str, tuple[Strategy, int, Callable[[], Callable[[Tensor, Tensor], Tensor]]]] = {
    "DiLoCo": (DiLoCo(period=LONG, fragments=2), 2, nesterov),
    "three": (DiLoCo(period=LONG, fragments=3), 3, nesterov),
    "Streaming": (Streaming(SlowMo(period=LONG, momentum=0.5), fragments=2), 2, slow),
}
FRAGMENT_CASES = list(
    itertools.product(
        FRAGMENTED, ["off", "discounted", "full"], [(0, "off"), (1, "off"), (1, "full"), (1, "adaptive")], [False, True]
    )
)


@pytest.mark.parametrize(("base", "late", "delayed", "coded"), FRAGMENT_CASES)
def test_fragments_in_any_order_of_arrivals_equal_the_oracle(
    base: str, late: Any, delayed: tuple[int, Any], coded: bool
) -> None:
    seed = FRAGMENT_CASES.index((base, late, delayed, coded))
    check_fragments(seed, base, late, delayed, coded=coded)


def test_fragments_merge_norms_and_directions_of_the_parts_of_tensors() -> None:
    check_fragments(0, "DiLoCo", "discounted", (1, "full"), coded=False, turned=[[slice(6), slice(6, 12)], [slice(4)]])


def check_fragments(
    seed: int, base: str, late: Any, delayed: tuple[int, Any], *, coded: bool, turned: Sequence[Sequence[slice]] = ()
) -> None:
    strategy, count, outer = FRAGMENTED[base]
    delay, carry = delayed
    # The fragments in the order in which their rounds end: those of Streaming from the last one.
    cuts = [slice(f * NUMEL // count, (f + 1) * NUMEL // count) for f in range(count)]
    cuts = cuts[::-1] if base == "Streaming" else cuts
    ends = [(f + 1) * LONG // count for f in range(count)]
    log = random_log_of_fragments(seed, 4 * count, count, ends, LONG, delay, carry)
    codec = ErrorFeedback(Nearest(bits=8)) if coded else None
    merge: Any = "radial" if turned else "mean"
    options = LateMerging(late=late, codec=codec, delay=delay, carry=carry, merge=merge, replay=log)
    found = run(in_store(options), strategy, options, 4, period=LONG, make=Tensors if turned else Model)
    expected = train_fragments(
        gradient,
        START,
        [[(int(c.worker), c.started, c.tokens, starts_of(c)) for c in closing.contributions] for closing in log],
        period=LONG,
        rate=RATE,
        cuts=cuts,
        ends=ends,
        outers=[outer() for _ in cuts],
        exponent={"off": None, "discounted": 0.5, "full": 0.0}[late],
        code=code if coded else None,
        delay=delay,
        carry=carry,
        turned=turned,
    )
    for x, closings in found:
        assert torch.equal(x, found[0][0])
        assert closings == list(log)
    assert torch.allclose(found[0][0], expected, atol=1e-4 if coded else 1e-10), (found[0][0] - expected).abs().max()


def test_random_logs_of_fragments_have_late_work() -> None:
    logs = [random_log_of_fragments(seed, 12, 3, (2, 4, 6), LONG, 0, "off") for seed in range(20)]
    ages = [each.age(closing.round) for log in logs for closing in log for each in closing.contributions]
    assert max(ages) >= 2 and sum(age > 0 for age in ages) > 50


@pytest.mark.parametrize("carrier", [in_bucket, in_store])
@pytest.mark.parametrize("carry", ["off", "full"])
def test_a_slow_worker_with_fragments_counts_late_and_the_log_replays_bitwise(carrier: Any, carry: Any) -> None:
    delay = int(carry == "full")
    options = LateMerging(quorum=0.5, deviations=0.0, delay=delay, carry=carry)
    strategy = DiLoCo(period=LONG, fragments=3)
    found = run(carrier(options), strategy, options, 6, period=LONG, pause=lambda name, _: 0.02 if name == 2 else 0.004)
    log = max((closings for _, closings in found), key=len)
    for _, closings in found:
        assert closings == log[: len(closings)]
    taken = [each for closing in log for each in closing.contributions]
    assert any(each.worker == "2" and each.age(closing.round) for closing in log for each in closing.contributions)
    assert {each.started % 3 for each in taken if each.worker == "2"} == {0, 1, 2}  # none of its fragments is left out
    assert len({(each.worker, each.started) for each in taken}) == len(taken)
    by_round = {len(closings): x for x, closings in found}
    replay = LateMerging(delay=delay, carry=carry, replay=tuple(log))
    again = run(carrier(replay), strategy, replay, 6, period=LONG)
    assert max(len(closings) for _, closings in again) == len(log)
    for x, closings in again:
        if len(closings) in by_round:
            assert torch.equal(x, by_round[len(closings)])


def test_random_logs_have_late_work() -> None:
    logs = [random_log(seed, 7, 0, "off") for seed in range(40)]
    taken = [(closing.round - each.started, each) for log in logs for closing in log for each in closing.contributions]
    ages = [age for age, _ in taken]
    assert sum(each.tokens < PERIOD * samples(int(each.worker)) for _, each in taken) > 50
    assert max(ages) > 2 and sum(age > 0 for age in ages) > 50


@pytest.mark.parametrize("carrier", [in_bucket, in_store])
@pytest.mark.parametrize("carry", ["off", "full"])
def test_a_slow_worker_counts_late_and_the_log_replays_bitwise(carrier: Any, carry: Any) -> None:
    options = LateMerging(quorum=0.5, deviations=0.0, delay=2 * (carry == "full"), carry=carry)
    strategy = DiLoCo(period=PERIOD)
    found = run(carrier(options), strategy, options, 8, pause=lambda name, _: 0.025 if name == 2 else 0.005)
    log = max((closings for _, closings in found), key=len)
    for _, closings in found:
        assert closings == log[: len(closings)]  # one closing of each round
    taken = [(closing.round - each.started, each.worker) for closing in log for each in closing.contributions]
    assert any(age > 0 and worker == "2" for age, worker in taken)  # it was late, and its work counts
    assert len({(each.worker, each.started) for closing in log for each in closing.contributions}) == len(taken)
    expected = train(
        gradient,
        START,
        arrivals(log[:8]),
        samples=samples,
        rate=RATE,
        outer=nesterov(),
        exponent=0.5,
        delay=options.delay,
        carry=carry,
    )
    for x, closings in found:
        if len(closings) == 8:
            assert torch.allclose(x, expected, atol=1e-10)
    replay = LateMerging(delay=options.delay, carry=carry, replay=tuple(log[:8]))
    for x, _ in run(carrier(replay), strategy, replay, 8, pause=lambda name, _: 0.01 if name == 0 else 0.0):
        assert torch.equal(x, next(each for each, closings in found if len(closings) == 8))


def test_a_slow_worker_is_named_while_the_others_wait_for_it(caplog: pytest.LogCaptureFixture) -> None:
    options = LateMerging(quorum=1.0)
    fleet = in_store(options)

    def work(rank: int) -> tuple[int, Any]:
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        with attach(model, optimizer, DiLoCo(period=PERIOD), timeout=30, **fleet(rank)) as worker:
            while worker.step < 6 * PERIOD:
                model.x.grad = gradient(rank, worker.step, model.x.detach())
                time.sleep(0.05 if rank == 1 else 0.0)
                optimizer.step()
            return int(name_of(worker)), worker.stats()

    with ThreadPoolExecutor(SIZE) as pool:
        found = list(pool.map(work, range(SIZE)))
    for _, stats in found:
        assert stats.averages == 6 and len(stats.workers) == SIZE
        assert (stats.slow_worker.rank, stats.slow_worker.cause) == (1, "compute")
    assert sum("rank 1 costs the other workers" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("codec", [None, ErrorFeedback(Nearest(bits=8))])
def test_explain_has_the_bytes_of_a_round(codec: Any, fragments: int) -> None:
    options = LateMerging(codec=codec, quorum=0.5, tokens=9.0)
    strategy = DiLoCo(period=PERIOD, fragments=fragments)
    card = explain(strategy, parameters=Model(), workers=SIZE, late=options)
    assert card.late is not None and "2 of 3 workers and 9 tokens" in card.late.closes
    with attach(
        (model := Model()),
        torch.optim.SGD(model.parameters(), lr=RATE),
        strategy,
        elastic=options,
        rendezvous=f"memory://{secrets.token_hex(8)}",
    ) as worker:
        for step in range(2 * PERIOD):
            model.x.grad = gradient(0, step, model.x.detach())
            worker.record_batch(3)
            worker.optimizer.step()
        assert worker.stats().payload_bytes == 2 * fragments * card.late.sent_bytes_per_round
    assert card.late.received_bytes_per_round == 2 * card.late.sent_bytes_per_round
    store = parse_store("40ms,20mbit,50mbit")
    over = explain(strategy, parameters=Model(), workers=SIZE, late=options, store=store).bucket
    assert over is not None and (over.puts_per_step, over.gets_per_step) == (
        fragments / PERIOD,
        fragments * SIZE / PERIOD,
    )
    with pytest.raises(ConfigError, match="one plain mean"):
        explain(AllReduce(), parameters=10, workers=2, late=options)


def test_a_log_survives_json() -> None:
    log = random_log(3, 5, 0, "off")
    text = json.dumps([each.content() for each in log])
    assert tuple(Closing.read(number, each) for number, each in enumerate(json.loads(text))) == log


# -- processes that come and go ----------------------------------------------------------------------------------------


def train_process(outbox: Any, settings: dict[str, Any], stop: Path, seconds: float, fragments: int = 1) -> None:
    """Train until the file `stop` names a step; reports the start, and in the end the consensus and the log."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    worker = attach(model, optimizer, DiLoCo(period=PERIOD, fragments=fragments), **{"timeout": 40, **settings})
    notice = Notice(worker, every=1, signals=[signal.SIGUSR1])
    name, own, until = int(name_of(worker)) % len(TARGETS), 0, 1_000_000
    outbox.send((name, worker.step))
    while worker.step < until:
        model.x.grad = gradient(name, own, model.x.detach())
        time.sleep(seconds)
        optimizer.step()
        own += 1
        if notice.leave():
            outbox.send("left")
            return
        if stop.exists() and until == 1_000_000:
            until = int(stop.read_text())
    with worker.consensus():
        assert isinstance(worker.elastic, LateRounds)
        log = [each.content() for each in worker.elastic.closings]
        outbox.send((model.x.tolist(), [each.round for each in worker.elastic.closings], log))
    notice.close()
    worker.detach()


def ends_of(workers: Sequence[Process], stop: Path, step: int) -> list[tuple[list[float], list[int], list[Any]]]:
    """Stop all workers at a step; returns what each has reported, and checks that all agree.

    A worker that was stopped for long has copied the state of another one, and lacks the closings before.
    """
    stop.with_suffix(".part").write_text(str(step))
    stop.with_suffix(".part").rename(stop)
    ends: list[tuple[list[float], list[int], list[Any]]] = [worker.receive(60) for worker in workers]
    assert not [each for each in ends if isinstance(each, str)]
    by_round: dict[int, list[float]] = {}
    record: dict[int, Any] = {}
    for x, rounds, log in ends:
        assert by_round.setdefault(rounds[-1], x) == x  # the same bits at the same round
        assert rounds == sorted(set(rounds))
        for number, closing in zip(rounds, log, strict=True):
            assert record.setdefault(number, closing) == closing
    return ends


@pytest.mark.slow
@pytest.mark.parametrize("fragments", [1, 2])
def test_workers_are_killed_and_stopped_and_join_and_leave(tmp_path: Path, fragments: int) -> None:
    late = LateMerging(quorum=0.5)
    settings = {"rendezvous": f"file://{tmp_path}/run", "workers": 3, "elastic": late}
    extra, stop = {KEY: new_key()}, tmp_path / "stop"
    workers: list[Process] = []

    def add(count: int = 1) -> None:
        workers.extend([Process(train_process, settings, stop, 0.01, fragments, extra=extra) for _ in range(count)])

    try:
        add(3)
        names = {str(worker.receive(60)[0]): worker for worker in workers}
        assert sorted(names) == ["0", "1", "2"]
        os.kill(names["0"].process.pid, signal.SIGKILL)
        os.kill(names["1"].process.pid, signal.SIGSTOP)
        add()
        name, step = workers[3].receive(60)
        assert name == 3 and step % (PERIOD // fragments) == 0
        os.kill(names["1"].process.pid, signal.SIGCONT)
        add()
        name, step = workers[4].receive(60)
        assert name == 4
        os.kill(names["2"].process.pid, signal.SIGUSR1)
        assert names["2"].receive(60) == "left"
        ends = ends_of(
            [names["1"], *workers[3:]], stop, step + 200 * PERIOD
        )  # a worker that was stopped needs others to copy from
    finally:
        for worker in workers:
            worker.process.kill()
            worker.end()
    taken = {worker for _, _, log in ends for closing in log for _, worker, *_ in closing}
    assert taken >= {"1", "2", "3", "4"}


def test_a_state_that_is_larger_than_announced_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    put, url, refused = BucketObjects.put, f"memory://{secrets.token_hex(8)}", threading.Event()

    def put_more(objects: BucketObjects, name: str, content: bytes) -> None:
        put(objects, name, content + bytes(100) * name.startswith("late/state/"))

    monkeypatch.setattr(BucketObjects, "put", put_more)

    def work(_: int) -> str:
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        try:
            with attach(
                model, optimizer, DiLoCo(period=PERIOD), rendezvous=url, workers=2, elastic=LateMerging(quorum=0.5)
            ):
                assert refused.wait(60)
        except CommError as error:
            refused.set()
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as pool:
        first, second = sorted(pool.map(work, range(2)))
    assert first == "" and "late/state/0/0: has " in second and "Use a separate path for each run" in second


def test_old_contributions_and_states_are_deleted() -> None:
    model, url = Model(), f"memory://{secrets.token_hex(8)}"
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    with attach(model, optimizer, DiLoCo(period=PERIOD), rendezvous=url, elastic=LateMerging()) as worker:
        while worker.step < 40 * PERIOD:
            model.x.grad = gradient(0, worker.step, model.x.detach())
            optimizer.step()
        bucket = Bucket.open(url)
        assert len(left := bucket.wait(bucket.list("0/late"))) <= 10, left
        assert not any("state" in name for name in left)


def test_an_outage_of_the_store_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BucketStore.__init__.__kwdefaults__, "seconds", 0.1)  # for which failed requests are repeated
    down, request, url = threading.Event(), Bucket._request, f"memory://{secrets.token_hex(8)}"

    async def answer(bucket: Bucket, call: Any, nbytes: int) -> Any:
        if down.is_set():
            call.close()
            raise ConnectionError("no route to host")
        return await request(bucket, call, nbytes)

    monkeypatch.setattr(Bucket, "_request", answer)

    def work(rank: int) -> Tensor:
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        late = LateMerging(quorum=1.0)
        with attach(model, optimizer, DiLoCo(period=PERIOD), rendezvous=url, workers=2, elastic=late) as worker:
            for number in range(10 * PERIOD):
                model.x.grad = gradient(rank, number, model.x.detach())
                optimizer.step()
                if number == 3 * PERIOD and not down.is_set():
                    down.set()
                    threading.Timer(1.5, down.clear).start()
            with worker.consensus():
                return model.x.detach().clone()

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(work, range(2))
    assert torch.equal(first, second)


def train_elsewhere(outbox: Any, settings: dict[str, Any], stop: Path) -> None:
    """Train as on another machine, whose end only its heartbeats show."""
    be_elsewhere()
    train_process(outbox, settings, stop, 0.01)


@pytest.mark.slow
def test_a_worker_that_sleeps_longer_than_every_timeout_continues_with_the_others(tmp_path: Path) -> None:
    settings = {"rendezvous": f"file://{tmp_path}/run", "workers": 3, "elastic": LateMerging(quorum=0.5)}
    settings["timeout"], extra, stop = SILENT_SECONDS, {KEY: new_key()}, tmp_path / "stop"
    workers = [Process(train_elsewhere, settings, stop, extra=extra) for _ in range(3)]
    try:
        names = {str(worker.receive(60)[0]): worker for worker in workers}
        os.kill(names["1"].process.pid, signal.SIGSTOP)
        time.sleep(SILENT_SECONDS + 4)
        os.kill(names["1"].process.pid, signal.SIGCONT)
        workers.append(Process(train_elsewhere, settings, stop, extra=extra))
        _, step = workers[-1].receive(60)
        ends = ends_of(workers, stop, step + 200 * PERIOD)
    finally:
        for worker in workers:
            worker.process.kill()
            worker.end()
    starts = [started for _, _, log in ends for closing in log for started, worker, *_ in closing if worker == "1"]
    assert max(starts) > step // PERIOD


@pytest.mark.slow
def test_a_store_of_an_elastic_run_carries_late_work_too(tmp_path: Path) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stop, workers = tmp_path / "stop", list[Process]()
    settings = {"elastic": LateMerging(quorum=0.5)}

    def add(rank: int) -> None:
        extra = {"THINWIRE_STORE": f"127.0.0.1:{store.port}", "THINWIRE_WORKERS": "2", "THINWIRE_RANK": str(rank)}
        workers.append(Process(train_process, settings, stop, 0.01, extra=extra))

    try:
        add(0)
        add(1)
        assert [worker.receive(60)[0] for worker in workers] == [0, 1]
        os.kill(workers[0].process.pid, signal.SIGKILL)
        add(0)
        name, step = workers[2].receive(60)
        assert name == 2 and step > 0
        # Others look for the work of new workers once a second.
        ends = ends_of(workers[1:], stop, step + 60 * PERIOD)
    finally:
        for worker in workers:
            worker.process.kill()
            worker.end()
    assert {worker for _, _, log in ends for closing in log for _, worker, *_ in closing} >= {"1", "2"}


def test_a_worker_that_was_considered_lost_is_read_when_a_closing_takes_its_work() -> None:
    network, ahead = ThreadNetwork(), threading.Event()

    def work(rank: int) -> list[int]:
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        fleet = network.fleet(f"{rank}-x", rank, 2, late=LateMerging(quorum=0.5), timeout=30)
        worker = attach(model, optimizer, LocalSGD(period=PERIOD), timeout=30, elastic=fleet)
        assert isinstance(worker.elastic, LateRounds)
        while worker.step < 20 * PERIOD:
            if worker.step == 2 * PERIOD and rank == 0 and not ahead.is_set():
                assert ahead.wait(30)
                worker.elastic._closer.lose("1")
                worker.elastic._looked = time.monotonic() + 1000  # no look at lost workers is due
            if worker.step >= 18 * PERIOD:
                ahead.set()
            model.x.grad = gradient(rank, worker.step, model.x.detach())
            optimizer.step()
        worker.detach()
        return [closing.round for closing in worker.elastic.closings]

    with ThreadPoolExecutor(2) as pool:
        rounds = [*pool.map(work, range(2))]
    assert rounds[0] == [*range(len(rounds[0]))]  # it has copied no state, and lacks no round
    assert len(rounds[0]) >= 20


def test_a_worker_that_was_late_takes_fewer_steps_after_the_end_of_its_round(monkeypatch: pytest.MonkeyPatch) -> None:
    left_out = iter([2])
    monkeypatch.setattr(Phase, "end", lambda self, **_: next(left_out, 0))
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    settings: dict[str, Any] = {"rendezvous": f"memory://{secrets.token_hex(8)}", "workers": 1}
    with attach(model, optimizer, LocalSGD(period=PERIOD), elastic=LateMerging(), **settings) as worker:
        assert isinstance(worker.elastic, LateRounds)
        steps = list[int]()
        while worker.step < 3 * PERIOD:
            model.x.grad = gradient(0, worker.step, model.x.detach())
            optimizer.step()
            steps.append(worker.step)
        assert steps == [1, 2, 3, 4, 7, 8, 9, 10, 11, 12]
        assert [each.contributions[0].tokens for each in worker.elastic.closings] == [4.0, 2.0, 4.0]


def test_a_worker_that_leaves_hands_over_its_unfinished_round() -> None:
    options = LateMerging(quorum=1.0)
    network = ThreadNetwork()

    def work(rank: int) -> list[Closing]:
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        fleet = network.fleet(f"{rank}-x", rank, 2, late=options, timeout=30)
        worker = attach(model, optimizer, LocalSGD(period=PERIOD), timeout=30, elastic=fleet)
        assert isinstance(worker.elastic, LateRounds)
        own = 0
        while worker.step < 3 * PERIOD:
            model.x.grad = gradient(rank, own, model.x.detach())
            optimizer.step()
            own += 1
            if rank == 1 and own == PERIOD + 3 and worker.elastic.release({"1-x": "SIGTERM"}):
                return worker.elastic.closings
        worker.detach()
        return worker.elastic.closings

    with ThreadPoolExecutor(2) as pool:
        log, left = pool.map(work, range(2))
    assert len(left) == 1
    found = [(closing.round, each.started, each.tokens) for closing in log for each in closing.contributions]
    tokens = [(round, started, tokens) for round, started, tokens in found]
    assert (1, 1, 3.0) in tokens and (1, 1, 4.0) in tokens  # three of four steps count with their tokens
    assert [each.worker for each in log[2].contributions] == ["0"]


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "options", "words"),
    [
        (AllReduce(), {}, "need local steps and one plain mean"),
        (DiLoCo(period=4, fragments=2, delay=1), {}, "LateMerging has its own codec and delay"),
        (DiLoCo(period=4, fragments=2, mixing=0.5), {}, "to which all workers return"),
        (DiLoCo(period=4, fragments=2, weights="samples"), {}, "weights work by tokens"),
        (DiLoCo(period=4, fragments=2, outliers="clip"), {}, "outliers"),
        (Streaming(LocalSGD(period=4, weights="samples"), fragments=2), {}, "weights work by tokens"),
        (Streaming(OverlapLocalSGD(period=4), fragments=2), {}, "to which all workers return"),
        (DiLoCo(period=4, fragments=2), {"delay": 2}, "delay=2 with period=4 and fragments=2: must be less than the 2"),
        (DiLoCo(period=4, codec=Nearest(bits=8)), {}, "LateMerging has its own codec"),
        (DiLoCo(period=4, weights="samples"), {}, "weights work by tokens"),
        (DiLoCo(period=4, outliers="clip"), {}, "outliers"),
        (LocalSGD(period=4, warmup_steps=2), {}, "one plain mean"),
        (OverlapLocalSGD(period=4), {}, "one plain mean"),
        (Paced(LocalSGD(period=4), steps=(4,)), {}, "one plain mean"),
        (DiLoCo(period=4), {"delay": 4}, "delay=4 with period=4: must be less"),
    ],
)
def test_strategies_that_cannot_be_late_are_refused(strategy: Strategy, options: dict[str, Any], words: str) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    with pytest.raises(ConfigError, match=words):
        attach(model, optimizer, strategy, rendezvous="memory://refused", elastic=LateMerging(**options))


@pytest.mark.parametrize("period", [1, 2])
def test_rounds_may_have_one_step(period: int) -> None:
    optimizer = torch.optim.SGD(Model().parameters(), lr=RATE)
    for strategy in (LocalSGD(period=period), DiLoCo(period=period)):
        LateMerging().check(strategy, optimizer, init="broadcast", global_batch=None)


@pytest.mark.parametrize("strategy", [DiLoCo(period=4, mixing=0.5), OverlapLocalSGD(period=4)])
def test_every_worker_is_refused_and_keeps_its_model(strategy: Strategy) -> None:
    fleet = in_store(LateMerging())

    def work(rank: int) -> str:
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        with pytest.raises(ConfigError, match="one plain mean of the parameters") as refused:
            attach(model, optimizer, strategy, timeout=30, **fleet(rank))
        model.x.grad = torch.ones_like(START)
        optimizer.step()  # without hooks
        assert torch.equal(model.x.detach(), START - RATE)
        return str(refused.value)

    with ThreadPoolExecutor(SIZE) as pool:
        found = list(pool.map(work, range(SIZE)))
    assert len(set(found)) == 1 and "Use DiLoCo(period=100), SlowMo or LocalSGD without codec" in found[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"late": "never"}, "late must be 'off' or 'discounted' or 'full'"),
        ({"carry": "full"}, "delay=0 with carry='full'"),
        ({"codec": OneBit()}, "ErrorFeedback"),
        ({"codec": Gathered(Nearest(bits=8))}, "without Gathered"),
        ({"codec": PowerSGD(rank=1)}, "a codec of single messages"),
        ({"quorum": 0.0}, "quorum=0.0"),
        ({"replay": (Closing(1, ()),)}, r"replay has rounds \[1\]"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LateMerging(**options)


def test_a_replay_with_other_tokens_is_refused() -> None:
    log = (Closing(0, tuple(Contribution(0, str(name), 1.0) for name in range(SIZE))),)
    options = LateMerging(replay=log)
    with pytest.raises(MismatchError, match="A replay needs the same numbers of samples"):
        run(in_store(options), DiLoCo(period=PERIOD), options, 1)


def test_other_settings_are_refused() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    late = LateMerging()
    with pytest.raises(ConfigError, match="Leave both out"):
        attach(model, optimizer, DiLoCo(period=4), rendezvous="memory://own", elastic=late, global_batch=8)
    with attach(model, optimizer, DiLoCo(period=4), rendezvous="memory://load", elastic=late) as worker:
        assert worker.elastic is not None
        with pytest.raises(ConfigError, match="workers are at different steps"):
            worker.elastic.crews()


def test_a_worker_with_another_rule_is_refused() -> None:
    models = [Model(), Model()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=RATE) for model in models]
    late = LateMerging(late="full")
    with (
        attach(models[0], optimizers[0], DiLoCo(period=4), rendezvous="memory://rule", elastic=LateMerging()),
        pytest.raises(MismatchError, match="late='full'"),
    ):
        attach(models[1], optimizers[1], DiLoCo(period=4), rendezvous="memory://rule", elastic=late)


@pytest.mark.parametrize("first", [True, LateMerging()])
def test_an_elastic_worker_and_a_late_one_are_refused_in_one_run(first: bool | LateMerging) -> None:
    models = [Model(), Model()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=RATE) for model in models]
    second, url = LateMerging() if first is True else True, f"memory://{secrets.token_hex(8)}"
    words = ["any number of workers", "rounds that close without late workers"]
    own, other = words if second is True else reversed(words)
    with (
        attach(models[0], optimizers[0], DiLoCo(period=4), rendezvous=url, elastic=first),
        pytest.raises(ConfigError, match=f"was started for {own}, and another worker of this run for {other}"),
    ):
        attach(models[1], optimizers[1], DiLoCo(period=4), rendezvous=url, elastic=second)


def test_an_elastic_worker_and_a_late_one_do_not_start_a_run_together() -> None:
    url = f"memory://{secrets.token_hex(8)}"

    def start(elastic: bool | LateMerging) -> str:
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        # The one that looks first is refused and gone, so that the other one may wait for it in vain.
        with pytest.raises((ConfigError, CommTimeoutError)) as refused:
            attach(model, optimizer, DiLoCo(period=4), rendezvous=url, workers=2, elastic=elastic, timeout=3)
        return str(refused.value)

    with ThreadPoolExecutor(2) as pool:
        errors = list(pool.map(start, [True, LateMerging()]))
    assert any("give all workers the same value of elastic" in error for error in errors)
