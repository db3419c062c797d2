"""Sets downloaded by the `datasets` library, for machines that are online."""

import importlib
import importlib.util
from collections.abc import Iterator
from typing import Protocol, cast

import numpy as np

from thinwire.errors import ConfigError
from thinwire.tasks.data.base import Indices


class Rows(Protocol):
    """A split, as far as it is used here."""

    def __len__(self) -> int:
        """How many rows it has."""
        ...

    def __iter__(self) -> Iterator[dict[str, object]]:
        """Its rows, each by column."""
        ...

    def select_columns(self, column_names: list[str]) -> "Rows":
        """The same rows with these columns alone."""
        ...


OFFER = ", or pip install 'thinwire[hub]' on a machine that is online"


def installed() -> bool:
    """Whether the library is there."""
    return importlib.util.find_spec("datasets") is not None


def download(name: str, split: str) -> Rows:
    """One split of a set, by its name on the hub; the library keeps what it downloaded.

    Raises:
        ConfigError: if it cannot be had.
    """
    library = importlib.import_module("datasets")
    try:
        return cast(Rows, library.load_dataset(name, split=split))
    except Exception as error:  # the library lets through the errors of whatever transport it uses
        raise ConfigError(
            f"{name} ({split}) cannot be downloaded ({error}); go online, or let THINWIRE_DATA name a folder with it"
        ) from error


def labels(rows: Rows) -> Indices:
    """The classes of all rows; no picture is decoded for it."""
    return np.array([row["label"] for row in rows.select_columns(["label"])], np.int64)
