"""Plug-ins for gateways and replicas. docs/extending.md walks through them."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.contract.lora import LoRARequest
from engine.contract.plugins import IOProcessor, LoRAResolver, PooledPrompt
from engine.contract.replica_state import EngineStats
from engine.contract.stat_loggers import StatLogger


def register() -> None:
    """A general plug-in: checkpoints of another name run as Llama."""
    from engine.models.registry import ModelRegistry

    ModelRegistry.register_model("ExampleForCausalLM", "transformers:LlamaForCausalLM")


class JsonLines(StatLogger):
    """A stat logger: a line of JSON a second, into the file that EXAMPLE_STATS names."""

    def record(self, stats: EngineStats) -> None:
        """Append the figures."""
        line = {"replica": self.replica_id, "tokens": stats.generation_tokens_total}
        with open(os.environ["EXAMPLE_STATS"], "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class Nearest(IOProcessor[list[str], dict[str, Any]]):
    """An IO processor: which of some documents is nearest to a query."""

    def parse_data(self, data: Any) -> list[str]:
        """The query, then the documents."""
        if not isinstance(data, dict) or not isinstance(data.get("query"), str):
            raise ValueError("it must be an object with a query and documents")
        documents = data.get("documents")
        if not isinstance(documents, list) or not documents:
            raise ValueError("documents must be a list of texts, and not empty")
        return [data["query"], *documents]

    def pre_process(self, prompt: list[str], request_id: str | None = None) -> Sequence[str]:
        """Each text is a prompt."""
        return prompt

    def post_process(
        self, model_output: Sequence[PooledPrompt], request_id: str | None = None
    ) -> dict[str, Any]:
        """By the dot product: embeddings have length 1."""
        query, *documents = [output.outputs.data.reshape(-1) for output in model_output]
        scores = [float(query @ document) for document in documents]
        return {"nearest": scores.index(max(scores)), "scores": scores}


class ByTable(LoRAResolver):
    """A LoRA resolver: EXAMPLE_ADAPTERS names a JSON file, adapters' names to their folders."""

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """The table is read each time, in a thread."""
        path = (await asyncio.to_thread(table)).get(lora_name)
        return None if path is None else LoRARequest(lora_name, 1, path)


def table() -> dict[str, str]:
    """What the file says."""
    payload: dict[str, str] = json.loads(Path(os.environ["EXAMPLE_ADAPTERS"]).read_text())
    return payload
