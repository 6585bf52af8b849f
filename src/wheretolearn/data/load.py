"""One way to load any image set by name, the embedded one included."""

from collections.abc import Callable

from wheretolearn.data import glyphs, image_set
from wheretolearn.data.image_set import ImageSet


def load_set(name: str, progress: Callable[[int, int], None] | None = None) -> ImageSet:
    """A set from the cache; ``glyphs`` is drawn first if it is not there yet (``progress`` follows that)."""
    return glyphs.load(progress=progress) if name == "glyphs" else image_set.load(name)
