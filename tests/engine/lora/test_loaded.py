"""`add_lora` and its siblings: adapters on the device by the program's own numbers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from engine import LLM, AsyncLLM, LoRARequest, SamplingParams
from engine.contract.errors import InvalidRequest
from engine.offline.engine_args import EngineArgs

from .adapters import DEMO_MODEL

PIRATE, BUTLER = (
    LoRARequest(name, number, str(Path("demo/adapters") / name))
    for number, name in ((7, "pirate"), (8, "butler"))
)
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def test_an_adapter_is_there_before_its_first_request_and_a_pinned_one_stays(
    tmp_path: Path,
) -> None:
    llm = LLM(DEMO_MODEL, max_loras=1, enable_prefix_caching=False)
    engine = llm.llm_engine

    def say(request: LoRARequest | None) -> str:
        return (
            llm.generate("Hello!", PARAMS, use_tqdm=False, lora_request=request)[0].outputs[0].text
        )

    assert engine.add_lora(PIRATE)
    assert not engine.add_lora(PIRATE)
    assert engine.list_loras() == {7}
    text = say(PIRATE)
    assert engine.core.snapshot().adapter_loads_total == 1
    assert engine.add_lora(BUTLER)  # there is room for one
    assert engine.list_loras() == {8}
    assert engine.pin_lora(7)
    assert engine.list_loras() == {7}
    with pytest.raises(InvalidRequest, match="no room for the adapter 'butler': others are pinned"):
        engine.add_lora(BUTLER)
    with pytest.raises(InvalidRequest, match="others are pinned"):
        say(BUTLER)
    assert say(PIRATE) == text
    with pytest.raises(InvalidRequest, match="No adapter was added as 9"):
        engine.pin_lora(9)
    assert engine.remove_lora(7)
    assert not engine.remove_lora(7)
    assert say(BUTLER) != text
    assert engine.list_loras() == {8}
    folder = shutil.copytree(BUTLER.lora_path, tmp_path / "bad")
    (folder / "adapter_model.safetensors").write_bytes(b"none")
    with pytest.raises(InvalidRequest):
        engine.add_lora(LoRARequest("bad", 3, str(folder)))
    assert say(BUTLER) != text


async def test_they_are_awaited_beside_what_runs() -> None:
    engine = AsyncLLM.from_engine_args(EngineArgs(DEMO_MODEL, enable_prefix_caching=False))
    try:
        running = engine.generate("Hello!", SamplingParams(temperature=0, max_tokens=40), "a")
        first = await anext(running)
        assert await engine.add_lora(PIRATE)
        assert await engine.pin_lora(7)
        assert await engine.list_loras() == {7}
        *_, last = [first] + [delta async for delta in running]
        assert last.finished
        assert len(last.outputs[0].token_ids) > 1
        assert await engine.remove_lora(7)
    finally:
        engine.shutdown()
