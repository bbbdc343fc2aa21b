"""Vision-language models: vision towers, their connectors, and the decoder with an encoder."""
