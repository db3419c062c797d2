"""Convolutions of many models by one call, each model with its own filters, and what leads back from them.

The three functions are each other's derivatives. All are equal to torch's but for rounding.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from laconic.errors import ConfigError
from laconic.kernels.base import AWAY_BYTES, PART, check_same_device, compiled, shared_out
from laconic.kernels.reference import convolved as reference

Lengths = tuple[int, ...]
# Places within an image are counted in 32 bits.
_MOST = 1 << 30
_NUMBERS = ctypes.c_int64 * 20


class Stepping(NamedTuple):
    """How a window moves over an image, along each axis of places: one, or rows and columns."""

    stride: Lengths
    padding: Lengths
    dilation: Lengths

    def places(self, size: Sequence[int], window: Sequence[int]) -> Lengths:
        """How many places a window finds along each axis of an image of that size."""
        every = zip(size, window, *self, strict=True)
        return tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in every)


def convolve(image: Tensor, filters: Tensor, shift: Tensor | None, *, axis: int, steps: Stepping) -> Tensor:
    r"""$y_{bo} = \sum_c w_{boc} \star x_{bc} + \beta_{bo}$ for every model b: `F.conv1d` or `F.conv2d` of each.

    Args:
        image: $x$, fp32 [models, samples, channels, places...], or with samples first, with one or two axes of places;
            contiguous, or of stride 0 along the models, which then all see the same.
        filters: $w$, fp32 [models, filters, channels, places...], contiguous.
        shift: $\beta$, fp32 [models, filters], contiguous.
        axis: of the models, 0 or 1.
        steps: of the window.

    Returns:
        y, contiguous, its models along `axis`: [models, samples, filters, places...].

    Raises:
        ConfigError: shapes, dtypes or devices differ, a tensor does not lie as it must, or the window does not fit.
    """
    call = _Call(image.shape, filters.shape, axis, steps)
    call.check((image, call.image), (filters, call.filters), (shift, call.filters[:2]))
    if compiled(image) is None:
        return reference.convolve(image, filters, shift, axis, steps)
    found = image.new_empty(call.sent)
    call.run("convolve", image, found, (image, axis), (filters, 0), (shift, 0), (found, axis))
    return found


def convolve_transposed(
    sent: Tensor, filters: Tensor, shift: Tensor | None, *, size: Sequence[int], axis: int, steps: Stepping
) -> Tensor:
    r"""What `convolve` takes from an image, sent back to it: its gradient, and what `F.conv_transpose2d` is.

    Args:
        sent: as `convolve` returns it; or of stride 0 along the models.
        filters: fp32 [models, filters, channels, places...], contiguous.
        shift: $\beta$, of every channel of the image, fp32 [models, channels], contiguous.
        size: of the image, along its axes of places.
        axis: of the models, 0 or 1.
        steps: of the window of `convolve`.

    Returns:
        The image, contiguous: [models, samples, channels, places...], or with samples first.

    Raises:
        ConfigError: as `convolve`.
    """
    call = _Call((*sent.shape[:2], *filters.shape[2:3], *size), filters.shape, axis, steps)
    call.check((sent, call.sent), (filters, call.filters), (shift, (call.filters[0], call.filters[2])))
    if compiled(sent) is None:
        return reference.convolve_transposed(sent, filters, shift, size, axis, steps)
    found = sent.new_empty(call.image)
    call.run("convolve_transposed", found, sent, (sent, axis), (filters, 0), (shift, 0), (found, axis))
    return found


def convolve_back(
    sent: Tensor, image: Tensor, filters: Tensor, *, axis: int, steps: Stepping, trained: bool = True
) -> tuple[Tensor | None, Tensor, Tensor]:
    """What a gradient of `convolve` is for the image, the filters and the shift.

    Args:
        sent: the gradient of what `convolve` returned, laid out so.
        image: as it was given.
        filters: as they were given.
        axis: as given.
        steps: as given.
        trained: whether the image's gradient is asked for; else it is None.

    Raises:
        ConfigError: as `convolve`.
    """
    call = _Call(image.shape, filters.shape, axis, steps)
    call.check((image, call.image), (sent, call.sent), (filters, call.filters))
    if compiled(image) is None:
        of_image = reference.convolve_transposed(sent, filters, None, image.shape[3:], axis, steps) if trained else None
        return of_image, *reference.filters_between(image, sent, filters.shape[3:], axis, steps)
    of_filters, of_shift = filters.new_empty(call.filters), filters.new_empty(call.filters[:2])
    given, own = ((image, axis), (sent, axis)), ((of_filters, 0), (of_shift, 0))
    if not trained:
        call.run("convolve_filters", image, sent, *given, *own)
        return None, of_filters, of_shift
    of_image, more = image.new_empty(call.image), (image.stride(axis), image.stride(1 - axis))
    call.run("convolve_back", of_image, sent, *given, (filters, 0), *own, (of_image, axis), more=more)
    return of_image, of_filters, of_shift


def filters_between(
    image: Tensor, sent: Tensor, *, window: Sequence[int], axis: int, steps: Stepping
) -> tuple[Tensor, Tensor]:
    """The gradients of the filters and of the shift of `convolve`, as of `convolve_back`.

    Args:
        image: as `convolve` takes it.
        sent: as `convolve` returns it; or of stride 0 along the models.
        window: places of a filter along each axis.
        axis: of the models, 0 or 1.
        steps: of the window.

    Returns:
        [models, filters, channels, places...] and [models, filters], contiguous.

    Raises:
        ConfigError: as `convolve`.
    """
    filters = *image.shape[axis : axis + 1], *sent.shape[2:3], *image.shape[2:3], *window
    call = _Call(image.shape, filters, axis, steps)
    call.check((image, call.image), (sent, call.sent))
    if compiled(image) is None:
        return reference.filters_between(image, sent, window, axis, steps)
    found, of_shift = image.new_empty(call.filters), image.new_empty(call.filters[:2])
    call.run("convolve_filters", image, sent, (image, axis), (sent, axis), (found, 0), (of_shift, 0))
    return found, of_shift


class _Call:
    """The shapes of the image, of the filters, and of what is sent on.

    Raises:
        ConfigError: there is no such convolution.
    """

    def __init__(self, image: Sequence[int], filters: Sequence[int], axis: int, steps: Stepping) -> None:
        if axis not in (0, 1):
            raise ConfigError(f"axis={axis}: the models are along axis 0 or 1")
        axes = len(filters) - 3
        if axes not in (1, 2) or len(image) != len(filters) or (filters[0], filters[2]) != (image[axis], image[2]):
            first = "models, samples" if axis == 0 else "samples, models"
            raise ConfigError(
                f"shapes {list(image)} and {list(filters)}: must be [{first}, channels, places...] and "
                "[models, filters, channels, places...], with one or two axes of places"
            )
        if any(len(lengths) != axes for lengths in steps):
            raise ConfigError(f"{steps}: must have a number for each of {axes} axes of places")
        size = steps.places(image[3:], filters[3:])
        if min(*size, *image, *filters, *steps.stride, *steps.dilation) < 1 or min(steps.padding) < 0:
            raise ConfigError(
                f"filters {list(filters)} on {list(image)}, {steps}: lengths, strides and dilations are at least 1, "
                f"and a window fits into the image with its padding; it finds {list(size)} places"
            )
        whole = math.prod(n + 2 * p for n, p in zip(image[3:], steps.padding, strict=True))
        if max(image[2] * whole, filters[1] * math.prod(size)) > _MOST:
            raise ConfigError(f"images of {list(image[2:])}, with their padding: must have at most {_MOST} numbers")
        self.image, self.filters, self.sent = tuple(image), tuple(filters), (*image[:2], filters[1], *size)
        self.axis, self.steps = axis, steps

    def check(self, *every: tuple[Tensor | None, Lengths]) -> None:
        """Refuse tensors that are not of these shapes, or do not lie as they must.

        Raises:
            ConfigError: with what was found and what must be.
        """
        given = [(tensor, shape) for tensor, shape in every if tensor is not None]
        check_same_device(*(tensor for tensor, _ in given))
        for tensor, shape in given:
            alike = len(shape) > 2 and tensor.dim() == len(shape) and not tensor.stride(self.axis)
            dense = (tensor.select(self.axis, 0) if alike else tensor).is_contiguous()
            if tensor.shape != shape or tensor.dtype != torch.float32 or not dense:
                found = f"{list(tensor.shape)} of {tensor.dtype}{'' if dense else ', not contiguous'}"
                raise ConfigError(f"a tensor {found}: must be {list(shape)}, contiguous and torch.float32")

    def run(
        self, name: str, image: Tensor, sent: Tensor, *every: tuple[Tensor | None, int], more: Lengths = ()
    ) -> None:
        """Call a kernel for all models, in as many threads as pay.

        Args:
            name: of the kernel.
            image: whose layout it is told; or its gradient.
            sent: likewise.
            every: the tensors that it takes, each with the axis of its models; the last is a result.
            more: numbers that it takes besides.
        """
        kernel, axis, models = getattr(compiled(image), f"laconic_{name}"), self.axis, self.filters[0]
        lie = image.stride(axis), image.stride(1 - axis), sent.stride(axis), sent.stride(1 - axis)
        result, samples = every[-1][0], self.image[1 - axis]
        away = result is not None and result.nbytes >= AWAY_BYTES
        looks = _NUMBERS(samples, self.filters[2], self.filters[1], *self._planes(), *lie, away)
        nbytes = kernel(*[None] * len(every), looks, *more, models, None)
        places = [(None, 0) if each is None else (each.data_ptr(), 4 * each.stride(along)) for each, along in every]

        def some(begin: int, end: int) -> None:
            room = torch.empty(nbytes, dtype=torch.uint8)
            own = (at if at is None else at + begin * step for at, step in places)
            kernel(*own, looks, *more, end - begin, room.data_ptr())

        products = samples * math.prod(self.filters) * math.prod(self.sent[3:])
        shared_out(models, min(torch.get_num_threads(), models, products // PART), some)

    def _planes(self) -> Lengths:
        """Of rows and columns: the image, what is sent on, the window, strides, paddings and dilations.

        One axis is a single row, and so are all places where a window sees one of them at a time.
        """
        size, found, window = self.image[3:], self.sent[3:], self.filters[3:]
        stride, padding, dilation = self.steps
        if {*window, *stride} == {1} and not any(padding):
            return 1, math.prod(size), 1, math.prod(found), *(1, 1, 1, 1, 0, 0, 1, 1)
        if len(size) == 1:
            return (*(1, *size), *(1, *found), *(1, *window), *(1, *stride), *(0, *padding), *(1, *dilation))
        return *size, *found, *window, *stride, *padding, *dilation
