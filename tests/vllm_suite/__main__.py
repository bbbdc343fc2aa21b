"""`python -m tests.vllm_suite SOURCE [FILE...]`. Exit status 1: a difference without a reason."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.e2e.product import ROOT, Product, clean_environment, running
from tests.vllm_suite.models import Models
from tests.vllm_suite.results import (
    RESULTS,
    Reasons,
    Result,
    StoredResults,
    page,
    read_report,
    report,
)
from tests.vllm_suite.tree import build, list_tests

FILE_TIMEOUT_S = 900
#: A test of vLLM's that fails may leave a task behind that never ends.
TEST_TIMEOUT_S = 120
SCOPES = "inference,models:read,operator"


def main() -> int:
    """Run the tests that talk to a server, one file after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="unpacked source package of vLLM")
    parser.add_argument("files", nargs="*", help="parts of the files' paths (default: all)")
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FILE",
        default=RESULTS,
        help="JSON to keep results in, file by file (default: results.json beside the suite)",
    )
    parser.add_argument("--page", type=Path, metavar="FILE", help="document to make of these")
    parser.add_argument("--rest", action="store_true", help="run only files without results")
    parser.add_argument(
        "--minutes", type=float, default=1e9, help="begin no file after so many (then --rest)"
    )
    options = parser.parse_args()
    reasons, stored_results = Reasons(), StoredResults(options.results)
    files, other_files = list_tests(options.source.resolve())
    remaining_out = [file for file in files if reasons.of(file) is not None]
    files = [file for file in files if file not in remaining_out]
    stored_results.set_files(files, remaining_out)
    if options.files:
        files = [file for file in files if any(part in file for part in options.files)]
    if options.rest:
        files = [file for file in files if file not in stored_results.by_file]
    if files:
        run_all(options.source.resolve(), files, reasons, stored_results, options.minutes)
    text, unknown = report(stored_results, reasons)
    print(f"\n{text}")
    print(f"\nNot run: {len(other_files)} files that call vLLM's own modules and no server.")
    for file in remaining_out:
        print(f"  {file}: {reasons.of(file)}")
    if options.page is not None:
        options.page.write_text(page(stored_results, reasons), encoding="utf-8")
    return 1 if unknown else 0


def run_all(
    source: Path,
    files: list[str],
    reasons: Reasons,
    stored: StoredResults,
    minutes: float = math.inf,
) -> None:
    """Run these files against one product, each with its own model; begin none after `minutes`."""
    with tempfile.TemporaryDirectory(prefix="quire-vllm-") as name:
        folder = Path(name)
        build(source, folder / "tree")
        (folder / "product").mkdir()
        settings = {
            "QUIRE_ADAPTER_DIRS": adapter_folders(folder),
            "QUIRE_INTERNAL": json.dumps({"per_request_metrics": True}),
        }
        with running(folder / "product", **settings) as product:
            environment = suite_environment(product, source)
            models = Models(folder / "models")
            # Each file brings its own model, and some of them send no name.
            product.manage("unload_model", product.model, "--wait")
            end = time.monotonic() + 60 * minutes
            for file in files:
                if time.monotonic() > end:
                    break
                file_results = run_file(
                    file, folder, environment | models.of(file), reasons.endless(file)
                )
                stored.add(file, file_results)
                bad = sum(result.outcome == "differs" for result in file_results)
                print(f"{file}: {len(file_results)} tests, {bad} otherwise", flush=True)
                for result in file_results:
                    if result.outcome == "differs" and reasons.of(result.name) is None:
                        print(f"  {result.name}\n      {result.message}", flush=True)


def adapter_folders(folder: Path) -> str:
    """Where adapters may come from: the demo's, and what tests write."""
    return f"{ROOT / 'demo' / 'adapters'},{folder}"


def suite_environment(product: Product, source: Path) -> dict[str, str]:
    """How the tests find the product."""
    process = product.manage(
        "create_key", "--tenant", tenant_of(product), "--name", "suite", "--scopes", SCOPES
    )
    key = re.search(r"sk-quire-\w+", process)
    if key is None:
        raise RuntimeError(f"No key in: {process}")
    # A source package's folder, or its PKG-INFO, tells which vLLM it is.
    info = (source / "PKG-INFO").read_text(encoding="utf-8")
    version = re.search(r"^Version: (.+)$", info, re.MULTILINE)
    return clean_environment() | {
        "QUIRE_SUITE_URL": product.url,
        "QUIRE_SUITE_KEY": key[0],
        "QUIRE_SUITE_ROOT": str(ROOT),
        "QUIRE_SUITE_SOURCE": str(source),
        "QUIRE_SUITE_VERSION": version[1] if version else "",
        "QUIRE_DATA_DIR": str(product.data_dir),
        "PYTHONPATH": "",
    }


def tenant_of(product: Product) -> str:
    """The short name of the tenant that `up` makes."""
    listed = product.manage("list_tenants")
    return listed.splitlines()[-1].split()[0]


def run_file(
    file: str, folder: Path, environment: dict[str, str], endless: list[str]
) -> list[Result]:
    """One test file in a process of its own, but for what never ends; what it came to."""
    output = folder / "report.xml"
    output.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", file, "-q", "-p", "no:cacheprovider"]
    command += ["-p", "no:randomly", f"--junitxml={output}", "--rootdir", "."]
    command += [f"--basetemp={folder / 'tmp'}", f"--timeout={TEST_TIMEOUT_S}"]
    command += [f"--deselect={name}" for name in endless]
    environment = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
    try:
        done = subprocess.run(
            command,
            cwd=folder / "tree",
            env=environment,
            capture_output=True,
            text=True,
            timeout=FILE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [Result(f"{file}::", "differs", f"It took over {FILE_TIMEOUT_S} s.")]
    if os.environ.get("QUIRE_SUITE_VERBOSE"):
        print(done.stdout[-20000:])
    if not output.exists():
        return [Result(f"{file}::", "differs", done.stdout[-300:] + done.stderr[-300:])]
    report = read_report(output, file)
    return report + [Result(name, "differs", "It never ends.") for name in endless]


if __name__ == "__main__":
    sys.exit(main())
