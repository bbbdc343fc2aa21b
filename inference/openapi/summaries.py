"""What the reference says at a glance: the groups in the order of interest, a line an operation."""

from __future__ import annotations

from typing import Any

INTRODUCTION = (
    "OpenAI's API and its neighbours, served from your own machines. Send an API key as "
    "`Authorization: Bearer sk-quire-...`, or as `x-api-key`."
)

TAGS = {
    "Chat": "Answers to a conversation; those asked for with `store` can be listed and changed.",
    "Responses": "OpenAI's Responses: answers that remember, stream events or run in background.",
    "Conversations": "What responses read and add to, kept turn by turn.",
    "Completions": "Text that goes on from a prompt.",
    "Messages": "Anthropic's Messages.",
    "Models": "What this key may ask.",
    "Pooling": "Embeddings, classes, scores and rerankings, with models made for them.",
    "Files": "Files of a tenant: the input and output of batches.",
    "Batches": "Many requests in a file, answered when there's room.",
    "Tokens": "Text to token ids and back.",
    "Organization": "What was used and what it cost, for keys with the scope `usage:read`.",
    "Service": "How this installation is. No key is needed.",
    "Operator": "For keys with the operator's scope.",
}

SUMMARIES = {
    "post /v1/chat/completions": "Answer a conversation",
    "get /v1/chat/completions": "List stored answers",
    "get /v1/chat/completions/{completion_id}": "Read a stored answer",
    "post /v1/chat/completions/{completion_id}": "Change its metadata",
    "delete /v1/chat/completions/{completion_id}": "Delete it",
    "get /v1/chat/completions/{completion_id}/messages": "List its messages",
    "post /v1/chat/completions/batch": "Answer several conversations at once",
    "post /v1/responses": "Make a response",
    "post /v1/chat/completions/render": "See a conversation's tokens",
    "post /v1/completions/render": "See a prompt's tokens",
    "post /v1/responses/render": "See an input's tokens",
    "post /v1/messages/render": "See a conversation's tokens",
    "post /inference/v1/generate": "Token ids from token ids",
    "post /generate": "Complete a prompt, as vLLM's oldest server does",
    "post /invocations": "Any of the endpoints, told by the fields",
    "post /v1/responses/input_tokens": "Count an input's tokens",
    "get /v1/responses/{response_id}": "Read a response",
    "delete /v1/responses/{response_id}": "Delete it",
    "post /v1/responses/{response_id}/cancel": "Stop it",
    "get /v1/responses/{response_id}/input_items": "List its input",
    "post /v1/responses/compact": "Make a conversation short",
    "post /v1/conversations": "Begin a conversation",
    "get /v1/conversations/{conversation_id}": "Read about a conversation",
    "post /v1/conversations/{conversation_id}": "Change its metadata",
    "delete /v1/conversations/{conversation_id}": "Delete it",
    "get /v1/conversations/{conversation_id}/items": "List its items",
    "post /v1/conversations/{conversation_id}/items": "Add items",
    "get /v1/conversations/{conversation_id}/items/{item_id}": "Read an item",
    "delete /v1/conversations/{conversation_id}/items/{item_id}": "Delete an item",
    "post /v1/completions": "Complete a prompt",
    "post /v1/messages": "Answer a conversation",
    "post /v1/messages/count_tokens": "Count a conversation's tokens",
    "get /v1/messages/batches": "List batches of messages",
    "post /v1/messages/batches": "Start a batch of messages",
    "get /v1/messages/batches/{batch_id}": "See how far it is",
    "delete /v1/messages/batches/{batch_id}": "Delete it",
    "post /v1/messages/batches/{batch_id}/cancel": "Stop it",
    "get /v1/messages/batches/{batch_id}/results": "Read its results",
    "get /v1/models": "List models",
    "get /v1/models/{model}": "Read about a model",
    "get /v1/organization/usage/completions": "Sum up what was generated",
    "get /v1/organization/usage/embeddings": "Sum up what was embedded or scored",
    "get /v1/organization/costs": "Sum up what it cost",
    "post /v1/embeddings": "Embed texts",
    "post /v1/moderations": "Judge texts with a classifier",
    "post /pooling": "Pool texts as the model does",
    "post /classify": "Classify texts",
    "post /v1/classify": "Classify texts",
    "post /score": "Score pairs of texts",
    "post /v1/score": "Score pairs of texts",
    "post /rerank": "Rank documents for a query",
    "post /v1/rerank": "Rank documents for a query",
    "post /v2/rerank": "Rank documents for a query",
    "get /v1/files": "List files",
    "post /v1/files": "Upload a file",
    "get /v1/files/{file_id}": "Read about a file",
    "delete /v1/files/{file_id}": "Delete it",
    "get /v1/files/{file_id}/content": "Download it",
    "post /v1/uploads": "Announce a file that comes in parts",
    "post /v1/uploads/{upload_id}/parts": "Send a part",
    "post /v1/uploads/{upload_id}/complete": "Make the file of its parts",
    "post /v1/uploads/{upload_id}/cancel": "Drop it",
    "get /v1/batches": "List batches",
    "post /v1/batches": "Start a batch",
    "get /v1/batches/{batch_id}": "See how far it is",
    "post /v1/batches/{batch_id}/cancel": "Stop it",
    "post /tokenize": "Text or a conversation to tokens",
    "post /detokenize": "Tokens to text",
    "get /health": "Whether every model can be asked",
    "get /ping": "Whether this gateway answers",
    "post /ping": "Whether this gateway answers",
    "get /version": "The version",
    "get /metrics": "Figures for Prometheus",
    "get /load": "How many requests run and wait",
    "get /server_info": "Settings and replicas",
    "post /reset_prefix_cache": "Empty the prefix caches",
    "post /reset_mm_cache": "Empty a cache that text needs none of",
    "post /reset_encoder_cache": "Empty a cache that text needs none of",
    "post /pause": "Have replicas take nothing new, or stand still",
    "post /resume": "Have them go on",
    "get /is_paused": "Whether any is paused",
    "post /abort_requests": "End requests",
    "post /start_profile": "Begin a profile",
    "post /stop_profile": "End it and write the trace",
    "post /collective_rpc": "Have all replicas run a method",
    "get /tokenizer_info": "What a tokenizer's files say",
    "post /v1/load_lora_adapter": "Load a LoRA adapter for all tenants",
    "post /v1/unload_lora_adapter": "Take it away",
    "post /sleep": "Have replicas give their memory back",
    "post /wake_up": "Have them take it again",
    "get /is_sleeping": "Whether any sleeps",
}


def summarise(document: dict[str, Any]) -> None:
    """Add introduction, groups and summaries to a document of OpenAPI, in place.

    Raises: KeyError for an operation that has none.
    """
    document["info"]["description"] = INTRODUCTION
    document["tags"] = [{"name": name, "description": text} for name, text in TAGS.items()]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            operation["summary"] = SUMMARIES[f"{method} {path}"]
