"""A client that follows the API's documentation on resuming and retrying.

It resumes a broken stream with `Last-Event-ID`, repeats other requests with the same
`Idempotency-Key`, and retries 409, 429 and 503 after `Retry-After`. Any other failure counts as a
loss.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx

from chaos.answer import Answer
from chaos.kinds import BACKGROUND, BATCH, EMBEDDINGS, LINES, STREAM, Asked

DIGEST = "x-quire-adapter"
LATER = frozenset({409, 429, 503})
#: Seconds after a broken connection, and between two polls for a background response.
RETRY_S, POLL_INTERVAL_S = 0.1, 0.25
#: Seconds after which a missing response, or a stream without any event, counts as lost.
PATIENCE_S = 180.0
FINAL = frozenset({"completed", "failed", "incomplete", "cancelled", "expired"})


class Lost(Exception):
    """The response can't be obtained; the message says why."""


class Client:
    """Sends requests to one instance.

    Args:
        base_url: base URL without `/v1`.
    """

    def __init__(self, base_url: str, api_key: str) -> None:
        self._http = httpx.AsyncClient(
            base_url=base_url,
            headers={"authorization": f"Bearer {api_key}"},
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            timeout=httpx.Timeout(60, read=45),
            trust_env=False,
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def ask(self, asked: Asked) -> Answer:
        """Return the response despite faults; `lost` is set if it can't be obtained."""
        answer, how = Answer(), asked.about.how
        ask = {STREAM: self._stream, BATCH: self._batch, BACKGROUND: self._background}
        try:
            async with asyncio.timeout(None if how == STREAM else PATIENCE_S):
                await ask.get(how, self._ask_unstreamed)(asked, answer)
            answer.is_finished = True
        except TimeoutError:
            answer.lost = f"nothing for {PATIENCE_S:.0f} s"
        except Lost as loss:
            answer.lost = str(loss)
        return answer

    async def healthy(self) -> None:
        """Return once the instance reports that it is healthy."""
        await self._until_200("GET", "/health", Answer())

    # -- streams ------------------------------------------------------------------------------

    async def _stream(self, asked: Asked, answer: Answer) -> None:
        async with asyncio.timeout(PATIENCE_S) as patience:
            await self._read(asked, answer, Reader(answer), patience)

    async def _read(
        self, asked: Asked, answer: Answer, reader: Reader, patience: asyncio.Timeout
    ) -> None:
        while not reader.done:
            headers = {"last-event-id": reader.last_id} if reader.last_id else {}
            try:
                async with self._http.stream(
                    "POST", asked.about.path, json=asked.body, headers=headers
                ) as response:
                    if response.status_code == 200:
                        reader.connected(response.headers.get(DIGEST, ""))
                        async for line in response.aiter_lines():
                            if reader.line(line):
                                patience.reschedule(asyncio.get_running_loop().time() + PATIENCE_S)
                    else:
                        await response.aread()
                        await _later(response, answer)
                        continue
            except httpx.HTTPError:
                pass
            if not reader.done:
                answer.breaks += 1
                await asyncio.sleep(RETRY_S)

    # -- responses in one body ----------------------------------------------------------------

    async def _ask_unstreamed(self, asked: Asked, answer: Answer) -> None:
        with _pause(answer):
            body = await self._post(asked.about.path, asked.body, answer)
        if asked.about.path == EMBEDDINGS:
            answer.ids.add(body["id"])
            answer.content = [row["embedding"] for row in body["data"]]
            answer.record_usage(body["usage"])
        else:
            answer.record_chat(body)

    async def _post(self, path: str, body: dict[str, Any], answer: Answer) -> dict[str, Any]:
        key = {"idempotency-key": uuid.uuid4().hex}
        return await self._until_200("POST", path, answer, json=body, headers=key)

    async def _until_200(self, method: str, path: str, answer: Answer, **more: Any) -> Any:
        response = await self._response(method, path, answer, **more)
        try:
            return response.json()
        except ValueError:
            raise Lost(f"{path}: no JSON: {response.text[:100]}") from None

    async def _response(
        self, method: str, path: str, answer: Answer, **more: Any
    ) -> httpx.Response:
        while True:
            try:
                response = await self._http.request(method, path, **more)
            except httpx.HTTPError:
                answer.breaks += 1
                await asyncio.sleep(RETRY_S)
                continue
            if response.status_code == 200:
                return response
            await _later(response, answer)

    # -- batches and background responses -----------------------------------------------------

    async def _background(self, asked: Asked, answer: Answer) -> None:
        with _pause(answer):
            created = await self._post(asked.about.path, asked.body, answer)
            path = f"{asked.about.path}/{created['id']}"
            created = await self._final(path, answer)
        if created["status"] not in ("completed", "incomplete"):
            raise Lost(f"background: {created['status']}: {created.get('error')}")
        answer.ids.add(created["id"])
        answer.content = [item.get("content") for item in created["output"]]
        for item in answer.content:
            for part in item or ():
                part.pop("id", None)
        answer.record_usage(created["usage"])

    async def _final(self, path: str, answer: Answer) -> Any:
        while True:
            response = await self._until_200("GET", path, answer)
            if response["status"] in FINAL:
                return response
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _batch(self, asked: Asked, answer: Answer) -> None:
        with _pause(answer):
            text = "".join(
                json.dumps(
                    {
                        "custom_id": str(line),
                        "method": "POST",
                        "url": asked.about.path,
                        "body": asked.body | {"seed": 1000 * asked.number + line},
                    }
                )
                + "\n"
                for line in range(LINES)
            )
            upload = {"files": {"file": ("lines.jsonl", text)}, "data": {"purpose": "batch"}}
            file = await self._until_200("POST", "/v1/files", answer, **upload)
            form = {"input_file_id": file["id"], "endpoint": asked.about.path}
            created = await self._post("/v1/batches", form | {"completion_window": "24h"}, answer)
            created = await self._final(f"/v1/batches/{created['id']}", answer)
            if created["status"] != "completed" or not created["output_file_id"]:
                raise Lost(f"batch: {created['status']}: {created.get('errors')}")
            path = f"/v1/files/{created['output_file_id']}/content"
            output = await self._response("GET", path, answer)
        self._record_lines(output.text, answer)

    def _record_lines(self, text: str, answer: Answer) -> None:
        bodies: dict[str, Any] = {}
        for line in text.splitlines():
            result = json.loads(line)
            name, body = result["custom_id"], result["response"]["body"]
            answer.doubled += name in bodies
            bodies[name] = [choice["message"]["content"] for choice in body["choices"]]
            answer.ids.add(body["id"])
            answer.prompt_tokens += body["usage"]["prompt_tokens"]
            answer.completion_tokens += body["usage"]["completion_tokens"]
        if len(bodies) < LINES:
            raise Lost(f"batch: {len(bodies)} of {LINES} lines were answered")
        answer.content = sorted(bodies.items())


class Reader:
    """Parses a stream's lines into an answer, across any number of connections."""

    def __init__(self, answer: Answer) -> None:
        self.last_id, self.done = "", False
        self._answer, self._seen_ids = answer, set[str]()
        self._id = self._data = ""
        self._came = time.monotonic()

    def connected(self, digest: str) -> None:
        """Begin a new connection, discarding an incomplete event of the previous one."""
        self._id = self._data = ""
        self._answer.digests |= {digest} - {""}

    def line(self, line: str) -> bool:
        """Parse one line; return whether it completed an event, which a blank line does."""
        name, _, value = line.partition(": ")
        if name == "id":
            self._id = value
        elif name == "data":
            self._data = value
        elif not line and self._data:
            self._event()
            self._id = self._data = ""
            return True
        return False

    def _event(self) -> None:
        if self._id:
            self.last_id = self._id
            self._answer.doubled += self._id in self._seen_ids
            self._seen_ids.add(self._id)
        if self._data == "[DONE]":
            self.done = True
            return
        now = time.monotonic()
        self._answer.longest = max(self._answer.longest, now - self._came)
        self._came = now
        event = json.loads(self._data)
        if "error" in event:
            raise Lost(f"the stream ended with {event['error']}")
        self._answer.record_chunk(event)


@asynccontextmanager
async def clients(base_url: str, api_key: str) -> AsyncIterator[Client]:
    """Provide a client, and close it at the end."""
    client = Client(base_url, api_key)
    try:
        yield client
    finally:
        await client.close()


class _pause:
    """Records how long the block takes as the answer's longest time without data."""

    def __init__(self, answer: Answer, clock: Callable[[], float] = time.monotonic) -> None:
        self._answer, self._clock = answer, clock

    def __enter__(self) -> None:
        self._began = self._clock()

    def __exit__(self, *_: object) -> None:
        self._answer.longest = self._clock() - self._began


async def _later(response: httpx.Response, answer: Answer) -> None:
    """Wait as long as a "retry later" response asks; raise `Lost` for any other response."""
    if response.status_code not in LATER:
        raise Lost(f"{response.status_code}: {response.text[:300]}")
    answer.refusals += 1
    wait = response.headers.get("retry-after-ms")
    seconds = float(wait) / 1000 if wait else float(response.headers.get("retry-after", "1"))
    await asyncio.sleep(min(max(seconds, RETRY_S), 10))
