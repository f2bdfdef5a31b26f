"""Collecting the tensors of a model's layers: norms and matrices with their biases, under a checkpoint's names."""

from __future__ import annotations

from dataclasses import dataclass, field

from cellar.core.specs import HeadRows, TensorSpec


@dataclass
class LayerTensors:
    """The `tensors` of one layer, or of the head, in the order of use; `prefix` is that of their names as stored.

    `rows`: how the rows of q, k and v are stored, if not as the model takes them.
    """

    prefix: str
    hidden_size: int
    dtype: str
    rows: HeadRows | None = None
    tensors: list[TensorSpec] = field(default_factory=list)

    def norm(self, name: str, stored: str, bias: bool = False) -> None:
        """Weights of a norm over the hidden state, and its bias, `name`_bias."""
        self._add(name, (self.hidden_size,), ("embed",), stored + ".weight")
        if bias:
            self._add(name + "_bias", (self.hidden_size,), ("embed",), stored + ".bias")

    def matrix(
        self,
        name: str,
        shape: tuple[int, int],
        axes: tuple[str, str],
        *stored: str,
        bias: bool,
        parts: tuple[int, ...] = (),
    ) -> None:
        """A matrix [out, in] of one or several stored ones, which have `parts` rows (empty: as many each); its bias."""
        self._add(name, shape, axes, *(one + ".weight" for one in stored), parts=parts)
        if bias:
            self._add(name + "_bias", shape[:1], axes[:1], *(one + ".bias" for one in stored), parts=parts)

    def _add(
        self, name: str, shape: tuple[int, ...], axes: tuple[str, ...], *stored: str, parts: tuple[int, ...] = ()
    ) -> None:
        heads = self.rows if axes[0] == "qkv" else None
        names = tuple(self.prefix + one for one in stored)
        self.tensors.append(TensorSpec(name, shape, self.dtype, axes, names, parts=parts, heads=heads))


def head_matrix(embed: TensorSpec, tied: bool) -> TensorSpec:
    """What makes logits of hidden states: the table of words again if it is tied, else `lm_head.weight`."""
    return TensorSpec("lm_head", embed.shape, embed.dtype, embed.axes, embed.stored if tied else ("lm_head.weight",))
