# SPDX-License-Identifier: Apache-2.0
"""The task of a run: a built-in one, or one made of a user's functions that settings name as `module:function`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError
from thinwire.lab.runs.settings import Settings
from thinwire.lab.tasks import Task, load
from thinwire.lab.tasks.own import OwnFunctions, check_own, own_task
from thinwire.methods.strategies.user_classes import import_from_here

_DECIDED = {
    "task": "the model and its data are the task",
    "model": "sizes are those of a built-in task's model",
    "batch_size": "--data makes the batches",
    "split": "--data divides the data itself",
    "coreset": "--data makes the batches, and has no numbered examples",
    "tensor_parallel": "only built-in language models are split; call thinwire.parallelize_2d in a program of yours",
}
_SIGNATURES = {"--model": "model()", "--data": "data(rank, size, seed)", "--loss": "loss(outputs, targets)"}


def load_task(settings: Settings, *, imports: bool = False) -> Task:
    """Return the task that settings describe.

    Args:
        settings: of the run.
        imports: whether modules of a user's functions may be imported; False where settings come from a file, and the
            modules were imported before.

    Raises:
        ConfigError: a function or a file is missing.
    """
    if settings.own_model is None:
        return load(settings.task, data=Path(settings.data) if settings.data else None)
    functions = own_functions(settings.own_model, settings.data, settings.own_loss, imports=imports)
    return own_task(functions, size=settings.copies, seed=settings.seed)


def own_functions(model: str, data: str | None, loss: str | None, *, imports: bool = True) -> OwnFunctions:
    """Return the functions that these names stand for.

    Args:
        model: `module:function`.
        data: likewise.
        loss: likewise; None where the model returns its loss.
        imports: whether their modules may be imported.

    Raises:
        ConfigError: a name is missing, or stands for nothing that can be called.
    """
    if data is None:
        raise ConfigError(
            f"--model {model}: needs --data MODULE:FUNCTION too, for a function {_SIGNATURES['--data']} that returns "
            "this worker's batches"
        )
    return OwnFunctions(
        model=find_function("--model", model, imports=imports),
        data=find_function("--data", data, imports=imports),
        loss=None if loss is None else find_function("--loss", loss, imports=imports),
        model_name=model,
        data_name=data,
        loss_name=loss,
    )


def task_of(given: dict[str, Any]) -> Task:
    """Return the task of the fields of `Settings` that were given, which are completed in place.

    It is a built-in one, or is made of a user's functions, after one batch was tried.

    Raises:
        ConfigError: a task or a file is missing, something else was given that the functions decide, or one of them
            cannot be used.
    """
    name, data = given.get("own_model"), given.get("data")
    if name is None:
        if given.get("own_loss") is not None:
            raise ConfigError(f"--loss {given['own_loss']}: belongs to a model of yours. Add --model MODULE:FUNCTION")
        given["task"] = given.get("task") or "text"
        if data is None:
            return load(given["task"])
        # Workers may start in another folder.
        given["data"] = str(Path(data).absolute())
        return load(given["task"], data=Path(data))
    if ":" not in name and data is None:
        raise ConfigError(
            f"--model {name}: must be MODULE:FUNCTION, a function of yours, with --data. The size of a task's model "
            f"is --model-size {name}"
        )
    for key, reason in _DECIDED.items():
        if given.get(key) is not None and (key, given[key]) != ("split", "iid"):
            option = {"model": "model-size"}.get(key, key.replace("_", "-"))
            raise ConfigError(f"--{option} {given[key]} with --model {name}: {reason}. Leave it out")
    given["data"] = None if data is None else str(data)
    functions = own_functions(name, given["data"], given.get("own_loss"))
    task = own_task(functions, size=given.get("workers", 1), seed=given.get("seed", 0))
    # Of held-out data of a user's own, all is evaluated unless a limit is given.
    given.update(task=name, batch_size=check_own(task, seed=given.get("seed", 0)))
    given.setdefault("eval_limit", None)
    return task


def modules_of_functions(settings: Settings) -> list[str]:
    """Return the modules that another process must import to find the functions of these settings."""
    names = [settings.own_model, settings.data, settings.own_loss] if settings.own_model is not None else []
    return sorted({name.partition(":")[0] for name in names if name is not None})


def find_function(option: str, name: str, *, imports: bool) -> Callable[..., Any]:
    """Return what `module:function` names; the module is looked for in the current folder too.

    Args:
        option: for errors.
        name: `module:function`; the function may be anything that can be called.
        imports: whether the module may be imported if it is not yet.

    Raises:
        ConfigError: there is no such module or function, or it cannot be called.
    """
    where = f"{option} {name}"
    module_name, colon, attribute = name.partition(":")
    example = f"{option} train:{option.removeprefix('--')}, for {_SIGNATURES[option]} in train.py"
    if not colon or not attribute or not module_name:
        raise ConfigError(f"{where}: must be MODULE:FUNCTION, such as {example}")
    if module_name.endswith(".py") or "/" in module_name:
        right = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise ConfigError(f"{where}: name the module as one would import it: {option} {right}:{attribute}")
    if not imports and module_name not in sys.modules:
        raise ConfigError(
            f"{where}: the name comes from a file, and files import nothing. Give the options of this run again"
        )
    found: Any = sys.modules.get(module_name) or import_from_here(module_name, where, example)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{where}: {module_name} has no {part!r}{_nearest(part, found)}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{where}: is a {type(found).__name__}. It must be a function {_SIGNATURES[option]}")
    if option == "--loss" and isinstance(found, type):
        raise ConfigError(
            f"{where}: is a class, and its instances would be the losses. Name a function, such as "
            "torch.nn.functional:cross_entropy, or an instance in a module of yours"
        )
    return found


def _nearest(name: str, module: Any) -> str:
    known = [each for each in vars(module) if not each.startswith("_")] if hasattr(module, "__dict__") else []
    close = get_close_matches(name, known, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else ""
