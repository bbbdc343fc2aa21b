"""The chart's objects as they were last reviewed: `python -m tests.deploy.golden` writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.deploy.helm import CHART, helm

FOLDER = Path(__file__).parent / "golden"
_MODEL = {"name": "qwen", "source": "Qwen/Qwen3-0.6B", "args": ["--max-model-len=8192"]}
#: File -> the preset, and the values of an operator.
RELEASES: dict[str, tuple[str, dict[str, Any]]] = {
    "cpu.yaml": ("values-cpu.yaml", {"models": [_MODEL]}),
    "gpu-from-zero.yaml": (
        "values-gpu.yaml",
        {
            "models": [{**_MODEL, "autoscaling": {"enabled": True, "minReplicas": 0}}],
            "ingress": {"enabled": True, "tlsSecret": "certificate"},
            "serviceMonitor": {"enabled": True},
        },
    ),
    "gateway-api.yaml": (
        "values-cpu.yaml",
        {
            "models": [_MODEL],
            "gatewayAPI": {"enabled": True},
            "networkPolicy": {"gatewayFrom": [{"namespaceSelector": {}}]},
        },
    ),
}


def render(name: str) -> str:
    """The objects of a release. Raises `RuntimeError` with helm's words."""
    preset, values = RELEASES[name]
    arguments = ("template", "quire", str(CHART), "--values", str(CHART / preset))
    done = helm(*arguments, values=yaml.safe_dump(values))
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in RELEASES:
        (FOLDER / name).write_text(render(name))
