"""One pipeline stage of a model, as a function over its specs: layers [a, b) of the whole, numbered from 0.

The first stage has the embedding, the last one the last norm and the head; a head that is tied to the embedding is a
tensor of its own there. The result is a spec like any other: it is loaded, made up, packed and sharded as a whole one.
"""

from __future__ import annotations

from dataclasses import replace

from cellar.core.errors import ConfigError
from cellar.core.specs import ModelSpec


def stage_layers(num_layers: int, index: int, count: int) -> range:
    """The layers of stage `index` of `count`: as many on each, or one more on the first ones, since the last has the
    head besides. Raises ConfigError for more stages than layers.
    """
    if not 0 <= index < count:
        raise ConfigError(f"stage {index} is not one of {count}; count from 0 to {count - 1}.")
    if count > num_layers:
        raise ConfigError(f"{num_layers} layers cannot be cut into {count} stages; take at most {num_layers}.")
    each, more = divmod(num_layers, count)

    def first(stage: int) -> int:
        return stage * each + min(stage, more)

    return range(first(index), first(index + 1))


def stage(spec: ModelSpec, index: int, count: int) -> ModelSpec:
    """The spec of stage `index` of `count`; `spec` itself for one stage.

    Raises ConfigError for more stages than layers.
    """
    own = stage_layers(spec.num_layers, index, count)
    if count == 1:
        return spec
    embedding = spec.embedding if index == 0 else ()
    head = spec.head if index == count - 1 else ()
    layers = spec.layers[own.start : own.stop]
    groups = (replace(group, layers=tuple(j - own.start for j in group.layers if j in own)) for group in spec.kv.groups)
    others = [tensor for layer in spec.layers if layer.index not in own for tensor in layer.tensors]
    others += [*(() if embedding else spec.embedding), *(() if head else spec.head)]
    elsewhere = spec.elsewhere | {name for tensor in others for name in tensor.stored}
    if not embedding and not head:
        elsewhere |= {"lm_head.weight"}  # some checkpoints store a tied head, too: who has it compares
    return replace(
        spec,
        num_layers=len(own),
        embedding=embedding,
        layers=tuple(replace(layer, index=layer.index - own.start) for layer in layers),
        head=head,
        kv=replace(spec.kv, groups=tuple(group for group in groups if group.layers)),
        tied_head=False,
        elsewhere=elsewhere,
    )
