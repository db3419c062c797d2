# SPDX-License-Identifier: Apache-2.0
"""Whatever a model draws, each member has its own numbers: those of a separate run after its seed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn.utils import parametrizations

from thinwire.arrays.fusion import fuse
from thinwire.errors import ConfigError

SEEDS = (1, 2, 3)
X = torch.randn(5, 6, generator=torch.Generator().manual_seed(5))


def together(factory: Callable[[], nn.Module], steps: int = 3, *, loop: bool | list[str] = False) -> Tensor:
    """Every member's loss at every step, and its parameters at the end."""
    array = fuse(lambda: factory(), [{}] * len(SEEDS), seeds=SEEDS, loop=loop)
    optimizer, losses = torch.optim.SGD(array.parameters(), lr=0.05), list[Tensor]()
    for _ in range(steps):
        optimizer.zero_grad()
        each = array.losses(F.mse_loss, array(X), X)
        each.sum().backward()
        optimizer.step()
        losses.append(each.detach())
    ends = [nn.utils.parameters_to_vector(array.extract(i).parameters()).detach() for i in range(len(SEEDS))]
    return torch.cat([torch.stack(losses, 1), torch.stack(ends)], 1)


def apart(factory: Callable[[], nn.Module], steps: int = 3) -> Tensor:
    """The same, from separate runs."""
    rows: list[Tensor] = []
    for seed in SEEDS:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model, losses = factory(), list[Tensor]()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            for _ in range(steps):
                optimizer.zero_grad()
                loss = F.mse_loss(model(X), X)
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
        rows.append(torch.cat([torch.stack(losses), nn.utils.parameters_to_vector(model.parameters()).detach()]))
    return torch.stack(rows)


class DropPath(nn.Module):
    """Stochastic depth: whole samples are dropped."""

    def __init__(self, draws: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.draws = nn.Linear(6, 6), draws

    def forward(self, x: Tensor) -> Tensor:
        return x * self.draws(x) + self.inner(x) * self.draws(self.inner(x))


class Autoencoder(nn.Module):
    """A variational autoencoder; `noise` draws like the deviations, or the whole code."""

    def __init__(self, noise: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.encoder, self.decoder, self.noise = nn.Linear(6, 4), nn.Linear(2, 6), noise

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        return self.decoder(self.noise(mean, (0.5 * log_variance).exp()))


def keep_column(x: Tensor) -> tuple[int, int]:
    return x.shape[0], 1


PATHS: dict[str, Callable[[Tensor], Tensor]] = {
    "new_empty, bernoulli_": lambda x: x.new_empty(keep_column(x)).bernoulli_(0.7).div_(0.7),
    "empty, bernoulli_": lambda x: torch.empty(keep_column(x), dtype=x.dtype).bernoulli_(0.7).div_(0.7),
    "rand, floor_": lambda x: (0.7 + torch.rand(keep_column(x))).floor_() / 0.7,
    "bernoulli": lambda x: torch.bernoulli(torch.full(keep_column(x), 0.7)) / 0.7,
    "filled later": lambda x: fill_(torch.empty(keep_column(x))),
}


def fill_(x: Tensor) -> Tensor:
    x.uniform_()
    return (x > 0.3).to(x.dtype)


CODES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "randn_like": lambda mean, s: mean + torch.randn_like(s) * s,
    "empty_like, normal_": lambda mean, s: mean + torch.empty_like(s).normal_() * s,
    "new_empty, normal_": lambda mean, s: mean + s.new_empty(s.shape).normal_(0, 1) * s,
    "Normal.rsample": lambda mean, s: Normal(mean, s).rsample(),
    "randn": lambda mean, s: mean + torch.randn(s.shape) * s,
    "randn without a generator": lambda mean, s: mean + torch.randn(s.shape, generator=None) * s,
    "normal": lambda mean, s: mean + torch.normal(0.0, 1.0, size=s.shape) * s,
    "normal of tensors": lambda mean, s: mean + torch.normal(torch.zeros_like(s), torch.ones_like(s)) * s,
    "a value overwritten": lambda mean, s: mean + s.clone().normal_() * s,
    "transposed": lambda mean, s: mean + torch.empty_like(s.t()).normal_().t() * s,
    "exponential_": lambda mean, s: mean + s.new_zeros(s.shape).exponential_() * s,
    "bernoulli_ of tensors": lambda mean, s: mean + torch.empty_like(s).bernoulli_(mean.detach().sigmoid()) * s,
    "uniform_": lambda mean, s: mean + torch.empty(s.shape).uniform_() * s,
    "randint": lambda mean, s: mean + torch.randint(0, 5, s.shape) * s,
    "randint_like": lambda mean, s: mean + torch.randint_like(s, 5) * s,
    "randperm": lambda mean, s: mean + torch.randperm(2) * s,
    "multinomial": lambda mean, s: mean + torch.multinomial(s, 2) * s,
    "poisson": lambda mean, s: mean + torch.poisson(s.detach()) * s,
    "gumbel_softmax": lambda mean, s: F.gumbel_softmax(mean) * s,
    "rrelu": lambda mean, s: F.rrelu(mean, training=True) * s,
}


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("name", PATHS)
def test_stochastic_depth_drops_as_in_separate_runs(name: str, loop: bool) -> None:
    factory = partial(DropPath, PATHS[name])
    torch.testing.assert_close(together(factory, loop=loop), apart(factory), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", PATHS)
def test_a_layer_in_a_loop_draws_as_in_separate_runs(name: str) -> None:
    factory = lambda: nn.Sequential(nn.Linear(6, 6), DropPath(PATHS[name]), nn.Dropout(0.3))  # noqa: E731
    torch.testing.assert_close(together(factory, loop=["1"]), apart(factory), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("name", CODES)
def test_autoencoders_draw_as_in_separate_runs(name: str, loop: bool) -> None:
    factory = partial(Autoencoder, CODES[name])
    torch.testing.assert_close(together(factory, loop=loop), apart(factory), rtol=1e-4, atol=1e-5)


def test_members_draw_different_numbers_without_seeds() -> None:
    array = fuse([Autoencoder(CODES["Normal.rsample"]) for _ in range(2)])
    array.insert(1, array.extract(0))
    found = array(X)
    assert not torch.equal(found[0], found[1])


def normed(norm: Callable[[nn.Module], nn.Module], convolution: bool) -> nn.Module:
    if convolution:
        first = [nn.Unflatten(1, (1, 6)), norm(nn.Conv1d(1, 2, 3, padding=1)), nn.Flatten(), nn.Linear(12, 6)]
        return nn.Sequential(*first)
    return nn.Sequential(norm(nn.Linear(6, 6)), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 6))


@pytest.mark.parametrize("convolution", [False, True])
@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_parametrised_layers_train_as_in_separate_runs(
    norm: Callable[[nn.Module], nn.Module], convolution: bool
) -> None:
    factory = partial(normed, norm, convolution)
    torch.testing.assert_close(together(factory), apart(factory), rtol=1e-4, atol=1e-5)


def test_the_vectors_of_spectral_norm_are_those_of_separate_runs_and_are_extracted() -> None:
    models = [normed(parametrizations.spectral_norm, False) for _ in range(3)]
    array = fuse(models)
    array(X)
    for index, model in enumerate(models):
        model(X)
        own, other = array.extract(index).state_dict(), model.state_dict()
        assert own.keys() == other.keys()
        for name in own:
            torch.testing.assert_close(own[name], other[name])


def test_layers_that_are_parametrised_differently_are_told_apart() -> None:
    models = [normed(each, False) for each in (parametrizations.weight_norm, parametrizations.spectral_norm)]
    with pytest.raises(ConfigError, match="parametrizations"):
        fuse(models)
    with pytest.raises(ConfigError, match=r"layer '0' .*: it is parametrised in one of them only"):
        fuse([normed(parametrizations.weight_norm, False), normed(lambda layer: layer, False)])


@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_norms_that_keep_the_weight_as_an_attribute_are_refused_with_the_way_to_do_it() -> None:
    with pytest.raises(ConfigError, match=r"weight is an attribute .* torch\.nn\.utils\.parametrizations") as refused:
        fuse([normed(nn.utils.weight_norm, False) for _ in range(2)])
    assert "tensor(" not in str(refused.value)


def test_a_draw_into_a_tensor_without_models_is_refused_by_name() -> None:
    array = fuse([DropPath(lambda x: torch.zeros(5, 1).bernoulli_(0.5)) for _ in range(2)])
    with pytest.raises(ConfigError, match="bernoulli_ of a tensor without models"):
        array(X)


class Recurrent(nn.Module):
    """A recurrent layer with dropout between its layers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = getattr(nn, kind)(6, 6, num_layers=2, dropout=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers_drop_as_in_separate_runs(kind: str, loop: bool) -> None:
    factory = partial(Recurrent, kind)
    torch.testing.assert_close(together(factory, loop=loop), apart(factory), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("draws", [torch.rand_like, torch.randn_like])
def test_noise_from_a_generator_of_the_code_s_own_is_drawn_from_it(draws: Callable[..., Tensor], loop: bool) -> None:
    generator = torch.Generator().manual_seed(9)
    array = fuse([DropPath(lambda x: draws(x, generator=generator)) for _ in range(2)], seeds=SEEDS[:2], loop=loop)
    found, again = array.map(lambda x: draws(x, generator=generator), X), torch.Generator().manual_seed(9)
    assert all(torch.equal(own, draws(X, generator=again)) for own in found)
