"""`ExpertBalancer`: moves experts between ranks according to their load in tokens."""

from __future__ import annotations

import logging
from typing import cast

import torch

from engine.contract.eplb_config import EPLBConfig
from engine.distributed.expert_placement import assign_experts, balancedness
from engine.model_loader.loader import LoadedModel
from engine.models.decoder import NativeDecoder
from kernels.interface import MixtureOfExperts
from kernels.layers import LinearLayer

log = logging.getLogger(__name__)


class ExpertBalancer:
    """All ranks run the same steps and count the same tokens, so each computes the same placement
    independently. The experts of different layers move in different steps, to keep waits short;
    only with more layers than `step_interval` do those of several layers move in one.
    """

    def __init__(self, loaded: LoadedModel, settings: EPLBConfig) -> None:
        self._loaded, self._settings = loaded, settings

    @property
    def _model(self) -> NativeDecoder:
        """The current model: a new one after a sleep that has released its weights."""
        return cast(NativeDecoder, self._loaded.model)

    def _layers(self) -> list[tuple[int, MixtureOfExperts]]:
        return [
            (index, weights.experts)
            for index, weights in enumerate(self._model.weights)
            if weights.experts is not None
        ]

    def begin_step(self, step: int) -> None:
        """Count tokens, or move a layer's experts when it is due. Called on all ranks."""
        layers, interval = self._layers(), self._settings.step_interval
        for index, experts in layers[step % interval :: interval]:
            self._rebalance(index, experts)
        # The window of these layers starts, in the same step on all ranks.
        for _, experts in layers[(step + self._settings.window_size) % interval :: interval]:
            experts.loads[:] = 0

    def _rebalance(self, index: int, experts: MixtureOfExperts) -> None:
        described, shard = experts.layers, self._model.expert_shard
        loads = experts.loads.tolist()
        if described is None or shard is None or not any(loads):
            return
        ranks, previous = shard.ranks, described.owners
        owners = assign_experts(loads, ranks.size, self._settings.num_redundant_experts, previous)
        if balancedness(loads, owners, ranks.size) <= balancedness(loads, previous, ranks.size):
            return
        missing = [
            expert
            for expert, new in enumerate(owners)
            if ranks.rank in new and ranks.rank not in previous[expert]
        ]
        loaded, error = dict[int, tuple[LinearLayer, LinearLayer]](), None
        try:
            loaded = self._model.load_experts(index, missing)
        except Exception as failure:  # other ranks must not move theirs either
            error = failure
        failed = torch.tensor([[float(error is not None)]])
        if ranks.gather(failed, range(ranks.size + 1)).any():
            log.warning("The experts of layer %d stay where they are: %s", index, error)
            return
        experts.move(owners, loaded)
        if ranks.rank == 0:
            log.info(
                "Layer %d: ranks are balanced to %.2f instead of %.2f.",
                index,
                balancedness(loads, owners, ranks.size),
                balancedness(loads, previous, ranks.size),
            )

    def reset(self) -> None:
        """Reset the counts after a failed step: ranks may have counted differently."""
        for _, experts in self._layers():
            experts.loads[:] = 0
