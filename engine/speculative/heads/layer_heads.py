"""`LayerHeads`: a decoder layer that goes on from the model's hidden states of all tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from engine.models.architectures import decoder_spec
from engine.models.decoder import NativeDecoder
from engine.models.spec import DecoderSpec
from engine.speculative.heads.layer import PagedLayer
from engine.speculative.heads.source import HeadSource


@dataclass(frozen=True, slots=True)
class Target:
    """The model that heads are for.

    Attributes:
        model: whose embedding and output layer they may use.
        max_model_len: the context that is served.
    """

    model: NativeDecoder
    max_model_len: int

    @property
    def sizes(self) -> tuple[int, int]:
        """Hidden size and vocabulary."""
        return self.model.spec.hidden_size, self.model.spec.vocab_size


class LayerHeads(ABC):
    """One layer, whose entry j is made of token j + 1 and of the model's state at token j, and says
    token j + 2; the state of the next one is then what it gave itself.

    Attributes:
        most: drafts of a sequence.
        nbytes: of the weights.
        taps: the model's layers whose inputs are its states; (): those after the final norm.
        columns: of the model's states that it reads; width: of an entry's.
        layer: with the KV cache.
    """

    most = 64
    nbytes: int
    taps: tuple[int, ...] = ()
    columns: int
    width: int
    layer: PagedLayer

    @abstractmethod
    def states(self, hidden: Tensor) -> Tensor:
        """[n, width] of the model's states, [n, any]; both as activations are."""

    @abstractmethod
    def mixed(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """What the layer takes, and the residual; tokens int64 [n], states [n, width]."""

    @abstractmethod
    def logits(self, states: Tensor) -> Tensor:
        """float32 [n, vocab] of what the layer gave."""


def layer_spec(source: HeadSource) -> DecoderSpec:
    """The layer's sizes, by config.json. Raises `ModelLoadError` for what isn't run."""
    config = source.config
    source.same("vocab_size", source.vocab_size)
    if (count := source.whole("num_hidden_layers", 1, default=1)) != 1:
        raise source.wrong(f"it has {count} layers: only heads of one layer are run")
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        raise source.wrong("sliding_window is set: only heads that see all tokens are run")
    shape = {
        "hidden_size": source.hidden_size,
        "vocab_size": source.vocab_size,
        "max_position_embeddings": 2048,
    }
    return decoder_spec(
        {**shape, **config, "num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]}
    )
