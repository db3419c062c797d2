# SPDX-License-Identifier: Apache-2.0
"""Options of a command as TOML: what `--config` reads, and what every run saves in its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thinwire.lab.runs.settings import Settings

NAME = "run.toml"
"""The file in which a command saves the options that it ran with."""
OPTION_NAMES = {"model": "model-size", "own_model": "model", "own_loss": "loss"}
"""The fields of `Settings` whose options have other names."""


def option_name(field: str) -> str:
    """The option of a field of `Settings`, without the dashes in front."""
    return OPTION_NAMES.get(field, field).replace("_", "-")


def without_decided(settings: Settings) -> dict[str, Any]:
    """The fields of settings that can be given again: without those that a user's functions or others decide."""
    decided = () if settings.own_model is None else ("task", "model", "batch_size")
    if settings.optimizer != "sgd":
        decided = (*decided, "momentum")
    return {name: value for name, value in settings.to_json().items() if name not in decided}


def settings_as_toml(settings: Settings) -> str:
    """The settings as options of `thinwire train`."""
    left_out = ("command", "timeline_steps")
    values = {option_name(name): x for name, x in without_decided(settings).items() if name not in left_out}
    return as_toml(values, head=f"thinwire train --config {NAME} repeats this run")


def as_toml(values: Mapping[str, Any], *, head: str) -> str:
    """Options as TOML; those that are None are left out.

    Args:
        values: text, paths, numbers, booleans and None, by the names of the options.
        head: a comment for the first line.

    Example:
        >>> print(as_toml({"task": "text", "lr": 0.1, "steps": None}, head="an example"), end="")
        # an example
        task = "text"
        lr = 0.1
    """
    rows = ((name, str(x) if isinstance(x, Path) else x) for name, x in values.items() if x is not None)
    return "\n".join([f"# {head}", *(f"{name} = {_value(x)}" for name, x in rows)]) + "\n"


def _value(x: Any) -> str:
    """A value in TOML, whose strings are JSON's, but for DEL and characters that JSON would escape in two halves."""
    text = json.dumps(x, ensure_ascii=False).replace("\x7f", "\\u007f")
    try:
        text.encode()
    except UnicodeEncodeError:  # of a path that is no text; no TOML can have it
        return json.dumps(x)
    return text
