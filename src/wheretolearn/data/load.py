"""One way to load any image set by name, the embedded one included."""

from collections.abc import Callable

from wheretolearn.data import glyphs, image_set
from wheretolearn.data.image_set import ImageSet
from wheretolearn.data.sources import find


def load_set(name: str, progress: Callable[[int, int], None] | None = None) -> ImageSet:
    """A set from the cache; ``glyphs`` is drawn first if it is not there yet (``progress`` follows that)."""
    if name == glyphs.NAME:
        return glyphs.load(progress=progress)
    check_known(name)
    return image_set.load(name)


def check_known(name: str) -> None:
    """Refuse a name that is neither in the cache nor one of the known sets."""
    if name != glyphs.NAME and not image_set.exists(name):
        find(name)
