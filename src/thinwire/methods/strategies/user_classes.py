# SPDX-License-Identifier: Apache-2.0
"""Import classes of other packages that recipes name as `module:Class`, and check them when they are attached."""

from __future__ import annotations

import sys
import traceback
import warnings
from dataclasses import fields, is_dataclass
from importlib import import_module
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from thinwire.errors import ConfigError
from thinwire.methods.codecs.base import Codec, CodecTraits, draw_key
from thinwire.methods.codecs.feedback import ErrorFeedback
from thinwire.methods.strategies.base import Strategy, Traits
from thinwire.methods.topology.base import Topology
from thinwire.registry import REGISTERED


def user_class(name: str, where: str, *, imports: bool) -> type:
    """Return the registered class `module:Class`.

    Args:
        name: `module:Class`.
        where: the beginning of errors.
        imports: whether the module may be imported if it is not yet.

    Raises:
        ConfigError: the module cannot or may not be imported, or has no such registered class.
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
    raise ConfigError(f"{where}: {short!r} in {place} is a {what} ({has}). Put @thinwire.registered above the class")


def user_module(name: str, where: str, *, imports: bool) -> ModuleType:
    """Return the module of `module:Name`, imported if it is not yet.

    Raises:
        ConfigError: it cannot or may not be imported.
    """
    home = name.partition(":")[0]
    if not imports and home not in sys.modules and home.partition(".")[0] != "thinwire":
        raise ConfigError(
            f"{where}: {name} is not imported, and a recipe that is read from a file or from another process imports "
            f"nothing. Import {home} first, or on the command line repeat the recipe as --strategy"
        )
    return sys.modules.get(home) or import_from_here(home, where)


def _is_registered(kind: type) -> bool:
    return any(kind is each for each in REGISTERED.values())


def import_from_here(name: str, where: str, example: str = "my_package.methods:Mine") -> ModuleType:
    """Import a module, from the current folder too, which the path of an installed command does not have.

    Raises:
        ConfigError: it cannot be imported; the message begins with `where`, and names an example.
    """
    folder = str(Path.cwd())
    if folder not in sys.path and "" not in sys.path:
        # At the end, so that it hides no installed module. It stays, because the module may import more later.
        sys.path.append(folder)
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(f"{where}: importing {name} failed: {error} ({_place(error)})") from error
        raise ConfigError(
            f"{where}: no module {error.name} is installed or in {folder}. Name the module as in an import, such as "
            f"{example}"
        ) from None
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{where}: importing {name} failed: {type(error).__name__}: {error} ({_place(error)})"
        ) from error


def _place(error: BaseException) -> str:
    """Return the file and line at which an error was raised."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.filename}, line {last.lineno}"


_SIZES, _DRAWS = (1, 63, 256), 24
# A codec is biased if the mean is further away than this share of the vector plus this many standard errors.
_MOST_BIAS, _DEVIATIONS = 0.1, 5.0


def check_user_classes(recipe: object, *, fed_back: bool = False) -> None:
    """Check the classes of a recipe that other packages define.

    Strategies, codecs and topologies must be frozen dataclasses. Codecs must encode and decode a few short vectors
    correctly; this changes neither state nor random generators. The result is the same on all ranks.

    Args:
        recipe: a strategy, or a part of one.
        fed_back: whether a codec's error is added to the next message.

    Raises:
        ConfigError: with the class, the rule and the fix.
    """
    if isinstance(recipe, Strategy | Codec | Topology) and not type(recipe).__module__.startswith("thinwire."):
        _check_frozen(recipe)
        if isinstance(recipe, Strategy):
            _check_traits(recipe, Traits)
            _check_hooks(recipe)
        if isinstance(recipe, Codec):
            _check_traits(recipe, CodecTraits)
            _check_codec(recipe, fed_back=fed_back)
    if is_dataclass(recipe):
        feeds_back = recipe.traits.feeds_back if isinstance(recipe, Strategy) else isinstance(recipe, ErrorFeedback)
        inside = fed_back or feeds_back
        for field in fields(recipe):
            value = getattr(recipe, field.name)
            # The codec of a base is the base's own to feed back.
            check_user_classes(value, fed_back=inside and not isinstance(value, Strategy))


def _check_frozen(recipe: object) -> None:
    kind = type(recipe)
    parameters = getattr(kind, "__dataclass_params__", None)
    if parameters is None or not parameters.frozen:
        raise ConfigError(
            f"{kind.__name__} is not a frozen dataclass. Recipes hold hyperparameters only, since state on self is not "
            "saved, and ranks compare recipes by their repr. Put @thinwire.registered above the class, and keep what "
            "changes in the state that the methods are given (r.state of a strategy)."
        )


def _check_traits(recipe: Strategy | Codec, kind: type[Traits | CodecTraits]) -> None:
    """Check that no trait is an attribute or a property of the class, which nothing reads."""
    hyperparameters = {each.name for each in fields(recipe)} if is_dataclass(recipe) else set[str]()
    for name in sorted({each.name for each in fields(kind)} - hyperparameters):
        value = getattr(type(recipe), name, None)
        if isinstance(value, property):
            value = getattr(recipe, name)
        if isinstance(value, bool | int | float | str | tuple | torch.dtype):
            raise ConfigError(
                f"{type(recipe).__name__} has the class attribute {name}={value!r}. Traits are read from `traits` "
                f"only. Return thinwire.{kind.__name__}({name}={value!r}) from `make_traits`."
            )


_FORMER = {
    "consensus": "average(r)",
    "average_": 'average(r, at="outer")',
    "resume_point": 'average(r, at="resume")',
    "end_point": 'average(r, at="end")',
    "holds_average": "the trait rounds=thinwire.Rounds(estimates=...)",
    "averages_at": "the trait rounds=thinwire.Rounds(ends=...)",
    "weight": "the trait rounds=thinwire.Rounds(weight=...)",
    "check_optimizer": "check(size, optimizer)",
    "check_blocks": "the trait needs_whole",
}
"""Hooks of earlier versions, which are not called any more, and their replacements."""


def _check_hooks(strategy: Strategy) -> None:
    """Check that the class has no hooks of earlier versions, and that `check` takes the optimizer."""
    kind = type(strategy)
    hyperparameters = {each.name for each in fields(strategy)} if is_dataclass(strategy) else set[str]()
    for name in sorted(_FORMER.keys() - hyperparameters):
        if hasattr(kind, name):
            raise ConfigError(
                f"{kind.__name__} defines {name}, which is no hook of Strategy and would be ignored. "
                f"Use {_FORMER[name]}."
            )
    try:
        signature(strategy.check).bind(1, None)
    except TypeError:
        raise ConfigError(
            f"{kind.__name__}.check does not take the optimizer. attach calls check(size, optimizer). Add the argument "
            "`optimizer=None`."
        ) from None


def _check_codec(codec: Codec, *, fed_back: bool) -> None:
    """Encode and decode short vectors.

    Raises:
        ConfigError: sizes, dtypes or values do not match the codec's other methods.
    """
    where = f"codec {type(codec).__name__}"
    generator = torch.Generator("cpu").manual_seed(0)
    for n in _SIZES:
        x = torch.randn(n, generator=generator, dtype=torch.float32, device="cpu")
        kept, key = x.clone(), draw_key(0, n)
        try:
            payload, again = (codec.encode(x, {}, key) for _ in range(2))
            y: Any = codec.decode(payload, x, key)
            found, nbytes = payload.numel() * payload.element_size(), codec.nbytes(n)
        except Exception as error:
            raise ConfigError(f"{where}: a vector of {n} elements fails: {type(error).__name__}: {error}") from error
        if payload.dtype != codec.traits.dtype:
            raise ConfigError(
                f"{where}: encode returned {payload.dtype}, but its dtype is {codec.traits.dtype}. Make them equal."
            )
        if found != nbytes:
            raise ConfigError(
                f"{where}: encode returned {found} bytes for {n} elements, but nbytes({n}) is {nbytes}. Receivers "
                "allocate nbytes(n). Make nbytes return the exact size of the payload."
            )
        if not torch.equal(x, kept):
            raise ConfigError(f"{where}: encode changed its input. Encode a copy.")
        if not torch.equal(payload, again):
            raise ConfigError(
                f"{where}: two calls of encode with one key differ. Random numbers must depend on the key alone, such "
                "as those of torch.Generator().manual_seed(key)."
            )
        if (y.shape, y.dtype) != (x.shape, x.dtype) or not bool(y.isfinite().all()):
            raise ConfigError(
                f"{where}: decode returned {list(y.shape)} of {y.dtype} for a vector of {n} elements of {x.dtype}, or "
                "numbers that are not finite. Return a finite tensor like the argument `like`."
            )
    if codec.traits.needs_feedback or fed_back or codec.traits.keeps_residual or not codec.traits.keeps_size:
        return
    x = torch.randn(_SIZES[-1], generator=generator, dtype=torch.float32, device="cpu")
    keys = [draw_key(1, draw) for draw in range(_DRAWS)]
    decoded = torch.stack([codec.decode(codec.encode(x, {}, key), x, key) for key in keys]).double()
    bias = float((decoded.mean(0) - x).norm())
    spread = _DEVIATIONS * float((decoded.var(0).sum() / _DRAWS).sqrt())
    if bias > _MOST_BIAS * float(x.norm()) + spread:
        warnings.warn(
            f"{where} is biased: the mean of {_DRAWS} decoded payloads is {bias / float(x.norm()):.0%} away from the "
            f"vector. Training without error feedback may diverge. Use ErrorFeedback({codec!r}), and "
            "declare thinwire.CodecTraits(needs_feedback=True).",
            UserWarning,
            stacklevel=2,
        )
