/** Sound of the microphone, as 16-bit samples at the rate that the realtime API takes. */

export const RATE = 24_000;
const CHUNK_S = 0.1;

export class Microphone {
  #stream;
  #context;
  #chunks = [];

  /**
   * Ask for the microphone, and call `onPiece(Int16Array, loudness from 0 to 1)` until `stop`, `onEnd()` if the
   * device goes away. Throws an Error that says why there is no sound.
   */
  async start(onChunk, onEnd) {
    if (!navigator.mediaDevices) throw new Error("Browsers give the microphone to pages with https:// alone.");
    try {
      this.#stream = await navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1 } });
    } catch (error) {
      throw new Error(REASONS[error.name] ?? `The microphone can't be used: ${error.message}`);
    }
    this.#stream.getTracks()[0].addEventListener("ended", onEnd);
    this.#context = new AudioContext();
    await this.#context.audioWorklet.addModule(new URL("microphone_worklet.js", import.meta.url));
    const processorOptions = { rate: RATE, chunkLength: RATE * CHUNK_S };
    const recorder = new AudioWorkletNode(this.#context, "recorder", { numberOfOutputs: 0, processorOptions });
    recorder.port.onmessage = ({ data }) => {
      this.#chunks.push(data);
      onChunk(data, loudness(data));
    };
    // Frequencies above half of the sample rate would alias into speech.
    const filter = new BiquadFilterNode(this.#context, { type: "lowpass", frequency: RATE * 0.45 });
    this.#context.createMediaStreamSource(this.#stream).connect(filter).connect(recorder);
    await this.#context.resume();
  }

  /** Give the microphone back. Returns what was recorded, as a WAV file. */
  async stop() {
    for (const track of this.#stream?.getTracks() ?? []) track.stop();
    await this.#context?.close();
    return new File([wavHeader(this.#chunks), ...this.#chunks], "recording.wav", { type: "audio/wav" });
  }
}

const REASONS = {
  NotAllowedError: "The browser may not use the microphone. Allow it in the site's settings.",
  NotFoundError: "This computer has no microphone.",
  NotReadableError: "Another program uses the microphone.",
};

/** The level in decibels, from silence at -60 to full scale. */
function loudness(samples) {
  const power = samples.reduce((sum, sample) => sum + sample * sample, 0) / samples.length / 32768 ** 2;
  return Math.max(0, 1 + (10 * Math.log10(power + 1e-9)) / 60);
}

/** Of one channel of 16 bits. */
function wavHeader(chunks) {
  const numBytes = chunks.reduce((sum, { byteLength }) => sum + byteLength, 0);
  const view = new DataView(new ArrayBuffer(44));
  const text = (offset, value) => [...value].forEach((letter, index) => view.setUint8(offset + index, letter.charCodeAt(0)));
  text(0, "RIFF");
  view.setUint32(4, 36 + numBytes, true);
  text(8, "WAVEfmt ");
  for (const [offset, value] of [[16, 16], [24, RATE], [28, RATE * 2], [40, numBytes]]) view.setUint32(offset, value, true);
  for (const [offset, value] of [[20, 1], [22, 1], [32, 2], [34, 16]]) view.setUint16(offset, value, true);
  text(36, "data");
  return view;
}
