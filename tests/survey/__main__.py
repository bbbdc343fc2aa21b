"""`python -m tests.survey [recipe ...]`: run the recipes, print and write the table.

With names only those run and nothing is written. Exits with 1 when a recipe fails, or when one runs
that is listed as refused.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import transformers

from tests.survey.bridged import BRIDGED, CROSS_CHECKED, REFUSED, STATEFUL
from tests.survey.foreign import FOREIGN
from tests.survey.published import PUBLISHED
from tests.survey.recipes import RECIPES
from tests.survey.run import Recipe, Result, run_recipe
from tests.survey.table import CROSS_SUFFIX, page


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m tests.survey", description=__doc__)
    parser.add_argument("recipes", nargs="*", metavar="recipe", help="only these (default: all)")
    parser.add_argument("--output", type=Path, default=Path("docs/model-results.md"))
    arguments = parser.parse_args()
    recipes: dict[str, Recipe] = {
        **RECIPES,
        **FOREIGN,
        **PUBLISHED,
        **BRIDGED,
        **STATEFUL,
        **REFUSED,
    }
    recipes |= {f"{name}{CROSS_SUFFIX}": RECIPES[name] for name in CROSS_CHECKED}
    if unknown := [name for name in arguments.recipes if name not in recipes]:
        parser.error(f"unknown: {', '.join(unknown)}. Known: {', '.join(recipes)}")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    results: dict[str, Result] = {}
    for name in arguments.recipes or recipes:
        impl = "transformers" if name.endswith(CROSS_SUFFIX) else "auto"
        results[name] = run_recipe(recipes[name], impl)
        print(f"{name:24} {results[name].architecture:28} {results[name].text}", flush=True)
    if not arguments.recipes:
        arguments.output.write_text(page(results, transformers.__version__), encoding="utf-8")
    return 0 if all(r.passed == (name not in REFUSED) for name, r in results.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
