"""A small disk of the instance's own, which can be filled."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path

SIZE_MB = 512
_BALLAST = "ballast"


class Disk:
    """The folder where the instance keeps its data.

    Args:
        folder: made here. With the right to mount it's a file system of its own; else it's part of
            the machine's, which is never filled.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700)
        self.why_not = _mount(folder)

    @property
    def can_be_filled(self) -> bool:
        """Whether it's small and our own."""
        return not self.why_not

    def fill(self) -> None:
        """Leave no byte."""
        block = bytes(1 << 20)
        with (self.folder / _BALLAST).open("ab", buffering=0) as file:
            while block:
                try:
                    file.write(block)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    block = block[: len(block) // 2]

    def empty(self) -> None:
        """Give the room back."""
        (self.folder / _BALLAST).unlink(missing_ok=True)

    def close(self) -> None:
        """Unmount; what was on it is gone."""
        if self.can_be_filled:
            umount = shutil.which("umount") or "umount"
            # Ctrl-C in a terminal reaches this process alone.
            subprocess.run([umount, "--lazy", self.folder], check=True, start_new_session=True)


def _mount(folder: Path) -> str:
    """Mount a small file system there; why that isn't possible, or ""."""
    if os.geteuid() != 0:
        return "mounting a small disk takes root"
    options = f"size={SIZE_MB}m,mode=0700"
    done = subprocess.run(
        [shutil.which("mount") or "mount", "-t", "tmpfs", "-o", options, "tmpfs", folder],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stderr.strip()
