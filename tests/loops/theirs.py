# SPDX-License-Identifier: Apache-2.0
"""Loops as other people write them: several passes, nested passes, hooks, adversaries, weights loaded late."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.engine import Tiles
from tests.loops.kits import Kit, batch, fill
from tests.loops.plain import STEPS, begin, end, error, loss_of, net, sgd, steps, trained
from tests.loops.table import ALL, GRADIENTS, loop

FULL = (torch.float32, torch.float64)
"""Dtypes in which a loop of many roundings can be compared."""


# -- several backward passes, and passes within passes -----------------------------------------------------------------


@loop()
def two_losses_backward_one_after_the_other(kit: Kit) -> list[Tensor]:
    model, optimizer = begin(kit)
    for step in range(STEPS):
        x, y = kit.batch(step)
        optimizer.zero_grad()
        found = model(x)
        kit.backward((found - y).square().mean(), retain_graph=True)
        kit.backward(0.1 * found.abs().mean())
        optimizer.step()
    return end(model)


@loop()
def policy_and_value_for_several_epochs(kit: Kit) -> list[Tensor]:
    policy, value = net(kit), fill(nn.Linear(4, 1), kit.rank)
    both = nn.ModuleList([policy, value])
    optimizer = Adam(both.parameters(), lr=0.02)
    kit.attach(both, optimizer)
    for rollout in range(3):
        x, y = kit.batch(rollout)
        for _ in range(3):
            optimizer.zero_grad()
            kit.backward(-(policy(x).log_softmax(-1) * y).mean())
            kit.backward((value(x) - y[:, :1]).square().mean())
            nn.utils.clip_grad_norm_(both.parameters(), 0.5)
            optimizer.step()
    return end(both)


@loop()
def a_backward_pass_without_a_step(kit: Kit) -> list[Tensor]:
    """Gradient norms for a log, and the learning-rate finder's first pass."""
    model, optimizer = begin(kit)
    for step in range(STEPS):
        optimizer.zero_grad()
        kit.backward(loss_of(model, kit, 100 + step))
        optimizer.zero_grad()
        kit.backward(loss_of(model, kit, step))
        optimizer.step()
    return end(model)


class _Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool, shared: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(1 if shared else 3)])
        self.head, self.reentrant, self.shared = nn.Linear(4, 2), reentrant, shared

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for layer in [self.layers[0]] * 3 if self.shared else self.layers:
            x = checkpoint(lambda x, layer=layer: layer(x).tanh(), x, use_reentrant=self.reentrant)
        return self.head(x)


def _checkpointed(kit: Kit, *, reentrant: bool, shared: bool = False) -> list[Tensor]:
    return trained(kit, fill(_Checkpointed(reentrant=reentrant, shared=shared), kit.rank))


@loop()
def gradient_checkpointing(kit: Kit) -> list[Tensor]:
    return _checkpointed(kit, reentrant=False)


@loop()
def reentrant_gradient_checkpointing(kit: Kit) -> list[Tensor]:
    return _checkpointed(kit, reentrant=True)


@loop()
def one_layer_in_three_checkpoints(kit: Kit) -> list[Tensor]:
    return _checkpointed(kit, reentrant=False, shared=True)


@loop()
def one_layer_in_three_reentrant_checkpoints(kit: Kit) -> list[Tensor]:
    return _checkpointed(kit, reentrant=True, shared=True)


class _Tiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.block = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor, parts: int = 3) -> Tensor:
        return self.head(Tiles.apply(self.first(x), self.block, parts))


@loop()
def a_tiled_mlp(kit: Kit) -> list[Tensor]:
    return trained(kit, fill(_Tiled(), kit.rank))


@loop()
def a_tiled_mlp_whose_tiles_grow_in_number(kit: Kit) -> list[Tensor]:
    model = fill(_Tiled(), kit.rank)

    def loss(step: int) -> Tensor:
        x, y = kit.batch(step)
        return error(model(x, 2 if step < 2 else 3), y)

    return trained(kit, model, loss=loss)


class _ChunkedLoss(torch.autograd.Function):
    """Computes the head's gradient in forward, part by part, as fused losses do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
        total, into_x, into_weight = x.new_zeros(()), [], torch.zeros_like(weight)
        for part, target in zip(x.chunk(3), y.chunk(3), strict=True):
            error = part @ weight.T - target
            total = total + error.square().sum() / y.numel()
            into_x.append(2 * error @ weight / y.numel())
            into_weight += 2 * error.T @ part / y.numel()
        ctx.save_for_backward(torch.cat(into_x), into_weight)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        into_x, into_weight = ctx.saved_tensors
        return grad * into_x, grad * into_weight, None


@loop()
def a_chunked_loss(kit: Kit) -> list[Tensor]:
    model = net(kit)

    def loss(step: int) -> Tensor:
        x, y = kit.batch(step)
        return _ChunkedLoss.apply(model[1](model[0](x)), model[2].weight, y - model[2].bias)

    return trained(kit, model, loss=loss)


class _Reversible(torch.autograd.Function):
    """Forgets its activations, and finds them again from its outputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: nn.ModuleList) -> Tensor:
        ctx.layers = layers
        with torch.no_grad():
            a, b = x.chunk(2, -1)
            for f in layers:
                a, b = b, a + f(b)
        ctx.save_for_backward(torch.cat([a, b], -1))
        return torch.cat([a, b], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (out,) = ctx.saved_tensors
        a, b = out.chunk(2, -1)
        into_a, into_b = grad.chunk(2, -1)
        for f in reversed(ctx.layers):
            known = a.detach().requires_grad_()
            with torch.enable_grad():
                moved = f(known)
            torch.autograd.backward(moved, into_b)
            a, b = b - moved.detach(), a
            into_a, into_b = into_b, into_a + known.grad
        return torch.cat([into_a, into_b], -1), None


@loop(dtypes=FULL)
def a_reversible_network(kit: Kit) -> list[Tensor]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
            one = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
            self.layers = nn.ModuleList([one, nn.Sequential(nn.Linear(2, 2), nn.Tanh()), one])

        def forward(self, x: Tensor) -> Tensor:
            return self.head(_Reversible.apply(self.first(x), self.layers))

    return trained(kit, fill(Net(), kit.rank))


@loop(dtypes=FULL)
def an_equilibrium_network(kit: Kit) -> list[Tensor]:
    """Deep equilibrium: the backward pass solves a fixed point by passes of its own, from a hook."""
    model = fill(nn.ModuleDict({"cell": nn.Linear(4, 4), "inject": nn.Linear(4, 4), "head": nn.Linear(4, 2)}), kit.rank)
    with torch.no_grad():
        model["cell"].weight.mul_(0.3)

    def loss(step: int) -> Tensor:
        x, y = kit.batch(step)
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(8):
                z = (model["cell"](z) + model["inject"](x)).tanh()
        z = (model["cell"](z) + model["inject"](x)).tanh()
        inner = z.detach().requires_grad_()
        again = (model["cell"](inner) + model["inject"](x)).tanh()

        def solve(grad: Tensor) -> Tensor:
            found = grad
            for _ in range(4):
                found = grad + torch.autograd.grad(again, inner, found, retain_graph=True)[0]
            return found

        z.register_hook(solve)
        return error(model["head"](z), y)

    return trained(kit, model, lambda model: SGD(model.parameters(), lr=0.05), loss=loss)


# -- gradients of gradients --------------------------------------------------------------------------------------------


@loop(dtypes=FULL)
def a_gradient_penalty_through_create_graph(kit: Kit) -> list[Tensor]:
    model = net(kit)

    def penalized(step: int) -> Tensor:
        loss = loss_of(model, kit, step)
        into = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        return loss + 0.1 * sum(g.square().sum() for g in into)

    return trained(kit, model, lambda model: SGD(model.parameters(), lr=0.02), loss=penalized)


@loop(dtypes=FULL)
def maml(kit: Kit) -> list[Tensor]:
    model = net(kit)

    def after_an_inner_step(step: int) -> Tensor:
        x, y = kit.batch(step)
        weights = dict(model.named_parameters())
        inner = error(torch.func.functional_call(model, weights, (x,)), y)
        into = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        adapted = {name: p - 0.1 * g for (name, p), g in zip(weights.items(), into, strict=True)}
        return error(torch.func.functional_call(model, adapted, (x + 1,)), y)

    return trained(kit, model, lambda model: Adam(model.parameters(), lr=0.02), loss=after_an_inner_step)


@loop(refused={GRADIENTS: "no backward pass has exchanged"})
def gradients_by_autograd_grad(kit: Kit) -> list[Tensor]:
    model, optimizer = begin(kit)
    for step in range(STEPS):
        into = torch.autograd.grad(loss_of(model, kit, step), list(model.parameters()))
        for p, g in zip(model.parameters(), into, strict=True):
            p.grad = g
        optimizer.step()
    return end(model)


# -- several networks --------------------------------------------------------------------------------------------------


@loop()
def gan(kit: Kit) -> list[Tensor]:
    maker, judge = net(kit, width=3, out=4), net(kit, width=4, out=1)
    of_maker, of_judge = Adam(maker.parameters(), lr=0.02), Adam(judge.parameters(), lr=0.02)
    kit.attach(maker, of_maker)
    kit.attach(judge, of_judge)
    for step in range(STEPS):
        real, _ = kit.batch(step)
        noise, _ = kit.batch(100 + step, width=3)
        of_judge.zero_grad()
        made = maker(noise)
        kit.backward(nn.functional.softplus(-judge(real)).mean() + nn.functional.softplus(judge(made.detach())).mean())
        of_judge.step()
        of_maker.zero_grad()
        kit.backward(nn.functional.softplus(-judge(made)).mean())
        of_maker.step()
    return end(maker, judge)


@loop(dtypes=FULL)
def wgan_with_a_gradient_penalty(kit: Kit) -> list[Tensor]:
    maker, judge = net(kit, width=3, out=4), net(kit, width=4, out=1)
    of_maker, of_judge = Adam(maker.parameters(), lr=0.01), Adam(judge.parameters(), lr=0.01)
    kit.attach(maker, of_maker)
    kit.attach(judge, of_judge)
    for step in range(STEPS):
        real, _ = kit.batch(step)
        noise, _ = kit.batch(100 + step, width=3)
        for _ in range(2):
            of_judge.zero_grad()
            made = maker(noise).detach()
            between = (0.5 * (real + made)).requires_grad_()
            (into,) = torch.autograd.grad(judge(between).sum(), between, create_graph=True)
            kit.backward(judge(made).mean() - judge(real).mean() + (into.norm(dim=1) - 1).square().mean())
            of_judge.step()
        for p in judge.parameters():
            p.requires_grad_(False)
        of_maker.zero_grad()
        kit.backward(-judge(maker(noise)).mean())
        of_maker.step()
        for p in judge.parameters():
            p.requires_grad_(True)
    return end(maker, judge)


@loop()
def wgan_with_clipped_weights(kit: Kit) -> list[Tensor]:
    model = net(kit)

    def clip(step: int) -> None:
        for p in model.parameters():
            p.data.clamp_(-0.4, 0.4)

    return trained(kit, model, after_step=clip)


class _Muon(SGD):
    """Orthogonal-ish updates of matrices."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.div_(p.grad.norm() + 1e-6)
        return super().step(closure)


@loop()
def two_optimizers_of_one_model(kit: Kit) -> list[Tensor]:
    model = net(kit)
    matrices = _Muon([p for p in model.parameters() if p.ndim > 1], lr=0.05)
    others = AdamW([p for p in model.parameters() if p.ndim == 1], lr=0.02)
    kit.attach(model, matrices)
    kit.attach(model, others)
    for step in range(STEPS):
        matrices.zero_grad()
        others.zero_grad()
        kit.backward(loss_of(model, kit, step))
        matrices.step()
        others.step()
    return end(model)


# -- other optimizers --------------------------------------------------------------------------------------------------


def _sam(kit: Kit, restore: Callable[[nn.Module, list[Tensor]], None]) -> list[Tensor]:
    model, optimizer = begin(kit)
    for step in range(STEPS):
        optimizer.zero_grad()
        kit.backward(loss_of(model, kit, step))
        kept = [p.detach().clone() for p in model.parameters()]
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()  # type: ignore[union-attr]
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad, alpha=0.05 / float(norm))  # type: ignore[arg-type]
        optimizer.zero_grad()
        kit.backward(loss_of(model, kit, step))
        restore(model, kept)
        optimizer.step()
    return end(model)


@loop()
def sam(kit: Kit) -> list[Tensor]:
    def restore(model: nn.Module, kept: list[Tensor]) -> None:
        with torch.no_grad():
            for p, x in zip(model.parameters(), kept, strict=True):
                p.copy_(x)

    return _sam(kit, restore)


@loop()
def sam_that_assigns_p_data(kit: Kit) -> list[Tensor]:
    def restore(model: nn.Module, kept: list[Tensor]) -> None:
        for p, x in zip(model.parameters(), kept, strict=True):
            p.data = x

    return _sam(kit, restore)


class _Lookahead(Optimizer):
    """An optimizer around another one, whose step is within its own."""

    def __init__(self, inner: SGD) -> None:
        self.inner, self.count = inner, 0
        super().__init__(inner.param_groups, {})
        self.slow = [p.detach().clone() for group in inner.param_groups for p in group["params"]]

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.inner.step()
        self.count += 1
        if self.count % 3 == 0:
            held = (p for group in self.inner.param_groups for p in group["params"])
            with torch.no_grad():
                for p, slow in zip(held, self.slow, strict=True):
                    slow.lerp_(p, 0.5)
                    p.copy_(slow)


@loop()
def lookahead(kit: Kit) -> list[Tensor]:
    # All start alike, as the slow weights are taken before attach.
    return trained(kit, fill(net(kit), 0), lambda model: _Lookahead(sgd(model)))


class _Assigning(SGD):
    """Gives each parameter a new tensor, as many published optimizers do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p.data - group["lr"] * p.grad


@loop()
def an_optimizer_that_assigns_p_data(kit: Kit) -> list[Tensor]:
    return trained(kit, make=lambda model: _Assigning(model.parameters(), lr=0.1))


class _Sam(Optimizer):
    """The published one: its step calls the closure at the perturbed parameters, then assigns the kept ones."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"rho": 0.05})
        self.inner = SGD(self.param_groups, lr=0.1, momentum=0.9)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        kept = [p.data.clone() for p in held]
        for p in held:
            p.add_(p.grad * (0.05 / norm))
        self.zero_grad()
        torch.enable_grad()(closure)()
        for p, x in zip(held, kept, strict=True):
            p.data = x
        self.inner.step()


@loop()
def sam_with_a_closure(kit: Kit) -> list[Tensor]:
    model, optimizer = begin(kit, make=lambda model: _Sam(model.parameters()))
    for step in range(STEPS):
        optimizer.zero_grad()

        def closure(step: int = step) -> None:
            kit.backward(loss_of(model, kit, step))

        closure()
        optimizer.step(closure)
    return end(model)


# -- steps that others have replaced -----------------------------------------------------------------------------------


def _every_second(optimizer: Optimizer) -> None:
    """Accumulate gradients in the step, as wrappers of trainers do."""
    own, calls = optimizer.step, itertools.count()

    def step() -> None:
        if next(calls) % 2:
            own()

    optimizer.step = step  # type: ignore[method-assign, assignment]


def _own_rule(optimizer: Optimizer) -> None:
    """Put another rule in place of the optimizer's."""

    def signs() -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.data.sub_(0.01 * p.grad.sign())

    optimizer.step = signs  # type: ignore[method-assign, assignment]


def _replaced(kit: Kit, replace: Callable[[Optimizer], object], *, before: bool) -> list[Tensor]:
    model = net(kit)
    optimizer = sgd(model)
    if before:
        replace(optimizer)
    kit.attach(model, optimizer)
    steps(kit, model, optimizer, 1)
    if not before:
        replace(optimizer)
    steps(kit, model, optimizer, STEPS, 1)
    return end(model)


@loop()
def a_step_wrapped_before_attach(kit: Kit) -> list[Tensor]:
    return _replaced(kit, _every_second, before=True)


@loop()
def a_step_wrapped_after_attach(kit: Kit) -> list[Tensor]:
    return _replaced(kit, _every_second, before=False)


@loop(refused={ALL: "signs is in place of optimizer.step"})
def a_step_by_another_rule_before_attach(kit: Kit) -> list[Tensor]:
    return _replaced(kit, _own_rule, before=True)


@loop(refused={ALL: "is in place of optimizer.step"})
def a_step_of_the_class_replaced_after_attach(kit: Kit) -> list[Tensor]:
    class Own(SGD):
        """A class of this loop."""

    @torch.no_grad()
    def step(self: Own) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=0.1)

    model, optimizer = begin(kit, make=lambda model: Own(model.parameters(), lr=0.1))
    steps(kit, model, optimizer, 1)
    Own.step = step  # type: ignore[method-assign, assignment]
    steps(kit, model, optimizer, 2, 1)
    return end(model)


@loop(refused={ALL: "signs is in place of optimizer.step"})
def a_step_by_another_rule_after_attach(kit: Kit) -> list[Tensor]:
    return _replaced(kit, _own_rule, before=False)


@loop()
def a_schedule_made_after_attach(kit: Kit) -> list[Tensor]:
    model, optimizer = begin(kit)
    steps(kit, model, optimizer, 1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(1, STEPS):
        steps(kit, model, optimizer, 1, step)
        schedule.step()
    return end(model)


# -- hooks -------------------------------------------------------------------------------------------------------------


def _tripled(p: Tensor) -> None:
    p.grad.mul_(3)  # type: ignore[union-attr]


def _clamped(p: Tensor) -> None:
    p.grad.clamp_(-0.05, 0.05)  # type: ignore[union-attr]


@loop()
def hooks_before_attach(kit: Kit) -> list[Tensor]:
    model = net(kit)
    for p in model.parameters():
        p.register_hook(lambda grad: 0.5 * grad)
        p.register_post_accumulate_grad_hook(_tripled)
    return trained(kit, model)


@loop()
def hooks_after_attach(kit: Kit) -> list[Tensor]:
    model, optimizer = begin(kit)
    for p in model.parameters():
        p.register_hook(lambda grad: 0.5 * grad)
        p.register_post_accumulate_grad_hook(_tripled)
    steps(kit, model, optimizer)
    return end(model)


@loop()
def each_parameter_clipped_in_a_hook_after_attach(kit: Kit) -> list[Tensor]:
    model, optimizer = begin(kit)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(_clamped)
    steps(kit, model, optimizer)
    return end(model)


@loop()
def gradients_masked_in_a_hook(kit: Kit) -> list[Tensor]:
    model, optimizer = begin(kit)
    masks = {p: (torch.arange(p.numel()).view(p.shape) % 2).to(p.dtype) for p in model.parameters()}
    for p in model.parameters():
        p.register_hook(lambda grad, p=p: grad * masks[p])
    steps(kit, model, optimizer)
    return end(model)


@loop()
def a_backward_hook_of_modules(kit: Kit) -> list[Tensor]:
    model, optimizer = begin(kit)
    model[1].register_full_backward_hook(lambda module, into, out: tuple(0.5 * g for g in into))
    steps(kit, model, optimizer)
    return end(model)


@loop(refused={ALL: "moves parameters that are attached with another optimizer"})
def an_optimizer_for_each_parameter_in_the_backward_pass(kit: Kit) -> list[Tensor]:
    model = net(kit)
    kit.attach(model, sgd(model))
    each = {p: SGD([p], lr=0.1) for p in model.parameters()}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: each[p].step() and None)
    for step in range(2):
        kit.backward(loss_of(model, kit, step))
    return end(model)


# -- weights that change outside of the step ---------------------------------------------------------------------------


def _loaded(kit: Kit, change: Callable[[nn.Module], None]) -> list[Tensor]:
    model, optimizer = begin(kit)
    change(model)
    kit.restart()
    steps(kit, model, optimizer)
    return end(model)


@loop()
def weights_loaded_after_attach(kit: Kit) -> list[Tensor]:
    saved = {name: 2 * x for name, x in fill(net(kit), 7).state_dict().items()}
    return _loaded(kit, lambda model: model.load_state_dict(saved))  # type: ignore[arg-type, return-value]


@loop()
def weights_drawn_in_place_after_attach(kit: Kit) -> list[Tensor]:
    return _loaded(kit, lambda model: fill(model, 8))  # type: ignore[arg-type, return-value]


@loop()
def weights_edited_through_data_after_attach(kit: Kit) -> list[Tensor]:
    def change(model: nn.Module) -> None:
        for p in model.parameters():
            p.data.mul_(2).add_(1)

    return _loaded(kit, change)


@loop(refused={ALL: "attach"})
def weights_loaded_on_rank_0_alone(kit: Kit) -> list[Tensor]:
    saved = fill(net(kit), 7).state_dict()
    return _loaded(kit, lambda model: kit.rank or model.load_state_dict(saved))  # type: ignore[arg-type, return-value]


@loop()
def weights_loaded_before_attach_on_rank_0_alone(kit: Kit) -> list[Tensor]:
    model = net(kit)
    if kit.rank == 0:
        model.load_state_dict(fill(net(kit), 7).state_dict())
    return trained(kit, model)


@loop()
def an_optimizer_state_loaded_after_attach(kit: Kit) -> list[Tensor]:
    other = fill(net(kit), 3)
    theirs = sgd(other)
    for step in range(2):
        loss_of(other, kit, step).backward()
        theirs.step()
    model, optimizer = begin(kit)
    optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
    steps(kit, model, optimizer)
    return end(model)


@loop(refused={ALL: "memory|replaced|attach again"})
def a_model_moved_after_attach(kit: Kit) -> list[Tensor]:
    model, optimizer = begin(kit)
    model.to(torch.float64 if torch.get_default_dtype() != torch.float64 else torch.float32)
    x, y = (each.to(model[0].weight.dtype) for each in kit.batch(0))
    kit.backward((model(x) - y).square().mean())
    optimizer.step()
    return end(model)


def _changed_later(kit: Kit, change: Callable[[nn.Module], object]) -> list[Tensor]:
    model, optimizer = begin(kit)
    steps(kit, model, optimizer, 3)
    change(model)
    steps(kit, model, optimizer, 3, 3)
    return end(model)


@loop(dtypes=FULL)
def channels_last_after_the_first_steps(kit: Kit) -> list[Tensor]:
    model = fill(nn.Sequential(nn.Conv2d(1, 3, 2), nn.ReLU(), nn.Conv2d(3, 2, 1)), kit.rank)

    def change(step: int) -> None:
        if step == 2:
            model.to(memory_format=torch.channels_last)

    return trained(
        kit, model, loss=lambda step: model(kit.batch(step)[0].view(-1, 1, 2, 2)).square().mean(), after_step=change
    )


@loop()
def gradients_assigned_through_data(kit: Kit) -> list[Tensor]:
    model = net(kit)

    def clamp() -> None:
        for p in model.parameters():
            p.grad.data = p.grad.data.clamp(-0.2, 0.2)  # type: ignore[union-attr]

    return trained(kit, model, before_step=clamp)


@loop(refused={ALL: "no longer the model's"}, dtypes=FULL)
def weight_norm_after_attach(kit: Kit) -> list[Tensor]:
    return _changed_later(kit, lambda model: parametrizations.weight_norm(model.get_submodule("0")))


@loop(refused={ALL: "no longer the model's"})
def a_layer_replaced_after_the_first_step(kit: Kit) -> list[Tensor]:
    return _changed_later(kit, lambda model: model.register_module("2", nn.Linear(5, 2)))


@loop()
def a_layer_added_and_removed_again(kit: Kit) -> list[Tensor]:
    def change(model: nn.Module) -> None:
        model.register_module("probe", nn.Identity())
        del model.probe

    return _changed_later(kit, change)


# -- parametrized, pruned, lazy and compiled ---------------------------------------------------------------------------


@loop(dtypes=FULL)
def weight_norm(kit: Kit) -> list[Tensor]:
    model = net(kit)
    parametrizations.weight_norm(model[0])
    return trained(kit, model)


@loop()
def pruned_with_masks(kit: Kit) -> list[Tensor]:
    model = net(kit)
    mask = (torch.arange(20).view(5, 4) % 3 > 0).to(model[0].weight.dtype)
    prune.custom_from_mask(model[0], "weight", mask)
    return trained(kit, model)


@loop()
def lazy_modules_that_have_been_run(kit: Kit) -> list[Tensor]:
    model = nn.Sequential(nn.LazyLinear(5), nn.Tanh(), nn.LazyLinear(2))
    model(kit.batch(0)[0])
    fill(model, kit.rank)
    return trained(kit, model)


@loop(refused={ALL: "[Ll]azy|uninitialized"})
def lazy_modules_that_have_not_been_run(kit: Kit) -> list[Tensor]:
    model = nn.Sequential(nn.LazyLinear(5), nn.Tanh(), nn.LazyLinear(2))
    kit.attach(model, sgd(model))
    return []


def _compiled(kit: Kit, *, before: bool) -> list[Tensor]:
    model = net(kit)
    compiled: Any = torch.compile(model, backend="eager")
    optimizer = sgd(model)
    kit.attach(compiled if before else model, optimizer)
    steps(kit, compiled, optimizer)
    return end(model)


@loop(dtypes=(torch.float32,))
def compiled_and_attached(kit: Kit) -> list[Tensor]:
    return _compiled(kit, before=True)


@loop(dtypes=(torch.float32,))
def attached_and_compiled(kit: Kit) -> list[Tensor]:
    return _compiled(kit, before=False)


@loop()
def a_functional_call(kit: Kit) -> list[Tensor]:
    model = net(kit)

    def loss(step: int) -> Tensor:
        x, y = kit.batch(step)
        return error(torch.func.functional_call(model, dict(model.named_parameters()), (x,)), y)

    return trained(kit, model, loss=loss)


# -- data, notebooks, errors -------------------------------------------------------------------------------------------


def _from_batches(kit: Kit, batches: Iterable[Any]) -> list[Tensor]:
    model, optimizer = begin(kit)
    for x, y in batches:
        optimizer.zero_grad()
        kit.backward(error(model(x), y))
        optimizer.step()
    return end(model)


def _epochs(kit: Kit) -> Iterator[Any]:
    loader: DataLoader[Any] = DataLoader(TensorDataset(*batch(kit.rank, 0, rows=24)), batch_size=6)
    while True:
        yield from loader


@loop()
def an_endless_iterator_over_epochs(kit: Kit) -> list[Tensor]:
    return _from_batches(kit, itertools.islice(_epochs(kit), STEPS))


@loop(refused={ALL: "attached already"})
def a_notebook_cell_run_twice(kit: Kit) -> list[Tensor]:
    model = net(kit)
    optimizer = sgd(model)
    for _ in range(2):
        kit.attach(model, optimizer)
        steps(kit, model, optimizer, 2)
    return end(model)


@loop()
def a_notebook_cell_run_twice_from_the_model_on(kit: Kit) -> list[Tensor]:
    trained(kit, count=4)
    return trained(kit, count=4)


@loop()
def attached_for_each_fold(kit: Kit) -> list[Tensor]:
    found: list[Tensor] = []
    for fold in range(3):
        found += trained(kit, count=6, first=6 * fold)
        kit.detach()
    return found


@loop()
def a_batch_that_fails_before_the_backward_pass_on_all_ranks(kit: Kit) -> list[Tensor]:
    model, optimizer = begin(kit)
    for step in range(STEPS):
        optimizer.zero_grad()
        try:
            loss = loss_of(model, kit, step)
            if step == 2:
                raise torch.cuda.OutOfMemoryError("out of memory")
            kit.backward(loss)
        except torch.cuda.OutOfMemoryError:
            continue
        optimizer.step()
    return end(model)


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise torch.cuda.OutOfMemoryError("out of memory")


@loop(refused={GRADIENTS: "an exception had stopped"})
def a_batch_that_fails_in_the_backward_pass_on_one_rank(kit: Kit) -> list[Tensor]:
    """Where each rank has its own gradient, a rank that leaves out a step has no partner in the next average."""
    model, optimizer = begin(kit)
    for step in range(4):
        optimizer.zero_grad()
        x, y = kit.batch(step)
        hidden = model[1](model[0](x))
        try:
            found = model[2](_Fails.apply(hidden) if step == 1 and kit.rank else hidden)
            kit.backward((found - y).square().mean())
        except torch.cuda.OutOfMemoryError:
            optimizer.zero_grad()
        optimizer.step()
    return end(model)


@loop(refused={ALL: "not finite|NaN|inf"})
def a_loss_that_is_nan_on_one_rank(kit: Kit) -> list[Tensor]:
    model = net(kit)

    def loss(step: int) -> Tensor:
        return loss_of(model, kit, step) * (float("nan") if step == 2 and kit.rank else 1.0)

    return trained(kit, model, loss=loss)


class _Squares(Dataset[Any]):
    """A data set that is read by other processes."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x = torch.arange(4, dtype=torch.float32).add(i).div(10)
        return x, x[:2].square()


@loop(dtypes=(torch.float32,), slow=True)
def a_loader_that_spawns(kit: Kit) -> list[Tensor]:
    loader = DataLoader(_Squares(), batch_size=4, num_workers=1, multiprocessing_context="spawn")
    return _from_batches(kit, ((x + kit.rank, y) for x, y in loader))
