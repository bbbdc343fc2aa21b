"""A live server for a browser: uvicorn in a process of its own, on a free port."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from tests.waiting import free_port

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 120.0


def environment(data_dir: Path, redis_url: str, key_prefix: str) -> dict[str, str]:
    """Settings of one instance."""
    paths = [str(ROOT), str(ROOT / "platform"), os.environ.get("PYTHONPATH", "")]
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith(("QUIRE_", "DATABASE_"))},
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "QUIRE_DATA_DIR": str(data_dir),
        "REDIS_URL": redis_url,
        "QUIRE_KEY_PREFIX": key_prefix,
        "QUIRE_LOG_LEVEL": "WARNING",
    }


@dataclass
class LiveServer:
    """`application` ("module:attribute") under uvicorn. The port stays the same over restarts."""

    application: str
    env: dict[str, str]
    log: Path
    lifespan: str = "off"
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Without a slash at the end."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it and wait until it answers."""
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "uvicorn", self.application, "--host", "127.0.0.1"),
                    *("--port", str(self.port), "--lifespan", self.lifespan),
                    *("--log-level", "warning", "--timeout-graceful-shutdown", "1"),
                ],
                cwd=ROOT,
                env=self.env,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"The server did not start: {self.log.read_text()[-3000:]}")
            time.sleep(0.05)

    def stop(self) -> None:
        """Kill it: what a browser must survive is a server that's gone at once."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(f"{self.url}/login/", timeout=5).close()
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False
        return True
