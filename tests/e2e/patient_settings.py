"""The product's settings, but requests wait longer for replicas: on a busy machine these need more
than half a minute to start.
"""

from config.settings import *  # noqa: F403
from config.settings import QUIRE as _QUIRE

QUIRE = _QUIRE.replace(failover_wait_s=300.0)
