"""Names of `vllm.usage.usage_lib`. Quire reports its usage to nobody."""

from enum import StrEnum


class UsageContext(StrEnum):
    """Kind of program that an engine runs in: accepted by engines, without effect."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"
