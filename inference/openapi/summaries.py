"""What the reference says at a glance: the groups in the order of interest, a line an operation."""

from __future__ import annotations

from typing import Any

INTRODUCTION = (
    "OpenAI's API, Anthropic's Messages and more, served from your own machines. Send an API key "
    "as `Authorization: Bearer sk-quire-...`, or as `x-api-key`."
)

TAGS = {
    "Chat": "Answers to a conversation. Those made with `store` can be listed and changed.",
    "Responses": "OpenAI's Responses: answers that are stored and can be continued or run later.",
    "Conversations": "Conversations that responses read and add to.",
    "Completions": "Text that continues a prompt.",
    "Messages": "Anthropic's Messages.",
    "Models": "The models that this key may use.",
    "Pooling": "Embeddings, classes, scores and rerankings, with models made for them.",
    "Files": "Files of a tenant: the input and output of batches.",
    "Batches": "Many requests in a file, answered in the background.",
    "Tokens": "Text to token ids and back.",
    "Organization": "What was used and what it cost, for keys with the scope `usage:read`.",
    "Service": "The state of this installation. No key is needed.",
    "Operator": "For keys with the operator's scope.",
}

SUMMARIES = {
    "post /v1/chat/completions": "Answer a conversation",
    "get /v1/chat/completions": "List stored answers",
    "get /v1/chat/completions/{completion_id}": "Read a stored answer",
    "post /v1/chat/completions/{completion_id}": "Change a stored answer's metadata",
    "delete /v1/chat/completions/{completion_id}": "Delete a stored answer",
    "get /v1/chat/completions/{completion_id}/messages": "List the messages of a stored answer",
    "post /v1/chat/completions/batch": "Answer several conversations at once",
    "post /v1/responses": "Create a response",
    "post /v1/chat/completions/render": "See a conversation's tokens",
    "post /v1/completions/render": "See a prompt's tokens",
    "post /v1/responses/render": "See an input's tokens",
    "post /v1/messages/render": "See a conversation's tokens",
    "post /inference/v1/generate": "Generate token ids from token ids",
    "post /generate": "Complete a prompt, as vLLM's oldest server does",
    "post /invocations": "Call any endpoint, recognised by the fields",
    "post /v1/responses/input_tokens": "Count an input's tokens",
    "get /v1/responses/{response_id}": "Read a response",
    "delete /v1/responses/{response_id}": "Delete a response",
    "post /v1/responses/{response_id}/cancel": "Cancel a background response",
    "get /v1/responses/{response_id}/input_items": "List a response's input",
    "post /v1/responses/compact": "Shorten a conversation",
    "post /v1/conversations": "Create a conversation",
    "get /v1/conversations/{conversation_id}": "Read a conversation's metadata",
    "post /v1/conversations/{conversation_id}": "Change a conversation's metadata",
    "delete /v1/conversations/{conversation_id}": "Delete a conversation",
    "get /v1/conversations/{conversation_id}/items": "List a conversation's items",
    "post /v1/conversations/{conversation_id}/items": "Add items to a conversation",
    "get /v1/conversations/{conversation_id}/items/{item_id}": "Read an item",
    "delete /v1/conversations/{conversation_id}/items/{item_id}": "Delete an item",
    "post /v1/completions": "Complete a prompt",
    "post /v1/messages": "Answer a conversation",
    "post /v1/messages/count_tokens": "Count a conversation's tokens",
    "get /v1/messages/batches": "List batches of messages",
    "post /v1/messages/batches": "Start a batch of messages",
    "get /v1/messages/batches/{batch_id}": "Read a batch's progress",
    "delete /v1/messages/batches/{batch_id}": "Delete a batch",
    "post /v1/messages/batches/{batch_id}/cancel": "Cancel a batch",
    "get /v1/messages/batches/{batch_id}/results": "Read a batch's results",
    "get /v1/models": "List models",
    "get /v1/models/{model}": "Read a model's facts",
    "get /v1/organization/usage/completions": "Sum up the usage of generating endpoints",
    "get /v1/organization/usage/embeddings": "Sum up the usage of pooling endpoints",
    "get /v1/organization/costs": "Sum up costs",
    "post /v1/embeddings": "Embed texts",
    "post /v1/moderations": "Moderate texts with a classifier",
    "post /pooling": "Pool texts by the model's own task",
    "post /classify": "Classify texts",
    "post /v1/classify": "Classify texts",
    "post /score": "Score pairs of texts",
    "post /v1/score": "Score pairs of texts",
    "post /rerank": "Rank documents for a query",
    "post /v1/rerank": "Rank documents for a query",
    "post /v2/rerank": "Rank documents for a query",
    "get /v1/files": "List files",
    "post /v1/files": "Upload a file",
    "get /v1/files/{file_id}": "Read a file's facts",
    "delete /v1/files/{file_id}": "Delete a file",
    "get /v1/files/{file_id}/content": "Download a file",
    "post /v1/uploads": "Announce a file that comes in parts",
    "post /v1/uploads/{upload_id}/parts": "Send a part of an upload",
    "post /v1/uploads/{upload_id}/complete": "Make the file from its parts",
    "post /v1/uploads/{upload_id}/cancel": "Cancel an upload",
    "get /v1/batches": "List batches",
    "post /v1/batches": "Start a batch",
    "get /v1/batches/{batch_id}": "Read a batch's progress",
    "post /v1/batches/{batch_id}/cancel": "Cancel a batch",
    "post /tokenize": "Turn text or a conversation into tokens",
    "post /detokenize": "Turn tokens into text",
    "get /health": "Whether all models can answer",
    "get /ping": "Whether this gateway answers",
    "post /ping": "Whether this gateway answers",
    "get /version": "The version",
    "get /metrics": "Figures for Prometheus",
    "get /load": "How many requests run and wait",
    "get /server_info": "Settings and replicas",
    "post /reset_prefix_cache": "Empty the prefix caches",
    "post /reset_mm_cache": "Does nothing: there is no such cache",
    "post /reset_encoder_cache": "Does nothing: there is no such cache",
    "post /pause": "Pause replicas",
    "post /resume": "Resume replicas",
    "get /is_paused": "Whether any replica is paused",
    "post /abort_requests": "Abort requests",
    "post /start_profile": "Start a profile",
    "post /stop_profile": "Stop the profile and write the trace",
    "post /collective_rpc": "Run a method on all replicas",
    "get /tokenizer_info": "Read a tokenizer's configuration",
    "post /v1/load_lora_adapter": "Load a LoRA adapter for all tenants",
    "post /v1/unload_lora_adapter": "Unload a LoRA adapter",
    "post /sleep": "Put replicas to sleep to free their memory",
    "post /wake_up": "Wake replicas up",
    "get /is_sleeping": "Whether any replica sleeps",
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
