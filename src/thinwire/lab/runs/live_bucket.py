# SPDX-License-Identifier: Apache-2.0
"""The state of a run over a bucket, from the views and the heartbeats of its workers."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

from thinwire.core.storage.bucket import Bucket, BucketStore
from thinwire.elastic.fleet import BEAT_SECONDS
from thinwire.elastic.membership import Membership
from thinwire.errors import CommError
from thinwire.lab.report.files import number, text
from thinwire.lab.runs.live import Member, Status, slowest_of

_SILENT_SECONDS = 2.4 * BEAT_SECONDS
_LOOK_SECONDS = 0.5
_TIMEOUT = 30.0


def bucket_status(url: str) -> Callable[[], Status]:
    """Open a run with the key of THINWIRE_KEY; returns a function that reads its state.

    The first call waits until each worker has shown a second heartbeat, or a few heartbeats have passed. Otherwise the
    records of a run that was killed would look like a running one.

    Raises:
        ConfigError: the URL or the key is invalid, or no run exists there.
        CommError: the store cannot be reached.
    """
    return _Reader(Bucket.open(url, timeout=_TIMEOUT, reads_only=True)).look


class _Reader:
    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._membership: Membership | None = None
        self._number = -1
        self._ended_at: float | None = None

    def look(self) -> Status:
        """Read the state of the newest run."""
        try:
            if self._membership is None:
                return self._look_first()
            found = self._look()
            # The processes may have attached another model, which is the next run.
            return self._look_first() if found.state == "ended" and self._open_newest() else found
        except ConnectionError as error:
            raise CommError(f"{self._bucket.url}: the store does not answer ({error}). Try again") from None

    def _look_first(self) -> Status:
        self._open_newest()
        end, first = time.monotonic() + 2.5 * BEAT_SECONDS, dict[str, str]()
        while True:
            found = self._look()
            assert self._membership is not None
            names = [each.name for each in found.workers if not each.late]
            beats = dict(zip(names, (beat for _, beat in self._membership.heartbeats(names)), strict=True))
            if found.state != "running" or time.monotonic() > end:
                return found
            if all(first.setdefault(name, beat) != beat for name, beat in beats.items()):
                return found
            time.sleep(_LOOK_SECONDS)

    def _open_newest(self) -> bool:
        """Open the newest run of the processes; returns whether it is another one."""
        names = self._bucket.wait(self._bucket.list(""))
        numbers = [int(match[1]) for name in names if (match := re.match(r"(\d+)/store/", name))]
        newest = max(numbers, default=0)
        if newest == self._number:
            return False
        self._number = newest
        self._membership = Membership(
            BucketStore(self._bucket, str(newest)), "", timeout=_TIMEOUT, beat_seconds=BEAT_SECONDS, connected=False
        )
        return True

    def _look(self) -> Status:
        membership = self._membership
        assert membership is not None
        view = membership.newest()
        if view is None:
            return _status(self._bucket.url, "waiting", [], {}, 0.0)
        reports, members, silences = dict[str, Mapping[str, Any]](), list[Member](), list[float]()
        ids, rows = dict(enumerate(view.members)), dict(view.rows)
        # Runs whose rounds close without late workers have the first view only, and number those that join after it.
        for request in range(view.requests + 1, membership.requests(now=True) + 1):
            asks = membership.requested(request)
            if asks is not None and _parse(membership.heartbeats([asks[0]])[0][1]).get("steps_taken"):
                ids[view.size + request - 1], rows[asks[0]] = asks
        view = replace(view, members=tuple(dict.fromkeys(ids.values())), rows=rows)
        gone = membership.gone(view.members, view)
        for each, (silence, report) in zip(view.members, membership.heartbeats(view.members), strict=True):
            silences.append(silence)
            reports[each] = _parse(report)
        awaited = _awaited(ids, {each: report for each, report in reports.items() if each not in gone})
        for each, silence in zip(view.members, silences, strict=True):
            late = "silent" if silence > _SILENT_SECONDS else "awaited" if each in awaited else ""
            members.append(_member(each, reports[each], "gone" if each in gone else late))
        state = "ended" if len(gone) == view.size else "running"
        return _status(self._bucket.url, state, members, reports, min(silences))


def _awaited(ids: Mapping[int, str], reports: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Return the members for which others are blocked."""
    ranks = {rank for report in reports.values() for rank in report.get("awaited", ()) if isinstance(rank, int)}
    return {each for rank, each in ids.items() if rank in ranks}


def _parse(report: str) -> Mapping[str, Any]:
    try:
        found: Any = json.loads(report.partition(" ")[2])  # after the counter
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _member(name: str, report: Mapping[str, Any], late: Any) -> Member:
    step, rounds, up, down = (int(number(report, each) or 0) for each in ("step", "rounds", "bytes_up", "bytes_down"))
    return Member(name, step, rounds, number(report, "loss"), up, down, late)


def _status(
    url: str, state: Any, members: list[Member], reports: Mapping[str, Mapping[str, Any]], silence: float
) -> Status:
    """Return the state of the run from those of its members; means are since each worker has started."""
    rows = {name: _per_step(report) for name, report in reports.items() if (number(report, "steps_taken") or 0) > 0}
    slowest, because, slowdown = slowest_of(rows)
    seconds = fmean(row["step_seconds"] for row in rows.values()) if rows else None
    waits = fmean(row["exposed_seconds"] for row in rows.values()) if rows else None
    losses = [each.loss for each in members if each.loss is not None]
    return Status(
        folder=url,
        strategy=next((text(report, "strategy") for report in reports.values() if report), "not known yet"),
        task="",
        state=state,
        step=max((each.step for each in members), default=0),
        steps=None,
        seconds=max((row["seconds"] for row in rows.values()), default=0.0),
        limit_seconds=None,
        loss=fmean(losses) if losses else None,
        eval_loss=None,
        seconds_per_step=seconds,
        wait_share=None if not seconds or waits is None else waits / seconds,
        payload_bytes=fmean(row["payload_bytes"] for row in rows.values()) if rows else None,
        bytes_per_step=fmean(row["bytes_per_step"] for row in rows.values()) if rows else None,
        members=tuple(each.name for each in members),
        slowest=slowest,
        because=because,
        slowdown=slowdown,
        written_seconds_ago=silence,
        workers=tuple(members),
    )


def _per_step(report: Mapping[str, Any]) -> dict[str, float]:
    names = ("steps_taken", "data_seconds", "compute_seconds", "wait_seconds", "payload_bytes")
    steps, data, compute, waits, sent = (number(report, each) or 0.0 for each in names)
    whole = data + compute + waits
    return {
        "seconds": whole,
        "step_seconds": whole / steps,
        "exposed_seconds": waits / steps,
        "data_seconds": data / steps,
        "payload_bytes": sent,
        "bytes_per_step": sent / steps,
    }
