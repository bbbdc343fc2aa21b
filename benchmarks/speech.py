"""Whisper beside faster-whisper, in turns.

`python -m benchmarks.speech FOLDER SPEECH.wav --peer PYTHON`: FOLDER is a Whisper of English alone
in CTranslate2's layout, which both read; SPEECH.wav has 16 bits at 16 kHz and at most 30 s; PYTHON
is an interpreter with faster-whisper. Greedy, one window, without timestamps, from samples to text.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import subprocess
import time
import wave
from collections.abc import Callable
from functools import partial

import numpy as np

from engine import LLM, SamplingParams

RATE, STREAMS = 16_000, 8
PROMPT = "<|startoftranscript|><|notimestamps|>"
PEER = """
import gc, sys, time, wave
import numpy as np
from faster_whisper import BatchedInferencePipeline, WhisperModel
folder, path, kind, threads, streams = sys.argv[1:]
with wave.open(path) as file:
    speech = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768
model = WhisperModel(folder, device="cpu", compute_type=kind, cpu_threads=int(threads))
batched, count = BatchedInferencePipeline(model), int(streams)
joined, seconds = np.tile(speech, count), len(speech) / 16_000
clips = [{"start": i * seconds, "end": (i + 1) * seconds} for i in range(count)]
options = {"language": "en", "beam_size": 1, "without_timestamps": True, "temperature": 0.0}
gc.collect()
gc.freeze()
for line in sys.stdin:
    started = time.perf_counter()
    if line.strip() == "1":
        segments, _ = model.transcribe(speech, condition_on_previous_text=False, **options)
    else:
        segments, _ = batched.transcribe(joined, batch_size=count, clip_timestamps=clips, **options)
    text = "".join(segment.text for segment in segments)
    print(time.perf_counter() - started, text, flush=True)
"""


class Peer:
    """faster-whisper in a process of its own."""

    def __init__(self, python: str, *arguments: str) -> None:
        # OpenBLAS of its numpy has other kernels than ours may name.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("OPENBLAS_")}
        self._process = subprocess.Popen(
            [python, "-c", PEER, *arguments],
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def transcribe(self, streams: int) -> float:
        """Seconds for that many streams at once."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("The peer has no pipes.")
        self._process.stdin.write(f"{streams}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("The peer ended.")
        return float(line.split()[0])

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait()


class Ours:
    """An engine in this process."""

    def __init__(
        self, folder: str, speech: np.ndarray, kind: str, padding: str = "max_length"
    ) -> None:
        quantization = {"quantization": "int8", "dtype": "bfloat16"} if kind == "int8" else {}
        self._llm = LLM(
            folder,
            # The turn that isn't counted fills these, so that as in a server that has run for a
            # while no memory is written for the first time.
            num_gpu_blocks_override=896,
            mm_processor_kwargs={"padding": padding},
            **({"dtype": "float32"} | quantization),
        )
        self._speech, self._number = speech, 0
        self._params = SamplingParams(temperature=0, max_tokens=200)
        gc.collect()
        gc.freeze()  # as a replica does once it has started
        self.text = ""

    def transcribe(self, streams: int) -> float:
        """Seconds for that many streams at once, each of which nobody has heard before."""
        sounds = []
        for _ in range(streams):
            self._number += 1
            sounds.append(self._speech * (1 - 1e-4 * self._number))
        return self._run(sounds)

    def transcribe_again(self) -> float:
        """Seconds for a stream that was the last one."""
        return self._run([self._speech * (1 - 1e-4 * self._number)])

    def _run(self, sounds: list[np.ndarray]) -> float:
        started = time.perf_counter()
        prompts = [
            {"encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": (sound, RATE)}},
             "decoder_prompt": PROMPT}
            for sound in sounds
        ]  # fmt: skip
        results = self._llm.generate(prompts, self._params, use_tqdm=False)
        seconds = time.perf_counter() - started
        self.text = results[-1].outputs[0].text
        return seconds


def read_speech(path: str) -> np.ndarray:
    """Samples of a file of 16 bits, float32 [n]."""
    with wave.open(path) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    return samples.astype(np.float32) / 32768


def measure(turns: int, **runs: Callable[[], float]) -> dict[str, float]:
    """The median of each run's seconds, in turns, after one that isn't counted."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns + 1):
        for name, run in runs.items():
            spent = run()
            if turn:
                seconds[name].append(spent)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speech", description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("speech")
    parser.add_argument("--peer", required=True, metavar="PYTHON")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--padding", default="max_length", help="or longest, of ours")
    parser.add_argument("--kinds", nargs="+", default=["float32", "int8"])
    options = parser.parse_args()
    speech = read_speech(options.speech)
    length, threads = len(speech) / RATE, len(os.sched_getaffinity(0))
    for kind in options.kinds:
        peer = Peer(options.peer, options.folder, options.speech, kind, str(threads), str(STREAMS))
        try:
            ours = Ours(options.folder, speech, kind, options.padding)
            median = measure(
                options.turns,
                ours_1=partial(ours.transcribe, 1),
                peer_1=partial(peer.transcribe, 1),
                ours_8=partial(ours.transcribe, STREAMS),
                peer_8=partial(peer.transcribe, STREAMS),
                ours_again=ours.transcribe_again,
            )
        finally:
            peer.close()
        one, batch = median["ours_1"], median["ours_8"]
        print(f"{kind}: {ours.text.strip()}")
        print(
            f"{kind}: real-time factor of one stream {one / length:.4f}, "
            f"faster-whisper {median['peer_1'] / length:.4f}: {one / median['peer_1']:.2f} of its"
        )
        print(
            f"{kind}: {STREAMS} streams {STREAMS * length / batch:.0f} s of sound a second, "
            f"faster-whisper {STREAMS * length / median['peer_8']:.0f}: "
            f"{median['peer_8'] / batch:.2f} x"
        )
        print(
            f"{kind}: the same sound a second time {one / median['ours_again']:.1f} x as fast",
            flush=True,
        )


if __name__ == "__main__":
    main()
