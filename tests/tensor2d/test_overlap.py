# SPDX-License-Identifier: Apache-2.0
"""Messages overlap with arithmetic, and one gather serves two products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from reproductions.optimus.costs import backward_elements, product_elements
from tests.oracles.tensor2d import MESHES
from tests.tensor2d.helpers import block_of, run
from tests.tensor2d.test_products import PRODUCTS, K, M, N, operands
from thinwire.core.comm.work import Work
from thinwire.tensor2d import Mesh2D, Panels

HOW = [Panels(), Panels(2), Panels(3, overlap=False)]


class Watched:
    """A comm that records what is sent and what is waited for."""

    def __init__(self, inner: Any, name: str, calls: list[str]) -> None:
        self._inner, self._name, self._calls = inner, name, calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def all_gather(self, x: Tensor) -> Work[list[Tensor]]:
        return self._recorded("all_gather", self._inner.all_gather(x))

    def all_to_all(self, xs: Any, sizes: Any) -> Work[list[Tensor]]:
        return self._recorded("all_to_all", self._inner.all_to_all(xs, sizes))

    def _recorded(self, what: str, work: Work[list[Tensor]]) -> Work[list[Tensor]]:
        self._calls.append(f"{what} {self._name}")

        def finish() -> list[Tensor]:
            self._calls.append(f"wait {what} {self._name}")
            return work.wait()

        return Work(finish)


def own(kind: str, mesh: Mesh2D) -> list[Tensor]:
    """This rank's blocks of both operands, which want gradients."""
    return [block_of(x, mesh).requires_grad_() for x in operands(kind)[:2]]


def calls_of_backward(kind: str, panels: Panels) -> list[str]:
    def work(mesh: Mesh2D) -> list[str]:
        calls: list[str] = []
        row: Any = Watched(mesh.along_row, "row", calls)
        column: Any = Watched(mesh.along_column, "column", calls)
        c = PRODUCTS[kind][0](*own(kind, mesh), Mesh2D(row, column, mesh.whole, panels=panels), None)
        calls.clear()
        c.sum().backward()
        return calls

    found = run(2, 2, work)
    assert all(each == found[0] for each in found)
    return found[0]


def test_the_weight_s_operand_travels_while_the_input_s_gradient_is_multiplied() -> None:
    assert calls_of_backward("AB", Panels()) == [
        *("all_gather column", "all_gather row"),  # of B for the input, of A for the weight
        *("wait all_gather column", "all_to_all row"),  # the input's partial sums are in flight
        *("wait all_gather row", "all_to_all column", "wait all_to_all row", "wait all_to_all column"),
    ]


def test_without_overlap_one_message_is_in_flight_at_a_time() -> None:
    assert calls_of_backward("AB", Panels(overlap=False)) == [
        *("all_gather column", "wait all_gather column", "all_to_all row", "wait all_to_all row"),
        *("all_gather row", "wait all_gather row", "all_to_all column", "wait all_to_all column"),
    ]


def test_one_gather_of_the_output_s_gradient_serves_both_of_its_products() -> None:
    assert calls_of_backward("ABT", Panels()) == [
        *("all_gather row", "all_gather column", "wait all_gather row", "wait all_gather column"),
        *("all_to_all column", "wait all_to_all column"),
    ]


@pytest.mark.parametrize("panels", HOW, ids=repr)
@pytest.mark.parametrize(("rows", "columns"), MESHES)
@pytest.mark.parametrize("layout", ["AB", "ABT"])
def test_the_backward_pass_of_a_product_sends_the_bytes_of_its_formula(
    rows: int, columns: int, layout: str, panels: Panels
) -> None:
    def work(mesh: Mesh2D) -> float:
        c = PRODUCTS[layout][0](*own(layout, mesh), mesh, panels)
        before = mesh.payload_bytes
        c.sum().backward()
        return mesh.payload_bytes - before

    wanted = 8 * backward_elements(M, K, N, rows, columns, layout=layout)
    assert run(rows, columns, work) == pytest.approx([wanted] * (rows * columns), rel=1e-12)


def test_a_shared_gather_saves_the_output_s_activations() -> None:
    twice = 2 * product_elements(M, K, N, 2, 3, layout="ABT")
    assert twice - backward_elements(M, K, N, 2, 3, layout="ABT") == pytest.approx(M * N * 2 / 6)
    assert backward_elements(M, K, N, 2, 3, layout="AB") == 2 * product_elements(M, K, N, 2, 3, layout="AB")


@pytest.mark.parametrize("kind", ["AB", "ABT"])
@pytest.mark.parametrize("frozen", [0, 1])
def test_an_operand_without_a_gradient_costs_nothing(kind: str, frozen: int) -> None:
    def work(mesh: Mesh2D) -> list[float]:
        sent: list[float] = []
        for both in (True, False):
            blocks = own(kind, mesh)
            blocks[frozen].requires_grad_(both)
            c = PRODUCTS[kind][0](*blocks, mesh, Panels(2))
            before = mesh.payload_bytes
            c.square().sum().backward()
            sent.append(mesh.payload_bytes - before)
        return sent

    for both, one in run(2, 2, work):
        assert one < both


@pytest.mark.parametrize("kind", ["AB", "ABT"])
def test_gradients_with_a_graph_are_those_without(kind: str) -> None:
    def work(mesh: Mesh2D) -> None:
        blocks = own(kind, mesh)
        plain, graphed = (
            torch.autograd.grad(PRODUCTS[kind][0](*blocks, mesh, Panels(2)).square().sum(), blocks, create_graph=graph)
            for graph in (False, True)
        )
        torch.testing.assert_close(plain, graphed, rtol=1e-13, atol=1e-13)

    run(2, 2, work)
