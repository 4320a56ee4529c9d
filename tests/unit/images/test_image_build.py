# SPDX-License-Identifier: GPL-3.0-or-later
"""The build of the servers' image: idempotence, commands of each engine, and reproducible archives."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, NotInEffect, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import Done, RealSystem
from ansible_collections.kubegpu.share.plugins.module_utils._images import archives
from ansible_collections.kubegpu.share.plugins.module_utils._images import build as subject
from ansible_collections.kubegpu.share.plugins.module_utils._images import image_archive as images_archive
from ansible_collections.kubegpu.share.plugins.module_utils._images import sources as images_sources
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[3]
IMAGE = ROOT / "images" / "gpushare"
sys.path.insert(0, str(IMAGE))
import lock  # noqa: E402

REFERENCE = "registry.example.org/kubegpu/gpushare:1.1.0"
EPOCH = 1767225600
BASE_IMAGE = f"example.org:5000/base:1@sha256:{'a' * 64}"


def tar(members, mtime=0):
    """Return an archive of files (bytes), links (text) and directories (None) by name."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.mtime = mtime
            if isinstance(content, str):
                member.type, member.linkname = tarfile.SYMTYPE, content
            elif content is None:
                member.type = tarfile.DIRTYPE
            else:
                member.size = len(content)
            archive.addfile(member, io.BytesIO(content or b"") if member.isfile() else None)
    return target.getvalue()


BASE = tar({"etc/os": b"debian"}, mtime=1700000000)
FILES = {"opt": None, "opt/gpushare/a.py": b"a", "opt/gpushare/link": "a.py", subject.BILL: b'{"x": 1}\n'}


def saved(path, number, base=BASE):
    """Write an image as ``docker save`` does; the number is the build's time, the content is always the same."""
    now = f"2026-11-21T20:00:{number:02d}Z"
    layers = [base, tar(FILES, mtime=1800000000 + number)]
    config = {
        "architecture": "amd64",
        "os": "linux",
        "created": now,
        "container": f"c{number}",
        "container_config": {"Hostname": f"h{number}"},
        "config": {"Env": ["A=b"], "Cmd": ["x"], "Image": f"sha256:{number}", "Hostname": f"h{number}"},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]},
        "history": [
            {"created": "2025-01-01T00:00:00Z", "created_by": "ADD rootfs"},
            {"created": now, "created_by": 'LABEL title="gpushare servers"', "empty_layer": True},
            {"created": now, "created_by": "COPY dir:abc in /opt/gpushare", "comment": f"FROM {number:012x}"},
            {"created": now, "created_by": "CMD x", "empty_layer": True},
        ],
    }
    names = ("b/layer.tar", "o/layer.tar")
    manifest = [{"Config": "c.json", "RepoTags": ["local:1"], "Layers": names}]
    members = {"c.json": json.dumps(config).encode(), "manifest.json": json.dumps(manifest).encode()}
    path.write_bytes(tar({**dict(zip(names, layers, strict=True)), **members}, mtime=number))
    return path


def normalized(folder, number, **different):
    """Return the normalized archive of a build, as a file beside the archive itself."""
    source, target = saved(folder / f"saved{number}.tar", number, **different), folder / f"{number}.tar"
    archives.normalize(str(source), str(target), REFERENCE, EPOCH, subject.MARK)
    return target


def test_two_builds_give_the_same_bytes(tmp_path):
    assert normalized(tmp_path, 1).read_bytes() == normalized(tmp_path, 2).read_bytes()
    assert (tmp_path / "saved1.tar").read_bytes() != (tmp_path / "saved2.tar").read_bytes()
    with tarfile.open(tmp_path / "1.tar") as archive:
        [image] = json.load(archive.extractfile("manifest.json"))
        config = json.load(archive.extractfile(image["Config"]))
        layers = [archive.extractfile(name).read() for name in image["Layers"]]
    assert image["RepoTags"] == [REFERENCE]
    canonical = json.dumps(config, sort_keys=True, separators=(",", ":")).encode()
    assert image["Config"] == f"{hashlib.sha256(canonical).hexdigest()}.json"
    assert config["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(one).hexdigest()}" for one in layers]
    assert layers[0] == BASE, "the base's layer is unchanged"
    assert config["config"] == {"Env": ["A=b"], "Cmd": ["x"]} and config["architecture"] == "amd64"
    assert [one["created"] for one in config["history"]] == ["2025-01-01T00:00:00Z", *["2026-01-01T00:00:00Z"] * 3]
    with tarfile.open(fileobj=io.BytesIO(layers[1])) as layer:
        assert {member.name: member.mtime for member in layer} == dict.fromkeys(FILES, EPOCH)
        assert layer.getmember("opt/gpushare/link").linkname == "a.py"
        assert layer.extractfile("opt/gpushare/a.py").read() == b"a"


def test_compressed_layers_of_the_base_are_uncompressed(tmp_path):
    compressed = normalized(tmp_path, 1, base=gzip.compress(BASE, mtime=5))
    assert compressed.read_bytes() == normalized(tmp_path, 2).read_bytes()


def test_a_file_of_the_image(tmp_path):
    source = saved(tmp_path / "saved.tar", 1)
    assert archives.file_in(str(source), subject.BILL) == '{"x": 1}\n'
    assert archives.file_in(str(source), "etc/os") == "debian"
    assert archives.file_in(str(source), "opt/none") is None


@given(st.binary(max_size=300))
def test_invalid_archives_are_refused(junk):
    with tempfile.NamedTemporaryFile() as file:
        file.write(junk)
        file.flush()
        with pytest.raises(ShareError, match="isn't an image archive"):
            archives.normalize(file.name, f"{file.name}.new", REFERENCE, EPOCH, "x")


def test_a_foreign_image_is_refused(tmp_path):
    source = saved(tmp_path / "saved.tar", 1)
    with pytest.raises(ShareError, match="where the base ends"):
        archives.normalize(str(source), str(tmp_path / "x"), REFERENCE, EPOCH, "somebody else's")


PUSHED = f"sha256:{'5' * 64}"


class Machine(RealSystem):
    """A machine with simulated engines, which write the archives of ``saved``."""

    def __init__(self, folder, engines=("buildah",), machine="x86_64", fails="", buildx=True):
        super().__init__()
        self.folder, self.engines, self.machine, self.fails, self.buildx = folder, engines, machine, fails, buildx
        self.ran, self.builds = [], 0

    def run(self, argv, timeout=60, stdin=None):
        line = " ".join(argv)
        if argv[0] in ("mkdir", "tar", "mv"):
            done = subprocess.run(argv, capture_output=True, text=True, check=False)
            return Done(done.returncode, done.stdout, done.stderr)
        if argv[0] == "uname":
            return Done(0, f"{self.machine}\n", "")
        if argv[0] not in self.engines:
            return Done(127, "", "not found")
        if self.fails and self.fails in line:
            return Done(1, "", "first\nsecond\nthird\nthe end\n")
        if line.endswith((" --version", " info", "docker version")):
            return Done(0, "", "")
        if line.endswith(" buildx version"):
            return Done(int(not self.buildx), "", "")
        self.ran.append(line)
        if " push " in line and "docker-archive:" not in line:
            # The engine says what the registry has: docker in its output, the others in a file.
            for word in argv:
                if word.startswith("--digestfile="):
                    Path(word.partition("=")[2]).write_text(PUSHED)
            return Done(0, f"1.1.0: digest: {PUSHED} size: 1234\n", "")
        if argv[1] == "save":
            self._save(argv[2].partition("=")[2])
        elif argv[1] == "push" and argv[-1].startswith("docker-archive:"):
            self._save(argv[-1].split(":")[1])
        return Done(0, "", "")

    def _save(self, path):
        self.builds += 1
        saved(Path(path), self.builds)


@pytest.fixture(scope="module", autouse=True)
def packed(tmp_path_factory):
    """The sources, as the action plugin packs them."""
    PACKED["context"] = str(tmp_path_factory.mktemp("sources") / "context.tar")
    PACKED["sources"] = images_sources.pack(PACKED["context"])


PACKED = {}


def params(tmp_path, **more):
    usual = {name: spec.get("default") for name, spec in subject.ARGUMENTS.items()}
    return {**usual, "reference": REFERENCE, "folder": str(tmp_path / "out"), "base": BASE_IMAGE, **PACKED, **more}


def work(machine, given, check=False):
    return subject.ensure(given, check, machine)


@pytest.mark.parametrize("engine", subject.ENGINES)
def test_a_build_is_idempotent(tmp_path, engine):
    machine, given = Machine(tmp_path, [engine]), params(tmp_path)
    assert work(machine, given, check=True)["changed"] and machine.ran == []
    done = work(machine, given)
    assert done["changed"]
    out = f"{tmp_path}/out/gpushare-1.1.0"
    assert done["archives"] == {f"linux/{one}": f"{out}-{one}.tar" for one in ("amd64", "arm64")}
    for path in done["archives"].values():
        images_archive.require(path, REFERENCE)
    assert {Path(path).read_text() for path in done["bills"].values()} == {'{"x": 1}\n'}
    ends = ("-amd64.tar", "-arm64.tar", "-amd64.cdx.json", "-arm64.cdx.json", ".json")
    assert {str(path) for path in (tmp_path / "out").iterdir()} == {out + end for end in ends}
    before = list(machine.ran)
    assert not work(machine, given)["changed"] and machine.ran == before
    built = [line for line in before if " build " in line]
    assert len(built) == 2 and all(f"--build-arg=SOURCE_DATE_EPOCH={EPOCH}" in line for line in built)
    if engine == "docker":
        assert [" --platform=linux/arm64 " in line for line in built] == [False, True]
        assert all("--build-arg=BUILDPLATFORM=linux/amd64" in line for line in built)
    else:
        for platform, line in zip(subject.PLATFORMS, built, strict=True):
            assert f" --platform={platform} --timestamp={EPOCH} " in line


OTHER_NAME = "registry.example.org/gpushare:1.1.0"


@pytest.mark.parametrize(
    "change", [{"sources": "ab" * 32}, {"base": "debian@sha256:1"}, {"epoch": 5}, {"reference": OTHER_NAME}]
)
def test_changed_inputs_rebuild_the_archive(tmp_path, change):
    machine, given = Machine(tmp_path), params(tmp_path, platforms=["linux/amd64"])
    work(machine, given)
    changed = {**given, **change}
    assert work(machine, changed, check=True)["changed"]
    assert work(machine, changed)["changed"] and not work(machine, changed)["changed"]


@pytest.mark.parametrize("loss", ["gone", "other"])
def test_a_changed_archive_is_rebuilt(tmp_path, loss, monkeypatch):
    machine, given = Machine(tmp_path), params(tmp_path)
    archive = Path(work(machine, given)["archives"]["linux/arm64"])
    archive.unlink() if loss == "gone" else archive.write_bytes(b"x")
    read, digest_of = [], subject.archives.digest_of
    monkeypatch.setattr(subject.archives, "digest_of", lambda path: read.append(path) or digest_of(path))
    assert [one["after_header"] for one in work(machine, given, check=True)["diff"]] == [str(archive)]
    assert len(read) == len(given["platforms"]), "a prediction reads each archive once"
    work(machine, given)
    assert machine.builds == 3 and not work(machine, given)["changed"]


def test_a_new_platform_builds_only_its_archive(tmp_path):
    machine = Machine(tmp_path)
    work(machine, params(tmp_path, platforms=["linux/amd64"]))
    work(machine, params(tmp_path))
    assert machine.builds == 2
    assert not work(machine, params(tmp_path, platforms=["linux/arm64"]))["changed"]


@pytest.mark.parametrize("engine", subject.ENGINES)
def test_a_failure_is_reported_and_the_next_run_continues(tmp_path, engine):
    machine, given = Machine(tmp_path, [engine], fails="gpushare-1.1.0-arm64.tar"), params(tmp_path)
    with pytest.raises(NotInEffect, match=f"{engine} (push|save) failed: second | third | the end"):
        work(machine, given)
    machine.fails = ""
    work(machine, given)
    assert machine.builds == 2, "the finished archive is kept"
    assert not work(machine, given)["changed"]


@pytest.mark.parametrize("engine", ["podman", "buildah"])
def test_all_platforms_are_pushed_as_one_reference(tmp_path, engine):
    machine, given = Machine(tmp_path, [engine], fails="docker://"), params(tmp_path, push=True, tls_verify=False)
    with pytest.raises(NotInEffect):
        work(machine, given)
    machine.fails = ""
    machine.ran.clear()
    done = work(machine, given)
    assert done["changed"], "only the push is missing"
    assert done["digest"] == PUSHED
    name, out = f"{REFERENCE}-list", f"{tmp_path}/out/gpushare-1.1.0"
    assert machine.ran == [
        f"{engine} manifest rm {name}",
        f"{engine} manifest create {name}",
        f"{engine} manifest add {name} docker-archive:{out}-amd64.tar",
        f"{engine} manifest add {name} docker-archive:{out}-arm64.tar",
        f"{engine} manifest push --all --tls-verify=false --digestfile={out}-amd64.tar.digest {name}"
        f" docker://{REFERENCE}",
        f"{engine} manifest rm {name}",
    ]
    again = work(machine, given)
    assert not again["changed"] and again["digest"] == PUSHED
    assert not work(machine, {**given, "push": False})["digest"]


@pytest.mark.parametrize("platforms", [["linux/amd64"], ["linux/amd64", "linux/arm64"]])
def test_docker_pushes_the_loaded_archives(tmp_path, platforms):
    machine, given = Machine(tmp_path, ["docker"]), params(tmp_path, push=True, platforms=platforms)
    assert work(machine, given)["digest"] == PUSHED
    pushed = [line for line in machine.ran if " push" in line or " load" in line or " create" in line]
    assert len([line for line in pushed if line.startswith("docker load --input=")]) == len(platforms)
    if len(platforms) == 1:
        assert pushed[-1] == f"docker push {REFERENCE}"
    else:
        assert pushed[-2:] == [
            f"docker manifest create --amend {REFERENCE} {REFERENCE}-amd64 {REFERENCE}-arm64",
            f"docker manifest push --purge {REFERENCE}",
        ]
    assert not work(machine, given)["changed"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"reference": "registry.example.org/gpushare"}, "image_build_reference: 'registry.example.org/gpushare'"),
        ({"reference": "gpushare@sha256:ab"}, "image_build_reference"),
        ({"platforms": []}, "image_build_platforms"),
        ({"folder": "out"}, "image_build_folder: out"),
        ({"reference": "localhost/gpushare:1", "push": True}, "has no registry"),
        ({"engine": "docker"}, "image_build_engine: this machine has no docker"),
    ],
)
def test_invalid_options_are_refused(tmp_path, wrong, message):
    machine = Machine(tmp_path)
    with pytest.raises(BadInput, match=message):
        work(machine, params(tmp_path, **wrong))
    assert machine.ran == []


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize(
    ("machine", "message"),
    [
        ({"engines": []}, "this machine has no podman, no buildah, no docker"),
        ({"engines": ["docker"], "fails": "docker version"}, "docker version failed: the end"),
        ({"engines": ["docker"], "buildx": False}, "docker builds for linux/arm64 only with its plugin buildx"),
    ],
)
def test_a_machine_that_cannot_build_is_refused(tmp_path, machine, message, check):
    made = Machine(tmp_path, **machine)
    with pytest.raises(BadInput, match=f"^image_build_engine: {re.escape(message)}$"):
        work(made, params(tmp_path), check)
    assert made.ran == [] and not (tmp_path / "out").exists()


def test_an_engine_that_does_not_work_is_passed_over(tmp_path):
    made = Machine(tmp_path, ["podman", "docker"], fails="podman info", buildx=False)
    work(made, params(tmp_path, platforms=["linux/amd64"]))
    assert made.builds == 1 and all(line.startswith("docker ") for line in made.ran)


def test_an_existing_archive_needs_no_engine(tmp_path):
    given = params(tmp_path)
    work(Machine(tmp_path), given)
    assert not work(Machine(tmp_path, []), given)["changed"]


def test_an_image_without_bill_of_materials_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(FILES, subject.BILL, b"")
    with pytest.raises(NotInEffect, match=r"has no opt/gpushare/sbom\.cdx\.json"):
        work(Machine(tmp_path), params(tmp_path))


def test_the_packed_sources_are_reproducible_and_complete(tmp_path):
    first, second = (images_sources.pack(str(tmp_path / name)) for name in ("a.tar", "b.tar"))
    assert first == second == images_sources.digest()
    assert first == hashlib.sha256((tmp_path / "a.tar").read_bytes()).hexdigest()
    with tarfile.open(tmp_path / "a.tar") as archive:
        names = archive.getnames()
        for one in images_sources.SHARED:
            assert archive.getmember(one.replace("plugins/module_utils", "images/gpushare/src/gpushare/shared")).issym()
    assert {"images/gpushare/Containerfile", "images/gpushare/requirements.lock", *images_sources.SHARED} <= set(names)
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


def test_all_lists_of_shared_files_agree():
    """The image takes files of the collection; the list stands in Python, the Containerfile and .dockerignore."""
    checkout = images_sources.COLLECTION
    recipe = (checkout / "images/gpushare/Containerfile").read_text()
    copied = re.findall(r"^COPY (plugins/\S+) (\S+)$", recipe, re.MULTILINE)
    assert copied == [(one, one) for one in images_sources.SHARED]
    allowed = re.findall(r"^!(plugins/.*)$", (checkout / ".dockerignore").read_text(), re.MULTILINE)
    assert tuple(allowed) == images_sources.SHARED
    links = sorted((checkout / "images/gpushare/src/gpushare/shared").rglob("*.py"))
    assert sorted(checkout.resolve() / one for one in images_sources.SHARED) == sorted(link.resolve() for link in links)
    assert all(link.is_symlink() for link in links)


def test_a_collection_without_sources_is_refused(tmp_path):
    with pytest.raises(BadInput, match="has no images/gpushare"):
        images_sources.pack(str(tmp_path / "x.tar"), tmp_path)


def locked(text: str) -> dict[str, tuple[str, list[str]]]:
    """Return version and hashes of each package in a lock file."""
    joined = text.replace("\\\n", " ")
    found = re.findall(r"^(\S+)==(\S+)((?: +--hash=sha256:[0-9a-f]{64})+) *$", joined, re.MULTILINE)
    return {name: (version, re.findall(r"sha256:(\S+)", hashes)) for name, version, hashes in found}


@pytest.mark.parametrize("name", lock.FILES)
def test_every_pinned_package_has_hashes(name):
    wanted = lock.pinned((IMAGE / f"{name}.txt").read_text())
    found = locked((IMAGE / f"{name}.lock").read_text())
    assert {package: version for package, (version, _hashes) in found.items()} == wanted, "run images/gpushare/lock.py"
    assert all(hashes for _version, hashes in found.values())


def test_fault_19_compiled_packages_have_a_hash_for_each_processor_and_python():
    found = locked((IMAGE / "requirements.lock").read_text())
    assert len(found["grpcio"][1]) == len(found["httptools"][1]) == len(lock.PYTHONS) * len(lock.MACHINES)


def test_the_image_installs_only_packages_with_hashes():
    text = (IMAGE / "Containerfile").read_text()
    assert text.count("--require-hashes") == 1 and text.count("$install $locked") == 2
    assert "requirements.txt" not in text


@pytest.mark.parametrize("engine", ["podman", "buildah", "docker"])
@pytest.mark.parametrize("base", ["localhost/base:1", "base", BASE_IMAGE, f"example.org/base@sha256:{'a' * 64}"])
def test_the_base_is_named_as_every_builder_takes_it(tmp_path, engine, base):
    machine = Machine(tmp_path, [engine])
    work(machine, params(tmp_path, base=base, platforms=["linux/amd64"]))
    [argument] = [word for line in machine.ran for word in line.split() if word.startswith("--build-arg=BASE=")]
    assert argument == f"--build-arg=BASE={base.replace(':1@', '@')}"
