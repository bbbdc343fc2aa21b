"""Output of `manage.py up` for its user and for scripts that wait for it."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

from django.conf import settings

from common.files import write_private
from common.installation import DEFAULT_DATA_DIR, IS_INSTALLED
from config.up.first_run import Credentials


def write_ready_file(path: Path, url: str, model: str, credentials: Credentials) -> None:
    """Write the file that scripts wait for, atomically and with mode 0600."""
    content = {
        "url": url,
        "api_key": credentials.api_key,
        "model": model,
        "admin_url": f"{url}/admin/",
        "admin_user": credentials.admin_user,
        "admin_password": credentials.admin_password,
    }
    write_private(path, json.dumps(content, indent=2) + "\n")


def command(words: str, data_dir: Path) -> str:
    """Return a command that can be pasted into another terminal without any set-up.

    In a checkout it's relative if this is its folder, otherwise it's an absolute path.
    """
    root, current_dir = Path(settings.BASE_DIR), Path.cwd()
    python, program = Path(sys.executable), ["-m", "quire"]
    if not IS_INSTALLED:
        program = [str(root / "manage.py")]
        if current_dir == root:
            program = ["manage.py"]
            if root in python.parents:
                python = python.relative_to(root)
    line = f"{shlex.join([str(python), *program])} {words}"
    if data_dir != DEFAULT_DATA_DIR:
        line += f" --data-dir {shlex.quote(str(data_dir))}"
    return line


def banner(url: str, model: str, credentials: Credentials, data_dir: Path) -> str:
    """Return the URLs and commands to click and paste."""
    password = credentials.admin_password or "(the password you set)"
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}]})
    return f"""
Quire serves {model} at {url}

  Playground  {url}/
  Admin       {url}/admin/
  Login       {credentials.admin_user} / {password}
  API key     {credentials.api_key}
  Data        {data_dir}

  curl {url}/v1/chat/completions \\
    -H "Authorization: Bearer {credentials.api_key}" \\
    -H "Content-Type: application/json" \\
    -d '{body}'

  Chat in another terminal:
    {command("chat", data_dir)}
"""


def ready_lines(url: str, server: str) -> str:
    """Return the lines that tools wait for, as `server` (such as uvicorn) prints them."""
    running = f"{server.capitalize()} running on {url} (Press CTRL+C to quit)"
    return f"INFO:     Application startup complete.\nINFO:     {running}\n"
