"""vLLM's API according to its manuals: data for docs/inventory.md, without what Quire supports."""

from __future__ import annotations

from dataclasses import dataclass

#: Of the bodies of both, of `/v1/chat/completions` alone, and of `/v1/completions` alone, where
#: those of the oldest `/generate` are too.
BOTH = """
model n best_of stream stream_options temperature top_p top_k min_p presence_penalty
frequency_penalty repetition_penalty repetition_detection seed stop stop_token_ids bad_words
logit_bias allowed_token_ids ignore_eos max_tokens min_tokens logprobs echo prompt_logprobs
skip_special_tokens truncation_side logprob_token_ids spaces_between_special_tokens
include_stop_str_in_output truncate_prompt_tokens priority service_tier metadata user cache_salt
return_token_ids return_tokens_as_token_ids response_format structured_outputs guided_json
guided_regex guided_choice guided_grammar guided_json_object guided_decoding_backend
guided_whitespace_pattern add_special_tokens use_beam_search length_penalty early_stopping
logits_processors kv_transfer_params ec_transfer_params vllm_xargs
"""
CHAT = """
messages max_completion_tokens top_logprobs store tools tool_choice parallel_tool_calls functions
function_call add_generation_prompt continue_final_message documents chat_template
chat_template_kwargs reasoning_effort include_reasoning thinking_token_budget mm_processor_kwargs
media_io_kwargs modalities audio prediction web_search_options verbosity moderation
"""
COMPLETIONS = "prompt suffix prompt_embeds detokenize"

#: Field without effect -> the reason, or what has the same effect.
WITHOUT_EFFECT = {
    "audio": "answers are text alone",
    "detokenize": "the text always comes; `return_token_ids` adds the ids",
    "function_call": "`tool_choice`",
    "functions": "`tools`",
    "logits_processors": "`logit_bias`, `bad_words`, `allowed_token_ids`",
    "modalities": "answers are text alone",
    "moderation": "`/v1/moderations`",
    "prediction": "a wish for speed: the engine drafts for itself, [speculation](speculation.md)",
    "verbosity": "no model reads it; the prompt can say it",
    "web_search_options": "nothing searches the web; a tool of the client's can",
}


@dataclass(frozen=True)
class Route:
    """A route of vLLM's server, or one of OpenAI's that clients of vLLM use.

    Attributes:
        ours: Quire's equivalent, if its path differs. reason: why there is none.
    """

    method: str
    path: str
    ours: str = ""
    reason: str = ""


_SPEECH = "models that speak don't run here"
_WEIGHTS = "weights are read from checkpoints alone"


def _of(method: str, paths: str) -> tuple[Route, ...]:
    return tuple(Route(method, path) for path in paths.split())


ROUTES: tuple[Route, ...] = (
    *_of(
        "POST",
        """
        /v1/chat/completions /v1/chat/completions/batch /v1/chat/completions/render
        /v1/completions /v1/completions/render /v1/responses /v1/responses/{id}/cancel
        /v1/responses/input_tokens /v1/responses/compact /v1/messages /v1/messages/count_tokens
        /v1/messages/batches /v1/embeddings /v1/score /score /rerank /v1/rerank /v2/rerank
        /classify /pooling /v1/moderations /v1/files /v1/batches /v1/batches/{id}/cancel
        /v1/uploads /v1/uploads/{id}/parts /v1/uploads/{id}/complete /v1/uploads/{id}/cancel
        /v1/conversations /v1/load_lora_adapter /v1/unload_lora_adapter /tokenize /detokenize
        /generate /inference/v1/generate /invocations /reset_prefix_cache /reset_mm_cache
        /reset_encoder_cache /sleep /wake_up /pause /resume /abort_requests /start_profile
        /stop_profile /collective_rpc
        """,
    ),
    *_of(
        "GET",
        """
        /v1/models /v1/models/{id} /v1/responses/{id} /v1/chat/completions/{id} /v1/files
        /v1/files/{id} /v1/files/{id}/content /v1/batches /v1/batches/{id} /metrics /health /ping
        /version /load /server_info /is_sleeping /is_paused /tokenizer_info /openapi.json
        """,
    ),
    Route("POST", "/v1/lora/load"),
    Route("POST", "/v1/lora/unload"),
    Route("POST", "/v1/generate"),
    Route("GET", "/docs", "/openapi.json", "`/reference/` is the page"),
    Route("POST", "/v1/audio/transcriptions"),
    Route("POST", "/v1/audio/translations"),
    Route("POST", "/v1/audio/speech", reason=_SPEECH),
    Route(
        "GET",
        "/v1/realtime",
        reason="a WebSocket is, in OpenAI's transcription form",
    ),
    Route("POST", "/v1/images/generations", reason="models of images don't run here"),
    Route("POST", "/v1/fine_tuning/jobs", reason="nothing is trained here; adapters are uploaded"),
    Route("POST", "/scale_elastic_ep"),
    Route("POST", "/is_scaling_elastic_ep"),
    Route("GET", "/get_world_size"),
    Route("POST", "/init_weight_transfer_engine", reason=_WEIGHTS),
    Route("POST", "/update_weights", reason=_WEIGHTS),
)

#: Names as in a scrape, by type.
METRICS = {
    "gauge": """
        vllm:num_requests_running vllm:num_requests_waiting vllm:num_requests_swapped
        vllm:gpu_cache_usage_perc vllm:cpu_cache_usage_perc vllm:kv_cache_usage_perc
        vllm:cache_config_info vllm:lora_requests_info vllm:spec_decode_draft_acceptance_rate
        vllm:spec_decode_efficiency vllm:engine_sleep_state
        vllm:avg_prompt_throughput_toks_per_s vllm:avg_generation_throughput_toks_per_s
        python_info process_virtual_memory_bytes process_resident_memory_bytes
        process_start_time_seconds process_open_fds process_max_fds
    """,
    "counter": """
        vllm:num_preemptions_total vllm:prompt_tokens_total vllm:generation_tokens_total
        vllm:prompt_tokens_cached_total vllm:prefix_cache_queries_total
        vllm:prefix_cache_hits_total vllm:gpu_prefix_cache_queries_total
        vllm:gpu_prefix_cache_hits_total vllm:request_success_total vllm:tokens_total
        vllm:spec_decode_num_drafts_total vllm:spec_decode_num_draft_tokens_total
        vllm:spec_decode_num_accepted_tokens_total vllm:spec_decode_num_emitted_tokens_total
        python_gc_objects_collected_total python_gc_objects_uncollectable_total
        python_gc_collections_total process_cpu_seconds_total http_requests_total
    """,
    "histogram": """
        vllm:time_to_first_token_seconds vllm:time_per_output_token_seconds
        vllm:inter_token_latency_seconds vllm:request_time_per_output_token_seconds
        vllm:e2e_request_latency_seconds vllm:request_queue_time_seconds
        vllm:request_prefill_time_seconds vllm:request_decode_time_seconds
        vllm:request_inference_time_seconds vllm:request_prompt_tokens
        vllm:request_generation_tokens vllm:request_max_num_generation_tokens
        vllm:request_params_n vllm:request_params_best_of vllm:request_params_max_tokens
        vllm:request_prefill_kv_computed_tokens vllm:iteration_tokens_total
        vllm:kv_block_lifetime_seconds vllm:kv_block_idle_before_evict_seconds
        vllm:kv_block_reuse_gap_seconds vllm:time_in_queue_requests
        vllm:model_forward_time_milliseconds vllm:model_execute_time_milliseconds
        http_request_duration_seconds http_request_duration_highr_seconds
    """,
    "summary": "http_request_size_bytes http_response_size_bytes",
}
