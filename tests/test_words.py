# SPDX-License-Identifier: Apache-2.0
"""One concept, one word: words and phrases that only this project used stay away."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.rules import for_each

ROOT = Path(__file__).parents[1]
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
# Words that meant something here alone. In texts that readers see they are replaced by the field's.
PRIVATE = {
    "letter": "message",
    "keeper": "coordinator",
    "owed": "residual",
    "unsaid": "residual",
    "knob": "hyperparameter",
    "buddy": "member",
    "yardstick": "baseline",
    "left unsaid": "residual",
    "party": "participant",
}
TEXTS = [ROOT / name for name in TRACKED if re.match(r"(README|CONTRIBUTING|docs/.*)\.md|src/.*\.(py|c)$", name)]


@pytest.mark.skipif(not TRACKED, reason="not a checkout")
@for_each(PRIVATE)
def test_a_private_word_is_not_used(word: str) -> None:
    pattern = re.compile(rf"\b{word}s?\b", re.IGNORECASE)
    found = [path.relative_to(ROOT).as_posix() for path in TEXTS if pattern.search(path.read_text(encoding="utf-8"))]
    assert not found, f"say {PRIVATE[word]}"


# Phrases of a dialect that only this project spoke, and what to write instead.
PHRASES = {
    r"\banew\b": "again, from scratch, or restart",
    r"\btrain(?:s|ed|ing)? apart\b": "diverge",
    r"\bwho (?:joins|comes|trains|waits|sends|leaves)\b": "the noun that who stands for",
    r"(?:^|[\"#.:] ?)Who (?:is|has|joins|comes|waits|trains|sends|asks)\b": "the noun that who stands for",
    r"\bnobody (?:is waited for|waits|goes on)\b": "no worker waits, or none continues",
    r"\bremember(?:s|ed)?\b": "optimizer state, or saves",
    r"\bhas nothing to say\b": "contributes nothing",
    r"\bwherein\b|\bwhereupon\b|\bthereby\b|\bhence\b": "a second sentence",
    r"\bfor ever\b": "forever",
    r"\bis of torch\.": "has dtype",
    r"\bgiven? the view up\b|\bgave the view up\b": "abandoned the view",
    r"\bsomebody\b|\bwhoever\b": "the noun, such as another worker",
    r"\bwhat is there\b": "what exists",
    r"\b(?:go|goes|going|went|gone) on\b": "continue",
}


@pytest.mark.skipif(not TRACKED, reason="not a checkout")
@for_each(PHRASES)
def test_a_phrase_of_the_dialect_is_not_used(phrase: str) -> None:
    pattern = re.compile(phrase, re.IGNORECASE | re.MULTILINE)
    found = [
        f"{path.relative_to(ROOT).as_posix()}:{number}: {line.strip()}"
        for path in TEXTS
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found, f"write {PHRASES[phrase]}:\n" + "\n".join(found)
