"""A call of each operation that runs as it is shown, with a key in the environment."""

from __future__ import annotations

import json
import shlex
from typing import Any

#: Stands for a model in all examples; the page puts in one that its reader may use.
MODEL = "MODEL"
_CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Say hello."}]}
_TEXTS = {"model": MODEL, "input": ["A fox ran.", "A fox slept."]}
_RANKING = {"model": MODEL, "query": "What is a fox?", "documents": ["An animal.", "A river."]}
_PAIRS = {"model": MODEL, "text_1": "A fox ran.", "text_2": ["An animal moved.", "It rained."]}
_RESPONSE = {"model": MODEL, "input": "Say hello."}
_LORA = {"lora_name": "pirate", "lora_path": "/path/to/adapter"}
_FUNCTION = {
    "name": "weather",
    "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}

BODIES: dict[str, Any] = {
    "/v1/chat/completions": {**_CHAT, "stream": True},
    "/v1/chat/completions/batch": {
        "model": MODEL,
        "messages": [_CHAT["messages"], [{"role": "user", "content": "Say goodbye."}]],
    },
    "/v1/chat/completions/render": {
        **_CHAT,
        "tools": [{"type": "function", "function": _FUNCTION}],
    },
    "/v1/chat/completions/{completion_id}": {"metadata": {"topic": "greetings"}},
    "/v1/responses": _RESPONSE,
    "/v1/responses/render": _RESPONSE,
    "/v1/responses/input_tokens": _RESPONSE,
    "/v1/responses/compact": {
        "model": MODEL,
        "input": [
            {"role": "user", "content": "My dog is called Rex."},
            {"role": "assistant", "content": "A fine name!"},
        ],
    },
    "/v1/conversations": {
        "items": [{"type": "message", "role": "user", "content": "My dog is called Rex."}],
        "metadata": {"topic": "dogs"},
    },
    "/v1/conversations/{conversation_id}": {"metadata": {"topic": "greetings"}},
    "/v1/conversations/{conversation_id}/items": {
        "items": [{"type": "message", "role": "user", "content": "Say hello."}]
    },
    "/v1/completions": {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 32},
    "/v1/completions/render": {"model": MODEL, "prompt": "Once upon a time"},
    "/generate": {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 32},
    "/invocations": {**_CHAT, "max_tokens": 32},
    "/v1/messages": {**_CHAT, "max_tokens": 64},
    "/v1/messages/batches": {
        "requests": [{"custom_id": "1", "params": {**_CHAT, "max_tokens": 64}}]
    },
    "/v1/messages/count_tokens": _CHAT,
    "/v1/messages/render": {**_CHAT, "max_tokens": 64},
    "/v1/embeddings": _TEXTS,
    "/v1/moderations": {"model": MODEL, "input": "A fox ran."},
    "/pooling": _TEXTS,
    "/classify": _TEXTS,
    "/v1/classify": _TEXTS,
    "/score": _PAIRS,
    "/v1/score": _PAIRS,
    "/rerank": _RANKING,
    "/v1/rerank": _RANKING,
    "/v2/rerank": _RANKING,
    "/v1/uploads": {
        "bytes": 1000,
        "filename": "batch.jsonl",
        "mime_type": "application/jsonl",
        "purpose": "batch",
    },
    "/v1/uploads/{upload_id}/complete": {"part_ids": ["part_00000000000000000000000000000000"]},
    "/v1/batches": {
        "input_file_id": "file-00000000000000000000000000000000",
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    },
    "/tokenize": {"model": MODEL, "prompt": "A fox ran."},
    "/detokenize": {"model": MODEL, "tokens": [1, 2, 3]},
    "/inference/v1/generate": {
        "model": MODEL,
        "token_ids": [1, 2, 3],
        "sampling_params": {"max_tokens": 16},
    },
    "/abort_requests": {"request_ids": ["chatcmpl-00000000000000000000000000000000"]},
    "/collective_rpc": {"method": "check_integrity"},
    "/v1/load_lora_adapter": _LORA,
    "/v1/unload_lora_adapter": {"lora_name": "pirate"},
}
#: What stands for parts of a path. The ids are nobody's: one's own belong there.
PARTS = {
    "model": MODEL,
    "batch_id": "batch_00000000000000000000000000000000",
    "completion_id": "chatcmpl-00000000000000000000000000000000",
    "conversation_id": "conv_00000000000000000000000000000000",
    "item_id": "msg_00000000000000000000000000000000",
    "upload_id": "upload_00000000000000000000000000000000",
    "file_id": "file-00000000000000000000000000000000",
    "response_id": "resp_00000000000000000000000000000000",
}
_MESSAGE_BATCH = "msgbatch_00000000000000000000000000000000"
#: What an address needs, as a shell works it out.
_SINCE = '"?start_time=$(($(date +%s) - 86400))"'
_FILE = (
    'echo \'{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": '
    f"{json.dumps(_CHAT)}}}' > batch.jsonl\n"
)


def curl(method: str, path: str, base: str, *, multipart: bool = False) -> str:
    """The operation as a shell command. The key comes from QUIRE_API_KEY."""
    parts = PARTS if not path.startswith("/v1/messages/") else PARTS | {"batch_id": _MESSAGE_BATCH}
    address = shlex.quote(base + path.format(**parts))
    if path.startswith("/v1/organization/"):
        address += _SINCE
    lines = [f"curl {address}"]
    if method not in ("get", "post"):
        lines[0] += f" -X {method.upper()}"
    lines.append('-H "Authorization: Bearer $QUIRE_API_KEY"')
    if multipart and path != "/v1/files":
        return _FILE + _joined([*lines, "-F data=@batch.jsonl"])
    if multipart:
        return _FILE + _joined([*lines, "-F purpose=batch", "-F file=@batch.jsonl"])
    body = BODIES.get(path) if method == "post" else None
    if body is None:
        return _joined([*lines, "-X POST"] if method == "post" else lines)
    lines += ['-H "Content-Type: application/json"', "-d @- <<'JSON'"]
    return f"{_joined(lines)}\n{json.dumps(body, indent=2)}\nJSON"


def _joined(parts: list[str]) -> str:
    return " \\\n  ".join(parts)
