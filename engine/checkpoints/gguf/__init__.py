"""GGUF files, llama.cpp's format, read directly: weights, tokenizer, chat template.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""
