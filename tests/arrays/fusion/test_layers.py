# SPDX-License-Identifier: Apache-2.0
"""Every fused layer equals separate modules, in outputs, gradients and buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.grids import fast_where
from tests.oracles.fusion import copies, make, passed, state_of, values, weighed
from thinwire.arrays.fusion import Each, autotune, clear_autotune_cache, fuse, measuring
from thinwire.arrays.fusion.batch import Batch
from thinwire.arrays.fusion.normalisation import gain_for

COUNT = 3
TOLERANCE = {torch.float64: 1e-12, torch.float32: 4e-6}


@pytest.fixture(autouse=True)
def everything_is_measured() -> Iterator[None]:
    clear_autotune_cache()
    with measuring():
        yield
    clear_autotune_cache()


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make an implementation the fastest wherever it is a candidate."""

    def force(wanted: str) -> None:
        monkeypatch.setattr(
            autotune,
            "_measure",
            lambda candidates, given, *, gpu: {name: float(name != wanted) for name in candidates},
        )

    return force


def close(ours: Tensor, theirs: Tensor) -> bool:
    if not theirs.is_floating_point():
        return torch.equal(ours, theirs)
    scale = max(1.0, float(theirs.detach().abs().max())) if theirs.numel() else 1.0
    error = (ours.detach().double() - theirs.detach().double()).abs()
    return ours.shape == theirs.shape and (not error.numel() or float(error.max()) <= TOLERANCE[theirs.dtype] * scale)


def check(
    factory: Callable[[], nn.Module],
    inputs: tuple[Tensor, ...],
    *,
    shared: bool,
    loop: bool = False,
    dtype: torch.dtype = torch.float64,
) -> None:
    """Compare the array with its models one by one."""
    inputs = tuple(leaf.to(dtype) if leaf.is_floating_point() else leaf for leaf in inputs)
    models = make(factory, COUNT, dtype)
    array = fuse(models, loop=loop)
    own = [inputs if shared else tuple(leaf.roll(index, 0) for leaf in inputs) for index in range(COUNT)]
    given = inputs if shared else tuple(Each(torch.stack(column)) for column in zip(*own, strict=True))
    theirs, slopes = passed(alone := copies(models), own)
    ours = array(*given)
    array.losses(weighed, ours).sum().backward()
    for index in range(COUNT):
        for mine, other in zip(
            *(part if isinstance(part, tuple) else (part,) for part in (ours, theirs[index])), strict=True
        ):
            assert close(mine[index], other)
        for name, parameter in array.named_parameters():
            assert parameter.grad is not None
            assert close(parameter.grad[index], slopes[index][name]), name
        extracted = array.extract(index).state_dict()
        assert extracted.keys() == state_of(alone[index]).keys()
        for name, tensor in state_of(alone[index]).items():
            assert close(extracted[name], tensor.to(extracted[name])), name


class Tied(nn.Module):
    """One weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, index: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(index)))


class Functional(nn.Module):
    """Calls functions of torch, reads shapes, and reshapes."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Parameter(torch.randn(4, 3, 3, 3))
        self.matrix = nn.Parameter(torch.randn(5, 64))
        self.scale = nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu_(F.conv2d(x, self.filters, padding=1))
        x = F.avg_pool2d(x, 2) * self.scale
        n, channels = x.shape[:2]
        x = x.view(n * channels, -1).view(n, -1)
        return F.linear(x, self.matrix).softmax(-1)


class ToItself(nn.Module):
    """Attention of a sequence to itself."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Any:
        return self.attention(x, x, x)


class Twice(nn.Module):
    """A layer of two arguments."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x.flip(0))


class Enlarged(nn.Module):
    """Sizes of outputs as lists, tuples and sizes of tensors, which torch turns into lists of paddings."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.line = nn.ConvTranspose2d(3, 4, 3, stride=2), nn.ConvTranspose1d(4, 2, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.image(x, output_size=[11, 12]) + self.image(x, output_size=(2, 4, 11, 12))
        return self.line(wide.flatten(2), output_size=torch.empty(265).shape)


class Listed(nn.Module):
    """Settings of functions as lists."""

    def __init__(self) -> None:
        super().__init__()
        self.filters, self.back = nn.Conv2d(4, 4, 1), nn.ConvTranspose2d(4, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.filters.weight, self.filters.bias
        y = F.conv2d(x, weight, bias, [1, 1], [0, 0], [1, 1]) + F.conv2d(x, weight, bias, [1, 1], padding="same")
        y = F.conv2d(y, weight.expand(4, 4, 2, 2), bias, stride=[2, 1], padding=[1, 0], dilation=[1, 2])
        y = F.max_pool2d(F.pad(y, [1, 1, 0, 0]), [2, 2], stride=[1, 1]) + F.adaptive_avg_pool2d(y, [3, 5])
        return F.conv_transpose2d(y, self.back.weight, self.back.bias, stride=[2, 2], output_padding=[1, 0])


class Points(nn.Module):
    """Concatenates a shared input, each point's features and their maxima; half of the features are zero."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.head = nn.Conv1d(3, 4, 1), nn.Conv1d(11, 5, 1, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        near = torch.relu(self.near(x))
        whole = near.amax(2, keepdim=True).expand(-1, -1, x.shape[2])
        every = self.head(torch.cat([x, near, whole], dim=1))
        shares = torch.cat((near.flatten(1), x.flatten(1)), -1)
        longer = torch.cat((every, every[:1]), 0)
        return longer, near.amax(2), torch.amax(every, (0, -1)), shares.amax(), torch.amax(near, dim=(), keepdim=True)


def image(*shape: int) -> tuple[Tensor]:
    return (values(*shape),)


def tokens(*shape: int) -> tuple[Tensor]:
    return (torch.randint(0, 11, shape, generator=torch.Generator().manual_seed(3)),)


CASES: list[tuple[str, Callable[[], nn.Module], tuple[Tensor, ...]]] = [
    ("linear", lambda: nn.Linear(5, 4), image(6, 5)),
    ("linear without bias", lambda: nn.Linear(5, 4, bias=False), image(6, 5)),
    ("linear of sequences", lambda: nn.Linear(5, 4), image(2, 3, 5)),
    ("linear of one vector", lambda: nn.Linear(5, 4), image(5)),
    ("bilinear", lambda: Twice(nn.Bilinear(4, 4, 3)), image(6, 4)),
    ("conv1d", lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), image(2, 4, 9)),
    ("conv2d", lambda: nn.Conv2d(3, 4, 3, padding=1), image(2, 3, 6, 6)),
    ("conv2d strided", lambda: nn.Conv2d(3, 4, (3, 2), stride=(2, 1), dilation=(1, 2)), image(2, 3, 7, 6)),
    ("conv2d grouped", lambda: nn.Conv2d(4, 8, 3, groups=4, bias=False), image(2, 4, 6, 6)),
    ("conv2d same", lambda: nn.Conv2d(3, 4, 3, padding="same"), image(2, 3, 6, 6)),
    ("conv2d reflected", lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), image(2, 3, 6, 6)),
    ("conv2d replicated", lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="replicate"), image(2, 3, 6, 6)),
    ("conv2d circular", lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), image(2, 3, 6, 6)),
    ("conv2d of one sample", lambda: nn.Conv2d(3, 4, 3), image(3, 6, 6)),
    ("conv3d", lambda: nn.Conv3d(2, 3, 2), image(2, 2, 4, 4, 4)),
    ("conv1d of one place", lambda: nn.Conv1d(4, 6, 1), image(2, 4, 9)),
    (
        "conv2d of one place",
        lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 5, 1, bias=False)),
        image(2, 3, 4, 5),
    ),
    ("conv3d of one place", lambda: nn.Conv3d(2, 3, 1, padding="valid"), image(2, 2, 3, 4, 2)),
    ("points", Points, image(2, 3, 7)),
    ("transposed 1d", lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, groups=2), image(2, 4, 5)),
    ("transposed 2d", lambda: nn.ConvTranspose2d(3, 4, 3, 2, 1, output_padding=1), image(2, 3, 5, 5)),
    (
        "transposed 2d, longer than a stride",
        lambda: nn.ConvTranspose2d(3, 4, 3, 1, 1, output_padding=1, dilation=2),
        image(2, 3, 5, 5),
    ),
    ("transposed 2d of wide images", lambda: nn.ConvTranspose2d(3, 4, 4, 2, 1), image(2, 3, 5, 18)),
    ("conv2d of wide images", lambda: nn.Conv2d(3, 4, 3, 2, 1, bias=False), image(2, 3, 7, 20)),
    ("transposed to a size", Enlarged, image(2, 3, 5, 5)),
    ("settings in lists", Listed, image(2, 4, 6, 6)),
    ("transposed 3d", lambda: nn.ConvTranspose3d(2, 3, 2, dilation=2), image(2, 2, 3, 3, 3)),
    ("batch norm 1d", lambda: nn.BatchNorm1d(5), image(6, 5)),
    ("batch norm 2d", lambda: nn.BatchNorm2d(3), image(4, 3, 5, 5)),
    ("batch norm over its life", lambda: nn.BatchNorm2d(3, momentum=None), image(4, 3, 5, 5)),
    ("batch norm without statistics", lambda: nn.BatchNorm1d(5, track_running_stats=False), image(6, 5)),
    ("batch norm without weights", lambda: linear_then(nn.BatchNorm1d(5, affine=False)), image(6, 5)),
    ("batch norm in evaluation", lambda: nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)).eval(), image(6, 5)),
    ("instance norm", lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True), image(4, 3, 5, 5)),
    ("group norm", lambda: nn.GroupNorm(2, 6), image(3, 6, 4)),
    ("layer norm", lambda: nn.LayerNorm(6), image(3, 5, 6)),
    ("layer norm of two axes", lambda: nn.LayerNorm([5, 6]), image(3, 5, 6)),
    ("layer norm without bias", lambda: nn.LayerNorm(6, bias=False), image(3, 6)),
    ("rms norm", lambda: nn.RMSNorm(6), image(3, 5, 6)),
    ("embedding", lambda: nn.Embedding(11, 4), tokens(3, 5)),
    ("embedding with padding", lambda: nn.Embedding(11, 4, padding_idx=2), tokens(6, 5)),
    ("embedding with padding from the end", lambda: nn.Embedding(11, 4, padding_idx=-3), tokens(6, 5)),
    ("embedding scaled by frequency", lambda: nn.Embedding(11, 4, scale_grad_by_freq=True), tokens(6, 5)),
    ("tied weights", Tied, tokens(4, 3)),
    ("prelu", lambda: nn.PReLU(3), image(4, 3, 5)),
    ("prelu of one weight", nn.PReLU, image(4, 3, 5)),
    ("max pool", lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.MaxPool2d(2)), image(2, 3, 6, 6)),
    ("adaptive pool", lambda: nn.Sequential(nn.Conv1d(3, 4, 1), nn.AdaptiveAvgPool1d(3)), image(2, 3, 7)),
    ("adaptive max pool", lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.AdaptiveMaxPool2d(2)), image(2, 3, 6, 6)),
    ("pool of one sample", lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.AvgPool2d(2)), image(3, 6, 6)),
    ("attention", lambda: ToItself(nn.MultiheadAttention(8, 2)), image(5, 3, 8)),
    ("attention batch first", lambda: ToItself(nn.MultiheadAttention(8, 2, batch_first=True)), image(3, 5, 8)),
    ("attention with bias and zeros", lambda: ToItself(zeros()), image(5, 3, 8)),
    ("attention of one sample", lambda: ToItself(nn.MultiheadAttention(8, 2, bias=False)), image(5, 8)),
    ("functional", Functional, image(2, 3, 8, 8)),
    ("recurrent", lambda: Last(nn.GRU(4, 5, batch_first=True)), image(2, 6, 4)),
    ("activations", lambda: nn.Sequential(nn.Linear(5, 6), nn.GELU(), nn.LeakyReLU(0.2), nn.GLU()), image(4, 5)),
    ("upsampled", lambda: nn.Sequential(nn.Conv2d(3, 2, 1), nn.Upsample(scale_factor=2)), image(2, 3, 4, 4)),
]


def zeros() -> nn.Module:
    return nn.MultiheadAttention(8, 2, add_bias_kv=True, add_zero_attn=True)


def linear_then(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 5), layer)


class Last(nn.Module):
    """The last output of a recurrent layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


NAMES = [name for name, _, _ in CASES]
# A case is one value, though it is a tuple.
SOME = fast_where(lambda case: NAMES.index(case[0][0]) % 4 == 0, [(case,) for case in CASES])


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "each"])
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_every_layer_equals_separate_modules(case: Any, shared: bool, forced: Any) -> None:
    forced("as the array would")
    check(case[1], case[2], shared=shared)


@pytest.mark.parametrize("case", SOME, ids=NAMES)
def test_every_layer_equals_separate_modules_in_single_precision(case: Any, forced: Any) -> None:
    forced("as the array would")
    check(case[1], case[2], shared=False, dtype=torch.float32)


CANDIDATES = [
    "loop",
    "unfolded",
    "batched",
    "grouped",
    "channels",
    "normalise then scale",
    "products",
    "normalise once",
    "kernel",
]


@pytest.mark.parametrize("candidate", CANDIDATES)
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "each"])
@pytest.mark.slow
def test_every_implementation_computes_the_same(candidate: str, shared: bool, forced: Any) -> None:
    forced(candidate)
    # Kernels are of single precision.
    dtype = torch.float32 if candidate == "kernel" else torch.float64
    for name in (
        *NAMES[:4],
        "conv1d",
        "conv2d",
        "conv2d strided",
        "conv2d of one sample",
        "conv1d of one place",
        "conv2d of one place",
        "conv3d of one place",
        "points",
        "transposed 2d",
        "transposed 2d, longer than a stride",
        "transposed 2d of wide images",
        "conv2d of wide images",
        "layer norm",
        "rms norm",
        "batch norm 2d",
        "instance norm",
        "group norm",
        "embedding with padding",
    ):
        _, factory, inputs = CASES[NAMES.index(name)]
        check(factory, inputs, shared=shared, dtype=dtype)


@pytest.mark.parametrize("case", SOME, ids=NAMES)
def test_whole_models_in_a_loop_equal_separate_modules(case: Any) -> None:
    check(case[1], case[2], shared=False, loop=True)


def test_models_that_are_measured_equal_separate_modules() -> None:
    check(Functional, image(2, 3, 8, 8), shared=True)
    assert set(autotune.autotune_choices().values()) <= {"side by side", "grouped", "unfolded", "batched", "loop"}


def test_no_padding_row_has_a_gradient() -> None:
    models = make(lambda: nn.Embedding(9, 4, padding_idx=1), 4)
    array = fuse(models)
    (table,) = array.parameters()
    array.losses(weighed, array(torch.arange(9).repeat(2))).sum().backward()
    assert table.grad is not None
    assert not table.grad[:, 1].any()
    assert table.grad[:, [0, *range(2, 9)]].all()


def test_tied_weights_are_one_parameter_and_stay_tied() -> None:
    array = fuse(make(Tied))
    assert [name for name, _ in array.named_parameters()] == ["table.weight"]
    extracted: Any = array.extract(1)
    assert extracted.head.weight is extracted.table.weight


class Encoder(nn.Module):
    """A transformer encoder with every mask."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor, padding: Tensor, mask: Tensor) -> Tensor:
        return self.encoder(x, src_key_padding_mask=padding, mask=mask).masked_fill(padding[..., None], 0)


@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "each"])
def test_a_transformer_honours_its_masks(norm_first: bool, shared: bool, forced: Any) -> None:
    forced("as the array would")
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[0, 3:] = padding[2, 4:] = True
    mask = values(5, 5) > 0.3
    mask[:, 0] = False
    models = make(lambda: Encoder(norm_first), COUNT)
    array, x = fuse(models), values(3, 5, 8)
    own = [(x, padding, mask) if shared else (x.roll(i, 0), padding.roll(i, 0), mask) for i in range(COUNT)]
    given = own[0] if shared else (*(Each(torch.stack(part)) for part in list(zip(*own, strict=True))[:2]), mask)
    theirs, slopes = passed(copies(models), own)
    ours = array(*given)
    array.losses(weighed, ours).sum().backward()
    for index in range(COUNT):
        assert close(ours[index], theirs[index])
        for name, parameter in array.named_parameters():
            assert parameter.grad is not None
            assert close(parameter.grad[index], slopes[index][name])


class Bare(nn.Module):
    """Attention without modules."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal, self.w = causal, nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        q = (x @ self.w).unflatten(-1, (2, 2)).transpose(-3, -2)
        return F.scaled_dot_product_attention(q, q, q, is_causal=self.causal, scale=0.3)


@pytest.mark.parametrize("causal", [True, False])
def test_attention_without_modules_equals_separate_calls(causal: bool) -> None:
    check(lambda: Bare(causal), image(3, 5, 4), shared=True)


class ByAxis(nn.Module):
    """Names axes as NumPy does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([self.layer(x), x], axis=1)  # type: ignore[call-overload]
        return y - torch.amax(y, axis=1, keepdim=True) + y.amax(axis=0)  # type: ignore[call-overload, call-arg]


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "each"])
def test_axes_are_known_by_both_of_torch_s_names(shared: bool) -> None:
    check(ByAxis, image(5, 4), shared=shared)


class Shifted(nn.Module):
    """Normalises, and has a shift but no gain."""

    def __init__(self, of_batches: bool) -> None:
        super().__init__()
        self.of_batches, self.shift = of_batches, nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.of_batches:
            return F.batch_norm(x, None, None, None, self.shift, training=True)
        return F.layer_norm(x, (4,), bias=self.shift)


@pytest.mark.parametrize("of_batches", [True, False], ids=["batch norm", "layer norm"])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "each"])
def test_a_shift_without_a_gain_is_added(of_batches: bool, shared: bool) -> None:
    check(lambda: Shifted(of_batches), image(5, 4), shared=shared)


def test_a_shift_without_a_gain_has_a_gain_of_ones_off_the_cpu() -> None:
    x, shift = torch.zeros(2, 4, device="meta"), torch.zeros(4, device="meta")
    for given in (shift, Batch(shift.expand(3, 4), 0)):
        gain = gain_for(x, None, given)
        assert isinstance(gain, Tensor)
        assert gain.shape == (4,)
        assert gain.device.type == "meta"
        assert gain_for(torch.zeros(2, 4), None, given) is None
    assert gain_for(x, None, None) is None
    assert gain_for(x, shift, shift) is shift


class Sharing(nn.Module):
    """Attention in which all samples and heads share keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        q = self.layer(x).view(size=(3, 2, 5, 4))
        return F.scaled_dot_product_attention(q, q[:1, :1], q[:1, :1])


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "each"])
def test_attention_broadcasts_keys_and_values(shared: bool) -> None:
    check(Sharing, image(3, 2, 5, 4), shared=shared)
