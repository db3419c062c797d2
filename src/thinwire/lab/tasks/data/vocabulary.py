# SPDX-License-Identifier: Apache-2.0
"""Tokens of text, and the vocabulary that gives them numbers."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

_SPECIAL = ("<padding>", "<begin>", "<end>", "<unknown>")
UNKNOWN = 3
_TOKEN = re.compile(r"\w+|[^\w\s]")


def tokens(text: str) -> list[str]:
    """Words and punctuation marks, in lower case."""
    return _TOKEN.findall(text.lower())


@dataclass(frozen=True)
class Vocabulary:
    """Words with numbers from 4 on; 0 to 3 are padding, begin, end and unknown.

    Args:
        words: the words by number.

    Example:
        >>> vocabulary = Vocabulary.of([tokens("the cat, the dog")], size=6, occurrences=1)
        >>> vocabulary.numbers(tokens("The dog"))
        [4, 3]
    """

    words: tuple[str, ...]
    _number: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_number", {word: number for number, word in enumerate(self.words)})

    @classmethod
    def of(cls, sentences: Iterable[list[str]], *, size: int, occurrences: int) -> "Vocabulary":
        """The most frequent words of the sentences; ties in alphabetical order.

        Args:
            sentences: as tokens.
            size: the most numbers that are used, with the four special ones.
            occurrences: how often a word must occur; rarer ones are unknown.
        """
        counts = Counter(token for sentence in sentences for token in sentence)
        frequent = sorted((-count, word) for word, count in counts.items() if count >= occurrences)
        return cls(_SPECIAL + tuple(word for _, word in frequent[: size - len(_SPECIAL)]))

    def __len__(self) -> int:
        return len(self.words)

    def numbers(self, sentence: list[str]) -> list[int]:
        """The number of each token."""
        return [self._number.get(token, UNKNOWN) for token in sentence]
