# SPDX-License-Identifier: Apache-2.0
"""Signs of gradients are refused under optimizers that divide by the gradient's size, whatever these are called."""

import pytest
import torch
from torch import nn

import thinwire
from tests.rules import for_each
from thinwire import AllReduce, ConfigError, ErrorFeedback, LocalSGD, MajorityVote, OneBit, Quantize, SlowMo, TernGrad
from thinwire.core.comm.base import Comm
from thinwire.methods.codecs.base import Codec
from thinwire.methods.optimizers.adaptive import divides_by_size


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(2))]


class Mine(torch.optim.Optimizer):
    """One of another package, under a name that says nothing."""

    def __init__(self, params: list[nn.Parameter], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                total = self.state[p].setdefault("total", torch.zeros_like(p))
                total.add_(p.grad.square())
                p.data.addcdiv_(p.grad, total.sqrt() + 1e-10, value=-group["lr"])


DIVIDE = [
    *(getattr(torch.optim, name) for name in ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "RMSprop")),
    *(torch.optim.Adadelta, torch.optim.Rprop, thinwire.Lamb, thinwire.OneBitAdam, thinwire.ZeroOneAdam, Mine),
]
KEEP = [torch.optim.SGD, torch.optim.ASGD, thinwire.AcSA, torch.optim.LBFGS]


@for_each(DIVIDE, lambda kind: kind.__name__)
def test_an_optimizer_that_divides_each_element_by_its_size_is_recognised(kind: type[torch.optim.Optimizer]) -> None:
    assert divides_by_size(kind(weights()))  # type: ignore[call-arg]


@for_each(KEEP, lambda kind: kind.__name__)
def test_one_that_keeps_sizes_is_not(kind: type[torch.optim.Optimizer]) -> None:
    taken = weights()[:1] if kind is torch.optim.LBFGS else weights()
    assert not divides_by_size(kind(taken, lr=0.1))  # type: ignore[call-arg]


@for_each([{"lr": 0.0}, {"lr": torch.tensor(1e-3)}, {"foreach": True}, {"fused": True}, {"capturable": True}])
def test_how_adam_is_computed_makes_no_difference(more: dict[str, object]) -> None:
    assert divides_by_size(torch.optim.Adam(weights(), **more))  # type: ignore[arg-type]


def test_adam_that_divides_by_a_constant_keeps_sizes() -> None:
    assert not divides_by_size(torch.optim.Adam(weights(), eps=1e4))
    assert not divides_by_size(torch.optim.SGD(weights(), lr=0.1, momentum=0.9, nesterov=True))


def test_the_optimizer_and_torch_s_generator_are_as_before() -> None:
    optimizer, before = torch.optim.AdamW(weights()), torch.get_rng_state()
    divides_by_size(optimizer)
    assert not optimizer.state
    assert torch.equal(before, torch.get_rng_state())


SIGNS = [ErrorFeedback(OneBit()), MajorityVote(), Quantize(bits=1)]


@for_each(SIGNS)
def test_signs_of_gradients_under_adam_are_refused_on_all_ranks_with_what_to_use(codec: Codec) -> None:
    def told(comm: Comm) -> str:
        model = nn.Linear(3, 2)
        with pytest.raises(ConfigError) as refused:
            thinwire.attach(model, torch.optim.AdamW(model.parameters()), SlowMo(AllReduce(codec)), comm=comm)
        return str(refused.value)

    for message in thinwire.run_threads(2, told):
        assert message.startswith("AdamW under AllReduce(codec=")
        assert "OneBitAdam or OneBitLamb under CompressedMomentum()" in message
        assert "Quantize(4), or SGD" in message


@for_each([None, ErrorFeedback(thinwire.TopK(0.1)), Quantize(2), TernGrad()])
def test_codes_that_keep_sizes_are_accepted_under_adam(codec: Codec | None) -> None:
    AllReduce(codec).check(2, torch.optim.AdamW(weights()))


@for_each(SIGNS)
def test_signs_are_accepted_under_sgd_and_of_displacements(codec: Codec) -> None:
    AllReduce(codec).check(2, torch.optim.SGD(weights(), lr=0.1, momentum=0.9))
    if codec.traits.keeps_size:
        LocalSGD(codec=codec).check(2)
        LocalSGD(codec=codec).check(2, torch.optim.AdamW(weights()))
