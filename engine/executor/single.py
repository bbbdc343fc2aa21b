"""`SingleExecutor`: one device, in this process."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from engine.config import EngineConfig
from engine.executor.memory import num_cpu_blocks
from engine.models.loader import LoadedModel, load_model
from engine.sampling.sampler import Sampler
from engine.scheduler.plan import StepPlan, StepResult
from engine.worker.batch import RunningBatch
from engine.worker.runner import ModelRunner

log = logging.getLogger(__name__)

CPU_TOKEN_BUDGET = 512
_KV_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class SingleExecutor:
    """Loads the model, allocates the KV cache and runs plans, one at a time.

    Attributes:
        loaded: the model and what is known of it.
        num_blocks: size of the KV pool.
        kv_bytes_per_token: what a token takes of it, over all layers.
        token_budget: max_num_batched_tokens, resolved.
    """

    def __init__(self, config: EngineConfig, progress: Callable[[int, int], None]) -> None:
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        self.loaded: LoadedModel = load_model(config, progress)
        self.token_budget = self._token_budget(config)
        kv_dtype = _KV_DTYPES.get(config.kv_cache_dtype, self.loaded.dtype)
        token_bytes = self.loaded.spec.kv_bytes_per_token(kv_dtype.itemsize)
        self.kv_bytes_per_token = token_bytes
        self.num_blocks = num_cpu_blocks(config, token_bytes, self.loaded.max_model_len)
        self.loaded.model.allocate_kv(self.num_blocks, config.block_size, kv_dtype)
        batch = RunningBatch(config.max_num_seqs, self.loaded.max_model_len, config.block_size)
        sampler = Sampler(self.loaded.eos_token_ids)
        self._runner = ModelRunner(self.loaded.model, batch, sampler)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. Raises whatever the model raises; the batch stays usable."""
        return self._runner.execute(plan)

    def _token_budget(self, config: EngineConfig) -> int:
        """`max_num_batched_tokens`: without chunked prefill a whole prompt must fit."""
        budget = config.max_num_batched_tokens
        if budget is None:
            budget = CPU_TOKEN_BUDGET
            if not config.enable_chunked_prefill:
                budget = max(budget, self.loaded.max_model_len)
        return budget
