"""Stands in for `python -m engine.lora.check`: answers as the adapter's configuration tells it to.

`says`: "refuse", "differ" (the probe doesn't pass), "crash", "hang", "crash in the probe", "hang in
the probe"; anything else passes.
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
    parser.add_argument("--probe", action="store_true")
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
        "probe": None,
    }
    print("a library prints what it likes")
    if says == "crash":
        sys.stderr.write("it broke\n")
        return 3
    if says == "hang":
        time.sleep(600)
    if says == "refuse":
        report |= {"ok": False, "error": {"message": "lora_A holds NaN.", "param": "weights"}}
    if options.probe and report["ok"]:
        print(json.dumps(report), flush=True)
        if says == "crash in the probe":
            return 3
        if says == "hang in the probe":
            time.sleep(600)
        well = says != "differ"
        report["probe"] = {"prompts": 4, "max_difference": 0.0 if well else 3.5, "passed": well}
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
