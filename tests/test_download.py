"""Files from a (local) network: whole, broken off, wrong, missing."""

import http.server
import threading

import pytest

from ict.download import Download, fetch
from ict.files import sha256
from ict.reading import ConfigError

CONTENT = bytes(range(256)) * 20_000
RIGHT = {"sha256": sha256(CONTENT), "size": len(CONTENT)}


class Server(http.server.BaseHTTPRequestHandler):
    """/file is CONTENT; /short breaks off after a third each time; /old ignores ranges; /other is another file."""

    asked: list[tuple[str, str | None]]

    def do_GET(self):
        wanted = self.headers.get("Range")
        self.server.asked.append((self.path, wanted))  # type: ignore
        if self.path == "/missing":
            self.send_error(404)
            return
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and self.path != "/old" else 0
        content = (CONTENT[::-1] if self.path == "/other" else CONTENT)[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(CONTENT) // 3] if self.path == "/short" else content)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as one:
        one.asked = []  # type: ignore
        threading.Thread(target=one.serve_forever, daemon=True).start()
        yield one
        one.shutdown()


def at(server, name: str) -> Download:
    return Download(url=f"http://127.0.0.1:{server.server_address[1]}/{name}", **RIGHT)


def test_a_file_comes_once(server, tmp_path):
    path, seen = tmp_path / "deep" / "file", []
    fetch(at(server, "file"), path, progress=lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == CONTENT and seen[-1] == (len(CONTENT), len(CONTENT))
    fetch(at(server, "file"), path)
    assert len(server.asked) == 1 and list(path.parent.iterdir()) == [path]


def test_a_broken_download_is_gone_on_with(server, tmp_path):
    path = tmp_path / "file"
    for _ in range(2):
        with pytest.raises(ConfigError, match="What has come is kept"):
            fetch(at(server, "short"), path)
    assert not path.exists()
    fetch(at(server, "file"), path)
    assert path.read_bytes() == CONTENT
    assert [wanted for _, wanted in server.asked] == [None, *(f"bytes={n * (len(CONTENT) // 3)}-" for n in (1, 2))]


def test_a_server_that_knows_no_ranges_begins_again(server, tmp_path):
    (tmp_path / "file.partial").write_bytes(b"x" * 100)
    fetch(at(server, "old"), tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_another_file_is_thrown_away(server, tmp_path):
    with pytest.raises(ConfigError, match="is not the file it should be"):
        fetch(at(server, "other"), tmp_path / "file")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file.partial").write_bytes(b"x" * 100)  # a damaged beginning
    with pytest.raises(ConfigError, match="thrown away"):
        fetch(at(server, "file"), tmp_path / "file")
    fetch(at(server, "file"), tmp_path / "file")


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1/file", "http://no.such.host.invalid/f", "nonsense", "file:///nowhere"]
)
def test_places_that_do_not_answer(url, tmp_path):
    with pytest.raises(ConfigError, match="cannot be brought"):
        fetch(Download(url=url, **RIGHT), tmp_path / "file")


def test_a_file_that_is_not_there(server, tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be brought \(Not Found\)"):
        fetch(at(server, "missing"), tmp_path / "file")


def test_a_damaged_file_is_brought_again(server, tmp_path):
    (tmp_path / "file").write_bytes(CONTENT[:-1])
    fetch(at(server, "file"), tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT
