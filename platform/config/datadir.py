"""The data dir: what one instance keeps on disk, readable by its owner alone."""

import os
import secrets
import tempfile
from pathlib import Path

from django.core.exceptions import ImproperlyConfigured


def make_private(folder: Path) -> Path:
    """Create the folder with mode 0700 if it's missing.

    Raises: ImproperlyConfigured when it can't be made, or read and written by us.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ImproperlyConfigured(
            f"the data dir {folder} can't be made: {error.strerror}. "
            "Name another with --data-dir or QUIRE_DATA_DIR."
        ) from error
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise ImproperlyConfigured(
            f"the data dir {folder} can't be read and written by this user (uid {os.getuid()}). "
            "Change its owner, or name another with --data-dir or QUIRE_DATA_DIR."
        )
    return folder


def write_private(path: Path, text: str) -> None:
    """Write a file with mode 0600 so that a reader sees all of it or none."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def secret_key(data_dir: Path) -> str:
    """The instance's secret key, generated once. Processes that race get the same one."""
    path = make_private(data_dir) / "secret_key"
    if not path.exists():
        handle, temporary = tempfile.mkstemp(dir=data_dir, prefix=".secret_key.")
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(50))
        try:
            os.link(temporary, path)  # atomic, and fails where another process was first
        except FileExistsError:
            pass
        finally:
            os.unlink(temporary)
    return path.read_text(encoding="ascii").strip()
