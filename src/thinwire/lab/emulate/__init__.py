# SPDX-License-Identifier: Apache-2.0
"""Many machines emulated on one: workers in network namespaces, with slow links and slow workers.

Nothing here needs torch, root or a daemon, and nothing stays on the machine afterwards.
"""

from thinwire.lab.emulate.launch import Workers, run_workers
from thinwire.lab.emulate.network import Network, Traffic, available
from thinwire.lab.emulate.straggler import Straggler, parse_stragglers, straggler_environment
from thinwire.lab.emulate.worker import OnLine, Stream, WorkerExit
from thinwire.planning.links import Link, describe_links, parse_links

__all__ = [
    "Link",
    "Network",
    "OnLine",
    "Straggler",
    "Stream",
    "Traffic",
    "WorkerExit",
    "Workers",
    "available",
    "describe_links",
    "parse_links",
    "parse_stragglers",
    "run_workers",
    "straggler_environment",
]
