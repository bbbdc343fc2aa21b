"""What drafts ask of the steps that a GPU records: sizes, and states from between layers."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from engine.contract.config import EngineConfig
from engine.contract.speculative import SpeculativeConfig
from engine.models.decoder import NativeDecoder
from engine.models.interface import EngineModel
from engine.models.taps import TappedForward
from engine.worker.cuda.forward import Run


def query_len(config: EngineConfig) -> int:
    """Tokens of a sequence whose drafts a step checks; 1 where there are none.

    Steps that are planned ahead check no drafts.
    """
    if not config.speculative_config or config.plans_ahead(True):
        return 1
    return 1 + SpeculativeConfig.from_mapping(config.speculative_config).num_speculative_tokens


def draft_settings(config: EngineConfig, token_budget: int) -> EngineConfig:
    """Those by which a draft model's steps are recorded, beside a model with `config`.

    It checks no drafts: a draft is a decode of one token a sequence, and where it reads what the
    model said since, sequences have different numbers. Of the operator's sizes it has those that
    its budget of tokens allows, and no graphs where that is none.
    """
    sizes = config.cudagraph_capture_sizes
    if sizes is not None:
        sizes = [size for size in sizes if size <= token_budget]
    eager = config.enforce_eager or sizes == []
    return replace(
        config, speculative_config=None, cudagraph_capture_sizes=sizes or None, enforce_eager=eager
    )


def tapped(model: EngineModel, taps: tuple[int, ...]) -> Run:
    """The model's forward pass, with what drafts read of these layers beside it."""
    return TappedForward(cast(NativeDecoder, model), taps) if taps else model.forward
