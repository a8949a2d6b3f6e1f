"""`rl.data.download` against a server on this machine that misbehaves on request."""

import errno
import functools
import hashlib
import http.server
import io
import socket
import threading
import urllib.error

import pytest

from rl.data import download
from rl.data.steps import DataError

BODY = b"observations" * 100_000
SHA256 = hashlib.sha256(BODY).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.requests.append(self.path)
        respond = self.server.script.pop(0) if self.server.script else ok
        respond(self)

    def log_message(self, *_):
        pass


def ok(handler, body=BODY, length=None):
    handler.send_response(200)
    handler.send_header("Content-Length", length or str(len(BODY)))
    handler.end_headers()
    handler.wfile.write(body)


def fail(handler, code=503):
    handler.send_error(code)


short = functools.partial(ok, body=BODY[:-1])


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(download.time, "sleep", lambda seconds: sleeps.append(seconds))
    sleeps = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.script, running.requests, running.sleeps = [], [], sleeps
        running.url = f"http://127.0.0.1:{running.server_port}/log.hdf5"
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def files(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_fetches_and_records_the_checksum(server, tmp_path):
    path = tmp_path / "new" / "folder" / "log.hdf5"
    download.fetch(server.url, path, sha256=SHA256.upper())
    assert path.read_bytes() == BODY
    assert files(tmp_path) == ["log.hdf5", "log.hdf5.sha256"]
    assert (path.parent / "log.hdf5.sha256").read_text() == f"{SHA256}  log.hdf5\n"
    download.verify(path)
    download.verify(path, SHA256)


def test_fails_twice_then_succeeds(server, tmp_path):
    server.script = [fail, short]
    download.fetch(server.url, tmp_path / "log.hdf5")
    assert (tmp_path / "log.hdf5").read_bytes() == BODY
    assert len(server.requests) == 3
    assert server.sleeps == [1, 2]


def test_gives_up_after_the_retries(server, tmp_path):
    server.script = [fail] * 9
    with pytest.raises(DataError, match=r"503 .*\(3 attempts\).*put it at .*log.hdf5"):
        download.fetch(server.url, tmp_path / "log.hdf5", retries=2)
    assert len(server.requests) == 3
    assert files(tmp_path) == []


def test_a_short_body_is_no_file(server, tmp_path):
    server.script = [short] * 2
    with pytest.raises(DataError, match=rf"{len(BODY) - 1}.*\(2 attempts\)"):
        download.fetch(server.url, tmp_path / "log.hdf5", retries=1)
    assert files(tmp_path) == []


def test_a_length_that_is_no_number_is_not_compared(server, tmp_path):
    server.script = [functools.partial(ok, length="many")]
    download.fetch(server.url, tmp_path / "log.hdf5")
    assert (tmp_path / "log.hdf5").read_bytes() == BODY


def test_a_checksum_that_is_no_text_is_named(tmp_path):
    (tmp_path / "log.hdf5").write_bytes(BODY)
    (tmp_path / "log.hdf5.sha256").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"log.hdf5.sha256 cannot be read as the checksum .*delete it"):
        download.verify(tmp_path / "log.hdf5")


def test_a_missing_page_is_not_asked_for_again(server, tmp_path):
    server.script = [functools.partial(fail, code=404)]
    with pytest.raises(DataError, match=r"404 Not Found \(1 attempts\)"):
        download.fetch(server.url, tmp_path / "log.hdf5")
    assert len(server.requests) == 1


def test_a_wrong_checksum_is_not_kept(server, tmp_path):
    with pytest.raises(DataError, match=f"SHA-256 {SHA256}, but {'0' * 64} was expected"):
        download.fetch(server.url, tmp_path / "log.hdf5", sha256="0" * 64)
    assert files(tmp_path) == []


def test_an_unusable_file_is_not_kept(server, tmp_path):
    def check(path):
        assert path.read_bytes() == BODY
        raise DataError("not HDF5")

    with pytest.raises(DataError, match="not HDF5"):
        download.fetch(server.url, tmp_path / "log.hdf5", check=check)
    assert files(tmp_path) == []


def test_no_connection_names_what_to_do(server, tmp_path):
    url = "http://127.0.0.1:1/log.hdf5"  # nothing listens there
    path = tmp_path / "log.hdf5"
    with pytest.raises(DataError) as caught:
        download.fetch(url, path, otherwise="make it: python -m experiments.collect")
    message = str(caught.value)
    assert url in message and str(path) in message and "or make it: python -m experiments.collect" in message
    assert files(tmp_path) == []


def test_an_unknown_host_is_not_tried_again(server, tmp_path, monkeypatch):
    def offline(request, timeout):
        raise urllib.error.URLError(socket.gaierror(-2, "Name or service not known"))

    monkeypatch.setattr(download.urllib.request, "urlopen", offline)
    with pytest.raises(DataError, match=r"Name or service not known \(1 attempts\)"):
        download.fetch(server.url, tmp_path / "log.hdf5")
    assert server.sleeps == []


class FullDisk(io.FileIO):
    def write(self, chunk):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_nothing(server, tmp_path, monkeypatch):
    monkeypatch.setattr(download.Path, "open", lambda path, mode: FullDisk(path, mode))
    with pytest.raises(DataError, match=f"could not write to {tmp_path}: No space left on device"):
        download.fetch(server.url, tmp_path / "log.hdf5")
    assert len(server.requests) == 1  # a full disk is no reason to ask the server again
    assert files(tmp_path) == []


def test_ctrl_c_leaves_nothing(server, tmp_path, monkeypatch):
    def interrupt(response):
        raise KeyboardInterrupt

    monkeypatch.setattr(download, "_read", interrupt)
    with pytest.raises(KeyboardInterrupt):
        download.fetch(server.url, tmp_path / "log.hdf5")
    assert files(tmp_path) == []


def test_what_was_there_stays_until_the_new_file_is_complete(server, tmp_path):
    path = tmp_path / "log.hdf5"
    path.write_bytes(b"old")
    server.script = [short]
    with pytest.raises(DataError):
        download.fetch(server.url, path, retries=0)
    assert path.read_bytes() == b"old"


def test_a_changed_file_is_noticed(server, tmp_path):
    path = tmp_path / "log.hdf5"
    download.fetch(server.url, path)
    path.write_bytes(BODY[:-1] + b"!")
    with pytest.raises(DataError, match=r"the file has changed.*log.hdf5.sha256"):
        download.verify(path)
    (tmp_path / "log.hdf5.sha256").unlink()
    download.verify(path)
    with pytest.raises(DataError, match="was asked for"):
        download.verify(path, SHA256)
