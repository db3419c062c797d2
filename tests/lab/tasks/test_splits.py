# SPDX-License-Identifier: Apache-2.0
"""Random draws that are functions of their keys, and splits that give every example to exactly one worker."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from tests.rules import for_each, refusals
from thinwire.errors import ConfigError
from thinwire.lab.tasks.data.base import ExampleMetadata, Shard, Stream, sample
from thinwire.lab.tasks.data.examples import ExampleSet, Rows, labelled
from thinwire.lab.tasks.data.passages import Document, Passages, passages
from thinwire.lab.tasks.data.split import split_shards


def examples(n: int, *, classes: int = 10, groups: int = 20, minimum: int = 1) -> ExampleMetadata:
    numbers = np.arange(n)
    return ExampleMetadata(np.ones(n, np.int64), minimum, labels=numbers % classes, groups=numbers % groups)


def all_indices(shards: tuple[Shard, ...]) -> list[int]:
    return sorted(int(index) for shard in shards for index in shard.indices)


def numbered(n: int) -> ExampleSet:
    """Examples whose only feature is their own number."""
    rows = Rows(np.arange(n, dtype=np.uint8)[:, None], np.arange(n) % 2)
    return labelled(rows, rows)


def drawn(data: ExampleSet, shard: Shard, step: int, batch_size: int, seed: int = 0) -> list[int]:
    return data.batch(shard, step, batch_size=batch_size, seed=seed, rank=0)[0].flatten().int().tolist()


@given(
    n=some.integers(1, 300),
    workers=some.integers(1, 12),
    alpha=some.sampled_from([0.001, 0.1, 1.0, 100.0]),
    classes=some.integers(1, 12),
    minimum=some.integers(1, 4),
    seed=some.integers(-(2**40), 2**64),
)
def test_a_dirichlet_split_gives_every_example_to_exactly_one_worker(
    n: int, workers: int, alpha: float, classes: int, minimum: int, seed: int
) -> None:
    facts = examples(n, classes=classes, minimum=minimum)
    if n < workers * minimum:
        with pytest.raises(ConfigError, match="Use fewer workers"):
            split_shards(facts, workers, split=f"dirichlet({alpha})", seed=seed)
        return
    shards = split_shards(facts, workers, split=f"dirichlet({alpha})", seed=seed)
    assert all_indices(shards) == list(range(n))
    assert all(shard.units == len(shard) >= minimum for shard in shards)


@given(n=some.integers(30, 200), workers=some.integers(1, 10), split=some.sampled_from(["iid", "label", "group"]))
def test_every_split_gives_every_example_to_exactly_one_worker(n: int, workers: int, split: str) -> None:
    shards = split_shards(examples(n), workers, split=split, seed=0)
    assert all_indices(shards) == list(range(n))
    if split != "group":
        assert max(map(len, shards)) - min(map(len, shards)) <= 1


@for_each(["iid", "label", "group", "dirichlet(0.3)"])
def test_a_split_depends_on_its_seed_alone(split: str) -> None:
    first, again, other = (split_shards(examples(99), 4, split=split, seed=seed) for seed in (1, 1, 2))
    assert [shard.indices.tolist() for shard in first] == [shard.indices.tolist() for shard in again]
    assert [shard.indices.tolist() for shard in first] != [shard.indices.tolist() for shard in other]


def test_a_split_by_label_gives_each_of_ten_workers_one_of_ten_classes() -> None:
    facts = examples(200)
    assert facts.labels is not None
    for shard in split_shards(facts, 10, split="label", seed=0):
        assert len(np.unique(facts.labels[shard.indices])) == 1


def test_a_split_by_group_keeps_groups_whole_and_balances_the_weights() -> None:
    groups = np.repeat(np.arange(30), np.arange(1, 31))
    facts = ExampleMetadata(np.full(len(groups), 7), groups=groups)
    shards = split_shards(facts, 4, split="group", seed=0)
    owners = [set(groups[shard.indices].tolist()) for shard in shards]
    assert sum(map(len, owners)) == 30
    sizes = [shard.units for shard in shards]
    assert max(sizes) - min(sizes) <= 7 * 5


def test_a_small_alpha_makes_shards_differ_and_a_large_one_makes_them_alike() -> None:
    facts = examples(4000)

    def commonest(alpha: float) -> float:
        """The fraction of its most frequent class in a worker's examples, on average."""
        assert facts.labels is not None
        shards = split_shards(facts, 8, split=f"dirichlet({alpha})", seed=0)
        return float(np.mean([np.bincount(facts.labels[s.indices]).max() / len(s) for s in shards]))

    assert commonest(1000.0) < 0.15 < 0.35 < commonest(0.05)


test_a_split_that_cannot_be_is_refused = refusals(
    [
        ("even", r"split='even': unknown. Use one of iid, dirichlet\(ALPHA\), label, group"),
        ("dirichlet(0)", r"split='dirichlet\(0\)': alpha must be a positive number, as in dirichlet\(0.1\)"),
        ("dirichlet(inf)", "alpha must be a positive number"),
        ("dirichlet(x)", "alpha must be a positive number"),
        ("label", "split='label': this data has no classes. Use split='iid'"),
        ("group", "split='group': this data has no groups. Use split='iid'"),
        ("dirichlet(1)", "this data has no classes or groups. Use split='iid'"),
    ],
    lambda split: split_shards(ExampleMetadata(np.ones(9, np.int64)), 2, split=split, seed=0),
)


def test_too_many_workers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"workers=0: must be at least 1"):
        split_shards(examples(10), 0, split="iid", seed=0)
    with pytest.raises(ConfigError, match=r"workers=11, split='iid': worker 10 would hold 0 examples.* fewer workers"):
        split_shards(examples(10), 11, split="iid", seed=0)
    with pytest.raises(ConfigError, match=r"split='group': 6 workers, but only 5 groups. Use fewer workers"):
        split_shards(examples(100, groups=5), 6, split="group", seed=0)


@given(n=some.integers(1, 40), batch_size=some.integers(1, 50), epochs=some.integers(1, 3), seed=some.integers(0, 99))
def test_every_example_is_drawn_once_an_epoch(n: int, batch_size: int, epochs: int, seed: int) -> None:
    data = numbered(50)
    shard = Shard(np.arange(n, dtype=np.int64), n)
    steps = -(-n * epochs // batch_size)
    draws = [index for step in range(steps) for index in drawn(data, shard, step, batch_size, seed)]
    for epoch in range(epochs):
        assert sorted(draws[epoch * n : epoch * n + n]) == list(range(n))


def test_epochs_differ_in_order_and_batches_are_always_full() -> None:
    data = numbered(50)
    shard = Shard(np.arange(50, dtype=np.int64), 50)
    first, second = drawn(data, shard, 0, 50), drawn(data, shard, 1, 50)
    assert first != second
    assert len(drawn(data, shard, 3, 16)) == 16
    assert data.steps_per_epoch(shard, 16) == 4


def test_streams_differ_by_every_part_of_their_key() -> None:
    keys = [(0,), (0, 0), (1,), (0, 1), (1, 0), (-1,), (2**64,)]
    words = {tuple(Stream(key).words(0, 2).tolist()) for key in keys[:-1]}
    assert len(words) == len(keys) - 1
    assert Stream((2**64,)).words(0, 2).tolist() == Stream((0,)).words(0, 2).tolist()


def test_a_stream_is_the_same_from_every_position() -> None:
    stream = Stream((3, 1, 4))
    assert stream.words(5, 10).tolist() == stream.words(0, 15)[5:].tolist()


def test_random_words_are_uniform() -> None:
    counts = np.bincount(Stream((7,)).below(10, 0, 100_000), minlength=10)
    assert abs(counts - 10_000).max() < 500
    ones = np.unpackbits(Stream((8,)).words(0, 10_000).view(np.uint8)).mean()
    assert abs(ones - 0.5) < 0.005


@given(count=some.integers(0, 50), limit=some.none() | some.integers(1, 60))
def test_a_sample_is_some_of_the_numbers_ascending(count: int, limit: int | None) -> None:
    found = sample(count, limit).tolist()
    assert found == sorted(set(found))
    assert len(found) == (count if limit is None else min(count, limit))
    assert all(0 <= number < count for number in found)


def test_a_sample_has_all_classes_of_a_file_that_repeats_them_in_order() -> None:
    assert len(np.unique(sample(10_000, 200) % 10)) == 10


def prose(groups: int, lines: int) -> Passages:
    documents = [
        Document(f"group {g}", "".join(f"<{g} {line}>\n" for line in range(lines)).encode()) for g in range(groups)
    ]
    return passages(documents, [Document("held out", b"other words\n" * 30)], context=16, nbytes=40)


def test_passages_end_with_a_line_and_belong_to_one_group() -> None:
    data = prose(4, 30)
    for index, group in enumerate(data.groups):
        passage = data.text[data.bounds[index] : data.bounds[index + 1]].tobytes().decode()
        assert passage.endswith("\n")
        assert {line.split()[0] for line in passage.splitlines()} == {f"<{group}"}


@for_each(["iid", "group", "dirichlet(0.5)"])
def test_windows_read_a_workers_own_passages_and_nothing_else(split: str) -> None:
    data = prose(6, 40)
    shards = split_shards(data.metadata, 3, split=split, seed=0)
    assert sum(shard.units for shard in shards) == len(data.text)
    for rank, shard in enumerate(shards):
        own = b"".join(data.text[data.bounds[i] : data.bounds[i + 1]].tobytes() for i in shard.indices)
        assert len(own) == shard.units
        for step in range(20):
            inputs, targets = data.batch(shard, step, batch_size=4, seed=0, rank=rank)
            for window, following in zip(inputs.tolist(), targets.tolist(), strict=True):
                assert bytes([*window, following[-1]]) in own
                assert window[1:] == following[:-1]


def test_windows_can_begin_anywhere_in_a_shard() -> None:
    data = prose(1, 20)
    (shard,) = split_shards(data.metadata, 1, split="iid", seed=0)
    starts = Stream((0, 0, 0x7E87)).below(shard.units - 16, 0, 5000)
    assert (starts.min(), starts.max()) == (0, shard.units - 17)
    assert data.steps_per_epoch(shard, 2) == -(-shard.units // 32)


def test_a_shard_shorter_than_a_window_is_refused() -> None:
    data = prose(2, 10)
    with pytest.raises(ConfigError, match=r"would hold \d+ bytes, and it needs at least 17. Use fewer workers"):
        split_shards(data.metadata, 50, split="iid", seed=0)


def test_text_shorter_than_a_window_is_refused() -> None:
    some_lines, a_line = Document("a", b"words and words\n" * 9), Document("b", b"words\n")
    with pytest.raises(ConfigError, match=r"context=16: must be less than the 6 bytes of text there are"):
        passages([some_lines], [a_line], context=16, nbytes=40)


def test_held_out_windows_follow_each_other() -> None:
    data = prose(1, 10)
    held = data.held.tobytes()
    windows = [bytes(row) for inputs, _ in data.held_out(None) for row in inputs.tolist()]
    assert b"".join(windows) == held[: len(windows) * 16]
    assert len(windows) == (len(held) - 1) // 16
    assert sum(len(targets) for _, targets in data.held_out(3)) == 3
