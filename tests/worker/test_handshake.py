# SPDX-License-Identifier: Apache-2.0
"""Ranks that were started differently are refused before the first step."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import thinwire
from tests.engine import drawn, momentum, net
from tests.pool import run_processes
from tests.rules import for_each
from thinwire import AllReduce, Comm, Complete, Gossip, LocalSGD, MismatchError, run_threads
from thinwire.worker.handshake import agree, fingerprint, gather_texts

Setup = dict[str, Any]


class Named(nn.Module):
    """Parameters by the names given, in that order."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.ones(2, 2)))


def tied() -> nn.Module:
    model = drawn(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    model[1].weight = model[0].weight
    return model


def frozen() -> nn.Module:
    model = net()
    model[0].bias.requires_grad_(False)
    return model


def buffered(*sizes: int) -> nn.Module:
    model = net()
    model.register_buffer("table", torch.zeros(*sizes))
    return model


def sgd(**settings: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.SGD(model.parameters(), **{"lr": 0.05, **settings})


def head_only(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model[2].parameters(), lr=0.05)


def split(first: int) -> Callable[[nn.Module], torch.optim.Optimizer]:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        parameters = list(model.parameters())
        return torch.optim.SGD([{"params": parameters[:first]}, {"params": parameters[first:]}], lr=0.05)

    return make


# The set-up of one rank, the set-up of the others, and what the error must match.
MUTATIONS: dict[str, tuple[Setup, Setup, str]] = {
    "one more layer": (
        {"model": lambda: drawn(nn.Sequential(*net(), nn.Linear(2, 2)))},
        {},
        r"only rank 2 has parameter 3\.weight",
    ),
    "another dtype": (
        {"model": lambda: net().bfloat16()},
        {},
        r"parameter 0\.weight is 5x3 float32 in group 0 on rank 0 and 5x3 bfloat16 in group 0 on rank 2",
    ),
    "another shape": (
        {"model": lambda: drawn(nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)))},
        {},
        r"parameter 0\.weight is 5x3 float32 .* and 6x3 float32",
    ),
    "another learning rate": (
        {"optimizer": sgd(lr=0.06)},
        {"optimizer": sgd()},
        r"lr of optimizer group 0 is 0\.05 on rank 0 and 0\.06 on rank 2",
    ),
    "another optimizer": (
        {"optimizer": lambda model: torch.optim.Adam(model.parameters(), lr=0.05)},
        {"optimizer": sgd()},
        r"the optimizer is SGD on rank 0 and Adam on rank 2",
    ),
    "another period": (
        {"strategy": LocalSGD(4)},
        {"strategy": LocalSGD(8)},
        r"the strategy is LocalSGD\(\) on rank 0 and LocalSGD\(period=4\) on rank 2",
    ),
    "another topology": (
        {"strategy": Gossip(Complete())},
        {"strategy": Gossip()},
        r"the strategy is .*Gossip.*Complete\(\)",
    ),
    "another seed": ({"seed": 1}, {}, r"the seed is 0 on rank 0 and 1 on rank 2"),
    "another start": ({"init": "own"}, {}, r"init is broadcast on rank 0 and own on rank 2"),
    "other buckets": ({"bucket_bytes": 64}, {}, r"bucket_bytes is 8388608 on rank 0 and 64 on rank 2"),
    "unused ones found": ({"find_unused": True}, {}, r"find_unused is False on rank 0 and True on rank 2"),
    "permuted parameters": (
        {"model": lambda: Named("b", "a")},
        {"model": lambda: Named("a", "b")},
        r"rank 0 has parameter a where rank 2 has parameter b",
    ),
    "a frozen parameter": (
        {"model": frozen, "optimizer": sgd()},
        {"optimizer": sgd()},
        r"parameter 0\.bias is 5 float32 in group 0 on rank 0 and 5 float32 frozen on rank 2",
    ),
    "a parameter left out": (
        {"optimizer": head_only},
        {"optimizer": sgd()},
        r"parameter 0\.weight is 5x3 float32 in group 0 on rank 0 and 5x3 float32 on rank 2",
    ),
    "other groups": (
        {"optimizer": split(1)},
        {"optimizer": split(2)},
        r"parameter 0\.bias is 5 float32 in group 0 on rank 0 and 5 float32 in group 1 on rank 2",
    ),
    "tied weights": (
        {"model": tied},
        {"model": lambda: drawn(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))},
        r"rank 0 has parameter 1\.weight where rank 2 has parameter 1\.bias",
    ),
    "another buffer": (
        {"model": lambda: buffered(2, 3)},
        {"model": lambda: buffered(3, 2)},
        r"buffer table is 3x2 float32 frozen on rank 0 and 2x3 float32 frozen on rank 2",
    ),
    "another number of groups": (
        {"optimizer": split(2)},
        {"optimizer": sgd()},
        r"rank 0 has parameter 0\.weight where rank 2 has dampening of optimizer group 1",
    ),
}


def refusal(comm: Comm | None, different: bool, name: str) -> str:
    """The error on one rank."""
    setup = {"model": net, "optimizer": momentum, "strategy": AllReduce(), **MUTATIONS[name][0 if different else 1]}
    model, make, strategy = setup.pop("model")(), setup.pop("optimizer"), setup.pop("strategy")
    try:
        thinwire.attach(model, make(model), strategy, comm=comm, **setup)
    except MismatchError as error:
        return str(error)
    return "nothing"


@for_each(MUTATIONS)
def test_the_error_names_two_ranks_and_the_first_difference_on_every_rank(name: str) -> None:
    errors = run_threads(4, lambda comm: refusal(comm, comm.rank == 2, name), timeout=10)
    assert len(set(errors)) == 1
    assert errors[0].startswith("ranks 0 and 2 were started differently: ")
    assert re.search(MUTATIONS[name][2], errors[0]), errors[0]


def several_mutations(names: list[str]) -> list[str]:
    """One rank's refusals, one after the other; then the same with another version of thinwire on rank 2."""
    import torch.distributed as dist

    different = dist.get_rank() == 2
    errors = [refusal(None, different, name) for name in names]
    if different:
        thinwire.worker.handshake.__version__ = "0.0.0"
    try:
        thinwire.attach(model := net(), momentum(model), AllReduce())
    except MismatchError as error:
        errors.append(str(error))
    thinwire.worker.handshake.__version__ = thinwire.__version__
    thinwire.attach(model := net(), momentum(model), AllReduce())
    return errors


def test_processes_are_refused_too_and_may_try_again() -> None:
    names = ["one more layer", "another dtype", "another seed", "tied weights"]
    found = run_processes(3, several_mutations, names)
    assert found[0] == found[1] == found[2]
    for name, text in zip(names, found[0], strict=False):
        assert text.startswith("ranks 0 and 2 were started differently: ")
        assert re.search(MUTATIONS[name][2], text), text
    assert f"the thinwire version is {thinwire.__version__} on rank 0 and 0.0.0 on rank 2" in found[0][-1]


def test_ranks_that_agree_send_one_hash() -> None:
    def work(comm: Comm) -> float:
        agree(comm, [("the seed", "1"), ("parameter a", "2x3 float32")], torch.device("cpu"))
        return comm.meter.payload_bytes

    assert run_threads(3, work) == [2 * 32.0] * 3


@pytest.mark.parametrize("texts", [[b"", b"", b""], [b"one", b"", b"three\x00"], [b"", b"x" * 1000, b"y"]])
def test_texts_of_any_length_reach_every_rank(texts: list[bytes]) -> None:
    def work(comm: Comm) -> list[bytes]:
        return gather_texts(comm, texts[comm.rank], torch.device("cpu"))

    assert run_threads(3, work) == [texts] * 3


@pytest.mark.parametrize("n", [1, 2, 3, 10, 37])
def test_a_fingerprint_sees_any_two_values_that_have_changed_places_and_changes_that_cancel(n: int) -> None:
    def number(bits: list[int]) -> int:
        x = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
        return fingerprint([x])

    bits = [1000 + 7 * i for i in range(n)]
    for i in range(n):
        for j in range(i):
            swapped, cancelling = list(bits), list(bits)
            swapped[i], swapped[j] = bits[j], bits[i]
            cancelling[i] += 1
            cancelling[j] -= 1
            assert number(bits) not in (number(swapped), number(cancelling))
    assert number(bits) == number(list(bits))
