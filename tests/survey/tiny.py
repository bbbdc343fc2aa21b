"""A tiny random checkpoint and its oracle, both by `transformers`."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.engine.greedy import greedy_all
from tests.survey.recipes import COMMON, VOCAB


def make_checkpoint(recipe: dict[str, Any], folder: Path, seed: int = 0) -> str:
    """Write a random float32 checkpoint with a tokenizer; gives the architecture's name."""
    options = {**COMMON, **recipe}
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        _disturb(name, parameter, recipe)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return type(model).__name__


def _disturb(name: str, parameter: Tensor, recipe: dict[str, Any]) -> None:
    """Biases and norms are all 0 or 1 at first: then a forgotten one would go unnoticed."""
    norm = "norm" in name or "ln_" in name
    if parameter.dim() == 1 or norm:
        start = 1.0 if norm and name.endswith("weight") and bool((parameter == 1).all()) else 0.0
        parameter.data = torch.randn(parameter.shape) * 0.2 + start
    elif "expert" in name or "gate" in name or "router" in name:
        # Some routers start as zeros: then every expert would tie.
        parameter.data = torch.randn(parameter.shape) * 0.3


def write_tokenizer(folder: Path) -> None:
    """The survey's tokenizer."""
    _tokenizer().save_pretrained(folder)


def _tokenizer() -> PreTrainedTokenizerFast:
    """Words "0" to "383" and four special ones: the survey's prompts are token ids."""
    vocab = {"<|bos|>": 0, "<|unk|>": 1, "<|eos|>": 2, "<|pad|>": 3}
    vocab |= {str(token): token for token in range(4, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        unk_token="<|unk|>",
        eos_token="<|eos|>",
        pad_token="<|pad|>",
    )


def prompts(lengths: tuple[int, ...], seed: int = 5) -> list[list[int]]:
    """Prompts of so many tokens; every second one begins with the same 40."""
    rng = random.Random(seed)
    stem = [rng.randrange(4, VOCAB) for _ in range(40)]
    return [
        (stem if index % 2 else [])[:length]
        + [rng.randrange(4, VOCAB) for _ in range(length - (40 if index % 2 else 0))]
        for index, length in enumerate(lengths)
    ]


class Oracle:
    """`transformers` on a checkpoint: float32, greedy, one prompt at a time."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.eval()

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """Exactly `count` tokens, EOS ignored."""
        if self.model.config.model_type == "recurrent_gemma":
            # `generate` gives a prompt of one token a state as wide as the hidden state.
            return greedy_all(self.model, [prompt], count)[0]
        ids = torch.tensor([prompt])
        with torch.no_grad():
            out: Any = self.model.generate(  # type: ignore[misc]
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=count,
                min_new_tokens=count,
                eos_token_id=-1,
                pad_token_id=3,
            )
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens

    def logprobs(self, tokens: list[int]) -> Tensor:
        """float32 [len(tokens), vocab]."""
        with torch.no_grad():
            logits: Tensor = self.model(torch.tensor([tokens])).logits[0].float()
        return torch.log_softmax(logits, dim=-1)
