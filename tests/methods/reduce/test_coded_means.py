# SPDX-License-Identifier: Apache-2.0
"""Compressed means: identities, equal bits on all ranks, bytes, and errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.grids import fast_where
from tests.oracles import codecs as oracles
from thinwire import (
    BetweenNodes,
    Bf16,
    ChunkedTopK,
    Codec,
    Comm,
    CommError,
    ConfigError,
    CountingComm,
    Gathered,
    Nearest,
    PowerSGD,
    Ring,
    run_threads,
)
from thinwire.core.comm.pending import PendingMeans
from thinwire.core.replica.flat import Segment
from thinwire.methods.codecs.base import draw_key
from thinwire.methods.codecs.cast import Fp8, Fp16
from thinwire.methods.codecs.feedback import ErrorFeedback, resize_errors
from thinwire.methods.codecs.header import HEADER_BYTES, Header, codec_number, seal, unseal
from thinwire.methods.codecs.majority import MajorityVote
from thinwire.methods.codecs.one_bit import OneBit
from thinwire.methods.codecs.quantize import Quantize
from thinwire.methods.codecs.random_k import RandomK
from thinwire.methods.codecs.sketch import Sketch
from thinwire.methods.codecs.top_k import TopK
from thinwire.methods.reduce.compressed_all_reduce import compressed_exchange, compressed_mean_, two_stage_mean_

SIZES = [0, 1, 7, 8, 9, 33, 300]
FEEDBACK: list[Codec] = [
    *(OneBit(16), OneBit(16, norm="l2"), OneBit(whole=True), TopK(0.1), Fp8(block=16)),
    *(Quantize(4, 16), Bf16(), RandomK(0.2, unbiased=False), Sketch(1, 32, 1)),
]
BYTES = [OneBit(16), OneBit(whole=True), Quantize(3, 16), TopK(0.1), Fp8(block=16), MajorityVote()]
State = dict[str, Tensor]


def vectors(steps: int, size: int, n: int) -> Tensor:
    """A vector for each step and rank; ranks agree in part, elements differ in size."""
    draw = torch.Generator().manual_seed(n + 7 * size)
    scale = torch.logspace(-2, 1, max(n, 1))[:n]
    return (torch.randn(steps, 1, n, generator=draw) + torch.randn(steps, size, n, generator=draw)) * scale


def run(
    comm: Comm, xs: Tensor, codec: Codec, state: State | None = None, *, first: int = 0, **settings: Any
) -> tuple[Tensor, State]:
    """The mean that a rank gets at each step, and its state in the end."""
    state = {} if state is None else state
    means: list[Tensor] = []
    for step in range(first, len(xs)):
        comm.step = step
        x = xs[step, comm.rank].clone()
        assert compressed_mean_(comm, x, codec, state, key=draw_key(0, step), **settings).wait() is x
        means.append(x)
    return torch.stack(means) if means else xs[:0, 0], state


def residual(states: Sequence[State]) -> Tensor:
    """The mean of the workers' residuals, plus the servers' residuals."""
    total = torch.stack([state["error"] for state in states]).double().mean(0)
    for state in states:
        for name, x in state.items():
            if name.startswith("server_error/"):
                start, stop = name.removeprefix("server_error/").split("-")
                total[int(start) : int(stop)] += x
    return total


def conserved(xs: Tensor, means: Tensor, states: Sequence[State]) -> float:
    """How far means and residuals together are from the inputs, relative to the largest sum."""
    inputs = xs.double().mean(1).sum(0)
    found = means.double().sum(0) + residual(states)
    return float((found - inputs).abs().max() / xs.abs().sum(0).max()) if inputs.numel() else 0.0


# -- identities --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", FEEDBACK, ids=str)
@pytest.mark.parametrize("n", fast_where(lambda n: n in (1, 33), SIZES))
def test_means_and_residuals_add_up_to_the_inputs(codec: Codec, n: int) -> None:
    size, steps = 4, 100 if n == 33 and codec == OneBit(16) else 8
    xs = vectors(steps, size, n)
    results = run_threads(size, lambda comm: run(comm, xs, ErrorFeedback(codec)))
    assert conserved(xs, results[0][0], [state for _, state in results]) < 2e-6
    for means, _ in results:
        assert torch.equal(means, results[0][0])


@pytest.mark.parametrize("codec", [c for c in FEEDBACK if not c.traits.residual_after_sum], ids=str)
def test_decoded_vectors_and_the_residual_of_one_worker_add_up_to_the_inputs(codec: Codec) -> None:
    xs, state, feedback = vectors(100, 1, 65)[:, 0], dict[str, Tensor](), ErrorFeedback(codec)
    decoded = [feedback.decode(feedback.encode(x, state, t), x, t) for t, x in enumerate(xs)]
    gap = torch.stack(decoded).double().sum(0) + state["error"] - xs.double().sum(0)
    assert gap.abs().max() / xs.abs().sum(0).max() < 2e-6
    assert list(state) == ["error"]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_two_stages_equal_their_oracle(size: int, norm: Any) -> None:
    xs = vectors(8, size, 77)
    means, _ = run_threads(size, lambda comm: run(comm, xs, ErrorFeedback(OneBit(16, norm=norm))))[-1]
    oracle = oracles.TwoStages(oracles.signs(16, norm), 16, [77])
    expected = torch.stack([oracle(x) for x in xs.double()]).float()
    assert torch.allclose(means, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1, 3])
def test_vectors_of_other_dtypes_get_the_mean_of_fp32(size: int, dtype: torch.dtype) -> None:
    xs = vectors(4, size, 77).bfloat16().float()
    expected, _ = run_threads(size, lambda comm: run(comm, xs, ErrorFeedback(OneBit(16))))[0]
    for means, _ in run_threads(size, lambda comm: run(comm, xs.to(dtype), ErrorFeedback(OneBit(16)))):
        assert means.dtype == dtype
        assert torch.equal(means, expected.to(dtype))


def test_a_biased_codec_has_feedback_in_two_stages_also_without_the_wrapper() -> None:
    xs = vectors(5, 2, 40)

    def body(comm: Comm, codec: Codec) -> Tensor:
        state: State = {}
        return torch.stack(
            [two_stage_mean_(comm, x[comm.rank].clone(), codec, state, key=t).wait() for t, x in enumerate(xs)]
        )

    codecs: list[Codec] = [ErrorFeedback(OneBit(8)), OneBit(8)]
    wrapped, bare = (run_threads(2, lambda c, k=codec: body(c, k))[0] for codec in codecs)
    assert torch.equal(wrapped, bare)


def test_an_unbiased_codec_keeps_no_state_and_its_mean_is_right() -> None:
    x, times = vectors(1, 3, 24)[0], 1500
    xs = x.repeat(1, times)[None]
    means, state = run_threads(3, lambda comm: run(comm, xs, Quantize(4, 8)))[0]
    found = means.view(times, 24)
    assert state == {}
    assert ((found.mean(0) - x.mean(0)).abs() <= 5 * found.std(0) / times**0.5 + 1e-6).all()


def test_dither_is_subtracted_with_the_sender_s_own_draws() -> None:
    x = vectors(1, 4, 64)[0]
    means = run_threads(4, lambda comm: run(comm, x[None], Quantize(8, 16, dither=True, correlated=True))[0])[2][0]
    step = x.abs().view(4, -1, 16).amax(2).amax(0).repeat_interleave(16) / 127
    assert ((means - x.mean(0)).abs() <= 1.01 * step).all()


def test_equal_vectors_with_elements_of_one_size_are_averaged_exactly() -> None:
    x = torch.where(torch.randn(100, generator=torch.Generator().manual_seed(0)) > 0, 0.5, -0.5)
    xs = x.expand(3, 4, 100)
    for means, state in run_threads(4, lambda comm: run(comm, xs, ErrorFeedback(OneBit(16)))):
        assert torch.equal(means, xs[:, 0])
        assert not any(e.any() for e in state.values())


def test_a_majority_decides_and_a_tie_is_plus() -> None:
    xs = torch.tensor([[[1.0, -2.0, 3.0, -4.0], [0.1, -5.0, -1.0, -1.0], [-9.0, -1.0, -1.0, 7.0]]])
    assert run_threads(3, lambda comm: run(comm, xs, MajorityVote())[0])[1].tolist() == [[1.0, -1.0, -1.0, -1.0]]
    assert run_threads(2, lambda comm: run(comm, xs[:, 1:], MajorityVote())[0])[0].tolist() == [[1.0, -1.0, -1.0, 1.0]]


def test_ranks_without_a_vector_do_not_count_but_send_their_residual() -> None:
    xs = vectors(6, 3, 40)
    xs[:, 2] = 0
    for codec in (OneBit(8), RandomK(0.3, unbiased=False), Sketch(1, 32, 1)):
        results = run_threads(3, lambda comm, k=codec: run(comm, xs, ErrorFeedback(k), count=2))
        total = xs.double().sum(1).sum(0) / 2
        workers = sum(state["error"].double() for _, state in results) / 2
        servers = residual([state for _, state in results]) - sum(state["error"].double() for _, state in results) / 3
        gap = results[0][0].double().sum(0) + workers + servers - total
        assert gap.abs().max() / xs.abs().sum(0).max() < 2e-6


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", BYTES, ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("n", SIZES)
def test_two_stages_send_a_header_and_the_payload_of_a_piece_to_each_other_rank_twice(
    codec: Codec, size: int, n: int
) -> None:
    lengths = oracles.chunks(n, size, codec.traits.alignment)
    xs = vectors(1, size, n)

    def body(comm: Comm) -> dict[str, float]:
        run(comm, xs, codec)
        return comm.meter.by_operation

    for rank, sent in enumerate(run_threads(size, body)):
        if size == 1:
            assert sent == {}
            continue
        others = [length for j, length in enumerate(lengths) if j != rank]
        assert sent["all_to_all"] == sum(16 + codec.nbytes(length) for length in others)
        assert sent["all_gather"] == (size - 1) * (16 + codec.nbytes(lengths[0]))


def test_payloads_of_a_linear_codec_are_added_by_an_all_reduce() -> None:
    xs = vectors(1, 4, 1000)

    def body(comm: Comm, codec: Codec) -> dict[str, float]:
        run(comm, xs, codec)
        return comm.meter.by_operation

    for codec in (RandomK(0.1), ErrorFeedback(RandomK(0.1, unbiased=False)), ErrorFeedback(Sketch(3, 64, 2)), Bf16()):
        assert run_threads(4, lambda c, k=codec: body(c, k))[0] == {"all_reduce": 1.5 * codec.nbytes(1000)}


def test_a_cast_with_error_feedback_goes_through_two_stages() -> None:
    xs = vectors(1, 4, 1000)
    sent = run_threads(4, lambda comm: (run(comm, xs, ErrorFeedback(Bf16())), comm.meter.by_operation)[1])[0]
    assert sent == {"all_to_all": 3 * (16 + 500), "all_gather": 3 * (16 + 500)}


@pytest.mark.parametrize("codec", [OneBit(16), Quantize(4, 16), TopK(0.1), RandomK(0.1), Sketch(3, 64, 2)], ids=str)
def test_meta_vectors_are_counted_like_others(codec: Codec) -> None:
    code = ErrorFeedback(codec) if codec.traits.needs_feedback else codec
    real = run_threads(4, lambda comm: (run(comm, vectors(1, 4, 500), code), comm.meter.by_operation)[1])[1]
    comm = CountingComm(1, 4)
    compressed_mean_(comm, torch.empty(500, device="meta"), code, {}, key=0).wait()
    assert comm.meter.by_operation == real


@pytest.mark.parametrize("codec", [OneBit(16), Bf16(), RandomK(0.1), TopK(0.1), Fp8(block=16)], ids=str)
def test_exchanged_meta_vectors_are_counted_like_others(codec: Codec) -> None:
    def sent(comm: Comm, device: str) -> float:
        x = torch.ones(500, device=device)
        own, theirs = compressed_exchange(comm, x, codec, Ring().peers(1, 4, 0), key=0).wait()
        assert [y.shape for y in (own, *theirs)] == [x.shape] * 3
        return comm.meter.payload_bytes

    # A counter gives back this rank's own messages.
    assert sent(CountingComm(1, 4), "meta") == sent(CountingComm(1, 4), "cpu") == 2 * (16 + codec.nbytes(500))


# -- steps that are skipped --------------------------------------------------------------------------------------------


# In a matrix, and behind it.
@pytest.mark.parametrize(("bad", "place"), [(float("nan"), 17), (float("inf"), 38)])
@pytest.mark.parametrize(
    "codec",
    [
        *map(ErrorFeedback, FEEDBACK),
        *(MajorityVote(), ErrorFeedback(Gathered(Nearest(4, 16))), PowerSGD(1, 0)),
        *(BetweenNodes(each) for each in (Bf16(), Quantize(4, 8), ErrorFeedback(Nearest(2, 8)), PowerSGD(1, 0))),
        *(BetweenNodes(ErrorFeedback(each)) for each in (Gathered(ChunkedTopK(2, 16)), RandomK(0.3, unbiased=False))),
    ],
    ids=str,
)
def test_a_vector_that_is_not_finite_makes_the_mean_nan_and_keeps_residuals(
    codec: Codec, bad: float, place: int
) -> None:
    xs = vectors(3, 4, 40)
    xs[1, 2, place] = bad
    shapes = [Segment("", 0, (8, 4), (4, 1)), Segment("", 32, (8,), (1,))]

    def body(comm: Comm) -> tuple[Tensor, State, State]:
        before = run(comm, xs[:1], codec, segments=shapes)[1]
        kept = {name: x.clone() for name, x in before.items()}
        means, after = run(comm, xs[:2], codec, before, first=1, segments=shapes)
        return means[0], kept, after

    for means, kept, after in run_threads(4, body):
        assert means.isnan().all()
        assert kept.keys() == after.keys()
        assert all(torch.equal(kept[name], after[name]) for name in kept)


def test_means_in_flight_together_are_skipped_together() -> None:
    xs = vectors(3, 2, 40)
    xs[1, 0, 3] = float("nan")

    def body(comm: Comm) -> tuple[list[Tensor], State]:
        state: State = {}
        code, step = ErrorFeedback(OneBit(8)), PendingMeans()
        works = [
            compressed_mean_(comm, xs[t, comm.rank], code, state, offset=40 * t, length=120, key=t, pending=step)
            for t in range(3)
        ]
        return [work.wait() for work in works], state

    for means, state in run_threads(2, body):
        assert all(x.isnan().all() for x in means)
        assert not any(x.any() for x in state.values())


def test_means_of_different_steps_are_skipped_one_by_one() -> None:
    xs = vectors(2, 2, 40)
    xs[1, 0, 3] = float("nan")

    def body(comm: Comm) -> list[bool]:
        works = [compressed_mean_(comm, xs[t, comm.rank].clone(), MajorityVote(), {}, key=t) for t in range(2)]
        return [bool(work.wait().isfinite().all()) for work in works]

    assert run_threads(2, body) == [[True, False]] * 2


@pytest.mark.parametrize("codec", [OneBit(8), OneBit(8, norm="l2"), OneBit(whole=True, norm="l2")], ids=str)
@pytest.mark.parametrize("huge", [2e19, 1e37])
def test_a_huge_entry_is_averaged_and_leaves_finite_residuals(codec: Codec, huge: float) -> None:
    xs = torch.ones(3, 2, 40)
    xs[0, :, 17] = huge
    for means, state in run_threads(2, lambda comm: run(comm, xs, ErrorFeedback(codec))):
        assert means.isfinite().all()
        assert all(x.isfinite().all() for x in state.values())


@pytest.mark.parametrize("codec", FEEDBACK, ids=str)
def test_codes_that_overflow_skip_the_step_and_leave_finite_residuals(codec: Codec) -> None:
    xs = torch.ones(3, 2, 40)
    xs[0, :, 17] = 3e38

    def body(comm: Comm) -> tuple[list[bool], State]:
        means, state = run(comm, xs, ErrorFeedback(codec))
        return [bool(each.isfinite().all() or each.isnan().all()) for each in means], state

    for whole, state in run_threads(2, body):
        assert whole == [True] * 3
        assert all(x.isfinite().all() for x in state.values())


def test_a_mean_that_the_second_code_cannot_hold_skips_the_step() -> None:
    def body(comm: Comm) -> tuple[list[Tensor], State]:
        means, state = list[Tensor](), State()
        for step, value in enumerate((1.0, 1e5, 1.0)):  # 1e5 is infinite in half precision
            comm.step, x = step, torch.full((40,), value)
            codec = ErrorFeedback(TopK(1.0))
            means.append(two_stage_mean_(comm, x, codec, state, key=step, server=Fp16()).wait().clone())
        return means, state

    for (first, skipped, last), state in run_threads(2, body):
        assert skipped.isnan().all()
        assert torch.equal(first, torch.ones(40)) and torch.equal(last, first)
        assert all(x.isfinite().all() for x in state.values())


@pytest.mark.parametrize("place", range(0, 40, 3))
def test_a_linear_codec_that_leaves_elements_out_does_not_leave_out_one_that_is_not_finite(place: int) -> None:
    xs = torch.ones(1, 2, 40)
    xs[0, 1, place] = float("inf")
    for means, _ in run_threads(2, lambda comm: run(comm, xs, RandomK(0.1))):
        assert means.isnan().any()  # in what is sent, on both ranks


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 39])
def test_error_feedback_alone_forgets_a_vector_that_is_not_finite(bad: float, place: int) -> None:
    for codec in (OneBit(8), OneBit(8, norm="l2"), Fp8(block=16), Quantize(4, 16)):
        code, state, x = ErrorFeedback(codec), dict[str, Tensor](), torch.arange(40.0)
        code.encode(x, state)
        before = state["error"].clone()
        y = x.clone()
        y[place] = bad
        code.encode(y, state)
        assert torch.equal(state["error"], before)
        code.encode(x, state)
        assert state["error"].isfinite().all()


# -- parts of one vector -----------------------------------------------------------------------------------------------


def in_parts(comm: Comm, xs: Tensor, cuts: Sequence[slice], state: State) -> Tensor:
    """The means that a rank gets when the vector is sent in parts."""
    means: list[Tensor] = []
    for step, rows in enumerate(xs):
        x = rows[comm.rank].clone()
        whole, pending = x.numel(), PendingMeans()
        works = [
            compressed_mean_(
                *(comm, x[cut], ErrorFeedback(OneBit(8)), state),
                key=draw_key(0, step, offset=cut.start),
                offset=cut.start,
                length=whole,
                pending=pending,
            )
            for cut in cuts
        ]
        for work in works:
            work.wait()
        means.append(x)
    return torch.stack(means)


def test_parts_share_one_residual_and_may_be_cut_elsewhere_later() -> None:
    xs = vectors(12, 3, 100)
    first, second = [slice(60, 100), slice(0, 60)], [slice(90, 100), slice(30, 90), slice(0, 30)]

    def body(comm: Comm) -> tuple[Tensor, State]:
        state: State = {}
        means = torch.cat([in_parts(comm, xs[:6], first, state), in_parts(comm, xs[6:], second, state)])
        return means, state

    results = run_threads(3, body)
    states = [state for _, state in results]
    assert conserved(xs, results[0][0], states) < 2e-6
    assert all(state["error"].numel() == 100 for state in states)
    assert sum(x.numel() for state in states for name, x in state.items() if name != "error") == 100


def test_parts_equal_an_oracle_of_parts() -> None:
    xs = vectors(5, 2, 100)
    means = run_threads(2, lambda comm: in_parts(comm, xs, [slice(60, 100), slice(0, 60)], {}))[0]
    oracle = oracles.TwoStages(oracles.signs(8), 8, [60, 40])
    assert torch.allclose(means, torch.stack([oracle(x) for x in xs]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sizes", [(4, 2), (2, 4), (3, 3), (4, 1), (1, 3)])
def test_residuals_are_kept_with_another_number_of_workers(sizes: tuple[int, int]) -> None:
    before, after = sizes
    xs, ys = vectors(9, before, 50), vectors(9, after, 50)
    code = ErrorFeedback(OneBit(8))
    results = run_threads(before, lambda comm: run(comm, xs, code))
    old = [{**state, "clock": torch.ones(())} for _, state in results]
    new = resize_errors(old, after)
    assert len(new) == after
    assert torch.allclose(residual(new), residual(old), rtol=0, atol=1e-5)
    assert all(set(state) == {"error", "clock"} for state in new)
    more = run_threads(after, lambda comm: run(comm, ys, code, new[comm.rank]))
    total = xs.double().mean(1).sum(0) + ys.double().mean(1).sum(0)
    means = results[0][0].double().sum(0) + more[0][0].double().sum(0)
    gap = means + residual([state for _, state in more]) - total
    assert gap.abs().max() / (xs.abs().sum(0).max() + ys.abs().sum(0).max()) < 2e-6


def test_residuals_with_a_prefix_are_resized_too_and_zero_ranks_are_refused() -> None:
    prefix = "momentum/0/"
    states = [
        {f"{prefix}error": torch.ones(4), f"{prefix}server_error/{place}": torch.ones(2)} for place in ("0-2", "2-4")
    ]
    (only,) = resize_errors(states, 1)
    assert list(only) == ["momentum/0/error"]
    assert only["momentum/0/error"].tolist() == [2.0] * 4
    with pytest.raises(ConfigError, match="both must be at least 1"):
        resize_errors(states, 0)


# -- damaged and foreign payloads --------------------------------------------------------------------------------------


def test_a_header_is_read_back_as_it_was_written() -> None:
    payload = torch.arange(9, dtype=torch.uint8)
    header = Header(codec_number("OneBit()", 9), 1 << 20, second_stage=True, finite=False, accepted=False)
    message = seal(payload, header)
    assert message.numel() == HEADER_BYTES + 9
    back, content, problem = unseal(message, header)
    assert (back, problem) == (header, "")
    assert torch.equal(content, payload)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m, _: m.index_fill_(0, torch.tensor([0]), 7), "is not a payload of a codec"),
        (lambda m, _: m.index_fill_(0, torch.tensor([20]), 77), "is damaged"),
        (lambda _, h: seal(torch.zeros(9, dtype=torch.uint8), h._replace(step=4)), "is of step 4, not of step 3"),
        (lambda _, h: seal(torch.zeros(9, dtype=torch.uint8), h._replace(codec=1)), "is of another codec"),
        (lambda _, h: seal(torch.zeros(9, dtype=torch.uint8), h._replace(second_stage=True)), "is of stage 2, not"),
    ],
)
def test_a_payload_that_does_not_fit_is_described(change: Callable[[Tensor, Header], Tensor], words: str) -> None:
    header = Header(codec_number("OneBit()", 9), 3)
    assert words in unseal(change(seal(torch.zeros(9, dtype=torch.uint8), header), header), header)[2]


def test_every_flipped_bit_of_a_message_is_seen() -> None:
    header = Header(codec_number("OneBit()", 9), 3)
    message = seal(torch.arange(9, dtype=torch.uint8), header)
    for bit in range(8 * message.numel()):
        flipped = message.clone()
        flipped[bit // 8] ^= 1 << bit % 8
        assert unseal(flipped, header)[2] in ("is not a payload of a codec", "is damaged: its checksum does not match")


def test_different_steps_or_codecs_are_an_error_on_all_ranks() -> None:
    x = vectors(1, 2, 64)[0]

    def body(comm: Comm, *, late: bool) -> None:
        comm.step = 5 + (late and comm.rank)
        codec = OneBit(8) if late or comm.rank else OneBit(8, norm="l2")
        with pytest.raises(CommError, match="is of step" if late else "is of another codec"):
            two_stage_mean_(comm, x[comm.rank].clone(), codec, {}, key=0).wait()

    for late in (True, False):
        run_threads(2, lambda comm, when=late: body(comm, late=when))


def test_a_compressed_exchange_refuses_payloads_of_another_codec() -> None:
    x = vectors(1, 2, 64)[0]

    def body(comm: Comm) -> None:
        codec = OneBit(8) if comm.rank else OneBit(8, norm="l2")
        work = compressed_exchange(comm, x[comm.rank], codec, Ring().peers(comm.rank, 2, 0), key=0)
        with pytest.raises(CommError, match=f"the message of rank {1 - comm.rank} is of another codec"):
            work.wait()

    run_threads(2, body)
