"""From compressed pictures to arrays of pixels."""

import io
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import ConfigError

Item = TypeVar("Item")


class Picture(Protocol):
    """What Pillow makes of a file, as far as it is used here."""

    def convert(self, mode: str) -> "Picture":
        """The same picture with other channels."""
        ...


def decode(files: Iterable[bytes], count: int, *, title: str) -> NDArray[np.uint8]:
    """Pixels, uint8 [count, 3, height, width], of compressed pictures of one size.

    Args:
        files: the bytes of each picture.
        count: how many there are.
        title: what the progress bar says.

    Raises:
        ConfigError: if Pillow is not installed.
    """
    opened = _opener()
    return pixels((opened(file) for file in files), count, mode="RGB", title=title)


def pixels(pictures: Iterable[Picture], count: int, *, mode: str, title: str) -> NDArray[np.uint8]:
    """Pixels, uint8 [count, channels, height, width], of pictures of one size.

    Args:
        pictures: opened pictures.
        count: how many there are.
        mode: "RGB" for three channels, "L" for one.
        title: what the progress bar says.
    """
    shown = progress(pictures, count, title=title)
    table = np.stack([np.asarray(picture.convert(mode), np.uint8) for picture in shown])
    return np.ascontiguousarray(np.moveaxis(table.reshape(*table.shape[:3], -1), -1, 1))


def progress(items: Iterable[Item], count: int, *, title: str) -> Iterator[Item]:
    """The same items, with a bar on the standard error while it is a terminal."""
    shown = sys.stderr.isatty()
    done = 0
    for done, item in enumerate(items, start=1):
        yield item
        if shown and done % max(count // 100, 1) == 0:
            _draw(title, done, count)
    if shown and done:
        sys.stderr.write("\r\x1b[K")


def _draw(title: str, done: int, count: int) -> None:
    filled = 30 * done // count
    sys.stderr.write(f"\r{title} [{'#' * filled}{'.' * (30 - filled)}] {done:,} of {count:,}")
    sys.stderr.flush()


def _opener() -> Callable[[bytes], Picture]:
    try:
        from PIL import Image
    except ModuleNotFoundError as missing:
        raise ConfigError("pictures are decoded by Pillow: pip install 'thinwire[data]'") from missing
    return lambda file: Image.open(io.BytesIO(file))
