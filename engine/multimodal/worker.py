"""The media worker, `python -m engine.multimodal.worker`: prepares images, videos, audio and
documents, one after the other.

It decodes untrusted files, so it can be killed at any moment; see `WorkerProcess`. Requests and
answers are structs of `engine.multimodal.inputs`, as MessagePack; an empty request has an empty
answer.
"""

from __future__ import annotations

import sys
from collections import OrderedDict

import msgspec
import numpy as np

from engine.contract.errors import InvalidRequest, ModelLoadError, QuireError
from engine.multimodal.inputs import (
    OPTION_FIELDS,
    Answer,
    PreparedDocument,
    PrepareDocumentRequest,
    PreparedPicture,
    PreparedSound,
    PrepareRequest,
    PrepareSoundRequest,
    Refusal,
    SoundStretch,
)
from engine.system.worker_process import limit_memory, open_worker_pipes, read_frame, write_frame

#: Memory that the worker may use beyond its loaded code: four copies of an image of `MAX_PIXELS`.
MEMORY_BYTES = 3 << 30
_MAX_PROCESSORS = 4


def main() -> int:
    """Serve until stdin closes."""
    requests, answers = open_worker_pipes()
    # Without torch the image processors of `transformers`, which use numpy and Pillow, load in a
    # fifth of the time and use a sixth of the memory.
    sys.modules["torch"] = None  # type: ignore[assignment]
    from engine.multimodal.audio import HOP, SAMPLE_RATE, stretch_powers
    from engine.multimodal.audio_prompts import AudioProcessor
    from engine.multimodal.documents import read_pdf
    from engine.multimodal.processor import MediaProcessor, open_image
    from engine.multimodal.sound_files import split_sound
    from engine.multimodal.video_files import read_video

    processors: OrderedDict[tuple[str, str, str], MediaProcessor | AudioProcessor] = OrderedDict()
    encode = msgspec.msgpack.Encoder().encode
    requests_decoder = msgspec.msgpack.Decoder[
        PrepareRequest | PrepareSoundRequest | PrepareDocumentRequest
    ](PrepareRequest | PrepareSoundRequest | PrepareDocumentRequest)

    def vectors_of(request: PrepareRequest) -> np.ndarray:
        return np.frombuffer(request.data, dtype="<f4").reshape(-1, request.embeds_size)

    def prepare_picture(request: PrepareRequest) -> PreparedPicture:
        key = request.folder, request.version, repr(sorted(request.pruning_rates.items()))
        if key not in processors:
            hears = request.kind == "audio"
            folder = request.folder
            processors[key] = (
                AudioProcessor.from_folder(folder)
                if hears
                else MediaProcessor(folder, request.pruning_rates)
            )
            if len(processors) > _MAX_PROCESSORS:
                processors.popitem(last=False)
        processors.move_to_end(key)
        processor = processors[key]
        if isinstance(processor, AudioProcessor):
            if request.options:
                raise InvalidRequest(
                    "mm_processor_kwargs change nothing of audio: leave them out.",
                    param="mm_processor_kwargs",
                )
            if request.embeds_size:
                prepared = processor.prepare_embeds(vectors_of(request))
            else:
                prepared = processor.prepare_file(request.data)
        elif request.embeds_size:
            prepared = processor.prepare_embeds(vectors_of(request), request.grid)
        elif request.kind == "video":
            video = read_video(request.data, request.sampling)
            prepared = processor.prepare_video(video, request.options)
        else:
            prepared = processor.prepare(open_image(request.data), request.options)
        return PreparedPicture(
            kind=prepared.kind,
            digest=prepared.digest,
            replacement=prepared.replacement,
            num_vectors=prepared.num_vectors,
            placeholder_id=prepared.placeholder_id,
            token_id=prepared.token_id,
            tensors=prepared.encoded,
            grid=prepared.grid,
            time_interval=prepared.time_interval,
            wrapper=prepared.wrapper,
            seconds=prepared.seconds,
            retained=prepared.retained,
        )

    def prepare_sound(request: PrepareSoundRequest) -> PreparedSound:
        num_samples, stretches = split_sound(
            request.data, request.num_frames * HOP, request.detection
        )
        prepared = [
            SoundStretch(
                powers=stretch_powers(stretch.samples, request.num_mels).tobytes(),
                start=stretch.start / SAMPLE_RATE,
                seconds=len(stretch.samples) / SAMPLE_RATE,
                lead=stretch.lead / SAMPLE_RATE,
            )
            for stretch in stretches
        ]
        return PreparedSound(num_samples / SAMPLE_RATE, prepared)

    limit_memory(MEMORY_BYTES)
    while (frame := read_frame(requests)) is not None:
        if not frame:  # asks whether it has started
            write_frame(answers, b"")
            continue
        answer: Answer
        try:
            request = requests_decoder.decode(frame)
            if isinstance(request, PrepareSoundRequest):
                answer = prepare_sound(request)
            elif isinstance(request, PrepareDocumentRequest):
                answer = PreparedDocument(read_pdf(request.data, request.max_images))
            else:
                answer = prepare_picture(request)
        except QuireError as error:
            field = error.param if error.param in OPTION_FIELDS else ""
            answer = Refusal(error.message, isinstance(error, ModelLoadError), field or "")
        except MemoryError:
            answer = Refusal("The file takes too much memory.")
        write_frame(answers, encode(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
