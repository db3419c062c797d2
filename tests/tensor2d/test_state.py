# SPDX-License-Identifier: Apache-2.0
"""Saving and loading models on meshes, between meshes and without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.oracles.tensor2d import MESHES, Encoder, drawn, tokens
from tests.tensor2d.helpers import gpt, mesh_loss, parallelized, run
from thinwire import CheckpointError, ConfigError
from thinwire.tensor2d import (
    Axis,
    Mesh2D,
    Place,
    Placement,
    load_whole_,
    read_safetensors_,
    whole_activation,
    whole_state,
    write_whole,
)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("padded", [0, 36])
@pytest.mark.parametrize(("rows", "columns"), MESHES)
def test_blocks_add_up_to_the_whole_they_were_cut_from(rows: int, columns: int, padded: int, transposed: bool) -> None:
    first = Axis(29, "rows", padded=36) if padded else Axis(36, "rows", (12, 12, 12))
    placement = Placement((first, Axis(24, "columns")), transposed)
    whole = drawn(*placement.shape)
    places = [Place(i, j, rows, columns) for i in range(rows) for j in range(columns)]
    blocks = {place: placement.cut(whole, place) for place in places}
    for place, block in blocks.items():
        assert (block.T if transposed else block).shape == tuple(axis.length(place) for axis in placement.axes)
    assert all(block.is_contiguous() for block in blocks.values())
    assert torch.equal(placement.join(blocks), whole)
    assert sum(int(block.count_nonzero()) for block in blocks.values()) == whole.numel()


def test_a_column_holds_its_share_of_each_section() -> None:
    whole = torch.arange(12.0)
    place = Place(0, 1, 1, 2)
    assert Placement((Axis(12, "columns", (4, 8)),)).cut(whole, place).tolist() == [2, 3, 8, 9, 10, 11]
    rows = Placement((Axis(12, "rows", (4, 8)),))
    assert rows.cut(whole, Place(1, 0, 2, 2)).tolist() == [2, 3, 8, 9, 10, 11]
    assert rows.replicated is False
    assert Placement((Axis(12, "columns"),)).replicated


def trained(mesh: Mesh2D, model: nn.Module) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        mesh_loss(model, mesh, step).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("make", [gpt, lambda: Encoder(vocabulary=37).double()], ids=["gpt", "padded and tied"])
@pytest.mark.slow
def test_a_model_trained_on_one_mesh_continues_on_any_other(make: type[nn.Module], tmp_path: Path) -> None:
    ids, _ = tokens()
    path = tmp_path / "whole.safetensors"

    def work(mesh: Mesh2D) -> tuple[dict[str, Tensor], Tensor]:
        model = trained(mesh, parallelized(mesh, make()))
        write_whole(model, path, mesh)
        return whole_state(model, mesh), whole_activation(model(mesh.rows_of(ids)), mesh)

    state, logits = run(2, 2, work)[3]
    serial = make()
    serial.load_state_dict(state)
    logits = logits[..., : serial(ids).shape[-1]]
    torch.testing.assert_close(serial(ids), logits, rtol=1e-12, atol=1e-12)
    file = load_file(path)
    assert all(torch.equal(file[name], state[name]) for name in file)
    assert {id(p) for p in serial.parameters()} == {id(dict(serial.named_parameters())[name]) for name in file}

    def other(mesh: Mesh2D) -> tuple[Tensor, Tensor]:
        blank = parallelized(mesh, make())
        load_whole_(blank, state, mesh)
        again = parallelized(mesh, make())
        read_safetensors_(again, path, mesh)
        found = (whole_activation(model(mesh.rows_of(ids)), mesh) for model in (blank, again))
        first, second = (each[..., : logits.shape[-1]] for each in found)
        return first, second

    for rows, columns in ((1, 4), (3, 2), (1, 1)):
        for first, second in run(rows, columns, other):
            torch.testing.assert_close(first, logits, rtol=1e-12, atol=1e-12)
            assert torch.equal(first, second)


def test_only_the_rank_s_own_blocks_are_read_from_files(tmp_path: Path) -> None:
    state = {name: value.contiguous() for name, value in gpt(seed=3).state_dict().items()}
    names = list(state)
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    save_file({name: state[name] for name in names[::2]}, paths[0])
    save_file({f"model.{name}": state[name] for name in names[1::2]}, paths[1])
    other = {name: name if k % 2 == 0 else f"model.{name}" for k, name in enumerate(names)}

    def work(mesh: Mesh2D) -> tuple[int, int, dict[str, Tensor]]:
        with torch.device("meta"):
            blank = gpt()
        assert next(blank.parameters()).is_meta
        model = parallelized(mesh, blank)
        read = read_safetensors_(model, paths, mesh, rename=other.__getitem__)
        return read, 8 * sum(p.numel() for p in model.parameters()), whole_state(model, mesh)

    for read, held, found in run(2, 3, work):
        assert read == held < 8 * sum(x.numel() for x in state.values()) / 4
        assert all(torch.equal(found[name], state[name]) for name in names)


def test_each_rank_s_state_dict_has_its_blocks_and_dropout_s_counters(tmp_path: Path) -> None:
    def work(mesh: Mesh2D) -> bool:
        model = trained(mesh, parallelized(mesh, Encoder(dropout=0.2).double()))
        path = tmp_path / f"block-{mesh.whole.rank}.pt"
        torch.save(model.state_dict(), path)
        again = parallelized(mesh, Encoder(dropout=0.2).double())
        again.load_state_dict(torch.load(path))
        return torch.equal(mesh_loss(model, mesh), mesh_loss(again, mesh))

    assert all(run(2, 2, work))


def test_what_does_not_fit_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    state = dict(gpt(seed=3).state_dict())
    missing = {name: x for name, x in state.items() if name != "head.bias"}
    wrong = state | {"head.bias": torch.zeros(5)}
    for bad, message in ((missing, "has no tensor head.bias"), (wrong, r"head.bias has shape \(5,\).*\(36,\)")):
        path = tmp_path / "bad.safetensors"
        save_file(bad, path)

        def work(mesh: Mesh2D, bad: dict[str, Tensor] = bad) -> None:
            model = parallelized(mesh)
            before = [p.detach().clone() for p in model.parameters()]
            try:
                load_whole_(model, bad, mesh)
            finally:
                assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))

        with pytest.raises(CheckpointError, match=message):
            run(2, 2, work)
        with pytest.raises(CheckpointError, match=message):
            run(2, 2, lambda mesh, path=path: read_safetensors_(parallelized(mesh), path, mesh))


def test_the_whole_state_can_be_kept_on_rank_0_alone() -> None:
    found = run(2, 2, lambda mesh: len(whole_state(parallelized(mesh), mesh, everywhere=False)))
    assert found == [len(gpt().state_dict()), 0, 0, 0]


def test_urls_are_refused_on_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    calls = (write_whole, lambda model, path, mesh: read_safetensors_(model, path, mesh))

    def work(mesh: Mesh2D) -> None:
        model = parallelized(mesh, gpt())
        for call in calls:
            with pytest.raises(ConfigError, match=r"^s3://bucket/model is a URL\."):
                call(model, "s3://bucket/model", mesh)

    run(2, 2, work)
    assert not list(tmp_path.iterdir())


def test_a_file_that_rank_0_cannot_write_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    def work(mesh: Mesh2D) -> str:
        model = parallelized(mesh, gpt())
        with pytest.raises(CheckpointError) as found:
            write_whole(model, tmp_path / "not there" / "model.safetensors", mesh)
        write_whole(model, tmp_path / "model.safetensors", mesh)
        return str(found.value)

    first, *others = run(2, 2, work)
    assert "rank 0 of the mesh cannot write it ([Errno 2] No such file or directory" in first
    assert all("rank 0 of the mesh cannot write it. See its error" in each for each in others)


def test_a_buffer_of_another_shape_is_refused_before_anything_is_loaded() -> None:
    def network(size: int) -> nn.Sequential:
        model = nn.Sequential(nn.Linear(4, 4))
        model.register_buffer("mask", torch.ones(size))
        return model

    state = {name: torch.zeros_like(x) for name, x in network(3).state_dict().items()}

    def work(mesh: Mesh2D) -> bool:
        model = parallelized(mesh, network(2))
        with pytest.raises(CheckpointError, match=r"mask has shape \(3,\) in the checkpoint: must be \(2,\)"):
            load_whole_(model, state, mesh)
        return bool(model[0].weight.any())  # type: ignore[index,union-attr]

    assert run(2, 2, work) == [True] * 4


def test_replicas_that_have_drifted_apart_are_refused_and_named(tmp_path: Path) -> None:
    def work(mesh: Mesh2D) -> str:
        model = parallelized(mesh, gpt())
        with torch.no_grad():
            # Rounding, as on ranks with different processors, is no drift.
            model.get_parameter("head.bias").mul_(1 + 1e-10 * mesh.row)
        whole_state(model, mesh)
        with torch.no_grad():
            model.get_parameter("head.bias").mul_(1 + 0.1 * mesh.row * mesh.column)
        for save in (lambda: whole_state(model, mesh), lambda: write_whole(model, tmp_path / "whole", mesh)):
            with pytest.raises(CheckpointError, match=r"head.bias by up to 0.09") as caught:
                save()
        return str(caught.value)

    assert len(set(run(2, 2, work))) == 1
    assert not (tmp_path / "whole").exists()


def test_buffers_on_the_meta_device_are_read_or_named(tmp_path: Path) -> None:
    def network(kept: bool) -> nn.Sequential:
        model = nn.Sequential(nn.Linear(4, 4))
        model.register_buffer("mask", torch.ones(3), persistent=kept)
        return model

    state = network(True).state_dict()
    save_file(state, tmp_path / "model.safetensors")
    save_file({name: x for name, x in state.items() if name != "mask"}, tmp_path / "parameters.safetensors")

    def work(mesh: Mesh2D) -> Tensor:
        with torch.device("meta"):
            made = [network(True), network(False)]
        model, without = (parallelized(mesh, each) for each in made)
        for load in (lambda: load_whole_(model, state, mesh), lambda: whole_state(model, mesh)):
            with pytest.raises(CheckpointError, match=r"3 tensors are on the meta device, such as 0.weight"):
                load()
        with pytest.raises(CheckpointError, match="buffers on the meta device: mask"):
            read_safetensors_(without, tmp_path / "parameters.safetensors", mesh)
        assert without.get_parameter("0.weight").is_meta
        read_safetensors_(model, tmp_path / "model.safetensors", mesh)
        without.mask = torch.ones(3)  # type: ignore[assignment]
        read_safetensors_(without, tmp_path / "parameters.safetensors", mesh)
        return model.get_buffer("mask")

    assert all(torch.equal(mask, torch.ones(3)) for mask in run(2, 2, work))
