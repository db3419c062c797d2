# SPDX-License-Identifier: Apache-2.0
"""The pure parts: the task's values, the search for a rate, targets, rankings and bars."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from thin_gpt import VERSION
from thin_gpt.task import BATCH, SIZES, Text, load_text, loss_of, model_of, rate_factor, tokens_of
from thin_gpt.tuning import GOLDEN, MOST_TRIES, RATIO, TRIES, at_edge, best_rate, first_rates, next_rate
from thin_gpt.verdicts import final_bar, kendall, memory_bar, rank_bar, ratio_bar, seconds_at, steps_to, target_of

TEXT = Text(bytes(range(256)) * 500, bytes(range(255, -1, -1)) * 60, ())


def test_the_task_is_frozen() -> None:
    """A change of these values needs a new version."""
    assert VERSION == "thin-gpt/1"
    counts = {name: sum(p.numel() for p in model_of(size, 0).parameters()) for name, size in SIZES.items()}
    assert counts == {"toy": 30_432, "400k": 391_264, "6m": 6_482_688, "30m": 29_905_088}
    assert TEXT.batch(SIZES["toy"], 0, 1, 2)[:8].hex() == "1415161718191a1b"
    assert TEXT.fingerprint == "e97f9b812b1996bf"
    model, size = model_of(SIZES["toy"], 0), SIZES["toy"]
    assert loss_of(model, tokens_of(TEXT.batch(size, 0, 0, 0), size)).item() == pytest.approx(5.5645, abs=1e-3)


def test_batches_differ_by_seed_rank_and_step() -> None:
    size = SIZES["toy"]
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    assert len({TEXT.batch(size, *key) for key in keys}) == len(keys)
    assert tokens_of(TEXT.batch(size, 0, 0, 0), size).shape == (BATCH, size.context + 1)
    assert TEXT.held_out(size).shape == (size.windows, size.context + 1)


def test_the_library_text_holds_whole_packages_out() -> None:
    text = load_text()
    assert 20 * len(text.held) > len(text.train) > 3_000_000
    assert all(name.endswith(".py") for name in text.held_files)


def test_a_short_text_is_refused(tmp_path: object) -> None:
    path = f"{tmp_path}/short"
    with open(path, "wb") as file:  # noqa: PTH123
        file.write(b"short" * 100)
    with pytest.raises(ValueError, match="at least 112,000"):
        load_text(path)


def test_the_model_is_a_function_of_the_seed_and_leaves_the_global_generator() -> None:
    before = torch.random.get_rng_state()
    first, again, other = (
        torch.nn.utils.parameters_to_vector(model_of(SIZES["toy"], seed).parameters()) for seed in (3, 3, 4)
    )
    assert first.equal(again) and not first.equal(other)
    assert torch.random.get_rng_state().equal(before)


def test_the_rate_rises_stays_and_falls() -> None:
    factors = [rate_factor(step, 2000, 500) for step in range(2500)]
    assert factors[0] == 0.01 and factors[99] == 1.0 and factors[1999] == 1.0
    assert factors[-1] == pytest.approx(0.1) and factors[2249] == pytest.approx(0.55)


def search(loss: Callable[[float], float], start: float = 1e-3) -> dict[float, float]:
    losses: dict[float, float] = {}
    while (rate := next_rate(losses, start)) is not None:
        assert rate not in losses
        losses[rate] = loss(rate)
    return losses


@pytest.mark.parametrize("best", [1e-5, 3e-4, 1e-3, 1.3e-3, 6e-3, 0.2])
def test_the_search_never_ends_at_an_edge(best: float) -> None:
    losses = search(lambda rate: math.log(rate / best) ** 2)
    assert not at_edge(losses) and TRIES <= len(losses) <= MOST_TRIES
    first = first_rates(1e-3)
    if first[0] < best < first[-1]:
        assert len(losses) == TRIES
        assert abs(math.log(best_rate(losses) / best)) < math.log(RATIO) / 3
    assert set(first) <= set(losses)


def test_a_diverged_run_is_the_worst_and_monotone_losses_end_the_search() -> None:
    losses = search(lambda rate: float("nan") if rate > 2e-3 else -rate)
    assert best_rate(losses) < 2e-3 and not at_edge(losses)
    never = search(lambda rate: -rate)
    assert len(never) == MOST_TRIES and at_edge(never)


def test_the_section_is_golden() -> None:
    losses = {rate: abs(math.log(rate / 1e-3)) for rate in first_rates(1e-3)}
    following = next_rate(losses, 1e-3)
    assert following is not None
    assert following / 1e-3 == pytest.approx(math.exp(math.log(RATIO) / RATIO), rel=1e-3)
    assert abs(RATIO - (GOLDEN + 1)) < 1e-12


CURVE = [[100, 4.0], [200, 3.0], [300, 2.0], [400, 2.0], [500, 2.0], [600, 1.0]]


def test_targets_are_of_the_trunk_and_steps_are_interpolated() -> None:
    assert target_of(CURVE, 500) == 2.0
    assert steps_to(CURVE, 2.0, 500) == 500
    # Means of three: 3 at 300, 7/3 at 400, 2 at 500.
    assert steps_to(CURVE, 8 / 3, 500) == pytest.approx(350)
    assert steps_to(CURVE, 1.9, 500) is None
    assert steps_to(CURVE, 5.0, 500) == 300
    assert seconds_at([1.0, 2.0, 4.0], 2.5) == 3.0
    assert seconds_at([1.0, 2.0, 4.0], 3) == 4.0


def test_kendalls_tau() -> None:
    names = list("abcdefgh")
    assert kendall(names, names) == 1 and kendall(names, names[::-1]) == -1
    swapped = [*names[:-2], "h", "g"]
    assert kendall(names, swapped) == pytest.approx(1 - 2 / 28)
    assert rank_bar(names, swapped, "t").met and not rank_bar(names, ["b", "a", "d", "c", *names[4:]], "t").met
    assert rank_bar(names, names[:5], "t").met is None
    with pytest.raises(ValueError, match="same names"):
        kendall(names, names[1:])


def test_bars() -> None:
    assert ratio_bar("20mbit/equal", {"a": 10.0, "b": 8.0}, {"c": 12.0}).met
    assert not ratio_bar("20mbit/equal", {"a": 10.0}, {"c": 12.0}).met
    assert ratio_bar("100mbit-50ms/uneven", {"a": 1.0}, {"torchft-diloco": 1.6, "ddp": 1.0}).met
    assert ratio_bar("1gbit/equal", {}, {"c": 12.0}).met is None
    assert final_bar("x", [1.0, 1.0, 1.02], [1.0] * 3).met and not final_bar("x", [1.02] * 3, [1.0] * 3).met
    assert final_bar("x", [1.0], [1.0] * 3).met is None
    assert memory_bar("x", 140e6, 100e6, 5_000_000).measured == 2.0
    assert "not run" in memory_bar("x", None, 1.0, 1).line()
