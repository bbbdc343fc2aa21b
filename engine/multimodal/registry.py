"""vLLM's registries, in which a custom model class registers how its images are prepared.

They only apply to offline use with `LLM`, whose process has the class. Images of a served model
are prepared by the processor of its folder, in processes without torch.
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
    """A prompt before it is added to the engine."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str | None]
    multi_modal_data: NotRequired[dict[str, Any] | None]


class MultiModalInputs(dict[str, Any]):
    """Input tensors of a model class's `encode` for an image, by name."""


class InputContext:
    """The model whose inputs are prepared. For `model_config` see `VllmConfig.model_config`."""

    def __init__(self, model_config: Any) -> None:
        self.model_config = model_config

    def get_hf_config(self, hf_config_type: type | None = None) -> Any:
        """Return config.json as a `transformers` config. Raises `TypeError` for another type."""
        config = self.model_config.hf_config
        if hf_config_type is not None and not isinstance(config, hf_config_type):
            raise TypeError(
                f"The configuration is a {type(config).__name__}, no {hf_config_type.__name__}."
            )
        return config

    def get_multimodal_config(self) -> dict[str, int]:
        """Return the maximum number of items of each kind in a prompt. Raises `ValueError` for a
        model without media.
        """
        if find_class_entry(_mappers, self.model_config.model_class) is None:
            raise ValueError(f"{self.model_config.model} takes no media.")
        return dict(self.model_config.limit_mm_per_prompt)


InputMapper = Callable[[InputContext, Any], MultiModalInputs]
InputProcessor = Callable[[InputContext, LLMInputs], LLMInputs]
#: Given a number of tokens, returns a prompt of this length: an object with `prompt_token_ids`, and
#: media.
DummyDataFactory = Callable[[InputContext, int], tuple[Any, dict[str, Any] | None]]
MaxTokens = int | Callable[[InputContext], int]

_processors: dict[type, InputProcessor] = {}
_factories: dict[type, DummyDataFactory] = {}
#: Input mappers by class and kind of media.
_mappers: dict[type, dict[str, InputMapper]] = {}
_max_tokens: dict[type, dict[str, MaxTokens]] = {}


def find_class_entry(entries: dict[type, Entry], model_class: type | None) -> Entry | None:
    """Return what is registered for a class or the closest of its base classes; None if nothing."""
    bases = model_class.__mro__ if model_class is not None else ()
    return next((entries[base] for base in bases if base in entries), None)


class InputRegistry:
    """Input processors and dummy data of model classes."""

    def register_dummy_data(self, factory: DummyDataFactory) -> Callable[[Model], Model]:
        """Return a class decorator that registers a factory of the model's largest prompt."""
        return lambda model: _registered(_factories, model, factory)

    def register_input_processor(self, processor: InputProcessor) -> Callable[[Model], Model]:
        """Return a class decorator that registers a function which expands image placeholders."""
        return lambda model: _registered(_processors, model, processor)

    def create_input_processor(self, model_config: Any) -> Callable[[LLMInputs], LLMInputs]:
        """Return `process_input` for a model."""
        return lambda inputs: self.process_input(model_config, inputs)

    def process_input(self, model_config: Any, inputs: LLMInputs) -> LLMInputs:
        """Apply the model's processor, if it has one."""
        processor = find_class_entry(_processors, model_config.model_class)
        return inputs if processor is None else processor(InputContext(model_config), inputs)

    def dummy_data_for_profiling(
        self, model_config: Any, seq_len: int
    ) -> tuple[Any, dict[str, Any] | None]:
        """Return the model's largest prompt. Raises `InvalidRequest` without a factory."""
        factory = find_class_entry(_factories, model_config.model_class)
        if factory is None:
            raise InvalidRequest(f"{model_config.model} has no dummy data.", param="model")
        return factory(InputContext(model_config), seq_len)


class MultiModalPlugin(ABC):
    """The registry of a kind of media."""

    @abstractmethod
    def get_data_key(self) -> str:
        """Return its key in `multi_modal_data`."""

    def register_input_mapper(self, mapper: InputMapper | None = None) -> Callable[[Model], Model]:
        """Return a class decorator that registers a function from an item to tensors, by default
        the image processor of the model's folder.
        """

        def decorate(model: Model) -> Model:
            _mappers.setdefault(model, {})[self.get_data_key()] = mapper or _map_by_folder
            return model

        return decorate

    def register_max_multimodal_tokens(self, max_mm_tokens: MaxTokens) -> Callable[[Model], Model]:
        """Return a class decorator that registers the maximum number of tokens for an item."""

        def decorate(model: Model) -> Model:
            _max_tokens.setdefault(model, {})[self.get_data_key()] = max_mm_tokens
            return model

        return decorate

    def get_max_multimodal_tokens(self, model_config: Any) -> int:
        """Return the maximum number of tokens for an item; 0 if none is registered."""
        entries = find_class_entry(_max_tokens, model_config.model_class) or {}
        tokens = entries.get(self.get_data_key(), 0)
        return tokens if isinstance(tokens, int) else tokens(InputContext(model_config))

    def map_input(self, model_config: Any, data: Any) -> MultiModalInputs:
        """Return the tensors of an item. Raises `TypeError` for a kind without a mapper."""
        entries = find_class_entry(_mappers, model_config.model_class) or {}
        mapper = entries.get(self.get_data_key())
        if mapper is None:
            raise TypeError(f"{model_config.model} takes no {self.get_data_key()}.")
        return mapper(InputContext(model_config), data)


class ImagePlugin(MultiModalPlugin):
    """The registry of images."""

    def get_data_key(self) -> str:
        return "image"


class MultiModalRegistry:
    """Input mappers and token limits of model classes, by kind of media."""

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
        """Register for images; see `MultiModalPlugin`."""
        return self.register_input_mapper("image", mapper)

    def register_max_multimodal_tokens(
        self, data_type_key: str, max_mm_tokens: MaxTokens
    ) -> Callable[[Model], Model]:
        """See `MultiModalPlugin`."""
        return self._plugin(data_type_key).register_max_multimodal_tokens(max_mm_tokens)

    def register_max_image_tokens(self, max_mm_tokens: MaxTokens) -> Callable[[Model], Model]:
        """Register for images; see `MultiModalPlugin`."""
        return self.register_max_multimodal_tokens("image", max_mm_tokens)

    def create_input_mapper(
        self, model_config: Any
    ) -> Callable[[dict[str, Any]], MultiModalInputs]:
        """Return `map_input` for a model."""
        return lambda data: self.map_input(model_config, data)

    def map_input(self, model_config: Any, data: dict[str, Any]) -> MultiModalInputs:
        """Return the tensors of `multi_modal_data`."""
        inputs = MultiModalInputs()
        for key, value in data.items():
            inputs.update(self._plugin(key).map_input(model_config, value))
        return inputs

    def get_max_multimodal_tokens(self, model_config: Any) -> int:
        """Return the sum of the maximum number of tokens for an item over all kinds."""
        plugins = self._plugins.values()
        return sum(plugin.get_max_multimodal_tokens(model_config) for plugin in plugins)


INPUT_REGISTRY = InputRegistry()
MULTIMODAL_REGISTRY = MultiModalRegistry()


class RegisteredProcessor:
    """Prepares images for a model class with a registered input mapper."""

    def __init__(self, model_config: Any) -> None:
        """Raise `InvalidRequest` if the class's largest prompt exceeds the context."""
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
        """Return the prompt with its images' tokens, and the prepared images.

        Raises `InvalidRequest` unless the images have equal numbers of tokens within the limit.
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
    """Return the processor of a model whose class has a registered input mapper, else None.

    `model_config` creates the config, which is slow. It is only called if any class has a mapper.
    """
    if not _mappers or find_class_entry(_mappers, model_config().model_class) is None:
        return None
    return RegisteredProcessor(model_config())


def _registered(entries: dict[type, Entry], model: Model, entry: Entry) -> Model:
    entries[model] = entry
    return model


def _map_by_folder(context: InputContext, image: Any) -> MultiModalInputs:
    """Map an image with the image processor of the model's folder."""
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(
        context.model_config.folder, trust_remote_code=False, local_files_only=True, backend="pil"
    )
    return MultiModalInputs(processor(to_rgb(image), return_tensors="np"))


def _array(value: Any) -> np.ndarray:
    """Return an array of a torch tensor or an array. This module can't import torch."""
    return np.asarray(value.detach().cpu().numpy() if hasattr(value, "detach") else value)
