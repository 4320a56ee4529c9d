# SPDX-License-Identifier: GPL-3.0-or-later
"""The archive is made of a real registry's images by skopeo, of charts, files, wheels and collections, and resumed."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gzip
import hashlib
import http.server
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import local_registry
import played_galaxy
import ports
import pytest
import real_skopeo
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._core import plan
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import Done
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap import (
    archive,
    download,
    download_python,
    fetched,
    pack,
    programs,
    progress,
)
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap.download_python import _packed, manifest_of
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap.store import Store
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap.table import listed
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap.web import Answer
from ansible_runs import ROOT, ansible, write_inventory
from test_airgap_archive import keys  # noqa: F401

TABLE = {"files": {}, "wheels": {}}
# Types of an image's documents, and of its layers.
TYPES = {
    "oci": ("application/vnd.oci.image.{}.v1+json", "application/vnd.oci.image.layer.v1.tar+gzip"),
    "docker": ("application/vnd.docker.distribution.{}.v2+json", "application/vnd.docker.image.rootfs.diff.tar.gzip"),
}


def item(kind, name, version="", **more):
    """An item of the list."""
    empty = dict.fromkeys(("id", "digest", "source", "key", "place", "licence"), "")
    lists = {field: [] for field in ("architectures", "indexes", "variables", "hosts")}
    own = {"kind": kind, "id": f"{kind}s/{name}", "name": name, "version": version, "platforms": {}}
    return {**empty, **lists, **own, **more}


def image(registry, name, tag="1", **more):
    source = f"{registry.host}/{name}:{tag}"
    return item("image", source, source=source, **{"architectures": ["amd64"], **more})


class Registry:
    """A real registry, into which images are pushed by skopeo; it counts requests by its access log."""

    def __init__(self, running, folder):
        self.host, self.log, self.folder = running.host, folder / "log", folder
        home = folder / "home/.config/containers"
        home.mkdir(parents=True)
        (home / "policy.json").write_text(json.dumps({"default": [{"type": "insecureAcceptAnything"}]}))
        (home / "registries.conf").write_text(f'[[registry]]\nlocation = "{self.host}"\ninsecure = true\n')
        self.environment = {
            "HOME": str(folder / "home"),
            "CONTAINERS_REGISTRIES_CONF": str(home / "registries.conf"),
            # The layout is on the tests' disk, and so are skopeo's own unfinished files.
            "TMPDIR": str(folder),
        }
        self.skopeo = real_skopeo.program()

    def run(self, argv, timeout=60, folder=None, also=None, watch=None):
        """Runs programs, skopeo with this registry's settings."""
        if argv[0] != "skopeo":
            return programs.run(argv, timeout, folder, also, watch)
        return programs.run([self.skopeo, *argv[1:]], timeout, folder, self.environment, watch)

    def push(self, name, content, tag="1", kind="oci", size=0):
        """Push an image for two platforms; returns the digest of its index."""
        folder = self.folder / "image"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        form, layer_type = TYPES[kind]
        index, manifest = ("index", "manifest") if kind == "oci" else ("manifest.list", "manifest")

        def blob(data, media, suffix="", **more):
            digest = hashlib.sha256(data).hexdigest()
            (folder / f"{digest}{suffix}").write_bytes(data)
            return {"mediaType": media, "digest": f"sha256:{digest}", "size": len(data), **more}

        rows = []
        for architecture in ("amd64", "arm64"):
            layer = io.BytesIO()
            with tarfile.open(fileobj=layer, mode="w") as tar:
                for text, noise in ((f"{content} {architecture}".encode(), 0), (os.urandom(size), size)):
                    member = tarfile.TarInfo(f"file{noise}")
                    member.size = len(text)
                    tar.addfile(member, io.BytesIO(text))
            plain = layer.getvalue()
            config = {
                **{"architecture": architecture, "os": "linux", "config": {}},
                "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(plain).hexdigest()}"]},
            }
            kind_of_config = (
                "application/vnd.docker.container.image.v1+json" if kind == "docker" else form.format("config")
            )
            document = {
                **{"schemaVersion": 2, "mediaType": form.format(manifest)},
                "config": blob(json.dumps(config).encode(), kind_of_config),
                "layers": [blob(gzip.compress(plain, mtime=0), layer_type)],
            }
            platform = {"architecture": architecture, "os": "linux"}
            text = json.dumps(document, indent=1).encode()
            rows.append(blob(text, form.format(manifest), ".manifest.json", platform=platform))
        text = json.dumps({"schemaVersion": 2, "mediaType": form.format(index), "manifests": rows}, indent=2).encode()
        (folder / "manifest.json").write_bytes(text)
        (folder / "version").write_text("Directory Transport Version: 1.1\n")
        target = f"docker://{self.host}/{name}:{tag}"
        done = self.run(["skopeo", "copy", "--quiet", "--all", "--preserve-digests", f"dir:{folder}", target])
        assert done.rc == 0, done.err
        return f"sha256:{hashlib.sha256(text).hexdigest()}"

    @contextlib.contextmanager
    def requests(self):
        """Collects the paths of blobs and manifests that are read meanwhile."""
        found = {"blobs": [], "manifests": []}
        before = self.log.stat().st_size
        yield found
        for kind, digest in re.findall(r'"GET /v2/\S+/(blobs|manifests)/(\S+) HTTP', self.log.read_text()[before:]):
            found[kind].append(digest)


@pytest.fixture(scope="module")
def registry(tmp_path_factory):
    folder = tmp_path_factory.mktemp("registry")
    try:
        with local_registry.running(folder) as running:
            yield Registry(running, folder)
    except LookupError as error:
        pytest.skip(str(error))


CHART = b"a chart"
KEY = b"a key"
FILES = {
    "https://charts.example.org/hami/index.yaml": b"entries: {hami: [{version: 2.10.0, urls: [hami-2.10.0.tgz]}]}",
    "https://charts.example.org/hami/hami-2.10.0.tgz": CHART,
    "https://keys.example.org/cuda/debian12/3bf863cc.pub": KEY,
    "http://plain.example.org/file": b"x",
    "https://get.example.org/helm-linux-arm64.tar.gz": b"helm of arm64",
}
for _place in ("http://plain.example.org", "https://listed.example.org"):
    _row = f"version: 2.10.0, urls: [hami-2.10.0.tgz], digest: {hashlib.sha256(CHART).hexdigest()}"
    FILES[f"{_place}/hami-2.10.0.tgz"] = CHART
    FILES[f"{_place}/index.yaml"] = f"entries: {{hami: [{{{_row}}}]}}".encode()


def fetch(url, until, largest=0, headers=None):
    """A web server's answers."""
    content = FILES.get(url)
    return Answer(404) if content is None else Answer(200, content, headers={"Content-Length": str(len(content))})


def chart(**more):
    digest = f"sha256:{hashlib.sha256(CHART).hexdigest()}"
    known = {"version": "2.10.0", "source": "https://charts.example.org/hami", "digest": digest}
    return item("chart", "hami", **{**known, **more})


def key(**more):
    digest = f"sha256:{hashlib.sha256(KEY).hexdigest()}"
    source = "https://keys.example.org/cuda/debian12/3bf863cc.pub"
    return item("file", "debian12/3bf863cc.pub", **{"source": source, "digest": digest, **more})


class Made:
    """An archive that is made, by each call as a run of the playbook does."""

    def __init__(self, folder, program, **settings):
        self.settings = download.Settings(str(folder), **settings)
        self.folder = folder
        self.program = program
        self.told = []

    def __call__(self, *items, check=False, program=None):
        program = program or self.program
        wanted = download.requested(items, TABLE, self.settings, program, fetch)
        self.told = []
        work = download.Download(wanted, self.settings, self.told.append, program)
        work.require()
        return plan.run(work, check, work.summary)

    def read(self, key_file=""):
        return archive.read(str(self.folder), key_file)


def test_an_archive_of_a_real_registry_there_and_back(tmp_path, registry, keys):  # noqa: F811
    digests = {kind: registry.push(f"there/{kind}", kind, kind=kind) for kind in TYPES}
    (tmp_path / "driver.run").write_bytes(b"runfile")
    runfile = item("file", "NVIDIA-Linux-580", place=str(tmp_path / "driver.run"), variables=["driver_runfile"])
    pinned = image(registry, "there/oci", digest=digests["oci"])
    items = [pinned, image(registry, "there/docker"), chart(), key(), runfile]
    items += [item("operator", "sso"), item("image", "localhost/x:1", source="localhost/x:1"), item("apt", "gcc")]
    tar = tmp_path / "archive.tar"
    make = Made(tmp_path / "a", registry.run, tar=str(tar), signing_key="own@example.org", gpg_home=keys["home"])
    assert make(*items, check=True)["changed"] and not make.folder.exists()
    result = make(*items)
    assert result["changed"] and make.told[0].startswith(f"1 of 5: image {registry.host}/there/oci:1 (")
    found = make.read(keys["own"])
    assert len(found.signed_by) == 40
    by_name = {entry["name"]: entry for entry in found.contents.items}
    assert {by_name[f"{registry.host}/there/{kind}:1"]["digest"] for kind in TYPES} == set(digests.values())
    assert by_name["hami"]["path"] == "charts/hami-2.10.0.tgz" and by_name["hami"]["bytes"] == len(CHART)
    folder = "files/keys.example.org_cuda_debian12"
    assert by_name["debian12/3bf863cc.pub"]["path"] == f"{folder}/3bf863cc.pub"
    assert by_name["NVIDIA-Linux-580"]["path"] == "files/driver.run"
    assert {each["name"]: each["reason"] for each in found.contents.left_out} == {
        **{"sso": "operator", "localhost/x:1": "made_elsewhere", "gcc": "not_resolved"}
    }
    # Both platforms of both, each blob once; what another registry gets has the same digests.
    assert sum(path.startswith("images/blobs/") for path in found.sums) == 2 * (1 + 2 * 3)
    for kind, digest in digests.items():
        assert pushed_again(registry, make.folder, digest, kind) == digest
    with tarfile.open(tar) as packed:
        names = packed.getnames()
    assert names[:3] == ["SHA256SUMS", "SHA256SUMS.asc", "contents.json"]
    assert set(names[2:]) == set(found.sums)
    # Another key signs it again, and nothing else changes.
    make.settings = dataclasses.replace(make.settings, signing_key="other@example.org")
    assert make(*items)["changed"] and make.read(keys["other"]).contents.items == found.contents.items
    # The second time a tag is asked for, of which nobody said a digest, and nothing else.
    stamp = tar.stat().st_mtime_ns
    with registry.requests() as asked:
        assert make(*items)["changed"] is False
    assert asked == {"blobs": [], "manifests": ["1"]} and tar.stat().st_mtime_ns == stamp


def pushed_again(registry, folder, digest, kind):
    """Push an image of the layout under another name, by a view that has it alone; returns the digest there."""
    view = registry.folder / "view"
    shutil.rmtree(view, ignore_errors=True)
    view.mkdir()
    index = json.loads((folder / "images/index.json").read_text())
    [row] = [row for row in index["manifests"] if row["digest"] == digest]
    (view / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [{**row, "annotations": {}}]}))
    shutil.copy(folder / "images/oci-layout", view)
    (view / "blobs").symlink_to(folder / "images/blobs")
    target = f"docker://{registry.host}/again/{kind}:1"
    done = registry.run(["skopeo", "copy", "--quiet", "--all", "--preserve-digests", f"oci:{view}", target])
    assert done.rc == 0, done.err
    done = registry.run(["skopeo", "inspect", "--raw", target])
    return f"sha256:{hashlib.sha256(done.out.encode()).hexdigest()}"


def test_only_what_has_changed_is_fetched_and_what_isnt_needed_goes(tmp_path, registry):
    for name in ("one", "two"):
        registry.push(f"changes/{name}", name)
    make = Made(tmp_path / "a", registry.run)
    one, two = (image(registry, f"changes/{name}") for name in ("one", "two"))
    make(one, two, chart())
    before = make.read()
    moved = registry.push("changes/two", "two, newer")
    with registry.requests() as asked:
        assert make(one, two, chart())["diff"][0]["after_header"] == f"image {two['source']}"
    assert len(asked["blobs"]) == 4
    after = make.read()
    assert [each["digest"] for each in after.contents.items if each["name"] == two["source"]] == [moved]
    assert len(after.sums) == len(before.sums) and after.sums != before.sums
    # Damaged on the disk: that blob alone comes again.
    blobs = list(make.folder.glob("images/blobs/sha256/*"))
    layers = {f"sha256:{path.name}" for path in blobs if path.read_bytes()[:2] == b"\x1f\x8b"}
    blob = next(path for path in blobs if f"sha256:{path.name}" in layers)
    blob.write_bytes(blob.read_bytes()[:-1])
    with pytest.raises(archive.Broken, match="has another content, or isn't complete"):
        make.read()
    with registry.requests() as asked:
        assert make(one, two, chart())["changed"]
    # skopeo reads the configurations of both platforms again, and no other layer.
    assert layers & set(asked["blobs"]) == {f"sha256:{blob.name}"} and len(asked["blobs"]) == 3
    assert make.read().contents.items == after.contents.items
    # What is no longer needed, and what never was.
    (make.folder / "charts/strange.tgz").symlink_to("/etc/passwd")
    (make.folder / "images/blobs/sha256" / ("0" * 64)).write_bytes(b"x")
    assert make(one)["changed"] and make(one)["changed"] is False
    assert {path.partition("/")[0] for path in make.read().sums} == {"images", "contents.json"}
    assert sum(path.startswith("images/blobs/") for path in make.read().sums) == 7
    assert not (make.folder / "charts").exists()


def test_images_of_one_repository_that_only_digests_name(tmp_path, registry):
    digests = [registry.push("digests/one", content, tag=f"v{number}") for number, content in enumerate(("a", "b"))]
    items = []
    for digest in digests:
        source = f"{registry.host}/digests/one@{digest}"
        items.append(item("image", source, source=source, architectures=["arm64"]))
    make = Made(tmp_path / "a", registry.run)
    make(*items)
    assert sorted(each["digest"] for each in make.read().contents.items) == sorted(digests)
    with registry.requests() as asked:
        assert make(*items)["changed"] is False
    assert asked == {"blobs": [], "manifests": []}


def test_a_chart_of_a_registry(tmp_path, registry):
    folder = tmp_path / "chart"
    folder.mkdir()
    rows = {}
    # As helm 3 pushes it.
    for name, content, media in (
        ("config", b'{"name": "hami"}', "application/vnd.cncf.helm.config.v1+json"),
        ("layer", CHART, "application/vnd.cncf.helm.chart.content.v1.tar+gzip"),
    ):
        digest = hashlib.sha256(content).hexdigest()
        (folder / digest).write_bytes(content)
        rows[name] = {"mediaType": media, "digest": f"sha256:{digest}", "size": len(content)}
    media = TYPES["oci"][0].format("manifest")
    document = {"schemaVersion": 2, "mediaType": media, "config": rows["config"], "layers": [rows["layer"]]}
    (folder / "manifest.json").write_text(json.dumps(document))
    (folder / "version").write_text("Directory Transport Version: 1.1\n")
    done = registry.run(
        ["skopeo", "copy", "--quiet", f"dir:{folder}", f"docker://{registry.host}/charts/hami:2.10.0_1"]
    )
    assert done.rc == 0, done.err
    make = Made(tmp_path / "a", registry.run)
    make(chart(source=f"oci://{registry.host}/charts/hami", version="2.10.0+1"))
    [found] = make.read().contents.items
    assert (make.folder / found["path"]).read_bytes() == CHART and found["path"] == "charts/hami-2.10.0+1.tgz"
    registry.push("charts/image", "no chart", tag="1.0.0")
    with pytest.raises(ShareError, match=r"charts/image:1\.0\.0 is no chart"):
        make(chart(source=f"oci://{registry.host}/charts/image", version="1.0.0"))


def test_a_file_of_this_machine_has_any_name(tmp_path):
    """Of a blank and of what addresses haven't becomes a line, in the archive alone; its folder has a blank, too."""
    kept = {
        **{"NVIDIA Linux-580.run": "NVIDIA_Linux-580.run", "of: ours (1)+2~b.tar": "of_ours_1_2_b.tar"},
        **{"x+1~b (2).run".replace(" ", ""): "x+1~b(2).run", ".hidden.run": "hidden.run", "驱动": "file"},
    }
    for name in kept:
        (tmp_path / name).write_text(name)
    files = [item("file", name, place=str(tmp_path / name), variables=["driver_runfile"]) for name in kept]
    make = Made(tmp_path / "on my disk", programs.run, tar=str(tmp_path / "an archive.tar"))
    make(*files)
    found = make.read()
    assert {entry["name"]: entry["path"] for entry in found.contents.items} == {
        name: f"files/{path}" for name, path in kept.items()
    }
    for name, path in kept.items():
        assert (make.folder / "files" / path).read_text() == name
    done = subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=make.folder, check=False)
    assert done.returncode == 0
    (tmp_path / "NVIDIA_Linux-580.run").write_text("another")
    other = item("file", "other", place=str(tmp_path / "NVIDIA_Linux-580.run"))
    with pytest.raises(BadInput, match=r"580\.run can't both be files/NVIDIA_Linux-580\.run in an archive: rename one"):
        make(*files, other)


def test_a_failure_leaves_what_is_there_and_the_next_run_goes_on(tmp_path, registry):
    digest = registry.push("fails/one", "one")
    make = Made(tmp_path / "a", registry.run)
    good, other = image(registry, "fails/one"), image(registry, "fails/none")
    wrong = chart(digest=f"sha256:{'0' * 64}")
    with pytest.raises(
        ShareError, match=r"2 of 3 can't be fetched: image .*/fails/none:1: skopeo can't copy it: .*"
    ) as e:
        make(good, other, wrong)
    assert [row["code"] for row in e.value.details["failed"]] == ["skopeo", "other_digest"]
    assert "chart hami 2.10.0: it has SHA-256" in str(e.value) and "the next run goes on" in str(e.value)
    with pytest.raises(archive.Broken, match="has no SHA256SUMS, so it isn't a complete archive"):
        make.read()
    with registry.requests() as asked:
        make(good, chart())
    assert asked == {"blobs": [], "manifests": ["1"]} and len(make.read().contents.items) == 2
    for more, code in (
        ({"digest": f"sha256:{'1' * 64}"}, "skopeo"),
        ({"source": f"{registry.host}/fails/one@{digest}", "digest": f"sha256:{'1' * 64}"}, "two_digests"),
        ({"architectures": ["amd64", "riscv64"]}, "architecture"),
    ):
        with pytest.raises(ShareError) as e:
            make({**good, **more})
        assert [row["code"] for row in e.value.details["failed"]] == [code]


@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [
        (Answer(404), "status", "3bf863cc.pub is answered with HTTP 404"),
        (Answer(503), "status", "3bf863cc.pub is answered with HTTP 503"),
        (Answer(200, KEY[:2], headers={"Content-Length": "5"}), "truncated", "3bf863cc.pub sent 2 of 5 bytes"),
        (Answer(200, b"changed"), "other_digest", "it has SHA-256 "),
        (Answer(0, failure="unreachable"), "unreachable", "3bf863cc.pub: it can't be reached from this machine"),
        (Answer(0, failure="tls"), "tls", "its certificate isn't one that this machine trusts"),
    ],
)
def test_a_file_that_is_missing_cut_off_or_another_is_one_sentence_and_the_others_come(
    tmp_path, monkeypatch, answer, code, said
):
    make = Made(tmp_path / "a", programs.run)
    real = fetch

    def failing(url, until, largest=0, headers=None):
        return answer if url == key()["source"] else real(url, until, largest, headers)

    monkeypatch.setitem(globals(), "fetch", failing)
    with pytest.raises(ShareError) as raised:
        make(key(), chart())
    text = str(raised.value)
    assert (
        "\n" not in text and text.startswith("1 of 2 can't be fetched: file debian12/3bf863cc.pub: ") and said in text
    )
    assert text.endswith(f"{make.folder} isn't a complete archive yet; what is there stays, and the next run goes on")
    assert [row["code"] for row in raised.value.details["failed"]] == [code]
    assert (make.folder / "charts/hami-2.10.0.tgz").read_bytes() == CHART and not (make.folder / "files").exists()
    monkeypatch.undo()
    assert make(key(), chart())["changed"] and make.told[0].startswith("1 of 1: file debian12/3bf863cc.pub")
    assert len(make.read().contents.items) == 2


def test_an_index_that_a_registry_changes_under_its_digest_is_refused(tmp_path, registry):
    digest = registry.push("lies/one", "one")

    def lying(argv, timeout=60, folder=None, also=None, watch=None):
        done = registry.run(argv, timeout, folder, also, watch)
        return dataclasses.replace(done, out=done.out.replace("amd64", "arm64")) if "--raw" in argv else done

    with pytest.raises(ShareError, match=rf"the registry has sha256:[0-9a-f]+, and the list {digest}"):
        Made(tmp_path / "a", lying)(image(registry, "lies/one", digest=digest))


def test_a_killed_run_is_taken_up_where_it_was(tmp_path, registry):
    items = []
    for name, kind in (("one", "oci"), ("two", "docker"), ("three", "oci")):
        registry.push(f"killed/{name}", name, kind=kind)
        items.append(image(registry, f"killed/{name}"))
    make = Made(tmp_path / "a", registry.run)

    def deadly(argv, timeout=60, folder=None, also=None, watch=None):
        if argv[1] == "copy" and "/two@" in str(argv):
            # Half of the image is there, as skopeo leaves it.
            (make.folder / "work.part/half").write_bytes(b"x")
            (make.folder / "images/oci-put-blob123").write_bytes(b"x")
            os.kill(os.getpid(), signal.SIGKILL)
        return registry.run(argv, timeout, folder, also, watch)

    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            make(*items, program=deadly)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    with pytest.raises(archive.Broken, match="isn't a complete archive"):
        make.read()
    with registry.requests() as asked:
        make(*items)
    names = [line.partition(": ")[2].partition(" (")[0] for line in make.told]
    assert names == [f"image {each['source']}" for each in items[1:]]
    assert len(asked["blobs"]) == 8 and len(make.read().contents.items) == 3
    assert not list(make.folder.glob("**/oci-put*")) and not (make.folder / "work.part").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_full_disk_is_one_sentence_and_the_next_run_goes_on(tmp_path, registry):
    registry.push("full/small", "small")
    registry.push("full/large", "large", size=4 << 20)
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=36M", "none", place], check=False).returncode != 0:
        pytest.skip("no file system can be mounted here")
    try:
        make = Made(place / "a", registry.run)
        items = [image(registry, "full/small"), image(registry, "full/large")]
        with pytest.raises(
            ShareError, match=rf"1 of 2 .*: the disk of {make.folder} is full: 40 MiB are .*the next run goes"
        ) as e:
            make(*items)
        assert e.value.details["failed"][0]["code"] == "full" and not (make.folder / "work.part").exists()
        subprocess.run(["mount", "-o", "remount,size=200M", place], check=True)
        make(*items)
        assert (
            make.told == [f"1 of 1: image {items[1]['source']} (size unknown; 0 of at least 0 MB done)"]
            and len(make.read().contents.items) == 2
        )
        subprocess.run(["mount", "-o", "remount,size=30M", place], check=True)
        packing = Made(place / "a", registry.run, tar=str(place / "a.tar"))
        with pytest.raises(BadInput, match=r"a\.tar can't be written: it needs .*; the folder .* is complete"):
            packing(*items)
        assert not list(place.glob("a.tar*")) and make.read()
    finally:
        subprocess.run(["umount", place], check=True)


def test_what_would_fail_in_the_end_is_refused_before_anything_changes(tmp_path, keys):  # noqa: F811
    def none(argv, timeout=60, folder=None, also=None, watch=None):
        return Done(127, "", "") if argv[0] == "skopeo" else programs.run(argv, timeout, folder, also, watch)

    folder = tmp_path / "a"
    with pytest.raises(BadInput, match=r"airgap_signing_key: gpg has no secret key nobody@example\.org"):
        Made(folder, none, signing_key="nobody@example.org", gpg_home=keys["home"])(chart())
    assert not folder.exists()
    with pytest.raises(
        ShareError, match=r"1 of 2 can't be fetched: .* this machine has no skopeo, which copies images: in"
    ):
        Made(folder, none)(item("image", "r.example.org/a:1", source="r.example.org/a:1"), chart())
    foreign = tmp_path / "home"
    foreign.mkdir()
    (foreign / "letter.txt").write_text("dear")
    with pytest.raises(BadInput, match=r"has letter\.txt, which is no part of an archive"):
        Made(foreign, none)(chart())
    assert (foreign / "letter.txt").read_text() == "dear"
    make = Made(tmp_path / "b", none)
    with (
        download.Download(download.Requested([], [], []), make.settings, print).store.alone(),
        pytest.raises(BadInput, match="another run writes into"),
    ):
        make(chart())


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (chart(version="9.9.9"), r"index\.yaml has no version 9\.9\.9 of it"),
        (chart(version="../x"), "isn't the version of a chart"),
        (chart(source="https://none.example.org"), r"none\.example\.org/index\.yaml is answered with HTTP 404"),
        (key(digest=f"sha256:{'0' * 64}"), r"it has SHA-256 [0-9a-f]{64}, and the list 0{64}"),
        (key(source="http://plain.example.org/file", digest=""), "neither a digest nor TLS says"),
        (
            item("file", "NVIDIA", place="/none/x.run", variables=["driver_runfile"]),
            r"x\.run \(driver_runfile\) isn't a f",
        ),
    ],
)
def test_files_and_charts_that_arent_the_right_ones(tmp_path, wanted, said):
    make = Made(tmp_path / "a", programs.run)
    with pytest.raises(ShareError, match=said):
        make(wanted)
    assert set(archive.files_of(str(make.folder))[0]) <= {"contents.json"}


def test_a_chart_without_a_pin_is_held_to_its_index_by_tls_or_refused_or_named(tmp_path):
    make = Made(tmp_path / "a", programs.run)
    variables = ["hami_chart_repo_url", "hami_chart_ref"]
    listed = chart(source="https://listed.example.org", digest="", variables=variables)
    plain = chart(source="http://plain.example.org", digest="", variables=variables)
    unlisted = chart(digest="", variables=variables)
    assert make(listed)["unverified"] == [] and make.read().contents.items[0]["name"] == "hami"
    for wanted, why in ((plain, "comes without TLS"), (unlisted, "has no digest of it")):
        with pytest.raises(ShareError, match=f"{why}, .* set hami_chart_sha256 to .*, or airgap_unverified: true"):
            make(wanted)
    # A digest of the list says enough, whoever sends the archive.
    assert make(chart(source="http://plain.example.org"))["unverified"] == []
    make.settings = dataclasses.replace(make.settings, unverified=True)
    for wanted in (plain, unlisted):
        assert make(wanted)["unverified"] == ["chart hami 2.10.0"]
    assert make(key(source="http://plain.example.org/file", digest=""))["unverified"] == ["file debian12/3bf863cc.pub"]
    assert make(plain)["changed"] and not make(plain)["changed"]
    make.settings = dataclasses.replace(make.settings, unverified=False)
    with pytest.raises(ShareError, match="comes without TLS"):
        make(plain)


def test_a_program_is_held_to_the_digest_of_its_architecture(tmp_path):
    make = Made(tmp_path / "a", programs.run, controller_architecture="arm64")
    digests = {"amd64": hashlib.sha256(b"other").hexdigest(), "arm64": hashlib.sha256(b"helm of arm64").hexdigest()}
    source = "https://get.example.org/helm-linux-{architecture}.tar.gz"
    more = {name: {"digest": f"sha256:{digest}"} for name, digest in digests.items()}
    helm = item("file", "helm", source=source, platforms=more)
    assert make(helm)["unverified"] == [] and make.read().contents.items[0]["sha256"] == digests["arm64"]
    with pytest.raises(ShareError, match="it has SHA-256 [0-9a-f]{64}, and the list " + digests["amd64"]):
        make({**helm, "platforms": {"arm64": more["amd64"]}})


def test_the_lists_own_program_has_a_digest_for_each_architecture():
    row = listed()["files"]["program/helm"]
    assert set(row["digests"]) == {"amd64", "arm64"} and "{architecture}" in row["url"]


def test_a_key_without_a_digest_is_held_to_its_fingerprint(tmp_path, keys):  # noqa: F811
    source = "https://keys.example.org/own.asc"
    FILES[source] = Path(keys["own"]).read_bytes()
    settings = download.Settings(str(tmp_path / "a"))

    def made(fingerprint):
        table = {"files": {"key/own": {"fingerprint": fingerprint}}, "wheels": {}}
        wanted = download.requested([key(id="files/key/own", digest="", source=source)], table, settings, fetcher=fetch)
        work = download.Download(wanted, settings, print)
        result = plan.run(work, False, work.summary)
        assert result["unverified"] == []
        return result

    with pytest.raises(ShareError, match="it has fingerprint .*, and the list " + "A" * 40):
        made("A" * 40)
    rows = subprocess.run(
        ["gpg", "--homedir", keys["home"], "--with-colons", "--list-keys", "own@example.org"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert made(re.findall("^fpr:*([0-9A-F]{40}):", rows, re.MULTILINE)[0])["changed"]


def test_a_server_that_sends_less_than_it_announces(tmp_path):
    class Cut(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"half")

        def log_message(self, *_arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Cut)
    url = f"http://127.0.0.1:{server.server_port}/file"
    settings = download.Settings(str(tmp_path / "a"))
    wanted = download.requested([key(source=url)], TABLE, settings)
    with ports.serving(server), pytest.raises(ShareError, match=r"/file sent 4 of 1000 bytes"):
        plan.run(download.Download(wanted, settings, print), False)


# --------------------------------------------------------------------------- wheels, collections, the script


def wheel(folder, name, script=""):
    """A real wheel, which may have a program."""
    stem = f"{name.replace('-', '_')}-1.0"
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        file.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        if script:
            file.writestr(
                f"{stem}.dist-info/entry_points.txt", "[console_scripts]\nansible-galaxy = fake_galaxy:main\n"
            )
            file.writestr("fake_galaxy.py", script)
        file.writestr(f"{stem}.dist-info/RECORD", "")
    return path


def installed(folder, name="share", version="1.1.0"):
    """A collection as ansible-galaxy installs it."""
    files = {"README.md": b"hello", "roles/x/tasks/main.yml": b"[]\n"}
    folder.mkdir()
    rows = [
        {"name": ".", "ftype": "dir", "chksum_sha256": None},
        {"name": "roles", "ftype": "dir", "chksum_sha256": None},
    ]
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
        rows.append({"name": path, "ftype": "file", "chksum_sha256": hashlib.sha256(content).hexdigest()})
    listed = json.dumps({"files": rows, "format": 1}).encode()
    (folder / "FILES.json").write_bytes(listed)
    about = {"name": "FILES.json", "ftype": "file", "chksum_sha256": hashlib.sha256(listed).hexdigest()}
    info = {"namespace": "kubegpu", "name": name, "version": version, "dependencies": {}}
    (folder / "MANIFEST.json").write_text(json.dumps({"collection_info": info, "file_manifest_file": about}))
    return folder


def test_a_wheel_of_another_versions_list_is_a_sentence():
    items = [item("wheel", "x", "==1.0", id="wheels/image/x")]
    with pytest.raises(BadInput, match="wheels/image/x isn't in this version's list"):
        download_python.wheels(items, {}, [], ["amd64"], [], programs.run)


def test_the_installed_collection_is_packed_as_it_was_installed(tmp_path):
    folder = installed(tmp_path / "c")
    made = _packed(folder, str(tmp_path / "one.tar.gz"))
    assert manifest_of(made) == {"namespace": "kubegpu", "name": "share", "version": "1.1.0"}
    with tarfile.open(made) as tar:
        assert tar.getnames()[:2] == ["MANIFEST.json", "FILES.json"]
        assert tar.extractfile("roles/x/tasks/main.yml").read() == b"[]\n"
    assert Path(made).read_bytes() == Path(_packed(folder, str(tmp_path / "two.tar.gz"))).read_bytes()
    (folder / "README.md").write_text("changed")
    with pytest.raises(Exception, match=r"README\.md isn't as it was installed"):
        _packed(folder, str(tmp_path / "three.tar.gz"))


GALAXY = """
import sys
def main():
    open(sys.prefix + "/asked", "w").write("\\n".join(sys.argv[1:]))
"""


def test_the_controllers_wheels_and_collections_and_its_script(tmp_path, monkeypatch):
    index = tmp_path / "index"
    index.mkdir()
    wheel(index, "ansible-core", GALAXY)
    locked = wheel(index, "nvidia-ml-py")
    # The base of the image isn't in this list, so its Python is any that it may have.
    monkeypatch.setattr(download_python, "PYTHONS", ("3.12",))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    own = _packed(installed(tmp_path / "own"), str(tmp_path / "kubegpu-share-1.1.0.tar.gz"))
    other = _packed(installed(tmp_path / "other", "other"), str(tmp_path / "other.tar.gz"))

    def program(argv, timeout=60, folder=None, also=None, watch=None):
        # As ansible-galaxy 2.19 does, November 2026: a tarball for each, and a list of them.
        if "galaxy" in argv:
            assert argv[3:7] == ["galaxy", "collection", "download", "kubegpu.other:>=1.0"] and argv[7] == "-p"
            shutil.copy(other, f"{argv[8]}/kubegpu-other-1.1.0.tar.gz")
            Path(argv[8], "requirements.yml").write_text("collections: []\n")
            return Done(0, "", "")
        return programs.run(argv, timeout, folder, also, watch)

    hashes = [hashlib.sha256(locked.read_bytes()).hexdigest(), "0" * 64]
    table = {"files": {}, "wheels": {"image/nvidia-ml-py": {"sha256": hashes}}}
    items = [
        item("wheel", "ansible-core", ">=0.9", id="wheels/controller/ansible-core"),
        item("wheel", "nvidia-ml-py", "==1.0", id="wheels/image/nvidia-ml-py"),
        item("collection", "kubegpu.other", ">=1.0"),
        item("collection", "kubegpu.share", "==1.1.0"),
    ]
    settings = download.Settings(str(tmp_path / "a"), collection=own)

    def made(rows):
        wanted = download.requested(items, rows, settings, program, fetch)
        return plan.run(download.Download(wanted, settings, print, program), False)

    assert made(table)["changed"] and made(table)["changed"] is False
    found = archive.read(str(tmp_path / "a"), "")
    assert {path for path in found.sums if "/" in path} == {
        *("wheels/ansible_core-1.0-py3-none-any.whl", "wheels/nvidia_ml_py-1.0-py3-none-any.whl"),
        *("collections/kubegpu-other-1.1.0.tar.gz", "collections/kubegpu-share-1.1.0.tar.gz"),
    }
    # Of the lock file's hashes none fits.
    with pytest.raises(
        ShareError, match=r"wheels of the servers' image for Python 3\.12 on amd64: pip can't download them"
    ):
        made({"files": {}, "wheels": {"image/nvidia-ml-py": {"sha256": ["1" * 64]}}})


@pytest.mark.long
def test_the_script_makes_the_controllers_environment(tmp_path, monkeypatch):
    for folder in ("wheels", "collections"):
        (tmp_path / "a" / folder).mkdir(parents=True)
    wheel(tmp_path / "a/wheels", "ansible-core", GALAXY)
    paths = ["collections/kubegpu-share-1.1.0.tar.gz", "collections/kubernetes-core-6.0.0.tar.gz"]
    for path in paths:
        (tmp_path / "a" / path).write_bytes(b"x")
    entries = [{"id": f"collections/{path}", "name": "", "path": path} for path in paths]
    path = "wheels/ansible_core-1.0-py3-none-any.whl"
    entries.append({"id": "wheels/controller/ansible-core", "name": "ansible-core", "path": path})
    script = tmp_path / "a/install-controller.sh"
    architecture = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
    script.write_text(download_python.script(entries, download.RUNNING, architecture))
    sums = {path: archive.sha256_of(str(tmp_path / "a" / path))[0] for path in archive.files_of(str(tmp_path / "a"))[0]}
    (tmp_path / "a/SHA256SUMS").write_text(archive.render_sums(sums))
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    environment = {**os.environ, "PYTHON": sys.executable}
    command = functools.partial(
        subprocess.run, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    # Somebody has added a wheel that pip likes better; SHA256SUMS doesn't list it.
    evil = wheel(tmp_path, "ansible-core", GALAXY.replace('"/asked"', '"/evil"'))
    evil.rename(tmp_path / "a/wheels/ansible_core-1.0-1-py3-none-any.whl")
    done = command(["sh", script, "venv"])
    assert not (tmp_path / "venv/evil").exists()
    assert done.returncode == 0 and f"Ansible is in {tmp_path}/venv/bin." in done.stdout, done.stderr
    asked = (tmp_path / "venv/asked").read_text().split("\n")
    assert asked[:4] == ["collection", "install", "--offline", "--force"] and asked[5].endswith("/site-packages")
    assert asked[6:] == paths
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\necho 2.7\n")
    other.chmod(0o755)
    done = subprocess.run(
        ["sh", script, "venv2"],
        cwd=tmp_path,
        env={**os.environ, "PYTHON": str(other)},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 1 and f"for Python {download.RUNNING} on " in done.stderr and "is 2.7 on " in done.stderr
    (tmp_path / "a/wheels/ansible_core-1.0-py3-none-any.whl").write_bytes(b"x")
    done = command(["sh", script, "venv2"])
    assert done.returncode == 1 and "isn't complete: copy it again" in done.stderr and not (tmp_path / "venv2").exists()


@pytest.mark.long
def test_ansible_galaxy_downloads_and_installs_offline(tmp_path, monkeypatch):
    tarball = Path(_packed(installed(tmp_path / "other", "other"), str(tmp_path / "other.tar.gz")))
    monkeypatch.setenv("ANSIBLE_HOME", str(tmp_path / "home"))
    make = Made(
        tmp_path / "a", programs.run, collection=_packed(installed(tmp_path / "own"), str(tmp_path / "own.tar.gz"))
    )
    with played_galaxy.galaxy(tarball.read_bytes(), manifest_of(str(tarball))) as address:
        monkeypatch.setenv("ANSIBLE_GALAXY_SERVER", address)
        make(item("collection", "kubegpu.other", ">=1.0"), item("collection", "kubegpu.share", "==1.1.0"))
    tarballs = sorted(str(path) for path in make.folder.glob("collections/*.tar.gz"))
    assert [os.path.basename(path) for path in tarballs] == ["kubegpu-other-1.1.0.tar.gz", "kubegpu-share-1.1.0.tar.gz"]
    place = str(tmp_path / "place")
    command = [sys.executable, "-m", "ansible", "galaxy", "collection", "install", "--offline", "-p", place, *tarballs]
    subprocess.run(command, check=True, capture_output=True)
    assert (tmp_path / "place/ansible_collections/kubegpu/share/roles/x/tasks/main.yml").is_file()


def test_an_older_archives_file_is_told_from_this_one(tmp_path):
    make = Made(tmp_path / "a", programs.run, tar=str(tmp_path / "a.tar"))
    make(chart())
    assert pack.is_packed(str(make.folder), make.settings.tar)
    content = Path(make.settings.tar).read_bytes()
    for damaged in (content[:2000], b"", b"junk" * 1000):
        Path(make.settings.tar).write_bytes(damaged)
        assert make(chart())["changed"] and Path(make.settings.tar).read_bytes() == content


def test_the_playbook_takes_a_list_where_neither_nodes_nor_cluster_can_be_reached(tmp_path):
    (tmp_path / "driver.run").write_bytes(b"runfile")
    items = [
        item("file", "NVIDIA-Linux-580", place=str(tmp_path / "driver.run"), variables=["driver_runfile"]),
        item("image", "r.example.org/a:1", source="r.example.org/a:1"),
    ]
    # As playbook airgap_list.yml writes it.
    rows = [{**each, "bytes": None} for each in items]
    (tmp_path / "needed.yml").write_text(yaml.safe_dump({"format": 1, "totals": [], "items": rows}))
    away = {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1}
    write_inventory(
        tmp_path,
        {"gpu_nodes": {"gpu1": away}},
        airgap_needed=str(tmp_path / "needed.yml"),
        airgap_folder=str(tmp_path / "a"),
        airgap_archive=str(tmp_path / "a.tar"),
        airgap_kinds=["file"],
    )
    playbook = str(ROOT / "playbooks/airgap_download.yml")
    done = ansible(tmp_path, "ansible-playbook", "-i", "hosts.yml", playbook)
    assert done.rc == 0 and "1 of 1: file NVIDIA-Linux-580" in done.text, done.text
    found = archive.read(str(tmp_path / "a"), "").contents
    assert [each["path"] for each in found.items] == ["files/driver.run"]
    assert [each["reason"] for each in found.left_out] == ["not_selected"] and (tmp_path / "a.tar").is_file()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"folder": ""}, "airgap_folder: name the folder"),
        ({"archive": "{folder}/a.tar"}, "airgap_archive: .* is in airgap_folder"),
        ({"archive": "/none/a.tar"}, "airgap_archive: the directory /none doesn't exist"),
        ({"controller_architecture": "s390x"}, "airgap_controller_architecture: 's390x' is none of amd64, arm64"),
        ({"controller_python": "3"}, "airgap_controller_python: '3' isn't a version such as 3.12"),
        ({"kinds": ["dog"]}, "airgap_kinds: dog is none of"),
        ({"auth_file": "/none"}, "airgap_source_auth_file: /none isn't a file"),
    ],
)
def test_bad_variables_are_named(tmp_path, given, said):
    defaults = {name: row.get("default") for name, row in download.ARGUMENTS.items()}
    folder = str(tmp_path / "a")
    params = {**defaults, "folder": folder, **{name: value for name, value in given.items()}}
    if "archive" in given:
        params["archive"] = given["archive"].replace("{folder}", folder)
    wheels = [item("wheel", "orjson", ">=3", id="wheels/controller/orjson")]
    with pytest.raises(BadInput, match=said):
        download.requested(wheels, TABLE, download.settings(params, wheels, "x86_64"))
    assert not os.path.exists(folder)


@pytest.mark.parametrize(
    "text", ["", "[]", "format: 1", "format: 1\nitems: [{kind: dog}]", "{a: [", "format: 2\nitems: [1]"]
)
def test_a_list_of_another_kind_is_refused(tmp_path, text):
    path = tmp_path / "needed.yml"
    path.write_text(text)
    with pytest.raises(BadInput, match=r"airgap_needed: .*needed\.yml isn't a list"):
        download.listed(str(path))
    with pytest.raises(BadInput, match=r"airgap_needed: .*none\.yml can't be read"):
        download.listed(str(tmp_path / "none.yml"))


# --------------------------------------------------------------------------- packages of machines


def repository(content=b"a package", **more):
    """A partial repository, as module airgap_packages returns it."""
    files = {"repository.asc": b"key", "dists/x/InRelease": b"signed", "pool/gcc_12_amd64.deb": content}
    rows = [
        {"path": path, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for path, data in files.items()
    ]
    about = {
        **{"manager": "apt", "name": "deb-example-org", "role": "distribution", "signed": ["metadata"]},
        **{"distribution": "debian", "release": "12", "architecture": "amd64", "suites": ["x"], "components": ["main"]},
        "path": "packages/apt/deb.example.org_debian12-amd64",
        "address": "http://deb.example.org/",
        "key": rows[0],
        "metadata": rows[1:2],
    }
    package = {**rows[2], "name": "gcc", "version": "12", "architecture": "amd64"}
    return files, {**about, "packages": [package], **more}


def on_its_host(folder, files, described):
    """Write a partial repository as a host of packages has it; returns its place below the folder."""
    remote = folder / described["path"]
    for path, content in files.items():
        (remote / path).parent.mkdir(parents=True, exist_ok=True)
        (remote / path).write_bytes(content)
    return remote


def test_the_packages_of_machines_are_fetched_once_and_become_part_of_the_archive(tmp_path):
    files, described = repository()
    remote = on_its_host(tmp_path / "remote", files, described)
    make = Made(tmp_path / "a", programs.run, repositories=(described["path"],))
    store = Store(str(make.folder))
    moved = []

    def transfer(source, target):
        moved.append(source)
        shutil.copy(source, target)

    fetched.Repositories([described]).fetch(store, str(tmp_path / "remote"), transfer)
    assert len(moved) == 3
    result = make(item("apt", "gcc", source="http://deb.example.org"), item("apt", "make"))
    assert download.lacking(result["left_out"]) == [
        "1 needed but not in the archive (make): put a host of the GPU nodes' distribution into group "
        "airgap_package_hosts, and run it again"
    ]
    found = make.read()
    assert [(each["name"], each["path"]) for each in found.contents.items] == [("gcc", described["path"])]
    assert [(each["name"], each["reason"]) for each in found.contents.left_out] == [("make", "not_resolved")]
    # Of a newer one what has changed.
    files, newer = repository(b"a newer package")
    for path, content in files.items():
        (remote / path).write_bytes(content)
    fetched.Repositories([newer]).fetch(store, str(tmp_path / "remote"), transfer)
    assert moved[3:] == [f"{tmp_path}/remote/{described['path']}/pool/gcc_12_amd64.deb"]
    assert make(item("apt", "gcc"))["changed"] and make.read().sums != found.sums
    # A machine whose file isn't the one that it has described.
    (remote / "pool/gcc_12_amd64.deb").write_bytes(b"a changed")
    with pytest.raises(ShareError, match=r"pool/gcc_12_amd64\.deb: it isn't what was described; what is there stays"):
        fetched.Repositories([described]).fetch(store, str(tmp_path / "remote"), transfer)
    # No machine has this repository any more.
    make.settings = dataclasses.replace(make.settings, repositories=())
    assert make()["changed"] and set(make.read().sums) == {"contents.json"}


END = "_debian12-amd64"
ROCKY = {"distribution": "rocky", "release": "9.6", "path": "packages/apt/x_rocky9.6-amd64"}


@pytest.mark.parametrize(
    "more",
    [
        {"path": f"packages/apt/../../x{END}"},
        {"path": f"packages/rpm/x{END}"},
        {"path": f"files/x{END}"},
        # Another machine's folder.
        {"path": "packages/apt/deb.example.org_rocky9.6-amd64"},
        {"release": "13"},
        {"packages": [{"path": "../x", "bytes": 1, "sha256": "0" * 64}]},
        {"packages": []},
        {"key": {"path": "k", "bytes": 1, "sha256": "x"}},
        {"metadata": None},
    ],
)
def test_what_a_machine_returns_stays_in_its_folder(more):
    with pytest.raises(ShareError, match="airgap_packages doesn't return repositories"):
        fetched.Repositories([repository(**more)[1]])


def test_a_machine_describes_no_repositories_of_another_one(tmp_path):
    own, foreign = repository()[1], repository(**ROCKY)[1]
    assert fetched.Repositories([own], [foreign, {"path": "nonsense"}]).descriptions.keys() == {own["path"]}
    with pytest.raises(ShareError, match=r"for debian-12-amd64 and rocky-9\.6-amd64, and a host is one of them"):
        fetched.Repositories([own, foreign])
    with pytest.raises(ShareError, match=r"two hosts of group airgap_package_hosts describe .* for rocky-9\.6-amd64"):
        fetched.Repositories([foreign], [repository(**{**ROCKY, "address": "http://rocky.example.org/"})[1]])
    with pytest.raises(ShareError, match=r"returned packages/apt/deb\.example\.org_debian12-amd64 twice"):
        fetched.Repositories([own, own])


def test_each_line_says_how_far_all_of_it_is():
    told = []
    count = progress.Progress(told.append, [2_000_000, None, 500_000_000])
    for name, size in (("a", 3_000_000), ("b", 40_000_000), ("c", 500_000_000)):
        count.begin(name)
        count.end(size)
    assert told == [
        "1 of 3: a (2 MB; 0 of at least 502 MB done)",
        "2 of 3: b (size unknown; 3 of at least 503 MB done)",
        "3 of 3: c (500 MB; 43 of 543 MB done)",
    ]


def test_a_large_one_says_how_far_it_is(tmp_path, monkeypatch, registry):
    """By what the program has written: of skopeo with a real registry, and of one that writes a while."""
    monkeypatch.setattr(programs, "LOOK", 0.1)
    seen = []
    script = "import sys, time\nfor _ in range(6):\n    sys.stderr.write('x' * 1000000)\n    time.sleep(0.2)"
    done = programs.run([sys.executable, "-c", script], watch=seen.append)
    assert done.rc == 0 and len(done.err) > 0 and len(seen) >= 4
    assert seen == sorted(seen) and 0 < seen[-2] < 12_000_000
    # Without it a program is only waited for, and what doesn't end is ended as before.
    assert programs.run(["sleep", "5"], timeout=0.3, watch=seen.append).rc == programs.TIMED_OUT
    registry.push("large/one", "one", size=12 << 20)
    monkeypatch.setattr(programs, "LOOK", 0.02)
    monkeypatch.setattr(progress, "EVERY", 0.0)
    make = Made(tmp_path / "a", registry.run)
    make(image(registry, "large/one"))
    first, *others = make.told
    assert "size unknown" in first and others and all(row.endswith(" MB so far") for row in others), make.told


def test_how_far_a_large_one_is_has_no_more_than_all_of_it():
    told = []
    seconds = 0
    count = progress.Progress(told.append, [2_000_000_000, None], lambda: seconds)
    count.begin("a")
    for written in (0, 500_000_000, 2_100_000_000, None):
        # It is asked more often than it says something.
        seconds += 29
        count.within(1)
        seconds += 1
        count.within(written)
    count.end(2_000_000_000)
    count.begin("b")
    seconds += 30
    count.within(7_000_000)
    assert [row.rpartition(": ")[2] for row in told if "done" not in row] == [
        "0 of 2000 MB so far",
        "500 of 2000 MB so far",
        "2000 of 2000 MB so far",
        "still being copied",
        "7 MB so far",
    ]
    assert told[1].startswith("1 of 2: a: ") and told[-1] == "2 of 2: b: 7 MB so far"
