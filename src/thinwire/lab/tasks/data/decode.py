# SPDX-License-Identifier: Apache-2.0
"""Compressed images as arrays of pixels."""

import io
import sys
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import ConfigError

Item = TypeVar("Item")


class OpenedImage(Protocol):
    """The part of Pillow's `Image` that is used here."""

    def convert(self, mode: str) -> "OpenedImage":
        """The same image with other channels."""
        ...


def decode(files: Iterable[bytes], count: int, *, title: str) -> NDArray[np.uint8]:
    """Pixels, uint8 [count, 3, height, width], of compressed images of one size.

    Args:
        files: the bytes of each image.
        count: how many there are.
        title: the words before the progress bar.

    Raises:
        ConfigError: if Pillow is not installed.
    """
    try:
        from PIL import Image
    except ModuleNotFoundError as missing:
        raise ConfigError("images are decoded by Pillow: pip install 'thinwire[data]'") from missing
    opened = (cast(OpenedImage, Image.open(io.BytesIO(file))) for file in files)
    return pixels(opened, count, mode="RGB", title=title)


def pixels(images: Iterable[OpenedImage], count: int, *, mode: str, title: str) -> NDArray[np.uint8]:
    """Pixels, uint8 [count, channels, height, width], of images of one size.

    Args:
        images: opened images.
        count: how many there are.
        mode: "RGB" for three channels, "L" for one.
        title: the words before the progress bar.
    """
    shown = progress(images, count, title=title)
    table = np.stack([np.asarray(image.convert(mode), np.uint8) for image in shown])
    return np.ascontiguousarray(np.moveaxis(table.reshape(*table.shape[:3], -1), -1, 1))


def progress(items: Iterable[Item], count: int, *, title: str) -> Iterator[Item]:
    """Pass the items on, and draw a progress bar on the standard error if it is a terminal."""
    shown = sys.stderr.isatty()
    done = 0
    for done, item in enumerate(items, start=1):
        yield item
        if shown and done % max(count // 100, 1) == 0:
            filled = 30 * done // count
            sys.stderr.write(f"\r{title} [{'#' * filled}{'.' * (30 - filled)}] {done:,} of {count:,}")
            sys.stderr.flush()
    if shown and done:
        sys.stderr.write("\r\x1b[K")
