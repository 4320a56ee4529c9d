# SPDX-License-Identifier: GPL-3.0-or-later
"""The archive's boundary: paths, contents.json, SHA256SUMS, and signatures by a real key."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core import paths
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap import archive, signature
from lab_repository import skip_without

CHART = {
    **dict.fromkeys(("id", "digest", "source", "key", "place", "licence"), ""),
    **{name: [] for name in ("architectures", "indexes", "variables", "hosts")},
    **{"kind": "chart", "name": "hami", "version": "2.10.0", "platforms": {}},
    **{"path": "charts/hami-2.10.0.tgz", "bytes": 5, "sha256": hashlib.sha256(b"chart").hexdigest()},
    **{"image": "", "request_sha256": ""},
}


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """gpg's folder with two keys, and their public halves: armoured files by name."""
    skip_without("gpg", "gpgv")
    # Longer paths than 108 characters can't be those of gpg-agent's socket.
    home = tmp_path_factory.mktemp("gpg")
    home.chmod(0o700)
    found = {"home": str(home)}
    gpg = ["gpg", "--homedir", home, "--batch", "--quiet", "--no-tty"]
    for name in ("own", "other"):
        mail = f"{name}@example.org"
        subprocess.run([*gpg, "--passphrase", "", "--quick-generate-key", mail, "ed25519", "sign", "1y"], check=True)
        found[name] = str(home / f"{name}.asc")
        subprocess.run([*gpg, "--armor", "--output", found[name], "--export", mail], check=True)
    yield found
    subprocess.run(["gpgconf", "--homedir", home, "--kill", "gpg-agent"], check=False)


def made(folder, *items):
    """A folder with one chart, contents.json and SHA256SUMS."""
    (folder / "charts").mkdir(parents=True)
    (folder / "charts/hami-2.10.0.tgz").write_bytes(b"chart")
    (folder / "contents.json").write_text(archive.render(archive.Contents("2026-11-29T12:00:00Z", items or (CHART,))))
    return summed(folder)


def summed(folder):
    found, faults = archive.files_of(str(folder))
    assert not faults
    sums = {path: archive.sha256_of(str(folder / path))[0] for path in found}
    (folder / "SHA256SUMS").write_text(archive.render_sums(sums))
    return str(folder)


def test_a_folder_there_and_back(tmp_path):
    folder = made(tmp_path / "a")
    found = archive.read(folder, "")
    assert found.contents.items == (CHART,) and found.signed_by == ""
    assert set(found.sums) == {"contents.json", "charts/hami-2.10.0.tgz"}
    # What is being written is no part of it, and sha256sum reads the list.
    (tmp_path / "a/charts/other.tgz.part").write_bytes(b"half")
    assert archive.read(folder, "") == found
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=folder, check=True)


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda folder: (folder / "charts/hami-2.10.0.tgz").write_bytes(b"CHART"), "other_content"),
        (lambda folder: (folder / "charts/hami-2.10.0.tgz").write_bytes(b"cha"), "other_content"),
        (lambda folder: (folder / "charts/hami-2.10.0.tgz").unlink(), "missing"),
        (lambda folder: (folder / "charts/more.tgz").write_bytes(b"x"), "unlisted"),
        (lambda folder: (folder / "charts/link.tgz").symlink_to("/etc/passwd"), "not_a_file"),
        (lambda folder: (folder / "outside").symlink_to("/etc"), "not_a_file"),
        (lambda folder: os.mkfifo(folder / "charts/pipe"), "not_a_file"),
    ],
)
def test_what_isnt_as_it_was_made_is_refused_by_its_path(tmp_path, damage, code):
    folder = made(tmp_path / "a")
    damage(tmp_path / "a")
    with pytest.raises(archive.Broken, match="nothing was changed") as error:
        archive.read(folder, "")
    assert [fault["code"] for fault in error.value.details["faults"]] == [code]


def test_a_blob_has_the_digest_that_its_name_says(tmp_path):
    folder = tmp_path / "a"
    made(folder)
    (folder / "images/blobs/sha256").mkdir(parents=True)
    (folder / "images/blobs/sha256" / ("0" * 64)).write_bytes(b"another layer")
    summed(folder)
    with pytest.raises(archive.Broken, match="another content"):
        archive.read(str(folder), "", whole=False)


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../a", "charts/../../a", "charts//a", "", "./a", "a\nb", "a\\b", "a/.b", "a b", 1]
)
def test_paths_stay_below_the_folder(tmp_path, path):
    with pytest.raises(ValueError, match="isn't a path"):
        paths.file_path(path)
    folder = made(tmp_path / "a", {**CHART, "path": path})
    with pytest.raises(archive.Broken, match=r"contents\.json isn't the list of an archive"):
        archive.read(folder, "")
    if isinstance(path, str):
        with pytest.raises(archive.Broken, match="isn't a list of SHA-256"):
            archive.parse_sums(f"{'0' * 64}  contents.json\n{'0' * 64}  {path}\n".encode(), "x")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"kind": "operator"}, "an archive has none"),
        ({"kind": "dog"}, "unknown kind 'dog'"),
        ({"path": "files/hami.tgz"}, "isn't in folder charts"),
        ({"bytes": True}, "isn't a number"),
        ({"sha256": ""}, "has no SHA-256"),
        ({"sha256": "A" * 64}, "isn't a SHA-256"),
        ({"platforms": {"amd64": {"digest": "x", "bytes": 1}}}, "aren't digests"),
        ({"kind": "image", "path": "images", "image": "a:1"}, "digest of"),
        ({"hosts": "gpu1"}, "isn't a list"),
        ({"kind": "wheel", "name": "git+https://e.example.org/x"}, "which is no name with versions"),
        ({"kind": "wheel", "name": "--index-url=http://e.example.org/"}, "which is no name with versions"),
        ({"kind": "wheel", "name": "x", "version": " @ file:///tmp/x"}, "which is no name with versions"),
        ({"kind": "collection", "name": "/tmp/x.tar.gz"}, "which is no name with versions"),
        ({"path": "charts/another.tgz"}, "which SHA256SUMS has not"),
        ({"sha256": "0" * 64}, "which SHA256SUMS has not, or has otherwise"),
    ],
)
def test_items_are_what_they_have_to_be(tmp_path, row, said):
    with pytest.raises(archive.Broken, match=said):
        archive.read(made(tmp_path / "a", {**CHART, **row}), "")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": 1}', "[" * 100_000, '{"format": 2, "items": []}'])
def test_other_texts_arent_contents(text):
    with pytest.raises(archive.Broken, match=r"isn't the list|reads format 1"):
        archive.parse(text.encode(), "contents.json")


@pytest.mark.parametrize(
    "text", [b"", b"0  a\n", b"\xff\n", f"{'0' * 64}  a\n".encode(), b"0" * 64 + b"  contents.json"]
)
def test_other_texts_arent_sums(text):
    with pytest.raises(archive.Broken, match="isn't a list of SHA-256"):
        archive.parse_sums(text, "SHA256SUMS")


def test_names_of_repositories_are_safe():
    assert paths.safe_name("https://m.example.org:8443/cuda/repos/debian12/x86_64/") == (
        "m.example.org_8443_cuda_repos_debian12_x86_64"
    )
    with pytest.raises(ValueError, match="neither a host"):
        paths.safe_name("https://../")
    assert paths.file_path(paths.safe_name("file://$(x)/../%2e")) == "x_.._2e"
    assert paths.safe_name("file:/srv/mirror/") == "srv_mirror"
    assert paths.file_path("a/.b/..c", hidden=True) == "a/.b/..c"
    for name in (".", "..", "...", "a/../b"):
        with pytest.raises(ValueError, match="isn't a path"):
            paths.file_path(name, hidden=True)
    # Addresses that begin alike stay two folders.
    long = "https://m.example.org/" + "a" * 200
    names = {paths.safe_name(long), paths.safe_name(f"{long}b")}
    assert len(names) == 2 and {len(name) for name in names} == {150}


def test_a_signature_is_verified_by_the_users_key(tmp_path, keys):
    folder = made(tmp_path / "a")
    with pytest.raises(archive.Broken, match="has no signature"):
        archive.read(folder, keys["own"])
    sums = os.path.join(folder, "SHA256SUMS")
    signature.sign(sums, f"{sums}.asc", "own@example.org", home=keys["home"])
    assert len(archive.read(folder, keys["own"]).signed_by) == 40
    with pytest.raises(archive.Broken, match=r"is by key [0-9A-F]+, which .*other.asc hasn't") as error:
        archive.read(folder, keys["other"])
    assert error.value.details["code"] == "archive_signature_unknown_key"
    both = tmp_path / "both.asc"
    both.write_text("".join(Path(keys[name]).read_text() for name in ("other", "own")))
    assert archive.read(folder, str(both)).signed_by
    (tmp_path / "a/charts/more.tgz").write_bytes(b"x")
    summed(tmp_path / "a")
    with pytest.raises(archive.Broken, match="was made for another content; nothing was changed"):
        archive.read(folder, keys["own"])


@pytest.mark.parametrize("junk", [b"", b"junk", b"-----BEGIN PGP SIGNATURE-----\n\nAAAA\n"])
def test_junk_signs_nothing(tmp_path, keys, junk):
    folder = made(tmp_path / "a")
    (tmp_path / "a/SHA256SUMS.asc").write_bytes(junk)
    with pytest.raises(archive.Broken, match="signature of SHA256SUMS is"):
        archive.read(folder, keys["own"])


def test_a_key_file_without_keys_is_named(tmp_path, keys):
    folder = made(tmp_path / "a")
    (tmp_path / "a/SHA256SUMS.asc").write_bytes(b"x")
    for name, said in ((str(tmp_path / "none"), "can't be read"), (f"{folder}/contents.json", "isn't a file of")):
        with pytest.raises(BadInput, match=rf"airgap_verification_key: .* {said}"):
            archive.read(folder, name)


def test_without_gpg_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadInput, match="no gpg; install"):
        signature.sign("/x", "/y", "own")
    (tmp_path / "key").write_bytes(b"\x99")
    with pytest.raises(BadInput, match="no gpgv; install"):
        signature.verify(b"x", b"x", str(tmp_path / "key"))
