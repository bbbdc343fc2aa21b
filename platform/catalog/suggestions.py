"""Well-known models of the hub that run here, as suggestions."""

from __future__ import annotations

from dataclasses import dataclass

from catalog.sizing import fits_memory


@dataclass(frozen=True)
class Suggestion:
    """A model of the hub.

    Attributes:
        source: its id on the hub. size_gb: size of its weights in 10^9 bytes. context: tokens.
        gated: whether the hub requires an account that accepted the licence (`HF_TOKEN`).
        use: its purpose.
    """

    source: str
    size_gb: float
    context: int
    license: str
    use: str = "chat"
    gated: bool = False

    @property
    def name(self) -> str:
        return self.source.partition("/")[2].lower()

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return int(self.size_gb * 1e9)

    @property
    def fits(self) -> bool:
        """Whether this machine has the memory to load it now, without its KV cache."""
        return fits_memory(self.nbytes)


SUGGESTIONS = (
    Suggestion("HuggingFaceTB/SmolLM2-135M-Instruct", 0.27, 8_192, "Apache 2.0"),
    Suggestion("Qwen/Qwen3-0.6B", 1.5, 40_960, "Apache 2.0"),
    Suggestion("meta-llama/Llama-3.2-1B-Instruct", 2.5, 131_072, "Llama 3.2", gated=True),
    Suggestion("HuggingFaceTB/SmolLM2-1.7B-Instruct", 3.4, 8_192, "Apache 2.0"),
    Suggestion("Qwen/Qwen3-1.7B", 4.1, 40_960, "Apache 2.0"),
    Suggestion("Qwen/Qwen3-4B", 8.1, 40_960, "Apache 2.0"),
    Suggestion("mistralai/Mistral-7B-Instruct-v0.3", 14.5, 32_768, "Apache 2.0"),
    Suggestion("meta-llama/Llama-3.1-8B-Instruct", 16.1, 131_072, "Llama 3.1", gated=True),
    Suggestion("Qwen/Qwen3-8B", 16.4, 40_960, "Apache 2.0"),
    Suggestion("BAAI/bge-small-en-v1.5", 0.13, 512, "MIT", use="embeddings"),
)
