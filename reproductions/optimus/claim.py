# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism in two dimensions sends less, holds less and is faster than in one, at four ranks already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from reproductions.optimus.pictures import race_picture, scaling_picture
from reproductions.optimus.race import (
    Finish,
    formula_inference_bytes,
    formula_payload_bytes,
    formula_peak_bytes,
    run_race,
)
from reproductions.optimus.scaling import (
    LAYERS,
    LIMIT_BYTES,
    PUBLISHED,
    STRONG_HEADS,
    STRONG_HIDDEN,
    Published,
    Row,
    row_of,
    scaling,
    sent_for_a_sequence,
)
from reproductions.optimus.transformer_layers import SCHEMES, Scheme, Stem
from reproductions.optimus.worker import Race
from reproductions.shared.claims import Attempt, Claim, Outcome, Result, at_least, at_most, emulated, judged
from thinwire.lab.report.statistics import ratios, spread

LINK = "1gbit"
MEMORY_TOLERANCE = 0.1
LARGER_BATCH = 4.0
PUBLISHED_BATCH = 8.0  # times the largest one of Megatron, on 64 GPUs
HIDDEN_PART = 0.5
OTHERS: tuple[Scheme, ...] = ("1d", "1d+sequence")
_QUICK = (Race(Stem(2, 256, 4, 64, 32), 2, 2, rounds=5, steps=2, product=4096, panels=4),)
_FULL = (
    Race(Stem(4, 256, 4, 64, 32), 2, 2, rounds=7, steps=2, product=4096, panels=4),
    Race(Stem(4, 256, 4, 64, 128), 2, 2, rounds=3),
    Race(Stem(4, 256, 16, 64, 32), 4, 4, rounds=3),
)


def measure(attempt: Attempt) -> Result:
    """Race on a shaped link, compare with the formulas, which then predict more ranks."""
    link, finishes = emulated(LINK), list[Finish]()
    for race in _QUICK if attempt.quick else _FULL:
        attempt.begin(_title(race))
        finishes.append(run_race(race, link))
    rows = scaling()
    strong = row_of(64, STRONG_HIDDEN, STRONG_HEADS)
    result = judge(finishes, [*rows, strong], link)
    return attempt.illustrated(result, lambda: (race_picture(finishes[0], link), scaling_picture(rows)))


def judge(finishes: Sequence[Finish], rows: Sequence[Row], link: str | None) -> Result:
    """Whether each race was won in bytes, memory and time, as the formulas predict, and what they predict for 16
    ranks.
    """
    first = finishes[0]
    sixteen = next(row for row in rows if row.ranks == 16)
    parts = {
        "the same model": judged(all(_alike(finish) for finish in finishes)),
        "bytes": judged(
            all(_exact(f, "payload_bytes", formula_payload_bytes) and _fewest(f.payload_bytes) for f in finishes)
        ),
        "bytes of inference": judged(
            all(
                _exact(f, "inference_payload_bytes", formula_inference_bytes) and _fewest(f.inference_bytes)
                for f in finishes
            )
        ),
        "memory": judged(all(_close(each) and _fewest(each.peak_bytes) for each in finishes)),
        "time at 4 ranks": _soonest([finish for finish in finishes if _ranks(finish.race) == 4]),
        "hidden wait": at_least(first.hidden(), HIDDEN_PART),
        "batch at 16 ranks": judged(sixteen.batch_ratio >= LARGER_BATCH),
        "batch at 64 ranks": judged(all(row.batch_ratio >= PUBLISHED_BATCH for row in rows if row.ranks == 64)),
        "speed at 64 ranks": Outcome.UNDECIDED,
    }
    times = spread(_time_ratios(first, "1d"))
    return Result(
        parts=parts,
        measured=f"2x2 against one dimension over {link or 'loopback'} at {first.race.stem.tokens} tokens of "
        f"{first.race.stem.hidden} features: {times.median:.2f}x the time of a step "
        f"({spread(_time_ratios(first, '1d+sequence')).median:.2f}x with the sequence split), "
        f"{first.payload_bytes('2d') / first.payload_bytes('1d'):.2f}x the bytes, "
        f"{first.peak_bytes('2d') / first.peak_bytes('1d'):.2f}x the memory; by formula {sixteen.batch_ratio:.1f}x "
        f"the largest batch at 16 ranks",
        value=times.median,
        least=times.low,
        most=times.high,
        details={
            **{_title(finish.race): _figures(finish) for finish in finishes},
            "share of the wait for panels that overlap hides": first.hidden(),
            "seconds waiting and in all": first.waits,
            **{
                f"by formula, {row.ranks} ranks, {row.hidden} features": asdict(row) | {"batch_ratio": row.batch_ratio}
                for row in rows
            },
            **{f"the paper's weak scaling, {each.ranks} GPUs": _published(each) for each in PUBLISHED},
            "not counted": "what Gloo takes for itself within a call, and the interpreter",
            "link": link or "the machine's own (no namespaces here)",
        },
    )


def _ranks(race: Race) -> int:
    return race.rows * race.columns


def _title(race: Race) -> str:
    stem = race.stem
    return f"{race.rows}x{race.columns}, {stem.layers} layers of {stem.hidden}, {stem.tokens} tokens"


def _alike(finish: Finish) -> bool:
    losses = finish.losses()
    return max(losses) - min(losses) <= 1e-5 * max(losses)


def _exact(finish: Finish, what: str, formula: Callable[[Race, Scheme], float]) -> bool:
    wanted = {scheme: formula(finish.race, scheme) for scheme in SCHEMES}
    counted = [(getattr(each, what), wanted[scheme]) for scheme in SCHEMES for each in finish.counts[scheme]]
    return all(abs(nbytes - told) <= 1e-9 * told for nbytes, told in counted)


def _close(finish: Finish) -> bool:
    wanted = {scheme: formula_peak_bytes(finish.race, scheme) for scheme in SCHEMES}
    return all(
        abs(each.peak_bytes / wanted[scheme] - 1) <= MEMORY_TOLERANCE
        for scheme in SCHEMES
        for each in finish.counts[scheme]
    )


def _fewest(figure: Any) -> bool:
    return all(figure("2d") < figure(other) for other in OTHERS)


def _soonest(finishes: Sequence[Finish]) -> Outcome:
    """Whether two dimensions take less time than either other way in every round of every race."""
    return at_most([ratio for each in finishes for other in OTHERS for ratio in _time_ratios(each, other)], 1.0)


def _time_ratios(finish: Finish, other: Scheme) -> list[float]:
    """Two dimensions over another scheme, in each round."""
    return list(ratios(finish.seconds("2d"), finish.seconds(other)).values)


def _figures(finish: Finish) -> dict[str, Any]:
    """What was counted in each scheme, beside the formulas."""
    race = finish.race
    return {
        scheme: {
            "ms a step": [1e3 * each for each in finish.seconds(scheme)],
            "MB sent": finish.payload_bytes(scheme) / 1e6,
            "MB sent, by formula": formula_payload_bytes(race, scheme) / 1e6,
            "MB held": finish.peak_bytes(scheme) / 1e6,
            "MB held, by formula": formula_peak_bytes(race, scheme) / 1e6,
            "loss": finish.counts[scheme][0].loss,
            "ms a forward pass alone": [1e3 * each for each in finish.inference_seconds(scheme)],
            "MB sent in it": finish.inference_bytes(scheme) / 1e6,
            "MB sent in it, by formula": formula_inference_bytes(race, scheme) / 1e6,
            "MB held in it": max(each.inference_peak_bytes for each in finish.counts[scheme]) / 1e6,
        }
        for scheme in SCHEMES
    }


def _published(paper: Published) -> dict[str, float]:
    """The paper's ratios of two dimensions to one, and what the formulas give."""
    row, (one, two) = row_of(paper.ranks, paper.hidden, paper.heads), sent_for_a_sequence(paper)
    (b1, b2), (t1, t2), (i1, i2) = paper.batches, paper.training, paper.inference
    return {
        "published: largest batch": b2 / b1,
        "published: training": t2 / t1,
        "published: inference": i2 / i1,
        "by formula: bytes of one dimension over two, to train on a sequence at these batches": one / two,
        "by formula: largest batch without recomputation, which the paper has": row.batch_ratio,
    }


CLAIM = Claim.read(__file__, measure, {**globals(), "LAYERS": LAYERS, "limit": LIMIT_BYTES / 2**30})
