"""Pictures to tell apart: digits, MNIST, CIFAR-10."""

import hashlib
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import ConfigError
from thinwire.tasks.base import ACCURACY, Defaults, Task
from thinwire.tasks.data import hub
from thinwire.tasks.data.base import Indices, Stream
from thinwire.tasks.data.cache import cached
from thinwire.tasks.data.decode import Picture, decode, pixels
from thinwire.tasks.data.examples import Images, labelled
from thinwire.tasks.data.files import Folder, idx, read
from thinwire.tasks.models.plain import Convolutional, Logistic, Perceptron
from thinwire.tasks.models.resnet import ResNet

Pixels = NDArray[np.uint8]
_PARTS = ("cifar10/train_part1.npz", "cifar10/train_part2.npz")


def digits(folder: Folder | None = None) -> Task:
    """scikit-learn's 1,797 pictures of digits, 8 x 8; a fifth, chosen at random once and for all, is held out.

    Raises:
        ConfigError: if scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as missing:
        raise ConfigError("task 'digits' comes with scikit-learn: pip install 'thinwire[data]'") from missing
    grey, classes = load_digits(return_X_y=True)
    pictures = np.rint(np.asarray(grey) * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    labels = np.asarray(classes, np.int64)
    order = Stream((0xD161,)).permutation(len(labels))
    held, kept = np.split(order, [len(labels) // 5])
    sets = [Images(pictures[rows], labels[rows], mean=0.3, deviation=0.35) for rows in (kept, held)]
    networks = {
        "mlp": partial(Perceptron, 64, 64, 10),
        "cnn": partial(Convolutional, channels=1, side=8, width=16, classes=10),
        "logistic": partial(Logistic, 64, 10),
    }
    settings = (Defaults("sgd", lr=0.03, batch_size=32), Defaults("adamw", lr=3e-3, batch_size=32))
    return Task("digits", "scikit-learn digits", ACCURACY, networks, labelled(*sets), settings)


def mnist(folder: Folder) -> Task:
    """70,000 handwritten digits, 28 x 28, from mnist/*-ubyte.gz, or by the hub library; 10,000 are held out."""
    train, test = (_mnist_part(folder, part) for part in ("train", "t10k"))
    sets = [Images(*part, mean=0.1307, deviation=0.3081) for part in (train, test)]
    networks = {
        "mlp": partial(Perceptron, 784, 128, 10),
        "cnn": partial(Convolutional, channels=1, side=28, width=16, classes=10),
        "logistic": partial(Logistic, 784, 10),
    }
    settings = (Defaults("sgd", lr=0.02, batch_size=64), Defaults("adamw", lr=1e-3, batch_size=64))
    return Task("mnist", "MNIST", ACCURACY, networks, labelled(*sets), settings)


def cifar10(folder: Folder) -> Task:
    """Pictures of ten kinds of thing, 32 x 32, from cifar10/{train_part1,test}.npz of JPEG bytes, or by the hub
    library. A train_part2.npz is read as well where it is there.

    They are decoded once, and kept in the user's cache folder. Training pictures are shifted by up to 4 pixels and
    mirrored at random.
    """
    if hub.installed() and folder.lacks(*_PARTS, "cifar10/test.npz"):
        train, test = (_hub_part("uoft-cs/cifar10", split, "img", "RGB") for split in ("train", "test"))
        title = "CIFAR-10"
    else:
        train = _jpeg_parts(folder, [_PARTS[0], *(part for part in _PARTS[1:] if folder.has(part))])
        test = _jpeg_parts(folder, ["cifar10/test.npz"])
        title = f"CIFAR-10 (JPEG, {len(train[1]) / 1000:g}k)"
    sets = [Images(*part, mean=0.473, deviation=0.251, shift=4) for part in (train, test)]
    networks = {f"resnet{depth}": partial(ResNet, depth) for depth in (8, 20)}
    settings = (
        Defaults("sgd", lr=0.1, batch_size=64, weight_decay=5e-4),
        Defaults("adamw", lr=3e-3, batch_size=64, weight_decay=0.05),
    )
    return Task("cifar10", title, ACCURACY, networks, labelled(*sets), settings)


def _mnist_part(folder: Folder, part: str) -> tuple[Pixels, Indices]:
    names = [f"mnist/{part}-images-idx3-ubyte.gz", f"mnist/{part}-labels-idx1-ubyte.gz"]
    if hub.installed() and folder.lacks(*names):
        return _hub_part("ylecun/mnist", "train" if part == "train" else "test", "image", "L")
    pictures, labels = (read(folder.file(name, otherwise=hub.OFFER), idx) for name in names)
    _matching(names[1], pictures.shape, (len(labels), 28, 28))
    return pictures[:, None], labels.astype(np.int64)


def _hub_part(name: str, split: str, column: str, mode: str) -> tuple[Pixels, Indices]:
    rows = hub.download(name, split)
    key = f"{name.replace('/', '-')}-{split}-{len(rows)}"
    shown = (cast(Picture, row[column]) for row in rows)
    return cached(key, lambda: pixels(shown, len(rows), mode=mode, title=name)), hub.labels(rows)


def _jpeg_parts(folder: Folder, names: list[str]) -> tuple[Pixels, Indices]:
    parts = [read(folder.file(name, otherwise=hub.OFFER), _jpeg_part) for name in names]
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])


def _jpeg_part(path: Path) -> tuple[Pixels, Indices]:
    digest = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    with np.load(path, allow_pickle=False) as file:
        labels = file["labels"].astype(np.int64)
        pictures = cached(f"cifar10-{digest}", lambda: _decoded(file["jpeg"], file["offsets"], path.name))
    _matching(str(path), pictures.shape, (len(labels), 3, 32, 32))
    return pictures, labels


def _decoded(joined: Pixels, offsets: Indices, title: str) -> Pixels:
    files = (joined[begin:end].tobytes() for begin, end in pairwise(offsets))
    return decode(files, len(offsets) - 1, title=f"decoding {title}")


def _matching(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if shape != expected:
        raise ConfigError(f"{name}: pictures of shape {shape}, and its labels ask for {expected}; copy them anew")
