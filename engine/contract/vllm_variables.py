"""vLLM's environment variables: those with a counterpart take effect, the others are reported."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from engine.contract.errors import ConfigError


@dataclass(frozen=True)
class Variable:
    """One variable.

    Attributes:
        name: vLLM's. ours: flags (`--x`), variables (`X`) or commands (`manage.py x`) with the same
            effect, comma-separated; "" for none.
        reason: a note, or why there is none.
        acts: whether it has the effect of the first of `ours`: a variable of Quire's, or the flag
            of an engine setting, unless these are set.
    """

    name: str
    ours: str = ""
    reason: str = ""
    acts: bool = False

    @property
    def counterpart(self) -> str:
        """The first of `ours`."""
        return self.ours.partition(", ")[0]


_BUILD = "kernels are built at first use, for the CPU that is there; nothing is installed with them"
_MACHINE = "read by the library that it belongs to, here as well"
_ONE = "ranks exchange tensors by shared memory, and by TCP between machines"
_NONE_SENT = "no usage is ever sent anywhere"
_OPENVINO = "on the device of packages/openvino alone, where the setting is at its default"

VARIABLES: tuple[Variable, ...] = (
    Variable("VLLM_TARGET_DEVICE", "--device", "one installation runs on each device"),
    Variable("MAX_JOBS", "", _BUILD),
    Variable("NVCC_THREADS", "", _BUILD),
    Variable("VLLM_USE_PRECOMPILED", "", _BUILD),
    Variable("VLLM_INSTALL_PUNICA_KERNELS", "", _BUILD),
    Variable("CMAKE_BUILD_TYPE", "", _BUILD),
    Variable("VERBOSE", "", _BUILD),
    Variable(
        "VLLM_CPU_AVX512BF16", "", "the CPU's instructions are looked up when kernels are built"
    ),
    Variable("VLLM_CONFIG_ROOT", "QUIRE_DATA_DIR", "where an instance keeps its files"),
    Variable("VLLM_HOST_IP", "REDIS_URL", "processes meet in Redis, whatever their hosts"),
    Variable("VLLM_PORT", "REDIS_URL", "processes meet in Redis; the API's port is `--port`"),
    Variable(
        "VLLM_USE_MODELSCOPE",
        "VLLM_USE_MODELSCOPE",
        "models come by the package `modelscope`",
        acts=True,
    ),
    Variable("VLLM_INSTANCE_ID", "QUIRE_KEY_PREFIX", "keeps instances on one Redis apart"),
    Variable("VLLM_RINGBUFFER_WARNING_INTERVAL", "", "there is no ring buffer"),
    Variable("VLLM_PP_LAYER_PARTITION", "--pipeline-layer-partition", acts=True),
    Variable("CUDA_HOME", "CUDA_HOME", _MACHINE),
    Variable("VLLM_NCCL_SO_PATH", "", _ONE),
    Variable("LD_LIBRARY_PATH", "LD_LIBRARY_PATH", _MACHINE),
    Variable("VLLM_USE_TRITON_FLASH_ATTN", "--attention-backend"),
    Variable("LOCAL_RANK", "", _ONE),
    Variable("CUDA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", _MACHINE),
    Variable(
        "VLLM_ENGINE_ITERATION_TIMEOUT_S", "", "`/health` is red once a replica's steps stand still"
    ),
    Variable(
        "VLLM_API_KEY",
        "QUIRE_API_KEYS, --api-key",
        "keys are made by `quire create_key`, too",
        acts=True,
    ),
    Variable("S3_ACCESS_KEY_ID", "S3_ACCESS_KEY_ID", "of `tensorizer_uri` in a bucket", acts=True),
    Variable(
        "S3_SECRET_ACCESS_KEY", "S3_SECRET_ACCESS_KEY", "of `tensorizer_uri` in a bucket", acts=True
    ),
    Variable("S3_ENDPOINT_URL", "S3_ENDPOINT_URL", "of `tensorizer_uri` in a bucket", acts=True),
    Variable("VLLM_USAGE_STATS_SERVER", "", _NONE_SENT),
    Variable("VLLM_NO_USAGE_STATS", "", _NONE_SENT),
    Variable("VLLM_DO_NOT_TRACK", "", _NONE_SENT),
    Variable("DO_NOT_TRACK", "", _NONE_SENT),
    Variable("VLLM_USAGE_SOURCE", "", _NONE_SENT),
    Variable("VLLM_CONFIGURE_LOGGING", "QUIRE_LOG_STYLE"),
    Variable("VLLM_LOGGING_CONFIG_PATH", "QUIRE_LOGGING_CONFIG", acts=True),
    Variable("VLLM_LOGGING_LEVEL", "QUIRE_LOG_LEVEL", acts=True),
    Variable("VLLM_TRACE_FUNCTION", "", "use `LLM.start_profile`, or py-spy on the process"),
    Variable("VLLM_ATTENTION_BACKEND", "--attention-backend", acts=True),
    Variable("VLLM_BATCH_INVARIANT", "--batch-invariant", acts=True),
    Variable("VLLM_CPU_OMP_THREADS_BIND", "--cpu-threads-bind", acts=True),
    Variable("VLLM_CPU_KVCACHE_SPACE", "--cpu-kvcache-space", "GiB, as there", acts=True),
    *(
        Variable(name, f"{name}, {flag}", _OPENVINO, acts=True)
        for name, flag in (
            ("VLLM_OPENVINO_KVCACHE_SPACE", "--cpu-kvcache-space"),
            ("VLLM_OPENVINO_CPU_KV_CACHE_PRECISION", "--kv-cache-dtype"),
            ("VLLM_OPENVINO_ENABLE_QUANTIZED_WEIGHTS", "--quantization"),
        )
    ),
    Variable("VLLM_USE_RAY_COMPILED_DAG", "", "there is no Ray"),
    Variable("VLLM_RAY_BUNDLE_INDICES", "", "there is no Ray"),
    Variable("VLLM_USE_V1", "", "there is one engine"),
    Variable("VLLM_WORKER_MULTIPROC_METHOD", "", _ONE),
    Variable(
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        "",
        "`LLM` runs in its caller's process, a served engine in its own",
    ),
    Variable("VLLM_IMAGE_FETCH_TIMEOUT", "QUIRE_MEDIA_FETCH_TIMEOUT_S", acts=True),
    Variable(
        "VLLM_MEDIA_LOADING_THREAD_COUNT",
        "QUIRE_MEDIA_FETCH_THREADS",
        "processes of gateways prepare media",
        acts=True,
    ),
    Variable(
        "VLLM_XLA_CACHE_PATH",
        "VLLM_XLA_CACHE_PATH",
        "folder of compiled programs, on the device of packages/jax-cpu alone",
        acts=True,
    ),
    Variable(
        "VLLM_FUSED_MOE_CHUNK_SIZE", "--max-num-batched-tokens", "a step's tokens are one chunk"
    ),
    Variable("VLLM_PLUGINS", "QUIRE_PLUGINS", acts=True),
    Variable(
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
        "QUIRE_ADAPTER_DIRS",
        "operators may always, from the folders that it names",
    ),
    Variable(
        "VLLM_LORA_RESOLVER_CACHE_DIR",
        "QUIRE_LORA_RESOLVER_CACHE_DIR",
        "without `VLLM_ALLOW_RUNTIME_LORA_UPDATING`: naming the folder is enough",
        acts=True,
    ),
    Variable(
        "VLLM_LORA_RESOLVER_HF_REPO_LIST",
        "QUIRE_LORA_RESOLVER_HF_REPO_LIST",
        "a revision may follow: `owner/name@revision`",
        acts=True,
    ),
    Variable("HF_TOKEN", "HF_TOKEN", _MACHINE),
    Variable("HUGGING_FACE_HUB_TOKEN", "HF_TOKEN", "its old name"),
    Variable("LD_PRELOAD", "LD_PRELOAD", _MACHINE),
    Variable("CUDA_LAUNCH_BLOCKING", "CUDA_LAUNCH_BLOCKING", _MACHINE),
    Variable("NCCL_DEBUG", "", _ONE),
    Variable("NCCL_SOCKET_IFNAME", "", _ONE),
    Variable("GLOO_SOCKET_IFNAME", "", _ONE),
    Variable("MASTER_ADDR", "", _ONE),
    Variable(
        "OPENAI_API_KEY", "OPENAI_API_KEY", "the client library's: a key of Quire's goes there"
    ),
)


def use_vllm_variables(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set unset variables of Quire to vLLM's variables of the same meaning."""
    for variable in VARIABLES:
        value = environment.get(variable.name)
        if value and variable.acts and not variable.counterpart.startswith("--"):
            environment.setdefault(variable.counterpart, value)


def settings_from_variables(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the engine settings from vLLM's variables. Raises `ConfigError`."""
    settings: dict[str, Any] = {}
    for variable in VARIABLES:
        value = environment.get(variable.name)
        if value and variable.acts and variable.counterpart.startswith("--"):
            setting = variable.counterpart.removeprefix("--").replace("-", "_")
            settings[setting] = _PARSERS.get(setting, _text)(variable.name, value)
    return {name: value for name, value in settings.items() if value is not None}


def unused_variables(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return a sentence for each variable of vLLM that is set and has no effect."""
    by_name = {variable.name: variable for variable in VARIABLES}
    sentences = []
    for name in sorted(name for name in environment if name.startswith("VLLM_")):
        variable = by_name.get(name, Variable(name))
        if not variable.acts:
            instead = f" Quire has {variable.ours}." if variable.ours else ""
            suffix = f": {variable.reason}" if variable.reason else ""
            sentences.append(f"{name} changes nothing{suffix}.{instead}")
    return sentences


def _gibibytes(name: str, value: str) -> float | None:
    """0 is vLLM's own default."""
    try:
        return float(value) or None
    except ValueError:
        raise ConfigError(f"{name} must be a number of GiB; got {value!r}.", param=name) from None


def _switch(name: str, value: str) -> bool:
    if value.lower() not in ("0", "1", "true", "false"):
        raise ConfigError(f"{name} must be 0 or 1; got {value!r}.", param=name)
    return value.lower() in ("1", "true")


def _text(name: str, value: str) -> str:
    return value


#: By the engine setting.
_PARSERS = {"cpu_kvcache_space": _gibibytes, "batch_invariant": _switch}
