"""Stands in for `python -m engine.lora.check`: answers as the adapter's configuration tells it to.

`says`: "refuse", "crash", "hang"; anything else passes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from engine.contract.lora import CONFIG_FILE, adapter_digest, tokenizer_digest


def main() -> int:
    """Print one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--adapter", required=True)
    options = parser.parse_args()
    folder = Path(options.adapter)
    config = json.loads((folder / CONFIG_FILE).read_text())
    says = config.get("says", "")
    report = {
        "ok": True,
        "error": None,
        "digest": adapter_digest(folder),
        "rank": config.get("r", 8),
        "target_modules": config.get("target_modules", []),
        "num_parameters": 1,
        "num_bytes": 2,
        "vocab_size": config.get("vocab_size", 0),
        "tokenizer": tokenizer_digest(folder),
    }
    print("a library prints what it likes")
    if says == "crash":
        sys.stderr.write("it broke\n")
        return 3
    if says == "hang":
        time.sleep(600)
    if says == "refuse":
        report |= {"ok": False, "error": {"message": "lora_A holds NaN.", "param": "weights"}}
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
