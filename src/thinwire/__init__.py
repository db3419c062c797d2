# SPDX-License-Identifier: Apache-2.0
"""thinwire: train PyTorch models over thin wires.

    worker = thinwire.attach(model, optimizer, thinwire.SlowMo(period=12))

and the training loop stays as it was. See `attach`.

Public names are imported when they are first used, so that the command line need not wait for torch. `__init__.pyi`
says where each is defined, to type checkers and to this module; `python tools/write_stub.py` writes it.
"""

from pathlib import Path

from thinwire._version import __version__
from thinwire.core.lazy import importer, public_names
from thinwire.worker import annexes as _annexes

_HOME = public_names(Path(__file__).with_suffix(".pyi"))
__all__ = ["__version__", *_HOME]  # pyright: ignore[reportUnsupportedDunderAll]
__getattr__ = importer(__name__, _HOME)


def _load_chooser() -> _annexes.Chooser:
    """Import the planner, for `attach(..., "auto")`."""
    from thinwire.planning.plan.auto import choose_for

    return choose_for


def _load_enter() -> _annexes.Enter:
    """Import the elastic package, for `attach(..., elastic=True)`."""
    from thinwire.elastic.rounds import enter

    return enter


def _load_open_run() -> _annexes.OpenRun:
    """Import the elastic package, for `attach(..., rendezvous=URL)`."""
    from thinwire.elastic.fleet import fleet_in_bucket

    return fleet_in_bucket


_annexes.register(chooser=_load_chooser, enter=_load_enter, open_run=_load_open_run)


def __dir__() -> list[str]:
    """Return the public names."""
    return list(__all__)
