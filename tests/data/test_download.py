import errno
import hashlib
import http.server
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from wheretolearn.data import download as download_module
from wheretolearn.data.download import RemoteFile, download
from wheretolearn.errors import DataError

BODY = bytes(range(256)) * 4000  # 1,024,000 bytes
DIGEST = hashlib.sha256(BODY).hexdigest()


class Server(http.server.ThreadingHTTPServer):
    """Answers each path with the handler given for it and remembers what was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: dict[str, Callable[[Handler], None]] = {}
        self.asked: list[tuple[str, str | None]] = []

    def url(self, path: str, answer: Callable[["Handler"], None]) -> str:
        self.answers[path] = answer
        return f"http://127.0.0.1:{self.server_port}{path}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers.get("Range")))
        self.server.answers[self.path](self)

    def log_message(self, *_: object) -> None:
        pass

    def start(self, status: int, length: int | None, **headers: str) -> None:
        self.send_response(status)
        if length is not None:
            self.send_header("Content-Length", str(length))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    @property
    def offset(self) -> int:
        return int(self.headers.get("Range", "bytes=0-")[6:-1])


def honest(handler: Handler) -> None:
    start = handler.offset
    if not start:
        handler.start(200, len(BODY))
    else:
        handler.start(206, len(BODY) - start, Content_Range=f"bytes {start}-{len(BODY) - 1}/{len(BODY)}")
    handler.wfile.write(BODY[start:])


def dropping(size: int) -> Callable[[Handler], None]:
    """Honours Range, but closes the connection after ``size`` bytes."""

    def answer(handler: Handler) -> None:
        start = handler.offset
        if not start:
            handler.start(200, len(BODY))
        else:
            handler.start(206, len(BODY) - start, Content_Range=f"bytes {start}-{len(BODY) - 1}/{len(BODY)}")
        handler.wfile.write(BODY[start : start + size])

    return answer


def status(code: int) -> Callable[[Handler], None]:
    return lambda handler: handler.start(code, 0)


def sending(body: bytes, length: int | None = None, **headers: str) -> Callable[[Handler], None]:
    def answer(handler: Handler) -> None:
        handler.start(200, len(body) if length is None else length, **headers)
        handler.wfile.write(body)

    return answer


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def naps() -> list[float]:
    return []


@pytest.fixture
def fetch(tmp_path: Path, naps: list[float]) -> Callable[..., Path]:
    def run(*urls: str, size: int | None = len(BODY), sha256: str | None = DIGEST, **options) -> Path:
        file = RemoteFile("file.bin", urls, size, sha256)
        return download(file, tmp_path, sleep=naps.append, timeout=300.0, **options)

    return run


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_a_file_arrives_whole_with_progress(server, fetch, tmp_path):
    reports: list[tuple[int, int]] = []
    path = fetch(server.url("/a", honest), progress=lambda *report: reports.append(report))
    assert path.read_bytes() == BODY
    assert reports[-1] == (len(BODY), len(BODY))
    assert names(tmp_path) == ["file.bin"]


def test_a_good_file_is_not_fetched_again(server, fetch):
    url = server.url("/a", honest)
    fetch(url)
    fetch(url)
    assert len(server.asked) == 1


def test_a_damaged_file_is_fetched_again(server, fetch, tmp_path):
    (tmp_path / "file.bin").write_bytes(b"x" * len(BODY))
    assert fetch(server.url("/a", honest)).read_bytes() == BODY


def test_a_dropped_connection_is_resumed_where_it_broke(server, fetch, naps):
    path = fetch(server.url("/a", dropping(300_000)))
    assert path.read_bytes() == BODY
    ranges = [asked for _, asked in server.asked]
    assert ranges == [None, "bytes=300000-", "bytes=600000-", "bytes=900000-"]
    assert len(naps) == 3


def test_progress_on_a_bad_line_is_not_counted_as_failure(server, fetch):
    assert fetch(server.url("/a", dropping(100_000)), attempts=1).read_bytes() == BODY


def test_an_earlier_part_is_resumed(server, fetch, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(BODY[:1000])
    assert fetch(server.url("/a", honest)).read_bytes() == BODY
    assert server.asked == [("/a", "bytes=1000-")]


def test_a_transfer_resumes_at_the_next_mirror(server, fetch):
    path = fetch(server.url("/a", dropping(400_000)), server.url("/b", honest))
    assert path.read_bytes() == BODY
    assert server.asked == [("/a", None), ("/b", "bytes=400000-")]


def test_a_body_always_truncated_at_the_same_place_ends_in_an_error(server, fetch, naps, tmp_path):
    url = server.url("/a", sending(BODY[:5000], length=len(BODY)))
    with pytest.raises(DataError, match="stopped after 5000 of 1024000 bytes"):
        fetch(url)
    assert naps == [1.0, 2.0, 4.0, 8.0]
    assert names(tmp_path) == ["file.bin.part"]


def test_a_content_length_shorter_than_the_file_is_noticed_and_overcome(server, fetch):
    def lie_once(handler: Handler) -> None:
        if handler.offset:
            honest(handler)
        else:
            sending(BODY, length=2000)(handler)

    assert fetch(server.url("/a", lie_once)).read_bytes() == BODY


def test_a_server_whose_file_is_shorter_than_published_is_told_so(server, fetch):
    with pytest.raises(DataError, match="it sends only 5000 of the 1024000 bytes of the published file"):
        fetch(server.url("/a", sending(BODY[:5000])))


def test_a_content_length_that_lies_counts_even_when_no_size_is_known(server, fetch):
    with pytest.raises(DataError, match="stopped after 1024000 of 2000000 bytes"):
        fetch(server.url("/a", sending(BODY, length=2_000_000)), size=None, sha256=None, attempts=2)


def test_a_body_longer_than_the_published_file_is_refused(server, fetch, tmp_path):
    with pytest.raises(DataError, match="more than the 1024000 bytes"):
        fetch(server.url("/a", sending(BODY + b"more")))
    assert names(tmp_path) == []


def test_a_server_that_ignores_range_starts_cleanly_from_the_beginning(server, fetch, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(b"junk" * 100)
    assert fetch(server.url("/a", sending(BODY))).read_bytes() == BODY
    assert server.asked == [("/a", "bytes=400-")]


def test_a_server_that_resumes_at_the_wrong_place_is_not_believed(server, fetch, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(BODY[:1000])

    def wrong_start(handler: Handler) -> None:
        if handler.offset:
            handler.start(206, 10, Content_Range="bytes 5-14/20")
            handler.wfile.write(BODY[:10])
        else:
            honest(handler)

    assert fetch(server.url("/a", wrong_start)).read_bytes() == BODY


def test_a_part_the_server_cannot_continue_is_dropped(server, fetch, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(BODY[:1000])

    def unsatisfied(handler: Handler) -> None:
        status(416)(handler) if handler.offset else honest(handler)

    assert fetch(server.url("/a", unsatisfied)).read_bytes() == BODY


def test_a_bad_older_part_costs_one_fresh_start(server, fetch, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(b"x" * 1000)
    assert fetch(server.url("/a", honest)).read_bytes() == BODY
    assert [asked for _, asked in server.asked] == ["bytes=1000-", None]


@pytest.mark.parametrize("code", [404, 403, 500, 503])
def test_an_error_status_leads_to_the_next_mirror_at_once(server, fetch, naps, code):
    assert fetch(server.url("/a", status(code)), server.url("/b", honest)).read_bytes() == BODY
    assert naps == []


def test_404_is_not_tried_again(server, fetch, naps):
    with pytest.raises(DataError, match="answered 404"):
        fetch(server.url("/a", status(404)))
    assert len(server.asked) == 1
    assert naps == []


def test_500_is_tried_again_and_then_reported(server, fetch):
    with pytest.raises(DataError, match="answered 500"):
        fetch(server.url("/a", status(500)), attempts=3)
    assert len(server.asked) == 3


PAGE = b"\n <!DOCTYPE html><html><body>Please log in</body></html>"


@pytest.mark.parametrize(
    "answer",
    [sending(PAGE, Content_Type="text/html; charset=utf-8"), sending(PAGE, Content_Type="application/zip")],
    ids=["by content type", "by first bytes"],
)
def test_html_page_instead_of_an_archive_is_recognised(server, fetch, tmp_path, answer):
    with pytest.raises(DataError, match="a web page came instead of the file"):
        fetch(server.url("/a", answer))
    assert "file.bin" not in names(tmp_path)


def test_a_web_page_leads_to_the_next_mirror(server, fetch):
    page = sending(PAGE, Content_Type="application/zip")
    assert fetch(server.url("/a", page), server.url("/b", honest)).read_bytes() == BODY


def test_wrong_checksum_gives_both_sums_and_removes_the_file(server, fetch, tmp_path):
    other = BODY[:-1] + b"!"
    with pytest.raises(DataError) as caught:
        fetch(server.url("/a", sending(other)))
    assert hashlib.sha256(other).hexdigest() in str(caught.value)
    assert DIGEST in str(caught.value)
    assert names(tmp_path) == []


def test_no_network_is_reported_after_all_attempts(fetch, naps):
    with pytest.raises(DataError, match="is the network up"):
        fetch("http://127.0.0.1:9/file.bin", attempts=3)
    assert naps == [2.0, 4.0]


def test_every_mirror_is_listed_with_its_own_problem(server, fetch):
    page = sending(PAGE, Content_Type="text/html")
    with pytest.raises(DataError, match=r"(?s)/a: .*404.*/b: a web page"):
        fetch(server.url("/a", status(404)), server.url("/b", page))


def test_disk_full_while_downloading_is_not_taken_for_a_network_fault(server, fetch, monkeypatch, tmp_path):
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(download_module.os, "fsync", full)
    with pytest.raises(DataError, match=r"cannot download file\.bin: .* full; it needs about 1\.0 MB"):
        fetch(server.url("/a", honest))


def test_unwritable_download_folder_is_named(server, tmp_path):
    (tmp_path / "taken").write_text("")
    file = RemoteFile("file.bin", (server.url("/a", honest),))
    with pytest.raises(DataError, match=r"cannot download file\.bin in .*taken"):
        download(file, tmp_path / "taken")
