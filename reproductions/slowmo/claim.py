# SPDX-License-Identifier: Apache-2.0
"""Where data are unlike, slow momentum makes of Local SGD and of SGP a better model in the same steps and bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from reproductions.shared.claims import Attempt, Claim, Outcome, Result, at_most, ended
from reproductions.shared.committed import Records
from reproductions.slowmo.pictures import loss_picture, tuning_picture
from reproductions.slowmo.steps import Figures, Plan, Progress, Run, Runs, Trial, best, kept, tuned
from thinwire.lab.report.statistics import ratios, spread
from thinwire.lab.runs import Comparison
from thinwire.lab.tasks import load

PERIOD, GOSSIP_PERIOD = 12, 24
SLOWER = 1.05
_BATCH_SIZE = 8
_UNLIKE, _EVEN = "label", "iid"
_PAIRS = {"SlowMo over Local SGD": "Local SGD", "SlowMo over SGP": "SGP"}
_MORE_STEPS = "SGP, for as many bytes"
_TREATMENTS = (("maintain", 0.3), ("reset", 0.5))
_PACED = (
    f"LocalSGD(period={PERIOD})",
    f"SlowMo(period={PERIOD})",
    "PushSum()",
    f"SlowMo(base=PushSum(), period={GOSSIP_PERIOD})",
)


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Args:
        task: what is learned.
        workers: how many threads.
        steps: optimizer steps.
        splits: how the examples are dealt out.
        rates: learning rates tried for a method without choices besides.
        fewer_rates: half as many, tried for slow momentum with each of two treatments of the workers' momentum.
        tuning_seeds: with which trials are compared.
        seeds: others, with which the best trials are compared.
        paced_steps: of the runs on processes.
        paced_rounds: how often each of them is run.
    """

    task: str = "mnist"
    workers: int = 32
    steps: int = 300
    splits: tuple[str, ...] = (_UNLIKE, _EVEN)
    rates: tuple[float, ...] = (0.02, 0.03, 0.045, 0.065, 0.095, 0.14)
    fewer_rates: tuple[float, ...] = (0.03, 0.05, 0.08)
    tuning_seeds: tuple[int, ...] = (0,)
    seeds: tuple[int, ...] = tuple(range(10, 16))
    paced_steps: int = 48
    paced_rounds: int = 3


QUICK = Scale(
    task="digits",
    workers=16,
    steps=64,
    rates=(0.07, 0.1, 0.14, 0.2),
    fewer_rates=(0.07, 0.14),
    tuning_seeds=(0,),
    seeds=(10, 11, 12, 13, 14),
    paced_steps=16,
    paced_rounds=3,
)


def measure(attempt: Attempt) -> Result:
    """Tune every method alike, train each at its best with other seeds, and time it on processes."""
    scale = QUICK if attempt.quick else Scale()

    def told(trial: Trial, seed: int) -> None:
        attempt.begin(f"{trial.recipe}, learning rate {trial.lr:g}, seed {seed}")

    task = load(scale.task)
    run = kept(Records(attempt.folder / "runs"))
    plans = [Plan(task, scale.workers, scale.steps, _BATCH_SIZE, split=split) for split in scale.splits]
    unlike, even = [study(plan, scale, told, run) for plan in plans]
    result = judge(unlike.chosen, unlike.ended, even.ended, _paced(attempt, scale))
    like = {f"on like data, {name}": words for name, words in _gains_in_words(even.ended).items()}
    return attempt.illustrated(
        replace(result, details={**result.details, **like}),
        lambda: (loss_picture(unlike.ended), tuning_picture(unlike.runs)),
    )


@dataclass(frozen=True)
class Study:
    """What came of every method on one deal of the data: all trials, the best, and the best with other seeds."""

    runs: Runs
    chosen: Mapping[str, Trial]
    ended: Mapping[str, Sequence[Figures]]


def study(plan: Plan, scale: Scale, told: Progress, run: Run) -> Study:
    """Tune every method alike, and train each at its best; SGP for as many bytes as slow momentum sends, too."""
    runs = tuned(plan, grids(scale), scale.tuning_seeds, told, run)
    chosen = {name: best(trials) for name, trials in runs.items()}
    chosen[_MORE_STEPS] = chosen["SGP"]
    longer = replace(plan, steps=round(plan.steps * bytes_over_gossip(plan.workers)))
    ended: dict[str, list[Figures]] = {name: [] for name in chosen}
    for seed in scale.seeds:
        for name, trial in chosen.items():
            told(trial, seed)
            ended[name].append(run(longer if name == _MORE_STEPS else plan, trial, seed))
    return Study(runs, chosen, ended)


def bytes_over_gossip(workers: int) -> float:
    """What slow momentum over SGP sends, over what SGP alone does: an all-reduce a period more."""
    return 1 + 2 * (workers - 1) / workers / GOSSIP_PERIOD


def grids(scale: Scale) -> dict[str, list[Trial]]:
    """The trials of every method, as many for each: more learning rates where there is nothing else to choose."""
    found = {
        name: [Trial(recipe, lr) for lr in scale.rates]
        for name, recipe in (
            ("AllReduce", "AllReduce()"),
            ("Local SGD", f"LocalSGD(period={PERIOD})"),
            ("SGP", "PushSum()"),
        )
    }
    bases = (("SlowMo over Local SGD", "Local()", PERIOD), ("SlowMo over SGP", "PushSum()", GOSSIP_PERIOD))
    for name, base, period in bases:
        found[name] = [
            Trial(f"SlowMo(base={base}, period={period}, momentum={momentum}, buffers='{buffers}')", lr)
            for buffers, momentum in _TREATMENTS
            for lr in scale.fewer_rates
        ]
    return found


def _paced(attempt: Attempt, scale: Scale) -> Comparison:
    asked = {"task": "text", "model": "0.5m", "workers": 4, "batch_size": 2, "eval_limit": 16}
    done = attempt.compare(
        "runs/pace",
        _PACED,
        {**asked, "steps": scale.paced_steps, "eval_every": scale.paced_steps},
        rounds=scale.paced_rounds,
        title="The pace of slow momentum and of its bases",
    )
    return ended(done)


def judge(
    chosen: Mapping[str, Trial],
    ended: Mapping[str, Sequence[Figures]],
    even: Mapping[str, Sequence[Figures]],
    paced: Comparison,
) -> Result:
    """Whether both losses fall on both bases by more than chance, and no step is slower than its bytes make it."""
    gains, rounds = _gains(ended), _ratios(paced, "seconds_per_step")
    paces = {slow: median(each) for slow, each in rounds.items()}
    shown = gains["SlowMo over Local SGD", "Local SGD", "held_out_loss"]
    return Result(
        parts={
            **{f"unlike data, {slow}": _better(ended, slow) for slow in _PAIRS},
            **{f"like data, {slow}": _better(even, slow) for slow in _PAIRS},
            **{f"time, {slow}": at_most(rounds[slow], SLOWER * ratio) for slow, ratio in _payloads(paced).items()},
        },
        measured="; ".join(
            f"{slow}: held-out loss {_change(ended, slow, 'held_out_loss')}, training loss "
            f"{_change(ended, slow, 'train_loss')}, accuracy {_change(ended, slow, 'accuracy')}, time per step x "
            f"{paces[slow]:.3f}"
            for slow in _PAIRS
        ),
        value=fmean(shown),
        least=min(shown),
        most=max(shown),
        details={
            **_gains_in_words(ended),
            **{f"held-out loss, {name}": _range(ended[name], "held_out_loss") for name in ended},
            **{f"accuracy, {name}": _range(ended[name], "accuracy") for name in ended},
            **{f"chosen for {name}": f"{trial.recipe}, learning rate {trial.lr:g}" for name, trial in chosen.items()},
            **{f"payload, {slow} over its base": f"x {ratio:.4f}" for slow, ratio in _payloads(paced).items()},
            **{f"time per step over the base's, {slow}, by round": _listed(each) for slow, each in rounds.items()},
        },
    )


def _gains(ended: Mapping[str, Sequence[Figures]]) -> dict[tuple[str, str, str], list[float]]:
    """How much lower slow momentum's losses are than its base's, seed by seed, for equal steps and for equal bytes."""
    pairs = [*_PAIRS.items(), ("SlowMo over SGP", _MORE_STEPS)]
    return {
        (slow, base, what): [
            getattr(theirs, what) - getattr(ours, what) for ours, theirs in zip(ended[slow], ended[base], strict=True)
        ]
        for slow, base in pairs
        for what in ("train_loss", "held_out_loss")
    }


def _better(ended: Mapping[str, Sequence[Figures]], slow: str) -> Outcome:
    """Whether all its gains are more than their standard errors; where their signs say no more than that, noise."""
    gains = [spread(each) for (name, _, _), each in _gains(ended).items() if name == slow]
    if all(each.mean > each.error for each in gains):
        return Outcome.HOLDS
    return Outcome.FAILS if any(each.mean < -each.error for each in gains) else Outcome.NOISE


def _gains_in_words(ended: Mapping[str, Sequence[Figures]]) -> dict[str, str]:
    return {
        f"gain in {what}, {slow} against {base}": _in_words(each) for (slow, base, what), each in _gains(ended).items()
    }


def _ratios(paced: Comparison, key: str) -> dict[str, list[float]]:
    """Slow momentum's figure over its base's, round by round."""
    local, slow_local, gossip, slow_gossip = ([summary[key] for summary in each] for each in paced.rounds)
    pairs = ((slow_local, local), (slow_gossip, gossip))
    return {name: list(ratios(*pair).values) for name, pair in zip(_PAIRS, pairs, strict=True)}


def _payloads(paced: Comparison) -> dict[str, float]:
    return {name: median(each) for name, each in _ratios(paced, "payload_bytes_per_worker_per_step").items()}


def _change(ended: Mapping[str, Sequence[Figures]], slow: str, what: str) -> str:
    before, after = (fmean(getattr(each, what) for each in ended[name]) for name in (_PAIRS[slow], slow))
    return f"{before:.4f} to {after:.4f}"


def _in_words(gains: Sequence[float]) -> str:
    found = spread(gains)
    return f"{found.mean:+.4f} (standard error {found.error:.4f}, {found.low:+.4f} to {found.high:+.4f})"


def _range(figures: Sequence[Figures], what: str) -> str:
    return spread(getattr(each, what) for each in figures).words(".4f", of="mean")


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values)


CLAIM = Claim.read(__file__, measure, globals())
