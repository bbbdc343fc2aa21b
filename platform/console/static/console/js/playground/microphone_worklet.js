/** Runs on the browser's audio thread: samples at the device's rate become pieces of 16 bits at another. */

class Recorder extends AudioWorkletProcessor {
  constructor({ processorOptions: { rate, chunkLength } }) {
    super();
    this.step = sampleRate / rate;
    this.chunk = new Int16Array(chunkLength);
    this.length = 0;
    this.position = 0; // of the next sample to write, in samples after `last`
    this.last = 0;
  }

  process([[channel]]) {
    if (!channel) return true; // nothing is connected yet
    const samples = [this.last, ...channel];
    for (; this.position < channel.length; this.position += this.step) {
      const index = Math.floor(this.position);
      const part = this.position - index;
      this.write(samples[index] * (1 - part) + samples[index + 1] * part);
    }
    this.position -= channel.length;
    this.last = channel[channel.length - 1];
    return true;
  }

  write(sample) {
    this.chunk[this.length] = Math.max(-1, Math.min(1, sample)) * 32767;
    this.length += 1;
    if (this.length < this.chunk.length) return;
    this.port.postMessage(this.chunk.slice());
    this.length = 0;
  }
}

registerProcessor("recorder", Recorder);
