# SPDX-License-Identifier: Apache-2.0
"""Data sets that the `datasets` library downloads, for machines that are online."""

import importlib
import importlib.util
from typing import Any

import numpy as np

from thinwire.errors import ConfigError
from thinwire.lab.tasks.data.base import Indices

OFFER = ", or pip install 'thinwire[hub]' on a machine that is online"


def installed() -> bool:
    """Whether the `datasets` library is installed."""
    return importlib.util.find_spec("datasets") is not None


def download(name: str, split: str) -> Any:
    """One split of a data set, by its name on the hub; the library caches what it downloads.

    Raises:
        ConfigError: it cannot be downloaded.
    """
    library = importlib.import_module("datasets")
    try:
        return library.load_dataset(name, split=split)
    # Every exception, because the library raises those of whatever transport it uses.
    except Exception as error:
        raise ConfigError(
            f"{name} ({split}) cannot be downloaded ({error}). Go online, or let THINWIRE_DATA name a folder with it"
        ) from error


def labels(rows: Any) -> Indices:
    """The classes of all rows."""
    # Without the other columns, because iterating over images would decode them.
    return np.array([row["label"] for row in rows.select_columns(["label"])], np.int64)
