"""Archives from strangers: every member is checked before it is read or written."""

import gzip
import lzma
import re
import shutil
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from wheretolearn.data.image_set import storage_error
from wheretolearn.errors import DataError

ARCHIVE_SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")

# What a cut or altered archive raises, depending on where it was cut.
DAMAGE = (
    EOFError,
    gzip.BadGzipFile,
    lzma.LZMAError,
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
)


class Workspace(ExitStack):
    """Archives and temporary folders open during one conversion; all are gone when it ends."""

    def __init__(self, scratch: Path) -> None:
        super().__init__()
        self.scratch = scratch  # where archives are unpacked: the cache, as /tmp may be too small

    def open_zip(self, file: Path) -> zipfile.ZipFile:
        """A zip file whose member names have all been checked."""
        with damage_reported(file):
            archive = self.enter_context(zipfile.ZipFile(file))
        for member in archive.infolist():
            _check_zip_member(file, member)
        return archive

    def unpack(self, file: Path) -> Path:
        """A temporary folder that holds the files of an archive."""
        try:
            self.scratch.mkdir(parents=True, exist_ok=True)
            folder = Path(self.enter_context(tempfile.TemporaryDirectory(prefix=".unpack-", dir=self.scratch)))
        except OSError as error:
            raise storage_error(f"unpack {file.name}", self.scratch, None, error) from error
        if file.suffix == ".zip":
            self._unpack_zip(file, folder)
        else:
            self._unpack_tar(file, folder)
        return folder

    def _unpack_zip(self, file: Path, folder: Path) -> None:
        archive = self.open_zip(file)
        for member in archive.infolist():
            if not member.is_dir() and not is_hidden(member.filename):
                with damage_reported(file), archive.open(member) as stream:
                    self._copy(file, stream, folder / member.filename)

    def _unpack_tar(self, file: Path, folder: Path) -> None:
        with damage_reported(file), tarfile.open(file) as archive:
            for member in archive:
                check_member_name(file, member.name)
                if member.isdir() or is_hidden(member.name):
                    continue
                stream = archive.extractfile(member) if member.isreg() else None
                if stream is None:
                    raise _refused(file, member.name, "is a link or a device")
                self._copy(file, stream, folder / member.name)

    def _copy(self, file: Path, stream: IO[bytes], target: Path) -> None:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as out:
                shutil.copyfileobj(stream, out, 1 << 20)
        except gzip.BadGzipFile:  # an OSError, but of the archive
            raise
        except OSError as error:
            needed = 2 * file.stat().st_size
            raise storage_error(f"unpack {file.name}", self.scratch, needed, error) from error


def is_archive(path: Path) -> bool:
    """Whether the file's name says that it is an archive."""
    return path.name.lower().endswith(ARCHIVE_SUFFIXES)


def is_hidden(name: str) -> bool:
    """Whether a member is a system's own litter: ``.DS_Store``, ``._x``, ``__MACOSX/``."""
    return any(part.startswith(".") or part == "__MACOSX" for part in PurePosixPath(name).parts)


def looks_like_web_page(start: bytes) -> bool:
    """Whether the first bytes of a file are HTML."""
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip()[:64].lower()
    return text.startswith((b"<!doctype html", b"<html", b"<head", b"<body", b"<?xml", b"<!--"))


def check_member_name(file: Path, name: str) -> None:
    """Refuse a member that would land outside the folder it is unpacked in."""
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or re.match("[A-Za-z]:", name):
        raise _refused(file, name, "has an absolute path")
    if ".." in path.parts:
        raise _refused(file, name, "leads out of the archive")


@contextmanager
def damage_reported(file: Path) -> Iterator[None]:
    """Turn what a broken archive raises into an error that names it."""
    try:
        yield
    except DAMAGE as error:
        with file.open("rb") as stream:
            page = looks_like_web_page(stream.read(512))
        reason = "it is a web page, not an archive" if page else f"it is cut short or damaged ({error})"
        raise DataError(f"cannot read {file}: {reason}.\nDownload it again.") from error
    except RuntimeError as error:  # zipfile's answer to a password
        raise DataError(f"cannot read {file}: {error}") from error


def _check_zip_member(file: Path, member: zipfile.ZipInfo) -> None:
    check_member_name(file, member.filename)
    if stat.S_ISLNK(member.external_attr >> 16):
        raise _refused(file, member.filename, "is a link")


def _refused(file: Path, member: str, why: str) -> DataError:
    return DataError(
        f"refused to unpack {file}: member {member!r} {why}.\nNo publisher's archive does that; get another copy."
    )
