"""Multi30k: captions of pictures, from English to German."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.tasks.base import IGNORED, TOKEN_ACCURACY, Defaults, Task, evaluating
from thinwire.tasks.data.base import Batch, Census, Indices, Words, sample
from thinwire.tasks.data.examples import ExampleSet, padded, trimmed
from thinwire.tasks.data.files import Folder, lines, read
from thinwire.tasks.data.words import BEGIN, END, PADDING, UNKNOWN, Vocabulary, tokens
from thinwire.tasks.models.sentences import Translator

_LENGTH = 48


@dataclass(frozen=True, eq=False)
class SentencePairs:
    """Sentences and their translations, as token numbers, 0 for padding.

    Args:
        source: int32, [n, length], each ended by `END`.
        target: int32, [n, length], each between `BEGIN` and `END`.
        vocabulary: of the target.
    """

    source: NDArray[np.int32]
    target: NDArray[np.int32]
    vocabulary: Vocabulary

    def __len__(self) -> int:
        return len(self.source)

    def take(self, rows: Indices, draws: Words | None = None) -> Batch:
        """int64 source [batch, source], target [batch, length], and the same one word on, `IGNORED` after its end."""
        target = trimmed(self.target, rows)
        following = target[:, 1:].masked_fill(target[:, 1:] == 0, IGNORED)
        return trimmed(self.source, rows), target[:, :-1], following


def multi30k(folder: Folder) -> Task:
    """29,000 captions, from multi30k/{train,test_2016_flickr}.{en,de}.gz; the test set of 2016 is held out."""
    train, test = (_sentences(folder, part) for part in ("train", "test_2016_flickr"))
    source, target = (Vocabulary.of((pair[side] for pair in train), size=8_000, occurrences=3) for side in (0, 1))
    kept, held = (_pairs(pairs, source, target) for pairs in (train, test))
    data = ExampleSet(kept, held, Census(np.ones(len(train), np.int64)))
    build = partial(Translator, len(source), len(target), length=_LENGTH)
    networks = {
        "small": partial(build, width=128, layers=2, heads=4),
        "base": partial(build, width=256, layers=3, heads=4),
    }
    settings = (Defaults("adamw", lr=2e-3, batch_size=32, weight_decay=0.01), Defaults("sgd", lr=0.1, batch_size=32))
    return Task("multi30k", "Multi30k, English to German", TOKEN_ACCURACY, networks, data, settings)


def bleu(task: Task, model: Translator, *, limit: int | None = 200) -> float:
    """BLEU, 0 to 100, of greedy translations of held-out sentences: lower-case words, one reference.

    A word that is not in the vocabulary is never translated right.

    Args:
        task: `multi30k`.
        model: one of its own.
        limit: sentences looked at; None is all of them.
    """
    data = task.data
    if not (isinstance(data, ExampleSet) and isinstance(data.test, SentencePairs)):
        raise ConfigError(f"task {task.name!r} does not translate; BLEU is for task 'multi30k'")
    table = data.test
    rows = sample(len(table), limit)
    found: list[list[str]] = []
    for first in range(0, len(rows), data.evaluation_batch):
        source = table.take(rows[first : first + data.evaluation_batch])[0]
        said = translate(model, source)
        said = said.masked_fill(said == UNKNOWN, PADDING)
        found += [table.vocabulary.sentence(numbers) for numbers in said.tolist()]
    wanted = [table.vocabulary.sentence(numbers[1:]) for numbers in table.target[rows].tolist()]
    return corpus_bleu(found, wanted)


def translate(model: Translator, source: Tensor, *, length: int = _LENGTH) -> Tensor:
    """The likeliest next word, again and again: int64 [batch, source] to [batch, at most length - 1]."""
    with evaluating(model):
        source = source.to(next(model.parameters()).device)
        encoded = model.encode(source)
        words = torch.full((len(source), 1), BEGIN, device=source.device)
        while words.shape[1] < length and not bool((words == END).any(1).all()):
            following = model.decode(encoded, source, words)[:, -1].argmax(-1, keepdim=True)
            words = torch.cat([words, following], 1)
    return words[:, 1:]


def corpus_bleu(found: Sequence[Sequence[str]], wanted: Sequence[Sequence[str]]) -> float:
    """BLEU, 0 to 100 (Papineni et al. 2002): shared runs of one to four words, and a penalty for being short.

    Args:
        found: translations.
        wanted: one reference for each.
    """
    precisions = [_shared(found, wanted, words) for words in (1, 2, 3, 4)]
    if min(precisions) == 0:
        return 0.0
    said, asked = (sum(map(len, sentences)) for sentences in (found, wanted))
    return 100 * math.exp(min(0.0, 1 - asked / said) + sum(map(math.log, precisions)) / 4)


def _shared(found: Sequence[Sequence[str]], wanted: Sequence[Sequence[str]], words: int) -> float:
    hits = total = 0
    for mine, reference in zip(found, wanted, strict=True):
        runs, allowed = _runs(mine, words), _runs(reference, words)
        hits += (runs & allowed).total()
        total += runs.total()
    return hits / total if total else 0.0


def _runs(sentence: Sequence[str], words: int) -> Counter[tuple[str, ...]]:
    return Counter(zip(*(sentence[offset:] for offset in range(words)), strict=False))


def _sentences(folder: Folder, part: str) -> list[tuple[list[str], list[str]]]:
    english, german = (read(folder.file(f"multi30k/{part}.{side}.gz"), lines) for side in ("en", "de"))
    if len(english) != len(german):
        raise ConfigError(
            f"multi30k/{part}: {len(english)} English lines and {len(german)} German ones; copy them anew"
        )
    return [(tokens(one), tokens(other)) for one, other in zip(english, german, strict=True)]


def _pairs(pairs: Sequence[tuple[list[str], list[str]]], source: Vocabulary, target: Vocabulary) -> SentencePairs:
    english = [[*source.numbers(one)[: _LENGTH - 1], END] for one, _ in pairs]
    german = [[BEGIN, *target.numbers(other)[: _LENGTH - 2], END] for _, other in pairs]
    return SentencePairs(padded(english, _LENGTH), padded(german, _LENGTH), target)
