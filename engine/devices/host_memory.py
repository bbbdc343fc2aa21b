"""How many KV blocks a replica gets."""

from __future__ import annotations

from engine.contract.config import EngineConfig
from engine.contract.errors import ConfigError
from engine.contract.host_memory import available_memory

GIB = 1 << 30
_MOST_BY_DEFAULT = 4 * GIB


def num_cpu_blocks(
    config: EngineConfig, bytes_per_token: int, most_per_sequence: int, least: int = 1
) -> int:
    """Blocks of the KV pool on a CPU.

    `num_gpu_blocks_override` decides when it's set, then `cpu_kvcache_space`; by default a quarter
    of the free memory, at most 4 GiB. Never more than all sequences at full length could use.

    Args:
        config: the settings.
        bytes_per_token: of the layers that a block holds.
        most_per_sequence: blocks that a sequence of full length takes.
        least: blocks without which no sequence runs at all, one a KV cache group.

    Raises `ConfigError` when fewer than `least` blocks fit.
    """
    if config.num_gpu_blocks_override is not None:
        if config.num_gpu_blocks_override < least:
            raise ConfigError(
                f"num_gpu_blocks_override must be at least {least} for this model, one block for "
                f"each of its KV cache groups; got {config.num_gpu_blocks_override}.",
                param="num_gpu_blocks_override",
            )
        return config.num_gpu_blocks_override
    if config.cpu_kvcache_space is not None:
        space = int(config.cpu_kvcache_space * GIB)
    else:
        space = min(available_memory() // 4, _MOST_BY_DEFAULT)
    blocks = space // (bytes_per_token * config.block_size)
    if blocks < least:
        raise ConfigError(
            f"{space} bytes of KV cache hold {blocks} blocks of {config.block_size} tokens "
            f"({bytes_per_token} bytes a token); this model needs at least {least}.",
            param="cpu_kvcache_space",
        )
    return min(blocks, config.max_num_seqs * most_per_sequence)


def most_states(state_bytes: int) -> int:
    """Sequences whose states fit into a quarter of the free memory; at least one."""
    return max(1, available_memory() // 4 // state_bytes)


def num_counted_blocks(config: EngineConfig, token_budget: int) -> int:
    """Blocks for a model without a KV cache: they take no memory, the scheduler only counts them.

    Enough for two steps, since one may be planned while another runs.
    """
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    return 2 * (-(-token_budget // config.block_size) + config.max_num_seqs)
