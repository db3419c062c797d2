# SPDX-License-Identifier: Apache-2.0
"""How long messages and collectives take on shared interfaces, and what network files say."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from tests.rules import for_each, refusals
from thinwire import ConfigError
from thinwire.planning import simulate
from thinwire.planning.simulate import (
    Death,
    Duration,
    Network,
    Pair,
    Pause,
    Racks,
    SimulatedComm,
    Special,
    load_network,
)
from thinwire.planning.simulate import wires as module
from thinwire.planning.simulate.durations import parse_distribution
from thinwire.planning.simulate.network import read_network
from thinwire.planning.simulate.wires import PAYLOAD_SHARE, Wires

MEGABYTE = 1_000_000
SECOND = 8 / PAYLOAD_SHARE  # of a megabyte at 1 Mbit/s
LATENCY = 0.25


def wires(workers: int, **settings: Any) -> Wires:
    return Wires(Network(**{"bits_per_second": 1e6, "latency": LATENCY, **settings}), workers)


def test_a_message_takes_its_transfer_and_the_latency() -> None:
    assert wires(2).send(1.0, 0, 1, MEGABYTE) == pytest.approx((1 + SECOND, 1 + SECOND + LATENCY))


def test_messages_of_one_worker_share_its_interface() -> None:
    link = wires(3)
    arrived = [link.send(0.0, 0, dst, MEGABYTE)[1] for dst in (1, 2)]
    assert arrived == pytest.approx([SECOND + LATENCY, 2 * SECOND + LATENCY])


def test_messages_to_one_worker_share_its_interface() -> None:
    link = wires(3)
    arrived = [link.send(0.0, src, 2, MEGABYTE)[1] for src in (0, 1)]
    assert arrived == pytest.approx([SECOND + LATENCY, 2 * SECOND + LATENCY])


def test_both_directions_are_carried_at_once() -> None:
    link = wires(2)
    arrived = [link.send(0.0, src, 1 - src, MEGABYTE)[1] for src in (0, 1)]
    assert arrived == pytest.approx([SECOND + LATENCY] * 2)


def test_a_rack_s_workers_share_its_uplink_and_none_within() -> None:
    link = wires(6, racks=Racks(3, bits_per_second=1e6, latency=1.0))
    across = [link.send(0.0, src, src + 3, MEGABYTE)[1] for src in (0, 1)]
    assert across == pytest.approx([SECOND + LATENCY + 1, 2 * SECOND + LATENCY + 1])
    assert link.send(0.0, 2, 0, MEGABYTE)[1] == pytest.approx(SECOND + LATENCY)


def test_slow_workers_and_slow_pairs() -> None:
    slow = wires(3, specials=(Special((1,), bits_per_second=5e5, latency=0.5),))
    assert slow.send(0.0, 0, 1, MEGABYTE)[1] == pytest.approx(2 * SECOND + LATENCY + 0.5)
    assert slow.send(0.0, 2, 0, MEGABYTE)[1] == pytest.approx(SECOND + LATENCY)
    pair = wires(3, pairs=(Pair((2, 1), bits_per_second=2.5e5, latency=3.0),))
    assert pair.send(0.0, 1, 2, MEGABYTE)[1] == pytest.approx(4 * SECOND + 3.0)
    # What arrives before the message on the long way does not wait for it.
    assert pair.send(0.0, 0, 2, MEGABYTE / 4)[1] == pytest.approx(SECOND / 4 + LATENCY)


def test_messages_between_two_workers_share_their_slow_link() -> None:
    link = wires(2, pairs=(Pair((0, 1), bits_per_second=1e5),))
    arrived = [link.send(0.0, 0, 1, MEGABYTE)[1] for _ in range(3)]
    assert arrived == pytest.approx([10 * SECOND + LATENCY, 20 * SECOND + LATENCY, 30 * SECOND + LATENCY])
    # The other direction is free.
    assert link.send(0.0, 1, 0, MEGABYTE)[1] == pytest.approx(10 * SECOND + LATENCY)


@for_each([2, 3, 8])
def test_rings_take_the_time_of_their_hops(n: int) -> None:
    one = SECOND / n + LATENCY
    assert wires(n).all_reduce([0.0] * n, MEGABYTE) == pytest.approx([2 * (n - 1) * one] * n)
    assert wires(n).all_gather([0.0] * n, MEGABYTE / n) == pytest.approx([(n - 1) * one] * n)


def test_a_ring_waits_for_the_last_to_join_and_for_the_slowest_link() -> None:
    assert min(wires(4).all_reduce([0, 0, 0, 9.0], MEGABYTE)) > 9.0
    slow = wires(4, specials=(Special((2,), bits_per_second=1e5),))
    # Its two links carry 2 (n-1) parts each, ten times as slowly.
    assert max(slow.all_reduce([0.0] * 4, MEGABYTE)) > 6 * 10 * SECOND / 4


def test_two_collectives_at_once_take_as_long_as_their_bytes() -> None:
    link = wires(4)
    first, second = (max(link.all_reduce([0.0] * 4, MEGABYTE)) for _ in range(2))
    assert second - first == pytest.approx(1.5 * SECOND)


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather"])
def test_the_closed_form_of_many_ranks_is_that_of_equal_links(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    followed = getattr(wires(16), operation)([0.5] * 16, MEGABYTE)
    monkeypatch.setattr(module, "_MOST_RANKS_OF_A_RING", 8)
    assert getattr(wires(16), operation)([0.5] * 16, MEGABYTE) == pytest.approx(followed)


def test_an_all_to_all_sends_everything_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes = [[0.0 if i == j else MEGABYTE / 8 for j in range(8)] for i in range(8)]
    expected = 7 / 8 * SECOND + LATENCY
    assert wires(8).all_to_all([0.0] * 8, nbytes) == pytest.approx([expected] * 8)
    monkeypatch.setattr(module, "_MOST_RANKS_OF_ALL_TO_ALL", 4)
    assert wires(8).all_to_all([0.0] * 8, nbytes) == pytest.approx([expected] * 8)


@pytest.mark.parametrize(
    "differs",
    [
        {"racks": Racks(4, bits_per_second=1e6, latency=1.0)},
        {"pairs": (Pair((0, 5), bits_per_second=1e4, latency=9.0),)},
    ],
    ids=["racks", "a pair"],
)
@pytest.mark.parametrize("operation", ["all_to_all", "all_gather"])
def test_many_ranks_send_through_uplinks_and_slow_pairs_too(
    operation: str, differs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    nbytes: Any = 4000 if operation == "all_gather" else [[MEGABYTE / 8] * 8] * 8
    followed = max(getattr(wires(8, **differs), operation)([0.0] * 8, nbytes))
    monkeypatch.setattr(module, "_MOST_RANKS_OF_ALL_TO_ALL", 4)
    link = wires(8, **differs)
    # By the sums of bytes, which are carried without gaps.
    assert followed / 1.3 < max(getattr(link, operation)([0.0] * 8, nbytes)) <= followed * 1.001
    if operation == "all_to_all" and "racks" in differs:
        assert followed == pytest.approx(16 / 8 * SECOND + LATENCY + 1, rel=0.1)


def test_what_a_rank_of_many_keeps_for_itself_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_RANKS_OF_ALL_TO_ALL", 4)
    nbytes = [[MEGABYTE if i == j else 0.0 for j in range(8)] for i in range(8)]
    assert wires(8).all_to_all([0.0] * 8, nbytes) == pytest.approx([LATENCY] * 8)


def broadcast_times(n: int, elements: int) -> list[float]:
    def work(comm: SimulatedComm) -> float:
        comm.broadcast_(torch.zeros(elements, dtype=torch.uint8), 1).wait()
        return comm.now

    return simulate.run(n, work, network=Network(bits_per_second=1e6, latency=LATENCY))


def test_short_vectors_are_broadcast_down_a_tree() -> None:
    times = broadcast_times(8, 1)
    assert [round(time / LATENCY) for time in times] == [2, 0, 1, 1, 2, 1, 2, 2] or max(times) < 3.1 * LATENCY
    assert times[1] == 0.0


def test_long_vectors_are_broadcast_along_a_chain_in_chunks() -> None:
    times = broadcast_times(5, MEGABYTE)
    # Each hop adds a chunk and the latency, and not the whole vector.
    hop = SECOND / 16 + LATENCY
    order = [times[rank] for rank in (2, 3, 4, 0)]
    assert order == sorted(order)
    assert order[-1] < SECOND + 4 * hop + 0.01


def test_a_send_waits_for_its_receiver_as_with_gloo() -> None:
    def work(comm: SimulatedComm) -> float:
        if comm.rank == 1:
            comm.compute(3.0)
        dst, src = ([1], []) if comm.rank == 0 else ([], [0])
        comm.send_recv(torch.ones(2), dst, src).wait()
        return comm.now

    sender, receiver = simulate.run(2, work, network=Network(latency=0.1))
    assert 3.1 <= sender <= receiver < 3.3


# -- durations and files -----------------------------------------------------------------------------------------------


def crowded(contention: float, seconds: float, *, both: bool) -> list[float]:
    """When two workers have computed for so long, while a megabyte goes from one to the other, or to both."""

    def work(comm: SimulatedComm) -> float:
        x, other = torch.ones(MEGABYTE // 4), [1 - comm.rank]
        to, of = (other, other) if both else (other, []) if comm.rank == 0 else ([], other)
        message = comm.send_recv(x, to, of)
        comm.sleep(seconds)
        done = comm.now
        message.wait()
        return done

    network = Network(bits_per_second=1e6, latency=0.0, contention=contention)
    return simulate.run(2, work, network=network, timeout=1e3)


def test_a_worker_computes_more_slowly_while_messages_pass() -> None:
    # Half of what it could compute is lost as long as messages pass in both directions, and a quarter in one.
    assert crowded(0.5, 2 * SECOND, both=True) == pytest.approx([2.5 * SECOND] * 2)
    assert crowded(0.5, 2 * SECOND, both=False) == pytest.approx([2.25 * SECOND] * 2)
    assert crowded(0.5, 0.2 * SECOND, both=True) == pytest.approx([0.4 * SECOND] * 2)
    assert crowded(0.0, 2 * SECOND, both=True) == pytest.approx([2 * SECOND] * 2)


def test_who_only_waits_for_a_message_loses_nothing_to_it() -> None:
    def work(comm: SimulatedComm) -> float:
        comm.all_reduce_(torch.ones(MEGABYTE // 4)).wait()
        comm.sleep(1.0)
        return comm.now

    free, crowd = (
        simulate.run(3, work, network=Network(bits_per_second=1e6, contention=lost), timeout=1e3) for lost in (0.0, 0.9)
    )
    assert crowd == pytest.approx(free)


def test_the_time_that_an_interface_was_busy_is_kept_when_bookings_are_forgotten() -> None:
    lane = module.Lane()
    for start in (0.0, 4.0, 4.5):
        lane.book(start, start, 1.0)
    assert [lane.busy_seconds(now) for now in (4.5, 5.0, 9.0)] == pytest.approx([1.5, 2.0, 3.0])


@for_each(
    [
        ("50ms", 0.05),
        ("0", 0.0),
        ("uniform(40ms, 60ms)", 0.05),
        ("normal(50ms, 5ms)", 0.05),
        ("exponential(50ms)", 0.05),
        ("lognormal(50ms, 0.3)", 0.05 * 1.046),
        ("pareto(30ms, 2.5)", 0.05),
    ],
)
def test_durations_have_the_mean_that_they_say(case: tuple[str, float]) -> None:
    text, mean = case
    duration, random = parse_distribution(text, argument=text), Random(0)
    drawn = [duration.draw(random) for _ in range(20_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(mean, rel=0.03)


@for_each(
    ["", "fast", "50", "gauss(1ms, 2ms)", "uniform(5ms)", "uniform(5ms, 1ms)", "pareto(1ms, 0)", "pareto(1ms, x)"]
)
def test_other_durations_are_refused_in_words(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--compute-time .*(such as|comes second)"):
        parse_distribution(text, argument=f"--compute-time {text}")


test_durations_that_cannot_be_are_refused = refusals(
    [
        (("unifrm", 0.1, 0.2), "kind='unifrm': must be one of constant, uniform"),
        (("constant", -1.0), "first=-1.0 of a constant duration: must be seconds"),
        (("lognormal", float("nan"), 0.1), "first=nan"),
        (("uniform", 0.2, 0.1), "second=0.1 of a uniform duration: must be finite and at least 0.2"),
        (("normal", 0.2, -0.1), "second=-0.1 of a normal duration: must be finite and at least 0"),
        (("pareto", 0.1), "second=0.0 of a pareto duration: must be its tail's exponent, such as 2.5"),
    ],
    lambda numbers: Duration(*numbers),
)


def test_a_file_says_all_that_a_network_has() -> None:
    found = load_network(Path(__file__).parents[3] / "examples" / "network.toml")
    assert found == Network(
        bits_per_second=1e9,
        latency=1e-4,
        compute=Duration("lognormal", 0.05, 0.2),
        racks=Racks(16, bits_per_second=1e10, latency=2e-4),
        specials=(Special((5,), bits_per_second=1e8), Special((0, 1, 2, 3, 9), latency=1e-3, slowdown=2.0)),
        pairs=(Pair((0, 12), bits_per_second=3.5e7, latency=0.04),),
        delayed=0.01,
        delay=Duration("pareto", 0.02, 1.5),
        overtaking=True,
        deaths=(Death(7, at=90.0),),
        pauses=(Pause(3, at=2.0, seconds=0.5),),
        contention=0.1,
    )


NONSENSE = [
    ("[network]\nbandwith = '1gbit'", r"\[network\] has no entry 'bandwith'; did you mean bandwidth\?"),
    ("[nettwork]", "has no entry 'nettwork'; did you mean network"),
    ("network = 3", "must be a table"),
    ("[network]\nbandwidth = 1000", "bandwidth = 1000: must be text with a unit, such as"),
    ("[network]\nbandwidth = 'fast'", "'fast' cannot be read; a rate is a number and kbit"),
    ("[network]\nlatency = '-1ms'", "cannot be read; a duration is"),
    ("[network]\ncontention = 1", r"contention=1.0: must lie in \[0, 1\)"),
    ("[network]\ncontention = '10 %'", "contention = '10 %': must be a number"),
    ("[racks]\nbandwidth = '1gbit'", r"\[racks\]: size is missing"),
    ("[racks]\nsize = 0", "racks.size=0: must be at least 1"),
    ("[racks]\nsize = true", "size = True: must be a whole number"),
    ("workers = [3]", r"must be a list of tables, each under \[\[workers\]\]"),
    ("[[workers]]\nslowdown = 2", r"\[\[workers\]\] number 1: ranks is missing"),
    ("[[workers]]\nranks = 'a'", "must name ranks"),
    ("[[workers]]\nranks = '15-0'", "'15-0': a range must begin with its lowest rank. Write 0-15"),
    ("[[workers]]\nranks = []", r"\[\]: must name ranks"),
    ("[[workers]]\nranks = 1\nslowdown = 0", "slowdown=0.0: must be positive"),
    ("[[links]]\nbetween = [1]", "must be two different ranks"),
    ("[messages]\ndelayed = 3\ndelay = '1ms'", "delayed=3.0: must lie in .* a share"),
    ("[messages]\ndelay = '1ms'", r"\[messages\]: one of delayed and delay alone delays no message"),
    ("[messages]\ndelayed = 0.1", r"\[messages\]: one of delayed and delay alone delays no message"),
    ("[messages]\novertaking = 1", "must be true or false"),
    ("[compute]\ntime = 'pareto(1)'", r"\[compute\], time: 'pareto\(1\)' cannot be read"),
    ("[[deaths]]\nrank = 1", "the death of rank 1: give either `at` or `step`"),
    ("[[deaths]]\nrank = 1\nat = '1s'\nstep = 3", "give either"),
    ("[[pauses]]\nrank = 1\nat = '1s'", "for is missing"),
    ("[network", "is not TOML"),
]


def test_nonsense_in_a_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "network.toml"

    def load(text: str) -> None:
        file.write_text(text)
        load_network(file)

    refusals([(text, f"^{re.escape(str(file))}.*{words}") for text, words in NONSENSE], load)()


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no-network\.toml: cannot be read"):
        load_network(tmp_path / "no-network.toml")


def test_an_empty_file_is_the_usual_network() -> None:
    assert read_network({}) == Network()


def test_each_collective_call_takes_its_cost_before_its_bytes() -> None:
    free, dear = wires(4), wires(4, per_call=0.5)
    first = dear.all_reduce([0.0] * 4, MEGABYTE)
    assert first == pytest.approx([each + 0.5 for each in free.all_reduce([0.0] * 4, MEGABYTE)])
    # Calls that are launched together pay one after the other.
    second = max(dear.all_reduce([0.0] * 4, MEGABYTE)) - max(first)
    assert second == pytest.approx(max(free.all_reduce([0.0] * 4, MEGABYTE)) - max(first) + 0.5 + 0.5)
    assert dear.all_to_all([100.0] * 4, [[MEGABYTE] * 4] * 4)[0] == pytest.approx(
        wires(4).all_to_all([100.5] * 4, [[MEGABYTE] * 4] * 4)[0]
    )


def test_a_message_waits_for_collectives_that_have_not_begun() -> None:
    link = wires(2, latency=0.0)
    for _ in range(2):  # the second begins when the first has ended
        link.all_reduce([0.0] * 2, MEGABYTE)
    # A message that is sent now finds no gap before them.
    assert link.send(0.0, 0, 1, MEGABYTE)[1] == pytest.approx(3 * SECOND)


def test_gloos_ring_has_two_segments_in_flight() -> None:
    segment = module.SEGMENT_BYTES * SECOND / MEGABYTE
    for latency, pairs in ((20 * segment, 4), (20 * segment, 300)):
        link = wires(2, latency=latency, all_reduce="gloo")
        # 2 pairs of segments for each of two workers: two latencies and a transfer take a pair to the next.
        phase = pairs * (2 * latency + segment) + segment
        assert link.all_reduce([0.0] * 2, 4 * pairs * module.SEGMENT_BYTES) == pytest.approx([2 * phase] * 2)


def test_gloos_ring_fills_a_link_without_delay() -> None:
    parts = 4 * 6 * module.SEGMENT_BYTES
    assert wires(4, latency=0.0, all_reduce="gloo").all_reduce([0.0] * 4, parts) == pytest.approx(
        wires(4, latency=0.0).all_reduce([0.0] * 4, parts)
    )
    slow = wires(4, latency=0.0, all_reduce="gloo", per_segment=100.0).all_reduce([0.0] * 4, parts)
    # 2 phases of 3 hops of 6 segments, two of them at a time.
    assert slow[0] == pytest.approx(2 * 3 * 6 / 2 * (100.0 + module.SEGMENT_BYTES * SECOND / MEGABYTE), rel=0.05)


def test_gloos_messages_wait_until_they_are_expected() -> None:
    plain, gloo = wires(4), wires(4, all_reduce="gloo")
    # Three hops of two latencies, in which two segments of a part pass.
    assert max(gloo.all_gather([0.0] * 4, MEGABYTE)) == pytest.approx(3 * (2 * LATENCY + SECOND), rel=0.05)
    assert max(plain.all_gather([0.0] * 4, MEGABYTE)) == pytest.approx(3 * (LATENCY + SECOND), rel=0.05)
    rows = [[1000.0] * 4 for _ in range(4)]
    early = wires(4).all_to_all([0.0] * 4, rows)
    assert wires(4, all_reduce="gloo").all_to_all([0.0] * 4, rows) == pytest.approx([each + LATENCY for each in early])
    # Of many ranks, too.
    many = [[1000.0] * 100] * 100
    early, late = (wires(100, **kind).all_to_all([0.0] * 100, many)[0] for kind in ({}, {"all_reduce": "gloo"}))
    assert late == pytest.approx(early + LATENCY)


def test_a_tree_sends_the_vector_twice_and_has_few_latencies() -> None:
    done = wires(16, all_reduce="tree").all_reduce([0.0] * 16, MEGABYTE)
    assert done == pytest.approx([2 * SECOND + 2 * 4 * LATENCY] * 16)


def test_a_window_bounds_the_rate_by_the_round_trip() -> None:
    link = wires(2, window=10_000.0)
    assert link.rate(0, 1) == 10_000 / (2 * LATENCY)
    assert link.send(0.0, 0, 1, MEGABYTE) == pytest.approx((50.0, 50.0 + LATENCY))
    assert wires(2, window=1e9).send(0.0, 0, 1, MEGABYTE) == wires(2).send(0.0, 0, 1, MEGABYTE)


def test_a_connection_that_was_idle_starts_slowly() -> None:
    fast = {"bits_per_second": 1e9, "slow_start": True}
    plain = wires(2, bits_per_second=1e9).send(0.0, 0, 1, MEGABYTE)[1]
    link = wires(2, **fast)
    first = link.send(0.0, 0, 1, MEGABYTE)[1]
    # From 10 segments of 1448 bytes to a megabyte the window doubles 7 times, once per round trip.
    assert 5 * 2 * LATENCY < first - plain < 7 * 2 * LATENCY
    at_once = link.send(first, 0, 1, MEGABYTE)[1] - first
    assert at_once == pytest.approx(first - 0.0)  # after more than 0.2 s
    soon = link.send(first + at_once - LATENCY, 0, 1, MEGABYTE)[1]
    assert soon - (first + at_once - LATENCY) == pytest.approx(plain)
    ring = wires(2, **fast).all_reduce([0.0] * 2, 2 * MEGABYTE)
    assert ring[0] > wires(2, bits_per_second=1e9).all_reduce([0.0] * 2, 2 * MEGABYTE)[0] + 5 * 2 * LATENCY


@pytest.mark.parametrize("alike", [False, True])
def test_on_one_stream_a_call_begins_when_the_one_before_has_ended(alike: bool) -> None:
    def work(comm: SimulatedComm) -> list[float]:
        ends: list[float] = []
        xs = [torch.zeros(8, device="meta") for _ in range(4)]
        calls = [
            *(comm.all_reduce_(torch.zeros(4000, device="meta")) for _ in range(3)),
            comm.all_to_all(xs, [8] * 4),
            comm.all_gather(torch.zeros(4000, device="meta")),
        ]
        for each in calls:
            each.wait()
            ends.append(comm.now)
        return ends

    def ends(*, one_stream: bool) -> list[float]:
        network = Network(latency=0.01, bits_per_second=1e8, one_stream=one_stream)
        (found, *others) = simulate.simulate(4, work, network=network, alike=alike).results
        assert all(each == pytest.approx(found) for each in others)
        assert found is not None
        return found

    free, stream = ends(one_stream=False), ends(one_stream=True)
    assert stream[0] == free[0]
    # Six hops of 10 ms for each all-reduce, three for the all-gather and one for the short messages.
    assert stream[:3] == pytest.approx([(1 + place) * free[0] for place in range(3)])
    assert stream[3] - stream[2] == pytest.approx(0.01, rel=0.01)
    assert stream[4] - stream[3] > 0.03
    assert free[2] < free[0] + 0.01, "latencies of consecutive calls overlap"


def test_broadcasts_are_on_the_stream_too() -> None:
    def work(comm: SimulatedComm) -> list[float]:
        ends, x = list[float](), torch.zeros(4000, device="meta")
        for each in (comm.all_reduce_(x), comm.broadcast_(x[:10], 0), comm.all_reduce_(x)):
            each.wait()
            ends.append(comm.now)
        return ends

    network = Network(latency=0.01, bits_per_second=1e8, one_stream=True)
    for rank, (reduced, sent, last) in enumerate(simulate.run(4, work, network=network)):
        assert reduced == pytest.approx(0.062, rel=0.01)
        assert sent - reduced == pytest.approx(0.01 * rank.bit_count(), abs=0.0001), "down a binomial tree"
        # Rank 3 starts its last call when the broadcast has reached it.
        assert 0.124 < last < 0.124 + 0.021


@pytest.mark.parametrize("alike", [False, True])
def test_smaller_tensors_whose_bytes_count_more_take_as_long_as_large_ones(alike: bool) -> None:
    """Also where the length of a message decides the algorithm: chunks, direct messages and Gloo's segments."""

    def ends(elements: int, magnified: float, kind: str) -> list[float]:
        def work(comm: simulate.SimulatedComm) -> list[float]:
            x, ends = torch.zeros(elements), list[float]()
            parts = list(x[: elements // comm.size * comm.size].chunk(comm.size))
            following, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
            for call in (
                lambda: comm.all_reduce_(x),
                lambda: comm.all_gather(x),
                lambda: comm.all_gather(x[: elements // 1000]),
                lambda: comm.broadcast_(x, 0),
                lambda: comm.all_to_all(parts, [len(each) for each in parts]),
                lambda: comm.send_recv(x, [following], [before]),
            ):
                call().wait()
                ends.append(comm.now)
            return ends

        network = Network(latency=1e-4, all_reduce=kind, magnified=magnified)
        return [each for row in simulate.simulate(8, work, network=network, alike=alike).results for each in row or ()]

    for kind in ("ring", "gloo"):
        assert ends(10_000, 100.0, kind) == pytest.approx(ends(1_000_000, 1.0, kind), rel=1e-9)


def test_computing_times_vary_by_the_spread_and_all_wait_for_the_slowest() -> None:
    def work(comm: SimulatedComm) -> tuple[float, float]:
        own = 0.0
        for _ in range(50):
            start = comm.now
            comm.compute(1.0)
            own += comm.now - start
            comm.all_reduce_(torch.ones(1)).wait()
        return own / 50, comm.now / 50

    network = Network(latency=0.0, bits_per_second=1e12, spread=0.1)
    found = simulate.run(8, work, network=network)
    assert all(own == pytest.approx(1.0, abs=0.06) for own, _ in found)
    # The expected largest of 8 normal draws is 1.42 deviations above the mean.
    assert found[0][1] == pytest.approx(1.142, abs=0.02)
    assert found == simulate.run(8, work, network=network)
    with pytest.raises(simulate.UnlikeError):
        simulate.simulate(8, work, network=network, alike=True)


def test_a_network_file_has_the_costs_of_calls_and_connections() -> None:
    network = read_network(
        {
            "network": {
                "per_call": "1ms",
                "all_reduce": "gloo",
                "per_segment": "2ms",
                "window": 4194304,
                "slow_start": True,
                "one_stream": True,
            },
            "compute": {"spread": 0.05, "device": "cuda"},
        }
    )
    assert (network.per_call, network.all_reduce, network.per_segment) == (0.001, "gloo", 0.002)
    assert (network.window, network.slow_start, network.one_stream, network.spread) == (4194304, True, True, 0.05)
    assert (network.device, Network().device) == ("cuda", "")
    for wrong in ({"all_reduce": "star"}, {"window": 0}, {"per_call": "-1ms"}):
        with pytest.raises(ConfigError):
            read_network({"network": wrong})
