"""Saving and loading: a whole model from blocks, blocks from a whole model, and blocks as they are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinwire._version import __version__
from thinwire.errors import CheckpointError
from thinwire.storage.files import write_atomically
from thinwire.tensor2d.dropout import Dropout2D
from thinwire.tensor2d.mesh import Mesh2D, Place
from thinwire.tensor2d.module import placed


@torch.no_grad()
def whole_state(model: nn.Module, mesh: Mesh2D, *, everywhere: bool = True) -> dict[str, Tensor]:
    """The state dict of the serial model, one tensor after the other; all ranks call.

    Args:
        model: on the mesh.
        mesh: the ranks.
        everywhere: False keeps it on rank 0 alone, and returns nothing elsewhere.
    """
    keep = everywhere or mesh.whole.rank == 0
    wholes: dict[int, Tensor] = {}
    for parameter, placement in placed(model).values():
        blocks = _blocks(parameter.detach(), mesh)
        if keep:
            wholes[id(parameter)] = placement.join(blocks)
    if not keep:
        return {}
    names = {name: wholes[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    return {
        name: names[name] if name in names else value.detach().clone()
        for name, value in model.state_dict().items()
        if name not in _draws(model)
    }


@torch.no_grad()
def load_whole_(model: nn.Module, state: Mapping[str, Tensor], mesh: Mesh2D) -> None:
    """Take this rank's blocks out of a serial model's state dict.

    Args:
        model: on the mesh.
        state: whole tensors by the serial model's names.
        mesh: the ranks.

    Raises:
        CheckpointError: a name that is missing, or a tensor of another shape; nothing is loaded then.
    """
    found = placed(model)
    for name, (_, placement) in found.items():
        _check_there(name, placement.shape, state[name].shape if name in state else None)
    for name, (parameter, placement) in found.items():
        parameter.copy_(placement.cut(state[name], mesh.place))
    for name, buffer in model.named_buffers():
        if name in state and name not in _draws(model):
            buffer.copy_(state[name])


@torch.no_grad()
def read_safetensors_(
    model: nn.Module,
    paths: Path | Iterable[Path],
    mesh: Mesh2D,
    *,
    device: str = "cpu",
    rename: Callable[[str], str] | None = None,
) -> int:
    """Read this rank's blocks alone from a serial model's files; returns the bytes read.

    Parameters on the meta device come to be on `device`. Buffers are left alone.

    Args:
        model: on the mesh.
        paths: safetensors files, among which the tensors may be spread.
        mesh: the ranks.
        device: where parameters without memory are to be.
        rename: a parameter's name to its name in the files; None where they are equal.

    Raises:
        CheckpointError: a name that is missing, or a tensor of another shape.
    """
    from safetensors import safe_open

    files = [safe_open(str(path), framework="pt") for path in ([paths] if isinstance(paths, Path) else paths)]
    where: dict[str, Any] = {name: file for file in files for name in file.keys()}  # noqa: SIM118
    nbytes = 0
    for name, (parameter, placement) in placed(model).items():
        source = rename(name) if rename else name
        part = where[source].get_slice(source) if source in where else None
        _check_there(source, placement.shape, None if part is None else tuple(part.get_shape()))

        def read(*slices: slice, part: Any = part) -> Tensor:
            nonlocal nbytes
            piece: Tensor = part[slices]
            nbytes += piece.numel() * piece.element_size()
            return piece

        home = parameter
        if parameter.is_meta:
            home = torch.empty_like(parameter, device=device)
        home.copy_(placement.read(read, mesh.place, like=home))
        if parameter.is_meta:
            _replace(model, parameter, nn.Parameter(home, requires_grad=parameter.requires_grad))
    return nbytes


def write_whole(model: nn.Module, path: Path, mesh: Mesh2D) -> None:
    """Write the serial model's safetensors file; all ranks call, rank 0 writes.

    Tensors that the serial model shares are written once, under their first name.
    """
    state = whole_state(model, mesh, everywhere=False)
    if mesh.whole.rank == 0:
        from safetensors.torch import save

        first = {value.data_ptr(): name for name, value in reversed(state.items())}
        kept = {name: value.contiguous() for name, value in state.items() if first[value.data_ptr()] == name}
        write_atomically(path, save(kept, metadata={"format": "pt"}))
    mesh.whole.all_reduce_(torch.zeros(1)).wait()  # nobody reads before it is there


def write_blocks(model: nn.Module, folder: Path, mesh: Mesh2D) -> Path:
    """Write this rank's blocks, with buffers and dropout's counters, to a file of its own in `folder`; returns it."""
    from safetensors.torch import save

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: x.detach().contiguous() for name, x in (*model.named_parameters(), *model.named_buffers())}
    about = {"mesh": f"{mesh.rows}x{mesh.columns}", "thinwire": __version__, "placements": _described(model)}
    path = folder / _file_name(mesh.place)
    write_atomically(path, save(tensors, metadata=about))
    return path


@torch.no_grad()
def read_blocks_(model: nn.Module, folder: Path, mesh: Mesh2D) -> None:
    """Read what `write_blocks` wrote on a mesh of the same shape.

    Raises:
        CheckpointError: no file for this rank, or one of another mesh or model; nothing is loaded then.
    """
    from safetensors import safe_open

    path = folder / _file_name(mesh.place)
    if not path.exists():
        raise CheckpointError(f"{path} is not there: blocks of a {mesh.rows}x{mesh.columns} mesh need a file per rank")
    own = dict((*model.named_parameters(), *model.named_buffers()))
    with safe_open(str(path), framework="pt") as file:
        about = file.metadata()
        shape = f"{mesh.rows}x{mesh.columns}"
        if about["mesh"] != shape:
            raise CheckpointError(
                f"{path} is of a {about['mesh']} mesh and this one is {shape}; go by way of write_whole and "
                "read_safetensors_"
            )
        if about["placements"] != _described(model):
            raise CheckpointError(f"{path} is of another model, or of one that is laid out otherwise")
        saved = {name: file.get_tensor(name) for name in own}
    for name, x in own.items():
        x.copy_(saved[name])


def _blocks(block: Tensor, mesh: Mesh2D) -> dict[Place, Tensor]:
    across = torch.stack(mesh.along_row.all_gather(block.contiguous()).wait())
    down = mesh.along_column.all_gather(across).wait()
    rows, columns = mesh.rows, mesh.columns
    return {Place(i, j, rows, columns): down[i][j] for i in range(rows) for j in range(columns)}


def _check_there(name: str, wanted: tuple[int, ...], found: tuple[int, ...] | None) -> None:
    if found is None:
        raise CheckpointError(f"{name} is in the model only")
    if tuple(found) != wanted:
        raise CheckpointError(f"{name} has shape {tuple(found)} in the checkpoint and {wanted} in this model")


def _draws(model: nn.Module) -> set[str]:
    """Names of dropout's counters, which serial models have not."""
    return {f"{name}.draws".lstrip(".") for name, module in model.named_modules() if isinstance(module, Dropout2D)}


def _described(model: nn.Module) -> str:
    return json.dumps({name: repr(placement) for name, (_, placement) in placed(model).items()}, sort_keys=True)


def _file_name(place: Place) -> str:
    return f"block-{place.row:03d}-{place.column:03d}.safetensors"


def _replace(model: nn.Module, old: Tensor, new: nn.Parameter) -> None:
    """Put a parameter in place of another, wherever the model holds it."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter is old:
                setattr(module, name, new)
