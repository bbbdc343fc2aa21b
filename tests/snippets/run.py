"""Runs the snippets of a text as a reader would: each on the server that the last one started."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.snippets.extract import Snippet

SERVER = re.compile(r"(?m)^(\w+=\S+ )*(quire serve|python3? -m engine\.entrypoints\.\S*api_server)")
DEFAULT_MODEL = "facebook/opt-125m"
#: What a reader has to fill in, in the order of use.
PLACEHOLDERS = (
    (r"<model>|your-base-model|(?<=--model )\.\.\.", DEFAULT_MODEL),
    (r"\./path-to-chat-template\.jinja", "examples/template_chatml.jinja"),
    (r"(?<= )template_llava\.jinja", "examples/template_llava.jinja"),
    (r"(?<=model=)\.\.\.", f"{DEFAULT_MODEL!r}"),
    (r"(?<=revision=)\.\.\.", "'main'"),
    (r"PIL\.Image\.open\(\.\.\.\)", "__import__('PIL.Image').Image.new('RGB', (56, 56))"),
    (r"=<timeout>", "=5"),
    (r"/path/to/lora/adapters", "$HOME/adapters"),
    (r"\$HOME/adapters/my_adapter", "adapters/my_sql_adapter"),
)
#: Why a snippet isn't run.
NOT_RUN = (
    (r"python \S*setup\.py|CUDA_HOME|MAX_JOBS|VLLM_VERSION", "builds vLLM itself"),
    (r"tools/pre_commit|docs/\S+\.py", "a tool of vLLM's repository"),
    (r"sky |cerebrum|gateway\.<", "another company's service"),
    (r"your_code", "a module that the reader writes"),
    (r"(?s)\A(?!.*\b(import|export|curl|python3?|quire)\b)", "an excerpt, no program"),
    (r"environment_variables: |class \w+(Config|Metrics)", "an excerpt of vLLM's source"),
    (r"curl 访问|is deprecated|^vllm |command: ", "prose"),
    (r"CMD_MODULES", "an excerpt of vLLM's source"),
)
#: Arguments of vLLM's examples.
ARGUMENTS = {
    "api_client": "--port PORT",
    "aqlm_example": "--choice 4",
    "gradio_openai_chatbot_webserver": f"-m {DEFAULT_MODEL}",
    "llm_engine_example": f"--model {DEFAULT_MODEL}",
}
TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Outcome:
    """`status`: works, ends or not run. `detail`: what it said last, or the reason."""

    status: str
    detail: str
    seconds: float = 0.0


@dataclass
class Runner:
    """Runs snippets in `folder` with `variables`, and one server at a time."""

    folder: Path
    variables: dict[str, str]
    exports: dict[str, str] = field(default_factory=dict)
    section: str = ""
    server: subprocess.Popen[bytes] | None = None
    model: str = ""
    port: str = ""

    def run(self, snippet: Snippet) -> Outcome:
        """Run one; those of a text come in its order."""
        if snippet.kind == "text":
            reason = "damaged in print" if snippet.example else "no program"
            return Outcome("not run", reason)
        for pattern, reason in NOT_RUN:
            if re.search(pattern, snippet.source):
                return Outcome("not run", reason)
        if snippet.section != self.section:
            self.section, self.exports = snippet.section, {}
        source = snippet.source
        for pattern, text in PLACEHOLDERS:
            source = re.sub(pattern, text, source)
        start = time.monotonic()
        if snippet.kind == "python":
            outcome = self._run_program(source, snippet.example)
        elif SERVER.search(source):
            outcome = self._start_server(source)
        else:
            outcome = self._run_commands(source)
        return Outcome(outcome.status, outcome.detail, time.monotonic() - start)

    def close(self) -> None:
        """Stop the server."""
        if self.server is None:
            return
        os.killpg(self.server.pid, signal.SIGTERM)
        try:
            self.server.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self.server.pid, signal.SIGKILL)
            self.server.wait()
        self.server = None

    def _run_program(self, source: str, example: str) -> Outcome:
        source = self._with_port(source)
        # Later command lines name the examples.
        program = self.folder / "examples" / f"{example or 'program'}.py"
        program.write_text(source)
        words = ARGUMENTS.get(example, "").replace("PORT", self.port).split()
        outcome = self._run([sys.executable, str(program), *words])
        if example and outcome == Outcome("works", ""):
            return Outcome("not run", "damaged in print: it says nothing")
        return outcome

    def _run_commands(self, source: str) -> Outcome:
        exports = re.findall(r"(?m)^export (\w+)=([^\s#]*)", source)
        self.exports |= {name: value.replace("$HOME", str(self.folder)) for name, value in exports}
        if exports and "curl" not in source:
            return Outcome("works", "set for what follows")
        # An answer may be printed below its question.
        source = self._with_port(source.partition("\n{")[0])
        return self._run(
            ["bash", "-c", f"set -o pipefail\n{source.replace('curl ', 'curl -fsS ')}"]
        )

    def _run(self, command: list[str]) -> Outcome:
        try:
            result = subprocess.run(
                command,
                cwd=self.folder,
                env=self.variables | self.exports,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Outcome("ends", f"nothing within {TIMEOUT_S:g} s")
        if result.returncode == 0:
            return Outcome("works", last_line(result.stdout))
        return Outcome("ends", last_line(result.stderr) or f"status {result.returncode}")

    def _with_port(self, source: str) -> str:
        """The source with the port of a running server, if it asks one."""
        address = re.compile(r"(?<=localhost)(:8000|(?=/v1))|(?<=0\.0\.0\.0):8000")
        if not (address.search(source) or "{args.port}" in source):
            return source
        match = re.search(r"\"?model\"?[=:] ?\"([\w.-]+/[\w.-]+)\"", source)
        needed = match[1] if match else "e5" if "embeddings.create" in source else ""
        if needed == "e5":
            needed = "intfloat/e5-mistral-7b-instruct"
        if self.server is None or (needed and needed != self.model):
            self._start_server(f"quire serve {needed or DEFAULT_MODEL}")
        return address.sub(f":{self.port}", source)

    def _start_server(self, source: str) -> Outcome:
        self.close()
        ready, log = self.folder / "ready.json", self.folder / "server.log"
        ready.unlink(missing_ok=True)
        match = re.search(r"(?:--model|serve)\s+(?!-)(\S+)", source)
        self.model = match[1] if match else DEFAULT_MODEL
        data = {"QUIRE_DATA_DIR": str(self.folder / f"data-{time.monotonic_ns()}")}
        options = f"--port 0 --ready-file {ready}"
        # A worker checks adapters.
        if "VLLM_PLUGINS" not in self.exports and "--lora-modules" not in source:
            options += " --no-worker"
        with log.open("wb") as output:
            self.server = subprocess.Popen(
                ["bash", "-c", f"exec {source.strip()} {options}"],
                cwd=self.folder,
                env=self.variables | self.exports | data,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + TIMEOUT_S
        while not ready.exists():
            if self.server.poll() is not None or time.monotonic() > deadline:
                if self.server.poll() is not None:
                    self.server = None
                return Outcome("ends", last_line(log.read_text()))
            time.sleep(0.1)
        match = re.search(r":(\d+)\b(?=\W*\"|/)", ready.read_text())
        self.port = match[1] if match else ""
        return Outcome("works", f"ready: {self.model}")


def last_line(text: str) -> str:
    """The last line that is not empty."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
