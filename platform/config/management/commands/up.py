from __future__ import annotations

import json
import logging
import os
import ssl
import sys
from pathlib import Path
from typing import Any, NoReturn

from django.conf import settings
from django.core.management import call_command
from django.core.management.base import CommandError, CommandParser

from catalog.cli import NAMED, add_replica_options, parse_engine_settings
from catalog.supervisor import Supervisor
from common.commands import QuireCommand
from common.files import INSTANCE_FILE, make_private
from common.installation import PROGRAM
from common.settings_environment import set_internal_fields, unknown_variables
from config.embedded_redis import EmbeddedRedisError, StartFailed
from config.single_user import ensure_metrics_token, has_single_user, is_loopback
from config.up.banner import banner, ready_lines, write_ready_file
from config.up.first_run import (
    check_given_keys,
    ensure_adapters,
    ensure_credentials,
    ensure_given_keys,
    ensure_model,
    ensure_vision_demo,
    keys_from_environment,
    still_checked,
)
from config.up.processes import (
    Gateways,
    ReadinessProbe,
    create_probe_certificate,
    listen,
    url_of,
    use_tls,
)
from config.up.server_flags import (
    add_server_flags,
    check_server_flags,
    serve_options,
    use_server_flags,
)
from config.up.stack import (
    InUse,
    ModelLoadFailed,
    Stack,
    Stopped,
    exclusive,
    isolated_task_worker,
    supervised_workers,
)
from engine.contract.engine_config import EngineConfig, add_cli_args
from engine.contract.errors import ConfigError
from metering.drain import LedgerWriter

logger = logging.getLogger("quire.up")


class Command(QuireCommand):
    takes_engine_settings = True
    #: Whether a single user's requests from this machine need no API key.
    may_serve_without_key = False
    help = (
        "Run all of Quire in one group of processes: Redis (unless REDIS_URL is set), migrations, "
        "an engine replica, the web server, a worker. Prints the address, a login, an API key and "
        "a curl to paste once the first token can be served. Ctrl-C stops everything. Without "
        "--model it serves the models that are loaded in the catalogue, or else the demo models."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.usage = "%(prog)s [--model PATH_OR_HUB_ID] [--port N] [engine settings]"
        parser.add_argument(
            "--host", default="127.0.0.1", help="address to listen on (default: %(default)s)"
        )
        parser.add_argument(
            "--port",
            type=int,
            default=8000,
            help="port to listen on; 0: a free one (default: %(default)s)",
        )
        parser.add_argument("--model", metavar="PATH_OR_HUB_ID", help="model to serve")
        parser.add_argument(
            "--served-model-name",
            nargs="+",
            metavar="NAME",
            help="the model's name for clients; the first is shown (default: the hub id, or the "
            "folder's name)",
        )
        parser.add_argument(
            "--workers", type=int, default=1, metavar="N", help="gateway processes (default: 1)"
        )
        add_replica_options(parser)
        parser.add_argument(
            "--no-worker",
            action="store_true",
            help="start no worker: batches, background responses, mails and webhooks wait",
        )
        parser.add_argument(
            "--asgi-server",
            choices=("uvicorn", "daphne"),
            default="uvicorn",
            help="default: uvicorn",
        )
        parser.add_argument(
            "--ssl-certfile", metavar="FILE", help="certificate; then HTTPS is served"
        )
        parser.add_argument("--ssl-keyfile", metavar="FILE", help="its private key")
        parser.add_argument(
            "--ready-file",
            metavar="FILE",
            help="a file to write (mode 0600) once a first token can be served: JSON with url, "
            "api_key, model, admin_url, admin_user and admin_password",
        )
        add_server_flags(parser)
        add_cli_args(parser, skip=NAMED | {"data_parallel_size"})

    def handle(self, *args: Any, **options: Any) -> None:
        """Start everything, wait for a first token, print the banner, run, and stop."""
        for sentence in unknown_variables():
            self.print_hint(sentence)
        if options["headless"]:
            self._run_node(options)
        options["replicas"] = num_local_replicas(options)
        options["workers"] = options["api_server_count"] or options["workers"]
        check_options(options)
        check_given_keys(options["api_key"] or keys_from_environment())
        use_server_flags(options)
        data_dir = make_private(Path(settings.DATA_DIR))
        try:
            with exclusive(data_dir), Stack(data_dir, settings.QUIRE.drain_seconds) as stack:
                self._serve(stack, data_dir, options)
        except Stopped:
            self.print_hint("Stopped.")
        except (InUse, StartFailed, EmbeddedRedisError) as error:
            raise CommandError(str(error)) from error

    def _run_node(self, options: dict[str, Any]) -> NoReturn:
        """Replace this process with the one that runs this machine's ranks."""
        names = (
            *("nnodes", "node_rank", "master_addr", "master_port"),
            *("tensor_parallel_size", "pipeline_parallel_size"),
        )
        ranks = {name: options[name] for name in names if options[name] is not None}
        try:
            config = EngineConfig.from_mapping(ranks)
        except ConfigError as error:
            raise CommandError(error.message) from error
        if not config.node_rank:
            raise CommandError("--headless needs --nnodes and a --node-rank from 1 on.")
        os.chdir(settings.BASE_DIR)
        arguments = ["-m", "engine.executor.node", json.dumps(ranks)]
        os.execve(sys.executable, [sys.executable, *arguments], os.environ)  # noqa: S606

    def _serve(self, stack: Stack, data_dir: Path, options: dict[str, Any]) -> None:
        engine = parse_engine_settings(options)
        listener = self._listen(options)
        url = url_of(options["host"], listener.getsockname()[1], tls=bool(options["ssl_certfile"]))
        url += options["root_path"] or settings.QUIRE.root_path
        used = stack.start_redis()
        self.print_hint(f"Using {used} and {database_name()}.")
        call_command("migrate", interactive=False, verbosity=0)
        credentials = ensure_credentials(data_dir)
        api_keys = options["api_key"] or keys_from_environment()
        ensure_given_keys(api_keys)
        single_user = (
            self.may_serve_without_key
            and not api_keys
            and is_loopback(options["host"])
            and settings.QUIRE.tls != "proxy"
            and not (options["root_path"] or settings.QUIRE.root_path)
            and has_single_user(credentials.api_key)
        )
        if single_user:
            ensure_metrics_token()
        startup_model = ensure_model(
            options["model"],
            options["served_model_name"] or [],
            engine,
            num_replicas=options["replicas"],
            num_spares=options["spares"],
            num_prefill=options["prefill_replicas"],
            num_encode=options["encode_replicas"],
        )
        model = startup_model.model
        modules = ensure_adapters(model, options["lora_modules"])
        if options["no_worker"] and still_checked(modules):
            raise StartFailed("--lora-modules are checked by a worker: leave --no-worker out.")
        if single_user and options["model"] and (names := startup_model.unload_other_models()):
            self.print_hint(
                f"Not loaded again: {names}. Without keys `{PROGRAM} serve` serves one model; "
                f"`{PROGRAM} load_model NAME` loads another beside it."
            )
        set_internal_fields(
            {"default_model": model.name, "without_worker": bool(options["no_worker"])}
        )
        proof = ReadinessProbe(url, credentials.api_key, model.name)
        if options["ssl_cert_reqs"] == ssl.CERT_REQUIRED:
            authorities = create_probe_certificate(proof.tls, options["ssl_ca_certs"], data_dir)
            options["ssl_ca_certs"] = authorities
        stack.gateways = Gateways(
            listener,
            options["workers"],
            {
                "server": options["asgi_server"],
                "grace": settings.QUIRE.drain_seconds,
                "single_user": single_user,
                "ssl_certfile": options["ssl_certfile"],
                "ssl_keyfile": options["ssl_keyfile"],
                **serve_options(options),
            },
        )
        stack.supervisor = Supervisor()
        # Gateways start a ledger writer in their lifespan; daphne runs it only at a first request.
        if options["asgi_server"] == "daphne":
            stack.drainer = LedgerWriter()
            stack.drainer.start()
        self.print_hint(f"Loading {model.name} from {model.source} ...")
        try:
            stack.run_until_ready(proof, model)
        except ModelLoadFailed:
            startup_model.undo()
            raise
        if not options["model"] and Path(model.source) == settings.QUIRE.demo_model:
            ensure_vision_demo()  # only now: the first token must not wait for it
        if not options["no_worker"]:  # only now: the first token must not wait for it
            # A worker takes seconds to restart: a redundant instance gets a second one.
            several = options["workers"] > 1 or model.num_replicas > 1
            stack.workers = [supervised_workers(2 if several else 1), isolated_task_worker()]
            stack.run_while(lambda: still_checked(modules))
        instance = data_dir / INSTANCE_FILE
        write_ready_file(instance, url, model.name, credentials)
        try:
            self.stdout.write(banner(url, model.name, credentials, data_dir))
            if single_user:
                self.print_hint(
                    "Requests from this machine need no API key (or any, as EMPTY) while there is "
                    "one user, tenant and key; --api-key KEY demands one."
                )
            self.stdout.write(ready_lines(url, options["asgi_server"]))
            self.stdout.flush()
            if options["ready_file"]:
                path = Path(options["ready_file"])
                write_ready_file(path, url, model.name, credentials)
            stack.run()
        finally:
            instance.unlink(missing_ok=True)
        self.print_hint("Stopping ...")

    def print_hint(self, text: str) -> None:
        """Print a message for the user; with JSON logs, log it as a record like any other."""
        if settings.QUIRE.log_style == "json":
            logger.info("%s", text)
        else:
            super().print_hint(text)

    def _listen(self, options: dict[str, Any]) -> Any:
        try:
            return listen(options["host"], options["port"])
        except OSError as error:
            raise CommandError(
                f"Can't listen on {error.strerror}. Choose another --port, or 0 for a free one."
            ) from error


def num_local_replicas(options: dict[str, Any]) -> int | None:
    """Return the number of replicas on this machine; --data-parallel-size counts all machines."""
    local: int | None = options["data_parallel_size_local"]
    if local is not None:
        return local
    external = ("data_parallel_external_lb", "data_parallel_multi_port_external_lb")
    if any(options[name] for name in external) or options["data_parallel_rank"] is not None:
        return 1
    replicas: int | None = options["replicas"]
    return replicas


def check_options(options: dict[str, Any]) -> None:
    """Raise `CommandError` for inconsistent options before anything starts."""
    if not 0 <= options["port"] <= 65535:
        raise CommandError(f"--port must be in [0, 65535], got {options['port']}.")
    check_server_flags(options)
    if not 1 <= options["workers"] <= 64:
        raise CommandError(f"--workers must be in [1, 64], got {options['workers']}.")
    if options["ssl_certfile"] and options["asgi_server"] != "uvicorn":
        raise CommandError("TLS needs --asgi-server uvicorn.")
    use_tls(options["ssl_certfile"], options["ssl_keyfile"])
    ready = options["ready_file"]
    if ready and not Path(ready).absolute().parent.is_dir():
        raise CommandError(f"--ready-file: there is no folder {Path(ready).absolute().parent}.")


def database_name() -> str:
    """Describe the database in use, without its password."""
    default = settings.DATABASES["default"]
    if default["ENGINE"].endswith("sqlite3"):
        return f"SQLite in {Path(default['NAME']).parent}"
    return f"{default['ENGINE'].rpartition('.')[2]} database {default['NAME']}"
