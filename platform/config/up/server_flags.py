"""vLLM's flags of the HTTP server, for `quire serve`, `manage.py up` and `manage.py gateway`."""

from __future__ import annotations

import argparse
import json
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from django.core.management.base import CommandError
from django.utils.module_loading import import_string

from common.setting_types import ROOT_PATH
from common.settings_environment import record_flags, set_internal_fields
from config.up.first_run import parse_lora_modules
from engine.contract.errors import ConfigError, InvalidRequest
from engine.contract.observability import check_endpoint
from engine.text.chat_messages import CONTENT_FORMATS, check_template_kwargs


@dataclass(frozen=True)
class ServerFlag:
    """A flag that is accepted without effect, or refused if `refuse`; `reason` explains why."""

    flag: str
    reason: str
    refuse: bool = False
    words: str | None = None


#: Flags that need no switch here, or that aren't supported.
UNCONFIGURABLE_FLAGS = (
    ServerFlag("--enable-auto-tool-choice", "models choose tools by themselves where they can."),
    ServerFlag("--disable-uvicorn-access-log", "QUIRE_LOG_STYLE=json alone has access lines."),
    ServerFlag("--disable-frontend-multiprocessing", "the engine is always a process of its own."),
    ServerFlag("--enable-request-id-headers", "each answer has an x-request-id."),
    ServerFlag("--enable-prompt-tokens-details", "usage always says how many tokens were cached."),
    ServerFlag("--enable-server-load-tracking", "/load always answers."),
    ServerFlag("--enable-ssl-refresh", "restart to take a new certificate.", refuse=True),
    ServerFlag(
        "--prompt-adapters", "prompt adapters can't be served. Put the text into the prompt.",
        refuse=True, words="+",
    ),
    ServerFlag(
        "--tool-parser-plugin",
        "name the class in QUIRE.tool_parsers; see docs/extending.md.",
        refuse=True,
        words="1",
    ),
    ServerFlag("--uds", "name an address with --host and --port.", refuse=True, words="1"),
    ServerFlag("--enable-tokenizer-info-endpoint", "/tokenizer_info answers operators."),
    ServerFlag("--exclude-tools-when-tool-choice-none", "the prompt has none of them then."),
    ServerFlag("--enable-scale-out", "/render and /inference/v1/generate always answer."),
    ServerFlag("--enable-offline-docs", "its pages load nothing from elsewhere."),
    ServerFlag("--log-error-stack", "a fault's stack is always logged."),
    ServerFlag(
        "--disable-access-log-for-endpoints",
        "calls of /health, /ping, /metrics and /load are never logged.",
        words="1",
    ),
    ServerFlag("--h11-max-incomplete-event-size", "headers are always bounded.", words="1"),
    ServerFlag("--h11-max-header-count", "headers are always bounded.", words="1"),
    ServerFlag("--enable-log-outputs", "answers are never logged.", refuse=True),
    ServerFlag("--tool-server", "tools are run by clients.", refuse=True, words="1"),
    ServerFlag("--tokens-only", "narrow what keys may do by their scopes.", refuse=True),
    ServerFlag("--disable-fastapi-docs", "shut /reference/ off in a proxy.", refuse=True),
)  # fmt: skip
#: uvicorn's log levels -> Quire's.
_LOG_LEVELS = {
    "critical": "CRITICAL", "error": "ERROR", "warning": "WARNING", "info": "INFO",
    "debug": "DEBUG", "trace": "DEBUG",
}  # fmt: skip


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags. Those without effect are left out of the help."""
    group = parser.add_argument_group("the API, by vLLM's names")
    group.add_argument(
        "--api-key",
        nargs="+",
        metavar="KEY",
        help="additional API keys that clients may send, of at least 16 random characters "
        "(default: QUIRE_API_KEYS, separated by commas)",
    )
    group.add_argument(
        "--headless",
        action="store_true",
        help="run nothing but the ranks of this machine, for a model whose first rank is on "
        "another one (--nnodes, --node-rank, --master-addr)",
    )
    group.add_argument(
        "--chat-template-content-format",
        choices=CONTENT_FORMATS,
        help="how chat templates get a message's content: string, or openai: a list of parts "
        "(default: auto)",
    )
    group.add_argument(
        "--response-role",
        metavar="ROLE",
        help="role of generated chat messages (default: assistant)",
    )
    group.add_argument(
        "--default-chat-template-kwargs",
        metavar="JSON",
        help='variables of the chat template, such as {"enable_thinking": false}; a chat\'s own '
        "chat_template_kwargs go before them",
    )
    group.add_argument(
        "--return-tokens-as-token-ids",
        action=argparse.BooleanOptionalAction,
        help="in log probabilities name tokens token_id:N, unless a request says otherwise",
    )
    group.add_argument(
        "--enable-force-include-usage",
        action=argparse.BooleanOptionalAction,
        help="send a usage chunk at the end of every stream",
    )
    group.add_argument(
        "--lora-modules",
        nargs="+",
        metavar="NAME=PATH",
        help="adapters of the model, shared by all tenants: NAME=PATH, or JSON with name, path and "
        "perhaps base_model_name; each is checked before it answers",
    )
    group.add_argument(
        "--trust-request-chat-template",
        action=argparse.BooleanOptionalAction,
        help="take chat_template from requests; it runs in a sandbox",
    )
    group.add_argument(
        "--enable-per-request-metrics",
        action=argparse.BooleanOptionalAction,
        help="add `metrics`, how long it took, to answers of chats and completions",
    )
    group.add_argument("--root-path", metavar="PATH", help="path under which a proxy serves Quire")
    group.add_argument(
        "--middleware",
        action="append",
        metavar="PATH.TO.CLASS",
        help="ASGI middleware, a class or function that takes the application; may be given "
        "several times",
    )
    group.add_argument(
        "--ssl-ca-certs", metavar="FILE", help="authorities whose client certificates are accepted"
    )
    group.add_argument(
        "--ssl-cert-reqs",
        type=int,
        choices=(0, 1, 2),
        help="clients' certificates: 0 none, 1 optional, 2 required (default: 0)",
    )
    group.add_argument("--ssl-ciphers", metavar="LIST", help="TLS 1.2 ciphers to offer")
    group.add_argument(
        "--allowed-origins",
        metavar="JSON",
        help='origins allowed to call the API from a browser, such as ["*"]',
    )
    group.add_argument(
        "--allowed-methods", metavar="JSON", help='methods that they may use (default: ["*"])'
    )
    group.add_argument(
        "--allowed-headers", metavar="JSON", help='headers that they may send (default: ["*"])'
    )
    group.add_argument(
        "--allow-credentials",
        action=argparse.BooleanOptionalAction,
        help="let these pages send cookies and other credentials",
    )
    group.add_argument(
        "--uvicorn-log-level", "--log-level", choices=tuple(_LOG_LEVELS), help="(default: info)"
    )
    group.add_argument("--api-server-count", type=int, metavar="N", help="the same as --workers")
    for other in UNCONFIGURABLE_FLAGS:
        options: dict[str, Any] = {"help": argparse.SUPPRESS, "default": None}
        if other.words == "+":
            options["nargs"] = "+"
        elif other.words is None:
            options["action"] = argparse.BooleanOptionalAction
        parser.add_argument(other.flag, dest=_dest(other), **options)


def _dest(other: ServerFlag) -> str:
    return "vllm_" + other.flag.strip("-").replace("-", "_")


def check_server_flags(options: Mapping[str, Any]) -> None:
    """Raise `CommandError` for unsupported or inconsistent flags."""
    for other in UNCONFIGURABLE_FLAGS:
        if other.refuse and options[_dest(other)]:
            raise CommandError(f"{other.flag} can't be used: {other.reason}")
    for path in options["middleware"] or []:
        try:
            target = import_string(path)
        except ImportError as error:
            raise CommandError(f"--middleware {path} can't be imported: {error}") from error
        if not callable(target):
            raise CommandError(f"--middleware {path} is no class and no function.")
    if not ROOT_PATH.fullmatch(options["root_path"] or ""):
        raise CommandError(
            "--root-path must begin with / and not end with one, with letters, digits, '.', '_', "
            "'~' and '-' between."
        )
    if (options["ssl_ca_certs"] or options["ssl_cert_reqs"]) and not options["ssl_certfile"]:
        raise CommandError("Clients' certificates need --ssl-certfile and --ssl-keyfile.")
    if options["ssl_cert_reqs"] and not options["ssl_ca_certs"]:
        raise CommandError("--ssl-cert-reqs needs --ssl-ca-certs.")
    if options["ssl_ca_certs"]:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(options["ssl_ca_certs"])
        except (OSError, ssl.SSLError) as error:
            raise CommandError(f"--ssl-ca-certs can't be used: {error}") from error
    if (endpoint := options["otlp_traces_endpoint"]) is not None:
        try:
            check_endpoint(endpoint)
        except ConfigError as error:
            raise CommandError(f"--otlp-traces-endpoint: {error.message}") from error
    parse_lora_modules(options["lora_modules"])
    environment(options)


def environment(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the gateways' environment variables. Raises `CommandError` for an invalid list."""
    variables = {
        "QUIRE_ROOT_PATH": options["root_path"],
        "QUIRE_CHAT_TEMPLATE_CONTENT_FORMAT": options["chat_template_content_format"],
        "QUIRE_DEFAULT_CHAT_TEMPLATE_KWARGS": _template_kwargs(options),
        "QUIRE_REQUEST_CHAT_TEMPLATES": "1" if options["trust_request_chat_template"] else None,
        "QUIRE_CORS_ORIGINS": _words(options, "allowed_origins"),
        "QUIRE_OTLP_TRACES_ENDPOINT": options["otlp_traces_endpoint"],
        "QUIRE_LOG_LEVEL": _LOG_LEVELS.get(options["uvicorn_log_level"] or ""),
    }
    return {name: value for name, value in variables.items() if value}


def _template_kwargs(options: Mapping[str, Any]) -> str | None:
    """Validate a JSON object of chat template variables, or an empty value."""
    text = options["default_chat_template_kwargs"]
    if text is None:
        return None
    flag = "--default-chat-template-kwargs"
    try:
        kwargs = json.loads(text)
    except ValueError as error:
        raise CommandError(f"{flag} must be a JSON object: {error}.") from None
    if not isinstance(kwargs, dict):
        raise CommandError(f"{flag} must be a JSON object; got {text!r}.")
    try:
        check_template_kwargs(kwargs)
    except InvalidRequest as error:
        raise CommandError(f"{flag}: {error.message}") from error
    return json.dumps(kwargs)


def _words(options: Mapping[str, Any], name: str) -> str | None:
    """Return a JSON list (or one bare word) as comma-separated text."""
    text = options[name]
    if text is None:
        return None
    try:
        parsed = json.loads(text) if text.startswith("[") else [text]
    except ValueError:
        parsed = None
    if not isinstance(parsed, list) or any(not isinstance(word, str) for word in parsed):
        flag = name.replace("_", "-")
        raise CommandError(f'--{flag} must be a JSON list of texts, such as ["*"]; got {text!r}.')
    return ",".join(parsed)


def use_server_flags(options: Mapping[str, Any]) -> None:
    """Pass the flags to the gateways started by this process."""
    variables = environment(options)
    os.environ.update(variables)
    record_flags(list(variables))
    fields = {
        "cors_methods": _words(options, "allowed_methods"),
        "cors_headers": _words(options, "allowed_headers"),
        "cors_credentials": options["allow_credentials"],
        "response_role": options["response_role"],
        "return_tokens_as_token_ids": options["return_tokens_as_token_ids"] or None,
        "force_include_usage": options["enable_force_include_usage"] or None,
        "per_request_metrics": options["enable_per_request_metrics"] or None,
    }
    set_internal_fields({name: value for name, value in fields.items() if value is not None})


def serve_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `config.serve`."""
    names = ("ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers", "middleware")
    return {name: options[name] for name in names if options[name]}
