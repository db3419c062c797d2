# SPDX-License-Identifier: Apache-2.0
"""Save and load models on a mesh, as whole tensors or as blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.core.storage.files import local_path, write_atomically
from thinwire.errors import CheckpointError
from thinwire.tensor2d.dropout import Dropout2D
from thinwire.tensor2d.gradient import mark_gradients_
from thinwire.tensor2d.mesh import Mesh2D, Place
from thinwire.tensor2d.module import placed


@torch.no_grad()
def whole_state(model: nn.Module, mesh: Mesh2D, *, everywhere: bool = True) -> dict[str, Tensor]:
    """Gather the serial model's state dict, one tensor at a time; a collective call of all ranks.

    Args:
        model: a model on the mesh.
        mesh: the ranks.
        everywhere: False returns it on rank 0 only, and an empty dict on the other ranks.

    Raises:
        CheckpointError: rows differ in a replicated parameter; raised on all ranks.
    """
    _refuse_meta(model)
    keep = everywhere or mesh.whole.rank == 0
    wholes: dict[int, Tensor] = {}
    drifted: dict[str, float] = {}
    for name, (parameter, placement) in placed(model).items():
        blocks = gather_blocks(parameter, mesh)
        if placement.replicated and (apart := _spread(blocks)):
            drifted[name] = apart
        if keep:
            wholes[id(parameter)] = placement.join(blocks)
    # Not earlier: every rank must take part in the gathers.
    if drifted:
        name, apart = max(drifted.items(), key=lambda item: item[1])
        raise CheckpointError(
            f"{len(drifted)} parameters that all rows hold differ between the rows of the mesh: {name} by up to "
            f"{apart:.3g} of its largest value. All rows must make the same steps. Clip gradients with "
            "thinwire.tensor2d.clip_gradient_norm_, draw noise from generators with the same seed, and use one "
            "learning rate on all ranks; torch.save of the state dict saves each rank's blocks unchanged"
        )
    if not keep:
        return {}
    names = {name: wholes[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    return {
        name: names[name] if name in names else value.detach().clone()
        for name, value in model.state_dict().items()
        if name not in _dropout_counters(model)
    }


def gather_blocks(x: Tensor, mesh: Mesh2D) -> dict[Place, Tensor]:
    """Gather the blocks of all ranks; a collective call."""
    across = torch.stack(mesh.along_row.all_gather(x.detach().contiguous()).wait())
    down = mesh.along_column.all_gather(across).wait()
    places = [(i, j) for i in range(mesh.rows) for j in range(mesh.columns)]
    return {Place(i, j, mesh.rows, mesh.columns): down[i][j] for i, j in places}


def _spread(blocks: Mapping[Place, Tensor]) -> float:
    """Return the largest relative difference between rows; 0 if rounding explains it."""
    largest = 0.0
    for place, x in blocks.items():
        first = blocks[place._replace(row=0)]
        apart = torch.where((x == first) | (x.isnan() & first.isnan()), 0, (x - first).abs()).nan_to_num(torch.inf)
        if apart.any():
            largest = max(largest, float((apart / torch.maximum(x.abs().max(), first.abs().max())).nan_to_num(1).max()))
    precision = torch.finfo(next(iter(blocks.values())).dtype).eps
    return largest if largest > precision**0.5 else 0.0


@torch.no_grad()
def load_whole_(model: nn.Module, state: Mapping[str, Tensor], mesh: Mesh2D) -> None:
    """Load this rank's blocks from a serial model's state dict.

    Args:
        model: a model on the mesh.
        state: whole tensors by the serial model's names.
        mesh: the ranks.

    Raises:
        CheckpointError: a name is missing, a tensor has another shape, or the model is on the meta device. The model is
            then unchanged.
    """
    # All checks come before the first copy, so that an error leaves the model unchanged.
    _refuse_meta(model)
    found = placed(model)
    for name, (_, placement) in found.items():
        _check_shape(name, placement.shape, state[name].shape if name in state else None)
    counters = _dropout_counters(model)
    buffers = {name: x for name, x in model.named_buffers() if name in state and name not in counters}
    for name, buffer in buffers.items():
        _check_shape(name, tuple(buffer.shape), tuple(state[name].shape))
    for name, (parameter, placement) in found.items():
        parameter.copy_(placement.cut(state[name], mesh.place))
    for name, buffer in buffers.items():
        buffer.copy_(state[name])


@torch.no_grad()
def read_safetensors_(
    model: nn.Module,
    paths: str | Path | Iterable[str | Path],
    mesh: Mesh2D,
    *,
    device: str = "cpu",
    rename: Callable[[str], str] | None = None,
) -> int:
    """Read only this rank's blocks from a serial model's files; return the number of bytes read.

    Parameters on the meta device are created on `device`. Buffers on the meta device are created there too: they are
    read from the files, or recomputed if they belong to a rotary embedding of `transformers`. Other buffers are not
    read.

    Args:
        model: a model on the mesh.
        paths: safetensors files; the tensors may be spread over several.
        mesh: the ranks.
        device: the device of parameters that are on the meta device.
        rename: maps a parameter's name to its name in the files; None if they are equal.

    Raises:
        CheckpointError: a name is missing, a tensor has another shape, or a buffer on the meta device has no values.
        ConfigError: a path is a URL.
    """
    from safetensors import safe_open

    every = [paths] if isinstance(paths, str | Path) else paths
    files = [safe_open(str(local_path(path)), framework="pt") for path in every]
    where: dict[str, Any] = {name: file for file in files for name in file.keys()}  # noqa: SIM118
    nbytes = _fill_meta_buffers_(model, where, device, rename or str)
    for name, (parameter, placement) in placed(model).items():
        source = rename(name) if rename else name
        part = where[source].get_slice(source) if source in where else None
        _check_shape(source, placement.shape, None if part is None else tuple(part.get_shape()))

        def read(*slices: slice, part: Any = part) -> Tensor:
            nonlocal nbytes
            with torch.device("cpu"):  # not the default device, as safetensors would
                piece: Tensor = part[slices]
            nbytes += piece.numel() * piece.element_size()
            return piece

        home = parameter
        if parameter.is_meta:
            home = torch.empty_like(parameter, device=device)
        home.copy_(placement.read(read, mesh.place, like=home))
        if parameter.is_meta:
            made = nn.Parameter(home, requires_grad=parameter.requires_grad)
            mark_gradients_(made, placement, mesh)
            _replace(model, parameter, made)
    return nbytes


def _fill_meta_buffers_(model: nn.Module, where: Mapping[str, Any], device: str, rename: Callable[[str], str]) -> int:
    """Fill every buffer on the meta device; return the number of bytes read.

    Raises:
        CheckpointError: a buffer is not in the files and cannot be recomputed; the model is then unchanged.
    """
    found: dict[str, Tensor] = {}
    nbytes, unknown = 0, list[str]()
    for path, module in model.named_modules():
        absent = {name: x for name, x in module.named_buffers(recurse=False) if x.is_meta}
        made: dict[str, Tensor] = {}
        if absent and type(module).__name__.endswith("RotaryEmbedding") and hasattr(module, "config"):
            with torch.device(device):
                made = dict(type(module)(module.config).named_buffers(recurse=False))
        for name, buffer in absent.items():
            full = f"{path}.{name}".lstrip(".")
            if rename(full) in where:
                with torch.device("cpu"):
                    value: Tensor = where[rename(full)].get_tensor(rename(full))
                _check_shape(full, tuple(buffer.shape), tuple(value.shape))
                nbytes += value.nbytes
            elif name in made:
                value = made[name]
            else:
                unknown.append(full)
                continue
            found[full] = value.to(device=device, dtype=buffer.dtype)
    if unknown:
        raise CheckpointError(
            f"buffers on the meta device: {', '.join(unknown)}. They are not in the files, so their values are "
            "unknown. Compute them and assign them to their modules before read_safetensors_, or build the model "
            "outside "
            'torch.device("meta")'
        )
    for full, value in found.items():
        path, _, name = full.rpartition(".")
        setattr(model.get_submodule(path), name, value)
    return nbytes


def _refuse_meta(model: nn.Module) -> None:
    absent = [name for name, x in (*model.named_parameters(), *model.named_buffers()) if x.is_meta]
    if absent:
        raise CheckpointError(
            f"{len(absent)} tensors are on the meta device, such as {absent[0]}. They have no values. Use "
            'read_safetensors_, which creates them, or call model.to_empty(device="cpu") first'
        )


def write_whole(model: nn.Module, path: str | Path, mesh: Mesh2D) -> None:
    """Write the serial model to one safetensors file; a collective call, in which rank 0 writes.

    Tied tensors are written once, under their first name.

    Raises:
        CheckpointError: rank 0 cannot write it; raised on all ranks. An existing file is unchanged.
        ConfigError: the path is a URL.
    """
    path = local_path(path)
    state = whole_state(model, mesh, everywhere=False)

    def write() -> None:
        from safetensors.torch import save

        # The format refuses tensors that share memory.
        first = {value.data_ptr(): name for name, value in reversed(state.items())}
        kept = {name: value.contiguous() for name, value in state.items() if first[value.data_ptr()] == name}
        write_atomically(path, save(kept, metadata={"format": "pt"}))

    on_rank_0(write, path, mesh)


def on_rank_0(write: Callable[[], Any], path: Path, mesh: Mesh2D) -> None:
    """Write a file or folder on rank 0; a collective call, after which every rank may read it.

    Raises:
        CheckpointError: rank 0 cannot write it; raised on all ranks.
    """
    failure: Exception | None = None
    if mesh.whole.rank == 0:
        try:
            write()
        except Exception as error:
            failure = error
    # Groups with only NCCL accept no CPU tensors.
    failed = torch.tensor([float(failure is not None)], dtype=torch.float32, device=mesh.whole.check_device)
    if mesh.whole.all_reduce_(failed).wait().item():
        why = f" ({failure})" if failure else ". See its error"
        raise CheckpointError(f"{path}: rank 0 of the mesh cannot write it{why}") from failure


def _check_shape(name: str, wanted: tuple[int, ...], found: tuple[int, ...] | None) -> None:
    if found is None:
        raise CheckpointError(f"the checkpoint has no tensor {name}. Load a checkpoint of the same model")
    if tuple(found) != wanted:
        raise CheckpointError(
            f"{name} has shape {tuple(found)} in the checkpoint: must be {wanted}. Make the model "
            "with the sizes that were saved"
        )


def _dropout_counters(model: nn.Module) -> set[str]:
    """Return the names of dropout counters, which serial models do not have."""
    return {f"{name}.draws".lstrip(".") for name, module in model.named_modules() if isinstance(module, Dropout2D)}


def _replace(model: nn.Module, old: Tensor, new: nn.Parameter) -> None:
    """Replace a parameter everywhere in the model, including tied uses."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter is old:
                setattr(module, name, new)
