"""Names of files, and many names, as text for people."""

import os
from collections.abc import Iterable
from pathlib import Path


def as_text(name: Path | str) -> str:
    """A file's name as text that can be stored; names that are not UTF-8 are shown with replacement signs."""
    return os.fsencode(name).decode("utf-8", "replace")


def some(names: Iterable[Path | str], most: int = 3) -> str:
    """The first names, and how many more there are."""
    texts = [as_text(name) for name in names]
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return f"{', '.join(texts[:most])}{more}"
