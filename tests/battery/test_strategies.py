# SPDX-License-Identifier: Apache-2.0
"""Every registered strategy is asked the same questions, on threads."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.battery.cases import FAULTS, STRATEGIES, WRAPPERS, is_first
from tests.battery.runs import (
    BUCKET_BYTES,
    SHAPES,
    Case,
    Setting,
    alike,
    begin,
    case,
    everything,
    go_on,
    smallest,
    together,
    usual,
    with_,
)
from tests.problems import Regression, distance, flat
from thinwire import AcSA, AllReduce, Comm, ConfigError, LocalSGD, Worker
from thinwire.planning.plan.traffic import DryRun

SLOW = pytest.mark.slow


def every(question: str = "", *, forms: bool = True) -> pytest.MarkDecorator:
    """All cases, but for the faults that are known.

    Args:
        question: the name of the fault.
        forms: whether other forms of a class are asked each time; else only where there is time for slow tests.
    """
    cases: list[Any] = []
    for each in STRATEGIES:
        fault = FAULTS.get((question, each.strategy))
        marks = [pytest.mark.xfail(strict=True, reason=fault)] if fault else []
        marks += [] if forms or is_first(each) else [pytest.mark.slow]
        cases.append(pytest.param(each, id=str(each), marks=marks))
    return pytest.mark.parametrize("each", cases)


def equals_its_oracle(setting: Setting, tolerance: float = 0.0) -> None:
    """Run a setting for real, and compare it with the stacked loop of the same."""
    each = setting.case
    if not each.exact and setting.dtype == torch.float64:
        setting = replace(setting, dtype=torch.float32)
    found = (each.real or together)(setting)
    expected = each.oracle(setting)
    assert found.isfinite().all()
    assert distance(found, expected) < (tolerance or (2e-5 if setting.dtype == torch.float32 else 1e-12))


def is_refused(setting: Setting) -> None:
    """A run ends in a `ConfigError` before step 0, on every rank, in words."""

    def body(comm: Comm) -> str:
        with pytest.raises(ConfigError) as found:
            begin(comm, setting)
        return str(found.value)

    for words in thinwire.run_threads(setting.size, body, timeout=20):
        assert len(words.split()) > 4


def works_or_is_refused(setting: Setting, what: str | int) -> None:
    """Equal to the oracle in this setting, or refused where the table says so."""
    if what in setting.case.refuses:
        is_refused(setting)
    elif setting.case.real is None:
        equals_its_oracle(setting)
    else:
        assert together(setting).isfinite().all()


# -- results -----------------------------------------------------------------------------------------------------------


def sizes() -> list[Any]:
    """Each case with the usual number of workers, the first of its class alone too; the others among the slow tests.

    Two workers equal the oracle in the questions about optimizers.
    """
    return [
        pytest.param(
            each, size, id=f"{each}-{size}", marks=() if size == usual(each) or (size == 1 and is_first(each)) else SLOW
        )
        for each in STRATEGIES
        for size in (1, 2, 3, 5)
    ]


@pytest.mark.every_case
@pytest.mark.parametrize(("each", "size"), sizes())
def test_it_equals_its_oracle_or_the_number_of_workers_is_refused(each: Case, size: int) -> None:
    setting = with_(each, size=size)
    if size not in each.refuses:
        equals_its_oracle(setting)
    elif each.real is None or size > 1:
        is_refused(setting)


@every(forms=False)
def test_it_equals_its_oracle_with_momentum(each: Case) -> None:
    works_or_is_refused(with_(each, size=2, momentum=0.9), "momentum")


@every("adamw", forms=False)
def test_it_equals_its_oracle_with_adamw(each: Case) -> None:
    works_or_is_refused(with_(each, size=2, adamw=True, decay=0.1), "adamw")


@pytest.mark.slow  # with AdamW decay is asked for each time
@every("decay", forms=False)
def test_it_equals_its_oracle_with_weight_decay(each: Case) -> None:
    works_or_is_refused(with_(each, size=2, decay=0.1), "decay")


@every(forms=False)
def test_it_equals_its_oracle_with_parameter_groups_of_different_learning_rates(each: Case) -> None:
    works_or_is_refused(with_(each, size=2, factors=(1.0, 0.3)), "groups")


# -- dtypes, and how a step is written ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [pytest.param(torch.float64, marks=pytest.mark.slow), torch.float32], ids=str)
@every(forms=False)
def test_it_equals_its_oracle_in_single_and_in_double_precision(each: Case, dtype: torch.dtype) -> None:
    setting = with_(each, dtype=dtype)
    if each.real is None:
        found, expected = together(setting), each.oracle(setting)
        assert found.dtype == dtype
        assert distance(found, expected) < 2e-5
    else:
        assert together(setting).dtype == dtype


@every(forms=False)
def test_it_trains_in_bfloat16_or_says_that_it_does_not(each: Case) -> None:
    setting = with_(each, dtype=torch.bfloat16)
    if "bf16" in each.refuses:
        is_refused(setting)
        return
    found, fine = together(setting), together(replace(setting, dtype=torch.float32))
    assert found.dtype == torch.bfloat16
    moved = (fine - setting.start.float()).norm()
    assert (found.float() - setting.start.float()).norm() > 0.5 * moved
    if each.exact and each.reproducible:
        assert (found.float() - fine).norm() < 0.3 * moved


@every(forms=False)
def test_accumulated_gradients_are_those_of_one_big_batch(each: Case) -> None:
    setting = with_(each, passes=2, steps=4, dtype=torch.float64 if each.exact else torch.float32)
    if each.reproducible:
        whole = replace(setting, passes=1)
        assert distance(together(setting), together(whole)) < (1e-12 if each.exact else 2e-5)
    else:
        assert together(setting).isfinite().all()


class Empty(nn.Module):
    """A model with parameters of no elements before and after its own."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.empty(0, 3, dtype=dtype))
        self.inner = inner
        self.after = nn.ParameterList([torch.empty(0, dtype=dtype)])

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.before.sum().to(x.dtype) + self.after[0].sum().to(x.dtype)


class WithEmpty(Regression):
    """The battery's problem with such a model."""

    empty_dtype = torch.float64

    def model(self) -> nn.Module:
        return Empty(super().model(), self.empty_dtype)


class WithEmptyOfAnotherDtype(WithEmpty):
    empty_dtype = torch.bfloat16


@pytest.mark.parametrize("problem", [WithEmpty, pytest.param(WithEmptyOfAnotherDtype, marks=pytest.mark.slow)])
@every(forms=False)
def test_parameters_without_elements_change_nothing(each: Case, problem: type[Regression]) -> None:
    setting, with_empty = (with_(each, size=smallest(each), steps=5) for _ in range(2))
    with_empty.__dict__["problem"] = problem(setting.size, setting.steps, setting.dtype)
    found = together(with_empty)
    if each.reproducible:
        assert torch.equal(found, together(setting))
    else:
        assert found.isfinite().all()


@every(forms=False)
def test_it_moves_parameters_around_the_optimizer_s_step_if_and_only_if_its_trait_says_so(each: Case) -> None:
    setting = with_(each, size=smallest(each), dtype=torch.float32)

    def body(comm: Comm) -> bool:
        model = setting.problem.model()
        optimizer, before, moved = setting.make_optimizer(model), flat(model), list[bool]()

        def note(*_: Any) -> None:
            before.copy_(flat(model))

        def compare(*_: Any) -> None:
            moved.append(not torch.equal(flat(model), before))

        # Hooks run in the order in which they are registered: these before the worker's, and those below after them.
        handles = [optimizer.register_step_pre_hook(note), optimizer.register_step_post_hook(note)]
        worker = thinwire.attach(model, optimizer, setting.case.strategy, comm=comm, bucket_bytes=BUCKET_BYTES)
        handles += [optimizer.register_step_pre_hook(compare), optimizer.register_step_post_hook(compare)]
        go_on(worker, setting)
        worker.detach()
        for handle in handles:
            handle.remove()
        return any(moved)

    moved = any(thinwire.run_threads(setting.size, body, timeout=20))
    # Whether a worker is late, or an average arrives while there still are steps, is not decided here.
    assert moved == each.strategy.traits.moves_parameters or each.strategy.traits.timing_dependent


@every(forms=False)
def test_its_replicas_are_equal_after_every_step_if_and_only_if_its_trait_says_so(each: Case) -> None:
    assert (
        each.strategy.traits.equal_replicas == stay_equal(with_(each, size=usual(each)))
        or each.strategy.traits.timing_dependent
    )


@pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda kind: kind.__name__)
def test_a_wrapper_says_of_a_base_s_equal_replicas_whether_they_stay_so(wrapper: type) -> None:
    each = case(WRAPPERS[wrapper](LocalSGD(4)), lambda s: s.start)
    with suppress(ConfigError):
        each = case(WRAPPERS[wrapper](AllReduce()), lambda s: s.start)
    assert each.strategy.traits.equal_replicas == stay_equal(with_(each, size=2))


def stay_equal(setting: Setting) -> bool:
    """Whether all workers' parameters have the same bits after every step."""

    def body(comm: Comm) -> Tensor:
        seen: list[Tensor] = []
        worker = go_on(begin(comm, setting), setting, after_step=lambda worker: seen.append(flat(worker.model)))
        worker.detach()
        return torch.stack(seen)

    if setting.case.strategy.traits.skips_steps:
        return False  # a late worker has not seen all of them
    first, *others = thinwire.run_threads(setting.size, body, timeout=20)
    return all(torch.equal(first, other) for other in others)


@every(forms=False)
def test_it_trains_under_an_optimizer_that_computes_the_parameters_from_its_state_or_is_refused(each: Case) -> None:
    setting = with_(each, size=smallest(each), dtype=torch.float32)

    def body(comm: Comm) -> str | Tensor:
        model = setting.problem.model()
        try:
            worker = thinwire.attach(model, AcSA(model.parameters(), 0.05), setting.case.strategy, comm=comm)
        except ConfigError as error:
            return str(error)
        go_on(worker, setting)
        worker.detach()
        return flat(worker.model)

    found = thinwire.run_threads(setting.size, body, timeout=20)
    words, ends = ([each for each in found if isinstance(each, kind)] for kind in (str, Tensor))
    assert not words or not ends, "all ranks refuse, or none"
    if each.strategy.traits.moves_parameters:
        assert words
    elif words:
        assert "AcSA" in words[0]
        assert "would undo" not in words[0]
    elif each.strategy.traits.needs_equal_start:
        assert alike(ends, ends[:1] * setting.size)


# -- what is agreed on, saved and sent ---------------------------------------------------------------------------------


@every(forms=False)
def test_the_consensus_has_the_same_bits_on_all_ranks_and_changes_nothing(each: Case) -> None:
    setting = with_(each, size=usual(each), steps=6)

    def body(comm: Comm, looks: bool) -> tuple[list[Tensor], Tensor]:
        agreed: list[Tensor] = []

        def look(worker: Worker) -> None:
            if worker.step % 2 == 0:
                before = flat(worker.model)
                with worker.consensus() as model:
                    agreed.append(flat(model))
                assert torch.equal(before, flat(worker.model))

        worker = go_on(begin(comm, setting), setting, after_step=look if looks else None)
        worker.detach()
        return agreed, flat(worker.model)

    looking = thinwire.run_threads(setting.size, lambda comm: body(comm, True), timeout=20)
    for agreed, _ in looking:
        assert len(agreed) == setting.steps // 2
        assert alike(agreed, looking[0][0])
        assert torch.stack(agreed).isfinite().all()
    if each.reproducible:
        blind = thinwire.run_threads(setting.size, lambda comm: body(comm, False), timeout=20)
        assert alike([x for _, x in looking], [x for _, x in blind])


def saved_and_resumed(setting: Setting, folder: Path) -> None:
    """Stop in the middle of a period; the checkpoint holds everything, and new workers go on as if nothing had been."""
    # Late enough that methods which are a period late have used what they received.
    setting, middle, bitwise = replace(setting, steps=11), 7, setting.case.reproducible

    def whole(comm: Comm) -> tuple[list[Tensor], list[Tensor]]:
        worker = go_on(begin(comm, setting), setting, middle)
        worker.save(folder)
        saved = everything(worker)
        ended = everything(go_on(worker, setting))
        with worker.consensus() as model:
            agreed = comm.all_gather(flat(model)).wait()
        worker.detach()
        assert alike(agreed, agreed[:1] * comm.size)
        return saved, ended

    def resumed(comm: Comm) -> tuple[list[Tensor], list[Tensor]]:
        # Strategies may keep what they have done until now, so the new workers have a past of their own.
        worker = go_on(begin(comm, setting, elsewhere=True), setting, 2)
        worker.load(folder)
        assert worker.step == middle
        loaded = everything(worker)
        ended = everything(go_on(worker, setting))
        worker.detach()
        return loaded, ended

    first = thinwire.run_threads(setting.size, whole, timeout=20)
    second = thinwire.run_threads(setting.size, resumed, timeout=20)
    for (saved, ended), (loaded, again) in zip(first, second, strict=True):
        assert alike(saved, loaded)
        assert alike(ended, again) if bitwise else all(x.isfinite().all() for x in again)


@pytest.mark.parametrize("optimizer", [pytest.param("momentum", marks=pytest.mark.slow), "adamw"])
@every(forms=False)
def test_it_resumes_bitwise_from_a_checkpoint_in_the_middle_of_a_period(
    each: Case, optimizer: str, tmp_path: Path
) -> None:
    setting = with_(each, size=smallest(each), dtype=torch.float32)
    if optimizer not in each.refuses:
        setting = replace(setting, momentum=0.9) if optimizer == "momentum" else replace(setting, adamw=True)
    saved_and_resumed(setting, tmp_path)


@every("bytes", forms=False)
def test_a_dry_run_counts_the_bytes_that_a_run_sends(each: Case) -> None:
    setting, first = with_(each, dtype=torch.float32, steps=12), 6
    if each.strategy.traits.data_dependent_bytes or each.strategy.traits.timing_dependent:
        pytest.skip("how many bytes are sent depends on numbers or on timing")

    def body(comm: Comm) -> float:
        # From a step on at which every method does what it goes on doing.
        worker = go_on(begin(comm, setting), setting, first)
        before = comm.meter.payload_bytes
        go_on(worker, setting)
        sent = comm.meter.payload_bytes - before
        worker.detach()
        return sent

    for rank, sent in enumerate(thinwire.run_threads(setting.size, body, timeout=20)):
        run = DryRun(each.strategy, SHAPES, workers=2, rank=rank, dtype=torch.float32, bucket_bytes=BUCKET_BYTES)
        found = [run.step().sent for _ in range(setting.steps)]
        assert sum(found[first:]) == pytest.approx(sent, rel=0, abs=0.01)
