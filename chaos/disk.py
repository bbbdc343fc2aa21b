"""A small disk for the instance, which can be filled."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path

SIZE_MB = 512
_BALLAST = "ballast"


class Disk:
    """The disk that holds the instance's data.

    Args:
        folder: folder that is created. With the permission to mount it is a separate file system;
            otherwise it is on the machine's disk, which is never filled.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700)
        self.why_not = _mount(folder)

    @property
    def can_be_filled(self) -> bool:
        """Whether it is a separate file system."""
        return not self.why_not

    def fill(self) -> None:
        """Use all free space."""
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
        """Free the space that `fill` used."""
        (self.folder / _BALLAST).unlink(missing_ok=True)

    def close(self) -> None:
        """Unmount it; its content is lost."""
        if self.can_be_filled:
            umount = shutil.which("umount") or "umount"
            # In a new session, so that Ctrl-C in a terminal doesn't interrupt it.
            subprocess.run([umount, "--lazy", self.folder], check=True, start_new_session=True)


def _mount(folder: Path) -> str:
    """Mount a small file system there; return why that failed, or ""."""
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
