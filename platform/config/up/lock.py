"""One `manage.py up` for each data dir."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class InUse(RuntimeError):
    """Another process holds the data dir."""


@contextmanager
def exclusive(data_dir: Path) -> Iterator[None]:
    """Hold the data dir while the block runs. The kernel lets go of it however the process ends.

    Raises: `InUse` with the other's process id.
    """
    with (data_dir / "up.lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise InUse(
                f"Quire is running in {data_dir} already (process {file.read().strip() or '?'}). "
                "Another --data-dir keeps instances apart."
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
