"""Request bodies of the pooling endpoints, in the words of OpenAI, vLLM, Jina and Cohere."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import AliasChoices, Field, model_validator

from engine.contract.errors import InvalidRequest
from engine.contract.pooling_params import PoolingParams
from inference.errors import UnsupportedField
from inference.openai.schemas.base import GenerateRequest, Refused
from inference.settings import gateway_settings

#: Fields that the endpoints' families know and that Quire doesn't support, with the values that
#: change nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "chat_template": (),
    "chat_template_kwargs": (),
    "embed_dtype": ("float32",),
    "embedding_types": (["float"],),
    "endianness": ("native", "little"),
    "images": ([],),
    "input_type": (),
    "max_chunks_per_doc": (),
    "messages": (),
    "rank_fields": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "stream": (False,),
    "stream_options": (),
}

Item = str | list[int]


class PoolingBody(GenerateRequest):
    """What all of them share."""

    truncate_prompt_tokens: int | None = None
    use_activation: bool | None = Field(
        default=None, validation_alias=AliasChoices("use_activation", "activation", "normalize")
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: dict[str, Any]) -> dict[str, Any]:
        for name in UNSUPPORTED.keys() & data.keys():
            value = data[name]
            if value is not None and value not in UNSUPPORTED[name]:
                raise Refused(UnsupportedField(f"'{name}' is not supported.", param=name))
        return data

    @model_validator(mode="after")
    def _check(self) -> Self:
        try:
            self.check_fields()
            self.params("")
        except InvalidRequest as error:
            raise Refused(error) from None
        return self

    def check_fields(self) -> None:
        """Raise `InvalidRequest` for what pydantic can't see."""

    def params(self, task: str) -> PoolingParams:
        """For the engine. Raises `InvalidRequest`."""
        return PoolingParams(
            task=task,
            use_activation=self.use_activation,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
        )

    def ignored_fields(self) -> list[str]:
        """See `GenerateRequest`; what changes nothing is no unknown field."""
        return [name for name in super().ignored_fields() if name not in UNSUPPORTED]


class InputBody(PoolingBody):
    """Texts or token ids, each for itself. `items` is what `input` was, as a list."""

    input: Any = None
    add_special_tokens: bool | None = True

    _items: list[Item] = []

    def check_fields(self) -> None:
        """See `PoolingBody`."""
        self._items = split_input(self.input)

    @property
    def items(self) -> list[Item]:
        """Each a text or a list of (unchecked) token ids."""
        return self._items


class EmbeddingRequest(InputBody):
    """The body of `POST /v1/embeddings`."""

    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: int | None = None

    def params(self, task: str) -> PoolingParams:
        """See `PoolingBody`."""
        return PoolingParams(
            task=task,
            dimensions=self.dimensions,
            use_activation=self.use_activation,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
        )


class PoolingRequest(EmbeddingRequest):
    """The body of `POST /pooling`. `data` is for the model's IO processor, in place of `input`."""

    task: str | None = None
    data: Any = None

    def check_fields(self) -> None:
        """See `PoolingBody`."""
        if self.data is not None:
            if self.input is not None:
                raise InvalidRequest("Either data or input is needed, not both.", param="data")
            return
        super().check_fields()
        PoolingParams(task=self.task or "")


class ClassifyRequest(InputBody):
    """The body of `POST /classify`."""


class ScoringBody(PoolingBody):
    """What scores of pairs share. Of longer texts so many tokens are read; 0: all."""

    max_tokens_per_query: int | None = 0
    max_tokens_per_doc: int | None = 0

    def check_fields(self) -> None:
        """See `PoolingBody`."""
        for name in ("max_tokens_per_query", "max_tokens_per_doc"):
            limit = getattr(self, name)
            if (limit or 0) < 0:
                raise InvalidRequest(
                    f"{name} must be a non-negative integer, got {limit}.", param=name
                )


class ScoreRequest(ScoringBody):
    """The body of `POST /score`."""

    text_1: Any = Field(default=None, validation_alias=AliasChoices("text_1", "data_1", "queries"))
    text_2: Any = Field(
        default=None, validation_alias=AliasChoices("text_2", "data_2", "documents", "items")
    )
    _texts: tuple[list[str], list[str]] = ([], [])

    def check_fields(self) -> None:
        """See `PoolingBody`."""
        super().check_fields()
        self._texts = (texts_of(self.text_1, "text_1"), texts_of(self.text_2, "text_2"))

    @property
    def texts(self) -> tuple[list[str], list[str]]:
        """Both sides, as lists."""
        return self._texts


class RerankRequest(ScoringBody):
    """The body of `POST /rerank`."""

    #: Whether answers hold the documents when the request doesn't say.
    shows_documents: ClassVar[bool] = True

    query: str
    documents: Any = None
    top_n: int | None = Field(default=None, ge=0)
    return_documents: bool | None = None
    _texts: list[str] = []

    def check_fields(self) -> None:
        """See `PoolingBody`."""
        super().check_fields()
        if not self.query:
            raise InvalidRequest("query must not be empty.", param="query")
        documents = self.documents
        if isinstance(documents, list):
            documents = [_document_text(document) for document in documents]
        self._texts = texts_of(documents, "documents")

    @property
    def texts(self) -> list[str]:
        """The documents' texts."""
        return self._texts

    @property
    def wants_documents(self) -> bool:
        """Whether the answer is to hold the documents."""
        asked = self.return_documents
        return self.shows_documents if asked is None else asked


class RerankV2Request(RerankRequest):
    """The body of `POST /v2/rerank`, whose answers hold no documents unless asked."""

    shows_documents = False


def split_input(value: Any) -> list[Item]:
    """A text, texts, token ids or lists of token ids, as a list of items.

    Raises `InvalidRequest` for something else, nothing, or too many.
    """
    if isinstance(value, list) and value and not isinstance(value[0], str | list):
        value = [value]
    if isinstance(value, list) and value and isinstance(value[0], list):
        _check_count(value, "input")
        if not all(isinstance(item, list) for item in value):
            raise _wrong_type("input", "a string, strings, token ids or lists of token ids")
        return value
    return list(texts_of(value, "input"))


def texts_of(value: Any, param: str) -> list[str]:
    """One text or several, as a list. Raises `InvalidRequest` as `split_input` does."""
    if value is None:
        raise InvalidRequest(
            f"Missing required parameter: '{param}'.",
            param=param,
            code="missing_required_parameter",
        )
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list):
        raise _wrong_type(param, "a string or a list of strings")
    _check_count(texts, param)
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            raise _wrong_type(f"{param}[{place}]", "a string")
        if not text:
            name = param if isinstance(value, str) else f"{param}[{place}]"
            raise InvalidRequest(f"{name} must not be empty.", param=name)
    return texts


def _check_count(items: list[Any], param: str) -> None:
    limit = gateway_settings().max_prompts
    if not items:
        raise InvalidRequest(f"{param} must not be empty.", param=param)
    if len(items) > limit:
        raise InvalidRequest(
            f"{param} holds {len(items)} entries; at most {limit} may be sent at once.", param=param
        )


def _document_text(document: Any) -> Any:
    """Jina's and Cohere's `{"text": ...}` as its text."""
    return document.get("text") if isinstance(document, dict) else document


def _wrong_type(param: str, wanted: str) -> InvalidRequest:
    return InvalidRequest(f"{param} must be {wanted}.", param=param, code="invalid_type")
