"""Files that are either whole or not there: a temporary file, fsync, rename."""

import contextlib
import os
import tempfile
from pathlib import Path

from thinwire.errors import ConfigError


def write_bytes(path: Path, content: bytes) -> Path:
    """Write a file in one piece and return its path.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    try:
        _replace(path, content)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}); use a folder you may write to") from None
    return path


def write_text(path: Path, content: str) -> Path:
    """Write a UTF-8 text file in one piece and return its path.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    return write_bytes(path, content.encode("utf-8", errors="replace"))


def _replace(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes the file private; a report is for reading.
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise
