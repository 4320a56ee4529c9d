# SPDX-License-Identifier: GPL-3.0-or-later
"""The archive from which nodes are created, in both of apt's formats."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.aptsources import Source, choose, codename, parse_deb822, parse_one_line, read_machine
from lab.shell import LabError

DEB822 = """\
# A comment before the first stanza.
Types: deb
# A comment inside it.
URIs: http://mirror.example.org/debian/
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb-src
URIs: http://mirror.example.org/sources
Suites: bookworm
Components: main

Enabled: no
Types: deb
URIs: http://off.example/debian
Suites: bookworm
Components: main

Types: deb
URIs: http://inline.example/debian
Suites: bookworm
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 -----END PGP PUBLIC KEY BLOCK-----
"""


def test_deb822() -> None:
    mirror, keyring = "http://mirror.example.org/debian", "/usr/share/keyrings/debian-archive-keyring.gpg"
    assert parse_deb822(DEB822) == [
        Source(mirror, "bookworm", ("main",), keyring),
        Source(mirror, "bookworm-updates", ("main",), keyring),
        Source("http://inline.example/debian", "bookworm", ("main",), ""),
    ]


def test_one_line() -> None:
    text = """
    # deb http://off.example/debian bookworm main
    deb-src http://mirror.example.org/debian bookworm main
    deb [arch=amd64 signed-by=/k.gpg] http://mirror/debian/ bookworm main contrib # ours
    deb http://flat.example/ ./
    """
    assert parse_one_line(text) == [
        Source("http://mirror/debian", "bookworm", ("main", "contrib"), "/k.gpg"),
        Source("http://flat.example", "./", (), ""),
    ]


def test_the_machines_own_release_is_chosen_among_others() -> None:
    own = Source("http://mirror.example.org/debian", "bookworm", ("main",))
    others = [
        Source("https://packages.example/apt", "cloud-sdk-bookworm", ("main",)),
        Source("https://deb.example/node", "nodistro", ("main",)),
        Source("http://security.example.org/debian-security", "bookworm-security", ("main",)),
        Source("https://download.example/debian", "bookworm", ("stable",)),
        Source("mirror+file:/etc/apt/mirrors", "bookworm", ("main",)),
    ]
    assert choose([*others, own], "bookworm") == own
    with pytest.raises(LabError, match="bookworm"):
        choose(others, "bookworm")


def test_read_machine(tmp_path: Path) -> None:
    assert codename('ID=debian\nVERSION_CODENAME=trixie\nVERSION="13 (x)"\n') == "trixie"
    assert codename("ID=alpine\n") == ""
    folder = tmp_path / "apt" / "sources.list.d"
    folder.mkdir(parents=True)
    (tmp_path / "os-release").write_text("VERSION_CODENAME=bookworm\n")
    (folder / "debian.sources").write_text(DEB822)
    (folder / "old.sources.save").write_text("Types: deb\nURIs: http://saved/\nSuites: bookworm\nComponents: main\n")
    assert read_machine(tmp_path).uri == "http://mirror.example.org/debian"
    (tmp_path / "apt" / "sources.list").write_text("deb http://first.example/debian bookworm main\n")
    assert read_machine(tmp_path).uri == "http://first.example/debian"
