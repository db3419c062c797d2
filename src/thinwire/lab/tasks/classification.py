# SPDX-License-Identifier: Apache-2.0
"""Classification tasks: images (digits, MNIST, CIFAR-10), news (AG News) and rows of yes-or-no facts (a9a)."""

import csv
import hashlib
import io
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import ConfigError
from thinwire.lab.tasks.base import ACCURACY, Defaults, Task
from thinwire.lab.tasks.data.base import Indices, Stream
from thinwire.lab.tasks.data.examples import UNKNOWN, Images, Rows, Texts, Vocabulary, labelled, padded, tokens
from thinwire.lab.tasks.data.files import OFFER, Folder, cached, download, hub_installed, idx, labels_of, read
from thinwire.lab.tasks.models import classifiers

Pixels = NDArray[np.uint8]
Articles = list[tuple[str, int]]
_CIFAR10_PARTS = ("cifar10/train_part1.npz", "cifar10/train_part2.npz")
_AGNEWS_LENGTH = 64
_A9A_FEATURES = 123


def digits(folder: Folder | None = None) -> Task:
    """scikit-learn's 1,797 images of digits, 8 x 8; a fifth, always the same random one, is held out.

    Raises:
        ConfigError: if scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as missing:
        raise ConfigError("task 'digits' comes with scikit-learn: pip install 'thinwire[data]'") from missing
    grey, classes = load_digits(return_X_y=True)
    images = np.rint(np.asarray(grey) * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    labels = np.asarray(classes, np.int64)
    order = Stream((0xD161,)).permutation(len(labels))
    held_out, train = np.split(order, [len(labels) // 5])
    sets = [Images(images[rows], labels[rows], mean=0.3, deviation=0.35) for rows in (train, held_out)]
    networks = _of_digits(side=8, hidden=64)
    settings = (Defaults("sgd", lr=0.03, batch_size=32), Defaults("adamw", lr=3e-3, batch_size=32))
    return Task("digits", "scikit-learn digits", ACCURACY, networks, labelled(*sets), settings)


def mnist(folder: Folder) -> Task:
    """70,000 handwritten digits, 28 x 28, from mnist/*-ubyte.gz, or by the hub library; 10,000 are held out."""
    train, test = (_mnist_part(folder, part) for part in ("train", "t10k"))
    sets = [Images(*part, mean=0.1307, deviation=0.3081) for part in (train, test)]
    networks = _of_digits(side=28, hidden=128)
    settings = (Defaults("sgd", lr=0.02, batch_size=64), Defaults("adamw", lr=1e-3, batch_size=64))
    return Task("mnist", "MNIST", ACCURACY, networks, labelled(*sets), settings)


def cifar10(folder: Folder) -> Task:
    """Images of ten classes, 32 x 32, from cifar10/{train_part1,test}.npz of JPEG bytes, or by the hub library.

    A train_part2.npz is read as well if it exists. Images are decoded once, and kept in the user's cache folder.
    Training images are shifted by up to 4 pixels and mirrored at random.
    """
    if hub_installed() and folder.lacks(*_CIFAR10_PARTS, "cifar10/test.npz"):
        train, test = (_hub_part("uoft-cs/cifar10", split, "img", "RGB") for split in ("train", "test"))
        title = "CIFAR-10"
    else:
        train = _jpeg_parts(folder, [_CIFAR10_PARTS[0], *(part for part in _CIFAR10_PARTS[1:] if folder.has(part))])
        test = _jpeg_parts(folder, ["cifar10/test.npz"])
        title = f"CIFAR-10 (JPEG, {len(train[1]) / 1000:g}k)"
    sets = [Images(*part, mean=0.473, deviation=0.251, shift=4) for part in (train, test)]
    networks = {f"resnet{depth}": partial(classifiers.ResNet, depth) for depth in (8, 20)}
    settings = (
        Defaults("sgd", lr=0.1, batch_size=64, weight_decay=5e-4),
        Defaults("adamw", lr=3e-3, batch_size=64, weight_decay=0.05),
    )
    return Task("cifar10", title, ACCURACY, networks, labelled(*sets), settings)


def agnews(folder: Folder) -> Task:
    """News of four sections, from agnews/{train,test}.csv, or by the hub library.

    If there is no train file, a fifth of the test file, always the same random one, is held out, and the rest is for
    training.
    """
    title, train, test = _agnews_articles(folder)
    sentences = [tokens(words) for words, _ in train]
    vocabulary = Vocabulary.of(sentences, size=10_000, occurrences=2)
    sets = [_agnews_table(vocabulary, articles) for articles in (train, test)]
    networks = {"bag": partial(classifiers.WordBag, len(vocabulary), 64, 4)}
    settings = (Defaults("adamw", lr=2e-3, batch_size=32, weight_decay=0.1), Defaults("sgd", lr=0.1, batch_size=32))
    return Task("agnews", title, ACCURACY, networks, labelled(*sets), settings)


def a9a(folder: Folder) -> Task:
    """Does an adult in the 1994 US census earn more than 50,000 dollars a year? From libsvm/a9a.gz.

    Each example is 123 yes-or-no facts about one person; a fifth, always the same random one, is held out.
    """
    path = folder.file("libsvm/a9a.gz")
    try:
        from sklearn.datasets import load_svmlight_file
    except ModuleNotFoundError as missing:
        raise ConfigError("task 'a9a' is read by scikit-learn: pip install 'thinwire[data]'") from missing
    reader: Any = load_svmlight_file
    table, signs = read(path, partial(reader, n_features=_A9A_FEATURES, zero_based=False))
    features, labels = table.toarray().astype(np.uint8), (signs > 0).astype(np.int64)
    held_out, train = np.split(Stream((0xA9A,)).permutation(len(labels)), [len(labels) // 5])
    sets = [Rows(features[rows], labels[rows]) for rows in (train, held_out)]
    settings = (Defaults("sgd", lr=0.1, batch_size=64, momentum=0.0), Defaults("adamw", lr=3e-3, batch_size=64))
    networks = {"logistic": partial(classifiers.BinaryLogistic, _A9A_FEATURES)}
    return Task("a9a", "a9a (UCI Adult)", ACCURACY, networks, labelled(*sets), settings)


def _of_digits(*, side: int, hidden: int) -> dict[str, Callable[[], Any]]:
    """Models of images of digits, by size."""
    return {
        "mlp": partial(classifiers.Perceptron, side * side, hidden, 10),
        "cnn": partial(classifiers.Convolutional, channels=1, side=side, width=16, classes=10),
        "logistic": partial(classifiers.Logistic, side * side, 10),
    }


def _mnist_part(folder: Folder, part: str) -> tuple[Pixels, Indices]:
    names = [f"mnist/{part}-images-idx3-ubyte.gz", f"mnist/{part}-labels-idx1-ubyte.gz"]
    if hub_installed() and folder.lacks(*names):
        return _hub_part("ylecun/mnist", "train" if part == "train" else "test", "image", "L")
    images, labels = (read(folder.file(name, otherwise=OFFER), idx) for name in names)
    _check_shape(names[1], images.shape, (len(labels), 28, 28))
    return images[:, None], labels.astype(np.int64)


def _hub_part(name: str, split: str, column: str, mode: str) -> tuple[Pixels, Indices]:
    rows = download(name, split)
    key = f"{name.replace('/', '-')}-{split}-{len(rows)}"
    return cached(key, lambda: _pixels((row[column] for row in rows), mode)), labels_of(rows)


def _jpeg_parts(folder: Folder, names: list[str]) -> tuple[Pixels, Indices]:
    parts = [read(folder.file(name, otherwise=OFFER), _jpeg_part) for name in names]
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])


def _jpeg_part(path: Path) -> tuple[Pixels, Indices]:
    digest = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    with np.load(path, allow_pickle=False) as file:
        labels = file["labels"].astype(np.int64)
        images = cached(f"cifar10-{digest}", lambda: _decoded(file["jpeg"], file["offsets"]))
    _check_shape(str(path), images.shape, (len(labels), 3, 32, 32))
    return images, labels


def _decoded(joined: Pixels, offsets: Indices) -> Pixels:
    try:
        from PIL import Image
    except ModuleNotFoundError as missing:
        raise ConfigError("images are decoded by Pillow: pip install 'thinwire[data]'") from missing
    files = (io.BytesIO(joined[begin:end].tobytes()) for begin, end in pairwise(offsets))
    return _pixels(map(Image.open, files), "RGB")


def _pixels(images: Iterable[Any], mode: str) -> Pixels:
    """Pixels, uint8 [count, channels, height, width], of Pillow's images of one size."""
    table = np.stack([np.asarray(image.convert(mode), np.uint8) for image in images])
    return np.ascontiguousarray(np.moveaxis(table.reshape(*table.shape[:3], -1), -1, 1))


def _check_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if shape != expected:
        raise ConfigError(f"{name}: images of shape {shape}, and its labels need {expected}. Copy them again")


def _agnews_articles(folder: Folder) -> tuple[str, Articles, Articles]:
    names = ("agnews/train.csv", "agnews/test.csv")
    if hub_installed() and folder.lacks(*names):
        train, test = (
            [(str(row["text"]), int(str(row["label"]))) for row in download("fancyzhx/ag_news", split)]
            for split in ("train", "test")
        )
        return "AG News", train, test
    if folder.has(names[0]):
        train, test = (read(folder.file(name), _agnews_rows) for name in names)
        return "AG News", train, test
    rows = read(folder.file(names[1], otherwise=OFFER), _agnews_rows)
    order = Stream((0xA6,)).permutation(len(rows))
    held_out, kept = np.split(order, [len(rows) // 5])
    title = "AG News (the test file, split 4 to 1)"
    return title, [rows[index] for index in kept], [rows[index] for index in held_out]


def _agnews_rows(path: Path) -> Articles:
    with path.open(encoding="utf-8", newline="") as file:
        rows = [(f"{title} {text}", int(section) - 1) for section, title, text in csv.reader(file)]
    if len(rows) < 5 or not {section for _, section in rows} <= {0, 1, 2, 3}:
        raise ConfigError(f"{path}: expected rows of section (1 to 4), title and text. Copy it again")
    return rows


def _agnews_table(vocabulary: Vocabulary, articles: Articles) -> Texts:
    numbers = [vocabulary.numbers(tokens(words)) or [UNKNOWN] for words, _ in articles]
    labels = np.array([section for _, section in articles], np.int64)
    return Texts(padded(numbers, _AGNEWS_LENGTH), labels)
