"""LiteLLM as a client: whole, streamed."""

import json
import os

import litellm

base_url, api_key, model = (os.environ[name] for name in ("BASE_URL", "API_KEY", "MODEL"))
options = {"model": f"openai/{model}", "api_base": base_url, "api_key": api_key}
ask = [{"role": "user", "content": "What is the capital of France?"}]
full_completion = litellm.completion(messages=ask, temperature=0, **options)
chunks = [
    chunk.choices[0].delta.content or ""
    for chunk in litellm.completion(messages=ask, temperature=0, stream=True, **options)
]
print(
    json.dumps(
        {
            "whole": full_completion.choices[0].message.content,
            "streamed": "".join(chunks),
            "tokens": full_completion.usage.completion_tokens,
        }
    )
)
