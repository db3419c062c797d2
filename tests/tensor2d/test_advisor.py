# SPDX-License-Identifier: Apache-2.0
"""What the advisor predicts is what is counted on a mesh, and its best mesh is the fastest that fits."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.oracles.tensor2d import BATCH, LENGTH, MESHES, VOCABULARY, Encoder
from tests.pretend_gpu import as_over_nccl, pretend_gpu
from tests.tensor2d.helpers import gpt, mesh_loss, run
from thinwire import ConfigError
from thinwire.core.comm.threads import run_threads
from thinwire.lab.tasks.models.base import build
from thinwire.lab.tasks.models.gpt import GPT, GPTSize
from thinwire.tensor2d import Mesh2D, checkpoint_, cross_entropy_2d, parallelize_2d, tape
from thinwire.tensor2d.advisor import Precision, advise, describe_transformer, measure_flops, measure_pace
from thinwire.tensor2d.costs import Layer, best_rows
from thinwire.tensor2d.panels import Pace
from thinwire.tensor2d.transformer import Transformer

SMALL = Transformer(
    layers=2, hidden=24, heads=12, vocabulary=VOCABULARY, samples=BATCH, length=LENGTH, positions=LENGTH
)
LARGE = Transformer(layers=24, hidden=4096, heads=32, vocabulary=50257, samples=64, length=1024)
LAN = Pace(seconds_per_message=1e-4, bits_per_second=1e9, flops_per_second=1e12)


def step(model: nn.Module, mesh: Mesh2D) -> tuple[float, int, int]:
    """Bytes, messages and parameters of a training step."""
    before, calls = mesh.payload_bytes, mesh.messages
    mesh_loss(model, mesh).backward()
    return mesh.payload_bytes - before, mesh.messages - calls, sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("rows", "columns"), MESHES)
def test_bytes_messages_and_parameters_are_those_that_are_counted(rows: int, columns: int) -> None:
    for sent, messages, held in run(rows, columns, lambda mesh: step(parallelize_2d(gpt(), mesh), mesh)):
        assert sent == pytest.approx(SMALL.sent_bytes(rows, columns, element_nbytes=8), rel=1e-12)
        assert messages == SMALL.messages(rows, columns)
        assert held == SMALL.parameters_held(rows, columns)


@pytest.mark.parametrize(("rows", "columns"), [(2, 2), (1, 4), (4, 1)])
def test_a_tied_table_of_many_words_is_counted_too(rows: int, columns: int) -> None:
    """GPT-2's padded head, and an embedding that sends tokens because there are fewer of them than words."""
    torch_gpt2 = pytest.importorskip("transformers")
    config = torch_gpt2.GPT2Config(
        n_layer=1, n_embd=24, n_head=4, vocab_size=99, n_positions=8, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0
    )
    models = [_evenly(torch_gpt2.GPT2LMHeadModel(config).double()) for _ in range(rows * columns)]
    expected = describe_transformer(models[0], samples=8, length=8)

    def work(mesh: Mesh2D) -> tuple[float, int, int]:
        model = parallelize_2d(models[mesh.whole.rank], mesh)
        ids = torch.arange(64).view(8, 8)
        logits = model(mesh.rows_of(ids)).logits
        cross_entropy_2d(logits, mesh.rows_of(ids), mesh, vocabulary=99).backward()
        return mesh.payload_bytes, mesh.messages, sum(p.numel() for p in model.parameters())

    found = run(rows, columns, work)
    assert max(sent for sent, _, _ in found) == pytest.approx(expected.sent_bytes(rows, columns, element_nbytes=8))
    assert {(messages, held) for _, messages, held in found} == {
        (expected.messages(rows, columns), expected.parameters_held(rows, columns))
    }


def _evenly(model: Any) -> Any:
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.1)
    return model


@pytest.mark.parametrize("checkpointed", [False, True])
def test_activations_kept_are_those_predicted_within_a_twentieth(
    checkpointed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tapes: dict[int, list[tape.Tape]] = {}

    class Counted(tape.Tape):
        """A tape that can be found again: what it keeps is not among autograd's saved tensors."""

        def __init__(self) -> None:
            super().__init__()
            tapes.setdefault(threading.get_ident(), []).append(self)

    monkeypatch.setattr(tape, "Tape", Counted)
    size = GPTSize(layers=3, width=48, heads=4)
    models = [build(lambda: GPT(size, context=32, vocabulary=64), seed=0) for _ in range(4)]
    expected = describe_transformer(models[0], samples=8, length=32)

    def work(mesh: Mesh2D) -> int:
        model: Any = parallelize_2d(models[mesh.whole.rank], mesh)
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        if checkpointed:
            for block in model.blocks:
                checkpoint_(block)
        kept: list[Tensor] = []

        def keep(x: Tensor) -> Tensor:
            kept.append(x)
            return x

        ids = torch.arange(256).view(8, 32) % 64
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            loss = cross_entropy_2d(model(mesh.rows_of(ids)), mesh.rows_of(ids), mesh)
        assert loss.requires_grad
        kept += [x for each in tapes.get(threading.get_ident(), []) for x in each._results]  # pyright: ignore[reportPrivateUsage]
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept if x.is_floating_point()}
        return sum(nbytes for pointer, nbytes in storages.items() if pointer not in own)

    logits = expected.tokens * 64 / 4  # the logits' gradient is not there yet
    for held in run(2, 2, work):
        predicted = expected.activations_held(2, 2, checkpointed=checkpointed) - logits
        assert held / 4 == pytest.approx(predicted, rel=0.05)


def test_every_mesh_is_listed_with_its_corners() -> None:
    advice = advise(LARGE, 16, LAN)
    assert [(cost.rows, cost.columns) for cost in advice.costs] == [(1, 16), (2, 8), (4, 4), (8, 2), (16, 1)]
    assert [cost.kind for cost in advice.costs] == ["columns only", *["two dimensions"] * 3, "gathered weights"]
    assert advise(SMALL, 1, LAN).costs[0].sent_bytes == 0
    assert advise(SMALL, 1, LAN).costs[0].kind == "one rank"


def test_the_best_mesh_is_the_fastest_and_the_reason_names_the_next() -> None:
    advice = advise(LARGE, 16, LAN)
    ordered = sorted(advice.costs, key=lambda cost: cost.seconds)
    assert advice.best is ordered[0]
    assert f"{ordered[1].rows}x{ordered[1].columns}, the next" in advice.reason
    for cost in advice.costs:
        assert cost.seconds == cost.communication_seconds + cost.compute_seconds
        assert cost.communication_seconds == pytest.approx(cost.messages * 1e-4 + cost.sent_bytes * 8e-9)
    assert len({cost.compute_seconds for cost in advice.costs}) == 1


@pytest.mark.parametrize("samples", [1, 16, 128])
def test_more_tokens_want_more_rows_as_the_formula_says(samples: int) -> None:
    """With low latency and a small vocabulary the best mesh is near sqrt(T p / 3 h) rows."""
    model = replace(LARGE, samples=16 * samples, vocabulary=256)
    best = advise(model, 16, replace(LAN, seconds_per_message=0.0)).best
    near = best_rows(Layer(tokens=model.tokens, hidden=model.hidden, rows=4, columns=4))
    assert best is not None
    assert near / 2 <= best.rows <= near * 2


def test_memory_rules_meshes_out() -> None:
    free = advise(LARGE, 16, LAN)
    assert free.best is not None
    limit = sorted(cost.memory_bytes for cost in free.costs)[0] * 1.001
    tight = advise(LARGE, 16, LAN, limit_nbytes=limit)
    assert tight.best is not None
    assert tight.best.memory_bytes <= limit
    assert sum(bool(cost.refusal) for cost in tight.costs) == 4
    assert "GiB of" in tight.reason
    none = advise(LARGE, 16, LAN, limit_nbytes=limit / 1000)
    assert none.best is None
    assert none.reason.startswith("no mesh fits: 1x16: needs")


def test_checkpointing_and_less_state_need_less_memory() -> None:
    (full,), (less,), (least,) = (
        advise(LARGE, 1, LAN, precision=precision).costs
        for precision in (Precision(), Precision(checkpointed=True), Precision(2, 4, checkpointed=True))
    )
    assert full.memory_bytes > less.memory_bytes > least.memory_bytes
    assert full.parameter_bytes == LARGE.parameters_held(1, 1) * 16
    assert least.parameter_bytes == LARGE.parameters_held(1, 1) * 8


def test_a_refused_mesh_names_the_size_and_the_divisor() -> None:
    indivisible = replace(SMALL, samples=3, heads=6)
    advice = advise(indivisible, 4, LAN)
    refusals = {(cost.rows, cost.columns): cost.refusal for cost in advice.costs}
    assert refusals[1, 4] == "6 heads % 4 must be 0"
    assert refusals[2, 2] == "3 samples % 2 must be 0"
    assert refusals[4, 1] == "3 samples % 4 must be 0"
    shared = Transformer(
        layers=1, hidden=48, heads=12, key_heads=4, vocabulary=48, samples=6, length=2, gated=True, inner=96
    )
    assert "query heads per column" in shared.refusal(1, 6)
    assert shared.refusal(1, 2) == ""


def test_shared_key_heads_are_counted_on_a_llama() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=24, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=36, max_position_embeddings=8, pad_token_id=0,
    )  # fmt: skip
    models = [_evenly(transformers.LlamaForCausalLM(config)) for _ in range(4)]
    expected = describe_transformer(models[0], samples=4, length=8)
    assert (expected.key_heads, expected.gated, expected.inner) == (2, True, 48)

    def work(mesh: Mesh2D) -> tuple[float, int]:
        model = parallelize_2d(models[mesh.whole.rank], mesh)
        ids = torch.arange(32).view(4, 8)
        cross_entropy_2d(model(mesh.rows_of(ids)).logits, mesh.rows_of(ids), mesh).backward()
        return mesh.payload_bytes, sum(p.numel() for p in model.parameters())

    for sent, held in run(2, 2, work):
        assert sent == pytest.approx(expected.sent_bytes(2, 2))
        assert held == expected.parameters_held(2, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: advise(SMALL, 0, LAN), "ranks=0"),
        (lambda: advise(SMALL, 4, LAN, limit_nbytes=0), "limit_nbytes=0"),
        (lambda: Precision(element_nbytes=0), "at least 1"),
        (lambda: replace(SMALL, layers=0), "at least 1"),
        (lambda: replace(SMALL, heads=5), "heads must divide hidden"),
        (lambda: describe_transformer(Encoder(), samples=1, length=1), "Encoder: the advisor supports"),
        (lambda: run_threads(1, measure_pace), "at least 2 ranks"),
    ],
)
def test_what_cannot_be_advised_on_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_pace_is_measured_alike_on_all_ranks() -> None:
    first, second = run_threads(2, lambda comm: measure_pace(comm, nbytes=1 << 16, width=32))
    assert first == second
    assert min(first.bits_per_second, first.flops_per_second, measure_flops(width=32)) > 0
    assert first.seconds_per_message > 0
    assert F.relu(torch.tensor(first.bits_per_second)) > 0


def test_a_pace_is_measured_on_the_gpu_where_nothing_else_is_sent() -> None:
    with pretend_gpu():
        first, second = run_threads(2, lambda comm: measure_pace(as_over_nccl(comm), nbytes=1 << 16, width=32))
    assert first == second
    with pretend_gpu(), pytest.raises(AssertionError, match="tensors of the CPU"):
        run_threads(2, lambda comm: measure_pace(as_over_nccl(comm), nbytes=1 << 16, width=32, device="cpu"))
