"""`DeviceDrafts`: what computes drafts beside the model of an executor, on the same device."""

from __future__ import annotations

from collections.abc import Callable

from engine.contract.config import EngineConfig
from engine.contract.errors import ConfigError
from engine.contract.speculative import HEADS, SpeculativeConfig
from engine.devices.device import CacheNeed, Device
from engine.executor.draft import DraftExecutor
from engine.executor.heads import HeadExecutor, with_method
from engine.kv_cache.layout import KVLayout
from engine.model_loader.loader import LoadedModel
from engine.scheduler.plan import StepPlan, StepResult
from engine.speculative.draft_facts import DraftFacts
from engine.speculative.head_plan import HeadFacts, HeadPlan, HeadResult
from engine.worker.batch import RunningBatch
from engine.worker.hidden import HiddenKeeper


class DeviceDrafts:
    """See `DraftHost`: the draft model or the heads that the settings name, if either.

    Attributes:
        of_model, of_heads: what runs them; at most one of the two.
    """

    def __init__(self, begin: Callable[[], None]) -> None:
        """`begin`: called before each step, in the thread that runs it."""
        self._begin = begin
        self.of_model: DraftExecutor | None = None
        self.of_heads: HeadExecutor | None = None

    def load(
        self, config: EngineConfig, device: Device, loaded: LoadedModel, *, overlaps: bool
    ) -> None:
        """Load what the settings name beside `loaded`, where drafts can be checked.

        `overlaps`: steps may be planned before their tokens are known. Raises `ConfigError` or
        `ModelLoadError`.
        """
        if config.speculative_config is None or config.plans_ahead(overlaps):
            return
        wanted = SpeculativeConfig.from_mapping(config.speculative_config)
        if not wanted.computes or loaded.pooler is not None or loaded.model.stateful:
            return
        wanted = with_method(config, wanted)
        _check_device(device, wanted.method)
        if wanted.method in HEADS:
            self.of_heads = HeadExecutor(config, wanted, device, loaded)
        else:
            self.of_model = DraftExecutor(config, wanted, device, loaded)

    # -- for the core -------------------------------------------------------------------------

    @property
    def model(self) -> DraftFacts | None:
        """See `DraftHost`."""
        return None if self.of_model is None else self.of_model.facts

    @property
    def heads(self) -> HeadFacts | None:
        """See `DraftHost`."""
        return None if self.of_heads is None else self.of_heads.facts

    def execute(self, plan: StepPlan) -> StepResult:
        """See `DraftHost`."""
        if self.of_model is None:
            raise RuntimeError("There is no draft model.")
        self._begin()
        return self.of_model.execute(plan)

    def draw(self, plan: HeadPlan) -> HeadResult:
        """See `DraftHost`."""
        if self.of_heads is None:
            raise RuntimeError("There are no heads.")
        return self.of_heads.draw(plan)

    # -- memory -------------------------------------------------------------------------------

    def check(self, layout: KVLayout) -> None:
        """Raise `ConfigError` where the model's cache isn't one that heads can go by."""
        if self.of_heads is not None:
            self.of_heads.check(layout)

    @property
    def bytes_per_token(self) -> int:
        """What a token takes beside the model's own cache."""
        return 0 if self.of_heads is None else self.of_heads.bytes_per_token

    @property
    def need(self) -> CacheNeed | None:
        """What the draft model's own cache asks for."""
        return None if self.of_model is None else self.of_model.need

    @property
    def taps(self) -> tuple[int, ...]:
        """The model's layers whose inputs heads read."""
        return () if self.of_heads is None else self.of_heads.taps

    def size_cache(self, num_blocks: int, block_bytes: int) -> None:
        """See `DraftExecutor.size_cache`."""
        if self.of_model is not None:
            self.of_model.size_cache(num_blocks, block_bytes)

    def allocate_cache(self) -> None:
        """Make the draft model's cache."""
        if self.of_model is not None:
            self.of_model.allocate_cache()

    def attach(self, batch: RunningBatch, num_blocks: int, layout: KVLayout) -> HiddenKeeper | None:
        """See `HeadExecutor.attach`; None: nothing is to be kept."""
        if self.of_heads is None:
            return None
        return self.of_heads.attach(batch, num_blocks, layout)

    def sleep(self, level: int) -> None:
        """Give memory back, as `Executor.sleep`."""
        for each in (self.of_model, self.of_heads):
            if each is not None:
                each.sleep(level)

    def wake_weights(self) -> None:
        """Bring the weights back, if they sleep."""
        for each in (self.of_model, self.of_heads):
            if each is not None:
                each.wake_weights()


def _check_device(device: Device, method: str) -> None:
    """Raise `ConfigError` where the device can't draw drafts like that."""
    if method in device.heads or (method not in HEADS and device.runs_draft_models):
        return
    own: tuple[str, ...] = ("draft_model",) if device.runs_draft_models else ()
    *known, last = "ngram", "suffix", *own, *device.heads
    raise ConfigError(
        f"speculative_config: drafts by {method} aren't supported on the device {device.name}; the "
        f"methods {', '.join(known)} and {last} are.",
        param="speculative_config",
    )
