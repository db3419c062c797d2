# SPDX-License-Identifier: Apache-2.0
"""Whole transformers on a mesh: loss, gradients, training, dropout, checkpointing, clipping and bytes."""

from __future__ import annotations

from copy import deepcopy
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from reproductions.optimus.costs import (
    Layer,
    layer_elements,
    loss_elements,
    norm_elements,
    product_elements,
    vector_elements,
)
from tests.grids import fast_where
from tests.oracles.tensor2d import BATCH, LENGTH, MESHES, VOCABULARY, Encoder, serial_gradients, serial_loss, tokens
from tests.tensor2d.helpers import gpt, gradients, mesh_loss, parallelized, run
from thinwire import ConfigError
from thinwire.tensor2d import (
    Dropout2D,
    Linear2D,
    Mesh2D,
    MultiheadAttention2D,
    Panels,
    TiedHead2D,
    checkpoint_,
    clip_gradient_norm_,
    cross_entropy_2d,
    gradient_norm,
    parallelize_2d,
    whole_activation,
    whole_state,
)
from thinwire.tensor2d.plan import Dense, Lookup, Style, Untouched

STEPS = 4
SQUARE, WIDE = (fast_where(lambda mesh, chosen=chosen: mesh == chosen, MESHES) for chosen in ((2, 2), (2, 3)))


def train(model: nn.Module, loss: Any, clip: Any) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, foreach=False)
    losses: list[Tensor] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(loss(model, step))
        losses[-1].backward()
        clip(model)
        optimizer.step()
    return [each.detach() for each in losses]


@pytest.mark.parametrize(
    ("rows", "columns", "panels"),
    # A wide mesh and one column without panels, and a square one with them.
    fast_where(
        lambda each: each in ((2, 3, Panels()), (4, 1, Panels()), (2, 2, Panels(2))),
        [(*mesh, panels) for mesh, panels in product(MESHES, (Panels(), Panels(2)))],
    ),
    ids=repr,
)
@pytest.mark.slow
def test_the_loss_and_every_gradient_are_those_of_the_serial_model(rows: int, columns: int, panels: Panels) -> None:
    serial = gpt()
    loss = serial_loss(serial)
    loss.backward()

    def work(mesh: Mesh2D) -> tuple[Tensor, dict[str, Tensor]]:
        model = parallelized(mesh)
        ours = mesh_loss(model, mesh)
        ours.backward()
        return ours.detach(), gradients(model, mesh)

    expected = serial_gradients(serial)
    for ours, grads in run(rows, columns, work, panels):
        torch.testing.assert_close(ours, loss.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(grads, expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(
    ("rows", "columns", "clip"),
    fast_where(
        lambda each: each in ((2, 2, "thinwire's"), (1, 4, "torch's")),
        [(*mesh, clip) for mesh, clip in product(MESHES, ("thinwire's", "torch's"))],
    ),
)
@pytest.mark.slow
def test_training_with_clipping_ends_at_the_serial_parameters(rows: int, columns: int, clip: str) -> None:
    serial = gpt()
    expected = train(serial, serial_loss, lambda model: clip_grad_norm_(model.parameters(), 0.5))

    def work(mesh: Mesh2D) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
        model = parallelized(mesh)
        clips = {
            "thinwire's": lambda m: clip_gradient_norm_(m, 0.5, mesh),
            "torch's": lambda m: clip_grad_norm_(m.parameters(), 0.5),
        }
        losses = train(model, lambda m, step: mesh_loss(m, mesh, step), clips[clip])
        vectors = {name: p.detach() for name, p in model.named_parameters() if p.dim() == 1 or "table" in name}
        return losses, whole_state(model, mesh), vectors

    found = run(rows, columns, work)
    for losses, state, vectors in found:
        torch.testing.assert_close(losses, expected, rtol=1e-11, atol=1e-11)
        for name, parameter in serial.named_parameters():
            torch.testing.assert_close(state[name], parameter.detach(), rtol=1e-8, atol=1e-8)
        assert vectors.keys() == found[0][2].keys()
    for rank, (_, _, vectors) in enumerate(found):  # replicated parameters have the same bits in all rows
        assert all(torch.equal(x, found[rank % columns][2][name]) for name, x in vectors.items())


@pytest.mark.parametrize("order", [2.0, torch.inf, *fast_where(lambda _: False, [1.0, 3.0])])
def test_torch_clips_by_the_norm_of_the_whole_mesh(order: float) -> None:
    serial = gpt()
    serial_loss(serial).backward()
    expected = clip_grad_norm_(serial.parameters(), 0.5, order)

    def work(mesh: Mesh2D) -> tuple[Tensor, dict[str, Tensor]]:
        model = parallelized(mesh)
        mesh_loss(model, mesh).backward()
        # Twice: the second finds a gradient that is short already.
        norm = clip_grad_norm_(list(model.parameters()), 0.5, order, error_if_nonfinite=True)
        clip_grad_norm_(model.parameters(), 0.5, order)
        assert type(norm) is Tensor
        return norm, gradients(model, mesh)

    for norm, found in run(2, 2, work):
        torch.testing.assert_close(norm, expected, rtol=1e-10, atol=0)
        torch.testing.assert_close(found, serial_gradients(serial), rtol=1e-5, atol=1e-12)


BLOCK_NORMS: dict[str, Any] = {
    "a number": lambda grads: sum(grad.data.norm(2).item() ** 2 for grad in grads),
    "a comparison": lambda grads: [grad.mul_(0.1) for grad in grads if grad.detach().norm() > 1],
    "a sum of squares": lambda grads: torch.stack([torch.linalg.vector_norm(grad) ** 2 for grad in grads]).sum(),
    "an order below zero": lambda grads: torch.nn.utils.get_total_norm(grads, -torch.inf),
}


@pytest.mark.parametrize("name", BLOCK_NORMS)
def test_the_norm_of_one_block_of_a_gradient_cannot_be_used(name: str) -> None:
    def work(mesh: Mesh2D) -> None:
        model = parallelized(mesh)
        mesh_loss(model, mesh).backward()
        BLOCK_NORMS[name]([parameter.grad for parameter in model.parameters()])

    with pytest.raises(ConfigError, match="on a mesh"):
        run(2, 2, work)


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    def work(mesh: Mesh2D) -> tuple[list[bool], float]:
        model = parallelized(mesh)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
        unchanged: list[bool] = []
        for spoiled in (True, False):
            before = [parameter.detach().clone() for parameter in model.parameters()]
            optimizer.zero_grad()
            scaler.scale(mesh_loss(model, mesh)).backward()
            if spoiled and mesh.whole.rank == 2:
                next(model.parameters()).grad.view(-1)[0] = torch.inf  # type: ignore[union-attr]
            scaler.step(optimizer)
            scaler.update()
            unchanged.append(all(map(torch.equal, before, model.parameters())))
        return unchanged, scaler.get_scale()

    assert run(2, 2, work) == [([True, False], 2.0)] * 4


@pytest.mark.parametrize(("rows", "columns"), WIDE)
def test_the_gradient_norm_counts_every_parameter_once(rows: int, columns: int) -> None:
    serial = Encoder().double()
    ids, targets = tokens()
    F.cross_entropy(serial(ids).flatten(0, 1), targets.flatten()).backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in serial.parameters() if p.grad is not None])

    def work(mesh: Mesh2D) -> Tensor:
        model = parallelized(mesh, Encoder().double())
        mesh_loss(model, mesh).backward()
        return gradient_norm(model, mesh)

    for norm in run(rows, columns, work):
        torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize(("rows", "columns"), fast_where(lambda mesh: mesh == (2, 2), [(1, 1), (2, 2), (2, 3), (3, 2)]))
def test_torch_s_encoder_with_masks_and_a_tied_head_is_laid_out(rows: int, columns: int, mode: str) -> None:
    serial = Encoder().double().train(mode == "train")
    ids, targets = tokens()
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    padding = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    padding[::3, -2:] = True
    logits = serial(ids, mask, padding)
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()

    def work(mesh: Mesh2D) -> tuple[Tensor, dict[str, Tensor]]:
        model = parallelized(mesh, Encoder().double().train(mode == "train"))
        assert isinstance(model.lm_head, TiedHead2D)
        ours = model(mesh.rows_of(ids), mask, mesh.rows_of(padding))
        cross_entropy_2d(ours, mesh.rows_of(targets), mesh).backward()
        return whole_activation(ours, mesh), gradients(model, mesh)

    expected = serial_gradients(serial)
    for ours, grads in run(rows, columns, work):
        torch.testing.assert_close(ours, logits.detach(), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(grads, expected, rtol=1e-9, atol=1e-12)


def test_a_vocabulary_that_cannot_be_cut_is_padded() -> None:
    serial = Encoder(vocabulary=31).double()
    ids, targets = (x.clamp(max=30) for x in tokens())
    loss = F.cross_entropy(serial(ids).flatten(0, 1), targets.flatten())
    loss.backward()

    def work(mesh: Mesh2D) -> tuple[Tensor, dict[str, Tensor]]:
        model = parallelized(mesh, Encoder(vocabulary=31).double())
        logits = model(mesh.rows_of(ids))
        ours = cross_entropy_2d(logits, mesh.rows_of(targets), mesh, vocabulary=31)
        ours.backward()
        return ours.detach(), gradients(model, mesh)

    ours, grads = run(2, 2, work)[0]
    torch.testing.assert_close(ours, loss.detach())
    torch.testing.assert_close(grads, serial_gradients(serial))


@pytest.mark.parametrize(("rows", "columns"), SQUARE[1:])
def test_training_with_dropout_is_the_same_on_every_mesh(rows: int, columns: int) -> None:
    def work(mesh: Mesh2D) -> tuple[list[Tensor], dict[str, Tensor]]:
        model = parallelized(mesh, Encoder(dropout=0.3).double(), seed=5)
        losses = train(model, lambda m, step: mesh_loss(m, mesh, step), lambda m: None)
        return losses, whole_state(model, mesh)

    losses, state = run(1, 1, work)[0]
    assert losses[0] != train(Encoder().double(), serial_loss, lambda m: None)[0]
    ours, parameters = run(rows, columns, work)[0]
    torch.testing.assert_close(ours, losses, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(parameters, state, rtol=1e-7, atol=1e-7)


# -- checkpointing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "columns"), [(2, 2), *fast_where(lambda _: False, [(1, 1), (2, 3)])])
@pytest.mark.slow
def test_checkpointed_blocks_give_the_same_bits_and_send_nothing_twice(rows: int, columns: int) -> None:
    def work(mesh: Mesh2D, checkpointed: bool) -> tuple[list[Tensor], dict[str, Tensor], float, int]:
        model = parallelized(mesh, Encoder(dropout=0.2).double())
        if checkpointed:
            for layer in model.encoder.layers:
                checkpoint_(layer)
        losses = train(model, lambda m, step: mesh_loss(m, mesh, step), lambda m: None)
        sent = mesh.payload_bytes, mesh.messages
        return losses, whole_state(model, mesh), *sent

    plain = run(rows, columns, lambda mesh: work(mesh, False))
    for (losses, state, nbytes, messages), ours in zip(
        plain, run(rows, columns, lambda mesh: work(mesh, True)), strict=True
    ):
        assert torch.equal(torch.stack(losses), torch.stack(ours[0]))
        assert all(torch.equal(state[name], ours[1][name]) for name in state)
        assert (nbytes, messages) == ours[2:]


def test_a_checkpointed_block_keeps_less() -> None:
    def saved(mesh: Mesh2D, checkpointed: bool) -> int:
        model = parallelized(mesh, gpt())
        if checkpointed:
            for block in model.blocks:
                checkpoint_(block)
        held: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            mesh_loss(model, mesh).backward()
        return sum(held.values())

    assert run(2, 2, lambda mesh: saved(mesh, True))[0] < run(2, 2, lambda mesh: saved(mesh, False))[0]


# -- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "columns"), WIDE)
def test_a_training_step_sends_exactly_the_bytes_of_the_formulas(rows: int, columns: int) -> None:
    layer = Layer(tokens=BATCH * LENGTH, hidden=24, rows=rows, columns=columns)

    def work(mesh: Mesh2D) -> tuple[float, float]:
        model = parallelized(mesh, gpt(), plan={"embedding": Lookup("table")})
        loss = mesh_loss(model, mesh)
        forward = mesh.payload_bytes
        loss.backward()
        return forward, mesh.payload_bytes - forward

    lookup = VOCABULARY * 24 / columns * (rows - 1) / rows
    head = product_elements(layer.tokens, 24, VOCABULARY, rows, columns, layout="AB")
    norm = {way: norm_elements(layer, way) / 2 for way in ("forward", "backward")}
    two_scalars = 2 * 2 * (rows - 1) / rows  # the loss and the count of its tokens
    forward = 2 * (layer_elements(layer, "forward") + 2 * norm["forward"]) + norm["forward"] + lookup + head
    forward += loss_elements(layer.tokens, rows, columns) + two_scalars
    vectors = 2 * vector_elements(layer) + (2 * 24 + VOCABULARY + LENGTH * 24) / columns * 2 * (rows - 1) / rows
    backward = 2 * (layer_elements(layer, "backward") + 2 * norm["backward"]) + norm["backward"] + lookup + 2 * head
    for sent in run(rows, columns, work):
        assert sent == pytest.approx((8 * forward, 8 * (backward + vectors)), rel=1e-12)


def test_gradients_of_vectors_travel_in_one_message() -> None:
    def work(mesh: Mesh2D) -> float:
        model = parallelized(mesh, gpt())
        mesh_loss(model, mesh).backward()
        sums = mesh.along_column.meter
        return sums.by_operation["all_reduce"] / 8

    elements = sum(p.numel() for p in gpt().parameters() if p.dim() == 1) + LENGTH * 24
    assert run(2, 2, work)[0] == elements / 2 + 2  # and two scalars of the loss


def test_a_parameter_that_is_not_used_has_no_gradient() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.LayerNorm(24), nn.LayerNorm(24)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    def work(mesh: Mesh2D) -> list[bool]:
        model = parallelize_2d(Branches(), mesh, {Branches: Untouched()})
        model(torch.ones(2, 24 // mesh.columns)).sum().backward()
        return [p.grad is None for p in model.parameters()]

    assert run(2, 2, work)[0] == [False, False, True, True]


def test_a_gradient_is_accumulated_over_several_passes() -> None:
    serial = gpt()
    for step in range(2):
        serial_loss(serial, step).backward()

    def work(mesh: Mesh2D) -> dict[str, Tensor]:
        model = parallelized(mesh)
        for step in range(2):
            mesh_loss(model, mesh, step).backward()
        return gradients(model, mesh)

    grads = run(2, 2, work)[0]
    torch.testing.assert_close(grads, serial_gradients(serial), rtol=1e-10, atol=1e-12)


# -- precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [False, True])
def test_a_model_in_bf16_errs_at_most_twice_as_much_as_the_serial_one(autocast: bool) -> None:
    exact = gpt()
    serial_loss(exact).backward()
    expected = serial_gradients(exact)
    kind = torch.float32 if autocast else torch.bfloat16

    def error(grads: dict[str, Tensor]) -> float:
        return float(sum((grads[n].double() - expected[n]).square().sum() for n in expected)) ** 0.5

    serial = gpt().to(kind)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        serial_loss(serial).backward()

    def work(mesh: Mesh2D) -> dict[str, Tensor]:
        model = parallelized(mesh, gpt().to(kind))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = mesh_loss(model, mesh)
        assert loss.dtype == torch.float32
        loss.backward()
        return gradients(model, mesh)

    assert error(run(2, 2, work, Panels(2))[0]) <= 2 * error(serial_gradients(serial))


# -- plans and refusals -----------------------------------------------------------------------------------------------


class Unknown(nn.Module):
    def __init__(self, features: int = 24, extra: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(24, features), nn.GELU(), nn.Linear(features, 24), nn.Dropout(0.1))
        if extra:
            self.curve = nn.PReLU(24)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


NAMED: dict[Any, Style] = {Unknown: Untouched()}


def test_a_plan_chooses_the_style_of_modules() -> None:
    def work(mesh: Mesh2D) -> list[str]:
        model = parallelize_2d(Unknown(), mesh, NAMED | {"body.*2": Dense("AB"), "body.1": Untouched()}, seed=4)
        assert isinstance(model.body[3], Dropout2D) and model.body[3].seed == 4
        return [layer.layout for layer in model.modules() if isinstance(layer, Linear2D)]

    assert run(2, 2, work)[0] == ["AB", "AB"]


@pytest.mark.parametrize(
    ("model", "plan", "message"),
    [
        (lambda: Unknown(26), NAMED, r"body\.0.*26 % 6 must be 0.*2x3"),
        (lambda: Unknown(extra=True), NAMED, "curve is a PReLU with parameters"),
        (lambda: Unknown(), {"bodi.*": Dense()}, "no module has the name 'bodi.*'"),
        (lambda: Unknown(), {nn.PReLU: Dense()}, "no module has the class PReLU"),
        (lambda: Unknown(), NAMED | {"body.1": Dense()}, "body.1 is a GELU without weight"),
        (lambda: nn.Linear(24, 24), {}, "Wrap it"),
        (lambda: nn.Sequential(nn.MultiheadAttention(24, 4, batch_first=True)), {}, r"0 of 4 heads: 4 % 3"),
        (lambda: nn.Sequential(nn.MultiheadAttention(24, 6)), {}, "batch_first=True"),
        (lambda: nn.Sequential(nn.LayerNorm((2, 24))), {}, "a norm over"),
        (lambda: nn.Sequential(nn.Embedding(36, 24, max_norm=1.0)), {}, "max_norm"),
    ],
)
def test_a_model_that_cannot_be_laid_out_is_refused_and_left_alone(model: Any, plan: Any, message: str) -> None:
    def work(mesh: Mesh2D) -> None:
        serial = model()
        before = [(name, type(module)) for name, module in serial.named_modules()]
        try:
            parallelize_2d(serial, mesh, plan)
        finally:
            assert before == [(name, type(module)) for name, module in serial.named_modules()]

    with pytest.raises(ConfigError, match=message):
        run(2, 3, work)


def test_cross_attention_is_refused() -> None:
    def work(mesh: Mesh2D) -> None:
        model = parallelize_2d(nn.Sequential(nn.MultiheadAttention(24, 4, batch_first=True)), mesh)
        assert isinstance(model[0], MultiheadAttention2D)
        x = torch.zeros(2, 3, 12)
        model[0](x, x + 1, x + 1)

    with pytest.raises(ConfigError, match="cross attention"):
        run(2, 2, work)


def test_a_copy_of_a_model_communicates_over_the_same_mesh() -> None:
    def work(mesh: Mesh2D) -> tuple[Tensor, Tensor]:
        model = parallelized(mesh)
        twin = deepcopy(model)
        return mesh_loss(model, mesh), mesh_loss(twin, mesh)

    first, second = run(2, 2, work)[0]
    assert torch.equal(first, second)


def test_every_rank_has_the_same_names_and_a_part_of_every_parameter() -> None:
    def work(mesh: Mesh2D) -> dict[str, int]:
        return {name: p.numel() for name, p in parallelized(mesh).named_parameters()}

    found = run(2, 3, work)
    assert all(each == found[0] for each in found)
    assert found[0].keys() == dict(gpt().named_parameters()).keys()
    assert min(found[0].values()) > 0
