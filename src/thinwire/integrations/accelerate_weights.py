# SPDX-License-Identifier: Apache-2.0
"""An attached model's weights for an accelerator, which takes tensors in one piece of memory for one tied tensor."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from thinwire.integrations.session import plain_model
from thinwire.worker.worker import Worker, internals_of


class _Copies:
    """In the place of `accelerator.get_state_dict`: of attached models it returns copies of the tensors.

    Args:
        method: the accelerator's own.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        self.models: list[nn.Module] = []

    def __call__(self, model: nn.Module, *args: Any, **more: Any) -> Any:
        """The weights by name."""
        found = self._method(model, *args, **more)
        return copies_of(found) if any(plain_model(model) is each for each in self.models) else found


def copies_of(state: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Tensors by name, each in memory of its own; those that are tied are one copy."""
    made: dict[Any, Tensor] = {}

    def copy(x: Any) -> Any:
        return made.setdefault((x.data_ptr(), x.shape, x.stride()), x.detach().clone()) if isinstance(x, Tensor) else x

    return OrderedDict((name, copy(x)) for name, x in state.items())


def copy_weights(accelerator: Any, worker: Worker) -> None:
    """Let `get_state_dict` copy a worker's weights until it detaches, and so `save_model` and `save_state`.

    They leave out all but one of the tensors in one vector, as if these were tied.

    Args:
        accelerator: Accelerate's.
        worker: of a model that it has prepared.
    """
    copies = vars(accelerator).get("get_state_dict")
    if not isinstance(copies, _Copies):
        accelerator.get_state_dict = copies = _Copies(accelerator.get_state_dict)
    copies.models.append(worker.model)

    def remove() -> None:
        copies.models.remove(worker.model)
        if not copies.models:
            vars(accelerator).pop("get_state_dict", None)

    internals_of(worker).undo.callback(remove)
