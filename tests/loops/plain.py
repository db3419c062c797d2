# SPDX-License-Identifier: Apache-2.0
"""Ordinary training loops: optimizers, accumulation, clipping, schedules, closures, unused and frozen parameters."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.loops.kits import Kit, fill
from tests.loops.table import ALL, GRADIENTS, loop

STEPS = 7
Make = Callable[[nn.Module], Optimizer]


def net(kit: Kit, *, width: int = 4, out: int = 2) -> nn.Sequential:
    """Two layers; each rank draws its own start, and rank 0's is used."""
    return fill(nn.Sequential(nn.Linear(width, 5), nn.Tanh(), nn.Linear(5, out)), seed=kit.rank)  # type: ignore[return-value]


def sgd(model: nn.Module, **options: Any) -> SGD:
    return SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def plain_sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.1)


def adamw(model: nn.Module) -> AdamW:
    return AdamW(model.parameters(), lr=0.02)


def of_trainable(model: nn.Module) -> SGD:
    return SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def error(found: Tensor, y: Tensor) -> Tensor:
    return (found - y).square().mean()


def loss_of(model: nn.Module, kit: Kit, step: int) -> Tensor:
    x, y = kit.batch(step)
    return error(model(x), y)


def end(*models: nn.Module) -> list[Tensor]:
    """What two runs of a loop are compared by: every parameter."""
    return [p.detach().clone() for model in models for p in model.parameters()]


def begin(kit: Kit, model: nn.Module | None = None, make: Make = sgd, **options: Any) -> tuple[Any, Any]:
    """A model, `net` unless one is given, and its optimizer, attached."""
    model = net(kit) if model is None else model
    optimizer = make(model)
    kit.attach(model, optimizer, **options)
    return model, optimizer


def steps(
    kit: Kit,
    model: nn.Module,
    optimizer: Optimizer,
    count: int = STEPS,
    first: int = 0,
    *,
    loss: Callable[[int], Tensor] | None = None,
    before_step: Callable[[], object] = lambda: None,
    after_step: Callable[[int], object] = lambda step: None,
) -> None:
    """The loop of a tutorial, with another loss, and with what other loops do before and after the optimizer's step."""
    for step in range(first, first + count):
        optimizer.zero_grad()
        kit.backward(loss_of(model, kit, step) if loss is None else loss(step))
        before_step()
        optimizer.step()
        after_step(step)


def trained(kit: Kit, model: nn.Module | None = None, make: Make = sgd, **more: Any) -> list[Tensor]:
    """The parameters after the loop of a tutorial."""
    model, optimizer = begin(kit, model, make)
    steps(kit, model, optimizer, **more)
    return end(model)


@loop()
def as_in_every_tutorial(kit: Kit) -> list[Tensor]:
    return trained(kit)


@loop()
def zero_grad_at_the_end_and_to_zero(kit: Kit) -> list[Tensor]:
    model, optimizer = begin(kit)
    for step in range(STEPS):
        kit.backward(loss_of(model, kit, step))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return end(model)


@loop()
def model_zero_grad(kit: Kit) -> list[Tensor]:
    model, optimizer = begin(kit)
    for step in range(STEPS):
        model.zero_grad()
        kit.backward(loss_of(model, kit, step))
        optimizer.step()
    return end(model)


@loop()
def gradients_set_to_none_by_hand(kit: Kit) -> list[Tensor]:
    model, optimizer = begin(kit)
    for step in range(STEPS):
        for p in model.parameters():
            p.grad = None
        kit.backward(loss_of(model, kit, step))
        optimizer.step()
    return end(model)


@loop()
def adamw_with_and_without_decay(kit: Kit) -> list[Tensor]:
    def make(model: nn.Module) -> AdamW:
        decayed, others = ([p for p in model.parameters() if (p.ndim > 1) == matrix] for matrix in (True, False))
        return AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=0.02)

    return trained(kit, make=make)


@loop()
def optimizer_without_foreach(kit: Kit) -> list[Tensor]:
    return trained(kit, make=lambda model: Adam(model.parameters(), lr=0.02, foreach=False))


@loop()
def rate_as_a_tensor(kit: Kit) -> list[Tensor]:
    return trained(kit, make=lambda model: AdamW(model.parameters(), lr=torch.tensor(0.02, dtype=torch.float32)))


@loop()
def one_cycle_schedule(kit: Kit) -> list[Tensor]:
    model = net(kit)
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=STEPS + 1)
    kit.attach(model, optimizer)
    steps(kit, model, optimizer, after_step=lambda step: schedule.step())
    return end(model)


@loop()
def a_group_at_rate_zero_for_a_while(kit: Kit) -> list[Tensor]:
    model = net(kit)
    optimizer = SGD([{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters()}], lr=0.1)
    kit.attach(model, optimizer)
    steps(kit, model, optimizer, 3)
    optimizer.param_groups[0]["lr"] = 0.1
    steps(kit, model, optimizer, STEPS - 3, 3)
    return end(model)


@loop()
def clipping_by_norm(kit: Kit) -> list[Tensor]:
    model, optimizer = begin(kit)
    norms: list[Tensor] = []

    def clip() -> None:
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.3).detach().clone())

    steps(kit, model, optimizer, before_step=clip)
    return [*end(model), torch.stack(norms)]


@loop()
def clipping_by_value(kit: Kit) -> list[Tensor]:
    model = net(kit)
    return trained(kit, model, before_step=lambda: nn.utils.clip_grad_value_(model.parameters(), 0.1))


@loop()
def gradient_noise_and_centralization(kit: Kit) -> list[Tensor]:
    model, draw = net(kit), torch.Generator().manual_seed(5)

    def change() -> None:
        for p in model.parameters():
            noise = 0.01 * torch.randn(p.shape, generator=draw, dtype=torch.float32).to(p.dtype)
            p.grad.add_(noise)  # type: ignore[union-attr]
            if p.ndim > 1:
                p.grad = p.grad - p.grad.mean(1, keepdim=True)  # type: ignore[union-attr]

    return trained(kit, model, before_step=change)


@loop()
def accumulation_in_no_sync(kit: Kit) -> list[Tensor]:
    model, optimizer = begin(kit)
    for step in range(STEPS):
        optimizer.zero_grad()
        with kit.no_sync():
            kit.backward(loss_of(model, kit, 2 * step) / 2)
        kit.backward(loss_of(model, kit, 2 * step + 1) / 2)
        optimizer.step()
    return end(model)


@loop()
def accumulation_as_in_a_single_process(kit: Kit) -> list[Tensor]:
    model, optimizer = begin(kit)
    for step in range(2 * STEPS):
        kit.backward(loss_of(model, kit, step) / 2)
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return end(model)


@loop()
def accumulation_with_a_shorter_last_window(kit: Kit) -> list[Tensor]:
    model, optimizer = begin(kit)
    for step in range(11):
        kit.backward(loss_of(model, kit, step) / 3)
        if step % 3 == 2 or step == 10:
            optimizer.step()
            optimizer.zero_grad()
    return end(model)


@loop()
def gradients_that_are_never_set_to_zero(kit: Kit) -> list[Tensor]:
    model, optimizer = begin(kit, make=lambda model: SGD(model.parameters(), lr=0.01))
    for step in range(STEPS):
        kit.backward(loss_of(model, kit, step))
        optimizer.step()
    return end(model)


@loop()
def steps_that_all_ranks_leave_out(kit: Kit) -> list[Tensor]:
    model, optimizer = begin(kit)
    for step in range(STEPS):
        optimizer.zero_grad()
        kit.backward(loss_of(model, kit, step))
        if step % 3 != 1:
            optimizer.step()
    return end(model)


def _closures(kit: Kit, make: Make, count: int) -> list[Tensor]:
    model, optimizer = begin(kit, make=make)
    for step in range(count):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, kit, step)
            kit.backward(loss)
            return kit.mean_loss(loss)

        optimizer.step(closure)
    return end(model)


@loop()
def sgd_with_a_closure(kit: Kit) -> list[Tensor]:
    return _closures(kit, sgd, STEPS)


@loop(dtypes=(torch.float32, torch.float64))
def lbfgs(kit: Kit) -> list[Tensor]:
    return _closures(kit, lambda model: torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3), 4)


@loop(dtypes=(torch.float32,))
def grad_scaler(kit: Kit) -> list[Tensor]:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    model, optimizer = begin(kit, scaler=scaler)
    for step in range(STEPS):
        optimizer.zero_grad()
        kit.backward(scaler.scale(loss_of(model, kit, step)))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    return end(model)


@loop(dtypes=(torch.float32,), tolerance=3e-2)
def autocast(kit: Kit) -> list[Tensor]:
    model = net(kit)

    def loss(step: int) -> Tensor:
        x, y = kit.batch(step)
        with torch.autocast("cpu", torch.bfloat16):
            found = model(x)
        return error(found.float(), y)

    return trained(kit, model, loss=loss)


@loop()
def parameters_of_two_dtypes(kit: Kit) -> list[Tensor]:
    model = net(kit)
    model[0].double()

    class Between(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.tanh().to(model[2].weight.dtype)

    model[1] = Between()

    def loss(step: int) -> Tensor:
        x, y = kit.batch(step)
        return error(model(x.double()), y)

    return trained(kit, model, loss=loss)


@loop()
def frozen_from_the_start(kit: Kit) -> list[Tensor]:
    model = net(kit)
    model[0].requires_grad_(False)
    return trained(kit, model, of_trainable)


@loop()
def frozen_in_the_optimizer_from_the_start(kit: Kit) -> list[Tensor]:
    model = net(kit)
    model[0].requires_grad_(False)
    return trained(kit, model, adamw)


@loop(refused={ALL: "frozen since attach|unfrozen since|other parameters"})
def unfrozen_later(kit: Kit) -> list[Tensor]:
    model = net(kit)
    model[0].requires_grad_(False)
    model, optimizer = begin(kit, model)
    steps(kit, model, optimizer, 3)
    model[0].requires_grad_(True)
    steps(kit, model, optimizer, 3, 3)
    return end(model)


@loop()
def layers_unfrozen_one_after_another_with_detach(kit: Kit) -> list[Tensor]:
    model = net(kit)
    for stage in range(2):
        model[0].requires_grad_(stage > 0)
        trained(kit, model, of_trainable, count=6, first=6 * stage)
        kit.detach()
    return end(model)


@loop()
def tied_weights(kit: Kit) -> list[Tensor]:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 4)
            self.middle = nn.Linear(4, 4)
            self.head = nn.Linear(4, 7, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.middle(self.embed(tokens)).tanh())

    model = fill(Tied(), kit.rank)

    def loss(step: int) -> Tensor:
        tokens = torch.arange(5) * (kit.rank + 2) * (step + 1) % 7
        return nn.functional.cross_entropy(model(tokens), (tokens + 1) % 7)

    found = trained(kit, model, loss=loss)
    assert model.head.weight is model.embed.weight
    return found


@loop()
def one_layer_used_three_times(kit: Kit) -> list[Tensor]:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = self.cell(x).tanh()
            return self.head(x)

    return trained(kit, fill(Recurrent(), kit.rank))


class Branches(nn.Module):
    """A head for each kind of batch."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 5)
        self.heads = nn.ModuleList([nn.Linear(5, 2), nn.Linear(5, 2)])

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.heads[which](self.trunk(x).tanh())


def branching(kit: Kit, which: Callable[[int], int]) -> list[Tensor]:
    model = fill(Branches(), kit.rank)

    def loss(step: int) -> Tensor:
        x, y = kit.batch(step)
        return error(model(x, which(step)), y)

    return trained(kit, model, plain_sgd, loss=loss)


@loop()
def a_head_unused_in_some_steps(kit: Kit) -> list[Tensor]:
    return branching(kit, lambda step: step % 2)


@loop()
def a_head_unused_on_one_rank(kit: Kit) -> list[Tensor]:
    return branching(kit, lambda step: (step + kit.rank) % 2)


@loop()
def experts_chosen_by_the_data(kit: Kit) -> list[Tensor]:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(4, 4)
            self.experts = nn.ModuleList([nn.Linear(4, 2) for _ in range(4)])

        def forward(self, x: Tensor) -> Tensor:
            weights = self.gate(x).softmax(-1)
            best = weights.mean(0).topk(2).indices.tolist()
            return sum(weights[:, i : i + 1] * self.experts[i](x) for i in best)  # type: ignore[return-value]

    return trained(kit, fill(Experts(), kit.rank), plain_sgd)


@loop(dtypes=(torch.float32, torch.float64))
def sparse_embedding(kit: Kit) -> list[Tensor]:
    model = fill(nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2)), kit.rank)

    def loss(step: int) -> Tensor:
        return model(torch.tensor([step % 9, (2 * step + kit.rank) % 9])).square().mean()

    return trained(kit, model, plain_sgd, loss=loss)


@loop()
def batches_of_other_sizes_on_each_rank(kit: Kit) -> list[Tensor]:
    model = net(kit)

    def loss(step: int) -> Tensor:
        x, y = kit.batch(step, rows=3 + 4 * kit.rank)
        return error(model(x), y)

    return trained(kit, model, loss=loss)


@loop()
def an_average_over_time(kit: Kit) -> list[Tensor]:
    model, optimizer = begin(kit)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    steps(kit, model, optimizer, after_step=lambda step: averaged.update_parameters(model))
    return end(model, averaged.module)


@loop()
def an_average_over_time_swapped_in_and_out(kit: Kit) -> list[Tensor]:
    model, optimizer = begin(kit)
    shadow = [p.detach().clone() for p in model.parameters()]
    losses: list[Tensor] = []

    @torch.no_grad()
    def swap(step: int) -> None:
        own = [p.detach().clone() for p in model.parameters()]
        for p, average in zip(model.parameters(), shadow, strict=True):
            average.lerp_(p, 0.2)
            p.copy_(average)
        losses.append(loss_of(model, kit, 99).detach())
        for p, saved in zip(model.parameters(), own, strict=True):
            p.copy_(saved)

    steps(kit, model, optimizer, after_step=swap)
    return [*end(model), *shadow, torch.stack(losses)]


@loop()
def stochastic_depth(kit: Kit) -> list[Tensor]:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor, step: int) -> Tensor:
            for i, layer in enumerate(self.layers):
                if (i + step) % 3:
                    x = x + layer(x).tanh()
            return self.head(x)

    model = fill(Deep(), kit.rank)

    def loss(step: int) -> Tensor:
        x, y = kit.batch(step)
        return error(model(x, step), y)

    return trained(kit, model, lambda model: SGD(model.parameters(), lr=0.05), loss=loss)


@loop()
def batch_norm(kit: Kit) -> list[Tensor]:
    model = fill(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2)), kit.rank)
    return [*trained(kit, model), *(buffer.clone() for buffer in model.buffers())]


@loop()
def a_teacher_in_the_model(kit: Kit) -> list[Tensor]:
    class Distilled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = nn.Linear(4, 2), nn.Linear(4, 2)
            self.teacher.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.student(x) - self.teacher(x)

    model, optimizer = begin(kit, fill(Distilled(), kit.rank), lambda model: sgd(model.student))  # type: ignore[arg-type]

    @torch.no_grad()
    def follow(step: int) -> None:
        model.teacher.weight.lerp_(model.student.weight, 0.1)

    steps(kit, model, optimizer, loss=lambda step: model(kit.batch(step)[0]).square().mean(), after_step=follow)
    return end(model.student)


@loop()
def inference_between_steps(kit: Kit) -> list[Tensor]:
    model, optimizer = begin(kit)
    losses: list[Tensor] = []

    @torch.inference_mode()
    def infer(step: int) -> None:
        losses.append(loss_of(model, kit, 50).clone())

    steps(kit, model, optimizer, after_step=infer)
    return [*end(model), *losses]


@loop()
def several_models_in_one_optimizer(kit: Kit) -> list[Tensor]:
    both = nn.ModuleDict({"encoder": nn.Linear(4, 3), "decoder": nn.Linear(3, 4)})
    fill(both, kit.rank)

    def loss(step: int) -> Tensor:
        x, _ = kit.batch(step)
        return error(both["decoder"](both["encoder"](x).tanh()), x)

    return trained(kit, both, loss=loss)


@loop()
def copied_in_the_loop(kit: Kit) -> list[Tensor]:
    model, optimizer = begin(kit)
    steps(kit, model, optimizer, 4)
    best = copy.deepcopy(model)
    torch.save(model.state_dict(), buffer := io.BytesIO())
    steps(kit, model, optimizer, 3, 4)
    loaded = net(kit)
    buffer.seek(0)
    loaded.load_state_dict(torch.load(buffer, weights_only=True))
    assert all(torch.equal(a, b) for a, b in zip(best.parameters(), loaded.parameters(), strict=True))
    return end(model, best)


@loop(refused={GRADIENTS: "no backward pass has exchanged"})
def accumulation_that_ends_in_no_sync(kit: Kit) -> list[Tensor]:
    model, optimizer = begin(kit)
    for step in range(STEPS):
        optimizer.zero_grad()
        with kit.no_sync():
            kit.backward(loss_of(model, kit, step))
        optimizer.step()
    return end(model)


@loop()
def two_steps_with_one_gradient(kit: Kit) -> list[Tensor]:
    model, optimizer = begin(kit)
    steps(kit, model, optimizer, 4, after_step=lambda step: optimizer.step())
    return end(model)


@loop()
def steps_without_a_gradient(kit: Kit) -> list[Tensor]:
    model, optimizer = begin(kit, make=adamw)
    for step in range(STEPS):
        optimizer.zero_grad()
        if step % 3 != 2:
            kit.backward(loss_of(model, kit, step))
        optimizer.step()
    return end(model)


@loop()
def a_vector_of_losses_with_weights(kit: Kit) -> list[Tensor]:
    model, optimizer = begin(kit)
    for step in range(STEPS):
        x, y = kit.batch(step)
        optimizer.zero_grad()
        losses = (model(x) - y).square().mean(1)
        kit.backward(losses, gradient=torch.linspace(0, 0.5, len(losses)))
        optimizer.step()
    return end(model)


@loop()
def a_backward_pass_for_some_parameters(kit: Kit) -> list[Tensor]:
    model, optimizer = begin(kit, make=plain_sgd)
    for step in range(STEPS):
        optimizer.zero_grad()
        kit.backward(loss_of(model, kit, step), inputs=list(model[step % 2 * 2].parameters()))
        optimizer.step()
    return end(model)


@loop()
def a_schedule_by_the_loss(kit: Kit) -> list[Tensor]:
    model, optimizer = begin(kit)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    losses = [1.0, 0.5, 0.7, 0.4, 0.6, 0.6, 0.3]
    steps(kit, model, optimizer, after_step=lambda step: schedule.step(losses[step]))
    return end(model)


@loop()
def weights_masked_after_every_step(kit: Kit) -> list[Tensor]:
    model = net(kit)
    masks = [(torch.arange(p.numel()).view(p.shape) % 3 > 0).to(p.dtype) for p in model.parameters()]

    @torch.no_grad()
    def mask(step: int) -> None:
        for p, kept in zip(model.parameters(), masks, strict=True):
            p.mul_(kept)

    return trained(kit, model, after_step=mask)


@loop(dtypes=(torch.float32, torch.float64))
def an_lstm_and_attention(kit: Kit) -> list[Tensor]:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(4, 4, batch_first=True)
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            x, _ = self.rnn(x.unsqueeze(0))
            return self.head(self.attention(x, x, x, need_weights=False)[0]).squeeze(0)

    return trained(kit, fill(Reader(), kit.rank))


@loop(dtypes=(torch.float32, torch.float64))
def convolutions_in_channels_last(kit: Kit) -> list[Tensor]:
    model = nn.Sequential(nn.Conv2d(1, 3, 2), nn.ReLU(), nn.Conv2d(3, 2, 1)).to(memory_format=torch.channels_last)
    fill(model, kit.rank)
    return trained(kit, model, loss=lambda step: model(kit.batch(step)[0].view(-1, 1, 2, 2)).square().mean())
