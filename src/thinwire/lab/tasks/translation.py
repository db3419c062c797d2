# SPDX-License-Identifier: Apache-2.0
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
from thinwire.lab.tasks.base import IGNORED, TOKEN_ACCURACY, Defaults, Task, evaluating
from thinwire.lab.tasks.data.base import Batch, ExampleMetadata, Indices, RandomBits, sample
from thinwire.lab.tasks.data.examples import ExampleSet, padded, trimmed
from thinwire.lab.tasks.data.files import Folder, lines, read
from thinwire.lab.tasks.data.vocabulary import BEGIN, END, PADDING, UNKNOWN, Vocabulary, tokens
from thinwire.lab.tasks.models.sentences import Translator

_LENGTH = 48


@dataclass(frozen=True, eq=False)
class SentencePairs:
    """Sentences and their translations, as token numbers with 0 for padding.

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

    def take(self, rows: Indices, draws: RandomBits | None = None) -> Batch:
        """int64 source [batch, source], target [batch, length], and the next words, `IGNORED` for padding."""
        target = trimmed(self.target, rows)
        following = target[:, 1:].masked_fill(target[:, 1:] == 0, IGNORED)
        return trimmed(self.source, rows), target[:, :-1], following


def multi30k(folder: Folder) -> Task:
    """29,000 captions in two languages, from multi30k/{train,test_2016_flickr}.{en,de}.gz; the latter is held out."""
    train, test = (_sentences(folder, part) for part in ("train", "test_2016_flickr"))
    source, target = (Vocabulary.of((pair[side] for pair in train), size=8_000, occurrences=3) for side in (0, 1))
    kept, held = (_pairs(pairs, source, target) for pairs in (train, test))
    data = ExampleSet(kept, held, ExampleMetadata(np.ones(len(train), np.int64)))
    build = partial(Translator, len(source), len(target), length=_LENGTH)
    networks = {
        "small": partial(build, width=128, layers=2, heads=4),
        "base": partial(build, width=256, layers=3, heads=4),
    }
    settings = (Defaults("adamw", lr=2e-3, batch_size=32, weight_decay=0.01), Defaults("sgd", lr=0.1, batch_size=32))
    return Task("multi30k", "Multi30k, English to German", TOKEN_ACCURACY, networks, data, settings)


def bleu(task: Task, model: Translator, *, limit: int | None = 200) -> float:
    """BLEU, 0 to 100, of greedy translations of held-out sentences: lower-case words, one reference each.

    A word that is not in the vocabulary always counts as a mistake.

    Args:
        task: `multi30k`.
        model: one of the task's models.
        limit: how many sentences to translate; None is all.

    Raises:
        ConfigError: the task does not translate.
    """
    data = task.data
    if not (isinstance(data, ExampleSet) and isinstance(data.test, SentencePairs)):
        raise ConfigError(f"task {task.name!r} does not translate; BLEU is for task 'multi30k'")
    table = data.test
    rows = sample(len(table), limit)
    translations: list[list[str]] = []
    for first in range(0, len(rows), data.evaluation_batch):
        source = table.take(rows[first : first + data.evaluation_batch])[0]
        output = translate(model, source)
        # The reference has <unknown> too, and equal ones must not count as a match.
        output = output.masked_fill(output == UNKNOWN, PADDING)
        translations += [table.vocabulary.sentence(numbers) for numbers in output.tolist()]
    references = [table.vocabulary.sentence(numbers[1:]) for numbers in table.target[rows].tolist()]
    return corpus_bleu(translations, references)


def translate(model: Translator, source: Tensor, *, length: int = _LENGTH) -> Tensor:
    """Greedy decoding, int64 [batch, source] to [batch, at most length - 1]: each time the most likely next word."""
    with evaluating(model):
        source = source.to(next(model.parameters()).device)
        encoded = model.encode(source)
        words = torch.full((len(source), 1), BEGIN, dtype=torch.int64, device=source.device)
        while words.shape[1] < length and not bool((words == END).any(1).all()):
            following = model.decode(encoded, source, words)[:, -1].argmax(-1, keepdim=True)
            words = torch.cat([words, following], 1)
    return words[:, 1:]


def corpus_bleu(translations: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> float:
    """BLEU, 0 to 100 (Papineni et al. 2002): precision of n-grams of 1 to 4 words, with a penalty for brevity.

    Args:
        translations: as words.
        references: one for each translation.

    Example:
        >>> corpus_bleu(["a b c d e".split()], ["a b c d e".split()])
        100.0
    """
    precisions = [_precision(translations, references, n) for n in (1, 2, 3, 4)]
    if min(precisions) == 0:
        return 0.0
    length, expected = (sum(map(len, sentences)) for sentences in (translations, references))
    return 100 * math.exp(min(0.0, 1 - expected / length) + sum(map(math.log, precisions)) / 4)


def _precision(translations: Sequence[Sequence[str]], references: Sequence[Sequence[str]], n: int) -> float:
    """The fraction of the translations' n-grams that are in the references, each counted as often as it is there."""
    hits = total = 0
    for translation, reference in zip(translations, references, strict=True):
        found, allowed = _ngrams(translation, n), _ngrams(reference, n)
        hits += (found & allowed).total()
        total += found.total()
    return hits / total if total else 0.0


def _ngrams(sentence: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(zip(*(sentence[offset:] for offset in range(n)), strict=False))


def _sentences(folder: Folder, part: str) -> list[tuple[list[str], list[str]]]:
    english, german = (read(folder.file(f"multi30k/{part}.{side}.gz"), lines) for side in ("en", "de"))
    if len(english) != len(german):
        raise ConfigError(
            f"multi30k/{part}: {len(english)} English lines and {len(german)} German ones. Copy them again"
        )
    return [(tokens(one), tokens(other)) for one, other in zip(english, german, strict=True)]


def _pairs(pairs: Sequence[tuple[list[str], list[str]]], source: Vocabulary, target: Vocabulary) -> SentencePairs:
    english = [[*source.numbers(one)[: _LENGTH - 1], END] for one, _ in pairs]
    german = [[BEGIN, *target.numbers(other)[: _LENGTH - 2], END] for _, other in pairs]
    return SentencePairs(padded(english, _LENGTH), padded(german, _LENGTH), target)
