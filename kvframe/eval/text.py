"""Text to fill contexts with."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics

from kvframe.errors import InputError


def embedded_text() -> str:
    """The Python language reference, as the standard library holds it for `help()`: English prose and code, about
    460,000 characters on Python 3.11. The same at every call on one version of Python."""
    return "\n\n".join(topics[topic].strip() for topic in sorted(topics))


def read_text(path: str | Path) -> str:
    """Read a text file in UTF-8.

    Raises:
        InputError: the file cannot be read, is no UTF-8 text, or holds nothing but white space.
    """
    try:
        data = Path(path).expanduser().read_bytes()
    except OSError as error:
        raise InputError(f"The text file {path} could not be read: {error.strerror or error}.") from error
    try:
        # A byte-order mark is no part of the text.
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"The file {path} is not UTF-8 text: byte {error.start} is {data[error.start]:#04x}; convert it to UTF-8."
        ) from error
    if "\0" in text:
        raise InputError(f"The file {path} is binary: byte {data.index(0)} is NUL; expected UTF-8 text.")
    if not text.strip():
        raise InputError(f"The text file {path} is empty; expected some text.")
    return text
