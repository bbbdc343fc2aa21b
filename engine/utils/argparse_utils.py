"""Names of `vllm.utils.argparse_utils`."""

from engine.offline.engine_args import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser"]
