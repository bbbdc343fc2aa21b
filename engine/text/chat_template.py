"""`render_chat`: renders messages to a prompt's token ids with the model's chat template."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.contract.errors import ConfigError, InvalidRequest
from engine.text.chat_messages import (
    REASONING_FIELDS,
    ControlTokenMask,
    ControlTokens,
    Message,
    copy_json_value,
    is_image,
    mask_messages,
    mask_strings,
    prepare_messages,
    unused_chars,
)
from engine.text.jinja_sandbox import DEFAULT_LIMITS, ChatTemplate, RenderLimits, compile_template
from engine.text.tokenizer import Tokenizer
from engine.text.tokenizer_backend import exceeds_limit_error

#: Marks the end of the final message, where the rendered text is cut. The space shows whether the
#: template trims messages.
TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_PARAM = "continue_final_message"


def tag_final_message(
    messages: list[Message], field: str, source: str
) -> tuple[list[Message], str]:
    """Return the messages with the last one's `field` tagged, and that field's text.

    Raises:
        InvalidRequest: the field is missing or has no text, or the template doesn't read it.
    """
    final = dict(messages[-1])
    value = final.get(field)
    if value is None:
        raise InvalidRequest(f"The final message has no {field!r} to continue.", param=_PARAM)
    fields = [field]
    if field in REASONING_FIELDS:
        fields = [name for name in REASONING_FIELDS if final.get(name) == value]
    if not any(name in source for name in fields):
        raise InvalidRequest(f"The chat template never reads {field!r}.", param=_PARAM)
    if isinstance(value, list):
        parts = [dict(part) for part in value]
        texts = [part for part in parts if isinstance(part.get("text"), str)]
        if not texts:
            raise InvalidRequest("The final message has no text to continue.", param=_PARAM)
        text = texts[-1]["text"]
        texts[-1]["text"] += TAG
        final[field] = parts
    elif isinstance(value, str):
        text = value
        final |= dict.fromkeys(fields, value + TAG)
    else:
        raise InvalidRequest("The final message has no text to continue.", param=_PARAM)
    return [*messages[:-1], final], text


def cut_at_tag(rendered: str, final_text: str) -> str:
    """Return the rendered chat up to the end of the final message.

    Raises:
        InvalidRequest: the template dropped or changed the final message.
    """
    tag = TAG.strip()
    if final_text.strip() not in rendered or tag not in rendered:
        raise InvalidRequest(
            "The chat template changes the final message, so it can't be continued.", param=_PARAM
        )
    index = rendered.rindex(tag)
    prefix = rendered[:index]
    # If the tag's space is missing, the template trims messages, so trailing spaces are dropped.
    return prefix if rendered.startswith(TAG, index) else prefix.rstrip()


@dataclass(frozen=True, slots=True)
class _Chat:
    """One request's chat, validated and ready to render.

    Attributes:
        inputs: all client input for the template, except the messages.
        named_tokens: the tokenizer's named tokens (`bos_token`, ...).
        continued: the field of the final message to continue, or "".
        image_mark, image_token: the mark for an image in content that is a string, and the token
            that replaces it. Unlike the client's text around it, the mark isn't masked.
    """

    template: ChatTemplate
    messages: list[Message]
    inputs: dict[str, Any]
    named_tokens: dict[str, str]
    continued: str
    limits: RenderLimits
    image_mark: str = ""
    image_token: str = ""

    def render(self) -> str:
        messages, final_text = self.messages, ""
        if self.continued:
            messages, final_text = tag_final_message(messages, self.continued, self.template.source)
        context = {**self.named_tokens, **self.inputs, "messages": messages}
        text = self.template.render(context, self.limits)
        text = cut_at_tag(text, final_text) if self.continued else text
        return text.replace(self.image_mark, self.image_token) if self.image_mark else text

    def masked(self, mask: Any) -> _Chat:
        """Return the chat with the client's strings masked."""
        return replace(
            self,
            messages=mask_messages(self.messages, mask),
            inputs=mask_strings(self.inputs, mask),
        )


def read_template(source: str | None) -> str:
    """Return a chat template's source, given as a file name or as source; "" for none.

    Raises `ConfigError` for a file that can't be read, and for an invalid template.
    """
    if not source:
        return ""
    source = source
    if not any(mark in source for mark in ("{{", "{%", "\n")):
        try:
            source = Path(source).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"chat_template {source!r} is no template, and no file that can be read: {error}",
                param="chat_template",
            ) from error
    try:
        compile_template(source)
    except InvalidRequest as error:
        raise ConfigError(f"chat_template: {error.message}", param="chat_template") from error
    return source


def render_chat_text(
    tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], **options: Any
) -> str:
    """Return the rendered chat as text. Options and errors are those of `render_chat`.

    For display only: in text, control tokens from the template and those typed by a user look the
    same. `render_chat` distinguishes them.
    """
    return _chat(tokenizer, messages, **options).render()


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[dict[str, Any]],
    *,
    max_tokens: int | None = None,
    **options: Any,
) -> list[int]:
    """Return the token ids of a chat in the format of the model's template.

    Control tokens in client input (content, names, tool results, tools, kwargs) are encoded as
    ordinary characters. If there are none, the ids are those of the rendered text.

    Args:
        tokenizer: has the template and the control tokens.
        messages: objects with `role` and usually `content`: a string or a list of parts.
        max_tokens: maximum useful length of the chat; see `Tokenizer.encode`.
        options: see `_chat`.

    Raises:
        TemplateLimit: the template takes too many steps, or too long.
        InvalidRequest: invalid messages, a template that refuses (with its message), or no
            template.
        ContextLengthExceeded: far more than `max_tokens`.
    """
    chat = _chat(tokenizer, messages, **options)
    control: ControlTokens | None = tokenizer.__dict__.get("_compiled_control_tokens")
    if control is None:
        control = ControlTokens(tokenizer.special_tokens, tokenizer.control_tokens)
        tokenizer.__dict__["_compiled_control_tokens"] = control
    # Templates that read parts don't use the mark: masked text must not become an image.
    inputs = [chat.messages, chat.inputs, chat.image_mark]
    if not control.may_begin_in(inputs):
        return tokenizer.encode(chat.render(), add_special_tokens=False, max_tokens=max_tokens)
    return _encode_guarded(tokenizer, control, chat, ControlTokenMask(control, inputs), max_tokens)


def _chat(
    tokenizer: Tokenizer,
    messages: Sequence[dict[str, Any]],
    *,
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool | str = False,
    chat_template: str | None = None,
    documents: list[dict[str, Any]] | None = None,
    limits: RenderLimits = DEFAULT_LIMITS,
    content_format: str = "auto",
    **kwargs: Any,
) -> _Chat:
    """Validate the arguments and convert them to the form that the template reads.

    Args:
        tools, documents: JSON values for the template.
        add_generation_prompt: end with the header of an assistant's message.
        continue_final_message: end inside the last message, so that the model continues it; a
            string names another field than `content` to continue.
        chat_template: the name of one of the folder's templates, or a Jinja source.
        limits: limits on the template's rendering.
        content_format: form of content for the template: "string", "openai" (parts) or "auto".
        kwargs: additional variables for the template.
    """
    if continue_final_message and add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt can't be used together.",
            param="continue_final_message",
        )
    template = compile_template(_template_source(tokenizer, chat_template, tools is not None))
    inputs: dict[str, Any] = copy_json_value(kwargs, "chat_template_kwargs")
    inputs |= {
        "tools": copy_json_value(tools, "tools"),
        "documents": copy_json_value(documents, "documents"),
        "add_generation_prompt": add_generation_prompt,
    }
    image_token = tokenizer.settings.named_tokens.get("image_token", "")
    has_images = any(map(is_image, _parts_of(messages))) if image_token else False
    image_mark = next(unused_chars([messages, inputs])) if has_images else ""
    continued = continue_final_message if isinstance(continue_final_message, str) else "content"
    return _Chat(
        template=template,
        messages=prepare_messages(messages, template.source, content_format, image_mark),
        inputs=inputs,
        named_tokens=tokenizer.settings.named_tokens,
        continued=continued if continue_final_message else "",
        limits=limits,
        image_mark=image_mark,
        image_token=image_token,
    )


def _parts_of(messages: Sequence[Any]) -> Iterator[Any]:
    for message in messages or ():
        content = message.get("content") if isinstance(message, dict) else None
        yield from content if isinstance(content, list) else ()


def _template_source(tokenizer: Tokenizer, chosen: str | None, with_tools: bool) -> str:
    templates = tokenizer.settings.chat_templates
    if chosen is not None:
        return templates.get(chosen, chosen)
    if with_tools and "tool_use" in templates:
        return templates["tool_use"]
    if "default" in templates:
        return templates["default"]
    names = f" It has: {', '.join(sorted(templates))}." if templates else ""
    raise InvalidRequest(
        f"The model has no chat template.{names} Name one by --chat-template (chat_template), or "
        "complete a prompt instead.",
        param="messages",
    )


def _encode_guarded(
    tokenizer: Tokenizer,
    control: ControlTokens,
    chat: _Chat,
    mask: ControlTokenMask,
    max_tokens: int | None,
) -> list[int]:
    """Return the ids of a chat whose client strings may contain (parts of) control tokens."""
    masked = chat.masked(mask.tokens)
    text = mask.unescape(masked.render())
    full = mask.unescape(chat.masked(mask.initials).render())
    if control.find(text) != control.find(full):
        # Parts of a token in two strings were joined. Masking every initial is the last resort,
        # since it affects the template's own tests (`'<b>' in content`).
        text = full
    elif masked == chat:
        return tokenizer.encode(text, add_special_tokens=False, max_tokens=max_tokens)
    return _encode_segments(tokenizer, control, mask, text, max_tokens)


def _encode_segments(
    tokenizer: Tokenizer,
    control: ControlTokens,
    mask: ControlTokenMask,
    text: str,
    max_tokens: int | None,
) -> list[int]:
    """Return the ids of masked text: control tokens by id, text between them as characters."""
    ids: list[int] = []
    position = 0
    for match in control.pattern.finditer(text):
        token = tokenizer.added_token(match[0])
        preceding = text[position : match.start()]
        preceding = preceding.rstrip() if token.lstrip else preceding
        ids += _encode_text(tokenizer, mask, preceding, position > 0, max_tokens)
        ids.append(token.id)
        if max_tokens is not None and len(ids) > max_tokens:
            raise exceeds_limit_error(max_tokens, of_context=True)
        position = match.end()
        if token.rstrip:
            position += len(text[position:]) - len(text[position:].lstrip())
    return ids + _encode_text(tokenizer, mask, text[position:], position > 0, max_tokens)


def _encode_text(
    tokenizer: Tokenizer, mask: ControlTokenMask, text: str, inside: bool, max_tokens: int | None
) -> list[int]:
    return (
        tokenizer.encode_as_text(mask.restore(text), inside=inside, max_tokens=max_tokens)
        if text
        else []
    )
