# SPDX-License-Identifier: Apache-2.0
"""Networks of namespaces: rates, delays, counters, and that nothing is left."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.lab.emulate.samples import BARE_PYTHON, LIGHT, SLEEP, comes_true, host_links, processes_in, start_launcher
from tests.rules import for_each
from thinwire.errors import ConfigError
from thinwire.lab.emulate import Network, Workers, available, parse_links, run_workers
from thinwire.lab.emulate.network import CannotBuildError, build, network_plan
from thinwire.lab.emulate.switch import Port, Switch, frame_nbytes, receiver
from thinwire.planning.links import Link

REASON = available()
TUN_REASON = REASON or (None if os.access("/dev/net/tun", os.R_OK | os.W_OK) else "there is no /dev/net/tun")
here = pytest.mark.skipif(REASON is not None, reason=str(REASON))
delays_here = pytest.mark.skipif(TUN_REASON is not None, reason=str(TUN_REASON))

# Worker 1 sends BYTES to worker 0; then they exchange ten short messages. Worker 0 prints both times.
EXCHANGE = """
import os, socket, time
nbytes, place = int(os.environ["BYTES"]), (os.environ["MASTER_ADDR"], 5000)
if os.environ["RANK"] == "0":
    with socket.create_server(("", 5000)) as server:
        connection, _ = server.accept()
    started, left = time.monotonic(), nbytes
    while left:
        left -= len(connection.recv(1 << 16))
    middle = time.monotonic()
    for _ in range(10):
        connection.sendall(b"x")
        connection.recv(1)
    print(middle - started, time.monotonic() - middle)
else:
    for attempt in range(1000):
        try:
            connection = socket.create_connection(place)
            break
        except OSError:
            time.sleep(0.01)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(bytes(nbytes))
    for _ in range(10):
        connection.recv(1)
        connection.sendall(b"x")
"""


def exchange(links, nbytes, *, later=None, **options):
    """The seconds of the transfer and of ten round trips, and the traffic."""
    lines = []
    with Network(parse_links(links, 2), **options) as network:
        if later is not None:
            network.change(parse_links(later, 2))
        exits = run_workers(
            [*BARE_PYTHON, EXCHANGE],
            2,
            network=network,
            environment={"BYTES": str(nbytes)},
            on_line=lambda rank, stream, line: lines.append(line),
            timeout=30,
        )
        traffic = network.traffic()
    assert [record.code for record in exits] == [0, 0], lines
    transfer, trips = map(float, lines[0].split())
    return transfer, trips, traffic


def inodes(network):
    return {
        os.fstat(descriptor).st_ino for rank in range(network.workers) for descriptor in [network.descriptors(rank)[1]]
    }


@here
@pytest.mark.emulation
@pytest.mark.parametrize("user_namespace", [False, True])
def test_a_link_is_no_faster_than_asked_and_its_bytes_are_counted(user_namespace):
    transfer, _, (receiver_side, sender_side) = exchange("20mbit", 1_000_000, user_namespace=user_namespace)
    assert transfer > 0.95 * 8e6 / 20e6
    assert 1_000_000 < sender_side.sent_bytes < 1_050_000
    assert receiver_side.received_bytes == pytest.approx(sender_side.sent_bytes, rel=0.02)
    assert 0 < receiver_side.sent_bytes == pytest.approx(sender_side.received_bytes, abs=2000)


@here
@pytest.mark.emulation
@pytest.mark.parametrize("user_namespace", [False, True])
@pytest.mark.slow
def test_the_rates_of_links_can_be_changed(user_namespace):
    transfer, _, _ = exchange("200mbit", 1_000_000, later="200mbit,1:20mbit", user_namespace=user_namespace)
    assert transfer > 0.95 * 8e6 / 20e6


@here
@pytest.mark.parametrize("later", ["none", "20mbit+5ms"])
def test_links_get_no_delay_and_lose_no_limit_on_the_way(later):
    with Network(parse_links("20mbit", 2)) as network, pytest.raises(ConfigError, match="only rates can change"):
        network.change(parse_links(later, 2))


@here
@pytest.mark.emulation
@pytest.mark.parametrize("links", ["none,0:20mbit", "none,1:20mbit"])
def test_one_slow_end_is_enough(links):
    transfer, _, _ = exchange(links, 500_000)
    assert transfer > 0.9 * 4e6 / 20e6


@here
@pytest.mark.emulation
def test_without_a_limit_bytes_are_counted_all_the_same():
    _, _, (receiver_side, sender_side) = exchange("none", 3_000_000)
    assert 3_000_000 < sender_side.sent_bytes < 3_100_000
    assert receiver_side.received_bytes > 3_000_000


@delays_here
@pytest.mark.emulation
@pytest.mark.parametrize("user_namespace", [False, True])
@pytest.mark.slow
def test_a_round_trip_takes_both_delays_and_rates_still_hold(user_namespace):
    transfer, trips, traffic = exchange("20mbit,0:20mbit+4ms,1:20mbit+6ms", 500_000, user_namespace=user_namespace)
    assert trips > 10 * 0.010
    assert transfer > 0.9 * 4e6 / 20e6
    assert 500_000 < traffic[1].sent_bytes < 525_000


@delays_here
@pytest.mark.emulation
def test_a_receiver_behind_a_delay_is_no_faster_than_asked():
    transfer, _, _ = exchange("none+1ms,0:20mbit", 500_000)
    assert transfer > 0.9 * 4e6 / 20e6


@here
@pytest.mark.emulation
def test_workers_are_alone_with_each_other():
    code = (
        "import os, socket\n"
        "names = [name for _, name in socket.if_nameindex()]\n"
        "print(names, os.environ['MASTER_ADDR'], os.environ['GLOO_SOCKET_IFNAME'])"
    )
    lines = []
    with Network(parse_links("1gbit", 2)) as network:
        run_workers([*BARE_PYTHON, code], 2, network=network, on_line=lambda rank, stream, line: lines.append(line))
    assert lines == ["['lo', 'eth0'] 10.77.0.1 eth0"] * 2


@here
@pytest.mark.emulation
@pytest.mark.parametrize("links", ["10mbit", pytest.param("10mbit+5ms", marks=delays_here)])
def test_nothing_is_left_after_an_exception(links):
    before = host_links()
    with pytest.raises(ZeroDivisionError), Network(parse_links(links, 2)) as network:
        held = inodes(network)
        with Workers(SLEEP, 2, network=network) as job:
            job.poll(0.2)
            assert processes_in(held)
            _ = 1 / 0
    assert comes_true(lambda: not processes_in(held))
    assert host_links() == before


@here
@pytest.mark.emulation
@pytest.mark.parametrize("links", ["10mbit", pytest.param("10mbit+5ms", marks=delays_here)])
@pytest.mark.parametrize("user_namespace", [False, True])
def test_nothing_is_left_when_the_launcher_is_killed(links, user_namespace):
    before = host_links()
    body = f"""
with Network(parse_links({links!r}, 2), user_namespace={user_namespace}) as network:
    print(*(os.fstat(network.descriptors(rank)[1]).st_ino for rank in range(2)), flush=True)
    with Workers({SLEEP!r}, 2, network=network, on_line=lambda *words: print(*words, flush=True)) as job:
        job.wait()
"""
    launcher = start_launcher(body)
    held = {int(word) for word in launcher.stdout.readline().split()}
    assert [launcher.stdout.readline().split()[-1] for _ in range(2)] == ["up", "up"]
    assert len(processes_in(held)) >= 3
    launcher.kill()
    launcher.communicate(timeout=30)
    assert comes_true(lambda: not processes_in(held))
    assert host_links() == before


@here
@pytest.mark.emulation
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="only root can try as another user")
def test_a_user_without_any_right_can_have_a_network():
    body = "with Network(parse_links('10mbit', 2)) as network: print(network.traffic()[0].sent_bytes < 1000)"
    spawn = "import subprocess; subprocess.run([sys.executable, '-c', ''], check=True)"
    for python in (sys.executable, "/usr/bin/python3"):
        if not as_nobody(python, LIGHT + spawn).returncode:
            done = as_nobody(python, LIGHT + body)
            assert done.stdout == "True\n" or "unshare" in done.stderr, done.stderr
            return
    pytest.skip("no interpreter here can be run by another user")


def as_nobody(python, code):
    setpriv = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    return subprocess.run([*setpriv, python, "-c", code], capture_output=True, text=True, cwd="/")


def test_a_missing_program_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CannotBuildError, match=r"unshare|the program ip is missing; install iproute2"):
        build(network_plan([Link(1e6)]))


@for_each([0, 61])
def test_a_network_of_no_or_too_many_workers_is_refused(count):
    with pytest.raises(ConfigError, match=f"{count} links"):
        Network([Link()] * count)


def test_a_job_of_another_size_than_its_network_is_refused():
    with pytest.raises(ConfigError, match="workers=3: the network has 2 links"):
        run_workers(["true"], 3, network=Network([Link()] * 2))


def test_the_emulator_needs_no_torch():
    done = subprocess.run(
        [sys.executable, "-c", LIGHT + "print('torch' in sys.modules, 'numpy' in sys.modules)"],
        capture_output=True,
        text=True,
    )
    assert done.stdout == "False False\n", done.stderr


def packet(*, target, payload, segment=0):
    """A TCP packet for worker ``target``, behind the header that says how it is to be cut."""
    header = bytes([0, 1 if segment else 0, 0, 0, *segment.to_bytes(2, sys.byteorder), 0, 0, 0, 0])
    ip = bytes([0x45, *[0] * 15, 10, 77, 0, target + 1])
    return header + ip + bytes([*[0] * 12, 0x80, *[0] * 19]) + bytes(payload)


def test_the_switch_knows_whom_a_packet_is_for():
    assert receiver(packet(target=3, payload=10)) == 3
    assert receiver(packet(target=3, payload=10)[:20]) < 0
    assert receiver(bytes(60)) < 0


def test_a_packet_that_will_be_cut_counts_every_header():
    assert frame_nbytes(packet(target=0, payload=1000)) == 1052
    assert frame_nbytes(packet(target=0, payload=1000, segment=1000)) == 1052
    assert frame_nbytes(packet(target=0, payload=3001, segment=1000)) == 3001 + 4 * 52


def test_the_switch_queues_at_the_receivers_rate_and_drops_what_is_too_late():
    reader, writer = os.pipe()
    try:
        port = Port(writer, bits_per_second=8 * 1052, delay_seconds=0.0)
        switch = Switch(queue_seconds=2.5, burst_seconds=0.0, ports=[port])
        for _ in range(6):
            switch.hold(100.0, 0, packet(target=0, payload=1000), False)
        assert switch.forward(100.0) == pytest.approx(1.0)
        assert len(switch.in_flight) == 3
        assert switch.forward(101.0) == pytest.approx(1.0)
        assert switch.forward(102.0) == pytest.approx(1.0)
        assert switch.forward(103.0) is None
        assert len(os.read(reader, 1 << 16)) == 3 * 1062
    finally:
        os.close(reader)
        os.close(writer)
