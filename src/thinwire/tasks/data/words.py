"""Words and their numbers."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

PADDING, BEGIN, END, UNKNOWN = range(4)
_SPECIAL = ("<padding>", "<begin>", "<end>", "<unknown>")
_TOKEN = re.compile(r"\w+|[^\w\s]")


def tokens(text: str) -> list[str]:
    """Words and punctuation marks, in lower case."""
    return _TOKEN.findall(text.lower())


@dataclass(frozen=True)
class Vocabulary:
    """Words with a number each, from 4 on; 0 to 3 are padding, begin, end and unknown.

    Args:
        words: the words by number.
    """

    words: tuple[str, ...]
    _number: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_number", {word: number for number, word in enumerate(self.words)})

    @classmethod
    def of(cls, sentences: Iterable[list[str]], *, size: int, occurrences: int) -> "Vocabulary":
        """The most frequent words of the sentences; ties in alphabetical order.

        Args:
            sentences: tokens.
            size: numbers given out at most, the special ones included.
            occurrences: rarer words stay unknown.
        """
        counts = Counter(token for sentence in sentences for token in sentence)
        frequent = sorted((-count, word) for word, count in counts.items() if count >= occurrences)
        return cls(_SPECIAL + tuple(word for _, word in frequent[: size - len(_SPECIAL)]))

    def __len__(self) -> int:
        return len(self.words)

    def numbers(self, sentence: list[str]) -> list[int]:
        """The number of each token."""
        return [self._number.get(token, UNKNOWN) for token in sentence]

    def sentence(self, numbers: Iterable[int]) -> list[str]:
        """The tokens up to the end mark."""
        found: list[str] = []
        for number in numbers:
            if number == END:
                break
            found.append(self.words[number])
        return found
