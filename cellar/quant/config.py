"""`quantization_config` of a checkpoint: which modules are quantized, and in which format each.

    awq                 AutoAWQ, version gemm: 4 bits with zero points
    gptq                AutoGPTQ and GPTQModel: 4 or 8 bits, both conventions of zero points, act-order
    fp8                 e4m3, one scale a matrix, a row, or a block of 128 x 128
    compressed-tensors  4 and 8 bits, e4m3; targets and exceptions by name and regular expression
    mxfp4               e2m1 with a power of two for every 32

Activations that a config wants in 8 bits are rounded by the range that each token has as it comes (decisions 0053 and
0056), where weights have 8 bits of the same kind; else they stay in the run's dtype. The KV cache is an option.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cellar.core.errors import CheckpointError
from cellar.core.formats import Format

GROUPS = (32, 64, 128)

_UNREAD = {
    "bitsandbytes": "NF4 and LLM.int8 (bitsandbytes)",
    "gguf": "GGUF",
    "modelopt": "ModelOpt",
    "modelopt_fp4": "ModelOpt",
}


@dataclass(frozen=True, slots=True)
class Rule:
    """Modules that `targets` match have `format`; None: they are plain."""

    targets: tuple[str, ...]
    format: Format | None


@dataclass(frozen=True, slots=True)
class Scheme:
    """What a quantization_config says.

    A target or exception is a module's name, `re:` and a regular expression that matches from the name's beginning, or
    `Linear`, which all modules are. Of several targets that match a name precedes an expression, and that `Linear`;
    expressions precede each other by the alphabet, as in compressed-tensors. `within`: exceptions are parts of names,
    as those of transformers are.
    """

    method: str
    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()
    within: bool = False

    def format_of(self, module: str) -> Format | None:
        """The format of a linear module (`model.layers.0.mlp.down_proj`), None if it is plain."""
        for pattern in self.ignored:
            if _matches(pattern, module) or (self.within and pattern in module):
                return None
        found = [(_vagueness(t), t, rule.format) for rule in self.rules for t in rule.targets if _matches(t, module)]
        return min(found, key=lambda one: one[:2])[2] if found else None


def read_scheme(config: Mapping[str, Any]) -> Scheme:
    """Raises CheckpointError, in one sentence, for what is damaged, contradictory or not implemented."""
    method = config.get("quant_method")
    if isinstance(method, str) and method in _READERS:
        return _READERS[method](_Fields(method, config))
    name = _UNREAD.get(str(method), repr(method))
    raise CheckpointError(
        f"weights quantized by {name} are not read; quant_method may be {', '.join(_READERS)}: use such a checkpoint, "
        "or a plain one with --quantization."
    )


class _Fields:
    """A quantization_config with the refusals that all kinds share."""

    def __init__(self, method: str, values: Mapping[str, Any]) -> None:
        self.method = method
        self._values = values

    def get(self, name: str, default: Any = None) -> Any:
        value = self._values.get(name)
        return default if value is None else value

    def refusal(self, name: str, allowed: str) -> CheckpointError:
        return CheckpointError(
            f"{name} in the quantization config ({self.method}) is {self._values.get(name)!r}; {allowed}."
        )

    def one_of(self, name: str, default: Any, *allowed: Any) -> Any:
        value = self.get(name, default)
        if value not in allowed or isinstance(value, bool) != isinstance(allowed[allowed.index(value)], bool):
            raise self.refusal(name, f"it must be {' or '.join(repr(a) for a in allowed)}")
        return allowed[allowed.index(value)]  # of the type that is meant: JSON may say 8.0

    def group(self, name: str = "group_size", default: Any = None) -> int:
        """Columns that share a scale; 0 for all (-1 in the config)."""
        value = self.one_of(name, default, *GROUPS, -1)
        return 0 if value == -1 else int(value)

    def patterns(self, name: str) -> tuple[str, ...]:
        value = self.get(name, [])
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self.refusal(name, "it must be a list of names")
        return tuple(value)

    def inner(self, name: str) -> _Fields:
        value = self.get(name)
        if not isinstance(value, Mapping):
            raise self.refusal(name, "it must be an object")
        return _Fields(f"{self.method}, {name}", value)


def _awq(fields: _Fields) -> Scheme:
    fields.one_of("bits", 4, 4)
    fields.one_of("zero_point", True, True)
    if str(fields.get("version", "gemm")).lower() != "gemm":
        raise fields.refusal("version", "only the layout 'gemm' is read")
    format = Format("int4", fields.group(default=128), zero_points=True, layout="awq")
    return Scheme("awq", (Rule(("Linear",), format),), ("lm_head", *fields.patterns("modules_to_not_convert")), True)


def _gptq(fields: _Fields) -> Scheme:
    bits = fields.one_of("bits", None, 4, 8)
    layout = fields.one_of("checkpoint_format", "gptq", "gptq", "gptq_v2")
    layout += " symmetric" * fields.one_of("sym", False, False, True)
    layout += " ordered" * fields.one_of("desc_act", False, False, True)
    format = Format(f"int{bits}", fields.group(), zero_points=True, layout=layout)
    ignored = fields.patterns("modules_to_not_convert")
    if not fields.one_of("lm_head", False, False, True):
        ignored = ("lm_head", *ignored)
    if fields.get("dynamic"):
        raise fields.refusal("dynamic", "bits that differ between modules are not read")
    return Scheme("gptq", (Rule(("Linear",), format),), ignored, True)


def _fp8(fields: _Fields) -> Scheme:
    fields.one_of("fmt", "e4m3", "e4m3")
    block = fields.get("weight_block_size")
    if block is None:
        format = Format("fp8", rows=0, layout="fp8", activations="fp8")
    elif block == [128, 128]:
        format = Format("fp8", 128, rows=128, layout="fp8_blocks", activations="fp8")
    else:
        raise fields.refusal("weight_block_size", "it must be [128, 128], or missing")
    fields.one_of("activation_scheme", "dynamic", "dynamic", "static")
    ignored = fields.patterns("modules_to_not_convert") + fields.patterns("ignored_layers")
    return Scheme("fp8", (Rule(("Linear",), format),), ("lm_head", *ignored), True)


def _mxfp4(fields: _Fields) -> Scheme:
    format = Format("mxfp4", 32, layout="mxfp4")
    ignored = ("lm_head", *fields.patterns("modules_to_not_convert"))
    return Scheme("mxfp4", (Rule(("Linear",), format),), ignored, True)


def _compressed_tensors(fields: _Fields) -> Scheme:
    sparsity = fields.get("sparsity_config", {})
    if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
        raise fields.refusal("sparsity_config", "sparse weights are not read")
    if fields.get("transform_config", {}) not in ({}, {"config_groups": {}}):
        raise fields.refusal("transform_config", "activations that are to be rotated are not implemented")
    groups = fields.inner("config_groups")
    names = fields.get("config_groups")
    if not names:
        raise fields.refusal("config_groups", "it must have at least one group")
    rules = []
    for name in names:
        group = groups.inner(name)
        targets = group.patterns("targets")
        if not targets:
            raise group.refusal("targets", "it must name at least one module or class")
        if group.get("output_activations"):
            raise group.refusal("output_activations", "quantized outputs are not implemented")
        stored = group.get("format", fields.get("format"))
        rules.append(Rule(targets, None if group.get("weights") is None else _compressed(group, stored)))
    return Scheme("compressed-tensors", tuple(rules), fields.patterns("ignore"))


_STORED_AS = {
    ("int", 4): ("pack-quantized",),
    ("int", 8): ("pack-quantized", "int-quantized", "naive-quantized"),
    ("float", 8): ("float-quantized", "naive-quantized"),
}


def _compressed(group: _Fields, stored: Any) -> Format:
    weights = group.inner("weights")
    kind = (weights.one_of("type", "int", "int", "float"), weights.one_of("num_bits", None, 4, 8))
    if kind not in _STORED_AS:
        raise weights.refusal("num_bits", f"of type {kind[0]!r} only int 4, int 8 and float 8 are read")
    if stored not in _STORED_AS[kind]:
        raise CheckpointError(
            f"the quantization config ({group.method}) stores {kind[0]} {kind[1]} as {stored!r}; it must be "
            f"{' or '.join(_STORED_AS[kind])}."
        )
    if weights.get("dynamic", False):
        raise weights.refusal("dynamic", "weights have scales of their own; it must be false")
    size, rows = 0, 1
    match weights.get("strategy"):
        case "group":
            size = weights.group()
            if not size:
                raise weights.refusal("group_size", f"it must be one of {', '.join(map(str, GROUPS))}")
        case "channel":
            pass
        case "tensor":
            rows = 0
        case "block":
            if weights.get("block_structure") != [128, 128] or kind != ("float", 8):
                raise weights.refusal("block_structure", "it must be [128, 128], with float 8")
            size = rows = 128
        case _:
            raise weights.refusal("strategy", "it must be 'group', 'channel', 'tensor' or 'block'")
    if weights.get("group_size") not in (None, -1) and weights.get("strategy") in ("channel", "tensor"):
        raise weights.refusal("group_size", f"strategy {weights.get('strategy')!r} has no groups; one of both is wrong")
    name = "fp8" if kind[0] == "float" else f"int{kind[1]}"
    zeros = not weights.one_of("symmetric", True, True, False)
    if zeros and name == "fp8":
        raise weights.refusal("symmetric", "floats have no zero points; it must be true")
    order = weights.one_of("actorder", None, None, False, True, "group", "dynamic", "weight", "static")
    layout = "packed" if stored == "pack-quantized" else "scaled"
    if order in (True, "group", "dynamic"):
        if layout != "packed" or not size:
            raise weights.refusal("actorder", "only packed weights with groups have an order of columns")
        layout += " ordered"
    inputs = _inputs(group)
    rounds = (
        (name == "int8" and not size and not zeros and inputs == ("int", "token"))
        or (name == "fp8" and not size and inputs in (("float", "token"), ("float", "tensor")))
        or (name == "fp8" and size == rows == 128 and inputs == ("float", "group"))
    )
    return Format(name, size, rows, zeros, layout, name if rounds else "")


def _inputs(group: _Fields) -> tuple[str, str] | None:
    """Type and strategy of activations that are to have 8 bits without zero points, each token by its own range as it
    comes; floats also where a scale for all tokens was measured. None for what else there is.
    """
    if group.get("input_activations") is None:
        return None
    inputs = group.inner("input_activations")
    strategy, dynamic = inputs.get("strategy"), inputs.one_of("dynamic", False, False, True, "local")
    if strategy == "token" and not dynamic:
        raise inputs.refusal("dynamic", "strategy 'token' knows its scales when tokens come only; it must be true")
    kind = inputs.get("type", "int")
    if (inputs.get("num_bits", 8), inputs.get("symmetric", True)) != (8, True):
        return None
    if strategy == "group" and inputs.get("group_size") != 128:
        return None
    if dynamic is not True and (kind, strategy) != ("float", "tensor"):
        return None
    return str(kind), str(strategy)


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], module) is not None
        except re.error as error:
            raise CheckpointError(
                f"{pattern!r} in the quantization config is no regular expression ({error}); get config.json again."
            ) from error
    return pattern in ("Linear", module)


def _vagueness(target: str) -> int:
    return 2 if target == "Linear" else 1 if target.startswith("re:") else 0


_READERS = {
    "awq": _awq,
    "gptq": _gptq,
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "mxfp4": _mxfp4,
}
