"""`Job`: a checked request, on its way from an endpoint to the engine."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

from catalog.access import ModelCard
from engine.contract.errors import InvalidRequest, KVPoolTooSmall
from engine.contract.lora import AdapterRef
from engine.contract.message_version import MESSAGE_VERSION
from engine.contract.messages import EngineRequest, MediaItem, ModelInfo, PromptEmbeds
from engine.contract.sampling_params import SamplingParams
from engine.text.stop_strings import bad_word_ids
from engine.text.tokenizer import Tokenizer
from inference.loop.fair_dispatch import iterate_cooperatively
from inference.loop.offload import get_render_pool
from inference.request.context import RequestContext
from inference.schemas.base import ECTransferParams, KVTransferParams, RemoteAddress
from metering.access import AdmissionRequest
from metering.rules import AdapterUse
from tenants.authentication import Caller


@dataclass(frozen=True)
class ResolvedModel:
    """A model, with what a request needs to know about it.

    Attributes:
        card: the part that the client may see. info: what the replicas report.
        tokenizer: the adapter's, if it has one, or the model's.
        adapter: the version that the request uses from start to end, even if its name moves to
            another version. use: the same for the ledger.
        fallback_for: the requested model, if it is down and this one replaces it, or "".
        adapter_eos_id: the EOS of the adapter's tokenizer, where it differs from the model's.
    """

    card: ModelCard
    info: ModelInfo
    tokenizer: Tokenizer
    adapter: AdapterRef | None = None
    use: AdapterUse | None = None
    fallback_for: str = ""
    adapter_eos_id: int | None = None

    @property
    def name(self) -> str:
        """The name by which clients request it."""
        return self.card.id

    @property
    def base(self) -> str:
        """The name of the model, also for an adapter of it."""
        return self.card.parent or self.card.id

    @property
    def vocab_size(self) -> int:
        """Number of token ids that a request may use."""
        return (self.adapter.vocab_size if self.adapter else 0) or self.info.vocab_size

    @cached_property
    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`: changes with whatever computes the answer."""
        info = self.info
        facts = f"{info.path}\0{info.dtype}\0{info.quantization}\0{info.max_model_len}"
        if self.adapter is not None:
            facts += f"\0{self.adapter.digest}"
        return "fp_" + hashlib.blake2b(facts.encode(), digest_size=5).hexdigest()

    def with_adapter(self, adapter: AdapterRef | None) -> ResolvedModel:
        """Replace the adapter by the version that a stream began with, wherever its name leads now.

        Raises `ValueError` unless the adapter has the tokenizer that made the prompt.
        """
        if not self.has_same_tokenizer(adapter):
            raise ValueError(f"{self.name} isn't what it was")
        if adapter is None or self.use is None:
            return self
        return replace(self, adapter=adapter, use=replace(self.use, digest=adapter.digest))

    def has_same_tokenizer(self, adapter: AdapterRef | None) -> bool:
        """Whether a prompt's token ids are the same with the other adapter."""
        if adapter is None or self.adapter is None:
            return adapter is None and self.adapter is None
        current = self.adapter
        return (current.tokenizer, current.vocab_size) == (adapter.tokenizer, adapter.vocab_size)


@dataclass(slots=True)
class Usage:
    """Token counts of one request, for clients and for the ledger.

    Attributes:
        image_tokens: prompt tokens that stand for images.
        images: number of images. audio_ms: milliseconds of audio; of files only those with speech.
            audio_tokens: prompt tokens that stand for audio.
        reasoning_tokens: completion tokens that are reasoning; None for a model without it.
        numerics_changed: whether a replica with other numerics continued it.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    image_tokens: int = 0
    images: int = 0
    audio_ms: int = 0
    audio_tokens: int = 0
    reasoning_tokens: int | None = None
    numerics_changed: bool = False

    def subtract(self, previous: Usage) -> Usage:
        """Usage since an earlier count."""
        prompt = max(0, self.prompt_tokens - previous.prompt_tokens)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=max(0, self.completion_tokens - previous.completion_tokens),
            cached_tokens=min(prompt, self.cached_tokens),
            image_tokens=min(prompt, self.image_tokens),
            images=0 if previous.prompt_tokens else self.images,
            audio_ms=0 if previous.prompt_tokens else self.audio_ms,
            audio_tokens=min(prompt, self.audio_tokens),
        )

    def to_openai(self) -> dict[str, Any]:
        """OpenAI's `usage` object."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens} | self.media_fields(),
        }
        if self.reasoning_tokens is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return usage | self.detail_fields()

    def media_fields(self) -> dict[str, int]:
        """Among details of a prompt's tokens, where it has images or audio."""
        counts = {"image_tokens": self.image_tokens, "audio_tokens": self.audio_tokens}
        return {name: count for name, count in counts.items() if count}

    def detail_fields(self) -> dict[str, Any]:
        """Quire's own fields, which are omitted if false."""
        return {"numerics_changed": True} if self.numerics_changed else {}


#: Sampling parameters that the log of requests has.
_SAMPLING = ("max_tokens", "temperature", "top_p", "n", "seed", "stop")


@dataclass(kw_only=True)
class Job:
    """Generation that a request asks for.

    Attributes:
        ctx: the request.
        request_id: generated here, unique; the ledger's key.
        endpoint: for the ledger, such as "chat.completions".
        prompts: [num_prompts][num_tokens].
        embeds: [num_prompts] prompt embeddings or None; [] where all prompts are tokens.
        media: [num_prompts] images of each; [] if there are none.
        media_data: the encoder's input for all of them, by digest.
        encoder_tokens: [num_prompts] tokens that the model's encoder reads; [] for none.
        audio_ms: [num_prompts] milliseconds of audio of each that are billed; [] for none.
        sampling: parameters of every prompt.
        stream: whether the client reads a stream.
        is_continuation: whether it continues an admitted request, and isn't counted again.
        priority: smaller runs earlier.
        cache_salt: the client's; narrows the tenant's cache namespace.
        kv_transfer: where the prompts' KV blocks come from, and whether others need them.
        ec_transfer: by digest, where what the encoder made of media comes from.
        preserved_token_ids: special tokens that the text retains for the parsers.
        field_names: our field names -> the client's, for errors of the engine.
        trace_headers: of the parent of the engine's span; {} without tracing.
    """

    #: Whether it generates tokens.
    generates: ClassVar[bool] = True

    ctx: RequestContext
    request_id: str
    endpoint: str
    model: ResolvedModel
    prompts: list[list[int]]
    sampling: SamplingParams
    stream: bool = False
    is_continuation: bool = False
    priority: int = 0
    cache_salt: str = ""
    kv_transfer: KVTransferParams | None = None
    ec_transfer: dict[str, ECTransferParams] | None = None
    preserved_token_ids: frozenset[int] = frozenset()
    embeds: list[PromptEmbeds | None] = field(default_factory=list)
    media: list[list[MediaItem]] = field(default_factory=list)
    media_data: dict[bytes, bytes] = field(default_factory=dict)
    encoder_tokens: list[int] = field(default_factory=list)
    audio_ms: list[int] = field(default_factory=list)
    field_names: Mapping[str, str] = field(default_factory=dict)
    trace_headers: dict[str, str] = field(default_factory=dict)
    started_at: float = field(default_factory=time.time)

    @property
    def caller(self) -> Caller:
        return self.ctx.caller

    @property
    def received_at(self) -> float:
        """`time.perf_counter()` when the request was complete."""
        return self.ctx.received_at

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts)) + sum(self.encoder_tokens)

    def num_prompt_tokens(self, number: int) -> int:
        """Tokens of a prompt, with those that an encoder reads."""
        encoder_tokens = self.encoder_tokens[number] if self.encoder_tokens else 0
        return len(self.prompts[number]) + encoder_tokens

    @property
    def image_tokens(self) -> int:
        """Tokens of all prompts that stand for images, frames of videos among them."""
        return sum(map(self.num_image_tokens, range(len(self.media))))

    def num_image_tokens(self, number: int) -> int:
        """The same of one prompt."""
        media = self.media[number] if self.media else ()
        return sum(item.num_vectors for item in media if item.kind != "audio")

    @property
    def audio_tokens(self) -> int:
        """Tokens of all prompts that stand for audio."""
        return sum(map(self.num_audio_tokens, range(len(self.media))))

    def num_audio_tokens(self, number: int) -> int:
        """Tokens of a prompt that stand for audio."""
        media = self.media[number] if self.media else ()
        return sum(item.num_vectors for item in media if item.kind == "audio")

    def num_images(self, number: int) -> int:
        """Images of a prompt; of a video the tokens alone count."""
        media = self.media[number] if self.media else ()
        return sum(item.kind == "image" for item in media)

    def prompt_usage(self, numbers: Iterable[int]) -> Usage:
        numbers = list(numbers)
        return Usage(
            prompt_tokens=sum(map(self.num_prompt_tokens, numbers)),
            image_tokens=sum(map(self.num_image_tokens, numbers)),
            images=sum(map(self.num_images, numbers)),
            audio_ms=sum(self.audio_ms[number] for number in numbers) if self.audio_ms else 0,
            audio_tokens=sum(map(self.num_audio_tokens, numbers)),
        )

    def prompt_token_ids(self, number: int) -> list[int]:
        """A prompt's tokens; [] for prompt embeddings."""
        return [] if self.embeds and self.embeds[number] is not None else self.prompts[number]

    @property
    def max_context(self) -> int:
        """Maximum tokens of a prompt and an output together, by model and caller."""
        limit = self.caller.max_context_tokens
        max_model_len = self.model.info.max_model_len
        return max_model_len if limit is None else min(limit, max_model_len)

    @property
    def max_output_tokens(self) -> int:
        """Maximum number of generated tokens, over all prompts and outputs."""
        return sum(map(self._output_budget, self.prompts))

    def _output_budget(self, prompt: list[int]) -> int:
        """Maximum number of generated tokens of one prompt, over its outputs."""
        sequences = self.sampling.num_sequences
        if self.sampling.use_beam_search:
            sequences = self.sampling.beam_width  # each beam costs what an output does
        return self.sampling.output_budget(len(prompt), self.max_context) * sequences

    async def check(self) -> None:
        """Raise `InvalidRequest` for a job that can never run, before anything is reserved."""
        info, words = self.model.info, self.sampling.bad_words
        self._add_adapter_eos()
        if words:
            self.sampling.bad_words_token_ids = await get_render_pool().run(
                self.caller.tenant, sum(map(len, words)), bad_word_ids, self.model.tokenizer, words
            )
        async for prompt in iterate_cooperatively(self.prompts):
            self.sampling.check_against_model(
                vocab_size=self.model.vocab_size,
                num_prompt_tokens=len(prompt),
                max_model_len=self.max_context,
                max_logprobs=info.max_logprobs,
            )
            self._check_kv_capacity(len(prompt))
        if self.encoder_tokens:
            self.check_context()
        self.check_priority()

    def _add_adapter_eos(self) -> None:
        """End outputs on the EOS of the adapter's tokenizer too."""
        eos = self.model.adapter_eos_id
        if eos is None or self.sampling.ignore_eos or eos >= self.model.vocab_size:
            return
        stop_ids = dict.fromkeys([*(self.sampling.stop_token_ids or ()), eos])
        self.sampling.stop_token_ids = list(stop_ids)

    def check_context(self) -> None:
        """Raise `InvalidRequest` for a prompt beyond the caller's limit."""
        longest = max(map(self.num_prompt_tokens, range(len(self.prompts))))
        limit = self.caller.max_context_tokens
        if limit is not None and longest > limit:
            raise InvalidRequest(
                f"The prompt has {longest} tokens; at most {limit} are allowed for this API key.",
                param="prompt",
            )

    def check_priority(self) -> None:
        """Raise `InvalidRequest` for a priority that the key may not use."""
        if -self.priority > self.caller.max_priority:
            raise InvalidRequest(
                f"priority must be at least {-self.caller.max_priority} for this API key, "
                f"got {self.priority}.",
                param="priority",
            )

    def _check_kv_capacity(self, prompt_tokens: int) -> None:
        capacity = self.model.info.kv_capacity_tokens
        output = 1
        if self.sampling.max_tokens is not None:
            output = self.sampling.output_budget(prompt_tokens, self.model.info.max_model_len)
        needed = prompt_tokens + output
        if capacity and needed > capacity:
            raise KVPoolTooSmall(
                f"The request needs room for {needed} tokens, but the replica's KV cache holds "
                f"{capacity}.",
                param="max_tokens",
            )

    def ledger_expectation(self) -> dict[str, Any]:
        """The parameters that the request log contains."""
        fields = {name: getattr(self.sampling, name) for name in _SAMPLING}
        stop = fields.pop("stop")
        fields["stop"] = len(stop) if stop else None  # their text is the tenant's content
        return {name: value for name, value in fields.items() if value is not None}

    @property
    def engine_ids(self) -> list[str]:
        """The engine's request id of each prompt."""
        if len(self.prompts) == 1:
            return [self.request_id]
        return [f"{self.request_id}-{number}" for number in range(len(self.prompts))]

    def admission_request(self, outbox: str) -> AdmissionRequest:
        """Request to limits and budgets. `outbox`: the gateway's."""
        return AdmissionRequest(
            request_id=self.request_id,
            endpoint=self.endpoint,
            model=self.model.base,
            prompt_tokens=self.prompt_tokens,
            max_output_tokens=self.max_output_tokens,
            started_at=self.started_at,
            prompts=[self.num_prompt_tokens(number) for number in range(len(self.prompts))],
            images=[self.num_images(number) for number in range(len(self.media))],
            audio_ms=self.audio_ms,
            outputs=self.sampling.num_sequences,
            adapter=self.model.use,
            outbox=outbox,
            stream=self.stream,
            is_continuation=self.is_continuation,
            header_id=self.ctx.request_id,
        )

    def engine_requests(self, reserved_tokens: int | None = None) -> Iterator[EngineRequest]:
        """A lazy request for each prompt, with the caller's identity whatever the body said.

        Args:
            reserved_tokens: the output tokens that were reserved, where that's less than the
                maximum: the engine ends the outputs there. Prompts get equal shares.
        """
        share = None
        if reserved_tokens is not None and reserved_tokens < self.max_output_tokens:
            share = reserved_tokens // len(self.prompts)
        namespace = cache_namespace(self.caller, self.cache_salt)
        return (
            EngineRequest(
                request_id=engine_id,
                gateway_id="",
                prompt_token_ids=prompt,
                prompt_embeds=embeds,
                media=media,
                media_data={item.digest: self.media_data[item.digest] for item in media},
                sampling=self.sampling,
                arrival_time=self.started_at,
                message_version=MESSAGE_VERSION,
                tenant=self.caller.tenant,
                weight=self.caller.weight,
                kv_reserved_fraction=self.caller.kv_reserved_fraction,
                kv_max_fraction=self.caller.kv_max_fraction,
                priority=self.priority,
                cache_namespace=namespace,
                prefilled=bool(sources := self._sources(media)),
                kv_peer=next(filter(None, (source.address for source in sources)), ""),
                do_remote_decode=bool(self.kv_transfer and self.kv_transfer.do_remote_decode),
                adapter=self.model.adapter,
                token_cap=self._token_cap(prompt, share),
                trace_headers=self.trace_headers,
                log_prompt=self.caller.store_prompts,
            )
            for engine_id, prompt, embeds, media in zip(
                self.engine_ids,
                self.prompts,
                self.embeds or [None] * len(self.prompts),
                self.media or [[]] * len(self.prompts),
                strict=True,
            )
        )

    def _sources(self, media: Iterable[MediaItem]) -> list[RemoteAddress]:
        """Where another replica has a prompt's blocks, or outputs of the encoder for it."""
        sources: list[RemoteAddress] = []
        if self.kv_transfer is not None and self.kv_transfer.do_remote_prefill:
            sources.append(self.kv_transfer)
        encoded = self.ec_transfer or {}
        return sources + [encoded[name] for item in media if (name := item.digest.hex()) in encoded]

    def _token_cap(self, prompt: list[int], share: int | None) -> int | None:
        """Maximum tokens at which the engine ends a prompt's outputs: its share of the reserved
        tokens, or the end of a context that is shorter than the model's.
        """
        caps = [] if share is None else [share]
        if self.max_context < self.model.info.max_model_len:
            caps.append(self._output_budget(prompt))
        return min(caps, default=None)


def cache_namespace(caller: Caller, salt: str) -> str:
    """The tenant's cache namespace, or with a salt a part of it. Never a wider one."""
    if not salt:
        return caller.cache_namespace
    digest = hashlib.sha256(f"{caller.cache_namespace}\0{salt}".encode())
    return digest.hexdigest()
