"""`WS /v1/realtime`: transcribes audio as it arrives, with OpenAI's transcription events."""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import math
import time
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

import msgspec
from channels.generic.websocket import AsyncWebsocketConsumer

from common.draining import keep_open_while
from common.log_context import bind_request
from engine.contract.errors import InvalidRequest, QuireError
from engine.multimodal.inputs import PreparedSound
from inference.api.audio.form import AudioForm
from inference.api.audio.segments import WindowText, transcript
from inference.api.audio.transcription import Transcription, load_model, open_transcription
from inference.api.audio.turns import SoundBuffer, TurnDetection, wav_file
from inference.errors import as_quire_error, envelope, report
from inference.loop.offload import get_render_pool
from inference.request.context import (
    RequestContext,
    RequestRecord,
    log_rejected_request,
    new_id,
)
from inference.schemas.realtime import (
    SessionUpdate,
    TranscriptionSession,
    check_supported,
    merge_settings,
)
from inference.web.authentication import FailedKeyLimiter
from inference.web.json_body import parse_object
from tenants import api_keys as scopes
from tenants.audit import client_ip
from tenants.authentication import Caller, authenticate, caller_for_user, check_still_valid
from tenants.sessions import snapshot_session
from tenants.websockets import origin_allowed, session_monitor, user_of_session

logger = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode

PATH = "/v1/realtime"
#: Maximum size of one frame: 49 s of audio.
MAX_FRAME_CHARS = 3 << 20
#: Maximum seconds of audio in a session that wait to be transcribed.
MAX_WAITING_SECONDS = 600
#: Maximum duration of a session, as at OpenAI.
MAX_SESSION_S = 3600.0
#: OpenAI's minimum length of a turn that a client commits.
MIN_TURN_MS = 100
#: Close codes: the caller isn't authenticated; the frame is not an event.
REFUSED, BAD_FRAME = 4401, 1003
#: Subprotocol in which browsers, which can't set headers, send a key.
_KEY_PROTOCOL = "openai-insecure-api-key."
_TRANSCRIPTION = "conversation.item.input_audio_transcription"


@dataclass(frozen=True, slots=True)
class Turn:
    """Committed audio, with the settings of that moment."""

    item_id: str
    form: AudioForm
    num_bytes: int


class RealtimeConsumer(AsyncWebsocketConsumer):
    """One session: it receives audio, and a task transcribes one turn after another."""

    # A channel layer without groups: an idle socket has no subscription in Redis.
    channel_layer_alias = "none"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._caller: Caller | None = None
        self._id = new_id("sess")
        self._session = TranscriptionSession()
        self._buffer = _new_buffer(self._session)
        self._item_id = new_id("item")
        self._previous_item_id: str | None = None
        self._turns: asyncio.Queue[Turn] = asyncio.Queue()
        #: Bytes of audio in `_turns` and in the turn that is being transcribed.
        self._num_waiting = 0
        self._expires_at = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def connect(self) -> None:
        """Accept the socket before anything is checked, so that a rejection can carry a reason."""
        protocols = self.scope.get("subprotocols") or []
        await self.accept("realtime" if "realtime" in protocols else None)
        query = parse_qs(self.scope.get("query_string", b"").decode("latin1"))
        try:
            tenant = query.get("tenant", [""])[0] or None
            self._caller = await self._authenticate(protocols, tenant)
            intent = query.get("intent", ["transcription"])[0]
            if intent != "transcription":
                raise InvalidRequest("intent must be 'transcription'.", param="intent")
        except QuireError as error:
            await self._send_error(error)
            await self.close(REFUSED)
            return
        bind_request(request_id=self._id, tenant=self._caller.tenant)
        if model := query.get("model", [""])[0][:200]:
            self._session.audio.input.transcription.model = model
        keep_open_while(self.scope, lambda: self._num_waiting > 0)
        self._expires_at = int(time.time() + MAX_SESSION_S)
        self._tasks = [
            asyncio.create_task(self._transcribe_turns()),
            asyncio.create_task(self._expire()),
        ]
        await self._send_event("session.created", session=self._describe_session())

    async def _authenticate(self, protocols: list[str], tenant: str | None) -> Caller:
        """The caller by key, or by session for pages of this server, which send no key.

        Raises: what `authenticate` and `caller_for_user` raise.
        """
        headers = {
            name.decode("latin1").lower(): value.decode("latin1")
            for name, value in self.scope["headers"]
        }
        address = (self.scope.get("client") or [""])[0]
        client_ip.set(address)
        keys = [name for name in protocols if name.startswith(_KEY_PROTOCOL)]
        authorization = headers.get("authorization")
        if authorization is None and keys:
            authorization = f"Bearer {keys[0].removeprefix(_KEY_PROTOCOL)}"
        session = self.scope.get("session")
        session_key = session.session_key if session is not None else None
        sends_key = authorization is not None or "x-api-key" in headers
        if session_key and not sends_key and origin_allowed(dict(self.scope["headers"])):
            user = await user_of_session(session_key)
            caller = await caller_for_user(user, tenant)
            session_monitor.add(snapshot_session(session_key, user), self._end_session)
        else:
            caller = await authenticate(
                authorization, headers.get("x-api-key"), guard=FailedKeyLimiter(address)
            )
            caller.check_address(address)
        caller.require(scopes.INFERENCE)
        caller.check_endpoint(PATH)
        return caller

    async def _end_session(self) -> None:
        """Close the socket: its user has logged out, or lost a right. Aborts running requests."""
        self._caller = None
        for task in self._tasks:
            task.cancel()
        await self.close(REFUSED)

    async def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Serve the socket, and abort running requests when it is closed.

        Not in `disconnect`, which isn't called if sending an event to a departed client raises.
        """
        try:
            await super().__call__(*args, **kwargs)
        finally:
            session_monitor.remove(self._end_session)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _expire(self) -> None:
        """Close a session that has lasted too long, and abort its running requests."""
        await asyncio.sleep(MAX_SESSION_S)
        await self._send_error(
            InvalidRequest(
                f"The session has reached its maximum of {MAX_SESSION_S / 60:g} minutes. Open "
                "another one.",
                code="session_expired",
            )
        )
        await self.close()

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        """Handle one event; errors are sent as events, and the session continues."""
        if self._caller is None:
            return  # closing
        if text_data is None or len(text_data) > MAX_FRAME_CHARS:
            await self._send_error(
                InvalidRequest(f"An event must be JSON text of at most {MAX_FRAME_CHARS} bytes.")
            )
            await self.close(BAD_FRAME)
            return
        event: dict[str, Any] = {}
        try:
            body = text_data.encode("utf-8", "surrogatepass")
            event = await get_render_pool().run(self._caller.tenant, len(body), parse_object, body)
            await self._handle(event)
        except Exception as error:
            report(error, self._id)
            await self._send_error(as_quire_error(error), event.get("event_id"))

    async def _handle(self, event: dict[str, Any]) -> None:
        kind = event.get("type")
        if kind == "session.update":
            await self._update_session(event.get("session"))
        elif kind == "input_audio_buffer.append":
            await self._append(event.get("audio"))
        elif kind == "input_audio_buffer.commit":
            if self._buffer.duration_ms < MIN_TURN_MS:
                raise InvalidRequest(
                    f"The buffer must hold at least {MIN_TURN_MS} ms of sound.",
                    code="input_audio_buffer_commit_empty",
                )
            await self._commit(self._buffer.pop_all())
        elif kind == "input_audio_buffer.clear":
            self._buffer.pop_all()
            await self._send_event("input_audio_buffer.cleared")
        else:
            raise InvalidRequest(
                "type must be 'session.update' or 'input_audio_buffer.append', '.commit' or "
                "'.clear'.",
                param="type",
                code="unknown_event",
            )

    async def _update_session(self, changes: Any) -> None:
        """Change the settings of later turns. Raises for unsupported ones."""
        if not isinstance(changes, dict):
            raise InvalidRequest("session must be an object.", param="session")
        merged = merge_settings(self._session.model_dump(), changes)
        check_supported(merged)
        session = SessionUpdate.model_validate({"session": merged}).session
        form = _form(session, b"")
        ctx = self._context(form)
        served, tokens = await load_model(ctx, form)
        Transcription(ctx, served, form, PreparedSound(0.0, []), tokens)  # validates the language
        self._session = session
        buffer = _new_buffer(session)
        if buffer.rate == self._buffer.rate:
            self._buffer.detection = buffer.detection  # keeps the received audio
        else:
            self._buffer = buffer
        await self._send_event("session.updated", session=self._describe_session())

    async def _append(self, audio: Any) -> None:
        try:
            data = base64.b64decode(audio, validate=True)
        except (TypeError, ValueError, binascii.Error):
            raise InvalidRequest("audio must be base64.", param="audio") from None
        if len(data) % 2:
            raise InvalidRequest("audio must hold whole samples of 16 bits.", param="audio")
        limit = MAX_WAITING_SECONDS * self._buffer.rate * 2
        if len(self._buffer) + self._num_waiting + len(data) > limit:
            raise InvalidRequest(
                f"More than {MAX_WAITING_SECONDS} s of sound wait to be transcribed. Commit or "
                "clear the buffer, and send no faster than transcripts come.",
                param="audio",
                code="input_audio_buffer_full",
            )
        self._buffer.append(data)
        while (change := self._buffer.next_change()) is not None:
            if change.kind == "started":
                await self._send_event(
                    "input_audio_buffer.speech_started",
                    audio_start_ms=change.time_ms,
                    item_id=self._item_id,
                )
            else:
                await self._send_event(
                    "input_audio_buffer.speech_stopped",
                    audio_end_ms=change.time_ms,
                    item_id=self._item_id,
                )
                await self._commit(self._buffer.pop_turn())

    async def _commit(self, sound: bytes) -> None:
        item_id, previous = self._item_id, self._previous_item_id
        self._item_id, self._previous_item_id = new_id("item"), item_id
        form = _form(self._session, wav_file(sound, self._buffer.rate))
        self._num_waiting += len(sound)
        self._turns.put_nowait(Turn(item_id, form, len(sound)))
        await self._send_event(
            "input_audio_buffer.committed", item_id=item_id, previous_item_id=previous
        )
        item = {
            "id": item_id,
            "object": "realtime.item",
            "type": "message",
            "status": "completed",
            "role": "user",
            "content": [{"type": "input_audio", "transcript": None}],
        }
        await self._send_event("conversation.item.added", item=item, previous_item_id=previous)

    async def _transcribe_turns(self) -> None:
        while True:
            turn = await self._turns.get()
            ctx = self._context(turn.form)
            try:
                await check_still_valid(ctx.caller)
                await self._transcribe(ctx, turn)
            except Exception as error:
                log_rejected_request(ctx, error)
                report(error, turn.item_id)
                await self._send_event(
                    f"{_TRANSCRIPTION}.failed",
                    item_id=turn.item_id,
                    content_index=0,
                    **envelope(as_quire_error(error)),
                )
            finally:
                self._num_waiting -= turn.num_bytes

    async def _transcribe(self, ctx: RequestContext, turn: Turn) -> None:
        """Send a turn's text window by window, then the complete text."""
        transcription = await open_transcription(ctx, turn.form)
        windows: list[WindowText] = []
        about: dict[str, Any] = {"item_id": turn.item_id, "content_index": 0}
        try:
            await transcription.start()
            async with aclosing(transcription.windows()) as texts:
                async for window in texts:
                    text = window.text.strip()
                    if text:
                        delta = f" {text}" if transcript(windows) else text
                        await self._send_event(
                            f"{_TRANSCRIPTION}.delta",
                            **about,
                            delta=delta,
                            **_logprobs(turn.form, transcription, [window]),
                        )
                    windows.append(window)
        finally:
            transcription.release()
        await self._send_event(
            f"{_TRANSCRIPTION}.completed",
            **about,
            transcript=transcript(windows),
            usage={"type": "duration", "seconds": math.ceil(transcription.seconds)},
            **_logprobs(turn.form, transcription, windows),
        )

    def _context(self, form: AudioForm) -> RequestContext:
        """The context of one turn, which is logged and billed as a request."""
        if self._caller is None:
            raise RuntimeError("The session has no caller.")
        record = RequestRecord("realtime", model=form.model or "", stream=True)
        return RequestContext(caller=self._caller, record=record)

    def _describe_session(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "realtime.transcription_session",
            "expires_at": self._expires_at,
            **self._session.model_dump(),
        }

    async def _send_event(self, kind: str, **fields: Any) -> None:
        event = {"type": kind, "event_id": new_id("event"), **fields}
        await self.send(text_data=_encode(event).decode())

    async def _send_error(self, error: QuireError, event_id: Any = None) -> None:
        """Send an error, with the id of the client's event that caused it."""
        named = event_id[:200] if isinstance(event_id, str) else None
        body = envelope(error)["error"] | {"event_id": named}
        await self._send_event("error", error=body)


def _new_buffer(session: TranscriptionSession) -> SoundBuffer:
    sound = session.audio.input
    vad = sound.turn_detection
    detection = None
    if vad is not None:
        detection = TurnDetection(vad.threshold, vad.prefix_padding_ms, vad.silence_duration_ms)
    return SoundBuffer(sound.format.rate, detection)


def _form(session: TranscriptionSession, data: bytes) -> AudioForm:
    options = session.audio.input.transcription
    return AudioForm(
        data=data,
        model=options.model or None,
        translates=False,
        language=(options.language or "").strip().lower(),
        prompt=options.prompt or "",
        stream=True,
        include_logprobs=bool(session.include),
        endpoint="realtime",
    )


def _logprobs(
    form: AudioForm, transcription: Transcription, windows: list[WindowText]
) -> dict[str, Any]:
    """The field `logprobs`, where the session includes it."""
    return {"logprobs": transcription.logprob_objects(windows)} if form.include_logprobs else {}
