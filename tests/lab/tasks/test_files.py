# SPDX-License-Identifier: Apache-2.0
"""Data files in their documented formats, written small."""

from __future__ import annotations

import csv
import gzip
import io
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from thinwire.errors import ConfigError
from thinwire.lab import tasks

FAKE_HUB = """
import numpy as np
from PIL import Image

class Split(list):
    def select_columns(self, names):
        return Split([{name: row[name] for name in names} for row in self])

def load_dataset(name, split):
    n = {"train": 40, "test": 20}[split]
    if name == "fancyzhx/ag_news":
        return Split({"text": f"word{i % 4} and more", "label": i % 4} for i in range(n))
    column, shape = {"ylecun/mnist": ("image", (28, 28)), "uoft-cs/cifar10": ("img", (32, 32, 3))}[name]
    return Split({column: Image.fromarray(np.full(shape, i, np.uint8)), "label": i % 10} for i in range(n))
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def online(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A `datasets` library that makes its sets up, and no folder of files."""
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "datasets.py").write_text(FAKE_HUB)
    monkeypatch.syspath_prepend(tmp_path / "library")
    monkeypatch.delitem(sys.modules, "datasets", raising=False)
    monkeypatch.delenv("THINWIRE_DATA", raising=False)
    yield
    sys.modules.pop("datasets", None)


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def write_idx(path: Path, array: np.ndarray) -> None:
    head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    write(path, gzip.compress(head + array.astype(np.uint8).tobytes()))


def write_mnist(folder: Path) -> None:
    for part, n in (("train", 40), ("t10k", 20)):
        pictures = np.arange(n)[:, None, None] * np.ones((28, 28))
        write_idx(folder / f"mnist/{part}-images-idx3-ubyte.gz", pictures)
        write_idx(folder / f"mnist/{part}-labels-idx1-ubyte.gz", np.arange(n) % 10)


def write_cifar10(folder: Path, **parts: int) -> None:
    pillow = pytest.importorskip("PIL.Image")
    (folder / "cifar10").mkdir()
    for part, n in parts.items():
        files: list[bytes] = []
        for shade in range(n):
            buffer = io.BytesIO()
            pillow.fromarray(np.full((32, 32, 3), shade, np.uint8)).save(buffer, "JPEG", quality=95)
            files.append(buffer.getvalue())
        offsets = np.cumsum([0, *map(len, files)]).astype(np.int64)
        np.savez(
            folder / f"cifar10/{part}.npz",
            jpeg=np.frombuffer(b"".join(files), np.uint8),
            offsets=offsets,
            labels=np.arange(n, dtype=np.uint8) % 10,
            classes=np.array(["airplane", "automobile"]),
        )


def write_agnews(folder: Path, name: str, n: int) -> None:
    (folder / "agnews").mkdir(exist_ok=True)
    with (folder / "agnews" / name).open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL)
        for row in range(n):
            writer.writerow([row % 4 + 1, f'Title "{row}", quoted', f"Topic{row % 4} \\text again\nsecond line"])


def total_of(task: tasks.Task) -> int:
    (shard,) = task.shards(1)
    return shard.units


def first_batch(task: tasks.Task, n: int) -> tuple[torch.Tensor, ...]:
    return task.batch(task.shards(1)[0], 0, batch_size=n, seed=0, rank=0)


def test_mnist_is_read_from_idx_files(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    task = tasks.load("mnist", data=tmp_path)
    pixels, labels = first_batch(task, 40)
    assert pixels.shape == (40, 1, 28, 28)
    shades = (pixels[:, 0, 0, 0] * 0.3081 + 0.1307) * 255
    assert sorted(shades.round().int().tolist()) == list(range(40))
    assert torch.equal(shades.round().long() % 10, labels)
    assert task.evaluate(task.model(seed=0)).targets == 20
    assert task.title == "MNIST"


def test_the_folder_may_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(tmp_path)
    monkeypatch.setenv("THINWIRE_DATA", str(tmp_path))
    assert total_of(tasks.load("mnist")) == 40


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not gzip", "cannot be read .*[Ii]t is damaged or not what its name says: copy it again"),
        (gzip.compress(struct.pack(">HBB2I", 0, 8, 2, 5, 5)), "cannot be read"),
        (
            gzip.compress(struct.pack(">HBBI", 0, 13, 1, 1) + b"1234"),
            "cannot be read .*it starts with 00000d01, .* starts with 000008",
        ),
        (gzip.compress(b""), "cannot be read"),
    ],
    ids=["not gzip", "too short", "not bytes", "empty"],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    write_mnist(tmp_path)
    write(tmp_path / "mnist/train-images-idx3-ubyte.gz", content)
    with pytest.raises(ConfigError, match=rf"train-images-idx3-ubyte.gz {message}"):
        tasks.load("mnist", data=tmp_path)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    path = tmp_path / "mnist/train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ConfigError, match=r"train-images-idx3-ubyte.gz cannot be read"):
        tasks.load("mnist", data=tmp_path)


def test_images_and_labels_that_do_not_match_are_refused(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    write_idx(tmp_path / "mnist/train-labels-idx1-ubyte.gz", np.arange(39))
    with pytest.raises(ConfigError, match=r"images of shape \(40, 28, 28\), and its labels need \(39, 28, 28\)"):
        tasks.load("mnist", data=tmp_path)


def test_half_a_set_of_files_is_not_completed_by_downloading(tmp_path: Path, online: None) -> None:
    write_mnist(tmp_path)
    (tmp_path / "mnist/train-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(ConfigError, match=r"train-labels-idx1-ubyte.gz is missing"):
        tasks.load("mnist", data=tmp_path)


def test_cifar10_is_decoded_once_and_kept(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar10(tmp_path, train_part1=40, test=20)
    task = tasks.load("cifar10", data=tmp_path)
    assert task.title == "CIFAR-10 (JPEG, 0.04k)"
    pixels, labels = first_batch(task, 40)
    assert pixels.shape == (40, 3, 32, 32)
    assert torch.equal(((pixels * 0.251 + 0.473) * 255).mean((1, 2, 3)).round().long() % 10, labels)
    assert sorted(path.suffix for path in cache.iterdir()) == [".npy", ".npy"]
    monkeypatch.setattr("thinwire.lab.tasks.classification._decoded", None)
    assert tasks.load("cifar10", data=tmp_path).fingerprint() == task.fingerprint()


def test_both_halves_of_cifar10_are_read_where_they_are_there(tmp_path: Path) -> None:
    write_cifar10(tmp_path, train_part1=20, train_part2=30, test=10)
    assert total_of(tasks.load("cifar10", data=tmp_path)) == 50


def test_cifar10_files_that_are_not_images_are_refused(tmp_path: Path) -> None:
    write_cifar10(tmp_path, train_part1=10, test=10)
    np.savez(
        tmp_path / "cifar10/test.npz",
        jpeg=np.zeros(100, np.uint8),
        offsets=np.array([0, 50, 100]),
        labels=np.zeros(2, np.uint8),
        classes=np.array(["airplane"]),
    )
    with pytest.raises(ConfigError, match=r"test.npz cannot be read"):
        tasks.load("cifar10", data=tmp_path)
    write(tmp_path / "cifar10/test.npz", b"PK but not a zip")
    with pytest.raises(ConfigError, match=r"test.npz cannot be read"):
        tasks.load("cifar10", data=tmp_path)


def test_images_without_pillow_name_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar10(tmp_path, train_part1=10, test=10)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigError, match=r"images are decoded by Pillow: pip install 'thinwire\[data\]'"):
        tasks.load("cifar10", data=tmp_path)


def test_training_images_are_shifted_and_mirrored_but_held_out_ones_are_not(tmp_path: Path) -> None:
    write_cifar10(tmp_path, train_part1=20, test=10)
    task = tasks.load("cifar10", data=tmp_path)
    images = task.data.train  # type: ignore[attr-defined]
    ramp = np.broadcast_to(np.arange(32, dtype=np.uint8), (20, 3, 32, 32)).copy()
    object.__setattr__(images, "pixels", ramp)
    rows = np.arange(20)
    still, moved = (
        images.take(rows)[0],
        images.take(rows, np.random.default_rng(0).integers(0, 2**64, 20, np.uint64))[0],
    )
    assert torch.equal(still[0], still[19])
    middles = ((moved[:, 0, 0, 16] * 0.251 + 0.473) * 255).round().int().tolist()
    assert set(middles) <= set(range(11, 21))
    assert len(set(middles)) > 3
    slopes = (moved[:, 0, 0, 17] - moved[:, 0, 0, 16]).sign().int().tolist()
    assert set(slopes) == {-1, 1}


def test_shakespeare_is_split_by_speaker(tmp_path: Path) -> None:
    speeches = "".join(f"SPEAKER {'ABCD'[n % 4]}:\nLine {n} of a play, {'ABCD'[n % 4] * 20}\n\n" for n in range(400))
    write(tmp_path / "text/tinyshakespeare.txt", speeches.encode())
    task = tasks.load("shakespeare", data=tmp_path)
    shards = task.shards(4, split="group")
    for rank, shard in enumerate(shards):
        inputs, _ = task.batch(shard, 0, batch_size=8, seed=0, rank=rank)
        spoken = bytes(inputs.flatten().tolist())
        assert sum(letter * 5 in spoken for letter in (b"A", b"B", b"C", b"D")) == 1
    assert total_of(task) == pytest.approx(0.9 * len(speeches), rel=0.01)
    assert task.metric == "bits_per_byte"


def test_text_without_speeches_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "text/tinyshakespeare.txt", b"once upon a time\n" * 100)
    with pytest.raises(ConfigError, match=r"tinyshakespeare.txt holds no speeches"):
        tasks.load("shakespeare", data=tmp_path)


def test_the_title_of_wikitext2_names_the_split_for_training(tmp_path: Path) -> None:
    article = " = Article {} = \n \n" + " Some words about it .\n" * 30 + " = = Section = = \n" + " More words .\n" * 30
    whole = " \n" + "".join(article.format(n) for n in range(5))
    for part in ("valid", "test"):
        write(tmp_path / f"text/wikitext2.{part}.txt", whole.encode())
    task = tasks.load("wikitext2", data=tmp_path)
    assert task.title == "WikiText-2 (trained on its validation split)"
    assert total_of(task) == len(whole)
    assert len(task.shards(5, split="group")) == 5
    write(tmp_path / "text/wikitext2.train.txt", (whole + whole).encode())
    task = tasks.load("wikitext2", data=tmp_path)
    assert (task.title, total_of(task)) == ("WikiText-2", 2 * len(whole))


def test_wikitext2_without_articles_is_refused(tmp_path: Path) -> None:
    for part in ("valid", "test"):
        write(tmp_path / f"text/wikitext2.{part}.txt", b"")
    with pytest.raises(ConfigError, match=r"wikitext2.valid.txt holds no articles"):
        tasks.load("wikitext2", data=tmp_path)


def test_agnews_holds_a_fifth_out_where_only_the_test_file_is_there(tmp_path: Path) -> None:
    write_agnews(tmp_path, "test.csv", 100)
    task = tasks.load("agnews", data=tmp_path)
    assert task.title == "AG News (the test file, split 4 to 1)"
    assert total_of(task) == 80
    assert task.evaluate(task.model(seed=0)).targets == 20
    words, labels = first_batch(task, 16)
    assert words.dtype == labels.dtype == torch.int64
    assert task.model(seed=0)(words).shape == (16, 4)
    write_agnews(tmp_path, "train.csv", 60)
    task = tasks.load("agnews", data=tmp_path)
    assert (task.title, total_of(task)) == ("AG News", 60)


@pytest.mark.parametrize("content", [b'"7","a","b"\n' * 9, b'"1","a"\n' * 9, b"\xff\xfe\n" * 9, b""])
def test_rows_that_are_not_news_are_refused(tmp_path: Path, content: bytes) -> None:
    write(tmp_path / "agnews/test.csv", content)
    with pytest.raises(ConfigError, match=r"agnews/test.csv.*again"):
        tasks.load("agnews", data=tmp_path)


def test_a9a_is_read_from_a_libsvm_file(tmp_path: Path) -> None:
    lines = [f"{'+1' if n % 3 == 0 else '-1'} {n % 123 + 1}:1 \n" for n in range(150)] + ["-1\n"]
    write(tmp_path / "libsvm/a9a.gz", gzip.compress("".join(lines).encode()))
    task = tasks.load("a9a", data=tmp_path)
    features, labels = first_batch(task, total_of(task))
    assert features.shape == (121, 123)
    assert set(features.sum(1).tolist()) <= {0.0, 1.0}
    assert set(labels.tolist()) == {0, 1}
    assert task.evaluate(task.model(seed=0)).loss == pytest.approx(np.log(2))


@pytest.mark.parametrize("line", ["+1 124:1", "+1 0:1", "+1 3", "yes 3:1", "+1 3:x"])
def test_lines_that_are_not_libsvm_are_refused(tmp_path: Path, line: str) -> None:
    write(tmp_path / "libsvm/a9a.gz", gzip.compress(f"{line}\n".encode()))
    with pytest.raises(ConfigError, match=r"a9a.gz cannot be read"):
        tasks.load("a9a", data=tmp_path)


@pytest.mark.parametrize(("name", "shape"), [("mnist", (1, 28, 28)), ("cifar10", (3, 32, 32))])
def test_images_are_downloaded_where_there_are_no_files(online: None, name: str, shape: Sequence[int]) -> None:
    task = tasks.load(name)
    pixels, labels = first_batch(task, 40)
    assert pixels.shape == (40, *shape)
    assert sorted(labels.tolist()) == sorted(n % 10 for n in range(40))
    assert task.evaluate(task.model(seed=0)).targets == 20
    assert "JPEG" not in task.title
    assert tasks.load(name).fingerprint() == task.fingerprint()


def test_news_are_downloaded_where_there_are_no_files(online: None) -> None:
    task = tasks.load("agnews")
    assert (task.title, total_of(task)) == ("AG News", 40)


def test_a_failed_download_is_one_clear_error(online: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets  # type: ignore[import-not-found]

    def fail(name: str, split: str) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(
        ConfigError, match=r"ylecun/mnist \(train\) cannot be downloaded \(no route to host\). Go online"
    ):
        tasks.load("mnist")
