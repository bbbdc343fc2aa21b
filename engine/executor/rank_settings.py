"""Settings of a model that several ranks share, and how each rank derives its own."""

from __future__ import annotations

from dataclasses import replace

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError
from engine.devices.threads import default_num_threads, parse_cpus
from engine.distributed.parallel_state import PIPELINE_PARAM, parse_partition
from engine.models.sharding import PARAM
from kernels import KernelSet


def check_ranks(config: EngineConfig) -> None:
    """Raise `ConfigError` for settings that don't work with several ranks."""
    param = PARAM if config.tensor_parallel_size > 1 else PIPELINE_PARAM
    if config.device not in ("auto", "cpu"):
        raise ConfigError(
            f"{param}={getattr(config, param)} can't be used on the device {config.device}: ranks "
            "share models on CPUs alone.",
            param=param,
        )
    if config.pipeline_parallel_size > 1 and config.pipeline_layer_partition:
        parse_partition(config.pipeline_layer_partition, config.pipeline_parallel_size)
    if any(not isinstance(name, str) for name in config.logits_processors or ()):
        raise ConfigError(
            "logits_processors must be named as module:Class where several ranks share the model.",
            param="logits_processors",
        )


def rank_memory_bytes(config: EngineConfig, ops: KernelSet) -> int:
    """Bytes of memory that the kernels of a stage share. Raises `ConfigError` for other kernels."""
    size = config.tensor_parallel_size
    num_bytes = ops.rank_memory_bytes(size) if size > 1 else 0
    if size > 1 and not num_bytes:
        raise ConfigError(
            f"{PARAM}={size} needs the compiled CPU kernels; {ops.name} runs here: {ops.why}.",
            param=PARAM,
        )
    return num_bytes


def rank_config(config: EngineConfig, rank: int, size: int, ops: KernelSet) -> EngineConfig:
    """The settings of one of `size` ranks of a machine: with its share of the threads, or of the
    CPUs that they are bound to.

    Raises `ConfigError` if there are fewer CPUs than ranks.
    """
    bind = config.cpu_threads_bind
    if bind in ("auto", "nobind"):
        count = max(1, (config.num_threads or default_num_threads(ops)) // size)
        return replace(config, device="cpu", num_threads=count, cpu_threads_bind="nobind")
    cpus = parse_cpus(bind)
    count = len(cpus) // size
    if not count:
        raise ConfigError(
            f"cpu_threads_bind must name a CPU for each of {size} ranks; got {bind!r}.",
            param="cpu_threads_bind",
        )
    share = cpus[rank * count : (rank + 1) * count]
    threads = None if config.num_threads is None else max(1, config.num_threads // size)
    return replace(
        config,
        device="cpu",
        num_threads=threads,
        cpu_threads_bind=",".join(str(cpu) for cpu in share),
    )
