"""Weights of cells from safetensors files and from plain state dicts of torch.

    load_weights(cell, "model.safetensors", {"": "encoder.rnn", "embedding": "encoder.words"})

reads `weight_ih_l0` of a cell from `encoder.rnn.weight_ih_l0` and `embedding.weight` from `encoder.words.weight`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from cellar.core.errors import CheckpointError
from cellar.models.pickled import read_pickled

# Parameters of torch's recurrent modules that our cells lack: what they would mean, if they were left out silently.
_REFUSED = {
    "_reverse": "a second direction, but a cell reads forwards only; use a unidirectional model",
    "weight_hr_l": "projected states (proj_size), which cells have not; use a model without",
}


def load_weights(
    module: nn.Module, source: str | Path | Mapping[str, Tensor], names: Mapping[str, str] | None = None
) -> None:
    """Fill all parameters of a module, in its own dtype and on its device.

    `source` is a file (.safetensors, or a state dict that `torch.save` wrote, which must hold tensors alone) or a
    mapping. `names`: prefix of a name in the module -> prefix in the source; the longest that fits is taken.
    Raises CheckpointError for a file that cannot be read, a parameter that is missing or has another shape, and for
    what a cell cannot compute: other directions or layers than the module has.
    """
    where, tensors = _read(source)
    expected = {name: _stored(name, names or {}) for name in module.state_dict()}
    missing = [stored for stored in expected.values() if stored not in tensors]
    if missing:
        raise CheckpointError(
            f"{where} has no {missing[0]}; it has {_some(tensors)}. Give `names` if the source names them otherwise."
        )
    _check_nothing_is_left(where, set(expected.values()), tensors)
    found = module.state_dict()
    for name, stored in expected.items():
        target, given = found[name], tensors[stored]
        if target.shape != given.shape:
            raise CheckpointError(
                f"{stored} of {where} has shape {list(given.shape)}, but {name} is {list(target.shape)}; "
                "make the cell with the sizes of the source."
            )
    with torch.no_grad():
        for name, stored in expected.items():
            found[name].copy_(tensors[stored])


def _stored(name: str, names: Mapping[str, str]) -> str:
    """The name in the source: `names` maps whole words between dots."""
    fitting = [ours for ours in names if not ours or name == ours or name.startswith(ours + ".")]
    if not fitting:
        return name
    ours = max(fitting, key=len)
    rest = name[len(ours) :].removeprefix(".")
    return ".".join(part for part in (names[ours], rest) if part)


def _check_nothing_is_left(where: str, used: set[str], tensors: Mapping[str, Tensor]) -> None:
    """Refuse a recurrent module of which a part would be left out."""
    stems = {name.rsplit(".", 1)[0] if "." in name else "" for name in used if "weight_hh_l" in name}
    for name in tensors:
        stem, _, last = name.rpartition(".")
        if name in used or stem not in stems:
            continue
        for sign, meaning in _REFUSED.items():
            if sign in last:
                raise CheckpointError(f"{where} has {name}: {meaning}.")
        if last.startswith(("weight_ih_l", "weight_hh_l", "bias_ih_l", "bias_hh_l")):
            raise CheckpointError(
                f"{where} has {name}, which the cell has no place for; make it with as many layers, and with biases."
            )


def _read(source: str | Path | Mapping[str, Tensor]) -> tuple[str, Mapping[str, Tensor]]:
    if isinstance(source, Mapping):
        return "the state dict", source
    path = Path(source)
    if not path.is_file():
        raise CheckpointError(f"{path} is not a file; give a .safetensors file or a state dict saved by torch.")
    if path.suffix == ".safetensors":
        return str(path), _safetensors(path)
    return str(path), read_pickled(path)


def _safetensors(path: Path) -> Mapping[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is truncated or damaged ({error}); get it again.") from error


def _some(tensors: Mapping[str, Tensor]) -> str:
    names = sorted(tensors)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "no tensors"
