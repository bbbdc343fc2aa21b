"""Where this installation lies, and how its command is called."""

from __future__ import annotations

import sys
from pathlib import Path

#: The folder of the apps: `platform/` of a checkout, `quire/_platform/` of an installed package.
APPS_DIR = Path(__file__).resolve().parent.parent
BASE_DIR = APPS_DIR.parent
IS_INSTALLED = APPS_DIR.name == "_platform"
#: The command's name, for help texts and hints; an installed package has no `manage.py`.
PROGRAM = "quire" if IS_INSTALLED or Path(sys.argv[0]).name == "quire" else "manage.py"
DEFAULT_DATA_DIR = (Path.home() if IS_INSTALLED else BASE_DIR) / ".quire"
