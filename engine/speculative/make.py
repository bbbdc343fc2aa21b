"""`make_drafter`: who gives drafts, as the settings say."""

from __future__ import annotations

from engine.contract.config import EngineConfig
from engine.contract.errors import ConfigError
from engine.contract.speculative import SpeculativeConfig
from engine.models.facts import ModelFacts
from engine.speculative.draft_maker import DraftMaker
from engine.speculative.draft_model import DraftModel
from engine.speculative.drafter import Drafter, Possible
from engine.speculative.head_drafts import HeadDrafts
from engine.speculative.host import DraftHost


def make_drafter(
    config: EngineConfig,
    facts: ModelFacts,
    *,
    overlaps: bool,
    possible: Possible | None = None,
    host: DraftHost,
) -> Drafter | None:
    """As the settings say; None without `speculative_config`. `possible`: see `Drafter`; `host`:
    what was loaded beside the model.

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
        obstacle = (
            "with async_scheduling steps are planned before the tokens are known from which drafts "
            "go on; leave it out, or turn it off"
        )
    if obstacle:
        raise ConfigError(
            f"speculative_config can't be used: {obstacle}.", param="speculative_config"
        )
    model: DraftMaker | None = None
    if host.heads is not None:
        model = HeadDrafts(host.heads, host.draw)
    elif host.model is not None:
        ends = facts.eos_token_ids
        model = DraftModel(host.model, host.execute, config.block_size, config.max_num_seqs, ends)
    return Drafter(wanted, facts.max_model_len, possible, model)
