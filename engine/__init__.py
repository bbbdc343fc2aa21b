"""Quire's engine: scheduler, paged KV cache, models. Importing the package loads no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from engine.version import __version__

if TYPE_CHECKING:
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

__all__ = [
    "LLM",
    "AdapterLogitsProcessor",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BatchUpdate",
    "BeamSearchParams",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "Counter",
    "EmbeddingRequestOutput",
    "EmbedsPrompt",
    "EngineArgs",
    "FlexibleArgumentParser",
    "Gauge",
    "Histogram",
    "LLMEngine",
    "LoRARequest",
    "LogitsProcessor",
    "Metric",
    "ModelRegistry",
    "MoveDirectionality",
    "PoolerConfig",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptInputs",
    "PromptStrictInputs",
    "PromptType",
    "RequestLogitsProcessor",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TensorizerArgs",
    "TensorizerConfig",
    "TextPrompt",
    "TokensPrompt",
    "Vector",
    "VllmConfig",
    "__version__",
    "cleanup_dist_env_and_memory",
    "process_dict_updates",
    "tensorize_vllm_model",
]
#: Where all are. They're loaded when they're asked for: many need torch, and the compile worker
#: needs none of them.
_LATER = {
    "engine.contract.lora": ("LoRARequest",),
    "engine.contract.sampling_fields": ("RequestOutputKind",),
    "engine.contract.pooling_params": ("PoolingParams",),
    "engine.contract.sampling_params": ("SamplingParams",),
    "engine.contract.structured_outputs": ("StructuredOutputsParams",),
    "engine.distributed": ("cleanup_dist_env_and_memory",),
    "engine.model_loader.vllm_config": ("VllmConfig",),
    "engine.models.registry": ("ModelRegistry",),
    "engine.offline.async_llm": ("AsyncLLM", "AsyncLLMEngine"),
    "engine.offline.beam_search": ("BeamSearchParams",),
    "engine.offline.engine_args": (
        *("AsyncEngineArgs", "EngineArgs", "FlexibleArgumentParser"),
        "PoolerConfig",
    ),
    "engine.offline.llm": ("LLM",),
    "engine.offline.llm_engine": ("LLMEngine",),
    "engine.offline.metrics": ("Counter", "Gauge", "Histogram", "Metric", "Vector"),
    "engine.offline.outputs": (
        *("CompletionOutput", "RequestMetrics", "RequestOutput"),
        *("ClassificationRequestOutput", "EmbeddingRequestOutput"),
        *("PoolingRequestOutput", "ScoringRequestOutput"),
    ),
    "engine.offline.tensorizer": (*("TensorizerArgs", "TensorizerConfig", "tensorize_vllm_model"),),
    "engine.offline.inputs": (
        *("EmbedsPrompt", "PromptInputs", "PromptStrictInputs", "PromptType"),
        *("TextPrompt", "TokensPrompt"),
    ),
    "engine.sampling.logits_processor": (
        *("AdapterLogitsProcessor", "BatchUpdate", "LogitsProcessor", "MoveDirectionality"),
        *("RequestLogitsProcessor", "process_dict_updates"),
    ),
}


def __getattr__(name: str) -> Any:
    for module, names in _LATER.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'engine' has no attribute {name!r}")
