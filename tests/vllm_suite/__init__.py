"""vLLM's own API tests against the running product: `python -m tests.vllm_suite SOURCE`.

`SOURCE` is an unpacked source package of vLLM (from PyPI); nothing of it is part of this project.
"""
