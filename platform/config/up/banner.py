"""What `manage.py up` tells its user, and the scripts that wait for it."""

from __future__ import annotations

import json
from pathlib import Path

from config.datadir import write_private
from config.up.credentials import Credentials

#: In the data dir while an instance runs: where `manage.py chat` finds it.
INSTANCE_FILE = "instance.json"


def write_ready_file(path: Path, url: str, model: str, credentials: Credentials) -> None:
    """Tell scripts, atomically and with mode 0600."""
    content = {
        "url": url,
        "api_key": credentials.api_key,
        "model": model,
        "admin_url": f"{url}/admin/",
        "admin_user": credentials.admin_user,
        "admin_password": credentials.admin_password,
    }
    write_private(path, json.dumps(content, indent=2) + "\n")


def banner(url: str, model: str, credentials: Credentials, data_dir: Path) -> str:
    """Everything to paste and click."""
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

  Chat in another terminal: ./manage.py chat
  Ctrl-C stops everything.
"""
