# ruff: noqa: F401 - names for type checkers
"""Quire's engine: scheduler, paged KV cache, models. Importing the package loads no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from engine import vllm_paths
from engine.version import __version__

if TYPE_CHECKING:  # for editors and type checkers: what `_NAMES` loads
    from engine.contract.lora import LoRARequest
    from engine.contract.pooling_params import PoolingParams
    from engine.contract.sampling_fields import RequestOutputKind
    from engine.contract.sampling_params import SamplingParams
    from engine.contract.structured_outputs import StructuredOutputsParams
    from engine.distributed import cleanup_dist_env_and_memory
    from engine.model_loader.vllm_config import VllmConfig
    from engine.models.registry import ModelRegistry
    from engine.offline.async_llm import AsyncLLM, AsyncLLMEngine
    from engine.offline.beam_search import BeamSearchParams
    from engine.offline.engine_args import (
        AsyncEngineArgs,
        EngineArgs,
        FlexibleArgumentParser,
        PoolerConfig,
    )
    from engine.offline.inputs import (
        EmbedsPrompt,
        PromptInputs,
        PromptStrictInputs,
        PromptType,
        TextPrompt,
        TokensPrompt,
    )
    from engine.offline.llm import LLM
    from engine.offline.llm_engine import LLMEngine
    from engine.offline.metrics import Counter, Gauge, Histogram, Metric, Vector
    from engine.offline.outputs import (
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingRequestOutput,
        PoolingRequestOutput,
        RequestMetrics,
        RequestOutput,
        ScoringRequestOutput,
    )
    from engine.offline.tensorizer import TensorizerArgs, TensorizerConfig, tensorize_vllm_model
    from engine.sampling.logits_processor import (
        AdapterLogitsProcessor,
        BatchUpdate,
        LogitsProcessor,
        MoveDirectionality,
        RequestLogitsProcessor,
        process_dict_updates,
    )

#: Where the names are. They're loaded when they're asked for: many need torch, and the compile
#: worker needs none of them.
_NAMES = {
    "engine.contract.lora": "LoRARequest",
    "engine.contract.sampling_fields": "RequestOutputKind",
    "engine.contract.pooling_params": "PoolingParams",
    "engine.contract.sampling_params": "SamplingParams",
    "engine.contract.structured_outputs": "StructuredOutputsParams",
    "engine.distributed": "cleanup_dist_env_and_memory",
    "engine.model_loader.vllm_config": "VllmConfig",
    "engine.models.registry": "ModelRegistry",
    "engine.offline.async_llm": "AsyncLLM AsyncLLMEngine",
    "engine.offline.beam_search": "BeamSearchParams",
    "engine.offline.engine_args": "AsyncEngineArgs EngineArgs FlexibleArgumentParser PoolerConfig",
    "engine.offline.llm": "LLM",
    "engine.offline.llm_engine": "LLMEngine",
    "engine.offline.metrics": "Counter Gauge Histogram Metric Vector",
    "engine.offline.outputs": (
        "CompletionOutput RequestMetrics RequestOutput ClassificationRequestOutput "
        "EmbeddingRequestOutput PoolingRequestOutput ScoringRequestOutput"
    ),
    "engine.offline.tensorizer": "TensorizerArgs TensorizerConfig tensorize_vllm_model",
    "engine.offline.inputs": (
        "EmbedsPrompt PromptInputs PromptStrictInputs PromptType TextPrompt TokensPrompt"
    ),
    "engine.sampling.logits_processor": (
        "AdapterLogitsProcessor BatchUpdate LogitsProcessor MoveDirectionality "
        "RequestLogitsProcessor process_dict_updates"
    ),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = ["__version__", *sorted(_HOMES)]
vllm_paths.install()


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'engine' has no attribute {name!r}")
