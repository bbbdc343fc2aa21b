"""Models on the hub: search, downloads, and their sizes beforehand."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from catalog.checkpoint import BITS, Checkpoint, checkpoint_from_headers, shard_names
from catalog.sizing import fits_memory
from common.errors import HubUnavailable
from engine.contract.engine_config import EngineConfig
from engine.contract.errors import InvalidRequest, ModelLoadError
from engine.contract.hub_files import file_patterns
from engine.contract.modelscope import VARIABLE, uses_modelscope
from engine.text.tokenizer_files import parse_object, read_text

if TYPE_CHECKING:
    from huggingface_hub import HfApi, ModelInfo

#: Timeout of hub requests in seconds: a user waits for the page.
WAIT_S = 10
#: Number of weight headers read concurrently, and in total.
THREADS, MAX_SHARDS = 8, 256
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Download:
    """Files that loading a hub model downloads.

    Attributes:
        files, nbytes: all that a load needs. cached_bytes: those in this host's cache already.
        free_bytes: free space on the cache's disk.
        checkpoint: from config.json and the headers of the weights; None if they are insufficient.
    """

    repository: str
    commit: str
    files: int
    nbytes: int
    cached_bytes: int
    free_bytes: int
    checkpoint: Checkpoint | None

    @property
    def remaining_bytes(self) -> int:
        """Bytes still to download."""
        return self.nbytes - self.cached_bytes

    @property
    def fits(self) -> bool:
        """Whether the disk has enough free space now."""
        return self.remaining_bytes <= self.free_bytes


def get_download_info(repository: str, settings: Mapping[str, Any]) -> Download:
    """What loading a hub model with these engine settings would download.

    Uses the server's own token, so it is for operators alone. Takes a few requests to the hub.

    Raises: `HubUnavailable`; `InvalidRequest` (`source`) for an invalid hub id.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.utils import filter_repo_objects

    _refuse_modelscope()
    config, api = EngineConfig.from_mapping(dict(settings)), HfApi()
    with hub_errors(repository):
        info = api.model_info(
            repository, revision=config.revision, files_metadata=True, timeout=WAIT_S
        )
        commit, sizes = info.sha or "", {s.rfilename: s.size or 0 for s in info.siblings or []}
        files = list(filter_repo_objects(sizes, allow_patterns=file_patterns(config, sizes)))
        cached = [
            name
            for name in files
            if isinstance(
                try_to_load_from_cache(
                    repository, name, cache_dir=config.download_dir, revision=commit
                ),
                str,
            )
        ]
        checkpoint = _checkpoint(api, repository, commit, sizes)
    return Download(
        repository=repository,
        commit=commit,
        files=len(files),
        nbytes=sum(sizes[name] for name in files),
        cached_bytes=sum(sizes[name] for name in cached),
        free_bytes=_free_download_bytes(config),
        checkpoint=checkpoint,
    )


#: Maximum number of search results.
MAX_RESULTS = 20
MAX_QUERY_CHARS = 200
#: Fields requested for each result.
_EXPAND = (
    "cardData",
    "config",
    "downloads",
    "gated",
    "pipeline_tag",
    "safetensors",
)


@dataclass(frozen=True)
class HubModel:
    """A search result.

    Attributes:
        nbytes: of its safetensors; None if it has none, such as a repository of GGUF files.
        license, architecture, task: "" if its card doesn't state it.
        gated: whether an account must accept the licence, see `HF_TOKEN`.
    """

    source: str
    nbytes: int | None
    license: str
    downloads: int
    architecture: str
    task: str
    gated: bool

    @property
    def name(self) -> str:
        return self.source.rpartition("/")[2].lower()

    @property
    def fits(self) -> bool | None:
        """Whether this machine has the memory to load it now; None if its size is unknown."""
        return None if self.nbytes is None else fits_memory(self.nbytes)


def search_hub(query: str) -> list[HubModel]:
    """The hub's most downloaded models whose names contain the query's words.

    Raises: `InvalidRequest` (`q`), `HubUnavailable`.
    """
    from huggingface_hub import ModelInfo, constants
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    _refuse_modelscope()
    if not 0 < len(query) <= MAX_QUERY_CHARS or not query.isprintable():
        raise InvalidRequest(f"q must have 1 to {MAX_QUERY_CHARS} characters.", param="q")
    with hub_errors(query, param="q"):
        # Not `HfApi.list_models`, which retries six times in 30 s if the hub doesn't answer.
        response = get_session().get(
            f"{constants.ENDPOINT}/api/models",
            params={"search": query, "sort": "downloads", "limit": MAX_RESULTS, "expand": _EXPAND},
            headers=build_hf_headers(),
            timeout=WAIT_S,
        )
        hf_raise_for_status(response)
    try:
        return [_hub_model(ModelInfo(**row)) for row in response.json()]
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise HubUnavailable(
            "The hub's answer is no list of models. Is HF_ENDPOINT a hub?"
        ) from error


def _hub_model(info: ModelInfo) -> HubModel:
    parameters = info.safetensors.parameters if info.safetensors else {}
    card = info.card_data.to_dict() if info.card_data else {}
    architectures = (info.config or {}).get("architectures") or [""]
    num_bits = sum(BITS.get(dtype, 8) * count for dtype, count in parameters.items())
    return HubModel(
        source=info.id,
        nbytes=num_bits // 8 or None,
        license=_license_name(card),
        downloads=info.downloads or 0,
        architecture=str(architectures[0]),
        task=info.pipeline_tag or "",
        gated=bool(info.gated),
    )


def _license_name(card: Mapping[str, Any]) -> str:
    """A model card's licence; its own name is preferred to the hub's word "other"."""
    name = card.get("license_name") or card.get("license") or ""
    return ", ".join(map(str, name)) if isinstance(name, list) else str(name)


def download_model(repository: str, settings: Mapping[str, Any]) -> Path:
    """Download a model's files, with progress bars on a terminal; returns its folder.

    Raises: `HubUnavailable`; `InvalidRequest` (`source`).
    """
    from huggingface_hub import snapshot_download

    config = EngineConfig.from_mapping(dict(settings))
    with hub_errors(repository):
        folder = snapshot_download(
            repository,
            revision=config.revision,
            cache_dir=config.download_dir,
            allow_patterns=file_patterns(config),
        )
    return Path(folder)


def downloaded(repository: str, settings: Mapping[str, Any]) -> Path | None:
    """The folder of a model in this host's cache, without asking the hub."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if uses_modelscope():
        return None  # a model of that name in this cache would be from the other hub
    config = EngineConfig.from_mapping(dict(settings))
    try:
        path = try_to_load_from_cache(
            repository, "config.json", cache_dir=config.download_dir, revision=config.revision
        )
    except HFValidationError:
        return None
    return Path(path).parent if isinstance(path, str) else None


def _refuse_modelscope() -> None:
    """Raise `HubUnavailable` if ids are ModelScope's, which this hub doesn't know."""
    if uses_modelscope():
        raise HubUnavailable(
            f"{VARIABLE} is set: models come from ModelScope, which isn't searched or asked for "
            "sizes here. Load the model by its id."
        )


@contextmanager
def hub_errors(
    repository: str, error_type: type[InvalidRequest] = InvalidRequest, param: str = "source"
) -> Iterator[None]:
    """Convert the hub client's errors to `HubUnavailable`, or to `error_type` for invalid names."""
    from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled

    try:
        yield
    except OfflineModeIsEnabled as error:
        raise HubUnavailable("Access to the hub is disabled (HF_HUB_OFFLINE).") from error
    except HFValidationError as error:
        raise error_type(str(error), param=param) from error
    except _connection_errors() as error:
        reason = " ".join(str(error).split())[:300]
        raise HubUnavailable(
            f"The hub is unreachable or has no repository {repository}: {reason}"
        ) from error


def _connection_errors() -> tuple[type[Exception], ...]:
    """Errors of the hub client and of the HTTP libraries loaded, of which it uses one."""
    from huggingface_hub.errors import HfHubHTTPError

    clients = (sys.modules.get(name) for name in ("httpx", "httpx2"))
    return (HfHubHTTPError, OSError, *(module.HTTPError for module in clients if module))


def _checkpoint(
    api: HfApi, repository: str, commit: str, sizes: Mapping[str, int]
) -> Checkpoint | None:
    """Read `config.json` and the headers of the weights; no weights are downloaded."""
    from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

    if "config.json" not in sizes:
        return None
    try:
        config = _json(api, repository, commit, "config.json")
        names = ["model.safetensors"]
        if INDEX in sizes:
            names = shard_names(_json(api, repository, commit, INDEX))
        if not names or len(names) > MAX_SHARDS or any(name not in sizes for name in names):
            return None

        def tensors_of(name: str) -> dict[str, Any]:
            metadata = api.parse_safetensors_file_metadata(
                repository, name, revision=commit, timeout=WAIT_S
            )
            return {key: vars(tensor) for key, tensor in metadata.tensors.items()}

        with ThreadPoolExecutor(THREADS) as threads:
            tensors = [item for of in threads.map(tensors_of, names) for item in of.items()]
        return checkpoint_from_headers(config, tensors, len(names))
    except (ModelLoadError, NotASafetensorsRepoError, SafetensorsParsingError):
        return None
    except (TypeError, ValueError, KeyError):
        return None  # invalid headers


def _json(api: HfApi, repository: str, commit: str, name: str) -> dict[str, Any]:
    """A small file, not cached."""
    with tempfile.TemporaryDirectory(prefix="quire-hub-") as folder:
        path = Path(api.hf_hub_download(repository, name, revision=commit, local_dir=folder))
        return parse_object(read_text(path), path)


def _free_download_bytes(config: EngineConfig) -> int:
    """Free bytes on the disk of the download cache."""
    from huggingface_hub import constants

    path = Path(config.download_dir or constants.HF_HUB_CACHE).expanduser().absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free
