"""Patient settings without the demo's adapters: their checks take the processor from replicas that
start again and again. Three may die over a request, for each that starts takes seconds of it.
"""

from pathlib import Path

from tests.e2e.patient_settings import *  # noqa: F403
from tests.e2e.patient_settings import QUIRE as _QUIRE

MAX_ATTEMPTS = 3
QUIRE = _QUIRE.replace(demo_adapters=Path(__file__).parent / "none", max_attempts=MAX_ATTEMPTS)
