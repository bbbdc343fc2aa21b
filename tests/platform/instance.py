"""A `manage.py up` in a process of its own, with a fake replica in the engine's place."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from common.settings_environment import INTERNAL
from tests.platform.test_processes import gone

ROOT = Path(__file__).resolve().parents[2]
FAKE = [sys.executable, "-m", "tests.fakes.fake_replica"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_model_folder(folder: Path) -> Path:
    """A folder with a byte-level tokenizer and no weights: all that a gateway reads of a model."""
    folder.mkdir(parents=True, exist_ok=True)
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: number for number, text in enumerate(specials + alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"vocab_size": len(vocabulary)}))
    return folder


def internal(**fields: Any) -> dict[str, str]:
    """The variable that sets fields without a variable of their own."""
    return {INTERNAL: json.dumps(fields)}


def environment(data_dir: Path, **extra: str) -> dict[str, str]:
    """This process's environment without what belongs to another instance."""
    retained_values = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("QUIRE_", "REDIS_URL", "DATABASE_URL"))
    }
    return {
        **retained_values,
        "QUIRE_DATA_DIR": str(data_dir),
        **internal(engine_command=FAKE),
        "QUIRE_DRAIN_SECONDS": "3",
        **extra,
    }


def manage(data_dir: Path, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run another command on the instance's data dir."""
    return subprocess.run(
        [sys.executable, "manage.py", *words],
        cwd=ROOT,
        env=environment(data_dir),
        capture_output=True,
        text=True,
        check=check,
    )


def certificate(folder: Path) -> tuple[str, str]:
    """A self-signed certificate for this machine and its key, as files."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    baseline = serialization.NoEncryption()
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (folder / "cert.pem").write_bytes(certificate.public_bytes(pem))
    (folder / "key.pem").write_bytes(key.private_bytes(pem, pkcs8, baseline))
    return str(folder / "cert.pem"), str(folder / "key.pem")


class Instance:
    """One `manage.py up`."""

    def __init__(self, data_dir: Path, *words: str, command: str = "up", **extra: str) -> None:
        self.data_dir = data_dir
        self.ready_file = data_dir.parent / f"{data_dir.name}.ready.json"
        self.ready_file.unlink(missing_ok=True)
        self.log = data_dir.parent / f"{data_dir.name}.log"
        program = [sys.executable, "manage.py", command, "--port", "0"]
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [*program, "--ready-file", str(self.ready_file), *words],
                cwd=ROOT,
                env=environment(data_dir, **extra),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def ready(self) -> dict[str, str]:
        """What the ready file says, once it's there."""
        deadline = time.monotonic() + 120
        while not self.ready_file.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"not ready (status {self.process.returncode}): {self.text()}")
            time.sleep(0.05)
        return json.loads(self.ready_file.read_text())

    def text(self) -> str:
        """All that it printed."""
        return self.log.read_text()

    def family(self) -> list[int]:
        """Ids of all processes that descend from it."""
        parents: dict[int, int] = {}
        for entry in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = entry.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.parent.name)] = int(fields[1])
        pids, new = [], [self.process.pid]
        while new:
            new = [pid for pid, parent in parents.items() if parent in new]
            pids += new
        return pids

    def child(self, word: str) -> int:
        """The child with this word in its command line."""
        for pid in self.family():
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace")
            except OSError:
                continue
            if word in line:
                return pid
        raise LookupError(word)

    def end(self, number: int = signal.SIGTERM) -> tuple[int, list[int]]:
        """Signal it; return its status and those of its family that are still there."""
        family = self.family()
        self.process.send_signal(number)
        status = self.process.wait(60)
        deadline = time.monotonic() + 60
        while (
            survivors := [pid for pid in family if not gone(pid)]
        ) and time.monotonic() < deadline:
            time.sleep(0.05)
        return status, survivors

    def __enter__(self) -> Instance:
        return self

    def __exit__(self, *_: Any) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
