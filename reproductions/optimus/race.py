# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelisms in one and two dimensions side by side, over links of this machine's own making."""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from reproductions.optimus.costs import (
    Layer,
    layer_elements,
    norm_elements,
    one_dimensional_elements,
    step_peak,
    vector_elements,
)
from reproductions.optimus.transformer_layers import SCHEMES, Scheme
from reproductions.optimus.worker import Counts, Race
from thinwire import ThinwireError
from thinwire.lab.emulate import Network, Workers, parse_links

ELEMENT_BYTES = 4
_TIMEOUT_SECONDS = 900.0


@dataclass(frozen=True)
class Finish:
    """How a race went.

    Args:
        race: what was run.
        counts: of each scheme, rank by rank.
        waits: exposed and whole seconds of the watched product, by whether panels overlap: the mean over ranks, round
            by round; empty where none was watched.
    """

    race: Race
    counts: dict[Scheme, list[Counts]]
    waits: dict[str, list[tuple[float, float]]]

    def payload_bytes(self, scheme: Scheme) -> float:
        """The most that a rank sent in one step."""
        return max(each.payload_bytes for each in self.counts[scheme])

    def peak_bytes(self, scheme: Scheme) -> float:
        """The most that a rank's tensors occupied in one step."""
        return max(each.peak_bytes for each in self.counts[scheme])

    def seconds(self, scheme: Scheme) -> list[float]:
        """Of a step, round by round."""
        return self.counts[scheme][0].seconds

    def inference_bytes(self, scheme: Scheme) -> float:
        """The most that a rank sent in a forward pass alone."""
        return max(each.inference_payload_bytes for each in self.counts[scheme])

    def inference_seconds(self, scheme: Scheme) -> list[float]:
        """Of a forward pass alone, round by round."""
        return self.counts[scheme][0].inference_seconds

    def losses(self) -> list[float]:
        """Of each scheme, after the same steps."""
        return [self.counts[scheme][0].loss for scheme in SCHEMES]

    def hidden(self) -> list[float]:
        """Of each round, the part of the wait for panels that overlap takes away."""
        pairs = zip(self.waits["hidden"], self.waits["exposed"], strict=True)
        return [1 - ours[0] / theirs[0] for ours, theirs in pairs]


def run_race(race: Race, link: str | None) -> Finish:
    """Start the workers, see them to their end, and read what they counted.

    Args:
        race: what they do.
        link: of each worker; None leaves them in this machine's own network.

    Raises:
        ConfigError: the machine cannot emulate the link.
        ThinwireError: a worker failed; with its last lines of output.
    """
    workers, lines = race.rows * race.columns, list[str]()
    with ExitStack() as contexts:
        folder = contexts.enter_context(tempfile.TemporaryDirectory())
        network = None if link is None else contexts.enter_context(Network(parse_links(link, workers)))
        command = [sys.executable, "-m", "reproductions.optimus.worker", json.dumps(asdict(race)), folder]
        running = contexts.enter_context(
            Workers(
                command,
                workers,
                network=network,
                environment={"OMP_NUM_THREADS": "1"},
                on_line=lambda rank, _, line: lines.append(f"{rank}: {line}"),
                timeout=_TIMEOUT_SECONDS,
            )
        )
        running.wait()
        if running.failure is not None:
            raise ThinwireError(f"{running.failure}; the last lines: {' / '.join(lines[-3:])[:600]}")
        return _finish(race, [json.loads(Path(folder, f"rank-{k}.json").read_bytes()) for k in range(workers)])


def _finish(race: Race, found: list[dict[str, Any]]) -> Finish:
    counts: dict[Scheme, list[Counts]] = {scheme: [Counts(**each[scheme]) for each in found] for scheme in SCHEMES}
    waits = {
        way: [
            (fmean(exposed for exposed, _ in ranks), fmean(whole for _, whole in ranks))
            for ranks in zip(*(each[way] for each in found), strict=True)
        ]
        for way in ("hidden", "exposed")
        if way in found[0]
    }
    return Finish(race, counts, waits)


def layer_of(race: Race) -> Layer:
    """One layer of the race, for the formulas."""
    return Layer(tokens=race.stem.tokens, hidden=race.stem.hidden, rows=race.rows, columns=race.columns)


def formula_payload_bytes(race: Race, scheme: Scheme) -> float:
    """What a rank sends in one step."""
    layer = layer_of(race)
    if scheme == "1d":
        elements = one_dimensional_elements(layer)
    elif scheme == "1d+sequence":
        # Gains and biases of the norms see their rank's tokens alone, and are summed.
        norms = 4 * layer.hidden * 2 * (layer.ranks - 1) / layer.ranks
        elements = one_dimensional_elements(layer, sequence_parallel=True, keeps_gathered=True) + norms
    else:
        elements = layer_elements(layer) + norm_elements(layer) + vector_elements(layer)
    return ELEMENT_BYTES * race.stem.layers * elements


def formula_inference_bytes(race: Race, scheme: Scheme) -> float:
    """What a rank sends in a forward pass alone."""
    layer = layer_of(race)
    if scheme == "2d":
        elements = layer_elements(layer, "forward") + norm_elements(layer, "forward")
    else:
        elements = one_dimensional_elements(layer, "forward", sequence_parallel=scheme == "1d+sequence")
    return ELEMENT_BYTES * race.stem.layers * elements


def formula_peak_bytes(race: Race, scheme: Scheme) -> float:
    """What a rank's tensors occupy at most in one step."""
    return ELEMENT_BYTES * step_peak(layer_of(race), race.stem.layers, race.stem.heads, scheme=scheme)
