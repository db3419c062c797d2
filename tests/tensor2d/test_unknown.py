# SPDX-License-Identifier: Apache-2.0
"""Models whose own forward crosses features or samples: refused, and found by the check where the plan names them."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.oracles.tensor2d import drawn, serial_gradients
from tests.tensor2d.helpers import gradients, run
from thinwire import ConfigError
from thinwire.tensor2d import Mesh2D, cross_entropy_2d, parallelize_2d
from thinwire.tensor2d.plan import Dense, DividedCounts, Lookup, Norm, Style, Untouched

H, HEADS, NUM_WORDS, LENGTH = 24, 4, 36, 6


class Attention(nn.Module):
    """nanoGPT's: queries, keys and values are thirds of one layer's output."""

    def __init__(self, cut: str = "split", fused: bool = True) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(H, 3 * H), nn.Linear(H, H)
        self.n_head, self.n_embd, self.cut, self.fused = HEADS, H, cut, fused

    def forward(self, x: Tensor) -> Tensor:
        samples, length, features = x.shape
        y = self.c_attn(x)
        parts = y.split(self.n_embd, dim=2) if self.cut == "split" else y.chunk(3, dim=-1)
        q, k, v = (part.view(samples, length, self.n_head, features // self.n_head).transpose(1, 2) for part in parts)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = (q @ k.transpose(-2, -1) / (features // self.n_head) ** 0.5).softmax(-1) @ v
        return self.c_proj(y.transpose(1, 2).reshape(samples, length, features))


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.out = nn.Linear(H, 4 * H), nn.Linear(2 * H, H)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.wide(x).chunk(2, dim=-1)
        return self.out(F.silu(gate) * value)


class Through(nn.Module):
    """A function between two linear layers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.wide, self.out, self.function = nn.Linear(H, H), nn.Linear(H, H), function

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.function(self.wide(x)))


class Glu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.glu(x, -1)


class Excited(nn.Module):
    """Squeeze and excite: a mean over all features scales each."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.mean(-1, keepdim=True).sigmoid()


class Halved(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * super().forward(x)


class Scaled(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 4.9


class ShiftedRMSNorm(nn.Module):
    """Scales by 1 + weight, as some published models do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(H)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * (1 + self.weight)


class Centred(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True)


def soft_encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(
        H, HEADS, H, 0.0, activation=lambda x: x.softmax(-1), batch_first=True, norm_first=True
    )


def turned_halves(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def through(function: Callable[[Tensor], Tensor]) -> tuple[Callable[[], nn.Module], dict[Any, Style]]:
    return lambda: Through(function), {Through: Untouched()}


CROSSING: dict[str, tuple[Callable[[], nn.Module], dict[Any, Style]]] = {
    "queries, keys and values by chunk": (lambda: Attention("chunk"), {Attention: DividedCounts(("n_head",))}),
    "queries, keys and values by split": (Attention, {Attention: DividedCounts(("n_head", "n_embd"))}),
    "written-out attention": (
        lambda: Attention("chunk", fused=False),
        {Attention: DividedCounts(("n_head",))},
    ),
    "SwiGLU by chunk": (SwiGLU, {SwiGLU: Untouched()}),
    "nn.Softmax": (lambda: nn.Sequential(nn.Linear(H, H), nn.Softmax(-1)), {nn.Softmax: Untouched()}),
    "nn.LogSoftmax": (lambda: nn.Sequential(nn.Linear(H, H), nn.LogSoftmax(-1)), {nn.LogSoftmax: Untouched()}),
    "nn.Softmin": (lambda: nn.Sequential(nn.Linear(H, H), nn.Softmin(-1)), {nn.Softmin: Untouched()}),
    "nn.GLU": (lambda: nn.Sequential(nn.Linear(H, 2 * H), nn.GLU(), nn.Linear(H, H)), {nn.GLU: Untouched()}),
    "nn.AvgPool1d": (
        lambda: nn.Sequential(nn.Linear(H, H), nn.AvgPool1d(3, 1, 1), nn.Linear(H, H)),
        {nn.AvgPool1d: Untouched()},
    ),
    "F.softmax": through(lambda x: F.softmax(x, -1)),
    "F.normalize": through(lambda x: F.normalize(x, dim=-1)),
    "F.rms_norm": through(lambda x: F.rms_norm(x, (x.shape[-1],))),
    "F.layer_norm": through(lambda x: F.layer_norm(x, (x.shape[-1],))),
    "F.glu": (
        lambda: nn.Sequential(nn.Linear(H, 2 * H), Glu(), nn.Linear(H, H)),
        {Glu: Untouched()},
    ),
    "a cumulative sum": through(lambda x: x.cumsum(-1)),
    "rotated halves": through(turned_halves),
    "features turned around": through(lambda x: x.flip(-1)),
    "features rolled": through(lambda x: x.roll(1, -1)),
    "the largest features": through(lambda x: x * (x >= x.amax(-1, keepdim=True) - 0.5)),
    "the mean of the samples": through(lambda x: x - x.mean(0)),
    "squeeze and excite": (lambda: nn.Sequential(nn.Linear(H, H), Excited()), {Excited: Untouched()}),
    "a linear layer of its own": (lambda: Halved(H, H), {Halved: Dense()}),
    "an RMS norm of its own": (ShiftedRMSNorm, {ShiftedRMSNorm: Norm()}),
    "a layer norm of its own": (lambda: Centred(H), {Centred: Norm()}),
    "an encoder layer with another activation": (soft_encoder, {nn.TransformerEncoderLayer: Untouched()}),
}


def network(make: Callable[[], nn.Module], embedding: type[nn.Embedding] = nn.Embedding) -> nn.Module:
    with torch.random.fork_rng():
        model = nn.Sequential(embedding(NUM_WORDS, H), make(), nn.Linear(H, NUM_WORDS)).double()
    for number, parameter in enumerate(model.parameters()):
        parameter.data = 0.5 * drawn(*parameter.shape, seed=number)
    return model


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    return torch.randint(NUM_WORDS, (8, LENGTH), generator=draw), torch.randint(NUM_WORDS, (8, LENGTH), generator=draw)


def failures(models: list[nn.Module], plan: dict[Any, Style], **settings: Any) -> list[str]:
    """What every rank of a 2x2 mesh is told."""

    def work(mesh: Mesh2D) -> str:
        model = models[mesh.whole.rank]
        before = [(name, id(module)) for name, module in model.named_modules()]
        counts = [getattr(module, "n_head", None) for module in model.modules()]
        try:
            parallelize_2d(model, mesh, plan, **settings)
        except ConfigError as error:
            assert before == [(name, id(module)) for name, module in model.named_modules()]
            assert counts == [getattr(module, "n_head", None) for module in model.modules()]
            model(batch()[0])  # and it computes as before
            return str(error)
        return ""

    return run(2, 2, work)


@pytest.mark.parametrize("name", CROSSING)
def test_a_forward_that_is_not_known_is_refused_and_the_error_says_how_to_name_it(name: str) -> None:
    make, plan = CROSSING[name]
    kind = next(iter(plan)).__name__
    for message in failures([network(make) for _ in range(4)], {}):
        assert kind in message
        assert "plan" in message


@pytest.mark.parametrize("name", CROSSING)
def test_the_check_finds_a_forward_that_crosses_features_or_samples(name: str) -> None:
    make, plan = CROSSING[name]
    for message in failures([network(make) for _ in range(4)], plan, check=batch()[0]):
        assert message.startswith("check: ")
        assert "in the serial model" in message or "cannot compute" in message


class Leaky(nn.Module):
    """Adds a mean of a replicated parameter, whose gradient the layer does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(H)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) + self.norm.weight.mean()


def test_the_check_finds_a_wrong_gradient_where_all_outputs_are_right() -> None:
    models = [network(Leaky) for _ in range(4)]

    def work(mesh: Mesh2D) -> str:
        with pytest.raises(ConfigError) as caught:
            parallelize_2d(models[mesh.whole.rank], mesh, {Leaky: Untouched()}, check=batch()[0])
        assert all(parameter.grad is None for parameter in models[mesh.whole.rank].parameters())
        return str(caught.value)

    for message in run(4, 1, work):  # one column holds all of the weight
        assert message.startswith("check: the gradient of 1.norm.weight at ")
        assert "though all outputs are equal" in message


def test_an_embedding_with_a_forward_of_its_own_is_refused_and_found() -> None:
    models = [network(nn.Identity, Scaled) for _ in range(4)]
    assert all("0 is a Scaled with parameters" in message for message in failures(models, {}))
    assert all("0" in message for message in failures(models, {Scaled: Lookup()}, check=batch()[0]))


def test_the_check_names_the_first_module_that_differs() -> None:
    models = [network(lambda: nn.Sequential(nn.GELU(), SwiGLU(), Excited())) for _ in range(4)]
    for message in failures(models, {SwiGLU: Untouched(), Excited: Untouched()}, check=batch()[0]):
        assert "The first module to differ is 1.1 (SwiGLU)" in message


def test_one_error_names_all_unknown_classes() -> None:
    message = failures([network(lambda: nn.Sequential(SwiGLU(), Excited())) for _ in range(4)], {})[0]
    assert "SwiGLU (1.0), Excited (1.1)" in message
    assert "plan={SwiGLU: Untouched(), Excited: Untouched()}" in message


RIGHT: dict[str, tuple[Callable[[], nn.Module], dict[Any, Style]]] = {
    "attention that is told its share": (
        Attention,
        {Attention: DividedCounts(("n_head", "n_embd")), "*.c_attn": Dense(sections=3)},
    ),
    "SwiGLU in two sections": (SwiGLU, {SwiGLU: Untouched(), "*.wide": Dense(sections=2)}),
    "a function of each feature": through(lambda x: x.sin() * x),
    "positions that are mixed": through(lambda x: x.cumsum(1)),
    "activations": (lambda: nn.Sequential(nn.GELU(), nn.Linear(H, H), nn.SiLU(), nn.Tanh(), nn.ReLU6()), {}),
    "torch's encoder layer": (
        lambda: nn.TransformerEncoderLayer(H, HEADS, 2 * H, batch_first=True, activation="gelu"),
        {},
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_the_check_accepts_has_the_serial_loss_and_gradient(name: str) -> None:
    make, plan = RIGHT[name]
    ids, targets = batch()
    serial = network(make).eval()
    loss = F.cross_entropy(serial(ids).flatten(0, 1), targets.flatten())
    loss.backward()
    models = [network(make) for _ in range(4)]

    def work(mesh: Mesh2D) -> tuple[Tensor, dict[str, Tensor], set[bool]]:
        model = parallelize_2d(models[mesh.whole.rank], mesh, plan, check=ids)
        modes = {module.training for module in model.modules()}
        ours = cross_entropy_2d(model.eval()(mesh.rows_of(ids)), mesh.rows_of(targets), mesh)
        ours.backward()
        return ours.detach(), gradients(model, mesh), modes

    for ours, grads, modes in run(2, 2, work):
        torch.testing.assert_close(ours, loss.detach(), rtol=1e-10, atol=1e-10)
        for parameter, whole in serial_gradients(serial).items():
            torch.testing.assert_close(grads[parameter], whole, rtol=1e-9, atol=1e-11)
        assert modes == {True}


def test_the_check_takes_positional_and_named_arguments_features_and_numbers() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(H, H)

        def forward(self, x: Tensor, scale: float, *, mask: Tensor | None = None) -> dict[str, Any]:
            y = self.one(x) * scale
            return {"y": y if mask is None else y * mask[:, None], "list": [y, "words"]}

    def model() -> Pair:
        made = Pair().double()
        for number, parameter in enumerate(made.parameters()):
            parameter.data = drawn(*parameter.shape, seed=number)
        return made

    models, x = [model() for _ in range(8)], drawn(4, H, seed=7)
    run(2, 2, lambda mesh: parallelize_2d(models[mesh.whole.rank], mesh, {Pair: Untouched()}, check=(x, 2.0)))
    named = {"x": x, "scale": 2.0, "mask": torch.tensor([1, 0, 1, 1])}
    run(2, 2, lambda mesh: parallelize_2d(models[4 + mesh.whole.rank], mesh, {Pair: Untouched()}, check=named))


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (torch.zeros(3, LENGTH, dtype=torch.int64), "a batch of 3: 2 rows must divide it"),
        ((), "must contain tensors"),
        ((1, "words"), "must contain tensors"),
    ],
)
def test_a_batch_that_cannot_be_checked_is_refused(check: Any, message: str) -> None:
    models = [network(nn.GELU) for _ in range(4)]
    assert all(message in told for told in failures(models, {}, check=check))


def test_models_from_which_nothing_could_be_learnt_are_refused_by_the_check() -> None:
    models = [network(nn.GELU) for _ in range(4)]
    for model in models:
        model.get_submodule("2").weight.data.zero_()
        model.get_submodule("2").bias.data.zero_()
    assert all("nonzero weights" in message for message in failures(models, {}, check=batch()[0]))
    with pytest.raises(ConfigError, match="meta device"):
        run(2, 2, lambda mesh: parallelize_2d(network(nn.GELU).to("meta"), mesh, check=batch()[0]))


def test_ranks_that_start_from_different_models_are_all_told() -> None:
    models = [network(nn.GELU) for _ in range(4)]
    models[2].get_submodule("2").bias.data.add_(1)
    assert all(message.startswith("check: ") for message in failures(models, {}, check=batch()[0]))


def test_a_module_with_two_names_is_replaced_under_both() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = self.second = nn.Linear(H, H).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(x)))

    with torch.random.fork_rng():
        model = Twice()
    x = drawn(4, H)

    def work(mesh: Mesh2D) -> bool:
        split = parallelize_2d(deepcopy(model), mesh, {Twice: Untouched()}, check=x)
        return split.first is split.second

    assert run(2, 2, work) == [True] * 4


@pytest.mark.parametrize("kind", ["linear", "embedding"])
def test_a_parameter_that_would_become_two_is_refused(kind: str) -> None:
    def make() -> nn.Module:
        pair = [nn.Linear(H, H), nn.Linear(H, H)] if kind == "linear" else [nn.Embedding(36, H), nn.Embedding(36, H)]
        pair[1].weight = pair[0].weight
        return nn.Sequential(*pair)

    models = [make() for _ in range(4)]
    with pytest.raises(ConfigError, match="0 and 1 share a parameter"):
        run(2, 2, lambda mesh: parallelize_2d(models[mesh.whole.rank], mesh))


def test_a_replaced_module_with_a_hook_is_refused() -> None:
    def work(mesh: Mesh2D) -> None:
        model = nn.Sequential(nn.Linear(H, H))
        model[0].register_forward_hook(lambda module, inputs, output: 2 * output)
        parallelize_2d(model, mesh)

    with pytest.raises(ConfigError, match="0 has a forward hook"):
        run(2, 2, work)


@pytest.mark.parametrize("spoil", ["weight norm", "forward of the instance", "dropout of whole features"])
def test_layers_that_compute_something_else_are_refused(spoil: str) -> None:
    def work(mesh: Mesh2D) -> None:
        layer: nn.Module = nn.Linear(H, H)
        if spoil == "weight norm":
            nn.utils.parametrizations.weight_norm(layer)
        elif spoil == "dropout of whole features":
            layer = nn.Sequential(layer, nn.Dropout1d(0.1))
        else:
            layer.forward = lambda x: x
        parallelize_2d(nn.Sequential(layer), mesh)

    with pytest.raises(ConfigError, match=r"parametrizations|Linear with parameters|Dropout1d"):
        run(2, 2, work)
