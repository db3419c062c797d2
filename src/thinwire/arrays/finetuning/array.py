# SPDX-License-Identifier: Apache-2.0
"""Many adapters of one frozen base as one array."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from thinwire.arrays.finetuning.layers import RANK_AXIS, Adapter, AdapterLayer
from thinwire.arrays.finetuning.peft_members import Member, config_from, described, peft_model, read_member, save_folder
from thinwire.arrays.finetuning.rows import ByMember, Rows, recomputing
from thinwire.arrays.fusion import checkpoints
from thinwire.arrays.fusion.batch import Each
from thinwire.arrays.fusion.model_array import ModelArray
from thinwire.arrays.fusion.store import Selection, check_slot, check_slots, mark_replaced, moved, new_generators
from thinwire.core.torch_internals import BATCH_NORMS, DROPOUTS, pytree
from thinwire.core.validation import check_range
from thinwire.errors import CheckpointError, ConfigError

# Settings of a model by which it skips whole layers at random, for all rows of a batch alike.
_SKIPS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")


def adapters(base: nn.Module, members: Sequence[Any], *, seeds: Sequence[int] | None = None) -> AdapterArray:
    """Make one array of adapters of a frozen base, each of which trains as in a run of its own with PEFT.

    The base runs once on the rows of all members and is in memory once; it is not changed.

    Args:
        base: the model, without adapters.
        members: one `LoraConfig` (plain, rsLoRA or DoRA) or `IA3Config` per member, a PEFT model of the same base, or
            the folder of a saved adapter. Ranks, targets, alphas and dropout rates may differ.
        seeds: one per member: its initial adapter and all its dropout are those of a separate run after
            `torch.manual_seed`. None draws from torch's own generator.

    Raises:
        ConfigError: something cannot be trained as an array; it names the member.

    Example:
        >>> import torch
        >>> from peft import LoraConfig
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from thinwire.arrays import adapters
        >>> from thinwire.arrays.fusion import AdamW, Each
        >>> sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 50}
        >>> base = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
        >>> array = adapters(base, [LoraConfig(r=rank, target_modules=["q_proj"]) for rank in (2, 4, 8)])
        >>> optimizer = AdamW(array.parameters(), lr=[1e-3, 1e-3, 3e-4])
        >>> tokens = Each(torch.randint(50, (3, 2, 10)))  # each member's own two rows
        >>> losses = array(input_ids=tokens, labels=tokens).loss
        >>> losses.sum().backward()
        >>> optimizer.step()
        >>> tuple(losses.shape)
        (3,)
    """
    return AdapterArray(base, members, seeds=seeds)


@dataclass(frozen=True)
class AdapterSelection(Selection):
    """The result of `select` or `add` of an array of adapters; padding may have changed too.

    Args:
        ranks: for every old parameter with an axis of ranks, that axis and its new length.
    """

    ranks: Mapping[nn.Parameter, tuple[int, int]]

    def rows(self, tensor: Tensor, parameter: nn.Parameter | None = None) -> Tensor:
        """Return a tensor [slots before, ...] as [slots now, ...], padded or cut as the parameter was."""
        found = super().rows(tensor)
        if parameter is None or parameter not in self.ranks or tensor.dim() != parameter.dim():
            return found
        axis, length = self.ranks[parameter]
        found = found.narrow(axis, 0, min(length, found.shape[axis]))
        return F.pad(found, [0, 0] * (found.dim() - 1 - axis) + [0, length - found.shape[axis]]).contiguous()


class AdapterArray(ModelArray):
    """B adapters of one frozen base; made by `thinwire.arrays.adapters`.

    A call runs the base on the rows of all members. Tensors among the arguments are shared by all members unless marked
    `Each`, with the members first; results are [B, rows, ...]. With `labels`, the loss of a model of transformers is a
    vector, [B]. Back-propagate its sum: each adapter gets the gradient of its own loss.

    The array starts in training mode. It has the methods of `FusedArray` that an optimizer, schedules and checkpoints
    need.

    Args:
        base: as for `adapters`.
        members: as for `adapters`.
        seeds: as for `adapters`.

    Example:
        >>> import torch
        >>> from peft import LoraConfig
        >>> from thinwire.arrays import adapters
        >>> base = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        >>> array = adapters(base, [LoraConfig(r=rank, target_modules=["0"]) for rank in (1, 3)])
        >>> array
        AdapterArray(2 x Sequential, 1 layers, ranks [1, 3])
        >>> losses = array.losses(torch.nn.functional.mse_loss, array(torch.ones(5, 3)), torch.zeros(5, 2))
        >>> tuple(losses.shape), [name for name, _ in array.named_parameters()]
        ((2,), ['0.lora_A.weight', '0.lora_B.weight'])
    """

    def __init__(self, base: nn.Module, members: Sequence[Any], *, seeds: Sequence[int] | None = None) -> None:
        _check_base_model(base)
        if not members:
            raise ConfigError("members=[]: an array needs at least one member. Give PEFT models or configurations")
        if seeds is not None and len(seeds) != len(members):
            raise ConfigError(f"seeds of length {len(seeds)}: there are {len(members)} members. Pass one per member")
        _keep_layout(base)
        # Frozen parameters of the array's own with the base's memory: the user's keep their flags.
        own = {id(each): _frozen(each) for each in base.parameters()}
        self._template: nn.Module = copy.deepcopy(base, dict(own))
        self._shared = {id(each): each for each in own.values()}
        device = next((each.device for each in own.values()), torch.device("cpu"))
        made = [self._read(slot, given, None if seeds is None else seeds[slot]) for slot, given in enumerate(members)]
        self._configs = [each.config for each in made]
        # They continue after PEFT has drawn the initial adapters.
        own_draws = None if seeds is None else new_generators(seeds, [each.state for each in made], device)
        self._rows = Rows(len(made), own_draws, 0, len(made))
        self._skeleton = self._copy(self._template)
        self._layers = self._install(made)
        self._prepare_model()
        self._mode: ByMember | None = None
        self._loss_is_wrapped = False
        self._counts: Tensor | None = None
        self.train()

    def _copy(self, module: nn.Module) -> nn.Module:
        """Copy modules, but not the base's parameters."""
        return copy.deepcopy(module, dict(self._shared))

    def _read(self, slot: int, given: Any, seed: int | None) -> Member:
        return read_member(slot, given, self._template, self._copy, seed)

    def _install(self, members: Sequence[Member]) -> dict[str, AdapterLayer]:
        """Put the adapters into the skeleton."""
        _check_alike(members)
        paths = dict.fromkeys(path for path, _ in self._template.named_modules(remove_duplicate=False))
        used = {path for each in members for path in each.adapters}
        layers: dict[str, AdapterLayer] = {}
        for path in (path for path in paths if path in used):
            parent, _, name = path.rpartition(".")
            holder = self._skeleton.get_submodule(parent)
            every = [each.adapters.get(path) for each in members]
            layers[path] = AdapterLayer(path, holder.get_submodule(name), self._rows, every)
            layers[path].adapters = [each and _without_tensors(each) for each in every]
            setattr(holder, name, layers[path])
        return layers

    def _prepare_model(self) -> None:
        skeleton: Any = self._skeleton
        config: Any = getattr(skeleton, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False  # keys and values of earlier positions are for generation only
        if hasattr(skeleton, "loss_function"):
            skeleton.loss_function = partial(self._loss_by_member, skeleton.loss_function)
        context_fn = recomputing(self._rows, lambda: self._mode)
        for module in self._skeleton.modules():
            if getattr(module, "gradient_checkpointing", False):
                held: Any = module
                held._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False, context_fn=context_fn)

    # -- contents ------------------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """B, the number of members."""
        return self._rows.size

    @property
    def running(self) -> slice:
        """The members that run: all, except within `backward(at_once=...)` and `only`."""
        return self._rows.running

    @property
    def configs(self) -> list[Any]:
        """Each member's configuration of PEFT."""
        return list(self._configs)

    @property
    def generators(self) -> Sequence[torch.Generator] | None:
        """One random generator per member, if seeds were given."""
        return self._rows.generators

    def __repr__(self) -> str:
        ranks = sorted({each.rank for layer in self._layers.values() for each in layer.adapters if each is not None})
        kind = type(self._template).__name__
        return f"AdapterArray({self.size} x {kind}, {len(self._layers)} layers, ranks {ranks})"

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield every trained parameter, [B, ...], padded to the largest rank."""
        for path, layer in self._layers.items():
            yield from ((f"{path}.{name}", parameter) for name, parameter in layer.stacked.items())

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Nothing: the buffers are the base's."""
        yield from ()

    def dropout_rates(self) -> dict[str, tuple[float, ...]]:
        """Return each member's dropout rate in every layer with adapters of LoRA."""
        return {
            f"{path}.lora_dropout.p": tuple(layer.rates)
            for path, layer in self._layers.items()
            if "lora_A.weight" in layer.stacked
        }

    def _set_rates(self, name: str, values: Sequence[float]) -> None:
        self._layers[name.removesuffix(".lora_dropout.p")].set_rates(values)

    def _roots(self) -> list[nn.Module]:
        return [self._skeleton]

    # -- running -------------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return every member's output, [B, rows, ...]; tensors among the arguments are shared unless marked `Each`.

        Raises:
            ConfigError: the rows of the batch do not belong to known members.
        """
        rows = self._rows
        args, kwargs = rows.as_rows((args, kwargs))
        random = self.training and rows.generators is not None and self._draws
        labelled = kwargs.get("labels") is not None
        mode = ByMember(rows, random=random) if random or (labelled and not self._loss_is_wrapped) else None
        self._mode, self._counts = mode, None
        try:
            with mode or nullcontext():
                found = self._skeleton(*args, **kwargs)
        finally:
            self._mode = None
        if mode is not None and mode.counts is not None:
            self._counts = mode.counts
        return self._by_member(found)

    @property
    def _draws(self) -> bool:
        """Return True if the base draws random numbers in training, as far as its modules and configuration show."""
        config = getattr(self._skeleton, "config", None)
        if config is None:
            return True
        values = [value for name, value in vars(config).items() if any(word in name for word in ("drop", "noise"))]
        rates = [getattr(module, "p", 0) for module in self._skeleton.modules() if isinstance(module, DROPOUTS)]
        return any(isinstance(value, float | int) and value > 0 for value in (*values, *rates))

    def _loss_by_member(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._loss_is_wrapped = True
        if self._mode is not None or self._rows.count == 1:
            return function(*args, **kwargs)
        with ByMember(self._rows, random=False) as mode:
            found = function(*args, **kwargs)
        self._counts = mode.counts
        return found

    def _by_member(self, found: Any) -> Any:
        rows = self._rows
        loss = found.get("loss") if isinstance(found, Mapping) else None
        if isinstance(loss, Tensor) and rows.count == 1:
            loss = loss.reshape(1)
        if isinstance(loss, Tensor) and loss.shape != (rows.count,):
            raise ConfigError(
                f"the loss of {type(self._template).__name__} has shape {list(loss.shape)}: the array cannot split it "
                "into one loss per member. Leave out labels, and compute each member's loss with array.losses()"
            )
        if not isinstance(found, Mapping):
            return rows.by_member(found)
        made: Any = copy.copy(found)
        for name in found:
            if name == "loss":
                made[name] = loss
            elif name != "past_key_values":
                made[name] = rows.by_member(found[name])
        return made

    def losses(self, function: Callable[..., Tensor], outputs: Any, *targets: Any) -> Tensor:
        """Return every member's loss, [B], by a function of one member's outputs and targets.

        Args:
            function: the loss of one member, a scalar.
            outputs: as returned by the array.
            targets: shared by all members, unless marked `Each`.

        Raises:
            ConfigError: the loss is not a scalar per member.
        """
        rows = self._rows

        def part(leaf: Any, member: int, *, target: bool) -> Any:
            if isinstance(leaf, Each):
                return leaf.tensor[rows.first + member]
            return leaf[member] if isinstance(leaf, Tensor) and leaf.dim() and not target else leaf

        found: list[Tensor] = []
        for member in range(rows.count):
            own = pytree.tree_map(partial(part, member=member, target=False), outputs)
            rest = [
                pytree.tree_map(
                    partial(part, member=member, target=True), each, is_leaf=lambda leaf: isinstance(leaf, Each)
                )
                for each in targets
            ]
            found.append(function(own, *rest))
        if any(each.dim() for each in found):
            raise ConfigError(
                f"each member's loss has shape {list(found[0].shape)}: it must be a scalar. Reduce it by its mean or "
                "its sum"
            )
        return torch.stack(found)

    def backward(self, compute: Callable[[], Tensor], *, at_once: int | None = None) -> Tensor:
        """Compute and back-propagate the losses of a few members at a time, which bounds memory; returns them, [B].

        Args:
            compute: runs the array and returns the losses of the members that run; `Each` still holds all members'.
                Index other tensors with one entry per member by `array.running`.
            at_once: members at a time; None runs all.

        Raises:
            ConfigError: `at_once` is less than 1, or a result is not one loss per member.
        """
        check_range("at_once", at_once, "1..", "None runs all members at a time")
        step, found = at_once or self.size, list[Tensor]()
        for first in range(0, self.size, step):
            with self._running(first, min(step, self.size - first)):
                losses = compute()
                if losses.shape != (self._rows.count,):
                    raise ConfigError(
                        f"the losses have shape {list(losses.shape)}: there must be one for each of "
                        f"{self._rows.count} members that run"
                    )
                losses.sum().backward()
            found.append(losses.detach())
        return torch.cat(found)

    @contextmanager
    def _running(self, first: int, count: int) -> Generator[None]:
        rows = self._rows
        before = rows.first, rows.count
        rows.first, rows.count = first, count
        try:
            yield
        finally:
            rows.first, rows.count = before

    @contextmanager
    def only(self, index: int) -> Generator[nn.Module]:
        """Within it, the base with one member's adapter, as a plain model."""
        check_slot(index, self.size)
        with self._running(index, 1):
            yield self._skeleton

    @torch.no_grad()
    def evaluate(self, compute: Callable[[Any], Tensor], batches: Iterable[Any]) -> Tensor:
        """Return every member's mean loss over held-out batches, [B], in evaluation mode.

        Batches count by their labels that are not ignored, if `compute` uses the model's own loss, and equally
        otherwise.

        Args:
            compute: the losses of one batch, such as `lambda batch: array(**batch).loss`.
            batches: at least one.

        Raises:
            ConfigError: there is no batch.
        """
        total = torch.zeros(self.size, dtype=torch.float64, device="cpu")
        weight = total.clone()
        with self.evaluating():
            for batch in batches:
                self._counts = None
                losses = compute(batch).double().cpu()
                counts = torch.ones_like(total) if self._counts is None else self._counts.double().cpu()
                # A member without labels in this batch has a mean of nothing, NaN.
                total += torch.where(counts > 0, losses * counts, 0.0)
                weight += counts
        if not bool((weight > 0).all()):
            raise ConfigError("evaluate: there are no batches with labels for every member. Pass at least one batch")
        return total / weight

    @torch.no_grad()
    def generate(self, index: int, *args: Any, **kwargs: Any) -> Any:
        """Generate with one member, as the model's own `generate` does with these arguments."""
        with self.only(index) as model, self.evaluating():
            own: Any = model
            return own.generate(*args, **kwargs)

    # -- members enter and leave ---------------------------------------------------------------------------------------

    def tensors(self, index: int) -> dict[str, dict[str, Tensor]]:
        """Return one member's trained tensors without padding, by layer and name."""
        check_slot(index, self.size)
        return {path: own for path, layer in self._layers.items() if (own := layer.tensors_of(index))}

    def extract(self, index: int) -> Any:
        """Return one member as a PEFT model, whose base shares its memory with this array's."""
        check_slot(index, self.size)
        return peft_model(self._configs[index], self._copy(self._template), self.tensors(index))

    def save_pretrained(self, folder: str | Path, index: int) -> Path:
        """Save one member so that `PeftModel.from_pretrained` loads it; returns the folder.

        Raises:
            ConfigError: no such slot.
            OSError: writing failed.
        """
        home = Path(folder)
        save_folder(home, self.extract(index))
        return home

    def _check_fits(self, slot: int, member: Member) -> None:
        _check_alike([Member(self._configs[0], _adapters_of(self._layers, 0), None), member], (0, slot))
        for path, own in member.adapters.items():
            layer = self._layers.get(path)
            if layer is None or not own.tensors.keys() <= layer.stacked.keys():
                wrong = path if layer is None else f"{path}.{next(iter(own.tensors.keys() - layer.stacked.keys()))}"
                raise ConfigError(
                    f"member {slot} trains {wrong}, and no member of the array does. Make an array of all of these "
                    "members from the start"
                )

    def select(self, indices: Sequence[int]) -> AdapterSelection:
        """Keep some members in a new order, a member as often as it is named; memory of the others is freed.

        Parameters become new objects without gradients: pass the result to `select` of the optimizer, the schedules
        and the scaler before the next step.

        Raises:
            ConfigError: no index, or no such slot.
        """
        check_slots(indices, self.size)
        return self._rebuild(list(indices), [])

    def add(self, members: Sequence[Any], *, seeds: Sequence[int] | None = None) -> AdapterSelection:
        """Append members, which start from their initial adapters.

        Pass the result to `select` of the optimizer, the schedules and the scaler. Then set each new slot's
        hyperparameters by `optimizer.reset(slot, lr=...)` and `schedules.insert(slot, ...)`: until then they are those
        of slot 0.

        Args:
            members: as for `adapters`.
            seeds: one per new member, if the array has seeds.

        Raises:
            ConfigError: a member does not fit, or seeds are missing.
        """
        if (seeds is None) != (self._rows.generators is None) or (seeds is not None and len(seeds) != len(members)):
            raise ConfigError(
                f"add with seeds={seeds}: the members of the array have "
                f"{'no seeds' if self._rows.generators is None else 'seeds'}. Pass one per new member, or none to any"
            )
        made: list[Member] = []
        for place, given in enumerate(members):
            made.append(self._read(self.size + place, given, None if seeds is None else seeds[place]))
            self._check_fits(self.size + place, made[-1])
        return self._rebuild(list(range(self.size)), made, seeds=seeds)

    def _rebuild(
        self, kept: list[int], added: Sequence[Member], *, seeds: Sequence[int] | None = None
    ) -> AdapterSelection:
        rows, size = self._rows, self.size
        moved: dict[nn.Parameter, tuple[nn.Parameter, ...]] = {}
        ranks: dict[nn.Parameter, tuple[int, int]] = {}
        sources: list[int | None] = [*kept, *([None] * len(added))]
        for path, layer in list(self._layers.items()):
            every = [*(layer.adapters[slot] for slot in kept), *(each.adapters.get(path) for each in added)]
            if not any(every):
                # No remaining member trains this layer.
                moved.update((parameter, ()) for parameter in layer.stacked.values())
                parent, _, name = path.rpartition(".")
                setattr(self._skeleton.get_submodule(parent), name, layer.base_layer)
                del self._layers[path]
                continue
            for name, (before, after) in layer.rebuild(every, sources).items():
                if before is not None:
                    moved[before] = () if after is None else (after,)
                    if after is not None and name in RANK_AXIS:
                        ranks[before] = (1 + RANK_AXIS[name], layer.rank)
            layer.adapters = [each and _without_tensors(each) for each in every]
        self._configs = [*(copy.deepcopy(self._configs[slot]) for slot in kept), *(each.config for each in added)]
        if rows.generators is not None:
            device = rows.generators[0].device
            rows.generators = [
                *(rows.generators[slot].clone_state() for slot in kept),
                *new_generators(seeds or [], [each.state for each in added], device),
            ]
        rows.size = rows.count = len(sources)
        rows.first = 0
        order = {parameter: place for place, parameter in enumerate(self.parameters())}
        mark_replaced(moved)
        # A new slot takes the hyperparameters of slot 0 until it is reset.
        slots = tuple(0 if source is None else source for source in sources)
        return AdapterSelection(slots, size, moved, order, ranks)

    def to(self, device: torch.device | str) -> AdapterArray:
        """Move everything; on another type of device the generators restart from their seeds."""
        target = torch.device(device)
        self._template.to(target)
        self._skeleton.to(target)
        for layer in self._layers.values():
            layer.to_device(target)
        self._rows.generators = moved(self._rows.generators, target)
        return self

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Return every trained tensor by its name, and the states of the generators as `generator[b]`."""
        found = {name: parameter.detach() for name, parameter in self.named_parameters()}
        for member, generator in enumerate(self.generators or ()):
            found[f"generator[{member}]"] = generator.get_state()
        return found

    def save(
        self, folder: str | Path, *, extra: Mapping[str, Any] | None = None, **parts: Unpack[checkpoints.Parts]
    ) -> Path:
        """Save the array without its base, to continue bit for bit; arguments are those of `fusion.checkpoints.save`.

        Raises:
            CheckpointError: something is neither a tensor nor JSON.
            OSError: writing failed; the earlier checkpoint is unchanged.
        """
        content = {
            "configs": [described(each) for each in self._configs],
            "base": _fingerprint(self._template),
            "own": dict(extra or {}),
        }
        return checkpoints.save(folder, self, extra=content, **parts)

    def load(self, folder: str | Path, **parts: Unpack[checkpoints.Parts]) -> dict[str, Any]:
        """Load what `save` wrote, to continue bit for bit; returns its `extra`.

        The array gets the members of the checkpoint, in any number. Optimizer, schedules and scaler must be passed if
        they were saved, and made alike; schedules with the factory of each slot's member at the time of saving.

        Raises:
            CheckpointError: there is no checkpoint, it is damaged, or it belongs to another base, optimizer or
                schedules; nothing was changed.
        """
        content = checkpoints.read(folder)
        if "array" not in content or "configs" not in content.get("extra", {}):
            raise CheckpointError(f"{folder}: holds no array of adapters. Load it as it was saved")
        if content["extra"]["base"] != _fingerprint(self._template):
            raise CheckpointError(f"{folder}: its adapters belong to another base. Make the array of that base")
        saved, ours = content["extra"]["configs"], [described(each) for each in self._configs]
        if saved != ours:
            has_seeds = self.generators is not None
            if has_seeds != bool(content["array"]["generators"]):
                raise CheckpointError(f"{folder}: its members have {'no ' if has_seeds else ''}seeds. Make it alike")
            before = checkpoints.state_of(self, **parts)
            self._become(saved, parts)
            try:
                checkpoints.check(content["array"], self, **parts)
            except CheckpointError:
                self._become(ours, parts)
                checkpoints.restore(before, self, **parts)
                raise
        checkpoints.restore(content["array"], self, **parts)
        found: dict[str, Any] = content["extra"]["own"]
        return found

    def _become(self, configs: Sequence[Mapping[str, Any]], parts: checkpoints.Parts) -> None:
        """Make these the members, whose values are then loaded."""
        # The seed is of no importance: values and generators are overwritten.
        made = [self._read(slot, config_from(values), 0) for slot, values in enumerate(configs)]
        for slot, member in enumerate(made):
            self._check_fits(slot, member)
        checkpoints.select_parts(self._rebuild([], made, seeds=[0] * len(made)), **parts)


def _keep_layout(base: nn.Module) -> None:
    """Keep weights in 4 bits in their usual layout.

    On processors with AVX512-BF16 bitsandbytes repacks them in evaluation. PEFT's DoRA would read other weights from
    that, and the base of a checkpoint would seem to be another one.
    """
    for module in base.modules():
        if getattr(module, "support_avx512bf16_for_cpu", False):
            module.state_dict()  # restores the layout
            held: Any = module
            held.support_avx512bf16_for_cpu = False


def _frozen(parameter: nn.Parameter) -> nn.Parameter:
    # A quantized parameter has a class and tables of its own, and never a gradient.
    return nn.Parameter(parameter.detach(), False) if parameter.is_floating_point() else parameter


def _check_base_model(base: nn.Module) -> None:
    """Refuse a base that already has adapters, or that mixes the rows of a batch."""
    for path, module in base.named_modules():
        if hasattr(module, "adapter_layer_names"):
            raise ConfigError(
                f"the base has an adapter at {path!r}. The base of an array has none. Pass the model before "
                "get_peft_model, or unload() it, and pass the PEFT models as members"
            )
        if isinstance(module, BATCH_NORMS):
            raise ConfigError(
                f"layer {path!r} of the base is a {type(module).__name__}: it mixes the rows of a batch, which belong "
                "to several members. Use thinwire.fuse with PEFT models instead"
            )
        if type(getattr(module, "weight", None)).__name__ == "Int8Params":
            raise ConfigError(
                f"layer {path!r} of the base is a {type(module).__name__}: its first call moves the scales out of the "
                "weight, so copies cannot share it. Load the base in 4 bits (BitsAndBytesConfig(load_in_4bit=True))"
            )
    config = getattr(base, "config", None)
    for name in _SKIPS:
        if getattr(config, name, 0):
            raise ConfigError(
                f"{name}={getattr(config, name)}: the base skips layers for all members alike. Set it to 0"
            )


def _check_alike(members: Sequence[Member], slots: Sequence[int] | None = None) -> None:
    """Refuse members whose adapters cannot share a layer."""
    numbers = range(len(members)) if slots is None else slots
    first = members[0].config.peft_type
    seen: dict[str, tuple[int, Adapter]] = {}
    for number, member in zip(numbers, members, strict=True):
        if member.config.peft_type != first:
            raise ConfigError(
                f"member {numbers[0]} has an adapter of {first.value} and member {number} of "
                f"{member.config.peft_type.value}. The members of an array have one kind. Make an array of each kind"
            )
        for path, adapter in member.adapters.items():
            other, known = seen.setdefault(path, (number, adapter))
            kinds = [{"ia3_l", "lora_A.weight", "lora_embedding_A"} & each.tensors.keys() for each in (known, adapter)]
            dtypes = [{each.dtype for each in one.tensors.values()} for one in (known, adapter)]
            if known.feedforward != adapter.feedforward or kinds[0] != kinds[1] or dtypes[0] != dtypes[1]:
                raise ConfigError(
                    f"members {other} and {number} have different kinds of adapters at layer {path!r}, in the input "
                    "that they scale or in dtype. Make them alike, or make two arrays"
                )


def _without_tensors(adapter: Adapter) -> Adapter:
    """Keep names, shapes and dtypes; the values are in the stacked tensors."""
    return replace(adapter, tensors={name: tensor.detach().to("meta") for name, tensor in adapter.tensors.items()})


def _adapters_of(layers: Mapping[str, AdapterLayer], slot: int) -> dict[str, Adapter]:
    found = {path: layer.adapters[slot] for path, layer in layers.items()}
    return {path: each for path, each in found.items() if each is not None}


def _fingerprint(base: nn.Module) -> str:
    """Return a hash over a few numbers of every parameter."""
    digest = hashlib.sha256()
    for name, parameter in base.named_parameters():
        flat = parameter.detach().flatten()
        sample = flat[:: max(1, flat.numel() // 16)].double().cpu()
        digest.update(f"{name} {list(parameter.shape)} {parameter.dtype}".encode())
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()
