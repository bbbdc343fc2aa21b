"""`ParallelState`: one process's place among those that share a model.

Ranks are numbered stage by stage: the ranks of a stage share its layers' tensors.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from engine.contract.errors import ConfigError

TENSOR_PARAM = "tensor_parallel_size"
PIPELINE_PARAM = "pipeline_parallel_size"
DATA_PARAM = "data_parallel_size"
CONTEXT_PARAM = "decode_context_parallel_size"
PARTITION_PARAM = "pipeline_layer_partition"


@dataclass(frozen=True, slots=True)
class ParallelState:
    """A rank among `tensor_parallel_size` * `pipeline_parallel_size`."""

    rank: int = 0
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def tensor_rank(self) -> int:
        """This rank's number in its stage."""
        return self.rank % self.tensor_parallel_size

    @property
    def stage(self) -> int:
        """This rank's stage."""
        return self.rank // self.tensor_parallel_size

    @property
    def logits_rank(self) -> int:
        """The rank that gives logits to those of other stages."""
        return (self.pipeline_parallel_size - 1) * self.tensor_parallel_size

    def rank_of(self, stage: int) -> int:
        """The rank of another stage that has this one's number there."""
        return stage * self.tensor_parallel_size + self.tensor_rank


def parse_partition(partition: str, num_stages: int) -> tuple[int, ...]:
    """Number of layers of each stage. Raises `ConfigError`."""
    counts = [count.strip() for count in partition.split(",")]
    if len(counts) != num_stages or not all(re.fullmatch("[0-9]{1,9}", count) for count in counts):
        raise ConfigError(
            f"{PARTITION_PARAM} must be {num_stages} numbers of layers, such as "
            f"{','.join(['8'] * num_stages)}; got {partition!r:.80}.",
            param=PARTITION_PARAM,
        )
    return tuple(int(count) for count in counts)


def stage_layers(num_layers: int, num_stages: int, partition: Sequence[int] = ()) -> list[range]:
    """The layers of each stage: by `partition`, else as many each, and one more for the last stages
    but the very last, which has the output layer. Raises `ConfigError`.
    """
    counts = list(partition)
    if not counts:
        counts = [num_layers // num_stages] * num_stages
        for index in range(num_layers % num_stages):
            counts[num_stages - 2 - index] += 1
    if sum(counts) != num_layers or min(counts) < 1:
        param = PARTITION_PARAM if partition else PIPELINE_PARAM
        value = ",".join(map(str, partition)) if partition else num_stages
        raise ConfigError(
            f"{param}={value} can't be used: the model has {num_layers} layers, of which each of "
            f"{num_stages} stages takes one at least.",
            param=param,
        )
    ends = [sum(counts[: stage + 1]) for stage in range(num_stages)]
    return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]
