"""vLLM's registries, by which a model class of one's own says how its pictures are prepared.

They act in programs with `LLM`, whose process has the class; a served model's pictures are
prepared by the processor of its folder, in processes without torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NotRequired, TypedDict, TypeVar

import numpy as np

from engine.contract.errors import InvalidRequest
from engine.multimodal.inputs import MediaTensors, encode_tensors, media_digest
from engine.multimodal.processor import PreparedMedia, as_tensor, to_rgb

Model = TypeVar("Model", bound=type)
Entry = TypeVar("Entry")


class LLMInputs(TypedDict):
    """A prompt before the engine takes it."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str | None]
    multi_modal_data: NotRequired[dict[str, Any] | None]


class MultiModalInputs(dict[str, Any]):
    """Tensors that `encode` of a model class takes for one picture, by name."""


class InputContext:
    """The model whose inputs are prepared. `model_config`: see `VllmConfig.model_config`."""

    def __init__(self, model_config: Any) -> None:
        self.model_config = model_config

    def get_hf_config(self, hf_config_type: type | None = None) -> Any:
        """config.json as an object of `transformers`. Raises `TypeError` for another type."""
        config = self.model_config.hf_config
        if hf_config_type is not None and not isinstance(config, hf_config_type):
            raise TypeError(
                f"The configuration is a {type(config).__name__}, no {hf_config_type.__name__}."
            )
        return config

    def get_multimodal_config(self) -> dict[str, int]:
        """How many media of each kind a prompt may have. Raises `ValueError` if it has none."""
        if find_class_entry(_mappers, self.model_config.model_class) is None:
            raise ValueError(f"{self.model_config.model} takes no media.")
        return dict(self.model_config.limit_mm_per_prompt)


InputMapper = Callable[[InputContext, Any], MultiModalInputs]
InputProcessor = Callable[[InputContext, LLMInputs], LLMInputs]
#: Makes token ids (an object with `prompt_token_ids`) and media for a prompt of so many tokens.
DummyDataFactory = Callable[[InputContext, int], tuple[Any, dict[str, Any] | None]]
MaxTokens = int | Callable[[InputContext], int]

_processors: dict[type, InputProcessor] = {}
_factories: dict[type, DummyDataFactory] = {}
#: By kind of media.
_mappers: dict[type, dict[str, InputMapper]] = {}
_max_tokens: dict[type, dict[str, MaxTokens]] = {}


def find_class_entry(entries: dict[type, Entry], model_class: type | None) -> Entry | None:
    """What is registered for a class, or for a class that it inherits from."""
    bases = model_class.__mro__ if model_class is not None else ()
    return next((entries[base] for base in bases if base in entries), None)


class InputRegistry:
    """Prompts of a model class: what becomes of their tokens, and the largest one."""

    def register_dummy_data(self, factory: DummyDataFactory) -> Callable[[Model], Model]:
        """Decorate a model class with what makes its largest prompt; see `DummyDataFactory`."""
        return lambda model: _registered(_factories, model, factory)

    def register_input_processor(self, processor: InputProcessor) -> Callable[[Model], Model]:
        """Decorate a model class with what inserts the tokens that stand for pictures."""
        return lambda model: _registered(_processors, model, processor)

    def create_input_processor(self, model_config: Any) -> Callable[[LLMInputs], LLMInputs]:
        """`process_input` for a model."""
        return lambda inputs: self.process_input(model_config, inputs)

    def process_input(self, model_config: Any, inputs: LLMInputs) -> LLMInputs:
        """Apply the model's processor, if it has one."""
        processor = find_class_entry(_processors, model_config.model_class)
        return inputs if processor is None else processor(InputContext(model_config), inputs)

    def dummy_data_for_profiling(
        self, model_config: Any, seq_len: int
    ) -> tuple[Any, dict[str, Any] | None]:
        """The model's largest prompt. Raises `InvalidRequest` for a model without a factory."""
        factory = find_class_entry(_factories, model_config.model_class)
        if factory is None:
            raise InvalidRequest(f"{model_config.model} has no dummy data.", param="model")
        return factory(InputContext(model_config), seq_len)


class MultiModalPlugin(ABC):
    """Media of one kind."""

    @abstractmethod
    def get_data_key(self) -> str:
        """Its key in `multi_modal_data`."""

    def register_input_mapper(self, mapper: InputMapper | None = None) -> Callable[[Model], Model]:
        """Decorate a model class with what makes tensors of a medium. None: the image processor of
        the model's folder.
        """

        def decorate(model: Model) -> Model:
            _mappers.setdefault(model, {})[self.get_data_key()] = mapper or _map_by_folder
            return model

        return decorate

    def register_max_multimodal_tokens(self, max_mm_tokens: MaxTokens) -> Callable[[Model], Model]:
        """Decorate a model class with the most tokens that stand for one medium."""

        def decorate(model: Model) -> Model:
            _max_tokens.setdefault(model, {})[self.get_data_key()] = max_mm_tokens
            return model

        return decorate

    def get_max_multimodal_tokens(self, model_config: Any) -> int:
        """Most tokens of one medium; 0: the model says none."""
        entries = find_class_entry(_max_tokens, model_config.model_class) or {}
        tokens = entries.get(self.get_data_key(), 0)
        return tokens if isinstance(tokens, int) else tokens(InputContext(model_config))

    def map_input(self, model_config: Any, data: Any) -> MultiModalInputs:
        """Tensors of one medium. Raises `TypeError` for a kind that the model doesn't take."""
        entries = find_class_entry(_mappers, model_config.model_class) or {}
        mapper = entries.get(self.get_data_key())
        if mapper is None:
            raise TypeError(f"{model_config.model} takes no {self.get_data_key()}.")
        return mapper(InputContext(model_config), data)


class ImagePlugin(MultiModalPlugin):
    """Pictures."""

    def get_data_key(self) -> str:
        return "image"


class MultiModalRegistry:
    """Media of model classes: their tensors, and how many tokens stand for one."""

    def __init__(self, plugins: tuple[MultiModalPlugin, ...] = (ImagePlugin(),)) -> None:
        self._plugins = {plugin.get_data_key(): plugin for plugin in plugins}

    def _plugin(self, data_type_key: str) -> MultiModalPlugin:
        if data_type_key not in self._plugins:
            raise NotImplementedError(f"There is no plug-in for media of kind {data_type_key!r}.")
        return self._plugins[data_type_key]

    def register_input_mapper(
        self, data_type_key: str, mapper: InputMapper | None = None
    ) -> Callable[[Model], Model]:
        """See `MultiModalPlugin`."""
        return self._plugin(data_type_key).register_input_mapper(mapper)

    def register_image_input_mapper(
        self, mapper: InputMapper | None = None
    ) -> Callable[[Model], Model]:
        """The same for pictures."""
        return self.register_input_mapper("image", mapper)

    def register_max_multimodal_tokens(
        self, data_type_key: str, max_mm_tokens: MaxTokens
    ) -> Callable[[Model], Model]:
        """See `MultiModalPlugin`."""
        return self._plugin(data_type_key).register_max_multimodal_tokens(max_mm_tokens)

    def register_max_image_tokens(self, max_mm_tokens: MaxTokens) -> Callable[[Model], Model]:
        """The same for pictures."""
        return self.register_max_multimodal_tokens("image", max_mm_tokens)

    def create_input_mapper(
        self, model_config: Any
    ) -> Callable[[dict[str, Any]], MultiModalInputs]:
        """`map_input` for a model."""
        return lambda data: self.map_input(model_config, data)

    def map_input(self, model_config: Any, data: dict[str, Any]) -> MultiModalInputs:
        """Tensors of `multi_modal_data`."""
        inputs = MultiModalInputs()
        for key, value in data.items():
            inputs.update(self._plugin(key).map_input(model_config, value))
        return inputs

    def get_max_multimodal_tokens(self, model_config: Any) -> int:
        """Most tokens that stand for one medium of each kind, in all."""
        plugins = self._plugins.values()
        return sum(plugin.get_max_multimodal_tokens(model_config) for plugin in plugins)


INPUT_REGISTRY = InputRegistry()
MULTIMODAL_REGISTRY = MultiModalRegistry()


class RegisteredProcessor:
    """Prepares pictures of a model class that has registered an input mapper."""

    def __init__(self, model_config: Any) -> None:
        """Raises `InvalidRequest` where the class's largest prompt doesn't fit the context."""
        self._model_config = model_config
        hf_config = model_config.hf_config
        token_id = getattr(hf_config, "image_token_index", None)
        self._token_id = int(
            getattr(hf_config, "image_token_id", -1) if token_id is None else token_id
        )
        if find_class_entry(_factories, model_config.model_class) is not None:
            length = model_config.max_model_len
            sequence, _ = INPUT_REGISTRY.dummy_data_for_profiling(model_config, length)
            if len(sequence.prompt_token_ids) > length:
                raise InvalidRequest(
                    f"The dummy data of {model_config.model} have "
                    f"{len(sequence.prompt_token_ids)} tokens, over max_model_len={length}.",
                    param="max_model_len",
                )

    def process(
        self, text: str | None, token_ids: list[int], images: list[Any]
    ) -> tuple[list[int], tuple[PreparedMedia, ...]]:
        """The prompt with the tokens that stand for its pictures, and these.

        Raises `InvalidRequest` where the tokens can't be divided among them, or are too many.
        """
        inputs = LLMInputs(prompt_token_ids=token_ids, prompt=text)
        inputs["multi_modal_data"] = {"image": images[0] if len(images) == 1 else images}
        token_ids = INPUT_REGISTRY.process_input(self._model_config, inputs)["prompt_token_ids"]
        count, remainder = divmod(token_ids.count(self._token_id), len(images))
        limit = MULTIMODAL_REGISTRY.get_max_multimodal_tokens(self._model_config)
        if not count or remainder or (limit and count > limit):
            raise InvalidRequest(
                f"The prompt has {token_ids.count(self._token_id)} tokens of images for "
                f"{len(images)}, of which each takes as many, and at most {limit or 'all'}.",
                param="prompt",
            )
        return token_ids, tuple(self._prepared(image, count) for image in images)

    def _prepared(self, image: Any, count: int) -> PreparedMedia:
        mapped = MULTIMODAL_REGISTRY.map_input(self._model_config, {"image": image})
        tensors: MediaTensors = {name: as_tensor(_array(v)) for name, v in mapped.items()}
        encoded = encode_tensors(tensors)
        return PreparedMedia(
            kind="image",
            digest=media_digest("image", encoded),
            replacement="",
            num_vectors=count,
            tensors=tensors,
            encoded=encoded,
            token_id=self._token_id,
        )


def find_registered_processor(model_config: Callable[[], Any]) -> RegisteredProcessor | None:
    """Of a model whose class says how its pictures are prepared; None: it doesn't.

    `model_config`: makes it, which is slow, where any class says so.
    """
    if not _mappers or find_class_entry(_mappers, model_config().model_class) is None:
        return None
    return RegisteredProcessor(model_config())


def _registered(entries: dict[type, Entry], model: Model, entry: Entry) -> Model:
    entries[model] = entry
    return model


def _map_by_folder(context: InputContext, image: Any) -> MultiModalInputs:
    """By the image processor of the model's folder."""
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(
        context.model_config.folder, trust_remote_code=False, local_files_only=True, backend="pil"
    )
    return MultiModalInputs(processor(to_rgb(image), return_tensors="np"))


def _array(value: Any) -> np.ndarray:
    """An array of a tensor, which this package doesn't know, or of an array."""
    return np.asarray(value.detach().cpu().numpy() if hasattr(value, "detach") else value)
