# SPDX-License-Identifier: Apache-2.0
"""Combinations of strategy, optimizer, model and mesh that cannot work, refused before the first step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer, SparseAdam

from thinwire.core.replica.moments import parts_of
from thinwire.core.replica.shards import is_sharded
from thinwire.errors import ConfigError
from thinwire.methods.strategies.base import Strategy, Traits, check_blocks, check_workers, codecs_of, nested
from thinwire.methods.strategies.recipe import parse
from thinwire.methods.strategies.user_classes import check_user_classes
from thinwire.methods.strategies.wrapper import Wrapper
from thinwire.tensor2d.mesh import Mesh2D
from thinwire.worker.state import Policy


def check_model(model: object) -> nn.Module:
    """Return what `attach` was given as the model, if it is a module.

    Raises:
        ConfigError: with the value and its replacement.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model is {_described(model)}: must be a torch.nn.Module, such as torch.nn.Linear(4, 2), or an array of "
            "thinwire.fuse"
        )
    empty = [name for name, p in model.named_parameters() if p.is_meta]
    if empty and len(empty) < len(list(model.parameters())):
        raise ConfigError(
            f"{empty[0]} is on the meta device, and other parameters are not: it has no values. Call "
            "to_empty(device=...) of its module and initialize it, before you make the optimizer"
        )
    if torch.is_inference_mode_enabled() or any(not is_lazy(p) and p.is_inference() for p in model.parameters()):
        raise ConfigError(
            "the model was made, or is attached, inside torch.inference_mode(): its parameters cannot be trained. Do "
            "both outside of it"
        )
    return model


def check_arguments(optimizer: object, strategy: object) -> Strategy:
    """Check the types of what `attach` was given; returns the strategy, read from its text where it is one.

    Raises:
        ConfigError: with the value and its replacement.
    """
    if not isinstance(optimizer, Optimizer):
        own = isinstance(getattr(optimizer, "optimizer", None), Optimizer)
        fix = ". Pass its .optimizer" if own else ", such as torch.optim.SGD(model.parameters(), lr=0.1)"
        raise ConfigError(f"optimizer is {_described(optimizer)}: must be a torch.optim.Optimizer{fix}")
    try:
        optimizer.register_step_pre_hook(lambda *_: None).remove()
    except AttributeError:
        raise ConfigError(
            f"{type(optimizer).__name__} does not call Optimizer.__init__, so torch runs no hooks of its steps. Call "
            "super().__init__(params, defaults) in it, or pass the optimizer inside it"
        ) from None
    found = parse(strategy) if isinstance(strategy, str) else strategy
    if not isinstance(found, Strategy):
        fix = f"{found.__name__}()" if isinstance(found, type) and issubclass(found, Strategy) else "SlowMo()"
        raise ConfigError(f"strategy is {_described(found)}: must be a strategy or its text. Write {fix}")
    return found


def _described(value: object) -> str:
    """Describe a value of a wrong type in a few words."""
    return f"the class {value.__name__}" if isinstance(value, type) else f"of type {type(value).__name__}"


def check_compatible(strategy: Strategy, optimizer: Optimizer, size: int, parameters: Iterable[Tensor]) -> None:
    """Refuse a strategy that cannot serve this number of workers, this optimizer or these parameters.

    Raises:
        ConfigError: with the value, the rule and the fix.
    """
    check_user_classes(strategy)
    check_workers(strategy, size, optimizer)
    check_parameter_moves(strategy, optimizer)
    if size > 1 or strategy.traits.reads_gradient:  # a worker alone exchanges nothing
        check_sparse(strategy, optimizer)
    sharded = any(is_sharded(p) for p in parameters)
    if strategy.traits.sends_gradients and sharded:
        raise ConfigError(
            f"{strategy}: gradients of sharded parameters are the sharder's to average. Give fully_shard a mesh of "
            "('replicate', 'shard') for that, or use a strategy that averages parameters, such as SlowMo()"
        )
    if sharded:
        check_blocks(strategy, "for sharded parameters")
        _check_timing(strategy, "for sharded parameters", "shards and copies")
    for method in nested(strategy) if sharded else ():
        if method.traits.reads_loss:
            raise ConfigError(
                f"{type(method).__name__} for sharded parameters: each rank elects by the loss of its own batches, so "
                "the shards of one model might follow different leaders. Use SlowMo(), or a ScoreFunction whose value "
                "is equal on all ranks of a model"
            )
        if method.traits.rounds.guarded:
            raise ConfigError(
                f"{method} for sharded parameters: each rank compares norms of its own shard, so that a worker might "
                "be left out of the mean of one shard only. Use outliers='keep'"
            )


def _check_timing(strategy: Strategy, here: str, parts: str) -> None:
    for method in nested(strategy):
        if method.traits.timing_dependent and not isinstance(method, Wrapper):
            raise ConfigError(
                f"{type(method).__name__} {here}: its results depend on timing, so the {parts} of one model would "
                "belong to different steps. Use PushSum() or SlowMo()"
            )


def check_parameter_moves(strategy: Strategy, optimizer: Optimizer) -> None:
    """Refuse a strategy that changes parameters, under an optimizer that would overwrite the change.

    Optimizers with a method `evaluating`, such as AC-SA, compute the parameters from their own state at every step.

    Raises:
        ConfigError: with the recipe and what to use instead.
    """
    if hasattr(optimizer, "evaluating") and strategy.traits.moves_parameters:
        raise ConfigError(
            f"{type(optimizer).__name__} under {strategy}: the optimizer computes the parameters from its own state, "
            "and would undo what the strategy does to them. Use AllReduce(), and no_sync() in all but the last pass of "
            "a round"
        )


def check_sparse(strategy: Strategy, optimizer: Optimizer) -> None:
    """Refuse an optimizer that takes sparse gradients only, under a strategy that puts dense ones in their place.

    Raises:
        ConfigError: with the recipe and what to use instead.
    """
    exchanged = strategy.traits.sends_gradients or strategy.traits.reads_gradient
    if exchanged and any(isinstance(each, SparseAdam) for each in parts_of(optimizer)):
        raise ConfigError(
            f"SparseAdam under {strategy}: it takes sparse gradients only, and those that workers exchange are dense. "
            "Average parameters, as with LocalSGD(), or use Adam"
        )


def check_closures(strategy: Strategy, optimizer: Optimizer) -> None:
    """Refuse optimizers that evaluate several gradients in a step, where the strategy knows of one.

    Raises:
        ConfigError: with the recipe and what to use instead.
    """
    if evaluates_several_gradients(optimizer) and (strategy.traits.reads_gradient or strategy.traits.skips_steps):
        raise several_evaluations(strategy, optimizer)


def evaluates_several_gradients(optimizer: Optimizer) -> bool:
    """Return True if a step is known to call its closure several times."""
    return isinstance(optimizer, LBFGS) or getattr(optimizer, "evaluates_several_gradients", False)


def has_other_result(optimizer: Optimizer) -> bool:
    """Return True if the optimizer's result differs from the parameters that it trains now."""
    # Schedule-free optimizers keep their mode in their groups, or in themselves where they wrap another optimizer.
    mode = optimizer.param_groups[0].get("train_mode", getattr(optimizer, "train_mode", False))
    return hasattr(optimizer, "evaluating") or bool(mode and hasattr(optimizer, "eval"))


def several_evaluations(strategy: Strategy, optimizer: Optimizer) -> ConfigError:
    """Return the error of an optimizer that evaluates several gradients in a step."""
    return ConfigError(
        f"{type(optimizer).__name__} under {strategy}: the optimizer calls its closure several times in a step, but "
        "the strategy replaces one gradient a step by one that all workers agree on. Use AllReduce(), which averages "
        "every gradient, or LocalSGD(), which averages parameters"
    )


def check_start(strategy: Strategy, *, equal: bool) -> None:
    """Refuse workers that start from different parameters, under a strategy that would never make them equal.

    Raises:
        ConfigError: with the recipe and the fix.
    """
    if strategy.traits.needs_equal_start and not equal:
        raise ConfigError(
            f'init="own" under {strategy}: workers start from different parameters, and would stay apart, because only '
            'changes of the parameters are averaged. Use init="broadcast", or load the same parameters on all ranks'
        )


def check_skipped_steps(strategy: Strategy, *, find_unused: bool, scaled: bool) -> None:
    """Refuse features that exchange a message at every step, under a strategy whose late workers skip steps.

    Raises:
        ConfigError: naming the features.
    """
    features = [name for name, value in (("find_unused=True", find_unused), ("a GradScaler", scaled)) if value]
    if strategy.traits.skips_steps and features:
        raise ConfigError(
            f"{strategy} with {' and '.join(features)}: a late worker leaves out steps, and these need every worker "
            "at every step. Let every parameter have a gradient, and train in bfloat16, which needs no scaler"
        )


def check_mesh(strategy: Strategy, optimizer: Optimizer, mesh: Mesh2D, *, scaled: bool) -> None:
    """Refuse what would let the blocks of one model copy get out of step with each other.

    Raises:
        ConfigError: the result depends on timing, which differs between blocks; or on a norm or a whole gradient, of
            which this rank knows only its own part.
    """
    if mesh.whole.size == 1:
        return
    here = f"on {mesh.rows}x{mesh.columns} blocks"
    if scaled:
        raise ConfigError(f"scaler {here}: ranks would skip different steps. Train in bf16, which needs none")
    _check_timing(strategy, here, "blocks")
    check_blocks(strategy, here)
    if getattr(optimizer, "needs_whole_tensors", False):
        raise ConfigError(
            f"{type(optimizer).__name__} {here}: its trust ratios need norms of whole tensors. Use "
            "Lamb2D(params, model=model, mesh=mesh), or OneBitAdam"
        )


def check_policy(policy: Policy, parameters: Iterable[Tensor], blocks: int, optimizer: Optimizer) -> None:
    """Refuse a policy that is none, and one by which parts of a model or of a step would be left out.

    Raises:
        ConfigError: with the policy and what to use instead.
    """
    if policy not in ("raise", "skip", "ignore"):
        raise ConfigError(f'nonfinite={policy!r}: must be "raise", "skip" or "ignore"')
    sharded = any(is_sharded(p) for p in parameters)
    if policy == "skip" and (sharded or blocks > 1):
        parts = "sharded parameters" if sharded else f"a model in {blocks} blocks"
        raise ConfigError(
            f'nonfinite="skip" with {parts}: each rank sees its own part of a gradient, and parts of one model would '
            'leave out different steps. Use nonfinite="raise" and resume from a checkpoint'
        )
    if policy == "skip" and evaluates_several_gradients(optimizer):
        raise ConfigError(
            f'nonfinite="skip" with {type(optimizer).__name__}: a step has several gradients, and would continue with '
            'zeros in place of one. Use nonfinite="raise"'
        )


# -- workers that meet in a bucket -------------------------------------------------------------------------------------


def check_carried(strategy: Strategy, request_seconds: float) -> None:
    """Refuse a strategy whose messages a bucket cannot carry.

    Args:
        strategy: the strategy.
        request_seconds: how long a message takes at least; 0 over connections, which carry all strategies. Infinity
            leaves the time out of the error.

    Raises:
        ConfigError: with the reason and what to use instead.
    """
    traits = strategy.traits
    if not request_seconds or _is_local(traits):
        return
    use = "Use a strategy with rounds, such as DiLoCo(period=100) or LocalSGD(period=50)"
    # `Budget` and `Paced` depend on timing, too, but all their workers make the same calls together.
    if traits.timing_dependent and traits.inelastic_reason:
        raise ConfigError(
            f"{strategy} over a bucket: its workers send messages that no other rank waits for, and a bucket carries "
            f"calls that all ranks make together. {use}"
        )
    parts = [each.traits for each in nested(strategy)]
    if any(not _is_local(each) and (each.period or 1) <= each.rounds.fragments for each in parts):
        # Ranks that refuse together compare their words, so that a time of one rank must not be in them.
        seconds = f"{request_seconds:.2f} s"
        times = (
            f" Just now these took {seconds}, so that every step would take at least {seconds} longer where it waits "
            "for them."
        )
        raise ConfigError(
            f"{strategy} over a bucket: it sends at every step, and each message takes a write and a read."
            f"{times if math.isfinite(request_seconds) else ''} {use}"
        )


def _is_local(traits: Traits) -> bool:
    """Return True if a strategy sends nothing by itself, as `Local()`."""
    return traits.rounds.local and traits.period is None and not traits.rounds.ends


def check_bucket(others: Sequence[object], *, automatic: bool, scaled: bool, find_unused: bool) -> None:
    """Refuse settings of `attach` that cannot be combined with `rendezvous`.

    Raises:
        ConfigError: with the setting and what to use instead.
    """
    if any(other is not None for other in others):
        raise ConfigError(
            "rendezvous with a comm, a mesh or a Fleet: these connect the workers already. Leave one of the two out"
        )
    if automatic:
        raise ConfigError(
            "strategy='auto' with rendezvous: no links between workers exist that could be measured. Name a strategy "
            "with rounds, such as DiLoCo(period=100)"
        )
    if scaled:
        raise ConfigError(
            "rendezvous with a GradScaler: workers would send a message at every step to agree on skipped ones. Train "
            "in bfloat16, which needs no scaler"
        )
    if find_unused:
        raise ConfigError(
            "rendezvous with find_unused=True: it sends a message at every step. Use find_unused=False, where a "
            "missing gradient is zero"
        )


# -- elastic workers ---------------------------------------------------------------------------------------------------


def check_global_batch(strategy: Strategy, global_batch: int) -> None:
    """Refuse a global batch that is not positive, and strategies whose workers do not take all steps together.

    Raises:
        ConfigError: with the reason.
    """
    if global_batch < 1:
        raise ConfigError(f"global_batch={global_batch}: must be at least 1. Leave it out to choose each worker's own")
    if strategy.traits.skips_steps or strategy.traits.timing_dependent:
        raise ConfigError(
            f"global_batch={global_batch} with {strategy}: its workers do not take each step together, so a step has "
            "no global batch. Use a strategy whose workers stay in step, such as AllReduce() or LocalSGD()"
        )


def check_elastic(
    strategy: Strategy,
    optimizer: Optimizer,
    others: Sequence[object],
    *,
    scaled: bool,
    find_unused: bool,
    grouped: bool,
) -> None:
    """Check, before any message is sent, that the run could continue after the loss of a worker.

    Raises:
        ConfigError: with the reason and what to use instead.
    """
    check_survives(strategy)
    if any(other is not None for other in others):
        raise ConfigError("elastic=True with a comm or a mesh: these have fixed ranks. Leave them out, or pass a Fleet")
    if evaluates_several_gradients(optimizer):
        raise ConfigError(
            f"elastic=True with {type(optimizer).__name__}: its step evaluates several gradients, and could not be "
            "repeated as a whole. Use an optimizer that takes one"
        )
    check_sparse(strategy, optimizer)  # also of one worker, which others may join
    if find_unused:
        raise ConfigError("elastic=True with find_unused=True: use find_unused=False, where a missing gradient is zero")
    if scaled and strategy.traits.reads_gradient:
        raise ConfigError(
            f"elastic=True with a GradScaler and {type(strategy).__name__}: this strategy changes gradients in the "
            "step, so all workers would have to skip the same steps. Train in bfloat16, which needs no scaler, or use "
            "AllReduce() or LocalSGD()"
        )
    if grouped:
        check_elastic_group(strategy, optimizer)


def check_group(parameters: Mapping[str, Tensor], elastic: object, *, grouped: bool) -> None:
    """Check that a worker of an elastic run or of a bucket holds a whole model, alone or as a group of ranks.

    Raises:
        ConfigError: with the reason and what to use instead.
    """
    sharded = next((name for name, p in parameters.items() if is_sharded(p)), None)
    if sharded is not None and not grouped:
        raise ConfigError(
            f"elastic or rendezvous with a sharded parameter: {sharded}. Each worker must hold the whole model. Give "
            'the ranks that hold the shards of one model as group, such as group=mesh["shard"]'
        )
    if grouped and not isinstance(elastic, bool):
        raise ConfigError(
            f"elastic={elastic!r} with a group: the ranks of a group enter a run and end each round together, which "
            "only elastic=True does. Use elastic=True"
        )
    if grouped and sharded is None:
        raise ConfigError(
            "elastic or rendezvous with a group: no parameter is sharded. The group is the ranks that hold the shards "
            "of one model. Leave it out where each process holds the whole model"
        )


def check_elastic_group(strategy: Strategy, optimizer: Optimizer) -> None:
    """Check that the ranks of a group can act as one elastic worker.

    Raises:
        ConfigError: with the reason and what to use instead.
    """
    here = "with elastic=True and a group"
    for each in nested(strategy):
        # Others may decide by themselves when to send, by times or by the values of a shard, which differ in a group.
        if not (each.traits.rounds.local or each.traits.rounds.postpones):
            raise ConfigError(
                f"{type(each).__name__} {here}: the ranks of a group can only repeat means at fixed steps, between "
                "which each group trains locally. Use LocalSGD(period=8), SlowMo(period=12), OverlapLocalSGD(period=8) "
                "or DiLoCo(period=100)"
            )
    if getattr(optimizer, "needs_whole_tensors", False):
        raise ConfigError(
            f"{type(optimizer).__name__} {here}: its trust ratios need norms of whole tensors. Use Adam or SGD"
        )


def check_survives(strategy: Strategy) -> None:
    """Check that a strategy can continue after the loss of a worker.

    Raises:
        ConfigError: with the reason.
    """
    for each in reversed(list(nested(strategy))):
        for part in (each, *codecs_of(each)):
            if reason := part.traits.inelastic_reason if isinstance(part, Strategy) else part.traits.inelastic:
                raise ConfigError(f"elastic=True with {type(part).__name__}: {reason}")
