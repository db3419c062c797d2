# SPDX-License-Identifier: Apache-2.0
"""Every registered strategy is resumed with more workers and with fewer, and goes on from what they had in common."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from tests.battery.cases import STRATEGIES, is_first
from tests.battery.runs import Case, Setting, begin, go_on, with_
from tests.problems import flat
from thinwire import EASGD, AllReduce, Comm, LocalSGD, Worker
from thinwire.methods.strategies.base import nested
from thinwire.worker.worker import internals_of

MIDDLE, SECOND, LAST = 5, 8, 10


def sizes_of(each: Case) -> tuple[int, int]:
    """Two numbers of workers that a case has."""
    return (2, 4) if 3 in each.refuses else (2, 3)


def mass_of(worker: Worker) -> float | None:
    """The weight of push-sum, where there is one."""
    found = [x for name, x in worker.replicas[0].state.items() if name.rpartition("/")[2] == "mass"]
    if not found:
        return None
    tail = 8 // found[0].element_size()
    return float(found[0][-tail:].clone().view(torch.float64))


def residual_of(states: list[dict[str, Tensor]]) -> Tensor:
    """What the mean lacks: the mean of the workers' residuals, and those of the servers."""
    total = torch.zeros(34, dtype=torch.float64)
    for state in states:
        for name, x in state.items():
            if name.rpartition("/")[2] == "error" and len(x) == 34:
                total += x.double() / len(states)
            if "server_error/" in name:
                start, stop = map(int, name.rpartition("/")[2].split("-"))
                total[start:stop] += x.double()
    return total


def stage(setting: Setting, folder: Path, last: int, *, resume: bool) -> list[dict[str, Any]]:
    """One number of workers: load, train and save; what each rank saw."""

    def body(comm: Comm) -> dict[str, Any]:
        worker = begin(comm, setting, elsewhere=resume)
        found: dict[str, Any] = {}
        if resume:
            go_on(worker, setting, 1)  # it has a past of its own, of which nothing may stay
            assert worker.load(folder) == {"size": found_size(setting)}
            found["begun"] = flat(worker.model)
            found["residual before"] = copied(worker)
            found["mass"] = mass_of(worker)
            found["step"] = worker.step
        go_on(worker, setting, last)
        internals_of(worker).wait_pending()
        with worker.consensus() as model:
            found["agreed"] = flat(model)
        found["x"] = flat(worker.model)
        found["residual after"] = copied(worker)
        worker.save(folder, extra={"size": comm.size})
        worker.detach()
        return found

    return thinwire.run_threads(setting.size, body, timeout=20)


def copied(worker: Worker) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in worker.replicas[0].state.items()}


def found_size(setting: Setting) -> int:
    """The number of workers that wrote what this stage resumes."""
    few, many = sizes_of(setting.case)
    return many if setting.size == few else few


def goes_on(before: list[dict[str, Any]], after: list[dict[str, Any]], setting: Setting, step: int) -> None:
    """The new workers begin where the old ones agreed to be, with all that they owed each other."""
    agreed = before[0]["agreed"]
    if any(isinstance(part, EASGD) for part in nested(setting.case.strategy)):
        agreed = torch.stack([each["x"] for each in before]).mean(0)
    for each in after:
        assert each["step"] == step
        assert torch.equal(each["begun"], after[0]["begun"])
        torch.testing.assert_close(each["begun"], agreed, rtol=2e-6, atol=2e-7)
        assert each["x"].isfinite().all() and each["agreed"].isfinite().all()
        assert torch.equal(each["agreed"], after[0]["agreed"])
        assert not torch.equal(each["x"], each["begun"])
    if setting.case.strategy.traits.needs_equal_start and not setting.case.lockstep and setting.case.reproducible:
        held = torch.stack([each["x"] for each in after])
        assert torch.equal(held, held[:1].expand_as(held)) or setting.case.strategy.traits.period
    masses = [each["mass"] for each in after if each["mass"] is not None]
    assert not masses or sum(masses) == pytest.approx(setting.size, abs=1e-12)
    kept, now = (
        residual_of([each[f"residual {when}"] for each in rows])
        for rows, when in ((before, "after"), (after, "before"))
    )
    assert (kept - now).abs().max() < 1e-6


def is_asked(each: Case) -> bool:
    return is_first(each) and isinstance(each.strategy, AllReduce | LocalSGD)


def runs() -> list[Any]:
    """Every class with SGD, and gradients and local steps with AdamW; the others where there is time for slow tests."""
    return [
        pytest.param(each, optimizer, id=f"{each}-{optimizer}", marks=() if always(each) else pytest.mark.slow)
        for each in STRATEGIES
        for optimizer, always in (("sgd", is_first), ("adamw", is_asked))
    ]


@pytest.mark.parametrize(("each", "optimizer"), runs())
def test_it_goes_on_with_more_workers_and_with_fewer(each: Case, optimizer: str, tmp_path: Path) -> None:
    if optimizer in each.refuses or (optimizer == "adamw" and each.optimizer is not None):
        pytest.skip("refused before the first step")
    few, many = sizes_of(each)
    setting = replace(with_(each, size=few, dtype=torch.float32, steps=LAST), adamw=optimizer == "adamw")
    more = replace(setting, size=many)
    first = stage(setting, tmp_path, MIDDLE, resume=False)
    second = stage(more, tmp_path, SECOND, resume=True)
    goes_on(first, second, more, MIDDLE)
    third = stage(setting, tmp_path, LAST, resume=True)
    goes_on(second, third, setting, SECOND)
