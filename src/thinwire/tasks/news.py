"""AG News: headlines and first lines, in four sections."""

import csv
from functools import partial
from pathlib import Path

import numpy as np

from thinwire.errors import ConfigError
from thinwire.tasks.base import ACCURACY, Defaults, Task
from thinwire.tasks.data import hub
from thinwire.tasks.data.base import Stream
from thinwire.tasks.data.examples import Texts, labelled, padded
from thinwire.tasks.data.files import Folder, read
from thinwire.tasks.data.words import UNKNOWN, Vocabulary, tokens
from thinwire.tasks.models.sentences import TextTransformer, WordBag

Articles = list[tuple[str, int]]
_LENGTH = 64


def agnews(folder: Folder) -> Task:
    """News to sort, from agnews/{train,test}.csv, or by the hub library.

    Where the train file is not there, a fifth of the test file, chosen at random once and for all, is held out and
    the rest is trained on.
    """
    title, train, test = _articles(folder)
    sentences = [tokens(words) for words, _ in train]
    vocabulary = Vocabulary.of(sentences, size=10_000, occurrences=2)
    sets = [_table(vocabulary, articles) for articles in (train, test)]
    networks = {
        "bag": partial(WordBag, len(vocabulary), 64, 4),
        "transformer": partial(
            TextTransformer, len(vocabulary), width=64, layers=2, heads=4, length=_LENGTH, classes=4
        ),
    }
    settings = (Defaults("adamw", lr=2e-3, batch_size=32, weight_decay=0.1), Defaults("sgd", lr=0.1, batch_size=32))
    return Task("agnews", title, ACCURACY, networks, labelled(*sets), settings)


def _articles(folder: Folder) -> tuple[str, Articles, Articles]:
    names = ("agnews/train.csv", "agnews/test.csv")
    if hub.installed() and folder.lacks(*names):
        train, test = (_downloaded(split) for split in ("train", "test"))
        return "AG News", train, test
    if folder.has(names[0]):
        train, test = (read(folder.file(name), _rows) for name in names)
        return "AG News", train, test
    rows = read(folder.file(names[1], otherwise=hub.OFFER), _rows)
    order = Stream((0xA6,)).permutation(len(rows))
    held, kept = np.split(order, [len(rows) // 5])
    title = "AG News (the test file, split 4 to 1)"
    return title, [rows[index] for index in kept], [rows[index] for index in held]


def _rows(path: Path) -> Articles:
    with path.open(encoding="utf-8", newline="") as file:
        rows = [(f"{title} {text}", int(section) - 1) for section, title, text in csv.reader(file)]
    if len(rows) < 5 or not {section for _, section in rows} <= {0, 1, 2, 3}:
        raise ConfigError(f"{path}: expected rows of section (1 to 4), title and text; copy it anew")
    return rows


def _downloaded(split: str) -> Articles:
    return [(str(row["text"]), int(str(row["label"]))) for row in hub.download("fancyzhx/ag_news", split)]


def _table(vocabulary: Vocabulary, articles: Articles) -> Texts:
    numbers = [vocabulary.numbers(tokens(words)) or [UNKNOWN] for words, _ in articles]
    labels = np.array([section for _, section in articles], np.int64)
    return Texts(padded(numbers, _LENGTH), labels)
