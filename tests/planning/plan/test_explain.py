# SPDX-License-Identifier: Apache-2.0
"""The card of a recipe agrees with what a real run then does."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass, replace

import pytest
import torch

import thinwire
from tests.grids import fast_where
from tests.problems import Irregular, Regression, train
from tests.rules import refusals
from thinwire import (
    AllReduce,
    Complete,
    CompressedMomentum,
    ConfigError,
    Gossip,
    Hypercube,
    Local,
    LocalSGD,
    PushSum,
    Replica,
    Ring,
    SketchedSGD,
    SlowMo,
    Strategy,
    Topology,
)
from thinwire.cli import main
from thinwire.methods.reduce.compressed_all_reduce import mean_
from thinwire.methods.topology import Peers
from thinwire.planning.plan import Link, explain
from thinwire.planning.plan.card import PAYLOAD_SHARE
from thinwire.planning.plan.traffic import MakeOptimizer, cycle


def test_a_card_of_local_sgd_has_the_figures_of_its_docstring() -> None:
    card = explain(LocalSGD(8), parameters=1000, workers=4, bits_per_second=1e6)
    assert card.recipe == "LocalSGD()"
    assert card.period == 8
    assert card.sent_bytes_per_step == card.received_bytes_per_step == 2 * 3 / 4 * 4000 / 8
    assert card.largest_step_bytes == card.largest_message_bytes == 6000
    assert card.messages_per_step == 1 / 8
    assert card.all_reduce_bytes_per_step == 6000
    assert card.bf16_all_reduce_bytes_per_step == 3000
    assert card.memory_bytes_per_parameter == {"parameters": 4.0}
    assert card.largest_step_seconds == pytest.approx(6000 * 8 / (1e6 * PAYLOAD_SHARE))
    assert card.seconds_per_step == pytest.approx(6000 * 8 / (1e6 * PAYLOAD_SHARE) / 8)


def test_a_card_of_slow_momentum_over_push_sum_adds_the_two_up() -> None:
    card = explain(SlowMo(PushSum(), period=6), parameters=1000, workers=4)
    assert card.period == 6
    assert card.sent_bytes_per_step == 4000 + 6000 / 6
    assert card.largest_step_bytes == 4000 + 6000
    assert card.collective_bytes_per_step == 1000
    assert card.links == (Link(1, 2000.0), Link(2, 2000.0))
    assert card.memory_bytes_per_parameter == {
        "parameters": 4.0, "anchor": 4.0, "slow": 4.0, "received": 4.0,
    }  # fmt: skip
    assert [m.name for m in card.methods] == ["SlowMo(base=PushSum(), period=6)", "PushSum()"]
    assert all(m.paper and m.waits for m in card.methods)
    assert card.seconds_per_step is None


@pytest.mark.slow
def test_memory_counts_what_a_real_replica_keeps() -> None:
    for strategy in (SlowMo(PushSum(Irregular())), PushSum(), SlowMo(), Local()):
        (worker, *_) = thinwire.run_threads(
            3, lambda comm, s=strategy: train(comm, s, Regression(3, 2, torch.float32), [0.1] * 2)
        )
        (r,) = worker.replicas
        kept = {name: x.numel() * x.element_size() / 34 for name, x in r.state.items() if x.dim()}
        card = explain(strategy, parameters=34, workers=3)
        assert kept == {k: v for k, v in card.memory_bytes_per_parameter.items() if k in r.state}


def test_figures_are_those_of_the_worker_that_sends_or_receives_most() -> None:
    @dataclass(frozen=True)
    class Star(Topology):
        """Everyone exchanges with rank 2."""

        def peers(self, rank: int, size: int, step: int) -> Peers:
            others = tuple(j for j in range(size) if j != 2) if rank == 2 else (2,)
            return Peers(others, others, 1 - len(others) / size, (1 / size,) * len(others))

    card = explain(Gossip(Star()), parameters=10, workers=4, bits_per_second=1e6)
    assert card.rank == 2
    assert card.sent_bytes_per_step == 3 * 40
    assert card.links == (Link(0, 40.0), Link(1, 40.0), Link(3, 40.0))
    assert card.mean_sent_bytes_per_step == (3 + 3 * 1) * 40 / 4
    assert explain(Gossip(), parameters=10, workers=4).rank == 0


def test_the_fuller_direction_of_a_link_is_the_one_that_takes_time() -> None:
    @dataclass(frozen=True)
    class Funnel(Topology):
        """Everyone sends to rank 0, who sends to the others in turn."""

        def peers(self, rank: int, size: int, step: int) -> Peers:
            receiver = 1 + step % (size - 1)
            if rank == 0:
                return Peers((receiver,), tuple(range(1, size)), 0.5, (0.5,) * (size - 1))
            return Peers((0,), (0,) * (rank == receiver), 0.5, (0.5,) * (rank == receiver))

        def period(self, size: int) -> int:
            return size - 1

    card = explain(PushSum(Funnel()), parameters=9, workers=4, bits_per_second=1e6)
    assert (card.rank, card.sent_bytes_per_step, card.received_bytes_per_step) == (0, 44.0, 132.0)
    assert card.seconds_per_step == pytest.approx(8 * 132 / 1e6 / PAYLOAD_SHARE)


def test_the_cycle_of_a_recipe_is_the_least_common_multiple_of_its_periods() -> None:
    assert cycle(AllReduce(), 8) == 1
    assert cycle(PushSum(), 8) == 3
    assert cycle(SlowMo(PushSum(), period=48), 100) == 336
    assert cycle(SlowMo(LocalSGD(4), period=6), 2) == 12
    assert explain(SlowMo(LocalSGD(4), period=6), parameters=1, workers=2).period == 12


def test_a_period_that_is_in_no_field_is_found_all_the_same() -> None:
    @dataclass(frozen=True)
    class Tenth(Strategy):
        def after_step(self, r: Replica) -> None:
            if r.step % 64 == 0:
                mean_(r.comm, r.x).wait()

    card = explain(Tenth(), parameters=64, workers=2)
    assert card.period == 64
    assert card.sent_bytes_per_step == 4


def test_a_period_longer_than_a_dry_run_still_ends() -> None:
    assert explain(LocalSGD(10**9), parameters=10, workers=2).sent_bytes_per_step == 0


def test_one_worker_sends_nothing() -> None:
    for strategy in (AllReduce(), LocalSGD(), SlowMo(PushSum()), Gossip()):
        card = explain(strategy, parameters=10, workers=1, bits_per_second=1e6)
        assert card.sent_bytes_per_step == card.seconds_per_step == card.messages_per_step == 0
        assert card.links == ()


def test_gradients_are_cut_into_the_messages_that_attach_would_cut() -> None:
    default = inspect.signature(thinwire.attach).parameters["bucket_bytes"].default
    assert inspect.signature(explain).parameters["bucket_bytes"].default == default
    card = explain(AllReduce(), parameters=[3_000_000, 2_000_000, 500_000], workers=2)
    assert card.messages_per_step == 2
    assert card.largest_message_bytes == 4 * 5_000_000
    assert explain(AllReduce(), parameters=4_000_000, workers=2).largest_message_bytes == 8 << 20


test_what_cannot_be_explained_is_refused = refusals(
    [
        ({"parameters": 0}, "parameters=0: a model has at least 1"),
        ({"parameters": []}, "parameters=0: a model has at least 1"),
        ({"parameters": 10**20}, r"parameters=1e\+20: at most 1e\+15"),
        ({"workers": 0}, "workers=0: must be at least 1"),
        ({"dtype": torch.int64}, "must be|floating dtype"),
        ({"bits_per_second": 0.0}, "bits_per_second=0.0: must be positive"),
        ({"bits_per_second": float("nan")}, "bits_per_second=nan: must be positive"),
        ({"strategy": Gossip(Hypercube()), "workers": 3}, "needs a power of two"),
    ],
    lambda given: explain(**{"strategy": LocalSGD(), "parameters": 10, "workers": 2, **given}),
)


def run_explain(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["explain", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_command_prints_the_card_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = "SlowMo(PushSum, period=6)"
    code, out, err = run_explain(capsys, recipe, "--parameters", "6.5e6", "--link", "100mbit,0:10mbit")
    assert (code, err) == (0, "")
    assert out.startswith("SlowMo(PushSum, period=6)\na model, 6,500,000 parameters in float32, 4 workers\n")
    for words in ("repeating after 6 steps", "32.5 MB a step", "ranks 1, 2: 13.0 MB each", "10 Mbit/s", "PushSum()\n"):
        assert words in out
    assert "arXiv:1910.00643" in out
    assert "arXiv:1811.10792" in out


def test_the_command_gives_the_same_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_explain(
        capsys, "LocalSGD(8)", "--parameters", "1000", "--workers", "8", "--link", "1gbit", "--json"
    )
    card = explain(LocalSGD(8), parameters=1000, workers=8, bits_per_second=1e9)
    content = json.loads(out)
    assert code == 0
    assert content["sent_bytes_per_step"] == card.sent_bytes_per_step
    assert content["seconds_per_step"] == card.seconds_per_step
    assert content["methods"][0]["paper"] == LocalSGD.paper
    assert set(content) == set(replace(card).__dict__)


def test_the_command_counts_the_parameters_of_a_tasks_model(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_explain(capsys, "AllReduce", "--task", "digits", "--workers", "2", "--json")
    task = thinwire_task("digits")
    assert code == 0
    assert json.loads(out)["parameters"] == sum(p.numel() for p in task)


def thinwire_task(name: str) -> list[torch.nn.Parameter]:
    from thinwire.lab import tasks

    return list(tasks.load(name).model(seed=0).parameters())


def test_a_strategy_that_sends_nothing_is_described_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_explain(capsys, "Local", "--parameters", "1e6", "--link", "100mbit")
    assert code == 0
    assert "nothing" in out
    assert "workers do not wait for each other" in out


def test_many_links_are_counted_and_not_listed(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run_explain(capsys, "Gossip(Complete)", "--parameters", "1e6", "--workers", "40")
    assert "39 others: 4.00 MB each" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ddp", "--parameters", "10"], "AllReduce() sends what ddp does"),
        (["ddp+bf16", "--parameters", "10"], "torch's own"),
        (["ddp+powersgd(rank=4)", "--parameters", "10"], "torch's own"),
        (["post-local-sgd", "--parameters", "10"], "torch's own"),
        (["SlowMoo", "--parameters", "10"], "did you mean SlowMo, "),
        (["LocalSGD(0)", "--parameters", "10"], "period=0"),
        (["LocalSGD", "--parameters", "0.5"], "must be a whole number from 1"),
        (["LocalSGD", "--parameters", "nan"], "must be a whole number from 1"),
        (["LocalSGD", "--parameters", "10", "--task", "text"], "Give one of them"),
        (["LocalSGD", "--task", "texd"], "did you mean 'text'"),
        (["LocalSGD", "--task", "digits", "--model-size", "huge"], "must be one of"),
        (["LocalSGD", "--parameters", "10", "--link", "fast"], "100mbit"),
        (["LocalSGD", "--parameters", "10", "--workers", "0"], "--workers 0: must be at least 1"),
        ([], "RECIPE: is missing"),
        (["Gossip(Hypercube)", "--parameters", "10", "--workers", "3"], "needs a power of two"),
    ],
)
def test_the_command_refuses_with_a_message_and_exit_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run_explain(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert words in " ".join(err.split())
    assert "Traceback" not in err


def test_a_complete_graph_needs_memory_for_what_everyone_sends() -> None:
    assert explain(Gossip(Complete()), parameters=10, workers=5).memory_bytes_per_parameter["received"] == 16
    assert explain(Gossip(Ring()), parameters=10, workers=5).memory_bytes_per_parameter["received"] == 8


def test_small_tensors_that_travel_dense_are_counted() -> None:
    card = explain(SketchedSGD(), parameters=[100_000, 1000, 1000], workers=4)
    k = 30  # 0.0003 of the large one; four workers send their own largest entries
    header = 16
    assert card.sent_bytes_per_step == 3 * (8 * k + header) + 2 * 3 / 4 * 4 * 2000


@pytest.mark.slow
def test_moments_that_are_averaged_are_counted_by_the_optimizer() -> None:
    def sent(optimizer: MakeOptimizer | None) -> float:
        strategy = SlowMo(period=4, buffers="average")
        return explain(strategy, parameters=1000, workers=2, optimizer=optimizer).sent_bytes_per_step

    assert sent(None) == 1000
    assert sent(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)) == 2000
    assert sent(torch.optim.AdamW) == 3000


def test_a_strategy_is_explained_with_an_optimizer_that_it_takes_and_refuses_others() -> None:
    assert explain(CompressedMomentum(), parameters=1000, workers=2).optimizer == "OneBitAdam"
    assert explain(AllReduce(), parameters=1000, workers=2).optimizer == "SGD"
    with pytest.raises(ConfigError, match="AdamW under SketchedSGD"):
        explain(SketchedSGD(), parameters=1000, workers=2, optimizer=torch.optim.AdamW)


def test_a_model_is_explained_in_its_own_dtypes_and_is_not_changed() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(10, 3), torch.nn.Linear(3, 1).to(torch.bfloat16))
    model[0].bias.requires_grad_(False)
    before = [p.data_ptr() for p in model.parameters()]
    card = explain(AllReduce(), parameters=model, workers=2)
    assert (card.parameters, card.dtype, card.sent_bytes_per_step) == (34, "float32, bfloat16", 4 * 30 + 2 * 4)
    assert [p.data_ptr() for p in model.parameters()] == before
    assert explain(AllReduce(), parameters=model, workers=2, dtype=torch.float64).sent_bytes_per_step == 8 * 34


@pytest.mark.slow
def test_bytes_that_depend_on_data_are_shown_from_the_least_to_the_most(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = "MultiLeaderSGD(period=2, node_size=2, global_period=2)"
    card = explain(thinwire.parse(recipe), parameters=1000, workers=2)
    # The elections; then the leader sends its parameters, once for the node and once for all, or receives them.
    assert card.least_sent_bytes_per_step == 8 / 2
    assert card.sent_bytes_per_step == (8 + 2 * 4000) / 2
    _, out, _ = run_explain(capsys, recipe, "--parameters", "1000", "--workers", "2")
    assert "4 B to 4.00 kB, by the data, a step" in out


@pytest.mark.slow
def test_the_command_takes_the_tasks_optimizer_or_the_one_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    def optimizer(*arguments: str) -> str:
        code, out, err = run_explain(capsys, *arguments, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)["optimizer"]

    assert optimizer("LocalSGD", "--task", "text") == "AdamW"
    assert optimizer("LocalSGD", "--parameters", "10", "--optimizer", "lamb") == "Lamb"
    assert optimizer("SketchedSGD", "--task", "text") == "SGD"
    assert optimizer("LocalSGD", "--parameters", "10") == "SGD"


@pytest.mark.parametrize(
    ("recipe", "workers", "words"),
    [
        ("Gossip(Complete)", "3000", "too many to be analyzed"),
        ("Gossip(Complete)", "300", "too many to be analyzed"),
        ("PushSum(RandomMatching)", "4000", "too many to be analyzed"),
        ("Gossip(Ring)", "100000", "Use at most 4096 workers"),
    ],
)
def test_graphs_that_are_too_large_to_look_at_are_refused(
    recipe: str, workers: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run_explain(capsys, recipe, "--parameters", "10", "--workers", workers)
    assert (code, out) == (2, "")
    assert words in " ".join(err.split())


def test_methods_without_a_graph_are_explained_for_any_number_of_workers() -> None:
    for workers in (10**6, 10**12):
        assert explain(LocalSGD(2), parameters=10, workers=workers).sent_bytes_per_step == pytest.approx(40)


@pytest.mark.slow
def test_models_of_any_size_are_explained_in_few_tensors() -> None:
    card = explain(AllReduce(), parameters=10**12 + 1, workers=2)
    assert (card.parameters, card.sent_bytes_per_step) == (10**12 + 1, 4 * (10**12 + 1))
    assert card.messages_per_step <= 512
    small = explain(AllReduce(), parameters=2**30, workers=2)
    assert (small.messages_per_step, small.largest_message_bytes) == (512, 8 << 20)


# Of torch, but for those that take sparse gradients only, or evaluate several.
KINDS = [kind for kind in torch.optim.Optimizer.__subclasses__() if getattr(torch.optim, kind.__name__, None) is kind]
KINDS = [kind for kind in KINDS if kind not in (torch.optim.SparseAdam, torch.optim.LBFGS)]


@pytest.mark.parametrize(
    "kind",
    fast_where(lambda kind: kind in (torch.optim.AdamW, torch.optim.Adafactor), KINDS),
    ids=lambda kind: kind.__name__,
)
@pytest.mark.slow
def test_every_optimizer_of_torch_with_groups_sends_what_one_group_sends(kind: type[torch.optim.Optimizer]) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(2)))

    def grouped(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return kind([{"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:], "lr": 0.2}])

    for strategy in (AllReduce(), SlowMo(period=4)):
        expected = explain(strategy, parameters=model, workers=4)
        found = explain(strategy, parameters=model, workers=4, optimizer=grouped)
        assert found.sent_bytes_per_step == expected.sent_bytes_per_step
        assert found.optimizer == kind.__name__


@pytest.mark.parametrize(
    "recipe",
    fast_where(
        lambda recipe: recipe in ("FetchSGD()", "DecentLaM()", "MinibatchLocalSGD()"),
        [
            "SketchedSGD()",
            "FetchSGD()",
            "DQSGD()",
            "DecentLaM()",
            "QuasiGlobal()",
            "MinibatchLocalSGD()",
            "DiLoCo(period=4)",
        ],
    ),
)
@pytest.mark.slow
def test_groups_of_different_learning_rates_are_explained(recipe: str) -> None:
    def grouped(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:], "lr": 0.2}])

    strategy, model = thinwire.parse(recipe), torch.nn.Linear(8, 8)
    expected = explain(strategy, parameters=model, workers=4)
    found = explain(strategy, parameters=model, workers=4, optimizer=grouped)
    assert found.peak_bytes >= expected.peak_bytes  # a learning rate for each parameter may be a vector
    assert replace(found, peak_bytes=expected.peak_bytes) == expected


def test_an_optimizer_that_evaluates_several_gradients_is_refused() -> None:
    with pytest.raises(ConfigError, match="LBFGS: the number of gradients that a step evaluates depends on data"):
        explain(AllReduce(), parameters=10, workers=2, optimizer=torch.optim.LBFGS)


@dataclass(frozen=True)
class Growing(Strategy):
    """Sends one number more at every step."""

    def after_step(self, r: Replica) -> None:
        r.comm.all_reduce_(r.x.new_empty(r.step)).wait()


@pytest.mark.slow
def test_traffic_that_never_repeats_is_said_not_to() -> None:
    card = explain(Growing(), parameters=10, workers=2)
    assert not card.repeats
    assert (card.period, card.largest_step_bytes) == (1024, 4 * 2048)
    assert explain(AllReduce(), parameters=10, workers=2).repeats
