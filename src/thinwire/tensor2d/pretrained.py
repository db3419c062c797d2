# SPDX-License-Identifier: Apache-2.0
"""Models of `transformers` on a mesh: their built-in losses, and `save_pretrained`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.core.storage.files import local_path
from thinwire.errors import ConfigError
from thinwire.tensor2d.collectives import sum_over_columns, sum_over_rows
from thinwire.tensor2d.loss import cross_entropy_2d
from thinwire.tensor2d.mesh import Mesh2D
from thinwire.tensor2d.state import on_rank_0, whole_state

Loss = Callable[..., Any]
_LABELS = ("labels", "start_positions", "end_positions", "next_sentence_label")
_INSTEAD = (
    "Set its loss_function to None before parallelize_2d, call the model without labels, and compute the loss from its "
    "logits, for example with cross_entropy_2d"
)


def split_losses(model: nn.Module, mesh: Mesh2D) -> Iterator[tuple[nn.Module, Loss]]:
    """Yield every module of `transformers` with a loss, and the function that computes it from split logits.

    Raises:
        ConfigError: a loss has no counterpart on a mesh.
    """
    for name, module in model.named_modules():
        if not hasattr(type(module), "loss_function") or not _calls_loss_function(type(module)):
            continue
        serial: Any = module.loss_function
        if serial is None:
            yield module, _refuse_labels
            continue
        loss = _LOSSES.get(serial.__name__) if getattr(serial, "__module__", "").startswith("transformers.") else None
        if loss is None and mesh.whole.size == 1:
            continue  # its logits are whole
        if loss is None:
            raise ConfigError(
                f"{name or 'the model'} ({type(module).__name__}) has the loss function "
                f"{getattr(serial, '__name__', type(serial).__name__)}, which needs whole logits, but on a "
                f"{mesh.rows}x{mesh.columns} mesh each rank has a block of them. {_INSTEAD}"
            )
        yield module, partial(loss, mesh)


def labels_guards(model: nn.Module, mesh: Mesh2D) -> list[Any]:
    """Refuse labels in models that compute a loss in their own forward; return the handles of the hooks."""

    def refuse(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = inspect.signature(type(module).forward).bind_partial(module, *args, **kwargs).arguments
        given |= given.get("kwargs", {})
        if any(given.get(name) is not None for name in _LABELS):
            raise ConfigError(
                f"{type(module).__name__} computes its loss in its own forward, from whole logits, but on a "
                f"{mesh.rows}x{mesh.columns} mesh each rank has a block of them. Call the model without labels, and "
                "compute the loss from its logits, for example with cross_entropy_2d"
            )

    return [
        module.register_forward_pre_hook(refuse, with_kwargs=True)
        for module in model.modules()
        if mesh.whole.size > 1 and hasattr(type(module), "loss_function") and not _calls_loss_function(type(module))
    ]


def whole_savers(model: nn.Module, mesh: Mesh2D) -> Iterator[tuple[nn.Module, Callable[..., None]]]:
    """Yield the model, if it has `save_pretrained`, with a version that saves the whole model."""
    save = getattr(model, "save_pretrained", None)
    if callable(save) and mesh.whole.size > 1:
        yield model, partial(_save_whole, model, mesh, save)


def _save_whole(
    model: nn.Module, mesh: Mesh2D, save: Callable[..., Any], save_directory: str | Path, **settings: Any
) -> None:
    """Save the whole model like `save_pretrained`; a collective call, in which rank 0 writes."""
    if settings.pop("state_dict", None) is not None:
        raise ConfigError("save_pretrained(state_dict=...): a split model gathers its own state. Leave state_dict out")
    folder = local_path(save_directory)
    state = whole_state(model, mesh, everywhere=False)
    on_rank_0(lambda: save(folder, **settings, state_dict=state), folder, mesh)


def _calls_loss_function(kind: type) -> bool:
    """Return True if the forward of a class or a base class uses `self.loss_function`."""
    forwards = (inspect.unwrap(vars(base)["forward"]) for base in kind.__mro__ if "forward" in vars(base))
    return any("loss_function" in forward.__code__.co_names for forward in forwards if hasattr(forward, "__code__"))


# -- the losses, with the arguments that `transformers` gives them -----------------------------------------------------


def _refuse_labels(*_: Any, **__: Any) -> Tensor:
    raise ConfigError(
        "labels were passed to a model whose loss_function is None. Call it without labels, and compute the loss from "
        "its logits, for example with cross_entropy_2d"
    )


def _causal(mesh: Mesh2D, logits: Tensor, labels: Tensor, vocab_size: int, **settings: Any) -> Tensor:
    """Compute a causal loss: each position predicts the next token, so the last one has no target."""
    shifted = settings.pop("shift_labels", None)
    if shifted is None:
        shifted = F.pad(labels, (0, 1), value=settings.get("ignore_index", -100))[..., 1:].contiguous()
    return _masked(mesh, logits, shifted, vocab_size, **settings)


def _masked(
    mesh: Mesh2D,
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    **_: Any,
) -> Tensor:
    how = "mean" if num_items_in_batch is None else "sum"
    total = cross_entropy_2d(logits, labels, mesh, vocabulary=vocab_size, ignore_index=ignore_index, reduction=how)
    return total if num_items_in_batch is None else total / num_items_in_batch


def _classification(mesh: Mesh2D, labels: Tensor, pooled_logits: Tensor, config: Any, **settings: Any) -> Tensor:
    """Compute a classification loss; the configuration or the labels determine the problem type."""
    settings.pop("logits", None)  # of each token
    count = config.num_labels
    if config.problem_type is None:
        single = count > 1 and labels.dtype in (torch.int64, torch.int32)
        several = "single_label_classification" if single else "multi_label_classification"
        config.problem_type = "regression" if count == 1 else several
    if config.problem_type == "single_label_classification":
        return _masked(mesh, pooled_logits, labels.view(-1), count, **settings)
    compared = {"regression": F.mse_loss, "multi_label_classification": F.binary_cross_entropy_with_logits}
    if config.problem_type not in compared:
        raise ConfigError(f"config.problem_type={config.problem_type!r} is unknown. {_INSTEAD}")
    labels = labels.reshape(len(pooled_logits), -1)
    if labels.shape[1] != count:
        raise ConfigError(
            f"labels have {labels.shape[1]} values per sample: must be {count}, config.num_labels. Change one of them"
        )
    # The logits of this column; the last columns may contain padding.
    width = pooled_logits.shape[1]
    own = labels[:, mesh.column * width : (mesh.column + 1) * width]
    total = compared[config.problem_type](pooled_logits[:, : own.shape[1]], own.to(pooled_logits), reduction="sum")
    return sum_over_rows(sum_over_columns(total, mesh), mesh) / (labels.numel() * mesh.rows)


def _token_classification(mesh: Mesh2D, logits: Tensor, labels: Tensor, config: Any, **settings: Any) -> Tensor:
    return _masked(mesh, logits, labels, config.num_labels, **settings)


_LOSSES: dict[str, Loss] = {
    "ForCausalLMLoss": _causal,
    "ForMaskedLMLoss": _masked,
    "ForSequenceClassificationLoss": _classification,
    "ForTokenClassification": _token_classification,
}
"""Losses by the names of the serial ones, so that `transformers` need not be installed."""
