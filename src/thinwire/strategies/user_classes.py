# SPDX-License-Identifier: Apache-2.0
"""What other packages define for recipes, named as `module:Class`."""

from __future__ import annotations

import sys
import traceback
from importlib import import_module
from pathlib import Path
from types import ModuleType

from thinwire.errors import ConfigError
from thinwire.registry import REGISTERED


def user_class(name: str, where: str, *, imports: bool) -> type:
    """The registered class that `module:Class` names.

    Args:
        name: `module:Class`.
        where: how errors begin.
        imports: whether the module may be imported if it is not yet.

    Raises:
        ConfigError: the module cannot or may not be imported, or has no such class that is registered.
    """
    if name in REGISTERED:
        return REGISTERED[name]
    home, _, short = name.partition(":")
    module = user_module(name, where, imports=imports)
    found = REGISTERED.get(name) or vars(module).get(short)
    offered = {each: kind for each, kind in vars(module).items() if isinstance(kind, type) and _is_registered(kind)}
    if isinstance(found, type) and _is_registered(found):
        return found
    place = f"{home} ({getattr(module, '__file__', None) or 'built in'})"
    has = f"it has {', '.join(sorted(offered))}" if offered else "it has no registered class"
    if found is None:
        raise ConfigError(f"{where}: {place} has no {short!r}; {has}")
    what = "class that is not registered" if isinstance(found, type) else type(found).__name__
    raise ConfigError(f"{where}: {short!r} in {place} is a {what}; put @thinwire.registered above the class ({has})")


def user_module(name: str, where: str, *, imports: bool) -> ModuleType:
    """The module of `module:Name`, imported if it is not yet.

    Raises:
        ConfigError: it cannot or may not be imported.
    """
    home = name.partition(":")[0]
    if not imports and home not in sys.modules and home.partition(".")[0] != "thinwire":
        raise ConfigError(
            f"{where}: {name} is not imported, and a recipe that is read from a file or from another process imports "
            f"nothing; import {home} first, or on the command line repeat the recipe as --strategy"
        )
    return sys.modules.get(home) or _import(home, where)


def _is_registered(kind: type) -> bool:
    return any(kind is each for each in REGISTERED.values())


def _import(name: str, where: str) -> ModuleType:
    """Import a module, from the current folder too, which the path of an installed command does not have."""
    folder = str(Path.cwd())
    if folder not in sys.path and "" not in sys.path:
        # The last place, so that it hides no installed module; kept, for what the module imports later.
        sys.path.append(folder)
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(f"{where}: importing {name} failed: {error} ({_place(error)})") from error
        raise ConfigError(
            f"{where}: there is no module {error.name}, neither installed nor in {folder}; name it as one would import "
            "it, such as my_package.methods:Mine"
        ) from None
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{where}: importing {name} failed: {type(error).__name__}: {error} ({_place(error)})"
        ) from error


def _place(error: BaseException) -> str:
    """The file and line at which an error was raised."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.filename}, line {last.lineno}"
