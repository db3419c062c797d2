"""The commands that join namespaces into a network: pure text, run by the `namespaces` script.

Namespace 0 is the switch: a bridge with one port per worker. Namespace r + 1 belongs to worker r and holds the other
end of its cable, `eth0`. What a worker sends is shaped at its `eth0`, what it receives at its port of the switch.
Where a link has a delay there is no bridge: each `eth0` is a tun device, and the `switch` script joins them.
"""

from collections.abc import Sequence

from thinwire.emulate.link import Link

INTERFACE = "eth0"
MOST_WORKERS = 60
BURST_SECONDS = 0.002
QUEUE_SECONDS = 0.2
PACKET_SECONDS = 0.001
LARGEST_PACKET = 65536
SMALLEST_PACKET = 3000

Step = dict[str, object]


def address(rank: int) -> str:
    """The IPv4 address of worker ``rank`` in the network."""
    return f"10.77.0.{rank + 1}"


def network_plan(links: Sequence[Link], *, user: bool = False) -> dict[str, object]:
    """The plan of a network, of cables and a bridge where no link has a delay, else of tun devices.

    Args:
        links: the link of each worker.
        user: insist on a user namespace.
    """
    delayed = any(link.delay_seconds for link in links)
    tunnels = list(range(1, len(links) + 1)) if delayed else []
    steps = [] if delayed else _switch_steps(links)
    for rank, link in enumerate(links):
        steps += _worker_steps(rank, link)
    return {"count": len(links) + 1, "user": user, "tunnels": tunnels, "steps": steps}


def switch_ports(links: Sequence[Link], descriptors: Sequence[int]) -> list[str]:
    """The arguments of the `switch` script that joins the tun devices of all workers."""
    ends = zip(links, descriptors, strict=True)
    words = [f"{end}:{link.bits_per_second or 0:.0f}:{link.delay_seconds:.9f}" for link, end in ends]
    return [str(QUEUE_SECONDS), str(BURST_SECONDS), *words]


def _switch_steps(links: Sequence[Link]) -> list[Step]:
    lines = ["link add bridge type bridge mcast_snooping 0", "link set bridge addrgenmode none up"]
    for rank in range(len(links)):
        lines.append(f"link add port{rank} type veth peer name eth0 netns {{{rank + 1}}}")
        lines.append(f"link set port{rank} addrgenmode none master bridge up")
    rates = [(f"port{rank}", link.bits_per_second) for rank, link in enumerate(links)]
    return [_ip(0, lines), *(_shape(0, port, rate) for port, rate in rates if rate is not None)]


def _worker_steps(rank: int, link: Link) -> list[Step]:
    """The commands in one worker's own namespace, in which `eth0` exists already."""
    home, own = rank + 1, address(rank)
    steps = [
        _ip(home, ["link set lo up", "link set eth0 addrgenmode none up", f"addr add {own}/24 dev eth0"]),
        # All machines shall behave alike, and a namespace cannot choose its congestion control by sysctl.
        _ip(home, [f"route replace 10.77.0.0/24 dev eth0 proto kernel scope link src {own} congctl cubic"], True),
    ]
    if link.bits_per_second is None:
        return steps
    packet = _packet_nbytes(link.bits_per_second)
    narrow = _ip(home, [f"link set eth0 gso_max_size {packet}"], True)
    return [*steps, narrow, _shape(home, "eth0", link.bits_per_second)]


def _ip(namespace: int, lines: list[str], optional: bool = False) -> Step:
    return _step(namespace, ["ip", "-batch", "-"], "\n".join([*lines, ""]), optional)


def _shape(namespace: int, interface: str, bits_per_second: float) -> Step:
    burst = max(2 * _packet_nbytes(bits_per_second), round(bits_per_second / 8 * BURST_SECONDS))
    queue = burst + max(LARGEST_PACKET * 4, round(bits_per_second / 8 * QUEUE_SECONDS))
    words = f"tc qdisc add dev {interface} root tbf rate {bits_per_second:.0f}bit burst {burst} limit {queue}"
    return _step(namespace, words.split(), "", False)


def _packet_nbytes(bits_per_second: float) -> int:
    """How long the kernel may make a packet before it is cut into frames: what the link sends in a millisecond.

    The shaper lets whole packets through, so that longer ones would need a larger burst, and a message shorter than
    the burst would cross an idle link in no time.
    """
    nbytes = round(bits_per_second / 8 * PACKET_SECONDS)
    return min(LARGEST_PACKET, max(SMALLEST_PACKET, nbytes))


def _step(namespace: int, arguments: list[str], text: str, optional: bool) -> Step:
    return {"namespace": namespace, "arguments": arguments, "text": text, "optional": optional}
