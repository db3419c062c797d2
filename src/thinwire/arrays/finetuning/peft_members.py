# SPDX-License-Identifier: Apache-2.0
"""Members of an array as PEFT knows them: configurations, models and folders, in and out."""

from __future__ import annotations

import copy
import json
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.arrays.finetuning.layers import Adapter
from thinwire.arrays.fusion.structure import drawing_after
from thinwire.core.storage.files import write_atomically
from thinwire.errors import ConfigError

# Initializations that leave the base unchanged.
_INITIAL = (True, False, "gaussian", "orthogonal")
# Settings that train or change more than adapters.
_MORE = ("modules_to_save", "layer_replication", "trainable_token_indices", "target_parameters", "ensure_weight_tying")
_KINDS = "Linear, Conv1D of transformers, and Embedding for LoRA"
# An adapter's name within the models that are made here.
_NAME = "default"


def peft() -> Any:
    """Import PEFT.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import peft as found
    except ModuleNotFoundError:
        raise ConfigError(
            "peft is not installed, and adapters are made by it. Install it: pip install thinwire[adapters]"
        ) from None
    return found


@dataclass(frozen=True)
class Member:
    """One member as PEFT made it.

    Args:
        config: its configuration, with the names of the layers filled in.
        adapters: each layer's adapter, by the layer's path.
        state: of torch's generator after it was made; None without a seed.
    """

    config: Any
    adapters: Mapping[str, Adapter]
    state: Tensor | None


def read_member(
    index: int, given: Any, base: nn.Module, copy_of: Callable[[nn.Module], nn.Module], seed: int | None
) -> Member:
    """Make a member from a configuration, a PEFT model, or the folder of one.

    Args:
        index: its number, for errors.
        given: what the user passed.
        base: the base of all members.
        copy_of: copies the base's modules, but not its tensors.
        seed: set before PEFT draws the initial adapters.

    Raises:
        ConfigError: it cannot be a member; the base was not changed.
    """
    config, state = _config_of(index, given, base)
    _check_config(index, config)
    # Without a seed the draws continue with torch's own generator, as in a loop over configurations.
    if seed is None:
        model, after = _wrapped(index, copy_of(base), config), None
    else:
        with drawing_after(seed):
            model, after = _wrapped(index, copy_of(base), config), torch.get_rng_state()
    if state is not None:
        _load(index, model, state)
    return Member(model.peft_config[_NAME], _read_layers(index, model), after)


def _wrapped(index: int, base: nn.Module, config: Any) -> Any:
    with warnings.catch_warnings():
        # PEFT asks newer versions of transformers by deprecated names, once per member.
        warnings.simplefilter("ignore", FutureWarning)
        try:
            return peft().get_peft_model(base, config)
        except ValueError as error:  # such as target modules that the base does not have
            text = str(error).rstrip(". ")
            raise ConfigError(f"member {index}: PEFT refuses its configuration. {text}") from error


def _config_of(index: int, given: Any, base: nn.Module) -> tuple[Any, Mapping[str, Tensor] | None]:
    """Return a copy of the configuration, and the trained tensors if there are any."""
    library = peft()
    if isinstance(given, str | Path):
        from safetensors.torch import load_file

        folder = Path(given)
        if not (folder / "adapter_config.json").is_file() or not (folder / "adapter_model.safetensors").is_file():
            raise ConfigError(
                f"member {index}: {folder} is not the folder of an adapter. It must hold adapter_config.json and "
                "adapter_model.safetensors. Save one with save_pretrained"
            )
        config = library.PeftConfig.from_pretrained(str(folder))
        state = load_file(folder / "adapter_model.safetensors")
    elif isinstance(given, library.PeftModel):
        _check_base(index, given, base)
        name = given.active_adapter
        config = given.peft_config[name]
        state = library.get_peft_model_state_dict(given, adapter_name=name, save_embedding_layers=False)
    elif isinstance(given, library.PeftConfig):
        config, state = given, None
    else:
        raise ConfigError(
            f"member {index} is a {type(given).__name__}. A member is a LoraConfig, an IA3Config, a PeftModel or the "
            "folder of an adapter. Pass one of them"
        )
    config = copy.deepcopy(config)
    config.inference_mode = False
    return config, state


def _check_config(index: int, config: Any) -> None:
    library = peft()
    kind = type(config).__name__
    if not isinstance(config, library.LoraConfig | library.IA3Config):
        raise ConfigError(
            f"member {index} has a {kind}. An array has adapters of LoRA (with rsLoRA or DoRA) and IA3. Use LoraConfig "
            "or IA3Config, or train this member by itself"
        )
    refused = {name: value for name in _MORE if (value := getattr(config, name, None))}
    for name, known in (("bias", ("none",)), ("init_lora_weights", _INITIAL)):
        if getattr(config, name, known[0]) not in known:
            refused[name] = getattr(config, name)
    for name, value in refused.items():
        raise ConfigError(
            f"member {index}: {name}={value!r}. Members of an array train adapters only, and share the base unchanged. "
            f"Leave {name} out, or train this member by itself"
        )


def _check_base(index: int, model: Any, base: nn.Module) -> None:
    """Refuse a PEFT model around another base."""
    own = {
        name.replace(".base_layer.", "."): parameter
        for name, parameter in model.get_base_model().named_parameters(remove_duplicate=False)
        if not any(part in name for part in ("lora_", "ia3_"))
    }
    for name, parameter in base.named_parameters(remove_duplicate=False):
        found = own.pop(name, None)
        if found is None or found.shape != parameter.shape:
            raise ConfigError(f"member {index} has another base: it has no {name} of shape {list(parameter.shape)}")
        same = found.data_ptr() == parameter.data_ptr() or torch.equal(found, parameter.to(found))
        if not same:
            raise ConfigError(
                f"member {index} has another base: its {name} has other values. All members of an array share one "
                "base. Train this member by itself"
            )
        if found.requires_grad:
            raise ConfigError(
                f"member {index} trains {name} of the base. Members of an array train adapters only, and share the "
                "base. Freeze it, or train this member by itself"
            )


def _load(index: int, model: Any, state: Mapping[str, Tensor]) -> None:
    found = peft().set_peft_model_state_dict(model, dict(state), adapter_name=_NAME)
    missing = [name for name in found.missing_keys if any(part in name for part in ("lora_", "ia3_"))]
    wrong = [*missing, *found.unexpected_keys]
    if wrong:
        raise ConfigError(f"member {index}: {wrong[0]} does not fit the base. Pass the adapter's own base")


def _read_layers(index: int, model: Any) -> dict[str, Adapter]:
    """Return each layer's adapter by its path, and refuse what an array cannot train."""
    layers: dict[str, Adapter] = {}
    known: set[int] = set()
    for path, module in model.base_model.model.named_modules():
        if not (hasattr(module, "base_layer") and hasattr(module, "adapter_layer_names")):
            continue
        adapter = _read_layer(index, path, module)
        layers[path] = adapter
        for tensor in adapter.tensors.values():
            if id(tensor) in known:
                raise ConfigError(
                    f"member {index}: layer {path!r} shares its adapter with another layer. An array has an adapter "
                    "per layer. Leave one of them out of target_modules"
                )
            known.add(id(tensor))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in known:
            raise ConfigError(
                f"member {index} trains {name} too. Members of an array train adapters only. Remove it from the "
                "configuration, or train this member by itself"
            )
    return layers


def _read_layer(index: int, path: str, module: Any) -> Adapter:
    base = module.base_layer
    kind = type(base).__name__
    if "expert" in path:
        raise ConfigError(
            f"member {index} targets {path!r}, a layer of experts. Its rows are routed, so they do not belong to known "
            "members. Leave it out of target_modules"
        )
    names = {name for name in module.adapter_layer_names if _NAME in getattr(module, name)}
    if "ia3_l" in names and isinstance(base, nn.Linear | _conv1d()):
        return Adapter({"ia3_l": module.ia3_l[_NAME]}, feedforward=bool(module.is_feedforward))
    if not names & {"lora_A", "lora_embedding_A"} or not isinstance(base, nn.Linear | nn.Embedding | _conv1d()):
        raise ConfigError(
            f"member {index} targets {path!r}, a {kind}. An array has adapters of {_KINDS}. Leave it out of "
            "target_modules"
        )
    variant = module.lora_variant.get(_NAME)
    if variant is not None and (type(variant).__name__ != "DoraLinearVariant"):
        raise ConfigError(
            f"member {index}: layer {path!r} uses {type(variant).__name__}. An array has plain LoRA and, for linear "
            "layers, DoRA. Train this member by itself"
        )
    rank, dropout = int(module.r[_NAME]), module.lora_dropout[_NAME]
    most = min(module.in_features, module.out_features)
    if rank > most:
        raise ConfigError(
            f"member {index}: rank {rank} of layer {path!r}. A {kind} of {module.in_features} inputs and "
            f"{module.out_features} outputs has at most rank {most}. Use r={most} or less"
        )
    if "lora_embedding_A" in names:
        tensors = {name: getattr(module, name)[_NAME] for name in ("lora_embedding_A", "lora_embedding_B")}
    else:
        tensors = {f"{name}.weight": getattr(module, name)[_NAME].weight for name in ("lora_A", "lora_B")}
        if module.lora_B[_NAME].bias is not None:
            tensors["lora_B.bias"] = module.lora_B[_NAME].bias
        if variant is not None:
            tensors["lora_magnitude_vector.weight"] = module.lora_magnitude_vector[_NAME].weight
    rate = float(dropout.p) if isinstance(dropout, nn.Dropout) else 0.0
    return Adapter(tensors, rank, float(module.scaling[_NAME]), rate)


def _conv1d() -> type[nn.Module]:
    from transformers.pytorch_utils import Conv1D

    return Conv1D


# -- out ---------------------------------------------------------------------------------------------------------------


def peft_model(config: Any, base: nn.Module, tensors: Mapping[str, Mapping[str, Tensor]]) -> Any:
    """Make a PEFT model of a member around a copy of the base's modules.

    Args:
        config: of the member.
        base: whose adapters it gets; it is changed.
        tensors: each layer's trained tensors by its path.
    """
    with torch.random.fork_rng():
        model = _wrapped(0, base, copy.deepcopy(config))
    layers = dict(model.base_model.model.named_modules())
    with torch.no_grad():
        for path, own in tensors.items():
            for name, tensor in own.items():
                head, _, rest = name.partition(".")
                held = getattr(layers[path], head)[_NAME]
                (held if not rest else getattr(held, rest)).copy_(tensor)
    return model


def save_folder(folder: Path, model: Any) -> None:
    """Write a PEFT model's adapter; every file is replaced atomically, and the configuration is written last."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        model.save_pretrained(made, save_embedding_layers=False)
        for name in ("adapter_model.safetensors", "adapter_config.json"):
            write_atomically(folder / name, (Path(made) / name).read_bytes())


def described(config: Any) -> dict[str, Any]:
    """Return a configuration as JSON values."""
    with tempfile.TemporaryDirectory() as made:
        config.save_pretrained(made)
        found: dict[str, Any] = json.loads((Path(made) / "adapter_config.json").read_text(encoding="utf-8"))
    return {name: sorted(value) if isinstance(value, list) and name == "target_modules" else value
            for name, value in found.items()}  # fmt: skip


def config_from(values: Mapping[str, Any]) -> Any:
    """Reverse `described`."""
    return peft().PeftConfig.from_peft_type(**values)
