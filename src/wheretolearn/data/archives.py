"""Archives from strangers: every member is checked before it is read or written."""

import errno
import gzip
import lzma
import os
import re
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from wheretolearn.data.image_set import storage_error, temporary_folder
from wheretolearn.errors import DataError

BLOCK = 1 << 20
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
# What a member gets whose name is too long, or the same as that of a folder.
UNUSABLE_NAME = (errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOTDIR)


class Workspace(ExitStack):
    """Archives and temporary folders open during one conversion; all are gone when it ends."""

    def __init__(self, scratch: Path) -> None:
        super().__init__()
        self.scratch = scratch  # where archives are unpacked: the cache, as /tmp may be too small
        self._unpacked: dict[Path, Path] = {}

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
            folder = self.enter_context(temporary_folder(self.scratch, "unpack"))
        except OSError as error:
            raise storage_error(f"unpack {file.name}", self.scratch, None, error) from error
        self._unpacked[folder] = file
        if file.suffix.lower() == ".zip":
            self._unpack_zip(file, folder)
        else:
            self._unpack_tar(file, folder)
        return folder

    def name_members(self, text: str) -> str:
        """A message with ``archive:member`` in place of the temporary path where a member was unpacked."""
        for folder, file in reversed(self._unpacked.items()):
            text = text.replace(f"{folder}{os.sep}", f"{file}:").replace(str(folder), str(file))
        return text

    def _unpack_zip(self, file: Path, folder: Path) -> None:
        archive = self.open_zip(file)
        for member in archive.infolist():
            if not member.is_dir() and not is_hidden(member.filename):
                with damage_reported(file), archive.open(member) as stream:
                    self._copy(file, stream, folder, member.filename)

    def _unpack_tar(self, file: Path, folder: Path) -> None:
        with damage_reported(file), tarfile.open(file) as archive:
            for member in archive:
                check_member_name(file, member.name)
                if member.isdir() or is_hidden(member.name):
                    continue
                stream = archive.extractfile(member) if member.isreg() else None
                if stream is None:
                    raise _refused(file, member.name, "is a link or a device")
                self._copy(file, stream, folder, member.name)
            _check_tar_end(archive)

    def _copy(self, file: Path, stream: IO[bytes], folder: Path, member: str) -> None:
        target = folder / member
        with ExitStack() as closing:
            with self._storing(file, member):
                target.parent.mkdir(parents=True, exist_ok=True)
                out = closing.enter_context(target.open("wb"))
            while block := stream.read(BLOCK):  # its errors are the archive's
                with self._storing(file, member):
                    out.write(block)

    @contextmanager
    def _storing(self, file: Path, member: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in UNUSABLE_NAME:
                raise _refused(file, member, f"cannot be stored ({error.strerror})") from error
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
    except (*DAMAGE, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the file, not of what is in it
            raise DataError(f"cannot read {file}: {error.strerror}") from error
        with file.open("rb") as stream:
            page = looks_like_web_page(stream.read(512))
        detail = str(error).partition("\n")[0].rstrip(":")
        reason = "it is a web page, not an archive" if page else f"it is cut short or damaged ({detail})"
        raise DataError(f"cannot read {file}: {reason}.\nDownload it again.") from error
    except RuntimeError as error:  # zipfile's answer to a password
        raise DataError(f"cannot read {file}: {error}") from error


def _check_zip_member(file: Path, member: zipfile.ZipInfo) -> None:
    check_member_name(file, member.filename)
    if stat.S_ISLNK(member.external_attr >> 16):
        raise _refused(file, member.filename, "is a link")


def _check_tar_end(archive: tarfile.TarFile) -> None:
    """Nothing but zeros may follow the last member: ``tarfile`` takes a damaged header for the end.

    Reading on to the end of the file also has a compressed archive's checksum compared.
    """
    stream = archive.fileobj
    assert stream is not None
    stream.seek(archive.offset)
    block = stream.read(tarfile.BLOCKSIZE)
    if len(block) < tarfile.BLOCKSIZE:
        raise tarfile.ReadError("its end is missing")
    while block:
        if block.strip(b"\0"):
            raise tarfile.ReadError("a member's header is damaged")
        block = stream.read(BLOCK)


def _refused(file: Path, member: str, why: str) -> DataError:
    return DataError(
        f"refused to unpack {file}: member {member!r} {why}.\nNo publisher's archive does that; get another copy."
    )
