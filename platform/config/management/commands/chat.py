from __future__ import annotations

import json
import ssl
from pathlib import Path
from typing import Any

import httpx
from django.conf import settings
from django.core.management.base import CommandError, CommandParser

from common.commands import QuireCommand
from common.files import INSTANCE_FILE
from common.installation import PROGRAM
from config.terminal_chat import (
    HISTORY_FILE,
    ApiError,
    ChatApi,
    Conversation,
    Terminal,
    input_history,
)


class Command(QuireCommand):
    needs_database = False
    help = (
        "Chat with a model in the terminal, over HTTP. Finds the instance that "
        f"`{PROGRAM} up` runs in the data dir by itself; --url and --api-key talk to any other "
        "server."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("message", nargs="*", help="ask one question and exit")
        parser.add_argument("--url", help="URL of the server (default: the data dir's)")
        parser.add_argument("--api-key", help="(default: QUIRE_API_KEY, or the data dir's)")
        parser.add_argument("--model", help="(default: the first that is ready to chat)")
        parser.add_argument(
            "--image",
            metavar="FILE",
            action="append",
            default=[],
            help="show a picture with the first question; may be repeated",
        )
        parser.add_argument("--system", default="", help="system message")
        parser.add_argument("--temperature", type=float, help="0 is greedy (default: the model's)")
        parser.add_argument(
            "--max-tokens", type=int, metavar="N", help="maximum tokens of an answer"
        )
        parser.add_argument("--seed", type=int, metavar="N", help="makes answers repeatable")
        parser.add_argument(
            "--cert", metavar="FILE", help="client certificate (PEM), for servers that ask for one"
        )
        parser.add_argument(
            "--key", metavar="FILE", help="its private key (default: in the certificate's file)"
        )
        parser.add_argument("--insecure", action="store_true", help="accept any certificate")

    def handle(self, *args: Any, **options: Any) -> None:
        url, key = find_server(Path(settings.DATA_DIR), options["url"], options["api_key"])
        context = tls_context(options["cert"], options["key"], verify=not options["insecure"])
        api = ChatApi(url, key, verify=context)
        names = ("temperature", "max_tokens", "seed")
        sampling = {name: options[name] for name in names if options[name] is not None}
        try:
            models = api.models()
            model = options["model"] or (models[0] if models else "")
            if model not in models:
                available = ", ".join(models) or "none"
                raise CommandError(
                    f"{api.url} has no model {model!r} for this key; it has {available}."
                )
            conversation = Conversation(options["system"])
            for path in options["image"]:
                try:
                    conversation.attach(path)
                except OSError as error:
                    raise CommandError(f"--image {path} can't be read: {error.strerror}") from error
            self._talk(Terminal(api, model, conversation, sampling), options)
        except ApiError as error:
            raise CommandError(str(error)) from error
        finally:
            api.close()

    def _talk(self, terminal: Terminal, options: dict[str, Any]) -> None:
        if options["message"]:
            if not terminal.ask(" ".join(options["message"])):
                raise SystemExit(1)
            return
        self.print_hint(
            f"Talking to {terminal.model} at {terminal.api.url}. /help lists the commands."
        )
        with input_history(Path(settings.DATA_DIR) / HISTORY_FILE):
            terminal.run()


def tls_context(cert: str | None, key: str | None, *, verify: bool) -> ssl.SSLContext:
    """Return the client's TLS settings. Raises `CommandError` for an unusable certificate."""
    context = httpx.create_ssl_context(verify=verify)
    if key and not cert:
        raise CommandError("--key needs --cert.")
    if cert:
        try:
            context.load_cert_chain(cert, key)
        except (OSError, ssl.SSLError) as error:
            raise CommandError(f"--cert {cert} can't be used: {error}") from error
    return context


def find_server(data_dir: Path, url: str | None, api_key: str | None) -> tuple[str, str]:
    """Return URL and key: from the options, the environment, or the instance in the data dir.

    A key from the data dir is only sent to the URL of that data dir's instance.
    """
    api_key = api_key or settings.QUIRE.api_key.get_secret_value() or None
    try:
        running = json.loads((data_dir / INSTANCE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        running = {}
    if url is None:
        if not running:
            raise CommandError(
                f"No instance runs in {data_dir}. Start one with `{PROGRAM} up`, or give --url."
            )
        url = str(running["url"])
    if api_key is None and running.get("url") == url.rstrip("/").removesuffix("/v1"):
        api_key = str(running["api_key"])
    return url, api_key or ""
