"""vLLM's module paths: `from engine.v1.engine.async_llm import AsyncLLM` imports Quire's own class.

These modules have no files: `VllmPathFinder` makes them from a table. A name is imported when it is
asked for, so that one without torch loads none.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

#: Module -> names of it that these paths have, besides those of `engine` itself.
NAMES = {
    "engine.contract.plugins": "IOProcessor LoRAResolver LoRAResolverRegistry",
    "engine.contract.stat_loggers": "StatLogger",
    "engine.contract.unavailable": "LoggingStatLogger PrometheusStatLogger RayPrometheusStatLogger",
    "engine.model_loader.vllm_config": (
        "CacheConfig DecodingConfig DeviceConfig LoRAConfig ModelConfig ParallelConfig "
        "SchedulerConfig"
    ),
    "engine.models.interface": "SupportsMultiModal",
    "engine.models.supports_lora": "SupportsLoRA",
    "engine.multimodal.registry": (
        "DummyDataFactory INPUT_REGISTRY ImagePlugin InputContext InputProcessor "
        "InputRegistry LLMInputs"
    ),
    "engine.offline.compat": (
        "AttentionConfig CompilationConfig SequenceData UsageContext init_logger random_uuid "
        "set_random_seed"
    ),
    "engine.offline.outputs": "ClassificationOutput EmbeddingOutput PoolingOutput ScoringOutput",
    "engine.worker.gpu.graph_dispatcher": "CUDAGraphMode",
    "kernels.attention.registry": "AttentionBackendEnum register_backend",
}
#: vLLM's earlier name or its base class -> the name here.
ALIASES = {"StatLoggerBase": "StatLogger", "SupportsVision": "SupportsMultiModal"}
#: vLLM's path below its package -> names.
PATHS = {
    "attention.backends.registry": "AttentionBackendEnum register_backend",
    "config": (
        "AttentionConfig CUDAGraphMode CacheConfig CompilationConfig DecodingConfig "
        "DeviceConfig LoRAConfig ModelConfig ParallelConfig PoolerConfig SchedulerConfig "
        "VllmConfig"
    ),
    "engine.arg_utils": "AsyncEngineArgs EngineArgs",
    "engine.async_llm_engine": "AsyncLLMEngine",
    "engine.llm_engine": "LLMEngine",
    "engine.metrics": (
        "LoggingStatLogger PrometheusStatLogger RayPrometheusStatLogger StatLoggerBase"
    ),
    "entrypoints.llm": "LLM",
    "inputs": (
        "EmbedsPrompt INPUT_REGISTRY InputContext InputRegistry LLMInputs PromptInputs "
        "PromptStrictInputs PromptType TextPrompt TokensPrompt"
    ),
    "inputs.registry": "DummyDataFactory InputContext InputProcessor InputRegistry",
    "logger": "init_logger",
    "lora.request": "LoRARequest",
    "lora.resolver": "LoRAResolver LoRAResolverRegistry",
    "model_executor.model_loader.tensorizer": (
        "TensorizerArgs TensorizerConfig tensorize_vllm_model"
    ),
    "model_executor.models": "ModelRegistry",
    "model_executor.models.interfaces": "SupportsLoRA SupportsMultiModal SupportsVision",
    "multimodal.image": "ImagePlugin",
    "outputs": (
        "ClassificationOutput ClassificationRequestOutput CompletionOutput EmbeddingOutput "
        "EmbeddingRequestOutput PoolingOutput PoolingRequestOutput RequestOutput "
        "ScoringOutput ScoringRequestOutput"
    ),
    "plugins.io_processors.interface": "IOProcessor",
    "pooling_params": "PoolingParams",
    "sampling_params": "BeamSearchParams RequestOutputKind SamplingParams StructuredOutputsParams",
    "sequence": "RequestMetrics SequenceData",
    "usage.usage_lib": "UsageContext",
    "utils": "FlexibleArgumentParser random_uuid",
    "utils.argparse_utils": "FlexibleArgumentParser",
    "utils.torch_utils": "set_random_seed",
    "v1.attention.backends.registry": "AttentionBackendEnum register_backend",
    "v1.engine.async_llm": "AsyncLLM",
    "v1.engine.llm_engine": "LLMEngine",
    "v1.metrics.loggers": "LoggingStatLogger PrometheusStatLogger StatLogger StatLoggerBase",
    "v1.metrics.ray_wrappers": "RayPrometheusStatLogger",
    "v1.metrics.reader": "Counter Gauge Histogram Metric Vector",
    "v1.sample.logits_processor": (
        "AdapterLogitsProcessor BatchUpdate LogitsProcessor MoveDirectionality "
        "RequestLogitsProcessor"
    ),
    "v1.sample.logits_processor.builtin": "process_dict_updates",
    "v1.sample.logits_processor.interface": "BatchUpdate LogitsProcessor MoveDirectionality",
}


#: Packages of the engine in which some of these paths are.
_WITH_FILES = {"entrypoints", "lora", "multimodal"}


def _packages() -> set[str]:
    """Packages of these paths that have no files."""
    parts = [path.split(".") for path in PATHS]
    packages = {".".join(path[:count]) for path in parts for count in range(1, len(path))}
    return packages - _WITH_FILES


_MODULES = {f"engine.{path}" for path in {*PATHS, *_packages()}}
_HOMES = {name: module for module, names in NAMES.items() for name in names.split()}


class VllmPathFinder(MetaPathFinder, Loader):
    """Finds the modules of `PATHS`, and the packages above them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None for any other module."""
        return ModuleSpec(fullname, self, is_package=True) if fullname in _MODULES else None

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its names."""
        path = module.__name__.removeprefix("engine.")
        names = PATHS.get(path, "").split()

        def get_name(name: str) -> Any:
            if name not in names:
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            ours = ALIASES.get(name, name)
            return getattr(import_module(_HOMES.get(ours, "engine")), ours)

        fields = {"__all__": names, "__getattr__": get_name, "__dir__": lambda: names}
        vars(module).update(fields, __doc__=f"Names of `vllm.{path}`.")


def install() -> None:
    """Have Python find the modules of `PATHS`, before folders that an older version has left."""
    if not any(isinstance(finder, VllmPathFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, VllmPathFinder())
