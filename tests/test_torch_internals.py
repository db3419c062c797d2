# SPDX-License-Identifier: Apache-2.0
"""What thinwire relies on of the private names of torch."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from thinwire import ConfigError
from thinwire.core import torch_internals as internals
from thinwire.core.comm.view_group import _COLLECTIVES


@pytest.fixture
def world(tmp_path: Path) -> Iterator[None]:
    """A process group of one."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_missing_name_is_refused_when_it_is_called() -> None:
    call = internals.named(SimpleNamespace(), "_gone", "this test")
    with pytest.raises(ConfigError, match=r"has no _gone: this test needs it\. Use torch"):
        call(1, key=2)
    with pytest.raises(ConfigError, match="has no _gone"):
        internals.named(None, "_gone", "this test")()


# -- lists of tensors --------------------------------------------------------------------------------------------------


def test_operations_on_lists_are_those_on_each() -> None:
    xs, ys = [torch.tensor([1.0, 4.0]), torch.tensor([9.0])], [torch.tensor([2.0, 2.0]), torch.tensor([3.0])]
    for name in ("add", "sub", "mul", "div"):
        found = getattr(internals.foreach, name)(xs, ys)
        assert all(torch.equal(z, getattr(torch, name)(x, y)) for x, y, z in zip(xs, ys, found, strict=True))
    assert [x.tolist() for x in internals.foreach.sqrt(xs)] == [[1.0, 2.0], [3.0]]
    assert [float(x) for x in internals.foreach.max(xs)] == [4.0, 9.0]
    assert [x.tolist() for x in internals.foreach.addcmul(xs, ys, ys, -1)] == [[-3.0, 0.0], [0.0]]
    targets = [x.clone() for x in xs]
    internals.foreach.lerp_(targets, ys, 0.5)
    assert [x.tolist() for x in targets] == [[1.5, 3.0], [6.0]]
    internals.foreach.copy_(targets, xs)
    internals.foreach.addcdiv_(targets, xs, ys, value=2.0)
    assert [x.tolist() for x in targets] == [[2.0, 8.0], [15.0]]
    internals.foreach.maximum_(targets, [x * 3 for x in xs])
    assert [x.tolist() for x in targets] == [[3.0, 12.0], [27.0]]
    internals.foreach.zero_(targets)
    assert not any(x.any() for x in targets)


class Seen(TorchFunctionMode):
    """Which functions of torch are called, as a tensor subclass sees them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(func)
        return func(*args, **(kwargs or {}))


def test_tensors_of_any_shapes_become_one_vector() -> None:
    tensors = [torch.arange(6.0).view(2, 3).t(), torch.tensor(7.0), torch.empty(0), torch.tensor([8.0])]
    assert internals.flatten(tensors).tolist() == [0.0, 3.0, 1.0, 4.0, 2.0, 5.0, 7.0, 8.0]


def test_clipping_calls_the_norm_of_lists() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.tensor([3.0, 4.0])
    with Seen() as seen:
        assert float(nn.utils.clip_grad_norm_([weight], 1.0, foreach=True)) == 5.0
    assert internals.foreach_norm in seen.calls


def test_a_scaler_calls_the_unscale_kernel_with_gradients_and_the_flag() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.tensor([torch.inf, 8.0])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    with Seen() as seen:
        scaler.unscale_(torch.optim.SGD([weight], lr=0.1))
    assert internals.unscale_kernel in seen.calls
    gradients, found_inf = [torch.tensor([torch.inf])], torch.zeros(())
    internals.unscale_kernel(gradients, found_inf, torch.ones(()))
    assert float(found_inf) == 1.0


# -- processes ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("world")
def test_the_default_store_is_the_groups() -> None:
    internals.default_store().set("key", "value")
    assert internals.default_store().get("key") == b"value"


@pytest.mark.usefixtures("world")
def test_calls_of_groups_are_counted() -> None:
    (group,) = internals.process_groups()
    assert group is dist.group.WORLD
    before = internals.sequence_number(group)
    dist.all_reduce(torch.zeros(1))
    assert internals.sequence_number(group) == before + 1
    assert internals.sequence_number(object()) == 0


@pytest.mark.usefixtures("world")
def test_a_collective_call_is_none_of_messages() -> None:
    handle = dist.all_reduce(torch.zeros(1), async_op=True)
    assert handle is not None
    handle.wait()
    assert internals.operation_of(handle) in _COLLECTIVES


@pytest.mark.usefixtures("world")
def test_a_wrapper_is_found_in_its_forward_pass_only() -> None:
    found: list[object] = []
    inner = nn.Linear(1, 1)
    inner.register_forward_pre_hook(lambda *_: found.append(getattr(type(wrapper), internals.ACTIVE_DDP)))
    wrapper = DistributedDataParallel(inner)
    wrapper(torch.ones(1, 1))
    assert found == [wrapper] and getattr(type(wrapper), internals.ACTIVE_DDP) is None


# -- backward passes ---------------------------------------------------------------------------------------------------


def test_a_queued_callback_is_called_when_all_gradients_are_there() -> None:
    order: list[str] = []
    x, y = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    first = x * 2
    first.register_hook(lambda _: internals.queue_callback(lambda: order.append("end")))
    for each in (x, y):
        each.register_post_accumulate_grad_hook(lambda _: order.append("gradient"))
    (first + y).backward()
    assert order == ["gradient", "gradient", "end"]


def test_a_failed_pass_drops_its_callback() -> None:
    class Callback:
        called = False

        def __call__(self) -> None:
            Callback.called = True

    references: list[weakref.ref[Callback]] = []

    def fail(_: Tensor) -> None:
        callback = Callback()
        references.append(weakref.ref(callback))
        internals.queue_callback(callback)
        raise ValueError("fails")

    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(fail)
    with pytest.raises(ValueError, match="fails"):
        y.backward()
    assert references[0]() is None and not Callback.called


def test_the_node_of_the_outer_pass_is_seen_at_the_end_of_an_inner_one() -> None:
    seen: list[Any] = []
    current = internals.current_autograd_node

    class Enclosing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            with torch.enable_grad():
                inner = torch.ones(1, requires_grad=True) * 1
                inner.register_hook(lambda _: internals.queue_callback(lambda: seen.append(current())))
                inner.backward()
            return gradients[0]

    x = torch.ones(1, requires_grad=True)
    with torch.enable_grad():
        y: Any = Enclosing.apply(x)
    y.backward()
    assert seen == [y.grad_fn]
    assert current() is None


def test_subclasses_are_computed_with_as_plain_tensors() -> None:
    class Marked(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            with internals.plain_tensors():
                found = func(*args, **(kwargs or {}))
            return found, "marked"

    found, word = torch.add(torch.ones(1).as_subclass(Marked), 1)  # type: ignore[misc]
    assert word == "marked" and type(found) is Tensor


# -- optimizers and scalers --------------------------------------------------------------------------------------------


def test_a_scaler_goes_by_the_wrapped_function() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)

    def overflows(unscale: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: {device: torch.ones_like(found) for device, found in unscale(*given).items()}

    def step() -> float:
        weight.grad = None
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        return float(weight.detach())

    restore = internals.wrap_unscale(scaler, overflows)
    assert step() == 1.0  # left out
    restore()
    assert step() == 0.0


def test_a_scaler_calls_the_wrapped_function_to_take_or_skip_a_step() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    overflows: list[float] = []

    def watched(step: Callable[..., Any]) -> Callable[..., Any]:
        def run(optimizer: Any, state: dict[str, Any], *rest: Any, **named: Any) -> Any:
            overflows.append(float(sum(state["found_inf_per_device"].values())))
            return step(optimizer, state, *rest, **named)

        return run

    restore = internals.wrap_scaler_step(scaler, watched)
    for factor in (1.0, float("inf")):
        weight.grad = None
        scaler.scale(weight.sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    restore()
    assert overflows == [0.0, 1.0] and float(weight.detach()) == 0.0


def test_a_scaler_leaves_gradients_scaled_for_a_fused_optimizer_unless_it_is_told() -> None:
    def gradient(*, leave: bool) -> float:
        weight = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.Adam([weight], fused=True)
        assert internals.unscales_itself(optimizer)
        if not leave:
            internals.set_unscales_itself(optimizer, False)
        found: list[float] = []
        optimizer.register_step_pre_hook(lambda *_: found.append(float(weight.grad)))  # type: ignore[arg-type]
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        return found[0]

    assert gradient(leave=True) == 4.0 and gradient(leave=False) == 1.0
    assert not internals.unscales_itself(torch.optim.SGD([nn.Parameter(torch.ones(1))]))


def test_schedulers_within_schedulers_are_found() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    steps = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1])
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    chained = torch.optim.lr_scheduler.ChainedScheduler([steps, decay], optimizer)
    assert internals.inner_schedulers(chained) == (steps, decay)
    assert internals.inner_schedulers(steps) == ()


def test_a_scheduler_marks_the_step_that_it_wraps() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    assert not internals.is_scheduled(optimizer.step)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    assert internals.is_scheduled(optimizer.step)


def test_what_a_launcher_imports_for_optimizers_exists() -> None:
    for name in internals.OPTIMIZER_IMPORTS:
        assert __import__(name)


# -- modules -----------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_seen_from_within() -> None:
    seen: list[bool] = []

    def double(x: Tensor) -> Tensor:
        seen.append(internals.is_checkpointing())
        return 2 * x

    with torch.autograd.graph.save_on_cpu():
        seen.append(internals.is_checkpointing())
    checkpoint(double, torch.ones(1, requires_grad=True), use_reentrant=False)
    assert seen == [False, True] and not internals.is_checkpointing()


def test_hooks_are_in_their_tables() -> None:
    module = nn.Linear(1, 1)
    assert not internals.has_forward_hooks(module)

    def hook(*_: object) -> None: ...

    handle = module.register_forward_pre_hook(hook)
    assert list(internals.forward_pre_hooks(module)) == [hook] and internals.has_forward_hooks(module)
    handle.remove()
    module.register_forward_hook(hook)
    assert internals.has_forward_hooks(module)
    assert internals.hooks_of(module) == [[], [hook], [], []]
    module.register_full_backward_hook(hook)
    module.register_full_backward_pre_hook(hook)
    assert internals.hooks_of(module) == [[], [hook], [hook], [hook]]
    assert not internals.has_gradient_hooks(module.weight)
    module.weight.register_hook(hook)
    module.bias.register_post_accumulate_grad_hook(hook)
    assert internals.has_gradient_hooks(module.weight) and internals.has_gradient_hooks(module.bias)
    module.register_state_dict_pre_hook(hook)
    module.register_load_state_dict_pre_hook(hook)
    module.register_forward_pre_hook(hook)
    for table in internals.HOOK_TABLES:
        hooks = vars(module)[table]
        assert isinstance(hooks, OrderedDict) and len(hooks) == 1


def test_the_tensors_of_a_module_can_be_replaced_in_its_dictionaries() -> None:
    module = nn.BatchNorm1d(1)
    parameters, buffers = internals.tensor_dicts(module)
    parameters["weight"] = nn.Parameter(torch.full((1,), 3.0))
    buffers["running_mean"] = torch.full((1,), 5.0)
    assert float(module.weight.detach()) == 3.0 and module.running_mean is buffers["running_mean"]
    assert internals.tensor_dicts(nn.Linear(1, 1, bias=False))[0]["bias"] is None


def test_a_compiled_module_holds_the_original() -> None:
    module = nn.Linear(1, 1)
    assert internals.compiled_module(torch.compile(module, backend="eager")) is module  # type: ignore[arg-type]
    assert internals.compiled_module(module) is None


def test_the_classes_of_layers() -> None:
    dropouts = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
    assert all(issubclass(kind, internals.DROPOUTS) and hasattr(kind(), "p") for kind in dropouts)
    norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    assert all(issubclass(kind, internals.BATCH_NORMS) for kind in norms)
    assert not issubclass(nn.LayerNorm, internals.BATCH_NORMS)
    with pytest.raises(ValueError, match="4D"):
        internals.check_batch_norm_input(nn.BatchNorm2d(1), torch.ones(1, 1))
    internals.check_batch_norm_input(nn.Identity(), torch.ones(1))


def test_the_second_list_of_a_recurrent_layer_is_refreshed() -> None:
    module, x = nn.RNN(1, 1, bias=False), torch.ones(1, 1)
    assert set(internals.RNN_CACHES) <= set(vars(module))
    parameters, _ = internals.tensor_dicts(module)
    # Past the layer's own `__setattr__`, which would keep the list true.
    for name in parameters:
        parameters[name] = nn.Parameter(torch.zeros(1, 1))

    def listed() -> list[bool]:
        kept = vars(module)[internals.RNN_CACHES[0]]
        return [mine is new for mine, new in zip(kept, parameters.values(), strict=True)]

    assert not any(listed())
    internals.refresh_rnn_weights(module)
    assert all(listed())
    assert float(module(x)[0].detach()) == 0.0


# -- functions ---------------------------------------------------------------------------------------------------------


def test_the_softmax_of_attention_gives_zeros_for_a_row_without_scores() -> None:
    scores = torch.tensor([[0.0, 1.0], [-torch.inf, -torch.inf]])
    found = internals.safe_softmax(scores, -1)
    assert torch.equal(found[0], torch.softmax(scores[0], -1)) and not found[1].any()


def test_a_function_without_dispatch_runs_its_own_code_under_a_mode() -> None:
    attention = nn.MultiheadAttention(4, 2)
    x, rest = torch.randn(3, 1, 4), (attention.out_proj.weight, attention.out_proj.bias)
    given = (x, x, x, 4, 2, attention.in_proj_weight, attention.in_proj_bias, None, None, False, 0.0, *rest)
    with Seen() as seen:
        found, _ = internals.without_dispatch(F.multi_head_attention_forward)(*given)
    assert F.linear in seen.calls and F.multi_head_attention_forward not in seen.calls
    assert torch.equal(found, F.multi_head_attention_forward(*given)[0])
    with pytest.raises(ConfigError, match="has_torch_function"):
        internals.without_dispatch(lambda: None)()


def test_weight_normalisation_calls_the_function_that_is_replaced() -> None:
    with Seen() as seen:
        layer = torch.nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
        layer(torch.ones(1, 2))
    assert internals.weight_norm in seen.calls


def test_distributions_draw_with_the_samplers() -> None:
    with Seen() as seen:
        torch.distributions.Gamma(torch.ones(2), torch.ones(2)).sample()
        torch.distributions.Dirichlet(torch.ones(2)).sample()
    assert set(internals.SAMPLERS) <= set(seen.calls)
    assert len(internals.SAMPLERS) == 2


# -- torch.vmap --------------------------------------------------------------------------------------------------------


def test_a_batched_tensor_is_unwrapped_and_wrapped_again() -> None:
    x = torch.arange(6.0).view(3, 2)

    def body(row: Tensor) -> Tensor:
        level = internals.vmap_level()
        assert level is not None and internals.level_of(row) == level and internals.batch_axis_of(row) == 0
        assert torch.equal(internals.unbatched(row), x) and row.shape == (2,)
        return internals.add_batch_axis(internals.unbatched(row).t(), 1, level) + 1

    assert torch.equal(torch.vmap(body)(x), x + 1)
    assert not internals.vmap_level()


def test_a_transform_is_entered_suspended_and_left() -> None:
    internals.load_vmap_rules()
    level = internals.enter_vmap(3, "different")
    try:
        row = internals.add_batch_axis(torch.ones(3, 2), 0, level)
        layer = internals.suspend_vmap()
        assert not internals.vmap_level()
        internals.resume_vmap(layer)
        assert internals.vmap_level() == level
        found = internals.remove_batch_axis(F.relu(row * 2), level, 3, 0)
    finally:
        internals.leave_vmap()
    assert torch.equal(found, torch.full((3, 2), 2.0)) and not internals.vmap_level()


def test_trees_and_dispatch_modes() -> None:
    leaves, shape = internals.pytree.tree_flatten({"a": [1, (2,)]}, is_leaf=lambda x: isinstance(x, tuple))
    assert leaves == [1, (2,)] and internals.pytree.tree_unflatten(leaves, shape) == {"a": [1, (2,)]}

    class Count(internals.TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Count.calls += 1
            return func(*args, **(kwargs or {}))

    with Count():
        torch.ones(1).add_(1)
    assert Count.calls >= 2
