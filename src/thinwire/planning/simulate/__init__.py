# SPDX-License-Identifier: Apache-2.0
"""The very code that trains, on simulated workers of a simulated network, in virtual time.

    from thinwire.planning import simulate

    results = simulate.run(1024, work, network=simulate.load_network("network.toml"), seed=1)

as `thinwire.run_threads` runs it on threads. See `docs/explanation/simulator.md`.
"""

from thinwire.planning.simulate.alike import AlikeComm, UnlikeError
from thinwire.planning.simulate.comm import SimulatedComm
from thinwire.planning.simulate.durations import Duration
from thinwire.planning.simulate.network import Death, Network, Pair, Pause, Racks, Special, load_network
from thinwire.planning.simulate.running import Simulation, run, simulate
from thinwire.planning.simulate.schedule import DeadlockError

__all__ = [
    "AlikeComm",
    "DeadlockError",
    "Death",
    "Duration",
    "Network",
    "Pair",
    "Pause",
    "Racks",
    "SimulatedComm",
    "Simulation",
    "Special",
    "UnlikeError",
    "load_network",
    "run",
    "simulate",
]
