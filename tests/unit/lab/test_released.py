# SPDX-License-Identifier: GPL-3.0-or-later
"""Released programs are downloaded by their digests, here from a web server on loopback, and are built otherwise."""

from __future__ import annotations

import hashlib
import http.server
import io
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import yaml
from ports import serving

from lab import build, released
from lab.settings import DOWNLOADS, download_url
from lab.shell import LabError

KUBERNETES, ETCD = build.SETS["kubernetes"], build.SETS["etcd"]
PROGRAM = bytes(range(256)) * 4096
Handler = http.server.BaseHTTPRequestHandler


class Server:
    """A web server; ``files`` maps a path to its content, or to a function that answers.

    :ivar asked: method, path and range of each request.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes | Callable[[Handler], None]] = {}
        self.asked: list[tuple[str, str, str]] = []
        outer = self

        class Answers(Handler):
            def do_GET(self) -> None:
                outer.asked.append((self.command, self.path, self.headers.get("Range", "")))
                content = outer.files.get(self.path)
                if callable(content):
                    content(self)
                elif content is None or self.command == "HEAD":
                    self.send_error(404)
                else:
                    ranged(self, content)

            do_HEAD = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def running(self) -> Iterator[Server]:
        with serving(self._server):
            yield self

    def gets(self, path: str) -> list[str]:
        """The ranges of the requests for a path."""
        return [span for method, one, span in self.asked if (method, one) == ("GET", path)]


def ranged(handler: Handler, content: bytes, stop: int | None = None) -> None:
    """Answer with a content from where the client asks; the connection ends early after ``stop`` bytes."""
    start = int(handler.headers.get("Range", "bytes=0-")[len("bytes=") :].rstrip("-"))
    handler.send_response(206 if start else 200)
    if start:
        handler.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
    handler.send_header("Content-Length", str(len(content) - start))
    handler.end_headers()
    handler.wfile.write(content[start:stop])


def dripped(handler: Handler) -> None:
    """Send a head that has no end."""
    with suppress(OSError):
        while True:
            handler.wfile.write(b"X")
            time.sleep(0.05)


def archive(name: str, members: dict[str, bytes]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as tar:
        for path, content in members.items():
            member = tarfile.TarInfo(f"{name}/{path}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return made.getvalue()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def server() -> Iterator[Server]:
    with Server().running() as running:
        yield running


@pytest.fixture(autouse=True)
def private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A cache of its own, and no decision of another test."""
    monkeypatch.setenv("KUBEGPU_CACHE", str(tmp_path / "cache"))
    for project in DOWNLOADS:
        monkeypatch.delenv(f"LAB_{project.upper()}_URL", raising=False)
    released._unreachable.cache_clear()
    yield
    released._unreachable.cache_clear()


@pytest.fixture
def etcd(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[bytes]:
    """etcd's archive, its digest in the table and the server as every project's place."""
    [file] = released.files(released.SOURCES[ETCD.module], ETCD.version, "amd64", ETCD.binaries)
    content = archive(file.name.removesuffix(".tar.gz"), {"etcd": PROGRAM, "etcdctl": b"x", "README.md": b"y"})
    write_table(tmp_path, monkeypatch, {file.name: sha256(content)})
    server.files[f"/{file.path}"] = content
    for project in DOWNLOADS:
        monkeypatch.setenv(f"LAB_{project.upper()}_URL", server.url)
    yield content


def write_table(folder: Path, monkeypatch: pytest.MonkeyPatch, digests: dict[str, str]) -> None:
    monkeypatch.setattr(released, "TABLE", folder / "released.yml")
    monkeypatch.setattr(released.platform, "machine", lambda: "x86_64")
    row = {"known": "", "amd64": digests, "arm64": {}}
    released.TABLE.write_text(yaml.safe_dump({"etcd": {ETCD.version: row}, "kubernetes": {KUBERNETES.version: row}}))


def path_of() -> str:
    return f"/v{ETCD.version}/etcd-v{ETCD.version}-linux-amd64.tar.gz"


def release(tools: build.ToolSet = ETCD) -> released.Release:
    found = released.find(tools.name, tools.module, tools.version, tools.binaries)
    assert found
    return found


def test_the_programs_of_an_archive(etcd: bytes, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once downloaded, nothing is asked, and no Go is needed."""
    monkeypatch.setattr(build, "_build", None)
    folder = build.built(ETCD)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"etcd": PROGRAM}
    assert (folder / "etcd").stat().st_mode & 0o777 == 0o755
    assert [one[:2] for one in server.asked] == [("HEAD", "/"), ("GET", path_of())]
    monkeypatch.setattr(build, "find_go", None)
    assert build.built(ETCD) == folder and len(server.asked) == 2


def test_a_program_each(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    contents = {name: name.encode() * 1000 for name in KUBERNETES.binaries}
    write_table(tmp_path, monkeypatch, {name: sha256(content) for name, content in contents.items()})
    monkeypatch.setenv("LAB_KUBERNETES_URL", f"{server.url}/mirror/")
    for name, content in contents.items():
        server.files[f"/mirror/v{KUBERNETES.version}/bin/linux/amd64/{name}"] = content
    folder = build.built(KUBERNETES)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == contents


def breaks_off(content: bytes, always: bool) -> Callable[[Handler], None]:
    """End the first answer, or each, after some bytes more."""

    def answer(handler: Handler) -> None:
        start = int(handler.headers.get("Range", "bytes=0-")[len("bytes=") :].rstrip("-"))
        ranged(handler, content, start + 100 if always or not start else None)

    return answer


def test_a_transfer_that_breaks_off_is_continued(etcd: bytes, server: Server) -> None:
    server.files[path_of()] = breaks_off(etcd, always=False)
    assert release().download()
    assert server.gets(path_of()) == ["", "bytes=100-"]


def hangs(handler: Handler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000000")
    handler.end_headers()
    handler.wfile.write(b"x")
    handler.wfile.flush()
    time.sleep(3)


def loops(handler: Handler) -> None:
    handler.send_response(302)
    handler.send_header("Location", path_of())
    handler.end_headers()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "answers 404"),
        (hangs, "timed out"),
        (loops, "answers 302"),
        (breaks_off(PROGRAM, always=True), "the transfer broke off"),
        (lambda handler: handler.send_error(403), "answers 403"),
        (lambda handler: handler.wfile.write(b"nothing\x1b[2J of HTTP\r\n\r\n"), "nothing?[2J of HTTP"),
        # Each byte comes in time.
        (dripped, "no answer within 1 s"),
    ],
)
def test_what_cant_be_downloaded_is_built(
    etcd: bytes,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answer: Callable[[Handler], None] | None,
    words: str,
) -> None:
    monkeypatch.setattr(released, "SILENCE", 0.2)
    monkeypatch.setattr(released, "HEAD", 0.6)
    server.files.pop(path_of())
    if answer:
        server.files[path_of()] = answer
    built: list[str] = []
    monkeypatch.setattr(build, "_build", lambda tools, *_: built.append(tools.name))
    monkeypatch.setattr(build, "find_go", lambda: "go")
    monkeypatch.setattr(build, "key_of", lambda *_: "key")
    build.built(ETCD)
    said = capsys.readouterr().out
    assert built == ["etcd"] and f"etcd {ETCD.version} isn't downloaded: " in said and words in said, said
    assert not release().folder.exists() and not list(release().folder.parent.glob(".tmp-*"))


def test_a_file_with_another_digest_is_refused(etcd: bytes, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an error, and nothing is built in its place."""
    server.files[path_of()] = etcd + b"more"
    monkeypatch.setattr(build, "_build", None)
    with pytest.raises(LabError) as error:
        build.built(ETCD)
    assert str(error.value) == (
        f"{server.url}{path_of()} has SHA-256 {sha256(etcd + b'more')}, but lab/released.yml has {sha256(etcd)}: it "
        "isn't used. Set another address, or `none` to build from source (lab/README.md, Values)."
    )
    assert not release().folder.exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x1f\x8bno archive", "can't be unpacked"),
        (archive("etcd", {"README.md": b"y"}), r"has no etcd\.$"),
    ],
)
def test_an_archive_without_the_program(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes, words: str
) -> None:
    write_table(tmp_path, monkeypatch, {path_of().rpartition("/")[2]: sha256(content)})
    server.files[path_of()] = content
    for project in DOWNLOADS:
        monkeypatch.setenv(f"LAB_{project.upper()}_URL", server.url)
    with pytest.raises(LabError, match=words):
        release().download()
    assert not release().folder.exists()


def test_without_a_digest_nothing_is_asked(
    etcd: bytes, server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_table(tmp_path, monkeypatch, {})
    assert not release().download() and server.asked == []
    assert "lab/released.yml has no SHA-256 of etcd-v" in capsys.readouterr().out


def test_a_project_is_switched_off(etcd: bytes, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAB_ETCD_URL", "none")
    assert not release().download() and server.asked == []
    monkeypatch.delenv("LAB_ETCD_URL")
    assert download_url("etcd", {}) == DOWNLOADS["etcd"]
    for wrong in ("dl.k8s.io", "file:///etc", "https://", "https://a b"):
        with pytest.raises(LabError, match=r"LAB_ETCD_URL is .* must be a web address such as https://.*, or none\."):
            download_url("etcd", {"LAB_ETCD_URL": wrong})


def test_the_table_has_the_labs_own_versions_and_no_others() -> None:
    rows = yaml.safe_load(released.TABLE.read_text())
    wanted: dict[str, dict[str, list[str]]] = {}
    for tools in (*build.TOOL_SETS, *build.OLDER):
        source = released.SOURCES.get(tools.module)
        if source:
            wanted.setdefault(source.name, {})[tools.version] = list(tools.binaries)
    assert {name: set(versions) for name, versions in rows.items()} == {n: set(v) for n, v in wanted.items()}
    assert set(DOWNLOADS) == set(wanted)
    for source in released.SOURCES.values():
        for version, row in rows[source.name].items():
            assert set(row) == {"known", *released.ARCHITECTURES.values()}
            for architecture in released.ARCHITECTURES.values():
                known = row[architecture]
                assert all(len(bytes.fromhex(digest)) == 32 for digest in known.values())
                files = released.files(source, version, architecture, tuple(wanted[source.name][version]))
                assert set(known) in (set(), {file.name for file in files})
                assert bool(known) <= bool(row["known"])
