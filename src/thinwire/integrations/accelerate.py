# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Accelerate: `worker = attach(accelerator, model, optimizer, "DiLoCo(period=32)")` after `prepare`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import chain, count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from torch import Tensor, nn

from thinwire.core.validation import check_range
from thinwire.errors import CheckpointError
from thinwire.integrations.loggers import log_to
from thinwire.integrations.session import FOLDER, Session, needs, plain_model
from thinwire.methods.strategies.base import Strategy
from thinwire.worker.checkpoint import together
from thinwire.worker.worker import Worker, internals_of

with needs("accelerate"):
    from accelerate import Accelerator


class _Loaded:
    """Load the worker's state after everything else that an accelerator loads."""

    def __init__(self, session: Session, place: str) -> None:
        self._session = session
        self.place = place
        self.folder = ""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: every rank's state is a file of its own."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's state."""
        self._session.load(self.folder)


def _check_saved(folder: str, place: str) -> None:
    if not Path(folder, place).is_dir():
        raise CheckpointError(
            f"{folder}: has no subfolder {place!r} with the workers' own state, so it was saved without a worker. Call "
            "load_state before attach"
        )


class _Copies:
    """Replace `accelerator.get_state_dict`, and return copies of the tensors of attached models.

    Args:
        method: the accelerator's own.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        self.models: list[nn.Module] = []

    def __call__(self, model: nn.Module, *args: Any, **more: Any) -> Any:
        """Return the weights by name."""
        found = self._method(model, *args, **more)
        return _copies_of(found) if any(plain_model(model) is each for each in self.models) else found


def _copies_of(state: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return the tensors with memory of their own, by name; tied ones share one copy."""
    made: dict[Any, Tensor] = {}

    def copy(x: Any) -> Any:
        return made.setdefault((x.data_ptr(), x.shape, x.stride()), x.detach().clone()) if isinstance(x, Tensor) else x

    return OrderedDict((name, copy(x)) for name, x in state.items())


def _copy_weights(accelerator: Any, worker: Worker) -> None:
    """Let `get_state_dict` copy a worker's weights until it detaches, and so `save_model` and `save_state`.

    Otherwise they take the tensors of one vector for tied ones, and leave out all but one.

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


def attach(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,
    strategy: Strategy | str,
    *,
    log_every: int = 10,
    **options: Any,
) -> Worker:
    """Train a prepared model with a strategy; call it after `accelerator.prepare`.

    The exchange of DistributedDataParallel, in which the accelerator puts the model, is turned off. Then
    `accelerator.save_state(folder)` saves the weights that all workers agree on and every rank's own state,
    `accelerator.load_state(folder)` resumes bit for bit, `accelerator.accumulate(model)` sends one gradient per step,
    and bytes and waits go to the trackers that `init_trackers` has opened. Evaluate inside `worker.consensus()`.
    There `accelerator.save_model(model, folder)` writes the weights that all agree on. If you train several models,
    attach to each, in the same order when you resume.

    Args:
        accelerator: the `Accelerator`.
        model: as `prepare` returned it.
        optimizer: as `prepare` returned it.
        strategy: the recipe, as an object or as text.
        log_every: steps from one record of bytes and waits to the next.
        options: more for `thinwire.attach`, such as `seed` or `nonfinite`.

    Raises:
        ConfigError: as `thinwire.attach` does.
        CheckpointError: `load_state` of a folder that was saved without a worker, on all ranks; nothing is loaded.
    """
    check_range("log_every", log_every, "1..", "10 is usual")  # on all ranks, and not on the one alone that logs
    # Attached in the same order, each of several models finds its own state again.
    taken = {each.place for each in accelerator._custom_objects if isinstance(each, _Loaded)}  # pyright: ignore[reportPrivateUsage]
    place = next(each for each in chain((FOLDER,), (f"{FOLDER}-{i}" for i in count(2))) if each not in taken)
    session = Session(model, optimizer, strategy, options, place=place, syncs=lambda: bool(accelerator.sync_gradients))
    worker, loaded = session.worker, _Loaded(session, place)

    def before_save(models: list[nn.Module], weights: list[Mapping[str, Any]], folder: str) -> None:
        with worker.consensus() as agreed:
            for i, each in enumerate(models):
                if plain_model(each) is agreed and i < len(weights):
                    weights[i] = cast(dict[str, Any], accelerator.get_state_dict(each, unwrap=False))
        session.save(folder)

    def before_load(models: list[nn.Module], folder: str) -> None:
        # Before anything is loaded: of such a folder the accelerator would take the optimizer's state, and not this.
        together(internals_of(worker), Path(folder), lambda: _check_saved(folder, place))
        # Its parameters are parts of one vector, which safetensors does not load into; the worker's own state has them.
        models[:] = [each for each in models if plain_model(each) is not worker.model]
        loaded.folder = folder

    _copy_weights(accelerator, worker)
    internals_of(worker).undo.callback(accelerator.register_save_state_pre_hook(before_save).remove)
    internals_of(worker).undo.callback(accelerator.register_load_state_pre_hook(before_load).remove)
    accelerator.register_for_checkpointing(loaded)
    internals_of(worker).undo.callback(accelerator._custom_objects.remove, loaded)  # pyright: ignore[reportPrivateUsage]
    if accelerator.is_main_process:
        trackers: Any = SimpleNamespace(log=lambda figures, step: accelerator.log(dict(figures), step=step))
        log_to(worker, trackers, every=log_every)
    return worker
