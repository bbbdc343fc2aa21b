"""`OfflineTokenizer`, the result of `get_tokenizer`."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

from engine.contract.errors import InvalidRequest
from engine.text.chat_template import render_chat, render_chat_text
from engine.text.tokenizer import Tokenizer, load_tokenizer

#: Options of transformers' `apply_chat_template`, and the values that are accepted.
_FORMS: dict[str, tuple[Any, ...]] = {
    "max_length": (None,),
    "padding": (None, False),
    "return_assistant_tokens_mask": (None, False),
    "return_dict": (None, False),
    "return_tensors": (None,),
    "tokenizer_kwargs": (None, {}),
    "truncation": (None, False),
}


class Encoded(dict[str, Any]):
    """A tokenizer's result, with `input_ids` and `attention_mask` as keys and as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class OfflineTokenizer(Tokenizer):
    """A `Tokenizer` with the most common methods of transformers' tokenizers, which return lists.

    `decode` omits special tokens by default.
    """

    #: Embedding models truncate prompts at the end.
    truncation_side = "right"

    @classmethod
    def convert(cls, tokenizer: Any) -> OfflineTokenizer:
        """Convert an argument of `LLMEngine.set_tokenizer`.

        Raises `InvalidRequest` for another type, `ModelLoadError` for a folder without a tokenizer.
        """
        if isinstance(tokenizer, Tokenizer):
            return cls.of(tokenizer)
        if isinstance(tokenizer, str):
            return cls.of(load_tokenizer(tokenizer))
        if hasattr(tokenizer, "save_pretrained") and getattr(tokenizer, "is_fast", False):
            with tempfile.TemporaryDirectory() as folder:
                tokenizer.save_pretrained(folder)
                return cls.of(load_tokenizer(folder))
        raise InvalidRequest(
            "tokenizer must be one of get_tokenizer, a folder, or a fast tokenizer of "
            f"transformers; got {type(tokenizer).__name__}.",
            param="tokenizer",
        )

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> OfflineTokenizer:
        """Return the same tokenizer as an `OfflineTokenizer`."""
        tokenizer_copy = cls.__new__(cls)
        tokenizer_copy.__dict__.update(tokenizer.__dict__)
        return tokenizer_copy

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> Encoded:
        if isinstance(text, str):
            ids: Any = self.encode(text, add_special_tokens)
            return Encoded(input_ids=ids, attention_mask=[1] * len(ids))
        several = [self.encode(item, add_special_tokens) for item in text]
        return Encoded(input_ids=several, attention_mask=[[1] * len(ids) for ids in several])

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Render a conversation to token ids, or without `tokenize` to text; or several
        conversations to a list of these.

        Raises `InvalidRequest` for messages that the template refuses, and for unsupported options.
        """
        for name, neutral in _FORMS.items():
            if kwargs.pop(name, None) not in neutral:
                raise InvalidRequest(f"{name} can't be used: lists are given.", param=name)
        render: Any = render_chat if tokenize else render_chat_text

        def one(messages: Any) -> Any:
            return render(
                self,
                messages,
                tools=tools,
                documents=documents,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **kwargs,
            )

        several = bool(conversation) and not isinstance(conversation[0], dict)
        return [one(item) for item in conversation] if several else one(conversation)

    def batch_decode(
        self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = True
    ) -> list[str]:
        """Return the text of each sequence of ids."""
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """Return the vocabulary's token of an id, or a list for several."""
        return self.id_to_piece(ids) if isinstance(ids, int) else list(map(self.id_to_piece, ids))

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Return the id of a token, or a list for several; None for an unknown token."""
        if isinstance(tokens, str):
            return self.piece_to_id(tokens)
        return list(map(self.piece_to_id, tokens))

    def get_vocab(self) -> dict[str, int]:
        """Return the ids by token, including added tokens."""
        return dict(self._backend.get_vocab())

    def __len__(self) -> int:
        return self._backend.get_vocab_size()

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of special tokens."""
        return sorted(self.special_token_ids)

    @property
    def all_special_tokens(self) -> list[str]:
        """Texts of special tokens."""
        return [self.added_tokens[token] for token in self.all_special_ids]

    @property
    def bos_token(self) -> str | None:
        """The token at the beginning of a text, if there is one."""
        return self.settings.named_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """The token at the end of an answer, if there is one."""
        return self.settings.named_tokens.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        """The padding token, if there is one. The engine doesn't use it."""
        return self.settings.named_tokens.get("pad_token")

    @property
    def pad_token_id(self) -> int | None:
        """Id of `pad_token`."""
        return self._token_id(self.pad_token)
