"""Gaps between a stream's texts while clients send pages to the demo model that sees.

    python -m benchmarks.pictures_beside_text [--clients 72] [--pages 4]

`quire up` serves both demo models. Streams of each run alone and beside clients in a process of
its own, which always send new pages; then the replica that sees runs at niceness 19 (media workers
always do). Prints JSON: milliseconds of all turns' gaps, each p99 over that of the same model
alone, pages that were answered a second, and requests that were refused since too many pages wait.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import multiprocessing
import os
import random
import string
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx

from benchmarks.statistics import percentile, spread_ms

TEXT, SEES = "quire-demo", "quire-demo-vision"
#: Of the clients, which would be on other machines.
CLIENT_NICENESS = 19
#: Seconds after which OpenAI's clients try again what was refused.
RETRY_S = 0.5


def make_page() -> bytes:
    """A page of text as a PNG file with a palette."""
    from PIL import Image, ImageDraw

    image = Image.new("P", (1240, 1754), 0)
    image.putpalette([255, 255, 255, 0, 0, 0])
    draw = ImageDraw.Draw(image)
    rng = random.Random(0)
    for row in range(100):
        words = ("".join(rng.choices(string.ascii_letters, k=rng.randint(2, 9))) for _ in range(26))
        draw.text((60, 60 + 16 * row), " ".join(words), fill=1)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def recolored(page: bytes, number: int) -> bytes:
    """The page in another ink, which is another picture; `number`: 0 to 2**24 - 1."""
    start = page.index(b"PLTE")
    (size,) = struct.unpack(">I", page[start - 4 : start])
    end = start + 4 + size
    palette = page[start : start + 7] + number.to_bytes(3) + page[start + 10 : end]
    return page[:start] + palette + struct.pack(">I", zlib.crc32(palette)) + page[end + 4 :]


def make_client(url: str, api_key: str, connections: int) -> httpx.Client:
    """A client of a running product."""
    return httpx.Client(
        base_url=f"{url}/v1",
        headers={"Authorization": f"Bearer {api_key}"},
        timeout=300,
        limits=httpx.Limits(max_connections=connections),
    )


def send_pages(connection: Connection, url: str, api_key: str, args: argparse.Namespace) -> None:
    """Ask about new pages until the other side says stop; then send the number of answers a
    second, and of refusals.
    """
    os.setsid()  # Linux may schedule a session as one
    os.nice(CLIENT_NICENESS)
    if (autogroup := Path("/proc/self/autogroup")).exists():
        autogroup.write_text(str(CLIENT_NICENESS))
    page, stopped = make_page(), threading.Event()
    client = make_client(url, api_key, args.clients)
    numbers = iter(range(time.monotonic_ns() // 10**6 % 2**24, 2**24))
    statuses: list[int] = []

    def ask() -> None:
        while not stopped.is_set():
            parts: list[dict[str, Any]] = [{"type": "text", "text": "What is this?"}]
            for _ in range(args.pages):
                data = base64.b64encode(recolored(page, next(numbers))).decode()
                name = {"url": f"data:image/png;base64,{data}"}
                parts.append({"type": "image_url", "image_url": name})
            messages = [{"role": "user", "content": parts}]
            body = {"model": SEES, "max_tokens": 8, "messages": messages}
            statuses.append(client.post("/chat/completions", json=body).status_code)
            if statuses[-1] != 200:
                time.sleep(RETRY_S)

    with ThreadPoolExecutor(args.clients) as pool:
        futures = [pool.submit(ask) for _ in range(args.clients)]
        try:
            while len(statuses) < args.clients:  # all have been answered once, on average
                time.sleep(0.1)
            connection.send("ready")
            count, started = statuses.count(200), time.perf_counter()
            connection.recv()
            rate = (statuses.count(200) - count) / (time.perf_counter() - started)
        finally:  # also when the other side is gone
            stopped.set()
    for future in futures:
        future.result()
    connection.send((rate * args.pages, sum(status != 200 for status in statuses)))


@contextmanager
def clients_at_work(
    url: str, api_key: str, args: argparse.Namespace, outcomes: list[Any]
) -> Iterator[None]:
    """Clients that send pages; adds what came of them to `outcomes`."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=send_pages, args=(theirs, url, api_key, args)
    )
    process.start()
    theirs.close()
    ours.recv()
    yield
    ours.send("stop")
    outcomes.append(ours.recv())
    process.join()


def stream_gaps(client: httpx.Client, model: str, seconds: float) -> list[float]:
    """Seconds between the texts of a stream, which is asked anew until the time is over.

    Each answer ends by itself: special tokens after its end have no text.
    """
    gaps: list[float] = []
    deadline = time.perf_counter() + seconds
    messages = [{"role": "user", "content": "Tell me a story."}]
    body = {"model": model, "max_tokens": 400, "stream": True, "messages": messages}
    while time.perf_counter() < deadline:
        with client.stream("POST", "/chat/completions", json=body) as answer:
            answer.raise_for_status()
            last = 0.0
            for line in answer.iter_lines():
                if '"content"' not in line:
                    continue
                now = time.perf_counter()
                if last:
                    gaps.append(now - last)
                last = now
    return gaps


def set_niceness(model: str, data_dir: str, niceness: int) -> None:
    """Of all threads of a model's replicas. Raises RuntimeError if it has none."""
    num_replicas = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command, environment = path.read_bytes(), (path.parent / "environ").read_bytes()
            threads = os.listdir(path.parent / "task")
        except OSError:  # it has ended
            continue
        is_replica = b"engine.serving" in command and model.encode() in command
        if is_replica and data_dir.encode() in command + environment:
            num_replicas += 1
            for thread in threads:
                os.setpriority(os.PRIO_PROCESS, int(thread), niceness)
    if not num_replicas:
        raise RuntimeError(f"There is no replica of {model}.")


def measure(args: argparse.Namespace, gaps: dict[str, list[float]], outcomes: list[Any]) -> None:
    """One turn, with a product of its own."""
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready.json"
        command = [
            *(sys.executable, "manage.py", "up", "--data-dir", f"{folder}/data"),
            *("--ready-file", str(ready), "--port", "0"),
        ]
        with (Path(folder) / "up.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            while not ready.exists() and process.poll() is None:
                time.sleep(0.1)
            facts = json.loads(ready.read_text())
            access = facts["url"], facts["api_key"]
            client = make_client(*access, 4)
            question = {"model": SEES, "messages": [{"role": "user", "content": "What?"}]}
            while client.post("/chat/completions", json=question).status_code != 200:
                time.sleep(0.1)

            def run(name: str, model: str) -> None:
                gaps.setdefault(name, []).extend(stream_gaps(client, model, args.seconds))

            for model in (TEXT, SEES):
                stream_gaps(client, model, 2)
            run("text_alone", TEXT)
            run("sees_alone", SEES)
            with clients_at_work(*access, args, outcomes):
                run("text_beside", TEXT)
                run("sees_beside", SEES)
                set_niceness(SEES, f"{folder}/data", 19)
                run("text_beside_nice_19", TEXT)
        finally:
            process.terminate()
            process.wait(60)


def main() -> int:
    """Measure all, in turns."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pictures_beside_text", description=__doc__
    )
    parser.add_argument("--clients", type=int, default=72)
    parser.add_argument("--pages", type=int, default=4, help="of each question")
    parser.add_argument("--seconds", type=float, default=6, help="of each stream, by turn")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    gaps: dict[str, list[float]] = {}
    outcomes: list[tuple[float, int]] = []
    for _ in range(args.turns):
        measure(args, gaps, outcomes)
    report: dict[str, Any] = {}
    for name, values in gaps.items():
        isolated_p99 = percentile(gaps[f"{name.partition('_')[0]}_alone"], 99)
        ratio = round(percentile(values, 99) / isolated_p99, 2)
        report[name] = {**spread_ms("gap", values), "p99_over_alone": ratio}
    report["pages_per_s"] = [round(rate, 1) for rate, _ in outcomes]
    report["refused"] = sum(refused for _, refused in outcomes)
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
