"""The Lua scripts, by name."""

from collections.abc import Sequence
from functools import cache
from hashlib import sha1
from pathlib import Path
from typing import Any

from redis.exceptions import NoScriptError

from engine.contract.redis_link import RedisLink


@cache
def source(name: str) -> tuple[str, str]:
    """A script's text and its sha1, under which Redis keeps it."""
    text = (Path(__file__).parent / "lua" / f"{name}.lua").read_text(encoding="utf-8")
    return text, sha1(text.encode(), usedforsecurity=False).hexdigest()


async def run_script(
    link: RedisLink, name: str, keys: Sequence[str], arguments: Sequence[Any]
) -> Any:
    """Run by sha1, which is short; a server that was restarted gets the text again."""
    text, digest = source(name)
    try:
        return await link.execute("EVALSHA", digest, len(keys), *keys, *arguments)
    except NoScriptError:
        return await link.execute("EVAL", text, len(keys), *keys, *arguments)
