# SPDX-License-Identifier: Apache-2.0
"""Feature matrices from files: npy, npz, parquet and libsvm."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import ConfigError

Array = NDArray[Any]
_LIBSVM = (".libsvm", ".svm", ".svmlight")


def read_matrix(path: Path, labels: str | None = None) -> tuple[Array, Array | None]:
    """Return the features [n, d] and, where there are any, the labels [n] of a file.

    Args:
        path: a file ending in .npy, .npz, .parquet, .libsvm, .svm or .svmlight.
        labels: the labels: a column of the parquet file, an array of the npz file, a column's number in an
            npy file, or another file, .npy, that holds them alone. A libsvm file has its own.

    Raises:
        ConfigError: the file cannot be read, is of another kind, or has no such labels.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file. Give one that ends in .npy, .npz, .parquet or .libsvm")
    readers = {".npy": _npy, ".npz": _npz, ".parquet": _parquet} | dict.fromkeys(_LIBSVM, _libsvm)
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"{path}: unknown kind of file. The name must end in {', '.join(readers)}")
    if labels is not None and labels.endswith(".npy"):
        features, _ = reader(path, None)
        return features, _array(Path(labels))
    return reader(path, labels)


def _npy(path: Path, labels: str | None) -> tuple[Array, Array | None]:
    matrix = _array(path)
    if labels is None:
        return matrix, None
    columns = matrix.shape[1] if matrix.ndim == 2 else 0
    if not re.fullmatch(r"-?[0-9]{1,18}", labels) or not -columns <= int(labels) < columns:
        raise ConfigError(f"--labels {labels}: must be a column of {path} from 0 to {columns - 1}, or a .npy file")
    column = int(labels) % columns
    return np.delete(matrix, column, axis=1), matrix[:, column]


def _npz(path: Path, labels: str | None) -> tuple[Array, Array | None]:
    try:
        # Opened here: of a broken archive, numpy leaves the file open.
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except Exception as error:  # broken files end in errors of many kinds
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    matrices = [name for name, array in arrays.items() if array.ndim == 2]
    if len(matrices) != 1:
        raise ConfigError(f"{path}: holds {len(matrices)} matrices ({', '.join(arrays)}). It needs exactly one")
    if labels is not None and labels not in arrays:
        raise ConfigError(f"--labels {labels}: {path} holds {', '.join(arrays)}")
    return arrays[matrices[0]], None if labels is None else arrays[labels]


def _parquet(path: Path, labels: str | None) -> tuple[Array, Array | None]:
    try:
        from pyarrow import ArrowException, parquet
    except ModuleNotFoundError:
        raise ConfigError(f"{path}: parquet needs pyarrow. Run pip install pyarrow, or give a .npy file") from None
    try:
        table = parquet.read_table(path)
    except (OSError, ArrowException) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    names = list(table.column_names)
    if labels is not None and labels not in names:
        raise ConfigError(f"--labels {labels}: {path} has the columns {', '.join(names)}")
    columns = {name: table[name].to_numpy() for name in names if name != labels}
    not_numbers = [name for name, column in columns.items() if column.dtype.kind not in "biuf"]
    if not_numbers or not columns:
        raise ConfigError(f"{path}: the columns {', '.join(not_numbers) or '(none)'} are not numbers. Drop them")
    own = None if labels is None else table[labels].to_numpy(zero_copy_only=False)
    return np.stack(list(columns.values()), axis=1), own


def _libsvm(path: Path, labels: str | None) -> tuple[Array, Array | None]:
    try:
        from sklearn.datasets import load_svmlight_file
    except ModuleNotFoundError:
        raise ConfigError(f"{path}: libsvm needs scikit-learn. Run pip install 'thinwire[data]'") from None
    if labels is not None:
        raise ConfigError(f"--labels {labels}: a libsvm file has its own. Leave the option out")
    try:
        matrix, own = load_svmlight_file(str(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    return matrix.astype(np.float32).toarray(), own


def _array(path: Path) -> Array:
    try:
        with path.open("rb") as opened:
            array: Array = np.load(opened, allow_pickle=False)
    except Exception as error:  # broken files end in errors of many kinds
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    if not isinstance(array, np.ndarray):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"{path}: cannot be read (it is an archive of arrays). Give it a name that ends in .npz")
    return array
