# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Wheels by pip, collections by ansible-galaxy, and this collection as it is installed."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import json
import os
import re
import shlex
import sys
import tarfile
import typing as t
from pathlib import Path

from ...module_utils._core import tar_headers
from ...module_utils._core.errors import BadInput
from ...module_utils._core.paths import file_path
from ...module_utils._core.types import JsonObject
from ...module_utils._core.untrusted import line
from .archive import COLLECTIONS, Entry
from .artifacts import Artifact, entry, path_of, sorted_files
from .needed import COLLECTION, WHEEL, Item
from .programs import NOT_INSTALLED, Run, last_words
from .store import Failed, Store
from .table import Row

# Seconds of pip and of ansible-galaxy.
SECONDS = 3600.0
# Bytes that they bring at once, of which nothing says how many they are. A set has some 20 MB, which pip has twice for
# a moment; more than this is a server that doesn't end.
LARGEST_SET = 1 << 30
# uname's names of processors by dpkg's, which the list has.
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
# Of the newest C library first; Debian 12 has 2.36. A wheel for an older one is for a newer one, too.
GLIBC = range(36, 4, -1)
# Ansible runs in no other.
UTF8 = {"LC_ALL": "C.UTF-8"}
# Those that a base of the servers' image may have, as its lock files do.
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
ROOT = Path(__file__).resolve().parents[3]
OWN = "kubegpu.share"
_BASE = re.compile(r"(?:^|/)python:(3\.[0-9]+)")
_PYTHON = re.compile(r"3\.[0-9]{1,2}")
# Bytes of MANIFEST.json and FILES.json of a collection.
LARGEST_LIST = 16 << 20


def normal(name: str) -> str:
    """Return a package's name as indexes have it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pythons_of(images: t.Iterable[Item]) -> tuple[str, ...]:
    """Return the versions of Python for which the servers' image needs wheels: its base's, or all that it may have."""
    for item in images:
        match = _BASE.search(item["source"]) if item["id"] == "images/base" else None
        if match:
            return (match.group(1),)
    return PYTHONS


def target(python: str, architecture: str) -> list[str]:
    """Return pip's options for wheels of another Python or processor.

    :raises BadInput: the version isn't one.
    """
    if not _PYTHON.fullmatch(python):
        raise BadInput(f"airgap_controller_python: {python!r} isn't a version such as 3.12")
    machine = MACHINES[architecture]
    tags = [*(f"manylinux_2_{minor}" for minor in GLIBC), "manylinux2014", "linux"]
    return ["--implementation=cp", f"--python-version={python}", *(f"--platform={tag}_{machine}" for tag in tags)]


class Wheels(Artifact):
    """Wheels that pip takes from the index that the user has configured.

    :param options: of pip, for the target; empty for the Python that runs this.
    :param hashes: by name those that a wheel may have; empty for packages that aren't pinned, which come with what they
        need besides.
    """

    def __init__(
        self,
        name: str,
        items: t.Sequence[Item],
        options: t.Sequence[str],
        hashes: t.Mapping[str, t.Collection[str]],
        program: Run,
    ) -> None:
        self.name = name
        self.items = tuple(items)
        self._options = list(options)
        self._hashes = hashes
        self._program = program

    def request(self) -> t.Sequence[str]:
        # Without options the wheels are those of the Python that runs this.
        own = self._options or [sys.implementation.cache_tag, os.uname().machine]
        return [*own, *self._requirements()]

    def _requirements(self) -> list[str]:
        rows = []
        for item in self.items:
            hashes = [f"--hash=sha256:{value}" for value in sorted(self._hashes.get(item["name"], ()))]
            rows.append(" ".join([f"{item['name']}{item['version']}", *hashes]))
        return sorted(rows)

    def fetch(self, store: Store, work: str) -> list[Entry]:
        requirements, folder = os.path.join(work, "requirements.txt"), os.path.join(work, "wheels")
        with open(requirements, "w", encoding="utf-8") as file:
            file.write("\n".join(self._requirements()) + "\n")
        pinned = ["--require-hashes", "--no-deps"] if self._hashes else []
        command = ["download", "--quiet", "--disable-pip-version-check", "--no-input", "--only-binary=:all:"]
        # All that comes is in one place, where it is counted.
        command = [*_pip(), *command, "--no-cache-dir", *self._options, *pinned]
        command += [f"--dest={folder}", f"--requirement={requirements}"]
        watch = store.bounded(LARGEST_SET, _limit("pip"), self.watch)
        done = self._program(command, timeout=SECONDS, also={"TMPDIR": _temporary(work)}, watch=watch)
        if done.rc != 0:
            code = "no_pip" if done.rc == NOT_INSTALLED else "pip"
            raise Failed(code, f"pip can't download them: {last_words(done, 1)}", stop=code == "no_pip")
        return self._taken(store, folder)

    def _taken(self, store: Store, folder: str) -> list[Entry]:
        by_name = {normal(item["name"]): item for item in self.items}
        found = []
        for file in sorted_files(folder):
            name, version, *_tags = [*file.split("-"), ""]
            item = by_name.get(normal(name)) or _dependency(normal(name), version, self.items[0])
            path = path_of(WHEEL, file)
            store.take(os.path.join(folder, file), path)
            sha256 = store.sha256(path)
            known = self._hashes.get(item["name"], ())
            if not file.endswith(".whl") or (self._hashes and sha256 not in known):
                store.remove(path)
                raise Failed("other_digest", f"{line(file, 200)} isn't a wheel that the list has")
            found.append(entry(self, item, path, store.size(path), sha256))
        lacking = sorted(set(by_name) - {normal(each["name"]) for each in found})
        if lacking:
            raise Failed("incomplete", f"pip has downloaded no {', no '.join(lacking)}")
        return found


def _limit(program: str) -> str:
    return (
        f"{LARGEST_SET >> 20} MiB that such a set never has, so {program} was stopped: see what the server sends that "
        f"{program} is configured for"
    )


def _temporary(work: str) -> str:
    """Make a folder for what a program downloads first."""
    folder = os.path.join(work, "tmp")
    os.mkdir(folder)
    return folder


def _dependency(name: str, version: str, of: Item) -> Item:
    more = {"id": f"wheels/dependency/{name}", "name": name, "version": f"=={version}", "digest": ""}
    return t.cast(Item, {**of, **more, "source": f"https://pypi.org/simple/{name}/", "licence": "its own"})


def _pip() -> list[str]:
    return [sys.executable, "-m", "pip"] if importlib.util.find_spec("pip") else ["pip3"]


def wheels(
    items: t.Sequence[Item],
    rows: t.Mapping[str, Row],
    images: t.Sequence[Item],
    architectures: t.Sequence[str],
    controller: t.Sequence[str],
    program: Run,
) -> list[Wheels]:
    """Return the sets of wheels: the servers' image's for each Python and processor, and the controller's.

    :param rows: of the list's section wheels.
    :param architectures: of the machines on which the image runs.
    :param controller: pip's options for the controller's; empty for the Python that runs this.
    :raises BadInput: an item is of another version's list.
    """
    own = [item for item in items if item["id"].startswith("wheels/controller/")]
    image = [item for item in items if item not in own]
    found = [Wheels("wheels of the controller", own, controller, {}, program)] if own else []
    unknown = next((item["id"] for item in image if item["id"].removeprefix("wheels/") not in rows), "")
    if unknown:
        raise BadInput(f"airgap_needed: {line(unknown, 100)} isn't in this version's list: use the one that made it")
    hashes = {item["name"]: rows[item["id"].removeprefix("wheels/")]["sha256"] for item in image}
    for python in pythons_of(images) if image else ():
        for architecture in architectures:
            name = f"wheels of the servers' image for Python {python} on {architecture}"
            found.append(Wheels(name, image, target(python, architecture), hashes, program))
    return found


# --------------------------------------------------------------------------- collections


class Collections(Artifact):
    """Collections of Galaxy, or of the server that the user has configured, with those that they need."""

    name = "collections"

    def __init__(self, items: t.Sequence[Item], program: Run) -> None:
        self.items = tuple(items)
        self._program = program

    def request(self) -> t.Sequence[str]:
        return sorted(f"{item['name']}:{item['version']}" for item in self.items)

    def fetch(self, store: Store, work: str) -> list[Entry]:
        command = [sys.executable, "-m", "ansible", "galaxy", "collection", "download", *self.request(), "-p", work]
        # Of the user's own configuration, in the current directory as well.
        temporary = _temporary(work)
        own = {**UTF8, "TMPDIR": temporary, "ANSIBLE_LOCAL_TEMP": temporary}
        watch = store.bounded(LARGEST_SET, _limit("ansible-galaxy"), self.watch)
        done = self._program(command, timeout=SECONDS, also=own, watch=watch)
        if done.rc != 0:
            raise Failed("galaxy", f"ansible-galaxy can't download them: {last_words(done, 1)}")
        by_name = {item["name"]: item for item in self.items}
        found = []
        for file in sorted_files(work):
            # A tarball has the name that the server's address ends with.
            if file == "requirements.yml":
                continue
            manifest = manifest_of(os.path.join(work, file))
            name = f"{manifest['namespace']}.{manifest['name']}"
            more = {"id": f"collections/{name}", "name": name, "version": f"=={manifest['version']}"}
            item = by_name.get(name) or t.cast(Item, {**self.items[0], **more, "licence": "its own"})
            path = path_of(COLLECTION, f"{name.replace('.', '-')}-{manifest['version']}.tar.gz")
            store.take(os.path.join(work, file), path)
            found.append(entry(self, item, path, store.size(path), store.sha256(path)))
        lacking = sorted(set(by_name) - {each["name"] for each in found})
        if lacking:
            raise Failed("incomplete", f"ansible-galaxy has downloaded no {', no '.join(lacking)}")
        return found


class Own(Artifact):
    """This collection: a tarball that the user names, or as it is installed here, each file compared with FILES.json.

    :param tarball: empty for the installed collection.
    """

    def __init__(self, item: Item, tarball: str, program: Run, root: Path = ROOT) -> None:
        self.items = (item,)
        self.name = f"collection {item['name']}"
        self._tarball = os.path.abspath(os.path.expanduser(tarball)) if tarball else ""
        self._root = root
        self._program = program

    def request(self) -> t.Sequence[str]:
        if self._tarball:
            try:
                state = os.stat(self._tarball)
                return [self._tarball, str(state.st_size), str(state.st_mtime_ns)]
            except OSError:
                return [self._tarball]
        installed = self._root / "MANIFEST.json"
        if installed.is_file():
            # It has the digest of FILES.json, and that those of all files.
            return [hashlib.sha256(installed.read_bytes()).hexdigest()]
        return ["checkout", *_stamps(self._root)]

    def fetch(self, store: Store, work: str) -> list[Entry]:
        [item] = self.items
        made = self._tarball or self._made(work)
        manifest = manifest_of(made)
        name, version = f"{manifest['namespace']}.{manifest['name']}", manifest["version"]
        if name != item["name"]:
            raise Failed("other_collection", f"airgap_collection: {line(made, 200)} is {line(name, 80)}")
        path = path_of(COLLECTION, f"{manifest['namespace']}-{manifest['name']}-{version}.tar.gz")
        store.copy(made, path)
        known = t.cast(Item, {**item, "version": f"=={version}"})
        return [entry(self, known, path, store.size(path), store.sha256(path))]

    def _made(self, work: str) -> str:
        if (self._root / "MANIFEST.json").is_file():
            return _packed(self._root, os.path.join(work, "collection.tar.gz"))
        command = [sys.executable, "-m", "ansible", "galaxy", "collection", "build", str(self._root)]
        done = self._program([*command, "--output-path", work], timeout=SECONDS, also=UTF8)
        built = [file for file in sorted_files(work) if file.endswith(".tar.gz")]
        if done.rc != 0 or len(built) != 1:
            raise Failed("build", f"ansible-galaxy can't build {self._root}: {last_words(done, 1)}")
        return os.path.join(work, built[0])


def _stamps(root: Path) -> list[str]:
    """Return what changes when a file of a checkout does."""
    rows = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        for name in sorted(files):
            state = os.lstat(os.path.join(folder, name))
            rows.append(f"{os.path.relpath(os.path.join(folder, name), root)} {state.st_size} {state.st_mtime_ns}")
    return [hashlib.sha256("\n".join(rows).encode()).hexdigest()]


def _packed(root: Path, target_: str) -> str:
    """Write the tarball of an installed collection: what FILES.json lists, if that is what is there.

    :raises Failed: a file was changed since it was installed.
    """
    listed = _json((root / "FILES.json").read_bytes(), "FILES.json")
    manifest = (root / "MANIFEST.json").read_bytes()
    about = _json(manifest, "MANIFEST.json").get("file_manifest_file") or {}
    with (
        open(target_, "wb") as plain,
        gzip.GzipFile("", "wb", fileobj=plain, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        files = {"name": "FILES.json", "ftype": "file", "chksum_sha256": about.get("chksum_sha256")}
        _member(tar, root, {"name": "MANIFEST.json", "ftype": "file", "chksum_sha256": _sha256(manifest)})
        for row in [files, *(listed.get("files") or [])]:
            if row.get("name") != ".":
                _member(tar, root, row)
    return target_


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _member(tar: tarfile.TarFile, root: Path, row: JsonObject) -> None:
    try:
        name = file_path(row["name"], hidden=True)
    except (ValueError, KeyError) as error:
        raise Failed("changed", f"FILES.json of {root} has a path that isn't one") from error
    member = tarfile.TarInfo(name)
    if row.get("ftype") == "dir":
        member.type, member.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(member)
        return
    try:
        content = (root / name).read_bytes()
        member.mode = 0o755 if os.access(root / name, os.X_OK) else 0o644
    except OSError as error:
        raise Failed("changed", f"{root / name} can't be read: {error.strerror}") from error
    if _sha256(content) != row.get("chksum_sha256"):
        raise Failed(
            "changed",
            f"{root / name} isn't as it was installed: install the collection again, or name its tarball by "
            "airgap_collection",
        )
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def _json(content: bytes, where: str) -> JsonObject:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Failed("type", f"{where} isn't JSON") from error
    if not isinstance(found, dict):
        raise Failed("type", f"{where} isn't a mapping")
    return found


def manifest_of(path: str) -> dict[str, str]:
    """Return namespace, name and version of a collection's tarball.

    :raises Failed: it isn't one.
    """
    try:
        with tarfile.open(path, tarinfo=tar_headers.Header) as tar:
            member = {row.name: row for row in tar_headers.members(tar)}["MANIFEST.json"]
            file = tar.extractfile(member) if member.isreg() and member.size <= LARGEST_LIST else None
            about = _json(file.read() if file else b"", "MANIFEST.json").get("collection_info")
    except FileNotFoundError as error:
        raise Failed("no_file", f"airgap_collection: {line(path, 300)} isn't there") from error
    except (OSError, EOFError, tarfile.TarError, KeyError, ValueError, RecursionError) as error:
        raise Failed("type", f"{line(path, 300)} isn't the tarball of a collection") from error
    found = {field: str((about or {}).get(field)) for field in ("namespace", "name", "version")}
    if not all(re.fullmatch(r"[a-zA-Z0-9][\w.+-]*", value, re.ASCII) for value in found.values()):
        raise Failed("type", f"{line(path, 300)} has no name, or no version")
    return found


# --------------------------------------------------------------------------- the controller's script

SCRIPT = """\
#!/bin/sh
# Makes a virtual environment with Ansible and the collections of this archive; nothing is asked of a network.
#   sh install-controller.sh [folder of the environment]        PYTHON names another python3
# Who made the archive says its signature. Verify it, and this script by SHA256SUMS, before you run it.
set -eu
export LC_ALL=C.UTF-8
target=${{1:-$HOME/kubegpu-share}}
case $target in /*) ;; *) target=$PWD/$target ;; esac
cd "$(dirname "$0")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
grep -E '^[0-9a-f]{{64}}  (wheels|collections)/[^/]+$' SHA256SUMS >"$work/sums"
mkdir "$work/wheels" "$work/collections"
# Only what is listed is used: pip would take a newer wheel that somebody has put beside the others.
while read -r _ file; do cp "$file" "$work/$file" || break; done <"$work/sums"
cd "$work"
sha256sum --check --strict --quiet sums || {{ echo "This archive isn't complete: copy it again." >&2; exit 1; }}
python=${{PYTHON:-python3}}
found="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') on $(uname -m)"
[ "$found" = "{wanted}" ] || {{
    echo "The wheels are for Python {wanted}, and $python is $found: set PYTHON, or download for this one." >&2
    exit 1
}}
"$python" -m venv "$target"
"$target/bin/python" -m pip install --quiet --disable-pip-version-check --no-index --find-links wheels \\
    {packages}
place=$("$target/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# Ansible finds them there without a configuration.
ANSIBLE_COLLECTIONS_PATH=$place "$target/bin/ansible-galaxy" collection install --offline --force -p "$place" \\
    {collections}
echo "Ansible is in $target/bin."
"""


def script(entries: t.Iterable[Entry], python: str, architecture: str) -> str:
    """Return the text of install-controller.sh; empty where the archive has nothing of the controller.

    :param python: version for which the controller's wheels are, such as 3.12.
    :param architecture: amd64 or arm64.
    """
    rows = list(entries)
    wheels_ = [row for row in rows if row["id"].startswith("wheels/controller/")]
    # The version stands in the name of a wheel; what an index or a server has named stays one word.
    packages = sorted({shlex.quote(f"{row['name']}=={row['path'].split('-')[1]}") for row in wheels_})
    tarballs = sorted({shlex.quote(row["path"]) for row in rows if row["path"].startswith(f"{COLLECTIONS}/")})
    if not packages or not tarballs:
        return ""
    separator = " \\\n    "
    wanted = f"{python} on {MACHINES[architecture]}"
    return SCRIPT.format(wanted=wanted, packages=separator.join(packages), collections=separator.join(tarballs))
