"""Files written whole or not at all: a temporary file in the same folder, then one rename."""
import os
import secrets
from pathlib import Path


def write_atomic(path: str | os.PathLike, content: bytes | str) -> None:
    """Write `content` to `path` so that a reader, or a crash, never meets a half-written file.

    Args:
      path: file to create or replace; its folder must exist. A symbolic link is followed, not replaced.
      content: bytes as they are, or text, which is stored as UTF-8 with its line ends unchanged.
    Raises:
      FileNotFoundError: when the folder does not exist.
      IsADirectoryError: when `path` is a folder.
      TypeError: when `content` is neither bytes nor text.
    """
    if not isinstance(content, (bytes, bytearray, memoryview, str)):
        raise TypeError(f"write_atomic: content is {type(content).__name__}; it should be bytes or text.")
    data = content.encode("utf-8") if isinstance(content, str) else content
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):  # a device or pipe, as /dev/stdout, is written to, not replaced
        with open(path, "wb") as stream:
            stream.write(data)
        return
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{path}: the folder {target.parent} does not exist. Create it first.")
    if target.is_dir():
        raise IsADirectoryError(f"{path} is a folder; give the name of a file in it.")
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    # Created by open, not by tempfile: the file gets the permissions any other file of this user gets.
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            os.chmod(temporary, target.stat().st_mode & 0o7777)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
