# SPDX-License-Identifier: GPL-3.0-or-later
"""The import of an image archive on a node."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, NotInEffect
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import Done
from ansible_collections.kubegpu.share.plugins.module_utils._images import image_archive as images_archive
from ansible_collections.kubegpu.share.plugins.module_utils._images import names
from ansible_collections.kubegpu.share.plugins.module_utils._images.import_archive import ensure, make_plan
from ansible_collections.kubegpu.share.plugins.module_utils._rancher.settings import K3S, RKE2, Kind
from fake_node import FakeNode
from runtime_kit import show_unit

SHA = "ab" * 32
REFERENCE = "localhost/kubegpu/gpushare:1.1.0"
HEAD = "REF TYPE DIGEST SIZE PLATFORMS LABELS\n"


def row(name: str, labels: str) -> str:
    return f"{name} application/vnd.docker.distribution.manifest.v2+json sha256:12 366.1 MiB linux/amd64 {labels}\n"


@pytest.mark.parametrize(
    ("reference", "full"),
    [
        ("gpushare", "docker.io/library/gpushare:latest"),
        ("gpushare:1", "docker.io/library/gpushare:1"),
        ("me/gpushare", "docker.io/me/gpushare:latest"),
        ("docker.io/gpushare:1", "docker.io/library/gpushare:1"),
        ("localhost/a/b:1", "localhost/a/b:1"),
        ("registry:5000/a", "registry:5000/a:latest"),
        ("r.example/a@sha256:00", "r.example/a@sha256:00"),
    ],
)
def test_full_reference(reference: str, full: str) -> None:
    assert names.full_reference(reference) == full


def test_archives_in_a_listing() -> None:
    listing = HEAD + row(REFERENCE, f"io.cri-containerd.image=managed,kubegpu.share/archive={SHA}")
    listing += row("docker.io/library/pulled:1", "-") + row("docker.io/library/odd:1", "x.kubegpu.share/archive=no")
    found = names.archives(listing, [REFERENCE, "pulled:1", "odd:1", "absent:1"])
    assert found == {REFERENCE: SHA, "pulled:1": "", "odd:1": ""}


def test_plan() -> None:
    assert make_plan(REFERENCE, SHA, {REFERENCE: SHA}).empty
    assert make_plan(REFERENCE, SHA, {}).diff()[0]["before"] == ""
    assert make_plan(REFERENCE, SHA, {REFERENCE: "cd" * 32}).diff()[0]["before"] == f"archive: {'cd' * 32}\n"
    assert "another" in make_plan(REFERENCE, SHA, {REFERENCE: ""}).diff()[0]["before"]


def node(inside: str = REFERENCE, import_rc: int = 0) -> FakeNode:
    """A node whose ctr keeps images with labels."""
    made = FakeNode({})
    images: dict[str, str] = {}

    def ctr(argv: Sequence[str]) -> Done:
        words = list(argv[argv.index("images") + 1 :])
        if words[0] == "import":
            images.setdefault(names.full_reference(inside), "")
            return Done(import_rc, "", "ctr: unexpected media type" if import_rc else "")
        if words[0] == "label":
            images[words[1]] = ",".join(words[2:])
        return Done(0, HEAD + "".join(row(name, labels or "-") for name, labels in images.items()), "")

    made.answers = {"ctr": ctr, "systemctl": lambda argv: show_unit(1, "/opt/bin/containerd")}
    return made


def params(**changes: object) -> dict[str, object]:
    return {"reference": REFERENCE, "sha256": SHA, "remote_path": "/tmp/x/image.tar", **changes}


def test_an_import_labels_the_image_and_is_idempotent() -> None:
    made = node()
    assert ensure(params(), False, made)["changed"] is True
    assert names.observe(made, [REFERENCE]) == {REFERENCE: SHA}
    assert any("io.cri-containerd.pinned=pinned" in one for one in made.log)
    assert any(one.startswith("/opt/bin/ctr ") for one in made.log), "beside the daemon's binary"
    assert ensure(params(), False, made) == {"changed": False, "diff": []}
    assert ensure(params(sha256="cd" * 32), False, made)["changed"] is True


@pytest.mark.parametrize("changes", [{"remote_path": None}, {}])
def test_predictions_import_nothing(changes: dict[str, object]) -> None:
    made = node()
    assert ensure(params(**changes), "remote_path" not in changes, made)["changed"] is True
    assert not any(" import " in one or " label " in one for one in made.log)


def test_refusals() -> None:
    with pytest.raises(BadInput, match="action plugin"):
        ensure(params(sha256=None), False, node())
    with pytest.raises(BadInput, match=f"image_archive: it doesn't contain the image {REFERENCE}"):
        ensure(params(), False, node(inside="other:1"))
    with pytest.raises(NotInEffect, match="unexpected media type"):
        ensure(params(), False, node(import_rc=1))


@pytest.mark.parametrize(
    ("kind", "client"),
    [(K3S, "env K3S_DATA_DIR=/srv/rke2 CRI_CONFIG_FILE=/dev/null /usr/local/bin/k3s ctr"), (RKE2, "/srv/rke2/bin/ctr")],
    ids=["k3s", "rke2"],
)
def test_an_import_on_a_node_of_k3s_or_rke2(kind: Kind, client: str) -> None:
    made = node()
    made.files[kind.config] = "data-dir: /srv/rke2\n"
    made.answers |= {
        "env": made.answers["ctr"],
        "systemctl": lambda argv: (
            show_unit(1, f"/usr/local/bin/{kind.name} agent")
            if argv[2] == kind.units[1]
            else Done(0, "LoadState=not-found\nActiveState=inactive\nMainPID=0\n", "")
        ),
    }
    assert ensure(params(), False, made)["changed"] is True
    assert names.observe(made, [REFERENCE]) == {REFERENCE: SHA}
    address = "--address /run/k3s/containerd/containerd.sock"
    assert all(one.startswith(f"{client} {address} ") for one in made.log if " images " in one)


def test_without_containerd_there_are_no_images() -> None:
    made = FakeNode({}, {"ctr": lambda argv: Done(127, "", ""), "systemctl": lambda argv: Done(127, "", "")})
    assert names.observe(made, [REFERENCE]) == {}


def archive(path: Path, **members: object) -> str:
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as tar:
        for name, content in members.items():
            data = json.dumps(content).encode()
            info = tarfile.TarInfo(name.replace("_", "."))
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return str(path)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_docker_and_oci_archives(tmp_path: Path) -> None:
    docker = archive(tmp_path / "d.tar", manifest_json=[{"RepoTags": [REFERENCE]}, {"RepoTags": None}])
    images_archive.require(docker, REFERENCE)
    oci = {"manifests": [{"annotations": {"io.containerd.image.name": "docker.io/library/a:1"}}, {}]}
    images_archive.require(archive(tmp_path / "o.tar.gz", index_json=oci), "a:1")
    with pytest.raises(BadInput, match=r"image_archive: .*d\.tar contains localhost/kubegpu/gpushare:1\.1\.0, not b:1"):
        images_archive.require(docker, "b:1")


def test_invalid_archives(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("hello")
    with pytest.raises(BadInput, match=r"image_archive: .*plain isn't an image archive"):
        images_archive.require(str(plain), REFERENCE)
    with pytest.raises(BadInput, match=r"neither manifest\.json nor index\.json"):
        images_archive.require(archive(tmp_path / "e.tar", other_json={}), REFERENCE)
    with pytest.raises(BadInput, match=r"image_archive: .*nowhere can't be read: No such file"):
        images_archive.sha256(str(tmp_path / "nowhere"))


def test_sha256_is_cached_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.tar"
    file.write_text("one")
    first = images_archive.sha256(str(file))
    assert first == "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed"
    with monkeypatch.context() as patched:
        patched.setattr(images_archive, "_digest", lambda path: pytest.fail("read again"))
        assert images_archive.sha256(str(file)) == first
    file.write_text("other")
    assert images_archive.sha256(str(file)) != first


@pytest.mark.parametrize(
    ("reference", "parts"),
    [
        ("example.org:5000/a/b:v1", ("example.org:5000/a/b", "v1")),
        ("example.org:5000/a/b", ("example.org:5000/a/b", "")),
        ("example.org:5000/a:v1@sha256:ab", ("example.org:5000/a", "v1@sha256:ab")),
        ("example.org:5000/a@sha256:ab", ("example.org:5000/a@sha256", "ab")),
        ("b:v1@sha256:ab", ("b", "v1@sha256:ab")),
    ],
)
def test_references_with_digests(reference, parts):
    assert names.repository_and_tag(reference) == parts
    repository, tag = parts
    assert reference == (f"{repository}:{tag}" if tag else repository), "as charts write it"


def hostile(folder, *members):
    """An archive of members: name and content, or a TarInfo."""
    path = folder / "hostile.tar"
    with tarfile.open(path, "w") as archive:
        for one in members:
            if isinstance(one, tarfile.TarInfo):
                archive.addfile(one)
            else:
                member = tarfile.TarInfo(one[0])
                member.size = len(one[1])
                archive.addfile(member, io.BytesIO(one[1]))
    return str(path)


def special(kind, target="", name="manifest.json"):
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


NAMED = json.dumps([{"RepoTags": ["localhost/a:1"]}]).encode()


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ([("manifest.json", b"[" + b" " * (5 << 20) + b"]")], "manifest.json has 5242882 bytes"),
        ([("manifest.json", NAMED), ("manifest.json", b"[]")], "manifest.json is there 2 times"),
        ([("manifest.json", NAMED), ("./manifest.json", b"[]")], "manifest.json is there 2 times"),
        ([special(tarfile.SYMTYPE, "manifest.json")], "manifest.json isn't a file"),
        ([special(tarfile.LNKTYPE, "manifest.json")], "manifest.json isn't a file"),
        ([special(tarfile.SYMTYPE, "/etc/passwd")], "manifest.json isn't a file"),
        ([special(tarfile.CHRTYPE)], "manifest.json isn't a file"),
        ([special(tarfile.FIFOTYPE)], "manifest.json isn't a file"),
        ([("manifest.json", b"[" * 100_000)], "isn't an image archive"),
        ([("manifest.json", b"7")], "isn't an image archive"),
        ([("index.json", b'{"manifests": [7]}')], "isn't an image archive"),
        ([("/manifest.json", NAMED), ("../manifest.json", NAMED)], "neither manifest.json nor index.json"),
    ],
)
def test_hostile_archives_are_refused(tmp_path, members, words):
    with pytest.raises(BadInput, match=words):
        images_archive.require(hostile(tmp_path, *members), "localhost/a:1")


def test_an_archive_that_isnt_the_expected_one_is_refused(tmp_path):
    path = hostile(tmp_path, ("manifest.json", NAMED))
    digest = images_archive.sha256(path)
    assert images_archive.sha256_of(path, digest.upper()) == images_archive.sha256_of(path, "") == digest
    with pytest.raises(BadInput, match=f"has SHA-256 {digest}, and gpushare_image_archive_sha256 is {'0' * 64}"):
        images_archive.sha256_of(path, "0" * 64)
