# SPDX-License-Identifier: Apache-2.0
"""What the doctor says, from figures; its listener, its calendar, its options."""

from __future__ import annotations

import itertools
import secrets
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from torch.distributed import HashStore

from tests.rules import for_each
from thinwire import Comm, ConfigError, run_threads
from thinwire.cli import main
from thinwire.lab.emulate.worker import WorkerExit
from thinwire.planning.doctor import host, speeds
from thinwire.planning.doctor.findings import Examination, findings_of
from thinwire.planning.doctor.host import Host, Interface, gloo_address
from thinwire.planning.doctor.links import Listener, Pair, call, measure, schedule
from thinwire.planning.doctor.rendezvous import Rendezvous
from thinwire.planning.doctor.speeds import LoadedStep, StepTime
from thinwire.planning.doctor.verdict import costs_of, network_of
from thinwire.planning.plan import search
from thinwire.planning.plan.all_reduces import all_reduce_seconds
from thinwire.planning.simulate.wires import Wires

PLANTED = "tests.planning.doctor.planted"

LO = Interface("lo", "127.0.0.1", True, 0, 65536)
ETH = Interface("eth0", "10.0.0.1", False, 1000, 1500)
WIFI = Interface("wlan0", "192.168.0.7", False, 54, 1500)
HOST = Host(
    rank=0,
    name="a",
    name_addresses=["10.0.0.1"],
    interfaces=[ETH, WIFI, LO],
    asked_interface="",
    gloo_address="10.0.0.1",
    route_address="10.0.0.1",
    versions={"python": "3.11.7", "torch": "2.13.0+cpu", "numpy": "2.0", "thinwire": "1"},
    threads=2,
    local_ranks=1,
    cores=4,
    load=0.0,
    open_files=65536,
    accelerator="",
)
STEP = StepTime("a model", [[10, 90], [100]], "float32", 4000, 0.03, 0.06, 0.01, [1.0, 0.1])


def link(a: int, b: int, mbit: float = 940.0) -> Pair:
    return Pair(a, b, "", 0.0002, 1e6 * mbit, 1e6 * mbit, 1e6 * mbit, 1e6 * mbit, 0.0)


def seen(size: int = 3) -> Examination:
    pairs = [link(a, b) for a in range(size) for b in range(a + 1, size)]
    hosts = {rank: replace(HOST, rank=rank, name="abcdef"[rank]) for rank in range(size)}
    return Examination(size, "10.0.0.1", hosts, pairs, steps=dict.fromkeys(range(size), STEP))


def kinds(examination: Examination) -> list[tuple[str, list[int]]]:
    return [(finding.kind, finding.ranks) for finding in findings_of(examination)]


def test_healthy_machines_have_no_findings() -> None:
    assert kinds(seen()) == []


def test_every_pair_of_ranks_meets_once_and_no_rank_twice_in_a_round() -> None:
    for size in range(2, 12):
        rounds = schedule(range(size))
        assert sorted(pair for each in rounds for pair in each) == [
            (a, b) for a in range(size) for b in range(a + 1, size)
        ]
        assert all(len({rank for pair in each for rank in pair}) == 2 * len(each) for each in rounds)


def test_gloo_takes_the_asked_interface_or_the_machine_s_own_name() -> None:
    assert gloo_address("wlan0", ["10.0.0.1"], HOST.interfaces) == "192.168.0.7"
    assert gloo_address("nonsense", ["10.0.0.1"], HOST.interfaces) == ""
    # An address that is not of this machine cannot be listened at; the loopback is left.
    assert gloo_address("", ["198.51.100.7"], HOST.interfaces) == "127.0.0.1"
    assert gloo_address("", ["127.0.1.1"], HOST.interfaces) == "127.0.1.1"


def test_an_interface_without_the_route_to_the_others_is_named() -> None:
    found = seen()
    found.hosts[2] = replace(found.hosts[2], asked_interface="wlan0", gloo_address="192.168.0.7")
    (finding,) = findings_of(found)
    assert (finding.kind, finding.ranks) == ("wrong-interface", [2])
    assert "eth0" in finding.text and "eth0" in finding.fix


def test_a_rank_that_none_can_reach_is_one_finding() -> None:
    found = seen()
    pairs = [replace(pair, problem="10.0.0.3:4: refused") if pair.b == 2 else pair for pair in found.pairs]
    assert kinds(replace(found, pairs=pairs)) == [("unreachable", [2])]


def test_a_slow_path_between_two_ranks_blames_neither() -> None:
    found = seen(4)
    pairs = [link(1, 3, 90.0) if (pair.a, pair.b) == (1, 3) else pair for pair in found.pairs]
    assert kinds(replace(found, pairs=pairs)) == [("slow-pair", [1, 3])]


def test_the_one_clock_that_differs_is_named_though_offsets_are_seen_from_it() -> None:
    found = seen()
    pairs = [replace(pair, clock_offset=-7.0) if pair.a == 0 else pair for pair in found.pairs]
    assert kinds(replace(found, pairs=pairs)) == [("clock", [0])]


def test_a_rank_that_fell_silent_is_named_with_the_part_in_which_it_did() -> None:
    (finding,) = findings_of(replace(seen(), silent={"its training step": [1]}))
    assert finding.kind == "silent-rank" and "rank 1 came, but did not answer" in finding.text


@for_each(itertools.product((1.2, 1.3, 3.0), (2, 3)))
def test_a_rank_whose_step_takes_a_quarter_longer_than_usual_is_slow(case: tuple[float, int]) -> None:
    factor, size = case
    found = seen(size)
    found.steps[1] = replace(STEP, forward=STEP.forward + (factor - 1) * STEP.seconds)
    assert kinds(found) == ([("slow-rank", [1])] if factor > 1.25 else [])


def test_several_streams_and_shared_directions_are_told() -> None:
    found = seen(2)
    thin = replace(found.pairs[0], several=3e9, both=4e8, seconds_per_round_trip=0.05)
    assert kinds(replace(found, pairs=[thin])) == [("one-stream", []), ("half-duplex", [])]


def test_connections_over_far_links_that_begin_slowly_after_a_pause_are_told() -> None:
    hosts = {rank: replace(HOST, rank=rank, restarts_slowly=rank != 1) for rank in range(3)}
    far = [replace(link(a, b, 100.0), seconds_per_round_trip=0.1) for a, b in ((0, 1), (0, 2), (1, 2))]
    (finding,) = findings_of(replace(seen(), hosts=hosts, pairs=far))
    assert (finding.kind, finding.severity, finding.ranks) == ("slow-start", "note", [0, 2])
    # From 14,480 bytes to 1.25 MB under way.
    assert "takes about 6 round trips of 100 ms until it carries 100 Mbit/s" in finding.text
    # Near links need a few milliseconds for it, and some systems do not do so.
    assert kinds(replace(seen(), hosts=hosts)) == [] and kinds(replace(seen(), pairs=far)) == []


def test_whether_connections_restart_slowly_is_read_where_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tcp_slow_start_after_idle"
    monkeypatch.setattr(host, "_SLOW_START", file)
    assert not host.look(0, "").restarts_slowly
    for text, found in (("1\n", True), ("0\n", False)):
        file.write_text(text)
        assert host.look(0, "").restarts_slowly is found


def test_the_time_of_an_all_reduce_lies_on_a_line_through_measured_sizes() -> None:
    measured = {1000: 0.010, 3000: 0.020, 5000: 0.040}
    assert all_reduce_seconds(measured, 2000) == pytest.approx(0.015)
    assert all_reduce_seconds(measured, 6000) == pytest.approx(0.050)
    assert all_reduce_seconds({}, 1) is None


def test_a_step_in_which_another_process_had_the_core_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training does not leave such steps out either; the first one, of the warm-up, is."""
    now, calls = [0.0], [0]
    model = torch.nn.Linear(2, 1)

    def loss() -> torch.Tensor:
        calls[0] += 1
        now[0] += {1: 100.0, 3: 5.0}.get(calls[0], 1.0)
        return model(torch.ones(1, 2)).sum()

    def clock() -> float:
        now[0] += 1e-6
        return now[0]

    monkeypatch.setattr(speeds, "time", SimpleNamespace(perf_counter=clock))
    step = speeds.time_steps("model", model, torch.optim.SGD(model.parameters(), lr=0.1), loss, budget=1e9)
    assert step.forward == pytest.approx((5.0 + (speeds.STEPS - 1)) / speeds.STEPS, rel=1e-4)
    assert step.backward < 1e-3 and calls == [speeds.STEPS + 1]


def test_a_step_is_timed_while_every_rank_sends_until_the_last_has_its_steps() -> None:
    taken = [0.3, 0.1, 0.2]

    def work(comm: Comm) -> tuple[LoadedStep, float, float]:
        def timed(budget: float) -> StepTime:
            assert budget == 0.4
            time.sleep(taken[comm.rank])
            return replace(STEP, forward=taken[comm.rank])

        begin = time.perf_counter()
        found = speeds.time_loaded_step(comm, timed, budget=0.4)
        return found, comm.meter.payload_bytes, time.perf_counter() - begin

    for rank, (found, sent, seconds) in enumerate(run_threads(3, work)):
        assert found.seconds == pytest.approx(taken[rank] + STEP.backward + STEP.update)
        # Messages, and the few numbers by which ranks agree.
        assert found.bytes_per_second * seconds == pytest.approx(sent, rel=0.05) and sent > 1e6
        assert seconds >= max(taken)


def test_messages_that_fail_while_a_step_is_timed_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> NoReturn:
        raise RuntimeError("the link is gone")

    def work(comm: Comm) -> None:
        monkeypatch.setattr(comm, "send_recv", broken)
        with pytest.raises(RuntimeError, match="the link is gone"):
            speeds.time_loaded_step(comm, lambda _: STEP, budget=0.2)

    run_threads(2, work)


def test_a_rank_that_is_lost_while_messages_pass_ends_the_others() -> None:
    def work(comm: Comm) -> str:
        def timed(budget: float) -> StepTime:
            if comm.rank == 1:
                raise ConfigError("nothing is trained")
            return STEP

        try:
            speeds.time_loaded_step(comm, timed, budget=0.2)
        except ConfigError as error:
            return str(error)
        return "all went well"

    # Its messages go on until the others have their steps.
    assert run_threads(2, work) == ["all went well", "nothing is trained"]


def test_the_backward_pass_of_a_gpu_is_timed_in_steps_that_do_not_wait_for_each_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, waited = [0.0], set[torch.device]()
    model = torch.nn.Linear(2, 1, device="meta")  # stands for a device to be waited for

    def wait(device: torch.device) -> None:
        waited.add(device)
        now[0] += 1.0

    monkeypatch.setattr(torch.accelerator, "synchronize", wait)
    monkeypatch.setattr(speeds, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = speeds.time_steps(
        "model", model, optimizer, lambda: model(torch.ones(1, 2, device="meta")).sum(), budget=1e9
    )
    assert (step.forward, step.backward, step.update) == (1.0, 1.0, 1.0), "one wait at the end of each"
    assert sorted(step.ready) == pytest.approx([1 / 3, 2 / 3])
    assert waited == {torch.device("meta")}


def test_a_door_hangs_up_on_strangers_and_answers_the_caller() -> None:
    token = secrets.token_bytes(32)
    listener = Listener("127.0.0.1", token)
    problems: list[str] = []
    answering = threading.Thread(target=lambda: problems.append(listener.answer(0, 10.0, send_seconds=0.02)))
    answering.start()
    with socket.create_connection(("127.0.0.1", listener.port), timeout=5) as stranger:
        stranger.sendall(secrets.token_bytes(40))
        assert stranger.recv(1) == b""
    pair = call(0, 1, "127.0.0.1", listener.port, token, seconds=10.0, send_seconds=0.02, clock=lambda: 5.0)
    answering.join()
    listener.close()
    assert pair.problem == "" and problems == [""]
    assert min(pair.rate, pair.both, pair.several, pair.seconds_per_round_trip) > 0
    # The caller's clock stands at 5; the listener's is this machine's.
    assert pair.clock_offset > 1e9


def test_nobody_behind_a_port_is_told_in_words() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        pair = call(0, 1, "127.0.0.1", port, bytes(32), seconds=1.0, send_seconds=0.01)
    assert "refused" in pair.problem and str(port) in pair.problem


def test_who_answers_no_more_once_connected_is_not_taken_for_a_firewall() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        pair = call(0, 1, "127.0.0.1", port, bytes(32), seconds=0.1, send_seconds=0.01)
    assert pair.connected and pair.problem == f"127.0.0.1:{port}: no answer within 0.1 s"
    found = seen()
    (finding,) = findings_of(replace(found, pairs=[pair, *found.pairs[1:]]))
    assert (finding.kind, finding.ranks, finding.severity) == ("no-answer", [0, 1], "error")
    assert "rank 0 connected to rank 1, and then: 127.0.0.1" in finding.text and "--timeout" in finding.fix


def test_a_rank_that_cannot_listen_is_named_as_the_one() -> None:
    store = HashStore()
    peers, other = Rendezvous(0, 2, store), Rendezvous(1, 2, store)
    other.put("listener", {"port": 0, "problem": "cannot listen at 10.0.0.9: Cannot assign requested address"})
    other.put("round/0", 1)
    addresses = {0: "127.0.0.1", 1: "10.0.0.9"}
    pairs = measure(peers, [0, 1], addresses, token=bytes(32), budget_seconds=1.0, seconds=5.0)
    (finding,) = findings_of(replace(seen(2), pairs=pairs))
    assert finding.text.startswith("rank 0 cannot connect to rank 1: rank 1 cannot listen at 10.0.0.9: Cannot assign")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--timeout", "0"], "--timeout 0: must be 1 to 600 seconds"),
        (["--batch-size", "0"], "--batch-size 0: must be at least 1"),
        (["--model", "train:make"], "--model train:make: needs --data MODULE:FUNCTION too"),
        (["--model", "train:make", "--batch-size", "4"], "--batch-size 4 with --model train:make: --data makes the"),
        (
            ["--model", "train:make", "--model-size", "6m"],
            "--model-size 6m with --model train:make: sizes are those of",
        ),
        (["--link", "100mbit"], "--link 100mbit: emulates links of --workers"),
        (["--model", "no_such_module:f", "--data", "x:y"], "no_such_module:f: no module no_such_module is installed"),
        (["--model", f"{PLANTED}:main", "--data", f"{PLANTED}:data"], f"--model {PLANTED}:main: calling it failed"),
        (["--loss", "x:y"], "--loss x:y: belongs to a model of yours"),
    ],
)
def test_options_that_cannot_work_are_refused(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *options]) == 2
    assert words in capsys.readouterr().err.replace("\n", " ")


def test_strategies_are_simulated_on_the_measured_links_and_the_slow_one_is_kept() -> None:
    found = seen(3)
    pairs = [link(a, b, 35.0 if 1 in (a, b) else 100.0) for a, b in ((0, 1), (0, 2), (1, 2))]
    heavy = StepTime("a model", [[1000, 1000]], "float32", 4_000_000, 0.03, 0.06, 0.01, [1.0])
    measured = replace(found, pairs=pairs, steps=dict.fromkeys(range(3), heavy))
    assert network_of(measured).specials[0].ranks == (1,)
    costs = {cost.recipe: cost for cost in costs_of(measured, ("AllReduce()", "LocalSGD(period=8)"))}
    # A ring of 3 sends four thirds of the vector, as fast as the slowest link.
    transfer = 8 * 4e6 * 4 / 3 / 35e6
    assert costs["AllReduce()"].seconds == pytest.approx(heavy.seconds + transfer, rel=0.1)
    assert costs["LocalSGD(period=8)"].seconds == pytest.approx(heavy.seconds + transfer / 8, rel=0.1)
    assert costs["AllReduce()"].speed < 1 < costs["LocalSGD(period=8)"].speed


def test_a_slow_rank_that_is_far_keeps_its_latency() -> None:
    pairs = [link(a, b, 35.0 if 1 in (a, b) else 900.0) for a, b in itertools.combinations(range(5), 2)]
    far = [replace(pair, seconds_per_round_trip=0.08) if 1 in (pair.a, pair.b) else pair for pair in pairs]
    found = Wires(network_of(replace(seen(5), pairs=far)), 5)
    assert [found.latency(0, 1), found.latency(1, 4)] == [0.04, 0.04]
    assert found.latency(0, 2) == 0.0001
    assert found.rate(0, 1) == pytest.approx(35e6 / 8)
    # And is not taken for far by what pings vary.
    near = [replace(pair, seconds_per_round_trip=0.00022) if 1 in (pair.a, pair.b) else pair for pair in pairs]
    assert network_of(replace(seen(5), pairs=near)).pairs == ()


def test_a_step_that_messages_make_longer_is_told_and_counted() -> None:
    # The link's 940 Mbit/s carried all along what ranks sent.
    loaded = {rank: LoadedStep(STEP.seconds * factor, 940e6 / 8) for rank, factor in enumerate((1.2, 1.3, 1.25))}
    slowed = replace(seen(), loaded=loaded)
    ((kind, severity, text),) = [(each.kind, each.severity, each.text) for each in findings_of(slowed)]
    assert (kind, severity) == ("contention", "note")
    assert "takes 1.25 times as long while messages pass through the links (100 ms without them)" in text
    assert network_of(slowed).contention == pytest.approx(0.2)
    # A few percent are what the clock varies by, and it is not said that messages make anything faster.
    faster = replace(seen(), loaded={rank: LoadedStep(STEP.seconds * 0.97, 940e6 / 8) for rank in range(3)})
    assert kinds(faster) == [] and network_of(faster).contention == 0.0
    assert network_of(seen()).contention == 0.0


def test_ranks_that_share_cores_compute_codes_as_many_times_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "own_work", lambda *_, **__: [0.01])
    hosts = {rank: replace(HOST, rank=rank, local_ranks=3, threads=4, cores=2) for rank in range(3)}
    shared = replace(seen(), hosts=hosts)
    assert seen().sharing == 1.0 and shared.sharing == 6.0
    on_gpus = {rank: replace(each, accelerator="a GPU") for rank, each in hosts.items()}
    assert replace(seen(), hosts=on_gpus).sharing == 1.0
    apart, together = (next(costs_of(each, ("LocalSGD(period=8)",))).seconds for each in (seen(), shared))
    assert together - apart == pytest.approx(0.05, rel=0.01)


def test_nothing_is_simulated_where_links_were_not_measured() -> None:
    assert list(costs_of(replace(seen(), pairs=[]))) == []


def test_ranks_that_measure_for_minutes_are_not_ended_by_a_short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def run(command: list[str], workers: int, **options: Any) -> list[WorkerExit]:
        given.update(options)
        return [WorkerExit(rank, 0, None, 1.0, 1.0, False) for rank in range(workers)]

    monkeypatch.setattr("thinwire.lab.emulate.run_workers", run)
    assert main(["doctor", "--workers", "2", "--timeout", "1"]) == 0
    assert given["timeout"] > 120
