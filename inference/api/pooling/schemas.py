"""Request bodies of the pooling endpoints, with the fields of OpenAI, vLLM, Jina and Cohere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

from django.conf import settings
from pydantic import AliasChoices, Field, model_validator

from engine.contract.errors import InvalidRequest
from engine.contract.pooling_params import EmbedDtype, Endianness, PoolingParams
from engine.text.tokenizer import max_pair_tokens
from inference.api.pooling.formats import check_format
from inference.chat.job import render_prompt
from inference.errors import UnsupportedField
from inference.rendering.media import ChatPrompt, insert_media_tokens
from inference.rendering.media_pool import MediaOptions
from inference.rendering.media_sources import admit_sources, find_media
from inference.rendering.prompts import truncate_tokens
from inference.request.context import RequestContext
from inference.request.job import ResolvedModel
from inference.schemas.base import GenerateRequest, RejectedRequest
from inference.schemas.chat import TEXT_PARTS, ChatRequest, part_type
from inference.serving.respond import parse

#: Fields of `ChatRequest` that affect how a chat is rendered; it validates them.
RENDERING = (
    "add_generation_prompt",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
)


def is_chat(value: Any) -> bool:
    """Whether it is a list of messages, or a list of such lists."""
    if isinstance(value, list) and value and isinstance(value[0], list):
        value = value[0]
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def parsed_chats(messages: Any, rendering: dict[str, Any]) -> list[ChatRequest]:
    """One or several chats, each validated like a chat completion.

    Unlike there, no generation prompt is added by default.

    Raises: `InvalidRequest` and pydantic's ValidationError, naming the fields of a chat.
    """
    several = isinstance(messages, list) and bool(messages) and isinstance(messages[0], list)
    chats = messages if several else [messages]
    limit = settings.QUIRE.max_prompts
    if len(chats) > limit:
        raise InvalidRequest(
            f"messages holds {len(chats)} chats; at most {limit} may be sent at once.",
            param="messages",
        )
    fields = {"add_generation_prompt": False} | rendering
    return [parse(ChatRequest, fields | {"messages": chat}) for chat in chats]


async def chat_prompts(
    ctx: RequestContext,
    served: ResolvedModel,
    chats: list[ChatRequest],
    params: PoolingParams,
    side: str,
) -> list[ChatPrompt]:
    """Render each as a prompt, truncated at `side` if `params` say so; special tokens stay.

    Raises: what the chat endpoint raises for the template; `InvalidRequest` for a prompt with media
        that would be truncated.
    """
    limit = params.prompt_limit(served.info.max_model_len)
    facts = served.info.pooling
    prompts = []
    for chat in chats:
        if facts is not None and facts.image_or_text:
            prompts.append(await _image_or_text(ctx, served, chat, limit, side))
            continue
        wants_special = bool(chat.add_special_tokens)
        without_special = chat.model_copy(update={"add_special_tokens": False})
        prompt = await render_prompt(without_special, served, ctx)
        wrapped = served.tokenizer.wrapped
        special = len(wrapped([])) if wants_special else 0
        ids = prompt.token_ids
        if limit is not None:
            ids = truncate_tokens(ids, max_pair_tokens(limit, special), side)
        if prompt.media and (special or len(ids) < len(prompt.token_ids)):
            raise InvalidRequest(
                "A prompt with media can't be cut, and takes no add_special_tokens.",
                param="add_special_tokens" if special else "truncate_prompt_tokens",
            )
        prompts.append(replace(prompt, token_ids=wrapped(ids) if wants_special else ids))
    return prompts


async def _image_or_text(
    ctx: RequestContext, served: ResolvedModel, chat: ChatRequest, limit: int | None, side: str
) -> ChatPrompt:
    """A chat for a model that embeds one text or image, without messages."""
    parts: list[Any] = []
    for message in chat.raw_messages:
        content = message.get("content") or []
        parts += content if isinstance(content, list) else [content]
    sources = find_media(chat.raw_messages, served.info)
    if len(parts) != 1 or any(source.kind == "document" for source in sources):
        raise InvalidRequest(
            f"The model {served.name} embeds one text or one image: send one message with one "
            "part.",
            param="messages",
        )
    if not sources:
        [part] = parts
        text = part if isinstance(part, str) else part[TEXT_PARTS[part_type(part)]]
        encoded = served.tokenizer.encode_parts(text, limit=limit, side=side)
        return ChatPrompt(encoded.token_ids, [], {})
    placeholder = [served.tokenizer.eos_token_id or 0]
    admitted = await admit_sources(sources, ctx.caller)
    options = MediaOptions.from_chat(chat, served.info)
    return await insert_media_tokens(
        placeholder, admitted, options, served.info, served.tokenizer, ctx.caller
    )


Item = str | list[int]


def split_input(value: Any) -> list[Item]:
    """A text, texts, token ids or lists of token ids, as a list of items.

    Raises `InvalidRequest` for something else, nothing, or too many.
    """
    if isinstance(value, list) and value and not isinstance(value[0], str | list):
        value = [value]
    if isinstance(value, list) and value and isinstance(value[0], list):
        _check_count(value, "input")
        if not all(isinstance(item, list) for item in value):
            raise _invalid_type("input", "a string, strings, token ids or lists of token ids")
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
        raise _invalid_type(param, "a string or a list of strings")
    _check_count(texts, param)
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise _invalid_type(f"{param}[{index}]", "a string")
        if not text:
            name = param if isinstance(value, str) else f"{param}[{index}]"
            raise InvalidRequest(f"{name} must not be empty.", param=name)
    return texts


def _check_count(items: list[Any], param: str) -> None:
    limit = settings.QUIRE.max_prompts
    if not items:
        raise InvalidRequest(f"{param} must not be empty.", param=param)
    if len(items) > limit:
        raise InvalidRequest(
            f"{param} holds {len(items)} entries; at most {limit} may be sent at once.", param=param
        )


def _invalid_type(param: str, expected: str) -> InvalidRequest:
    return InvalidRequest(f"{param} must be {expected}.", param=param, code="invalid_type")


#: Fields that these endpoints know but Quire doesn't support, with the values that have no effect.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "embedding_types": (["float"],),
    "images": ([],),
    "max_chunks_per_doc": (),
    "padding": ("do_not_pad",),
    "rank_fields": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "stream": (False,),
    "stream_options": (),
}


class PoolingBody(GenerateRequest):
    """Fields that all pooling bodies share."""

    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    use_activation: bool | None = Field(
        default=None, validation_alias=AliasChoices("use_activation", "activation", "normalize")
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: dict[str, Any]) -> dict[str, Any]:
        for name in UNSUPPORTED.keys() & data.keys():
            value = data[name]
            if value is not None and value not in UNSUPPORTED[name]:
                raise RejectedRequest(UnsupportedField(f"'{name}' is not supported.", param=name))
        return data

    @model_validator(mode="after")
    def _check(self) -> Self:
        try:
            self.check_fields()
            self.params("")
        except InvalidRequest as error:
            raise RejectedRequest(error) from None
        return self

    @property
    def side(self) -> str:
        """The side at which long prompts are truncated."""
        return self.truncation_side or "right"

    def check_fields(self) -> None:
        """Raise `InvalidRequest` for errors that pydantic can't detect."""

    def params(self, task: str) -> PoolingParams:
        """Parameters for the engine. Raises `InvalidRequest`."""
        return PoolingParams(
            task=task,
            use_activation=self.use_activation,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
        )

    def ignored_fields(self) -> list[str]:
        """See `GenerateRequest`; fields without effect aren't listed."""
        return [name for name in super().ignored_fields() if name not in UNSUPPORTED]


class InputBody(PoolingBody):
    """Texts or token ids, each on its own; or chats, as `messages` or in place of texts.

    `items` is `input` as a list. `add_special_tokens` is true for a text and false for a chat,
    whose template adds its own.
    """

    input: Any = Field(default=None, description="Texts, token ids or chats, one or several.")
    messages: Any = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = False
    continue_final_message: bool | None = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    _items: list[Item] = []
    _chats: list[ChatRequest] = []

    def check_fields(self) -> None:
        """See `PoolingBody`."""
        messages = self.messages
        if messages is None and is_chat(self.input):
            messages = self.input
        elif messages is not None and self.input is not None:
            raise InvalidRequest("Either messages or input is needed, not both.", param="messages")
        if messages is None:
            for name in ("chat_template", "chat_template_kwargs"):
                if getattr(self, name):
                    raise InvalidRequest(f"{name} is only for messages.", param=name)
            self._items = split_input(self.input)
        else:
            fields = self.model_dump(include=set(RENDERING), exclude_none=True, exclude_unset=True)
            self._chats = parsed_chats(messages, fields)

    @property
    def items(self) -> list[Item]:
        """Each a text or a list of (unchecked) token ids; empty if the input is chats."""
        return self._items

    @property
    def param(self) -> str:
        """The field that holds the prompts."""
        return "input" if self.messages is None else "messages"

    @property
    def chats(self) -> list[ChatRequest]:
        """The chats, if there are any instead of `items`."""
        return self._chats


class EmbeddingRequest(InputBody):
    """The body of `POST /v1/embeddings`."""

    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = "float"
    embed_dtype: EmbedDtype | None = "float32"
    endianness: Endianness | None = "native"
    dimensions: int | None = None

    def check_fields(self) -> None:
        """See `PoolingBody`."""
        super().check_fields()
        check_format(self.encoding_format, len(self.items) or len(self.chats))

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
    data: Any = Field(default=None, description="Input of a plug-in, in its own form.")

    def check_fields(self) -> None:
        """See `PoolingBody`."""
        if self.data is not None:
            if self.input is not None or self.messages is not None:
                raise InvalidRequest("Either data or input is needed, not both.", param="data")
            return
        super().check_fields()
        PoolingParams(task=self.task or "")


class ClassifyRequest(InputBody):
    """The body of `POST /classify`."""


class ScoringBody(PoolingBody):
    """Fields of bodies with pairs. Texts are truncated to that many tokens; 0: never."""

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

    #: Whether responses include the documents by default.
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
        """Whether the response includes the documents."""
        asked = self.return_documents
        return self.shows_documents if asked is None else asked


class RerankV2Request(RerankRequest):
    """The body of `POST /v2/rerank`, whose responses exclude documents by default."""

    shows_documents = False


def _document_text(document: Any) -> Any:
    """Jina's and Cohere's `{"text": ...}` as its text."""
    return document.get("text") if isinstance(document, dict) else document
