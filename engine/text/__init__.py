"""Text input and output: tokenizers, chat templates, detokenization, stop strings. Torch-free."""
