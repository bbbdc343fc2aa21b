"""BentoML, with the packages `bentoml` and `quire`:
`bentoml serve deploy/integrations/bentoml_service.py:Quire`.

BentoML forwards all requests to the command's port. Clients send a key of QUIRE_API_KEYS.
"""

from __future__ import annotations

import bentoml

MODEL = "Qwen/Qwen3-0.6B"


@bentoml.service(
    name="quire",
    resources={"gpu": 1},
    traffic={"timeout": 3600},
    http={"proxy_port": 8000},
    endpoints={"livez": "/ping", "readyz": "/health"},
    envs=[{"name": "QUIRE_API_KEYS"}, {"name": "QUIRE_ALLOWED_HOSTS", "value": "*"}],
)
class Quire:
    """One model, with the whole API."""

    def __command__(self) -> list[str]:
        """The server's command line."""
        return ["quire", "serve", MODEL, "--host", "127.0.0.1", "--port", "8000"]
