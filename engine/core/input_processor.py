"""Validates requests, and makes the engine's requests and sequences of valid ones."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

import msgspec
import numpy as np
import torch
from torch import Tensor

from engine.contract.engine_config import MAX_MEDIA_PER_PROMPT, EngineConfig
from engine.contract.errors import BudgetExhausted, InvalidRequest, KVPoolTooSmall, QuireError
from engine.contract.messages import EngineRequest, MediaItem, PromptEmbeds, gc_untracked
from engine.contract.pooling_params import ALIGN, GENERATE, PoolingParams, check_length
from engine.contract.sampling_params import SamplingParams
from engine.contract.validation import check_task
from engine.core.beam_group import BeamGroup, BeamRequest
from engine.executor.abstract import Capacity
from engine.kv_cache.prefix_cache import BlockHashes, ContentKey, namespace_key
from engine.models.interface import ModelFacts
from engine.multimodal.audio import FEATURES
from engine.multimodal.encoder_text import TEXT, TOKEN_IDS, check_encoder_text
from engine.multimodal.inputs import EMBEDS, MediaTensors
from engine.multimodal.positions import check_positions, count_positions
from engine.sampling.beam_search import end_tokens
from engine.sampling.logits_processor import processor_classes
from engine.scheduler import Request, Sequence

_NOUNS = {"image": "An image", "video": "A video", "audio": "An audio"}
_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def to_tensor(embeds: PromptEmbeds) -> Tensor:
    """The tensor [rows, size] in memory of its own. Raises `InvalidRequest` if data is missing."""
    if not embeds.is_complete or not embeds.rows or not embeds.size:
        raise InvalidRequest("prompt_embeds aren't whole.", param="prompt_embeds")
    numbers = torch.frombuffer(bytearray(embeds.data), dtype=_DTYPES[embeds.dtype])
    return numbers.view(embeds.rows, embeds.size)


def check_pooling(message: EngineRequest, name: str, facts: ModelFacts) -> None:
    """Refuse requests that this model can't serve, before anything is allocated.

    Raises:
        InvalidRequest: the task isn't one of the model's, or a parameter is out of range.
        ContextLengthExceeded: the prompt is too long.
    """
    params, count = message.pooling or PoolingParams(), len(message.prompt_token_ids)
    if message.resume_token_ids or message.skip_indices:
        raise InvalidRequest("A pooled prompt has no output to go on from.", param="resume")
    if facts.pooling is None:
        tasks = [GENERATE, ALIGN] if facts.encoder_length else [GENERATE]
        check_task(name, tasks, params.task or "pooling")
        check_length(count, facts.max_model_len)
        if params.align_from >= count:
            raise InvalidRequest(
                f"align_from must be below the prompt's {count} tokens; got {params.align_from}.",
                param="align_from",
            )
        if not 1 <= params.num_states <= facts.encoder_length:
            raise InvalidRequest(
                f"num_states must be from 1 to {facts.encoder_length}; got {params.num_states}.",
                param="num_states",
            )
        return
    if message.pooling is None:
        check_task(name, facts.tasks, GENERATE)
    params.check_against_model(
        model=name,
        tasks=facts.tasks,
        embedding_size=facts.pooling.info.embedding_size,
        matryoshka=facts.pooling.info.matryoshka,
    )
    check_length(count, facts.max_model_len)
    if params.second_segment >= count:
        raise InvalidRequest("second_segment is out of range.", param="second_segment")


def drop_kv_quota(message: EngineRequest, facts: ModelFacts, config: EngineConfig) -> EngineRequest:
    """The request without its tenant's KV quota if the model has no KV cache, or no decoder.

    The blocks that the scheduler counts for such a model occupy no memory.
    """
    if not (facts.runs_whole_prompts or config.only_encodes):
        return message
    return msgspec.structs.replace(message, kv_reserved_fraction=0.0, kv_max_fraction=1.0)


def resolve_scheduler_config(
    config: EngineConfig, facts: ModelFacts, capacity: Capacity
) -> EngineConfig:
    """The scheduler's settings, adapted to the model.

    If sequences carry a recurrent state, as many run as memory allows, and prefixes are cached only
    if states are kept in blocks.

    An encoder computes each prompt in a single step. A prefix can be shared only if the pooled
    vector depends on the last token alone. Prompts needn't leave budget for decodes, as there are
    none.
    """
    caches = config.enable_prefix_caching and capacity.caches_prefixes
    config = replace(config, enable_prefix_caching=caches)
    if capacity.runs_whole_prompts:
        config = replace(
            config,
            enable_chunked_prefill=False,
            max_model_len=facts.max_model_len,
            max_num_batched_tokens=capacity.token_budget,
        )
    if facts.stateful:
        seats = min(config.max_num_seqs, capacity.max_stateful_sequences or config.max_num_seqs)
        caches = config.enable_prefix_caching and capacity.layout.state_group is not None
        config = replace(config, enable_prefix_caching=caches, max_num_seqs=seats)
    if facts.pooling is None:
        return config
    return replace(
        config,
        enable_prefix_caching=config.enable_prefix_caching and facts.pooling.caches_prefixes,
        enable_chunked_prefill=config.enable_chunked_prefill and not facts.pooling.encoder,
        max_model_len=facts.max_model_len,
        max_num_batched_tokens=capacity.token_budget,
        prefill_tokens_beside_decodes=0,
    )


class InputProcessor:
    """Checks requests against the model and the pool, and makes their sequences.

    Args:
        capacity: maximum length in tokens of a sequence of a request's tenant.
        counts_placeholders: steps are planned while others are in flight.
    """

    def __init__(
        self,
        config: EngineConfig,
        facts: ModelFacts,
        capacity: Callable[[EngineRequest], int],
        *,
        counts_placeholders: bool,
    ) -> None:
        self._has_steps_in_flight = counts_placeholders
        self._config = config
        self._facts = facts
        self._capacity = capacity
        self._processors = processor_classes(
            config, pools=facts.pooling is not None, model_classes=facts.logits_processors
        )
        self._next_seq_id = 0

    def check(self, message: EngineRequest, vocab_size: int | None) -> None:
        """Refuse a request that can't run, before anything is allocated.

        `vocab_size`: the vocabulary for the request's token ids; None: not known yet,
        `check_vocabulary` follows.

        Raises:
            InvalidRequest: a field is out of range for this model.
            BudgetExhausted: its token cap leaves no token.
            KVPoolTooSmall: it could never fit the pool.
        """
        prompt, params = message.prompt_token_ids, message.sampling
        if not prompt:
            raise InvalidRequest("The prompt is empty.", param="prompt")
        _check_prompt(prompt, vocab_size)
        if message.pooling is not None or self._facts.pooling is not None:
            check_pooling(message, self._config.name, self._facts)
        else:
            params.check_against_model(
                vocab_size=vocab_size,
                num_prompt_tokens=len(prompt),
                max_model_len=self._facts.max_model_len,
                max_logprobs=self._config.max_logprobs,
            )
            self._ask_processors(params)
        if self._config.only_encodes and (message.pooling is not None or params.max_tokens != 1):
            raise InvalidRequest(
                "This replica has no decoder (ec_role=ec_producer): it encodes media for requests "
                "with max_tokens=1, whose token means nothing.",
                param="max_tokens",
            )
        self._check_resumption(message)
        remaining, sampling = _remaining_tokens(message), message.sampling
        num_beams = sampling.beam_width if sampling.use_beam_search else 1
        if remaining is not None and remaining < num_beams:
            raise BudgetExhausted("No tokens are left for this request.")
        _check_tenant(message)
        self._check_pool(message, len(prompt))

    def check_vocabulary(self, message: EngineRequest, vocab_size: int) -> None:
        """Refuse token ids that are outside the vocabulary, once its size is known.

        Raises as `check`.
        """
        _check_prompt(message.prompt_token_ids, vocab_size)
        if message.pooling is None:
            message.sampling.check_tokens(vocab_size)

    def _ask_processors(self, params: SamplingParams) -> None:
        for kind in self._processors:
            try:
                kind.validate_params(params)
            except QuireError:
                raise
            except ValueError as error:
                raise InvalidRequest(str(error), param="extra_args") from error

    def _check_resumption(self, message: EngineRequest) -> None:
        """Check that the output another replica has generated is consistent with the request."""
        count, resumed = message.sampling.num_sequences, message.resume_token_ids
        if resumed and len(resumed) != count:
            raise InvalidRequest(
                "resume_token_ids must hold one list an output.", param="resume_token_ids"
            )
        skipped = set(message.skip_indices)
        if skipped and (not skipped < set(range(count)) or not resumed):
            raise InvalidRequest("skip_indices is out of range.", param="skip_indices")
        positions = count_positions(len(message.prompt_token_ids), message.media)
        budget = message.sampling.output_budget(positions, self._facts.max_model_len)
        for index, token_ids in enumerate(resumed):
            if index not in skipped and len(token_ids) >= budget:
                raise InvalidRequest(
                    f"Output {index} has all of its {budget} tokens already.",
                    param="resume_token_ids",
                )

    def _check_pool(self, message: EngineRequest, num_prompt_tokens: int) -> None:
        """Refuse a request that can never fit into the pool; the error states both numbers."""
        output = 1
        if message.pooling is not None:
            output = 0
        elif message.sampling.max_tokens is not None:
            output = message.sampling.output_budget(num_prompt_tokens, self._facts.max_model_len)
        needed = num_prompt_tokens + output
        capacity = self._capacity(message)
        if needed > capacity:
            encoded = self._facts.encoder_length or self._facts.max_encoder_tokens
            reserved = f" beside the {encoded} that its encoder may read" if encoded else ""
            raise KVPoolTooSmall(
                f"The request needs up to {needed} tokens of KV cache, "
                f"but this replica's pool holds {capacity} for it{reserved}.",
                param="max_tokens" if num_prompt_tokens < capacity else "prompt",
            )

    def check_prompt_embeds(self, message: EngineRequest, embeds: Tensor) -> None:
        """Raise `InvalidRequest` unless these can replace the prompt's embeddings."""
        name = "prompt_embeds"
        if not self._config.enable_prompt_embeds:
            raise InvalidRequest("prompt_embeds need enable_prompt_embeds.", param=name)
        if not self._facts.takes_embeds:
            raise InvalidRequest("This model takes no prompt_embeds.", param=name)
        shape = (len(message.prompt_token_ids), self._facts.hidden_size)
        if tuple(embeds.shape) != shape:
            raise InvalidRequest(
                f"prompt_embeds must be {list(shape)}, got {list(embeds.shape)}.", param=name
            )
        if not bool(torch.isfinite(embeds).all()):
            raise InvalidRequest("prompt_embeds hold NaN or infinity.", param=name)
        if message.sampling.prompt_logprobs is not None:
            raise InvalidRequest(
                "There are no prompt_logprobs of prompt_embeds.", param="prompt_logprobs"
            )

    def check_media(
        self, message: EngineRequest, media: Mapping[bytes, MediaTensors], max_vectors: int
    ) -> None:
        """Raise `InvalidRequest` unless the model accepts the request's media, and all of them are
        present and in order.
        """
        if self._facts.encoder_length:
            self._check_sound(message, media)
            return
        if self._facts.max_encoder_tokens:
            self._check_encoder_text(message, media)
            return
        if not message.media:
            return
        kinds = Counter(item.kind for item in message.media)
        facts, config = self._facts, self._config
        for kind, is_supported, noun in (
            ("audio", facts.hears, "audio"),
            ("image", facts.sees, "images"),
            ("video", facts.takes_videos, "videos"),
            (TEXT, False, "text for an encoder"),
        ):
            if kinds[kind] and not is_supported:
                raise InvalidRequest(f"{config.name} takes no {noun}.", param="messages")
        for kind in MAX_MEDIA_PER_PROMPT:
            limit = config.max_media(kind)
            if kinds[kind] > limit:
                raise InvalidRequest(
                    f"A prompt may have at most {limit} {kind}s, this one has {kinds[kind]}.",
                    param="messages",
                )
        end = 0
        for item in message.media:
            for start, count in item.ranges:
                if start < end or count < 1:
                    raise InvalidRequest("Ranges of media overlap or are empty.", param="media")
                end = start + count
            if item.num_vectors > max_vectors:
                raise InvalidRequest(
                    f"{_NOUNS[item.kind]} takes {item.num_vectors} tokens; at most {max_vectors} "
                    "are taken.",
                    param="messages",
                )
            if item.digest not in media:
                raise InvalidRequest(f"{_NOUNS[item.kind]} is missing.", param="media")
            if (embeds := media[item.digest].get(EMBEDS)) is not None:
                self._check_vectors(item, embeds)
        if end > len(message.prompt_token_ids):
            raise InvalidRequest("Media reach beyond the prompt.", param="media")
        limit = facts.max_model_len - (message.pooling is None)
        check_positions(len(message.prompt_token_ids), message.media, limit)

    def _check_vectors(self, item: MediaItem, embeds: np.ndarray) -> None:
        name = f"{item.kind}_embeds"
        if not self._config.enable_prompt_embeds:
            raise InvalidRequest(f"{name} need enable_prompt_embeds.", param=name)
        if item.kind not in ("audio", "image") or not self._facts.takes_embeds:
            raise InvalidRequest("This model takes no vectors of media.", param=name)
        shape = (item.num_vectors, self._facts.hidden_size)
        if embeds.shape != shape or embeds.dtype != np.float32:
            raise InvalidRequest(
                f"{name} must be float32 {list(shape)}, got {list(embeds.shape)}.", param=name
            )
        if not np.isfinite(embeds).all():
            raise InvalidRequest(f"{name} hold NaN or infinity.", param=name)

    def _check_sound(self, message: EngineRequest, media: Mapping[bytes, MediaTensors]) -> None:
        """Raise `InvalidRequest` unless there is one audio of at most the encoder's length."""
        if [(item.kind, item.ranges) for item in message.media] != [("audio", ())]:
            raise InvalidRequest(
                f"{self._config.name} takes one audio a prompt; this one has "
                f"{len(message.media)} media.",
                param="multi_modal_data",
            )
        features = media.get(message.media[0].digest, {}).get(FEATURES)
        num_mels, longest = self._facts.num_mels, 2 * self._facts.encoder_length
        if (
            features is None
            or features.ndim != 2
            or features.shape[0] != num_mels
            or features.shape[1] not in range(2, longest + 1, 2)
            or features.dtype != np.float32
        ):
            raise InvalidRequest(
                f"The audio's features must be float32 [{num_mels}, n] with an even n of at most "
                f"{longest}.",
                param="multi_modal_data",
            )

    def _check_encoder_text(
        self, message: EngineRequest, media: Mapping[bytes, MediaTensors]
    ) -> None:
        """Raise `InvalidRequest` unless there is one text for the encoder."""
        if [(item.kind, item.ranges) for item in message.media] != [(TEXT, ())]:
            raise InvalidRequest(
                f"{self._config.name} reads one text a prompt with its encoder; this one has "
                f"{len(message.media)}.",
                param="prompt",
            )
        token_ids = media.get(message.media[0].digest, {}).get(TOKEN_IDS)
        if token_ids is None or token_ids.ndim != 1 or token_ids.dtype != np.int64:
            raise InvalidRequest("The encoder's prompt must be int64 [n].", param="prompt")
        facts = self._facts
        check_encoder_text(token_ids.tolist(), facts.max_encoder_tokens, facts.vocab_size)

    def make_request(
        self,
        message: EngineRequest,
        on_done: Callable[[], None] | None,
        prompt_embeds: Tensor | None = None,
    ) -> Request:
        """Make a request that has passed `check`, with its sequences."""
        search = message.sampling.use_beam_search
        kind = BeamRequest if search else Request
        request = kind(message, arrival_time=time.time(), on_done=on_done)
        request.remaining_tokens = _remaining_tokens(message)
        content = _content_keys(prompt_embeds, self._config.block_size)
        content += [ContentKey(item.start, item.digest) for item in message.media]
        seed = self._seed(message)
        params = message.sampling
        if isinstance(request, BeamRequest):
            beams = range(params.beam_width)
            request.sequences = [
                self._sequence(request, index, seed, content, []) for index in beams
            ]
            self._make_beams(request)
            return request
        for index in range(params.num_sequences):
            if index not in message.skip_indices:
                resumed = message.resume_token_ids[index] if message.resume_token_ids else []
                request.sequences.append(self._sequence(request, index, seed, content, resumed))
        return request

    def _make_beams(self, request: BeamRequest) -> None:
        params, longest = request.message.sampling, request.sequences[0].max_output_tokens
        max_tokens = longest
        if request.remaining_tokens is not None:
            max_tokens = min(longest, request.remaining_tokens // params.beam_width)
        ends = end_tokens(params, self._facts.eos_token_ids)
        request.beams = BeamGroup(request, ends, max_tokens, capped=max_tokens < longest)

    def _sequence(
        self,
        request: Request,
        index: int,
        seed: int,
        content: list[ContentKey],
        resumed: list[int],
    ) -> Sequence:
        message = request.message
        params, prompt = message.sampling, message.prompt_token_ids
        positions = count_positions(len(prompt), message.media)
        sequence = Sequence(
            seq_id=self._next_seq_id,
            request=request,
            index=index,
            token_ids=gc_untracked(prompt + resumed),
            num_prompt_tokens=len(prompt),
            max_output_tokens=min(
                params.output_budget(len(prompt), self._capacity(message)),
                params.output_budget(positions, self._facts.max_model_len),
            ),
            # An odd factor: no two outputs of a request share a seed.
            seed=(seed + 0x9E3779B97F4A7C15 * index) % 2**64,
            block_hashes=BlockHashes(namespace_key(*message.cache_scope), content),
            # Not in beam searches: the next token isn't simply the sampled one.
            counts_placeholders=self._has_steps_in_flight
            and not params.use_beam_search
            and message.pooling is None,
            isolated=message.isolated,
        )
        if params.prompt_logprobs is not None and index == 0:
            sequence.prompt_logprobs = [None]
        self._next_seq_id += 1
        return sequence

    def _seed(self, message: EngineRequest) -> int:
        """The request's seed; by default derived from its id, so that all replicas use the same."""
        if message.sampling.seed is not None:
            return message.sampling.seed
        digest = hashlib.sha256(f"{self._config.seed}:{message.request_id}".encode()).digest()
        return int.from_bytes(digest[:8], "little")


def _check_prompt(prompt: list[int], vocab: int | None) -> None:
    """Check that token ids are in the vocabulary; None: its size isn't known yet."""
    if min(prompt) < 0 or (vocab is not None and max(prompt) >= vocab):
        invalid = next(t for t in prompt if t < 0 or (vocab is not None and t >= vocab))
        bound = "" if vocab is None else f", but the vocabulary has {vocab} entries"
        raise InvalidRequest(f"The prompt holds token {invalid}{bound}.", param="prompt")


def _check_tenant(message: EngineRequest) -> None:
    """Check the tenant's shares, which the server sets."""
    if not 0 < message.weight < float("inf"):
        raise InvalidRequest(f"weight must be positive, got {message.weight}.", param="weight")
    if not 0 <= message.kv_reserved_fraction <= 1:
        raise InvalidRequest(
            f"kv_reserved_fraction must be in [0, 1], got {message.kv_reserved_fraction}.",
            param="kv_reserved_fraction",
        )
    if not 0 < message.kv_max_fraction <= 1:
        raise InvalidRequest(
            f"kv_max_fraction must be in (0, 1], got {message.kv_max_fraction}.",
            param="kv_max_fraction",
        )


def _content_keys(prompt_embeds: Tensor | None, block_size: int) -> list[ContentKey]:
    """Hashes of the prompt's vectors, block by block: prompts of equal ids but different vectors
    share only the blocks before the first difference.
    """
    if prompt_embeds is None:
        return []
    rows = prompt_embeds.float().cpu().contiguous().numpy()
    return [
        ContentKey(start, hashlib.sha256(rows[start : start + block_size].tobytes()).digest())
        for start in range(0, len(rows), block_size)
    ]


def _remaining_tokens(message: EngineRequest) -> int | None:
    """The server's cap, less the tokens that the client already has."""
    if message.token_cap is None:
        return None
    return message.token_cap - sum(map(len, message.resume_token_ids))
