"""Make a `tokenizer.json` for a model folder that has only an older tokenizer's files.

Only the engine calls this: it needs the `transformers` library (and, for some formats, the
`sentencepiece` and `protobuf` packages). Nothing else in `engine.text` imports this module.
"""

from __future__ import annotations

from pathlib import Path

from engine.contract.errors import ModelLoadError
from engine.text.backend import TOKENIZER_FILE
from engine.text.tokenizer import Tokenizer, load_tokenizer


def convert_tokenizer(
    path: str | Path, destination: str | Path, *, trust_remote_code: bool = False
) -> Tokenizer:
    """Write the tokenizer of `path` to `destination` in the form `load_tokenizer` reads; load it.

    Args:
        path: a model folder without `tokenizer.json`.
        destination: a folder to write to; gateways load the tokenizer from it.
        trust_remote_code: run Python code that the folder brings (`auto_map`).

    Raises:
        ModelLoadError: no tokenizer there that can be converted, or one that needs the folder's
            own code while that isn't trusted.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = Path(path)
    try:
        slow = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # the library raises a dozen kinds, and custom code any
        raise ModelLoadError(
            f"{folder} has no tokenizer that can be converted: {error}", param="model"
        ) from error
    if not isinstance(slow, PreTrainedTokenizerFast):
        raise ModelLoadError(
            f"{folder} has a {type(slow).__name__}, which can't be written as {TOKENIZER_FILE}.",
            param="model",
        )
    slow.save_pretrained(str(destination))
    return load_tokenizer(destination)
