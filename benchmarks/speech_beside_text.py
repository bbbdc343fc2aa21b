"""Gaps between a stream's tokens while another engine on the same cores transcribes.

    python -m benchmarks.speech_beside_text TEXT_MODEL WHISPER SPEECH.wav [--seconds 10]

The stream runs alone, beside eight transcriptions, and beside them at niceness 19, in turns. The
sound is read as by `benchmarks.speech`. Prints JSON: milliseconds of the gaps, sound transcribed a
second, and the p99 over that of the stream alone.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.speech import RATE, STREAMS, Ours, read_speech
from benchmarks.statistics import percentile, spread_ms
from engine.contract.engine_config import EngineConfig
from engine.contract.messages import EngineRequest
from engine.contract.sampling_params import SamplingParams
from engine.core.engine_core import EngineCore
from engine.core.warmup import warm_up

STREAM_TOKENS = 500
NICENESS = {"alone": None, "beside": 0, "beside_nice_19": 19}


def transcribe(connection: Connection, args: argparse.Namespace, niceness: int) -> None:
    """Transcribe eight streams again and again, until the other side says stop."""
    os.nice(niceness)
    speech = read_speech(args.speech)
    ours = Ours(args.whisper, speech, args.kind)
    ours.transcribe(STREAMS)
    connection.send("ready")
    count, started = 0, time.perf_counter()
    while not connection.poll():
        ours.transcribe(STREAMS)
        count += STREAMS
    connection.send(count * len(speech) / RATE / (time.perf_counter() - started))


def stream_gaps(core: EngineCore, seconds: float) -> list[float]:
    """Seconds between the tokens of one stream after another."""
    gaps: list[float] = []
    end = time.perf_counter() + seconds
    sampling = SamplingParams(temperature=0, max_tokens=STREAM_TOKENS, ignore_eos=True)
    while (last := time.perf_counter()) < end:
        core.add_request(
            EngineRequest(
                request_id=str(last),
                gateway_id="",
                prompt_token_ids=list(range(16)),
                sampling=sampling,
            )
        )
        is_first = True
        while core.has_work:
            for delta in core.step():
                now = time.perf_counter()
                if not is_first and delta.token_ids:
                    gaps.append(now - last)
                last, is_first = now, False
    return gaps


def measure(core: EngineCore, args: argparse.Namespace, niceness: int | None) -> tuple[Any, float]:
    """Gaps, and seconds of sound that were transcribed a second."""
    if niceness is None:
        return stream_gaps(core, args.seconds), 0.0
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=transcribe, args=(theirs, args, niceness)
    )
    process.start()
    theirs.close()
    ours.recv()
    gaps = stream_gaps(core, args.seconds)
    ours.send("stop")
    rate = ours.recv()
    process.join()
    return gaps, rate


def main() -> int:
    """Measure all, in turns."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speech_beside_text", description=__doc__
    )
    parser.add_argument("text_model")
    parser.add_argument("whisper")
    parser.add_argument("speech")
    parser.add_argument("--kind", default="int8", choices=("float32", "int8"))
    parser.add_argument("--seconds", type=float, default=10, help="of each turn")
    parser.add_argument("--turns", type=int, default=2)
    args = parser.parse_args()
    core = EngineCore(EngineConfig(model=args.text_model, skip_tokenizer_init=True))
    warm_up(core)
    gaps: dict[str, list[float]] = {name: [] for name in NICENESS}
    rates: dict[str, list[float]] = {name: [] for name in NICENESS}
    for _ in range(args.turns):
        for name, niceness in NICENESS.items():
            more, rate = measure(core, args, niceness)
            gaps[name] += more
            rates[name].append(rate)
    isolated_p99 = percentile(gaps["alone"], 99)
    report = {
        name: {
            **spread_ms("gap", gaps[name]),
            "sound_s_per_s": round(sum(rates[name]) / len(rates[name]), 1),
            "p99_over_alone": round(percentile(gaps[name], 99) / isolated_p99, 2),
        }
        for name in NICENESS
    }
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
