"""Convolutions of many models by kernels: torch's in double precision but for rounding, whatever the shapes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from laconic.errors import ConfigError
from laconic.kernels import base, convolved
from laconic.kernels.convolved import Stepping
from laconic.kernels.reference import convolved as by_torch
from tests.kernels import by_c as by_c
from tests.kernels import library as library
from tests.kernels import way as way

MODELS, SAMPLES = 3, 2
# In parts of the largest number: single precision, and sums in another order.
CLOSE = 2e-6


@dataclass(frozen=True)
class Case:
    """A convolution: channels and filters, lengths of the image and of the window, and its steps."""

    channels: int
    filters: int
    size: tuple[int, ...]
    window: tuple[int, ...]
    steps: Stepping

    def tensors(self, axis: int = 0, *, shared: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """An image, filters, shifts, and a gradient of the result."""
        draw = torch.Generator().manual_seed(self.channels + self.filters)
        shape = (1 if shared else MODELS, SAMPLES, self.channels, *self.size)
        image = torch.randn(shape, generator=draw).expand(MODELS, *shape[1:])
        filters = torch.randn(MODELS, self.filters, self.channels, *self.window, generator=draw)
        places = self.steps.places(self.size, self.window)
        sent = torch.randn(MODELS, SAMPLES, self.filters, *places, generator=draw)
        lying = image if shared else image.contiguous()
        if axis:
            lying = image.transpose(0, 1) if shared else image.transpose(0, 1).contiguous()
        return lying, filters, torch.randn(MODELS, self.filters, generator=draw), sent.transpose(0, axis).contiguous()


def steps(*every: int | tuple[int, int]) -> Stepping:
    """Of rows and columns."""
    return Stepping(*((each, each) if isinstance(each, int) else each for each in every))


CASES = {
    "rows of sixteen": Case(16, 16, (16, 16), (3, 3), steps(1, 1, 1)),
    "rows of thirty-two": Case(5, 9, (4, 32), (3, 3), steps(1, 1, 1)),
    "rows of eight": Case(3, 12, (8, 8), (3, 3), steps(1, 1, 1)),
    "odd lengths": Case(3, 5, (7, 9), (3, 2), steps(1, (1, 0), 1)),
    "every second": Case(6, 10, (11, 12), (3, 3), steps(2, 1, 1)),
    "every second, of four": Case(8, 4, (16, 16), (4, 4), steps(2, 1, 1)),
    "every second of one place": Case(5, 8, (6, 6), (1, 1), steps(2, 0, 1)),
    "every third along columns": Case(4, 4, (9, 33), (1, 5), steps((1, 3), (0, 2), (1, 2))),
    "every fourth, gaps of two": Case(2, 3, (13, 14), (3, 3), steps(4, 2, 2)),
    "gaps": Case(5, 6, (9, 20), (3, 3), steps(1, 2, 2)),
    "more padding than the window": Case(2, 3, (5, 6), (1, 2), steps(1, 2, 1)),
    "more padding, every second": Case(2, 3, (5, 6), (3, 3), steps(2, 2, 1)),
    "one place": Case(33, 17, (8, 16), (1, 1), steps(1, 0, 1)),
    "one place of few": Case(3, 20, (5, 7), (1, 1), steps(1, 0, 1)),
    "many channels": Case(70, 8, (4, 4), (3, 3), steps(1, 1, 1)),
    "no padding": Case(4, 6, (6, 18), (3, 3), steps(1, 0, 1)),
    "one row": Case(12, 7, (40,), (5,), Stepping((1,), (2,), (1,))),
    "one row, every second": Case(4, 9, (17,), (4,), Stepping((2,), (1,), (1,))),
    "one place of a row": Case(64, 24, (48,), (1,), Stepping((1,), (0,), (1,))),
    "a single number": Case(1, 1, (1, 1), (1, 1), steps(1, 0, 1)),
}
LAYOUTS = {
    "models first": (0, False),
    "samples first": (1, False),
    "shared": (0, True),
    "shared, samples first": (1, True),
}


def near(found: Tensor, wanted: Tensor) -> bool:
    """As close as single precision is, beside the largest number that there is."""
    assert found.shape == wanted.shape and found.dtype == torch.float32
    return bool((found - wanted).abs().max() <= CLOSE * wanted.abs().max())


def by_double(case: Case, tensors: Sequence[Tensor], axis: int) -> tuple[Tensor, ...]:
    """The result and what its gradient is for the image, the filters and the shifts: model after model, by autograd."""
    image, filters, shift, sent = (each.double() for each in tensors)
    own = [each.detach().requires_grad_() for each in (image, filters, shift)]
    found = by_torch.convolve(own[0], own[1], own[2], axis, case.steps)
    return found.detach(), *torch.autograd.grad(found, own, sent)


@pytest.mark.usefixtures("by_c")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_convolutions_and_their_gradients_are_torch_s_in_double_precision(case: Case, layout: str) -> None:
    axis, shared = LAYOUTS[layout]
    image, filters, shift, sent = case.tensors(axis, shared=shared)
    wanted = by_double(case, (image, filters, shift, sent), axis)
    how: dict[str, Any] = {"axis": axis, "steps": case.steps}
    assert near(convolved.convolve(image, filters, shift, **how), wanted[0])
    plain = by_double(case, (image, filters, torch.zeros_like(shift), sent), axis)[0]
    assert near(convolved.convolve(image, filters, None, **how), plain)
    found = convolved.convolve_back(sent, image, filters, **how)
    assert all(each is not None and near(each, other) for each, other in zip(found, wanted[1:], strict=True))
    nothing, *others = convolved.convolve_back(sent, image, filters, trained=False, **how)
    assert nothing is None and all(map(torch.equal, others, found[1:]))
    again = convolved.filters_between(image, sent, window=case.window, **how)
    assert all(map(torch.equal, again, others))


@pytest.mark.usefixtures("by_c")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_transposed_convolutions_are_torch_s_in_double_precision(case: Case, layout: str) -> None:
    axis, shared = LAYOUTS[layout]
    _, filters, _, sent = case.tensors(axis)
    if shared:
        sent = sent.select(axis, 0).contiguous().unsqueeze(axis).expand(sent.shape)
    shift = torch.arange(1.0, MODELS * case.channels + 1).view(MODELS, -1)
    for moved in (shift, None):
        given = None if moved is None else moved.double()
        wanted = by_torch.convolve_transposed(sent.double(), filters.double(), given, case.size, axis, case.steps)
        found = convolved.convolve_transposed(sent, filters, moved, size=case.size, axis=axis, steps=case.steps)
        assert near(found, wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_torch_alone_computes_the_same(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LACONIC_NATIVE", "0")
    axis, shared = LAYOUTS[layout]
    for case in CASES.values():
        image, filters, shift, sent = case.tensors(axis, shared=shared)
        wanted = by_double(case, (image, filters, shift, sent), axis)
        how: dict[str, Any] = {"axis": axis, "steps": case.steps}
        found = convolved.convolve(image, filters, shift, **how), *convolved.convolve_back(sent, image, filters, **how)
        assert all(each is not None and near(each, other) for each, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", ["rows of sixteen", "many channels", "every second", "one place"])
def test_threads_and_stores_past_the_caches_change_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    image, filters, shift, sent = case.tensors()

    def every() -> tuple[Tensor | None, ...]:
        how: dict[str, Any] = {"axis": 0, "steps": case.steps}
        there = convolved.convolve(image, filters, shift, **how)
        return there, *convolved.convolve_back(sent, image, filters, **how)

    wanted, threads = every(), torch.get_num_threads()
    for change, team in (("PART", base.torch_team), ("PART", lambda: None), ("AWAY_BYTES", base.torch_team)):
        with monkeypatch.context() as patch:
            patch.setattr(convolved, change, 1)
            patch.setattr(base, "torch_team", team)
            torch.set_num_threads(2)
            try:
                found = every()
            finally:
                torch.set_num_threads(threads)
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours is not None and theirs is not None and torch.equal(ours, theirs)


@pytest.mark.parametrize("layout", ["models first", "samples first"])
def test_a_model_that_is_no_number_leaves_the_others_as_they_are(layout: str, way: str) -> None:
    axis, case = LAYOUTS[layout][0], CASES["rows of eight"]
    image, filters, shift, sent = case.tensors(axis)
    how: dict[str, Any] = {"axis": axis, "steps": case.steps}

    def every() -> tuple[Tensor | None, ...]:
        there = convolved.convolve(image, filters, shift, **how)
        return there, *convolved.convolve_back(sent, image, filters, **how)

    wanted = every()
    image.select(axis, 1).fill_(float("nan"))
    filters[1] = float("inf")
    for place, (ours, theirs) in enumerate(zip(every(), wanted, strict=True)):
        assert ours is not None and theirs is not None
        along = axis if place < 2 else 0
        for model in (0, 2):
            assert torch.equal(ours.select(along, model), theirs.select(along, model))
    assert way in ("native", "torch")


def test_what_is_no_convolution_is_refused() -> None:
    case = CASES["odd lengths"]
    image, filters, shift, sent = case.tensors()
    for wrong, words in (
        ((image[0], filters, shift), "shapes"),
        ((image, filters[:2], shift), r"\[2, 5, 3, 3, 2\]"),
        ((image, filters, shift[:, :1]), r"a tensor \[3, 1\]"),
        ((image.double(), filters, shift), "float64"),
        ((image.transpose(3, 4).contiguous().transpose(3, 4), filters, shift), "not contiguous"),
        ((image[..., :1], filters, shift), "finds"),
        ((image[:, :0], filters, shift), "at least 1"),
    ):
        with pytest.raises(ConfigError, match=words):
            convolved.convolve(*wrong, axis=0, steps=case.steps._replace(padding=(0, 0)))
    with pytest.raises(ConfigError, match="axis=2"):
        convolved.convolve(image, filters, shift, axis=2, steps=case.steps)
    with pytest.raises(ConfigError, match="each of 2 axes"):
        convolved.convolve(image, filters, shift, axis=0, steps=Stepping((1,), (0,), (1,)))
    with pytest.raises(ConfigError, match="a tensor"):
        convolved.convolve_back(sent[..., :1], image, filters, axis=0, steps=case.steps)
    with pytest.raises(ConfigError, match="at most"):
        far = torch.empty(1).expand(1, 1, 2, 1 << 15, 1 << 15)
        convolved.convolve(far, filters[:1, :, :2], None, axis=0, steps=case.steps)


def test_an_image_at_the_end_of_memory_is_not_read_beyond_it(tmp_path: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if base.compiled(torch.zeros(1)) is None or not hasattr(libc, "mprotect"):
        pytest.skip("no C compiler, or no pages to protect")
    import mmap

    page = mmap.PAGESIZE
    for case in CASES.values():
        tensors = case.tensors()
        held, guarded = [], []
        for tensor in tensors:
            pages = -(-tensor.nbytes // page)
            area = mmap.mmap(-1, (pages + 1) * page)
            start = ctypes.addressof(ctypes.c_char.from_buffer(area))
            assert libc.mprotect(ctypes.c_void_p(start + pages * page), ctypes.c_size_t(page), 0) == 0
            place = torch.frombuffer(
                area, dtype=torch.float32, count=tensor.numel(), offset=pages * page - tensor.nbytes
            )
            guarded.append(place.view(tensor.shape).copy_(tensor))
            held.append((area, start + pages * page))
        image, filters, shift, sent = guarded
        how: dict[str, Any] = {"axis": 0, "steps": case.steps}
        wanted = convolved.convolve(*tensors[:3], **how), *convolved.convolve_back(tensors[3], *tensors[:2], **how)
        found = convolved.convolve(image, filters, shift, **how), *convolved.convolve_back(sent, image, filters, **how)
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours is not None and theirs is not None and torch.equal(ours, theirs)
        for _, end in held:
            libc.mprotect(ctypes.c_void_p(end), ctypes.c_size_t(page), 3)
