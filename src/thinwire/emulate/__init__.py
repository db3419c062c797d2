# SPDX-License-Identifier: Apache-2.0
"""Many machines emulated on one: workers in network namespaces, with slow links and slow workers.

Nothing here needs torch, root or a daemon, and nothing stays on the machine afterwards.
"""

from thinwire.emulate.launch import Workers, run_workers
from thinwire.emulate.link import Link, describe_links, parse_links
from thinwire.emulate.network import Network, Traffic, available
from thinwire.emulate.stopping import Stop, Stopping, parse_stops
from thinwire.emulate.straggler import Straggler, parse_stragglers, straggler_environment
from thinwire.emulate.worker import OnLine, Stream, WorkerExit

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
