# SPDX-License-Identifier: Apache-2.0
"""Every claim has a protocol and parts, and the page of claims says what they and their results say."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from reproductions.dqsgd.thread_runs import learned
from reproductions.shared.claims import (
    MODULES,
    Outcome,
    Result,
    at_least,
    at_most,
    claim,
    ended,
    last_result,
    last_verdict,
    verdict_of,
    write_result,
)
from reproductions.shared.command import reproduce
from reproductions.shared.curves import Choice
from reproductions.shared.page import PAGE, RULES, page, rules
from reproductions.shared.threads import Schedule, train_on_threads
from reproductions.slowmo.steps import Figures, Plan, Trial, run
from thinwire import AllReduce, ConfigError, LocalSGD, NonFiniteError
from thinwire.lab.runs import Comparison
from thinwire.lab.tasks import load

RESULT = Result({"payload": Outcome.HOLDS, "wire": Outcome.NOISE}, "8 times less", 8.0, 7.9, 8.1, {"a": 1})


@pytest.mark.parametrize("name", MODULES)
def test_every_claim_says_what_is_run_when_it_holds_and_where_it_does_not_pay(name: str) -> None:
    which = claim(name)
    assert which.name == name
    assert which.protocol and which.costs and which.parts and all(which.parts.values())
    assert which.minutes[1] <= 3
    assert set(which.full_only) < set(which.parts)
    assert all(each.rule and each.verdict and each.why for each in which.earlier)
    assert which.rule not in [each.rule for each in which.earlier]


def test_the_page_of_claims_is_the_one_that_would_be_written() -> None:
    assert RULES.read_text(encoding="utf-8") == rules(), "run `python -m reproductions.shared.page`"
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m reproductions.shared.page`"


@pytest.mark.parametrize(
    ("parts", "verdict"),
    [
        ({"a": "holds", "b": "holds"}, "holds"),
        ({"a": "holds", "b": "does not hold"}, "holds in part: a; b: does not hold"),
        ({"a": "holds", "b": "cannot be decided here"}, "holds in part: a; b: cannot be decided here"),
        ({"a": "does not hold", "b": "within noise"}, "does not hold: a; b: within noise"),
        ({"a": "within noise"}, "cannot be decided here: a: within noise"),
    ],
)
def test_a_verdict_is_one_of_four(parts: dict[str, str], verdict: str) -> None:
    assert verdict_of(parts) == verdict


def test_a_rule_that_rounds_can_turn_is_within_noise() -> None:
    assert [at_most(rounds, 1.05) for rounds in ([1.0, 1.05], [1.0, 1.06], [1.06, 1.2])] == [
        Outcome.HOLDS,
        Outcome.NOISE,
        Outcome.FAILS,
    ]
    assert at_least([1.4, 2.0], 1.4) is Outcome.HOLDS
    assert at_least([1.3, 2.0], 1.4) is Outcome.NOISE


def test_a_result_is_kept_with_its_rule_and_a_changed_rule_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    which = claim("local-sgd-bytes")
    home = tmp_path / "local_sgd_bytes"
    home.mkdir()
    report = write_result(home, which, RESULT, quick=True, when="2026-01-01").read_text(encoding="utf-8")
    assert "**Verdict: holds in part: payload; wire: within noise.**" in report
    monkeypatch.setattr("reproductions.shared.claims._HOME", tmp_path)
    found = last_result("local-sgd-bytes")
    assert found is not None and found["parts"] == {"payload": "holds", "wire": "within noise"}
    assert last_verdict(which, found) == "holds in part: payload; wire: within noise (quick form)"
    changed = replace(which, parts={"payload": "it is 9"})
    assert last_verdict(changed, found).startswith("not run yet by the present rule; by the rule before: holds in part")
    other_seeds = replace(which, protocol="as before, with other seeds")
    assert last_verdict(other_seeds, found).startswith("not run yet by the present rule")
    assert last_verdict(which, None) == "no committed result"


@pytest.mark.parametrize("quick", [True, False])
def test_a_quick_form_leaves_open_what_only_the_full_form_decides(
    quick: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = replace(RESULT, parts=dict.fromkeys(RESULT.parts, Outcome.HOLDS))
    which = replace(claim("local-sgd-bytes"), run=lambda _: good, full_only=("wire",))
    monkeypatch.setattr("reproductions.shared.command.claim", lambda _: which)
    code = reproduce(which.name, quick=quick, folder=tmp_path / "run", json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["parts"] == {"payload": "holds", "wire": "cannot be decided here" if quick else "holds"}
    assert json.loads((tmp_path / "run/result.json").read_bytes())["parts"] == found["parts"] and code == int(quick)


def test_a_result_with_other_parts_than_the_claim_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the result has parts"):
        write_result(tmp_path, claim("decentlam"), RESULT, quick=True, when="2026-01-01")


def test_a_trial_that_diverges_is_the_worst_one() -> None:
    pytest.importorskip("sklearn")
    task = load("digits")
    fast = Schedule(steps=12, batch_size=8, lr=1e30)
    found = train_on_threads(task, LocalSGD(period=4), fast, workers=2, split="iid", seed=0)
    assert (found.loss, found.metric) == (inf, 0.0)
    slow = train_on_threads(task, LocalSGD(period=4), replace(fast, lr=0.1), workers=2, split="iid", seed=0)
    assert Choice({1e30: found.loss, 0.1: slow.loss}).rate == 0.1
    assert learned(task, AllReduce(), fast, workers=2, seed=0).loss == inf
    plan = Plan(task, workers=2, steps=12, batch_size=8)
    assert run(plan, Trial("LocalSGD(period=4)", 1e30), 0) == Figures(inf, inf, 0.0)


def test_bytes_and_seconds_of_a_run_that_diverged_are_not_compared(tmp_path: Path) -> None:
    summary = {"seconds_per_step": 0.1}
    lost = {"seconds_per_step": None, "diverged": "step 3: the loss is nan on rank 1"}
    whole = Comparison(tmp_path, ("AllReduce()", "LocalSGD()"), ((summary, summary), (summary, summary)))
    assert ended(whole) is whole
    with pytest.raises(NonFiniteError, match=r"LocalSGD\(\), round 1: step 3: the loss is nan on rank 1"):
        ended(replace(whole, rounds=((summary, summary), (summary, lost))))
