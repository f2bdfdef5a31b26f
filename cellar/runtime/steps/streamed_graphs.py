"""Steps of few tokens whose weights are streamed and whose KV lies on the device: a graph for each layer."""

from __future__ import annotations

import torch

from cellar.models.model import Hidden
from cellar.runtime.steps.fixed_inputs import FixedInputs
from cellar.runtime.steps.forward import Forward, Gate
from cellar.runtime.steps.inputs import StepInputs
from cellar.runtime.steps.recorded_layers import RecordedLayers
from cellar.runtime.steps.rows import DeviceRows


class StreamedGraphs:
    """Steps of up to as many tokens as `recorded` takes, of up to `most_rows` rows."""

    def __init__(
        self, forward: Forward, recorded: RecordedLayers, rows: DeviceRows, most_rows: int, device: torch.device
    ) -> None:
        self._forward = forward
        self._recorded = recorded
        self._inputs = FixedInputs(forward, rows, most_rows, recorded.most, device)

    def hidden(self, inputs: StepInputs, gate: Gate | None = None) -> Hidden | None:
        """Start a step; -> the hidden state of its tokens, which the next step overwrites. `gate` is called with each
        layer's number before it. None if it has too many tokens, or attends to too much: then nothing was started.
        """
        count = inputs.num_tokens
        if not self._recorded.takes(count):
            return None
        size, decodes = self._recorded.size(count), count == len(inputs.row)
        limits = self._inputs.decode_limits(size) if decodes else self._inputs.prompt_limits(size)
        lists = self._inputs.lists(inputs)
        if not self._inputs.holds(limits, lists):
            return None
        self._inputs.send(inputs, size, lists)
        placed = self._inputs.placed(size, limits, given_too=len(inputs.feed) < count)
        h = self._forward.run(*placed, gate=gate, kind="decodes" if decodes else "prompts")
        return h.first(count)
