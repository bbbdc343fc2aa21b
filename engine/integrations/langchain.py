"""`VLLM` as `langchain_community.llms` has it, on this engine. Needs `langchain-core`.

from engine.integrations.langchain import VLLM

llm = VLLM(model="mosaicml/mpt-7b", max_new_tokens=128, top_k=10, top_p=0.95, temperature=0.8)
print(llm.invoke("What is the capital of France ?"))
"""

from __future__ import annotations

from typing import Any

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import Generation, LLMResult

from engine import LLM, RequestOutput, SamplingParams


class VLLM(BaseLLM):
    """A LangChain model that generates in this process.

    Attributes:
        model, tensor_parallel_size, trust_remote_code, dtype, download_dir: as of `LLM`;
            `vllm_kwargs`: further arguments of it.
        n, best_of, presence_penalty, frequency_penalty, temperature, top_p, top_k, stop,
            ignore_eos, logprobs: as of `SamplingParams`. max_new_tokens: its `max_tokens`.
        use_beam_search: search with `best_of` (else `n`) beams instead of sampling.
        client: the engine; None: made of the fields above.
    """

    model: str = ""
    tensor_parallel_size: int | None = 1
    trust_remote_code: bool | None = False
    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    use_beam_search: bool = False
    stop: list[str] | None = None
    ignore_eos: bool = False
    max_new_tokens: int = 512
    logprobs: int | None = None
    dtype: str = "auto"
    download_dir: str | None = None
    vllm_kwargs: dict[str, Any] = {}
    client: Any = None

    def model_post_init(self, context: Any) -> None:
        """Load the model. Raises `ConfigError` and `ModelLoadError` as `LLM` does."""
        super().model_post_init(context)
        if self.client is None:
            self.client = LLM(
                model=self.model,
                tensor_parallel_size=self.tensor_parallel_size or 1,
                trust_remote_code=bool(self.trust_remote_code),
                dtype=self.dtype,
                download_dir=self.download_dir,
                **self.vllm_kwargs,
            )

    def __call__(self, prompt: str, stop: list[str] | None = None, **options: Any) -> str:
        """The text after a prompt, as `invoke` gives it."""
        return str(self.invoke(prompt, stop=stop, **options))

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        """All prompts in one batch; `kwargs`: fields of `SamplingParams`, and `lora_request`."""
        lora_request = kwargs.pop("lora_request", None)
        fields: dict[str, Any] = {
            "n": self.n,
            "best_of": self.best_of,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "use_beam_search": self.use_beam_search,
            "stop": self.stop if stop is None else stop,
            "ignore_eos": self.ignore_eos,
            "max_tokens": self.max_new_tokens,
            "logprobs": self.logprobs,
            **kwargs,
        }
        params = SamplingParams(
            **{name: value for name, value in fields.items() if value is not None}
        )
        outputs: list[RequestOutput] = self.client.generate(
            prompts, params, lora_request=lora_request, use_tqdm=False
        )
        for output in outputs:
            if output.error is not None:
                raise output.error
        return LLMResult(
            generations=[
                [Generation(text=completion.text) for completion in output.outputs]
                for output in outputs
            ]
        )

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """The parameters that determine an answer, except for `stop`: LangChain's caches use
        them as key.
        """
        names = VLLM.__annotations__.keys() - {"client"}
        settings = {name: getattr(self, name) for name in sorted(names)}
        # A client that was passed in has a model that no field names.
        return {"settings": settings, "engine": repr(self.client.model_config)}

    @property
    def _llm_type(self) -> str:
        return "vllm"
