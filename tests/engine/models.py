"""Tiny random checkpoints of every family, made by `transformers`, which is also the oracle."""

from __future__ import annotations

import functools
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.engine.greedy import greedy_all
from tests.survey.tiny import Oracle as SurveyOracle

VOCAB = 384
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    # Large weights, so that random logits lie far apart and greedy choices aren't ties.
    "initializer_range": 0.3,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-rope3": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    },
    "mistral": {"model_type": "mistral", "sliding_window": 24, "head_dim": 32},
    "qwen2": {"model_type": "qwen2"},
    "qwen2-window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
}


def make_model(family: str, folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Write a random float32 checkpoint of `family` with a tokenizer; returns its folder."""
    options = {**_SHAPE, **FAMILIES[family], **changes}
    key = repr([options, seed])
    if key not in _folders:
        path = Path(_models_folder.name) / str(len(_folders))
        _write_model(options, path, seed)
        _folders[key] = path
    shutil.copytree(_folders[key], folder, dirs_exist_ok=True)
    torch.manual_seed(seed)  # the same whether it was just made or copied
    return folder


#: Many tests want the same model, and to copy one takes a twentieth of the time to make it.
_folders: dict[str, Path] = {}
_models_folder = tempfile.TemporaryDirectory(prefix="quire-models-")


def _write_model(options: dict[str, Any], folder: Path, seed: int) -> None:
    options = dict(options)
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            # Biases and norms are all 0 or 1 at first: then a forgotten one would go unnoticed.
            noise = torch.randn(parameter.shape) * 0.2
            parameter.data = noise + (1.0 if "norm" in name else 0.0)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of VOCAB entries with four special tokens and a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = "the quick brown fox jumps over the lazy dog and runs away from it all day long "
    tokenizer.train_from_iterator([words * 4], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        chat_template=CHAT_TEMPLATE,
    )


def read_model(folder: Path) -> Any:
    """`transformers`' float32 model of a folder, which several may use: nobody changes it."""
    written = [(path.name, path.stat().st_mtime_ns) for path in sorted(folder.iterdir())]
    return _read(folder, tuple(written))


@functools.lru_cache(maxsize=64)  # of some hundred KB each
def _read(folder: Path, written: tuple[tuple[str, int], ...]) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


class Oracle(SurveyOracle):
    """`transformers` on the same weights: float32, greedy, one prompt at a time."""

    def __init__(self, folder: Path, model: Any = None) -> None:
        """`model`: another one than the plain model of the folder."""
        self.model = model or read_model(folder)
        self._outputs: dict[tuple[int, ...], list[int]] = {}

    def greedy(self, prompt: list[int], count: int, guess: list[int] | None = None) -> list[int]:
        """See the base; `guess` as of `greedy_all`."""
        return self.greedy_all([prompt], count, guess and [guess])[0]

    def greedy_all(
        self, prompts: list[list[int]], count: int, guesses: list[list[int]] | None = None
    ) -> list[list[int]]:
        """`greedy` of each, found together; many tests ask for the same. `guesses`: what it's
        likely to say, which then takes it one pass instead of `count`.
        """
        registered_tokens = [self._outputs.get(tuple(prompt), []) for prompt in prompts]
        if any(len(tokens) < count for tokens in registered_tokens):
            likely = zip(registered_tokens, guesses or registered_tokens, strict=True)
            registered_tokens = greedy_all(
                self.model, prompts, count, [max(texts, key=len) for texts in likely]
            )
            self._outputs |= {
                tuple(prompt): tokens
                for prompt, tokens in zip(prompts, registered_tokens, strict=True)
            }
        return [tokens[:count] for tokens in registered_tokens]

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """float32 [len(tokens), vocab]."""
        with torch.no_grad():
            return self.model(torch.tensor([tokens])).logits[0].float()
