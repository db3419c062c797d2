# SPDX-License-Identifier: Apache-2.0
"""Runs with a fault, on threads or processes, and what is wrong with how they ended."""

from __future__ import annotations

import re
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist

from tests.battery.cases import STRATEGIES
from tests.faults.drawn import Fault
from tests.faults.drawn import fault as drawn
from tests.faults.rank import Ending, ended
from tests.pool import RankProcess, start_processes
from thinwire import ThreadComm
from thinwire.core.comm.threads import Hub
from thinwire.errors import (
    CheckpointError,
    CommError,
    CommTimeoutError,
    ConfigError,
    MismatchError,
    NonFiniteError,
    PeerLostError,
)

SLACK_SECONDS = 40.0
"""How much longer than a few timeouts a run may take, on a machine that does other things too."""
GONE = Ending("gone")
"""Of a rank that ended without a word, as a killed one does."""
COMM_ERRORS = {kind.__name__ for kind in (CommError, CommTimeoutError, PeerLostError, MismatchError)}
_CHAINED = re.compile(r"rank \d+ was lost at step \d+ \((?:CommTimeoutError|PeerLostError|MismatchError): (.*)\)", re.S)
_NAMED = re.compile(r"ranks? (\d+(?:, \d+)*)")
_BLAMED = re.compile(
    r"((?:rank \d+(?: \(rank \d+ of the whole job\))?(?:, | and )?)+) (?:is|are|was|were) (?:lost|not answering)"
)


def most_seconds(fault: Fault) -> float:
    """After which a run hangs."""
    return 3 * min(fault.timeout, 5.0) + SLACK_SECONDS


def on_threads(fault: Fault) -> list[Ending]:
    """Every rank's ending; "hangs" for one that has none in time, whose thread is left behind."""
    hub, endings = Hub(fault.size), [Ending("hangs")] * fault.size

    def body(rank: int) -> None:
        comm = ThreadComm(hub, rank, timeout=fault.timeout)
        endings[rank] = ended(fault, comm, rank, folder, lambda error: hub.report_failure(rank, error))

    with tempfile.TemporaryDirectory() as folder:
        threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(fault.size)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + most_seconds(fault)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return list(endings)


def on_a_process(each: Fault, folder: str) -> Ending:
    """One rank's ending."""
    rank = dist.get_rank()
    # Before the group is made everywhere, what happens is torch's.
    store = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
    store.set(f"begun/{rank}", "1")
    if rank in each.victims:
        store.wait([f"begun/{other}" for other in range(each.size)], timedelta(seconds=SLACK_SECONDS))
    return ended(each, None, rank, folder)


def on_processes(faults: Sequence[Fault]) -> Iterator[tuple[Fault, list[Ending]]]:
    """The endings of several runs, side by side: most of their time is waiting."""
    with tempfile.TemporaryDirectory() as folder:
        running = [start_processes(f.size, on_a_process, f, f"{folder}/{i}") for i, f in enumerate(faults)]
        deadline = time.monotonic() + max(map(most_seconds, faults))
        try:
            for fault, workers in zip(faults, running, strict=True):
                for worker in workers:
                    if fault.kind != "stop" or worker.rank not in fault.victims:
                        worker.finish(deadline)
        finally:
            for worker in (worker for workers in running for worker in workers):
                worker.process.kill()
                worker.process.join()
        for fault, workers in zip(faults, running, strict=True):
            yield fault, [_ending(worker) for worker in workers]


def _ending(worker: RankProcess) -> Ending:
    if worker.result is not None:
        return worker.result
    if worker.error is None or "without an answer" in worker.error:
        return GONE
    if "before the deadline" in worker.error:
        return Ending("hangs")
    return Ending("UncaughtError" if "UncaughtError" in worker.error else "raw", worker.error)


def endings_of(fault: Fault) -> list[Ending]:
    """One run."""
    return next(on_processes([fault]))[1] if fault.processes else on_threads(fault)


# -- what is wrong -----------------------------------------------------------------------------------------------------


def wrong(fault: Fault, endings: Sequence[Ending]) -> str:
    """What is wrong with the endings of a run, in words; nothing where nothing is."""
    ranks = [rank for rank in range(fault.size) if not (fault.is_fatal and rank in fault.victims)]
    late = [rank for rank in ranks if endings[rank].kind == "hangs"]
    if late:
        return f"ranks {late} hang"
    done = [rank for rank in ranks if endings[rank].kind == "done"]
    failed = [rank for rank in ranks if rank not in done]
    for rank in failed:
        if words := _wrong_error(fault, rank, endings[rank]):
            return f"rank {rank} {words}: {endings[rank].text or endings[rank].kind}"
    if fault.is_fatal and len(fault.victims) <= getattr(fault.case.strategy, "backups", 0):
        # It goes on without them.
        apart = [rank for rank in done if endings[rank].model != endings[done[0]].model]
        return f"ranks {done[0]} and {apart} go on with different models" if apart else ""
    if fault.is_fatal:
        # Who has sent all that is sent in a whole run needs nothing of a victim any more.
        calm = _undisturbed(STRATEGIES.index(fault.case), fault.size) if done else []
        needed = [rank for rank in done if fault.phase != "end" and endings[rank].sent < calm[rank].sent - 1]
        return f"ranks {needed} are done without ranks {list(fault.victims)}" if needed else ""
    if done and failed:
        return f"ranks {done} are done, and ranks {failed} are not: {endings[failed[0]].text}"
    return _wrong_models(fault, endings) if done else ""


def _wrong_error(fault: Fault, rank: int, ending: Ending) -> str:
    kinds = COMM_ERRORS | ({NonFiniteError.__name__} if fault.kind == "nan" else set())
    # Ranks that are at different steps are noticed where they save.
    kinds |= {CheckpointError.__name__} if fault.kind in ("skipped batch", "left out", "repeated batch") else set()
    # The loop's own mistake may be named where it is made.
    kinds |= {ConfigError.__name__} if rank in fault.victims and not fault.is_fatal else set()
    if ending.kind not in kinds:
        return f"has an error of another kind, {ending.kind}"
    text = root(ending.text)
    # What it says of itself first is where it was.
    text = re.sub(rf"^(?:the connections [^:]*: )?rank {rank}\b", "", text)
    blamed = {
        int(each)
        for words in _BLAMED.findall(text)
        for each in re.findall(r"rank (\d+)", re.sub(r" \(rank.*?\)", "", words))
    }
    if blamed - set(fault.victims):
        return f"blames ranks {sorted(blamed - set(fault.victims))}"
    if rank in fault.victims and not fault.is_fatal:
        return ""
    # Where two of four ranks differ from the other two, nobody can say who is wrong: both groups are named.
    named = {int(each) for words in _NAMED.findall(text) for each in re.findall(r"\d+", words)}
    if not named & set(fault.victims):
        return "does not name the rank"
    return ""


def root(text: str) -> str:
    """The first failure that a text is about: on threads, one that ends with an error counts as lost to the others."""
    while found := _CHAINED.search(text):
        text = found[1]
    return text


@cache
def _undisturbed(case: int, size: int) -> list[Ending]:
    calm = replace(drawn(0), case=STRATEGIES[case], size=size, kind="nan", victims=(), processes=False)
    return on_threads(calm)


def _wrong_models(fault: Fault, endings: Sequence[Ending]) -> str:
    """All ranks are done: whether they have trained together to the end."""
    strategy = fault.case.strategy
    calm = _undisturbed(STRATEGIES.index(fault.case), fault.size)
    models, agreed = (torch.tensor([getattr(each, name) for each in endings]) for name in ("model", "agreed"))
    if not (models.isfinite().all() and agreed.isfinite().all()):
        return "all are done with models that are not finite"
    steps = [each.step for each in endings]
    if len(set(steps)) > 1 and not strategy.traits.timing_dependent:
        return f"all are done, after different numbers of steps: {steps}"
    if not torch.equal(agreed, agreed[:1].expand_as(agreed)):
        return "all are done, and do not agree"
    ends = torch.tensor([each.model for each in calm])
    promised = torch.equal(ends, ends[:1].expand_as(ends))
    if promised and not torch.equal(models, models[:1].expand_as(models)):
        return f"all are done with unequal models, {float((models - models.mean(0)).abs().max()):.3g} apart"
    apart, usual = (float((xs - xs.mean(0)).norm()) for xs in (models, ends))
    if apart > 4 * usual + 1e-6 and not strategy.traits.timing_dependent:
        return f"all are done with models {apart / max(usual, 1e-9):.3g} times as far apart as usually"
    if not (strategy.traits.timing_dependent or strategy.traits.data_dependent_bytes):
        least = 0.75 * min(each.sent for each in calm)
        if min(each.sent for each in endings) < least:
            return f"all are done, and sent {[int(each.sent) for each in endings]} bytes of {int(calm[0].sent)}"
    return ""
