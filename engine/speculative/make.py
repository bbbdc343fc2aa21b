"""`make_drafter`: who gives drafts, as the settings say."""

from __future__ import annotations

from collections.abc import Callable

from engine.contract.config import EngineConfig
from engine.contract.errors import ConfigError
from engine.contract.speculative import SpeculativeConfig
from engine.models.facts import ModelFacts
from engine.scheduler import StepPlan, StepResult
from engine.speculative.draft_facts import DraftFacts
from engine.speculative.draft_maker import DraftMaker
from engine.speculative.draft_model import DraftModel
from engine.speculative.drafter import Drafter, Possible
from engine.speculative.head_drafts import HeadDrafts
from engine.speculative.head_plan import HeadFacts, HeadPlan, HeadResult


def make_drafter(
    config: EngineConfig,
    facts: ModelFacts,
    *,
    overlaps: bool,
    possible: Possible | None = None,
    draft: DraftFacts | None = None,
    run: Callable[[StepPlan], StepResult] | None = None,
    heads: HeadFacts | None = None,
    draw: Callable[[HeadPlan], HeadResult] | None = None,
) -> Drafter | None:
    """As the settings say; None without `speculative_config`. `possible`: see `Drafter`; `draft`:
    the draft model that was loaded, whose steps `run` runs; `heads`: those that were, and `draw`
    has them draw.

    Raises `ConfigError` where drafts can't be checked.
    """
    if not config.speculative_config:
        return None
    wanted = SpeculativeConfig.from_mapping(config.speculative_config)
    obstacle = ""
    if facts.pooling is not None:
        obstacle = "the model generates no text"
    elif facts.stateful:
        obstacle = f"the state of {facts.architecture} can't be taken back to where a draft failed"
    elif overlaps:
        obstacle = "steps are planned before their tokens are known (async_scheduling, or a GPU)"
    if obstacle:
        raise ConfigError(
            f"speculative_config can't be used: {obstacle}.", param="speculative_config"
        )
    model: DraftMaker | None = None
    if heads is not None and draw is not None:
        model = HeadDrafts(heads, draw)
    elif draft is not None and run is not None:
        ends = facts.eos_token_ids
        model = DraftModel(draft, run, config.block_size, config.max_num_seqs, ends)
    return Drafter(wanted, facts.max_model_len, possible, model)
