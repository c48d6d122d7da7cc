"""A PEFT adapter's folder that a run begins from: what its config says, and its weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from swarmnet.errors import SpecError
from swarmnet.needs import install_command
from swarmnet.spec import LORA_ALPHA, LORA_RANK, LoraSpec
from swarmnet.training.mapped_tensors import MappedFiles, stored_tensors
from swarmnet.training.models.base import ModelPlan, ParameterRange, described, flat_of
from swarmnet.training.models.experts import (
    DOWN,
    GATE_UP,
    STACKS,
    adapted_stack,
    expert_of,
    is_stack,
)
from swarmnet.training.models.lora import EXPERTS, PARTS, names_experts
from swarmnet.training.models.model_config import read_table

ADAPTER_CONFIG, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Of a parameter's name in an adapter's file."""
MAX_TARGETS = 1024
REFUSED = """
    modules_to_save rank_pattern alpha_pattern layers_to_transform layers_pattern layer_replication
    exclude_modules trainable_token_indices use_dora use_qalora use_bdlora
    lora_bias fan_in_fan_out alora_invocation_tokens eva_config corda_config lora_ga_config
    velora_config monteclora_config arrow_config kasa_config
"""
"""Keys that make an adapter another one than `swarmnet.training.models.lora` has."""


def read_adapter(folder: Path, lora: LoraSpec, base: str) -> LoraSpec:
    """`[lora]` with what the folder says, and without `from`. `base`: the name of the model.

    Raises:
        SpecError: the folder cannot be read, it is of another model or kind of adapter, or
            `[lora]` says something else.
    """
    config = read_table(folder / ADAPTER_CONFIG, "[lora] from")
    where = f"[lora] from: {folder}"
    if str(config.get("peft_type", "")).upper() != "LORA":
        raise SpecError(f"{where} is no LoRA adapter")
    refused = [key for key in REFUSED.split() if config.get(key)]
    if refused or config.get("bias", "none") != "none":
        raise SpecError(f"{where}: {refused[0] if refused else 'bias'} is not supported")
    theirs = str(config.get("base_model_name_or_path") or "")
    if theirs and base and Path(theirs).name != Path(base).name:
        raise SpecError(
            f"{where} is an adapter of {theirs[:80]}, not of {base[:80]}; where these are one "
            f"model, correct base_model_name_or_path in its {ADAPTER_CONFIG}"
        )
    targets = _names(config, "target_modules", where)
    targets += [_target(name) for name in _names(config, "target_parameters", where)]
    if not targets:
        raise SpecError(f"{where}: target_modules must be a list of names")
    found = {
        "r": config.get("r", LORA_RANK),
        "lora_alpha": config.get("lora_alpha", LORA_ALPHA),
        "target_modules": tuple(sorted(set(targets))),
        "use_rslora": bool(config.get("use_rslora")),
    }
    for key, value in found.items():
        if value is None:
            raise SpecError(f"{where}: {key} is null; it must be a number")
        wanted = getattr(lora, key)
        wanted = tuple(sorted(wanted)) if isinstance(wanted, tuple) else wanted
        if wanted not in (None, (), False, value):
            raise SpecError(f"{where} has {key} = {value}, not {wanted}; leave the key out")
    path = folder / ADAPTER_FILE
    if not path.is_file():
        raise SpecError(f"{where} has no {ADAPTER_FILE}")
    values = {**lora.model_dump(), **found, "source": "", "adapter": _sha256(path)}
    try:
        return LoraSpec.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        name = "".join(f"{part} = {str(first['input'])[:80]}: " for part in first["loc"][:1])
        raise SpecError(f"{where}: {name}{' '.join(first['msg'].split())}") from None


def _names(config: Mapping[str, Any], key: str, where: str) -> list[str]:
    """The list of names under a key, empty where there is none. Raises `SpecError`."""
    names = config.get(key) or []
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not is_list or len(names) > MAX_TARGETS:
        raise SpecError(f"{where}: {key} must be a list of names")
    return list(names)


def _target(name: str) -> str:
    """Of `target_parameters`, as `[lora] target_modules` has it."""
    return f"{EXPERTS}.{name}" if name in STACKS else name.removesuffix(".weight")


class AdapterWeights:
    """The parameters of an adapter, by name, as its folder has them."""

    def __init__(self, folder: Path, stages: Sequence[Sequence[ParameterRange]]) -> None:
        """`stages`: the trained parameters of each. Raises `SpecError` where they are not exactly
        those of the folder."""
        self.folder = folder
        path = folder / ADAPTER_FILE
        wanted = {r.name: r for ranges in stages for r in ranges}
        ours = {theirs: name for name, theirs in _peft_names(wanted).items()}
        stored = ((one.name.removeprefix(PREFIX), one) for one in stored_tensors(path))
        self._stored = {ours.get(name, name): one for name, one in stored}
        missing, more = wanted.keys() - self._stored.keys(), self._stored.keys() - wanted.keys()
        if missing:
            raise SpecError(f"[lora] from: {path} lacks {min(missing)[:120]}")
        if more:
            name = min(more)[:120]
            raise SpecError(f"[lora] from: {path} has more than the run's adapters: {name}")
        for name, r in wanted.items():
            shape = self._stored[name].shape
            if shape != r.shape:
                raise SpecError(f"[lora] from: {path}: {name} is {shape}, not {r.shape}")
        self._files = MappedFiles()

    def flat(self, ranges: Sequence[ParameterRange], start: int, stop: int) -> Tensor:
        """Elements [start, stop) of a stage's flat vector, fp32. Raises `SpecError`."""
        return flat_of(
            ranges, start, stop, lambda r, *part: self._files.read(self._stored[r.name], *part)
        )


def adapter_config(lora: LoraSpec, base: str, plan: ModelPlan) -> dict[str, Any]:
    """adapter_config.json of a trained adapter. `lora`: resolved. `base`: the model's name. `plan`:
    of the model."""
    alpha = lora.alpha
    modules, parameters = _targets(lora, plan)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": lora.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": lora.lora_dropout,
        "target_modules": modules,
        "use_rslora": lora.use_rslora,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
    }
    return config | ({"target_parameters": parameters} if parameters else {})


def _targets(lora: LoraSpec, plan: ModelPlan) -> tuple[list[str], list[str]]:
    """`[lora] target_modules` as PEFT's `target_modules` and `target_parameters`. Experts are among
    the latter. So are linear layers beside experts that are named as experts of old files are: of
    some families PEFT takes these names among the former for experts (it has no dropout for the
    latter)."""
    has_experts = not lora.lora_dropout and any(
        is_stack(f"{layer.name}.{name}") or expert_of(f"{layer.name}.{name}") is not None
        for layer, module in zip(plan.layers, described(plan.layers), strict=True)
        for name, _ in module.named_parameters()
    )
    modules, parameters = [], []
    for name in lora.target_modules:
        if names_experts(name):
            parameters.append(name)
        elif has_experts and name.rpartition(".")[2] in PARTS:
            parameters.append(f"{name}.weight")
        else:
            modules.append(name)
    return modules, parameters


def adapter_tensors(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Adapters' parameters under the names that PEFT's files have."""
    theirs = _peft_names(named)
    return {PREFIX + theirs[name]: tensor for name, tensor in named.items()}


def _peft_names(names: Iterable[str]) -> dict[str, str]:
    """By ours. PEFT wraps the experts of a layer once for each of their matrices that has an
    adapter, the last one outermost."""
    found, known = {}, set(names)
    for name in known:
        adapted = adapted_stack(name)
        theirs = name
        if adapted is not None:
            stack, side = adapted
            theirs = stack.rpartition(".")[0]
            outer = name.replace(f".{GATE_UP}.", f".{DOWN}.")
            if outer != name and outer in known:
                theirs += ".base_layer"
            theirs += f".{side}.weight"
        found[name] = theirs
    return found


def family_targets(kind: str) -> tuple[str, ...]:
    """The linear layers that PEFT adapts in a family where nothing is said; empty where it does not
    know. Raises `SpecError` where PEFT is missing."""
    try:
        from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN
    except ImportError:
        raise SpecError(
            f"[lora] target_modules left out: PEFT knows them, {install_command('peft')}; or "
            'name them, such as ["q_proj", "v_proj"]'
        ) from None
    found = KNOWN.get(kind, ())
    return () if isinstance(found, str) else tuple(found)


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise SpecError(f"[lora] from: cannot read {path}: {error.strerror or error}") from None
