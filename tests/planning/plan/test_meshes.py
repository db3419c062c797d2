# SPDX-License-Identifier: Apache-2.0
"""Predicted steps of models that are split over meshes: bytes are those of real steps, times can be worked out."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from torch import nn

import thinwire
from tests.grids import fast_where
from tests.planning.plan.test_search import Nothing
from thinwire import AllReduce
from thinwire.cli import main
from thinwire.cli.step_time import language_model
from thinwire.lab.tasks.models.base import transformer_
from thinwire.lab.tasks.models.gpt import GPT, GPTSize
from thinwire.planning.plan.candidates import DENSE, Accuracy
from thinwire.planning.plan.meshes import LanguageModel, MeshShape, mesh_shapes, predict_mesh
from thinwire.planning.plan.predict import ModelTime, Prediction
from thinwire.planning.plan.search import Job, Option, Planner, choose
from thinwire.planning.simulate import Network, Special
from thinwire.planning.simulate.wires import PAYLOAD_SHARE
from thinwire.tensor2d import Mesh3D, cross_entropy_2d, parallelize_2d, run_mesh_3d_threads

SIZE, LENGTH, SAMPLES, VOCABULARY = GPTSize(layers=2, width=32, heads=4), 16, 4, 64
TIME = ModelTime(forward=0.02, backward=0.04, update=0.01)
FAST = Network(bits_per_second=1e15, latency=0.0)


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return GPT(SIZE, context=LENGTH, vocabulary=VOCABULARY)


MODEL = LanguageModel(on_meta, SAMPLES, LENGTH, VOCABULARY)
SHAPES = fast_where(
    lambda shape: shape in (MeshShape(2, 1, 2), MeshShape(1, 2, 2)),
    [MeshShape(*shape) for shape in ((1, 1, 2), (1, 2, 1), (2, 1, 2), (2, 2, 1), (1, 2, 2), (1, 1, 4), (1, 4, 1))],
)


@cache
def on_a_fast_link(shape: MeshShape) -> Prediction:
    """The prediction that several tests look at."""
    return predict_mesh(MODEL, shape, network=FAST, model_time=TIME)


def sent(shape: MeshShape) -> float:
    """Bytes that a rank sends in a real step, on average."""

    def work(mesh: Mesh3D) -> float:
        model = GPT(SIZE, context=LENGTH, vocabulary=VOCABULARY)
        transformer_(model, torch.Generator().manual_seed(0), residuals=2 * SIZE.layers)
        parallelize_2d(model, mesh.block)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        worker = thinwire.attach(model, optimizer, AllReduce(), mesh=mesh)
        comms = (mesh.data, mesh.block.along_row, mesh.block.along_column, mesh.block.whole)
        symbols = torch.arange(SAMPLES * shape.rows * shape.columns * LENGTH).view(-1, LENGTH) % VOCABULARY
        rows, before = mesh.block.rows_of(symbols), 0.0
        for step in range(2):
            before = sum(each.meter.payload_bytes for each in comms) if step else before
            optimizer.zero_grad()
            cross_entropy_2d(model(rows), rows, mesh.block, vocabulary=VOCABULARY).backward()
            worker.record_batch(len(symbols))
            optimizer.step()
        return sum(each.meter.payload_bytes for each in comms) - before

    found = run_mesh_3d_threads(shape.copies, shape.rows, shape.columns, work)
    return sum(found) / len(found)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.copies}x{shape}")
@pytest.mark.slow
def test_predicted_bytes_are_those_of_a_real_step(shape: MeshShape) -> None:
    assert on_a_fast_link(shape).payload_bytes == sent(shape)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.copies}x{shape}")
def test_on_a_link_without_limits_all_workers_share_the_products_evenly(shape: MeshShape) -> None:
    # Each worker's share of the larger batch is what it would compute alone; updates are of its blocks only.
    found = on_a_fast_link(shape)
    wanted = TIME.forward + TIME.backward + TIME.update / (shape.rows * shape.columns)
    assert found.seconds == pytest.approx(wanted, rel=0.01)


@pytest.mark.slow
def test_a_slow_link_takes_at_least_as_long_as_its_bytes() -> None:
    slow = predict_mesh(MODEL, MeshShape(1, 1, 2), network=Network(bits_per_second=1e6, latency=0.0), model_time=TIME)
    assert slow.seconds >= TIME.forward + 8 * slow.busiest_bytes / (1e6 * PAYLOAD_SHARE)


@pytest.mark.slow
def test_a_slow_worker_slows_its_mesh() -> None:
    slow = Network(bits_per_second=1e15, latency=0.0, specials=(Special(ranks=(1,), slowdown=3.0),))
    found = predict_mesh(MODEL, MeshShape(1, 1, 2), network=slow, model_time=TIME)
    assert found.seconds == pytest.approx(3 * (TIME.forward + TIME.backward + TIME.update / 2), rel=0.05)


@pytest.mark.slow
def test_blocks_take_a_part_of_the_memory() -> None:
    half, quarter = (on_a_fast_link(shape).memory_bytes for shape in (MeshShape(1, 1, 2), MeshShape(1, 2, 2)))
    elements = sum(parameter.numel() for parameter in on_meta().parameters())
    # Positions and what normalises are held by several.
    assert 2 * 4 * elements / 4 <= quarter < 0.62 * half < 0.62 * 2 * 4 * elements


def test_only_meshes_that_divide_the_model_are_looked_at() -> None:
    def three_heads() -> nn.Module:
        with torch.device("meta"):
            return GPT(GPTSize(layers=1, width=48, heads=3), context=LENGTH, vocabulary=VOCABULARY)

    assert [str(shape) for shape in mesh_shapes(MODEL, 4)] == ["1x2", "2x1", "1x4", "2x2", "4x1"]
    assert [str(shape) for shape in mesh_shapes(LanguageModel(three_heads, 4, LENGTH, 64), 4)] == ["2x1", "4x1"]


def planner(network: Network, model: LanguageModel | None, time: ModelTime = TIME) -> Planner:
    shapes = [tuple(parameter.shape) for parameter in on_meta().parameters()]
    job = Job(shapes, 2, network, time)
    return Planner(job, (DENSE,), timings=Nothing(), model=model)


@cache
def equals() -> tuple[Option, ...]:
    """Options that take as long, for nothing is waited for and nothing is saved."""
    return tuple(planner(FAST, MODEL, ModelTime(0.02, 0.04)).options())


@pytest.mark.slow
def test_a_plan_ranks_meshes_with_the_recipes() -> None:
    options = planner(Network(bits_per_second=1e6), MODEL).options()
    assert {each.name for each in options} == {"AllReduce()", "mesh 1x2", "mesh 2x1"}
    assert [each.to_loss for each in options] == sorted(each.to_loss for each in options)
    assert all(each.accuracy is not None for each in options)
    assert {each.name for each in planner(FAST, None).options()} == {"AllReduce()"}


@pytest.mark.slow
def test_of_equals_the_one_without_a_mesh_is_chosen() -> None:
    assert choose(equals()).mesh is None


def test_a_mesh_that_is_clearly_faster_is_chosen() -> None:
    dense, *meshes = sorted(equals(), key=lambda each: each.mesh is not None)
    assert dense.prediction is not None
    slow = Option(DENSE, dense.prediction.__class__(**{**vars(dense.prediction), "seconds": 9.0}), dense.accuracy)
    assert isinstance(slow.accuracy, Accuracy)
    assert choose([slow, *meshes]).mesh is not None


def test_a_language_model_can_be_split_and_no_other() -> None:
    found = language_model("text", "1m", batch_size=4, data=None)
    assert found is not None and (found.samples, found.length, found.vocabulary) == (4, 128, 256)
    assert [str(shape) for shape in mesh_shapes(found, 2)] == ["1x2", "2x1"]
    assert language_model("digits", None, batch_size=None, data=None) is None


@pytest.mark.slow
def test_the_command_lists_meshes_of_a_language_model_and_of_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--link", "1gbit", "--workers", "2", "--step-seconds", "0.05", "--json"]
    assert main(["plan", "--task", "text", *options]) == 0
    found = json.loads(capsys.readouterr().out)["options"]
    assert [each["tensor_parallel"] for each in found if each["tensor_parallel"]] == ["2x1"]
    assert main(["plan", "--task", "digits", *options]) == 0
    assert not any(each["tensor_parallel"] for each in json.loads(capsys.readouterr().out)["options"])
