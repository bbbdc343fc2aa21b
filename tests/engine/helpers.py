"""A scheduler without a model: tests play the model's part."""

from __future__ import annotations

from typing import Any

from engine.contract.engine_config import EngineConfig
from engine.contract.messages import EngineRequest
from engine.contract.sampling_params import SamplingParams
from engine.kv_cache import NULL_BLOCK, Block, BlockHashes, ContentKey, make_kv_cache_config
from engine.kv_cache.prefix_cache import namespace_key
from engine.scheduler import Request, Scheduler, Sequence, SequenceStatus, StepPlan
from engine.scheduler.prefill_budget import PrefillLimits


class Driver:
    """Drives a scheduler: adds prompts, runs steps, samples `next_token`."""

    def __init__(
        self,
        num_blocks: int,
        token_budget: int = 1000,
        prefill_limit: int = 0,
        prefill_limits: PrefillLimits | None = None,
        windows: tuple[int, ...] = (),
        max_model_len: int = 0,
        mixes: bool = True,
        **settings: Any,
    ) -> None:
        settings = {"block_size": 4, "max_num_seqs": 64, **settings}
        self.config = EngineConfig(model="m", **settings)
        self.layout = make_kv_cache_config(windows, len(windows) or 1, max_model_len=10**6)
        share = prefill_limits or (PrefillLimits(prefill_limit) if prefill_limit else None)
        self.scheduler = Scheduler(
            self.config, num_blocks, token_budget, share, self.layout, max_model_len, mixes=mixes
        )
        self.count = 0
        #: Who got a token in the last step.
        self.sampled: list[Sequence] = []

    def add(
        self,
        prompt: list[int],
        *,
        priority: int = 0,
        namespace: str = "",
        max_tokens: int = 1000,
        tenant: str = "default",
        weight: float = 1.0,
        reserved: float = 0.0,
        maximum: float = 1.0,
        content: tuple[ContentKey, ...] = (),
    ) -> Sequence:
        """Queue a prompt."""
        message = EngineRequest(
            request_id=f"r{self.count}",
            gateway_id="g",
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=max_tokens),
            priority=priority,
            tenant=tenant,
            weight=weight,
            kv_reserved_fraction=reserved,
            kv_max_fraction=maximum,
        )
        sequence = Sequence(
            seq_id=self.count,
            request=Request(message),
            index=0,
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            max_output_tokens=max_tokens,
            seed=0,
            block_hashes=BlockHashes(namespace_key(namespace), content),
        )
        sequence.request.sequences.append(sequence)
        self.count += 1
        self.scheduler.add(sequence)
        return sequence

    def step(self, next_token: int = 7, check: bool = True) -> StepPlan:
        """One step; sequences that caught up get `next_token`."""
        plan, scheduled = self.scheduler.schedule()
        self.sampled = []
        for sequence in scheduled:
            if (
                sequence.status is SequenceStatus.RUNNING
                and sequence.num_computed_tokens == sequence.num_tokens
            ):
                sequence.token_ids.append(next_token)
                self.sampled.append(sequence)
                self.scheduler.waiting.charge_output(sequence)
        if check:
            self.scheduler.check_integrity()
        return plan

    def table(self, sequence: Sequence) -> list[int]:
        """The sequence's block ids."""
        return block_ids(self.scheduler, sequence)

    def blocks(self, sequence: Sequence, group: int = 0) -> list[Block]:
        """The blocks that the sequence holds in a KV cache group."""
        return self.scheduler.kv.managers[group].tables.get(sequence.seq_id, [])

    def tables(self, sequence: Sequence) -> list[list[int | None]]:
        """The sequence's block ids by KV cache group, None for null blocks."""
        return [
            [None if block is NULL_BLOCK else block.block_id for block in table]
            for table in self.scheduler.kv.get_block_tables(sequence.seq_id)
        ]

    def free_ids(self) -> list[int]:
        """Block ids in the free list, next to go first."""
        return [block.block_id for block in self.scheduler.kv.pool.free_blocks_in_order]


def block_ids(scheduler: Scheduler, sequence: Sequence) -> list[int]:
    """Ids of the blocks that a sequence holds in the first KV cache group."""
    table = scheduler.kv.managers[0].tables.get(sequence.seq_id, [])
    return [block.block_id for block in table]
