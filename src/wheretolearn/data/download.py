"""Resumable downloads over HTTP, checked before they count as files."""

import hashlib
import http.client
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from wheretolearn.data.archives import looks_like_web_page
from wheretolearn.data.image_set import Progress, storage_error
from wheretolearn.errors import DataError
from wheretolearn.version import __version__

BLOCK = 1 << 18


@dataclass(frozen=True)
class RemoteFile:
    """A public file: its addresses in order of preference, and what is known of its content."""

    name: str
    urls: tuple[str, ...]
    size: int | None = None
    sha256: str | None = None


class _TryAgainError(Exception):
    """A fault that may pass: a dropped connection, a busy server."""


class _GiveUpError(Exception):
    """A fault of this address: another attempt would end the same way."""


def download(
    file: RemoteFile,
    folder: Path,
    *,
    progress: Progress | None = None,
    attempts: int = 4,
    timeout: float = 30.0,
    sleep: Callable[[float], None] = time.sleep,
) -> Path:
    """Fetch ``file`` into ``folder`` and return its path; a good copy already there is kept.

    A broken transfer goes on where it stopped, at the next mirror if there is one, until ``attempts`` rounds
    have brought nothing new. ``progress`` counts bytes.
    """
    target = folder / file.name
    part = folder / f"{file.name}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if target.exists():
            if _content_problem(target, file) is None:
                return target
            target.unlink()
    except OSError as error:
        raise storage_error(f"download {file.name}", folder, file.size, error) from error
    addresses = list(file.urls)
    problems: dict[str, str] = {}
    best = failures = 0
    while True:
        before = best
        for url in tuple(addresses):
            try:
                resumed = _transfer(url, part, file, progress, timeout)
                _publish(part, target, file, resumed)
                return target
            except _TryAgainError as error:
                problems[url] = str(error)
            except _GiveUpError as error:
                problems[url] = str(error)
                addresses.remove(url)
            best = max(best, part.stat().st_size if part.exists() else 0)
        failures = 0 if best > before else failures + 1
        if not addresses or failures >= attempts:
            break
        sleep(2.0**failures)
    listed = "\n".join(f"  {url}: {problem}" for url, problem in problems.items())
    raise DataError(f"could not download {file.name}:\n{listed}")


def _transfer(url: str, part: Path, file: RemoteFile, progress: Progress | None, timeout: float) -> bool:
    """Bring ``part`` to full length from one address; whether it began with bytes of an earlier attempt."""
    have = part.stat().st_size if part.exists() else 0
    if file.size is not None and have > file.size:
        part.unlink()
        have = 0
    if have and have == file.size:
        return True
    headers = {"User-Agent": f"wheretolearn/{__version__}", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout) as response:
            return _receive(response, part, have, file, progress)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:  # the part is not the beginning of what this address has
            part.unlink(missing_ok=True)
            raise _TryAgainError("the partial download did not fit and was dropped") from error
        kind = _TryAgainError if error.code >= 500 or error.code in (408, 429) else _GiveUpError
        raise kind(f"the server answered {error.code} {error.reason}") from error
    except urllib.error.URLError as error:
        raise _TryAgainError(f"no connection ({error.reason}); is the network up?") from error
    except (http.client.HTTPException, OSError) as error:
        raise _TryAgainError(f"the connection broke ({error!r})") from error


def _receive(
    response: http.client.HTTPResponse,
    part: Path,
    have: int,
    file: RemoteFile,
    progress: Progress | None,
) -> bool:
    content_type = response.headers.get("Content-Type", "")
    if content_type.split(";")[0].strip().lower() in ("text/html", "application/xhtml+xml"):
        raise _GiveUpError("a web page came instead of the file")
    if have and _range_start(response) != have:
        if response.status == 206:
            part.unlink()
            raise _TryAgainError("the server resumed at the wrong place")
        have = 0  # Range was ignored: the whole file comes again
    length = response.headers.get("Content-Length", "")
    announced = have + int(length) if length.isdigit() else None
    total = file.size if file.size is not None else announced
    done = have
    with _storing(part, file):
        out = part.open("r+b" if have else "wb")
    with out:
        out.seek(have)
        while block := response.read(BLOCK):
            if done == 0 and looks_like_web_page(block):
                raise _GiveUpError("a web page came instead of the file")
            with _storing(part, file):
                out.write(block)
                out.flush()
            done += len(block)
            if file.size is not None and done > file.size:
                break
            if progress is not None:
                progress(done, total or done)
        with _storing(part, file):
            os.fsync(out.fileno())
    if file.size is not None and done > file.size:
        part.unlink()
        raise _GiveUpError(f"it sends more than the {file.size} bytes of the published file")
    if file.size is not None and announced is not None and done == announced < file.size:
        raise _TryAgainError(f"it sends only {done} of the {file.size} bytes of the published file")
    if total is not None and done < total:
        raise _TryAgainError(f"the transfer stopped after {done} of {total} bytes")
    return have > 0


@contextmanager
def _storing(part: Path, file: RemoteFile) -> Iterator[None]:
    """Tells a full or read-only disk from a broken connection: both are ``OSError``."""
    try:
        yield
    except OSError as error:
        raise storage_error(f"download {file.name}", part.parent, file.size, error) from error


def _range_start(response: http.client.HTTPResponse) -> int | None:
    found = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    return int(found[1]) if response.status == 206 and found else None


def _publish(part: Path, target: Path, file: RemoteFile, resumed: bool) -> None:
    """Check the finished download and give it its name."""
    problem = _content_problem(part, file)
    if problem is not None:
        part.unlink()
        # A resumed file may be wrong because of its older half: it deserves a fresh start.
        raise _TryAgainError(problem) if resumed else _GiveUpError(problem)
    part.replace(target)


def _content_problem(path: Path, file: RemoteFile) -> str | None:
    size = path.stat().st_size
    if file.size is not None and size != file.size:
        return f"it has {size} bytes, the published file {file.size}"
    if file.sha256 is not None:
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest != file.sha256:
            return f"wrong checksum: SHA-256 {digest}, the published file has {file.sha256}"
    return None
