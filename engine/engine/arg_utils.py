"""Names of `vllm.engine.arg_utils`."""

from engine.offline.engine_args import AsyncEngineArgs, EngineArgs

__all__ = ["AsyncEngineArgs", "EngineArgs"]
