# SPDX-License-Identifier: Apache-2.0
"""Atomic writing of files: a file is complete or does not exist."""

import errno
import os
import re
import secrets
from pathlib import Path
from stat import S_IMODE

from thinwire.errors import ConfigError

# O_EXCL: never open an existing file, nor a link that another user has planted.
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)


# Matches "s3:/" too, since `Path` shortens URLs, but no Windows drive such as "C:/".
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def local_path(path: str | Path) -> Path:
    """Return a user's path with `~` expanded.

    Raises:
        ConfigError: the path is a URL.
    """
    if _URL.match(str(path)):
        raise ConfigError(
            f"{path} is a URL. Files are written to and read from local file systems only. Mount the storage as a "
            "folder, or write to a folder and copy it"
        )
    return Path(path).expanduser()


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file under a temporary name, flush it to disk, then rename it.

    Raises:
        OSError: writing failed; an existing file at `path` is unchanged.
    """
    rename_into_place(write_temporary(path, content), path)


def check_writable(path: Path) -> None:
    """Create the folder of a file and check that the file can be written, before expensive work starts.

    Raises:
        OSError: the file cannot be written.
    """
    make_folder_of(path)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    write_temporary(path, b"").unlink()


def make_folder_of(path: Path) -> None:
    """Create the folder of a file if it is missing.

    Raises:
        OSError: the folder cannot be created; NotADirectoryError if it is a file.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        # "File exists" would not explain the problem to a caller that wants to write a file.
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path.parent)) from None


def write_temporary(path: Path, content: bytes) -> Path:
    """Write a hidden file next to `path`, flush it to disk and return its path.

    It gets the permissions of an existing file at `path`, otherwise the process's default.

    Raises:
        OSError: writing failed; no file is left behind.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        mode = S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        mode = 0o666  # minus the umask, like `open`; `tempfile` would hide the file from other users
    handle = os.open(temporary, _CREATE, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def rename_into_place(temporary: Path, path: Path) -> None:
    """Rename a temporary file to `path`, replace an existing file, and flush the folder to disk.

    Raises:
        OSError: renaming failed; `path` is the complete old file or the complete new one.
    """
    try:
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    # Without this the rename itself could be lost in a power failure.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
