# SPDX-License-Identifier: Apache-2.0
"""Gradients of blocks, for which torch's functions over all gradients cover the whole mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.core.torch_internals import foreach_norm, plain_tensors, unscale_kernel
from thinwire.errors import ConfigError
from thinwire.tensor2d.mesh import Mesh2D
from thinwire.tensor2d.placement import Placement
from thinwire.tensor2d.products import accumulation_dtype


def mark_gradients_(parameter: nn.Parameter, placement: Placement, mesh: Mesh2D) -> None:
    """Make every gradient of a parameter a `BlockGradient`."""
    # Parameters that all rows hold are counted in the first row.
    counted = not (placement.replicated and mesh.row > 0)
    if mesh.whole.size > 1:
        trained = parameter.requires_grad
        parameter.requires_grad_(True)  # a frozen parameter accepts no hooks, and may be trained later
        parameter.register_post_accumulate_grad_hook(partial(_mark, mesh, counted))
        parameter.requires_grad_(trained)


def _mark(mesh: Mesh2D, counted: bool, parameter: Tensor) -> None:
    if type(parameter.grad) is Tensor:
        parameter.grad = parameter.grad.as_subclass(BlockGradient).of(mesh, counted)


class BlockGradient(Tensor):
    """This rank's block of a gradient: a plain tensor, except for norms and the overflows of a GradScaler.

    `torch.nn.utils.clip_grad_norm_` computes the norm of each gradient, and then the norm of these norms. The latter is
    computed over the mesh by one all-reduce. Any other use of the norm of one block raises an error: it would differ
    between ranks, and so would the replicas of parameters in the rows. Similarly, an overflow on any rank makes
    `torch.amp.GradScaler` skip the step on all ranks.
    """

    mesh: Mesh2D
    counted: bool

    def of(self, mesh: Mesh2D, counted: bool) -> BlockGradient:
        """Set the mesh, and whether norms count this block; return the gradient."""
        self.mesh, self.counted = mesh, counted
        return self

    def marking(self, other: Tensor) -> BlockGradient:
        """Return another tensor as a gradient of the same block."""
        return other.as_subclass(BlockGradient).of(self.mesh, self.counted)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute like plain tensors, with norms over the mesh."""
        with plain_tensors():
            found = func(*args, **(kwargs or {}))
            if func is unscale_kernel and isinstance(args[0][0], BlockGradient):
                args[0][0].mesh.whole.all_reduce_(args[1]).wait()
            if func in _NORMS and isinstance(args[0], BlockGradient) and not found.dim():
                return _marked_norm(found, args[0])
            if func is foreach_norm:
                return [
                    _marked_norm(norm, block) if isinstance(block, BlockGradient) else norm
                    for norm, block in zip(found, args[0], strict=True)
                ]
            if func in _SAME and isinstance(args[0], BlockGradient):
                return args[0].marking(found)
        return found


class BlockNorm(Tensor):
    """Norms of blocks; only their norm over the whole mesh may be used."""

    mesh: Mesh2D

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Collect norms, and compute the norm of all of them.

        Raises:
            ConfigError: the norms are used in any other way.
        """
        named = kwargs or {}
        with plain_tensors():
            if func is Tensor.to or func is torch.stack:
                norms = [args[0]] if func is Tensor.to else args[0]
                found = func(*args, **named).as_subclass(BlockNorm)
                found.mesh = next(norm.mesh for norm in norms if isinstance(norm, BlockNorm))
                return found
            if func in _NORMS and args[0].dim():
                return _over_mesh(args[0], float(args[1] if len(args) > 1 else named.get("ord", named.get("p", 2.0))))
            if func in _HARMLESS:
                return func(*args, **named)
        raise ConfigError(
            f"{getattr(func, '__name__', func)} of the norm of a gradient: on a mesh this rank only knows the norm of "
            "its own block, and ranks would differ. Use thinwire.tensor2d.gradient_norm(model, mesh), or clip with "
            "clip_gradient_norm_(model, max_norm, mesh) or torch.nn.utils.clip_grad_norm_ over all parameters"
        )


def _marked_norm(norm: Tensor, block: BlockGradient) -> BlockNorm:
    found = (norm if block.counted else torch.zeros_like(norm)).as_subclass(BlockNorm)
    found.mesh = block.mesh
    return found


def _over_mesh(norms: BlockNorm, order: float) -> Tensor:
    """Return the norm of the norms of all blocks of the mesh, with the same bits on all ranks."""
    own, mesh = norms.as_subclass(Tensor), norms.mesh
    exact = own.to(accumulation_dtype(own.dtype))
    if order <= 0:
        raise ConfigError(f"a gradient norm of order {order} on a mesh: the order must be positive. Use 2.0 or inf")
    if order == torch.inf:
        return torch.stack(mesh.whole.all_gather(exact.amax().unsqueeze(0)).wait()).amax().to(own.dtype)
    total = exact.pow(order).sum()
    # Rows first, then columns, as in `gradient_norm`.
    mesh.along_row.all_reduce_(total).wait()
    mesh.along_column.all_reduce_(total).wait()
    return total.pow(1 / order).to(own.dtype)


_TENSOR: Any = Tensor
_NORMS: tuple[Any, ...] = (torch.linalg.vector_norm, torch.linalg.norm, torch.norm, _TENSOR.norm)
_SAME: tuple[Any, ...] = (_TENSOR.data.__get__, _TENSOR.detach, _TENSOR.to, _TENSOR.float, _TENSOR.double)
_HARMLESS: tuple[Any, ...] = (
    *(_TENSOR.device.__get__, _TENSOR.dtype.__get__, _TENSOR.shape.__get__),
    *(_TENSOR.dim, _TENSOR.__repr__),
)
