"""Trains the byte-level BPE tokenizer and saves it with the chat template.

python -m demo.tokenizer OUT
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from demo.generator.mixture import stream
from demo.render import TEMPLATE, render

VOCABULARY = 3072
SEED = 11
CONVERSATIONS = 20_000
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
# One token each, but part of the text: a client has to see them to find a tool call.
TAGS = (
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>",
)  # fmt: skip

# Words with the space before them; digits one at a time, so that sums line up; then signs.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train(texts: Iterator[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    """A byte-level BPE: any text can be written in it, whatever it was trained on."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(TAGS),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return bpe


def wrap(bpe: Tokenizer) -> PreTrainedTokenizerFast:
    """The tokenizer as transformers loads it, chat template included."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|endoftext|>", "<|im_start|>"],
        model_max_length=2048,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = TEMPLATE
    return wrapped


def corpus() -> Iterator[str]:
    """The training texts that the merges are learned from."""
    return (render(example) for example in islice(stream(SEED), CONVERSATIONS))


def main(out: Path) -> None:
    """Trains and saves."""
    wrapped = wrap(train(corpus()))
    wrapped.save_pretrained(out, save_jinja_files=False)
    print(f"{len(wrapped)} tokens in {out}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
