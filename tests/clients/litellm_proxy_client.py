"""LiteLLM's proxy in front of Quire, and OpenAI's SDK through it: what teams put before servers.

The proxy has keys of its own; Quire's stands in its configuration. It ends with this program, even
if that is killed.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import openai

MASTER_KEY = "sk-of-the-proxy"
START_S = 240
ASK = [{"role": "user", "content": "What is the capital of France?"}]
base_url, api_key, model, embedder = (
    os.environ[name] for name in ("BASE_URL", "API_KEY", "MODEL", "EMBEDDER")
)


def config() -> str:
    """The proxy's configuration (JSON is YAML)."""
    quire = {"api_base": base_url, "api_key": api_key}
    names = (("guide", f"hosted_vllm/{model}"), ("plain", f"openai/{model}"))
    models = [
        {"model_name": name, "litellm_params": {"model": target, **quire}} for name, target in names
    ]
    models.append(
        {"model_name": "vectors", "litellm_params": {"model": f"openai/{embedder}", **quire}}
    )
    return json.dumps(
        {"model_list": models, "general_settings": {"master_key": MASTER_KEY}}, indent=1
    )


def free_port() -> int:
    """One of loopback's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def end_with_parent() -> None:
    """Have the kernel kill this process when the one that started it is gone (Linux)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def wait_for(client: openai.OpenAI, proxy: subprocess.Popen[bytes], log: Path) -> list[str]:
    """The models that the proxy lists, once it answers."""
    end = time.monotonic() + START_S
    while proxy.poll() is None and time.monotonic() < end:
        try:
            return sorted(model.id for model in client.models.list())
        except openai.APIConnectionError:
            time.sleep(0.3)
    raise RuntimeError(f"The proxy doesn't answer: {log.read_text(errors='replace')[-2000:]}")


def ask(client: openai.OpenAI) -> dict[str, object]:
    """Through both of LiteLLM's ways to such a server: whole, streamed, with a tool, as vectors."""
    answers: dict[str, object] = {}
    for name in ("guide", "plain"):
        full_completion = client.chat.completions.create(model=name, messages=ASK, temperature=0)
        answers[name] = full_completion.choices[0].message.content
        stream = client.chat.completions.create(
            model=name,
            messages=ASK,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        answers[f"{name}_streamed"] = "".join(
            chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices
        )
        answers[f"{name}_tokens"] = [
            chunk.usage.completion_tokens for chunk in chunks if chunk.usage
        ]
    weather = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Rome", "Paris"]}},
                "required": ["city"],
            },
        },
    }
    called = client.chat.completions.create(
        model="guide",
        messages=[{"role": "user", "content": "Weather in Rome?"}],
        temperature=0,
        tools=[weather],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    calls = called.choices[0].message.tool_calls or []
    answers["calls"] = [
        [call.function.name, sorted(json.loads(call.function.arguments))] for call in calls
    ]
    vectors = client.embeddings.create(model="vectors", input=["Paris", "Rome"])
    answers["vectors"] = [len(vector.embedding) for vector in vectors.data]
    try:
        client.chat.completions.create(model="guide", messages=ASK, temperature=-1)
    except openai.BadRequestError as error:
        answers["refused"] = str(error)
    return answers


def main() -> None:
    """Start the proxy, ask, and stop it."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder, "config.yaml"), Path(folder, "log")
        file.write_text(config())
        command = [str(Path(sys.executable).with_name("litellm")), "--config", str(file)]
        with log.open("wb") as output:
            proxy = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"],
                cwd=folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=end_with_parent,
            )
        client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key=MASTER_KEY, max_retries=0, timeout=60
        )
        try:
            answers = {"models": wait_for(client, proxy, log)} | ask(client)
        finally:
            proxy.terminate()
            proxy.wait(timeout=60)
    print(json.dumps(answers))


main()
