# SPDX-License-Identifier: Apache-2.0
"""The three products on every mesh: values, gradients, bytes, panels and what a rank holds."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from reproductions.optimus.costs import panels_held, product_elements
from tests.grids import fast_where
from tests.oracles.tensor2d import MESHES, drawn, joined
from tests.tensor2d.helpers import block_of, run
from thinwire import ConfigError
from thinwire.tensor2d import Mesh2D, Panels, multiply_ab, multiply_abt, multiply_atb

M, K, N = 24, 36, 48
Product = Callable[[Tensor, Tensor, Mesh2D, Panels | None], Tensor]
PRODUCTS: dict[str, tuple[Product, tuple[int, int], tuple[int, int], Callable[[Tensor, Tensor], Tensor]]] = {
    "AB": (multiply_ab, (M, K), (K, N), lambda a, b: a @ b),
    "ABT": (multiply_abt, (M, K), (N, K), lambda a, b: a @ b.T),
    "ATB": (multiply_atb, (K, M), (K, N), lambda a, b: a.T @ b),
}
HOW = [Panels(), Panels(2), Panels(100), Panels(3, overlap=False)]


def operands(kind: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    _, first, second, _ = PRODUCTS[kind]
    return drawn(*first, seed=1, dtype=dtype), drawn(*second, seed=2, dtype=dtype), drawn(M, N, seed=3, dtype=dtype)


def product_and_gradients(kind: str, mesh: Mesh2D, panels: Panels, dtype: torch.dtype) -> list[Tensor]:
    a, b, weight = (block_of(x, mesh) for x in operands(kind, dtype))
    a.requires_grad_(), b.requires_grad_()
    c = PRODUCTS[kind][0](a, b, mesh, panels)
    (c * weight).sum().backward()
    assert a.grad is not None and b.grad is not None
    return [c.detach(), a.grad, b.grad]


@pytest.mark.parametrize("panels", HOW, ids=repr)
@pytest.mark.parametrize("kind", PRODUCTS)
@pytest.mark.parametrize(
    ("rows", "columns"), fast_where(lambda mesh: mesh in ((2, 3), (1, 4), (2, 2)), [*MESHES, (2, 4)])
)
def test_products_and_their_gradients_are_those_of_whole_matrices(
    rows: int, columns: int, kind: str, panels: Panels
) -> None:
    a, b, weight = operands(kind)
    a.requires_grad_(), b.requires_grad_()
    c = PRODUCTS[kind][3](a, b)
    (c * weight).sum().backward()
    found = run(rows, columns, lambda mesh: product_and_gradients(kind, mesh, panels, torch.float64))
    for k, whole in enumerate((c.detach(), a.grad, b.grad)):
        assert whole is not None
        torch.testing.assert_close(joined([each[k] for each in found], rows, columns), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("frozen", [0, 1])
@pytest.mark.parametrize("kind", PRODUCTS)
def test_a_frozen_operand_gets_no_gradient_and_the_other_gets_its_own(kind: str, frozen: int) -> None:
    *whole, weight = operands(kind)
    whole[1 - frozen].requires_grad_()
    (PRODUCTS[kind][3](*whole) * weight).sum().backward()

    def work(mesh: Mesh2D) -> list[Tensor | None]:
        *own, given = (block_of(x, mesh) for x in operands(kind))
        own[1 - frozen].requires_grad_()
        (PRODUCTS[kind][0](*own, mesh, Panels(2)) * given).sum().backward()
        return [x.grad for x in own]

    found = run(2, 3, work)
    assert all(each[frozen] is None for each in found)
    torch.testing.assert_close(joined([each[1 - frozen] for each in found], 2, 3), whole[1 - frozen].grad)


@pytest.mark.parametrize("kind", PRODUCTS)
def test_products_in_single_precision_are_exact_to_its_rounding(kind: str) -> None:
    a, b, _ = operands(kind)
    whole = PRODUCTS[kind][3](a, b)
    blocks = run(2, 3, lambda mesh: product_and_gradients(kind, mesh, Panels(2), torch.float32)[0])
    error = (joined(blocks, 2, 3).double() - whole).abs().max() / whole.abs().max()
    assert error < 1e-5


@pytest.mark.parametrize("kind", PRODUCTS)
def test_products_in_bf16_err_at_most_twice_as_much_as_serial_ones(kind: str) -> None:
    a, b, _ = operands(kind, torch.bfloat16)
    exact = PRODUCTS[kind][3](a.double(), b.double())
    serial = (PRODUCTS[kind][3](a, b).double() - exact).norm()
    for panels in (Panels(), Panels(6)):
        blocks = run(2, 2, lambda mesh, p=panels: product_and_gradients(kind, mesh, p, torch.bfloat16)[0])
        assert (joined(blocks, 2, 2).double() - exact).norm() <= 2 * serial


def test_products_are_closed_under_differentiation() -> None:
    a, b, _ = operands("AB")
    a.requires_grad_(), b.requires_grad_()

    def twice(a: Tensor, b: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
        (first,) = torch.autograd.grad(multiply(a, b).pow(3).sum(), a, create_graph=True)
        return torch.autograd.grad(first.square().sum(), (a, b))

    def work(mesh: Mesh2D) -> tuple[Tensor, ...]:
        own = [block_of(x.detach(), mesh).requires_grad_() for x in (a, b)]
        return twice(own[0], own[1], lambda a, b: multiply_ab(a, b, mesh))

    found = run(2, 2, work)
    for k, whole in enumerate(twice(a, b, torch.mm)):
        torch.testing.assert_close(joined([each[k] for each in found], 2, 2), whole, rtol=1e-11, atol=1e-9)


@pytest.mark.parametrize("panels", HOW, ids=repr)
@pytest.mark.parametrize(("rows", "columns"), fast_where(lambda mesh: mesh in ((2, 3), (4, 1)), MESHES))
@pytest.mark.parametrize("layout", ["AB", "ABT"])
def test_each_product_of_a_linear_layer_sends_the_bytes_of_its_formula(
    rows: int, columns: int, layout: str, panels: Panels
) -> None:
    def work(mesh: Mesh2D) -> list[float]:
        x, w, grad = (block_of(each, mesh) for each in operands(layout))
        sent = [mesh.payload_bytes]
        if layout == "AB":
            calls = [(multiply_ab, x, w), (multiply_abt, grad, w), (multiply_atb, x, grad)]
        else:
            calls = [(multiply_abt, x, w), (multiply_ab, grad, w), (multiply_atb, grad, x)]
        for multiply, first, second in calls:
            multiply(first, second, mesh, panels)
            sent.append(mesh.payload_bytes)
        return [after - before for before, after in pairwise(sent)]

    expected = 8 * product_elements(M, K, N, rows, columns, layout=layout)
    for sent in run(rows, columns, work):
        assert sent == pytest.approx([expected] * 3, rel=1e-12)


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, list | tuple) else [result]:
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return result


@pytest.mark.parametrize("kind", PRODUCTS)
@pytest.mark.parametrize(("rows", "columns"), [(2, 2), (2, 3)])
def test_no_rank_holds_more_than_a_panel_or_its_own_blocks(rows: int, columns: int, kind: str) -> None:
    _, (m, k), (_, n), _ = PRODUCTS[kind]
    count = 6
    own = max(M * N, m * k, K * N, n * K) // (rows * columns)
    travelling = [M * K // rows, M * K // columns, K * N // rows, K * N // columns, M * N // rows, M * N // columns]

    def work(mesh: Mesh2D) -> int:
        a, b, _ = (block_of(x, mesh) for x in operands(kind))
        with Largest() as largest:
            PRODUCTS[kind][0](a, b, mesh, Panels(count))
        return largest.elements

    # Each gathered piece and each partial result is a tensor of its own; none is a whole row or column of blocks.
    assert max(run(rows, columns, work)) <= max(own, max(travelling) / count)


def test_more_panels_hold_less() -> None:
    held = [panels_held(M, K, N, 2, 2, count=count, layout="AB") for count in (1, 2, 4, 8)]
    assert held[0] == M * K / 2 + K * N / 2
    assert held[1:] == [held[0], held[0] / 2, held[0] / 4]


def test_panels_cut_any_width_without_a_gap() -> None:
    for count in range(1, 9):
        cuts = Panels(count).cuts(5)
        assert cuts[0][0] == 0 and cuts[-1][1] == 5 and len(cuts) == min(count, 5)
        assert all(stop == start for (_, stop), (start, _) in pairwise(cuts))


def test_the_next_panel_travels_while_one_is_multiplied() -> None:
    order: list[str] = []

    class Here:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait(self) -> list[Tensor]:
            order.append(f"wait {self.name}")
            return []

    def launches(cut: tuple[int, int]) -> Any:
        def launch(way: str) -> Here:
            order.append(f"send {way}{cut[0]}")
            return Here(f"{way}{cut[0]}")

        return [lambda: launch("row"), lambda: launch("column")]

    for overlap in (True, False):
        panels = Panels(2, overlap=overlap)
        for cut, _ in panels.pipeline(panels.cuts(2), launches):
            order.append(f"multiply {cut[0]}")
    assert order == [
        *("send row0", "send column0", "send row1", "send column1"),
        *("wait row0", "wait column0", "multiply 0", "wait row1", "wait column1", "multiply 1"),
        *("send row0", "wait row0", "send column0", "wait column0", "multiply 0"),
        *("send row1", "wait row1", "send column1", "wait column1", "multiply 1"),
    ]


def test_sizes_that_do_not_fit_are_refused_with_their_divisor() -> None:
    with pytest.raises(ConfigError, match=r"4 % 6 must be 0.*2x3"):
        run(2, 3, lambda mesh: multiply_abt(torch.zeros(2, 2), torch.zeros(2, 2), mesh))
    for wrong in (0, 2.5):
        with pytest.raises(ConfigError, match="count"):
            Panels(wrong)  # type: ignore[arg-type]
