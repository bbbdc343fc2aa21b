from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
from django.conf import settings
from django.core.management.base import CommandError, CommandParser
from tqdm import tqdm

from common.commands import QuireCommand
from common.installation import PROGRAM
from config.management.commands.chat import find_server, tls_context

#: Response formats and the suffixes of their files.
SUFFIXES = {"text": ".txt", "srt": ".srt", "vtt": ".vtt", "json": ".json", "verbose_json": ".json"}


class Command(QuireCommand):
    needs_database = False
    help = (
        "Transcribe files of sound, over HTTP, as text or subtitles. Finds the instance that "
        f"`{PROGRAM} up` runs in the data dir by itself; --url and --api-key talk to any other "
        "server."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("files", nargs="+", metavar="FILE", help="files of sound or video")
        parser.add_argument(
            "--format",
            choices=list(SUFFIXES),
            default="text",
            help="format of the transcripts (default: %(default)s)",
        )
        parser.add_argument(
            "-o",
            "--output-dir",
            metavar="DIR",
            help="folder for a transcript of each file (default: all are printed)",
        )
        parser.add_argument("--model", help="(default: the only one of the key)")
        parser.add_argument(
            "--language", help="code of the spoken language, such as en (default: detected)"
        )
        parser.add_argument("--prompt", help="previous text, or the spelling of words")
        parser.add_argument("--temperature", type=float, help="(default: 0, with fallback)")
        parser.add_argument("--translate", action="store_true", help="translate into English")
        parser.add_argument("--url", help="URL of the server (default: the data dir's)")
        parser.add_argument("--api-key", help="(default: QUIRE_API_KEY, or the data dir's)")
        parser.add_argument("--insecure", action="store_true", help="accept any certificate")

    def handle(self, *args: Any, **options: Any) -> None:
        """Transcribe the files in turn; a file that fails doesn't stop the others."""
        url, key = find_server(Path(settings.DATA_DIR), options["url"], options["api_key"])
        folder = Path(options["output_dir"]) if options["output_dir"] else None
        paths, failed = [Path(name).expanduser() for name in options["files"]], 0
        if folder is not None and not folder.is_dir():
            raise CommandError(f"--output-dir {folder} is no folder.")
        if folder is not None and len({path.stem for path in paths}) < len(paths):
            raise CommandError(
                "FILE must have different names for --output-dir, apart from their suffixes."
            )
        base_url = url.rstrip("/").removesuffix("/v1")
        task = "translations" if options["translate"] else "transcriptions"
        with httpx.Client(
            base_url=base_url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(10, read=None, write=600),
            verify=tls_context(None, None, verify=not options["insecure"]),
        ) as client:
            for path in tqdm(paths, unit="file", disable=None if len(paths) > 1 else True):
                try:
                    text = _transcribe(client, f"/v1/audio/{task}", path, _fields(options))
                except CommandError as error:
                    failed += 1
                    self.stderr.write(f"{path}: {error}")
                    continue
                if folder is not None:
                    target = folder / f"{path.stem}{SUFFIXES[options['format']]}"
                    target.write_text(text, encoding="utf-8")
                else:
                    heading = f"{path}:\n" if len(paths) > 1 else ""
                    self.stdout.write(heading + text.rstrip("\n"))
        if failed:
            raise CommandError(f"{failed} of {len(paths)} files weren't transcribed.")


def _fields(options: dict[str, Any]) -> dict[str, str]:
    """Return the form fields that were set on the command line."""
    names = ("model", "prompt", "temperature") + (() if options["translate"] else ("language",))
    fields = {name: str(options[name]) for name in names if options[name] is not None}
    return fields | {"response_format": options["format"]}


def _transcribe(client: httpx.Client, path: str, file: Path, fields: dict[str, str]) -> str:
    """Return a file's transcript. Raises `CommandError` for a bad file or response."""
    try:
        with file.open("rb") as data:
            answer = client.post(path, data=fields, files={"file": (file.name, data)})
    except OSError as error:
        raise CommandError(f"can't be read: {error.strerror}.") from error
    except httpx.HTTPError as error:
        raise CommandError(f"nothing answers at {client.base_url}: {error}") from error
    if answer.is_success:
        return answer.text
    try:
        message = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = answer.text[:300] or answer.reason_phrase
    raise CommandError(f"{answer.status_code}: {message}")
