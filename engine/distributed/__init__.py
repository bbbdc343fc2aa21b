"""Names of `vllm.distributed`."""

import gc

import torch


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Free what a deleted engine leaves: its reference cycles, and a GPU's cached memory.

    Args:
        shutdown_ray: no effect; actors end with their engine, and others may use Ray.
    """
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
