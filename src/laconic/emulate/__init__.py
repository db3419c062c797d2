"""One machine plays many: workers in networks of their own, with slow links and slow workers.

Nothing here needs torch, root or a daemon, and nothing is left behind.
"""

from laconic.emulate.launch import Workers, run_workers
from laconic.emulate.link import Link, describe_links, parse_links
from laconic.emulate.network import Network, Traffic, available
from laconic.emulate.stopping import Stop, Stopping, parse_stops
from laconic.emulate.straggler import Straggler, parse_stragglers, straggler_environment
from laconic.emulate.worker import OnLine, Stream, WorkerExit

__all__ = [
    "Link",
    "Network",
    "OnLine",
    "Stop",
    "Stopping",
    "Straggler",
    "Stream",
    "Traffic",
    "WorkerExit",
    "Workers",
    "available",
    "describe_links",
    "parse_links",
    "parse_stops",
    "parse_stragglers",
    "run_workers",
    "straggler_environment",
]
