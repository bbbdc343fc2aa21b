"""`DeviceForward`: a model's forward pass on a GPU, by graph where there is one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.models.context import AttentionContext
from engine.worker.cuda.dispatcher import Dispatcher, Key
from engine.worker.cuda.graphs import AttentionBreaks, Recording, no_garbage
from engine.worker.cuda.inputs import Feed, Staged, StaticInputs, stage
from engine.worker.cuda.modes import RuntimeMode
from kernels.lora_slots import LoraSlots

log = logging.getLogger(__name__)

Run = Callable[[Tensor, AttentionContext], Tensor]


class DeviceForward:
    """Moves a step's inputs to the device and runs the model, in graphs once they are captured.

    Args:
        run: the model's forward.
        device: where it runs.
        dispatcher, inputs: None without graphs.
        breaks: stands for the model's attention; None where that is called directly.
        slots: of the model's adapters; None: rows of adapters are told apart by the model itself.
    """

    def __init__(
        self,
        run: Run,
        device: torch.device,
        dispatcher: Dispatcher | None = None,
        inputs: StaticInputs | None = None,
        breaks: AttentionBreaks | None = None,
        slots: LoraSlots | None = None,
    ) -> None:
        self._run, self._device = run, device
        self._dispatcher, self._inputs, self._breaks = dispatcher, inputs, breaks
        self._slots = slots
        self._recordings: dict[Key, Recording] = {}

    @property
    def num_wanted(self) -> int:
        """Graphs that are still to be captured, or were."""
        return len(self._dispatcher.keys) if self._dispatcher is not None else 0

    @property
    def num_captured(self) -> int:
        """Graphs that there are."""
        return len(self._recordings)

    @property
    def static_bytes(self) -> int:
        """What the graphs' input buffers take."""
        return self._inputs.nbytes if self._inputs is not None else 0

    @torch.inference_mode()
    def capture(self, has_room: Callable[[], bool] = lambda: True, *, quiet: bool = False) -> int:
        """Record all graphs, largest first, while `has_room`; how many there are then."""
        dispatcher, inputs, breaks = self._dispatcher, self._inputs, self._breaks
        if dispatcher is None or inputs is None or breaks is None:
            return 0
        left_out: list[int] = []
        with no_garbage():
            for key in dispatcher.keys:
                if has_room():
                    self._recordings[key] = self._record(key, inputs, breaks)
                else:
                    left_out.append(key[1].num_tokens)
                    dispatcher.drop(key)
        if quiet:
            return len(self._recordings)
        if left_out:
            log.warning("CUDA graphs: no memory for those of %s tokens", sorted(set(left_out)))
        log.info("CUDA graphs: %d captured, %s", len(self._recordings), dispatcher.mode.name)
        return len(self._recordings)

    def _record(self, key: Key, inputs: StaticInputs, breaks: AttentionBreaks) -> Recording:
        """One graph, of a batch that is harmless to run."""
        mode, descriptor = key
        token_ids, context = inputs.rehearse(descriptor)
        # Once eagerly: kernels are compiled and workspaces made outside of the recording.
        self._run(token_ids, context)
        return breaks.record(self._run, token_ids, context, piecewise=mode is RuntimeMode.PIECEWISE)

    def __call__(self, token_ids: Tensor, context: AttentionContext) -> Tensor:
        """Hidden states of `context.logits_rows`; the arguments are on the host."""
        return self.run(*self.stage(token_ids, context))

    def stage(
        self,
        token_ids: Tensor,
        context: AttentionContext,
        feed: Feed | None = None,
        more: Sequence[np.ndarray] = (),
    ) -> tuple[Key | None, Staged]:
        """Choose a graph, and send the inputs to the device in one copy; waits for nothing."""
        key = self._key(token_ids, context)
        to = None if key is None else key[1]
        size = len(token_ids) if to is None else to.num_tokens
        lora = context.adapters.sorted(self._slots, size, padded=to is not None)
        return key, stage(token_ids, context, self._device, to, feed, more, lora)

    def run(self, key: Key | None, step: Staged) -> Tensor:
        """Run what was staged; hidden states of the rows whose logits are wanted."""
        context, count = step.context, len(step.context.positions)
        if self._breaks is not None:
            self._breaks.batch = context
        if key is None or self._inputs is None:
            return self._run(step.token_ids, context)
        self._inputs.fill(step, key[1])
        hidden = self._recordings[key].replay()
        if context.logits_rows is not None:
            return hidden[context.logits_rows]
        return hidden[:count]

    def _key(self, token_ids: Tensor, context: AttentionContext) -> Key | None:
        """The recording that serves the batch, if any does."""
        if self._dispatcher is None or context.embeds is not None:
            return None
        counts = context.query_start_loc.diff()
        longest = int(counts.max()) if len(counts) else 0
        adapted = self._slots is not None and bool(context.adapters)
        key = self._dispatcher.dispatch(len(token_ids), len(counts), longest, adapted=adapted)
        return key if key in self._recordings else None
