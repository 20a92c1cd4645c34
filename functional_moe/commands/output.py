"""Whether a file can be made where it is to be, asked before anything is computed for it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from .settings import SettingsError


def check_writable(flag: str, path: Path) -> None:
    """Makes sure of it, and leaves nothing behind.

    Args:
      flag: that gave the path, for the message.
      path: of a file that there need not be.

    Raises:
      SettingsError: nothing can be made there, or what is there may not be written.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(0, "is a folder")
        if path.exists():  # a device may be written in a folder where nothing can be made
            if not os.access(path, os.W_OK):
                raise PermissionError(0, "may not be written")
            return
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}."):
            pass
    except OSError as error:
        raise SettingsError(f"{flag} {path}: {error.strerror}") from error
