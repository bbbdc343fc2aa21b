"""A replica whose answers depend on a word of the question, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from engine.contract.messages import EngineRequest
from engine.text.tokenizer import load_tokenizer
from tests.inference.scripted import ScriptedReplica
from tests.inference.tokenizer_folder import EOS

TRICK = "<script>window.hit = 1</script> [x](javascript:window.hit=1) **bold**"


class ReplicaThread:
    """A scripted replica with an event loop of its own."""

    def __init__(self, redis_url: str, prefix: str, folder: Path) -> None:
        tokenizer = load_tokenizer(folder)

        def script(request: EngineRequest, index: int) -> list[int]:
            prompt = tokenizer.decode(request.prompt_token_ids)
            text = TRICK if "trick" in prompt else "Hello from the replica."
            if "long" in prompt:
                text = "and so on " * 300
            if "middling" in prompt:
                text = "and so on " * 40
            return tokenizer.encode(text, add_special_tokens=False)

        self.replica = ScriptedReplica(
            redis_url,
            script,
            key_prefix=prefix,
            model_name="quill",
            model_path=str(folder),
            vocab_size=512,
            eos_token_ids=(EOS,),
            max_model_len=4096,
            token_delay=0.01,
        )
        self.loop = asyncio.new_event_loop()
        self.finished = asyncio.Event()
        self.thread = threading.Thread(target=self.loop.run_until_complete, args=(self.run(),))

    async def run(self) -> None:
        async with self.replica:
            await self.finished.wait()

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.finished.set)
        self.thread.join(60)
        self.loop.close()
