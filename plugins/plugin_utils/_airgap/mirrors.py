# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ask the mirrors that an inventory names for each item that it needs, all at once and within a time."""

from __future__ import annotations

import collections
import fnmatch
import gzip
import hashlib
import io
import lzma
import os
import queue
import re
import threading
import time
import typing as t
import urllib.parse

from ...module_utils._core.errors import BadInput
from ...module_utils._core.untrusted import line
from ...module_utils._images.names import full_reference, repository_and_tag
from .._pins import index
from . import needed, web
from .manifests import document
from .needed import Item
from .web import Answer, Fetch, Registries

THREADS = 8
# Bytes of a list of packages when it is decompressed.
LARGEST_LIST = 256 << 20
# Bytes of a file whose digest is compared, as keys are small and programs aren't read, and of a list of lists.
LARGEST_FILE = 1 << 20
# Bytes of a list of charts, of which a tree is made.
LARGEST_INDEX = 16 << 20
# Versions of a package that a list has at most.
MOST_VERSIONS = 10_000
HUB = {"docker.io": "registry-1.docker.io"}
PRESENT, MISSING, UNKNOWN = "present", "missing", "unknown"
_REMOTE = re.compile(r"(https?|oci)://[^/]")
# Each line is looked at once, whatever a list has: no thread runs while a pattern is searched for.
_DEB = re.compile(rb"^(?:Package: (\S+)|Version: (\S+)|$)", re.MULTILINE)
_RPM = re.compile(rb"<name>([^<]{1,300})</name>\s*<arch>[^<]{1,50}</arch>\s*<version([^>]{1,300})>")
_PRIMARY = re.compile(rb"""<data type=["']primary["']>.{0,2000}?<location href=["']([^"']{1,300})["']""", re.DOTALL)
WORDS = {
    "timeout": "it doesn't answer in time",
    "tls": "its certificate isn't one that the controller trusts",
    "no_tls": "it doesn't speak TLS",
    "unreachable": "it can't be reached from the controller",
    "too_large": "its answer is too large",
}


class Found(t.NamedTuple):
    """What a mirror has of one item.

    :param state: ``present``, ``missing``, or ``unknown`` where that couldn't be learnt.
    :param reason: why, for people.
    :param plain: a registry said it without TLS.
    """

    item: Item
    state: str
    reason: str = ""
    plain: bool = False


# Answers for the items of one place together.
Job = t.Callable[[float], list[Found]]


class _Unknown(Exception):
    """Whether the items are there couldn't be learnt; the message says why."""


def at_mirrors(items: t.Iterable[Item], registry: str = "") -> list[Item]:
    """Return the items that are taken from a server that the user has named.

    An image that only a variable names is one of them where others come from the same registry.

    :param registry: the user's own, with or without a folder; empty where no variable names it.
    """
    items = list(items)
    registries = _registries(items, registry)
    return [item for item in items if _is_remote(item)] + [
        {**item, "place": item["source"]} for item in items if _is_of(item, registries)
    ]


def elsewhere(items: t.Iterable[Item], registry: str = "") -> list[Item]:
    """Return the items that nodes, the cluster or charts take from where they are public.

    What the controller has installed, and the distribution's own packages, aren't among them.

    :param registry: as ``at_mirrors`` has it.
    """
    items = list(items)
    registries = _registries(items, registry)
    kinds = (needed.IMAGE, needed.CHART, needed.FILE, "apt", "rpm")
    public = (item for item in items if item["kind"] in kinds and not item["place"] and item["source"])
    public = (item for item in public if not _is_of(item, registries))
    return [item for item in public if not item["id"].startswith(("files/program/", "images/gpushare"))]


def _registries(items: t.Sequence[Item], registry: str) -> set[str]:
    """Return the hosts of the user's own registries."""
    places = [item["place"] for item in items if item["kind"] == needed.IMAGE and _is_remote(item)]
    return {*map(_registry, places), *([registry.partition("/")[0]] if registry else [])}


def _is_of(item: Item, registries: t.Collection[str]) -> bool:
    """Return whether an image that only a variable names is in one of these registries."""
    return item["kind"] == needed.IMAGE and not item["place"] and _registry(item["source"]) in registries


def _registry(reference: str) -> str:
    return full_reference(reference).partition("/")[0]


def _is_remote(item: Item) -> bool:
    place = item["place"]
    if not place or item["kind"] in (needed.COLLECTION, needed.OPERATOR):
        return False
    if item["kind"] == needed.IMAGE:
        return not place.startswith(needed.LOCAL)
    return bool(_REMOTE.match(place))


def ask(
    items: t.Sequence[Item],
    seconds: float,
    fetch: Fetch = web.fetch,
    environment: t.Mapping[str, str] | None = None,
    auth_file: str = "",
    insecure: t.Collection[str] = (),
) -> list[Found]:
    """Return what the mirrors have of these items, as ``at_mirrors`` returns them.

    :param seconds: for all of them; what nobody has said then is unknown.
    :param auth_file: with credentials, beside those of the environment.
    :param insecure: registries that get credentials without TLS, too.
    """
    until = time.monotonic() + seconds
    known = web.credentials(os.environ if environment is None else environment, auth_file)
    asker = _Asker(fetch, Registries(fetch, known, insecure))
    jobs: queue.SimpleQueue[tuple[Job, list[Item]]] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[list[Item], list[Found] | Exception]] = queue.SimpleQueue()
    left: dict[int, list[Item]] = {}
    for job, own in asker.jobs(items):
        left[id(own)] = own
        jobs.put((job, own))

    def work() -> None:
        while True:
            try:
                job, own = jobs.get_nowait()
            except queue.Empty:
                return
            try:
                done.put((own, job(until)))
            except _Unknown as error:
                done.put((own, [Found(item, UNKNOWN, str(error)) for item in own]))
            except Exception as error:  # An error of this code: it is raised where somebody waits.
                done.put((own, error))

    # A name server may take longer than any time: such a thread is left behind, and ends with the process.
    for _number in range(min(THREADS, len(left))):
        threading.Thread(target=work, daemon=True).start()
    results: list[Found] = []
    while left:
        try:
            own, found = done.get(timeout=max(until + web.PATIENCE - time.monotonic(), 0.01))
        except queue.Empty:
            break
        if isinstance(found, Exception):
            raise found
        del left[id(own)]
        results += found
    results += [Found(item, UNKNOWN, WORDS["timeout"]) for own in left.values() for item in own]
    return results


class _Asker:
    """Makes the jobs: one for each image and file, and one for each list of packages or charts."""

    def __init__(self, fetch: Fetch, registries: Registries) -> None:
        self._fetch = fetch
        self._registries = registries

    def jobs(self, items: t.Sequence[Item]) -> t.Iterator[tuple[Job, list[Item]]]:
        together: dict[tuple[str, ...], list[Item]] = collections.defaultdict(list)
        for item in items:
            if item["kind"] in ("apt", "rpm"):
                together[(item["kind"], item["place"], *item["indexes"])].append(item)
            elif item["kind"] == needed.CHART and not item["place"].startswith("oci://"):
                together[item["kind"], item["place"]].append(item)
            else:
                together[item["kind"], item["place"], item["name"], item["version"]].append(item)
        for (kind, *_rest), own in together.items():
            yield self._job(kind, own), own

    def _job(self, kind: str, own: list[Item]) -> Job:
        by_kind: dict[str, t.Callable[[list[Item], float], list[Found]]] = {
            needed.IMAGE: self._image,
            needed.CHART: self._charts,
            needed.FILE: self._file,
            needed.WHEEL: self._wheel,
            "apt": self._apt,
            "rpm": self._rpm,
        }
        return lambda until: by_kind[kind](own, until)

    # ------------------------------------------------------------------ single items

    def _image(self, own: list[Item], until: float) -> list[Found]:
        return [self._manifest(item, item["place"], until) for item in own]

    def _manifest(self, item: Item, reference: str, until: float) -> Found:
        name = full_reference(reference)
        registry, _slash, rest = name.partition("/")
        digest = rest.partition("@")[2]
        repository, tag = repository_and_tag(rest.partition("@")[0])
        answer = self._registries.manifest(HUB.get(registry, registry), repository, digest or tag, until)
        if not _is_there(answer):
            return Found(item, MISSING, "it isn't there", answer.plain)
        if digest and digest != f"sha256:{hashlib.sha256(answer.content).hexdigest()}":
            return Found(item, MISSING, f"there is another image, whose digest isn't {line(digest, 80)}", answer.plain)
        try:
            platforms = {row.architecture for row in document(answer.content).manifests}
        except ValueError as error:
            raise _Unknown("it sends no manifest") from error
        lacking = sorted(set(item["architectures"]) - platforms) if platforms else []
        reason = f"it has none for {' and '.join(lacking)}" if lacking else ""
        return Found(item, MISSING if lacking else PRESENT, reason, answer.plain)

    def _file(self, own: list[Item], until: float) -> list[Found]:
        [item] = own
        digest = item["digest"].removeprefix("sha256:")
        answer = self._fetch(item["place"], until, LARGEST_FILE if digest else 0)
        if not _is_there(answer):
            return [Found(item, MISSING, "it isn't there")]
        other = digest and hashlib.sha256(answer.content).hexdigest() != digest
        return [
            Found(item, MISSING, f"there is another file, whose SHA-256 isn't {digest}")
            if other
            else Found(item, PRESENT)
        ]

    def _wheel(self, own: list[Item], until: float) -> list[Found]:
        [item] = own
        url = f"{item['place'].rstrip('/')}/{urllib.parse.quote(item['name'])}/"
        answer = self._fetch(url, until, web.LARGEST)
        version = re.escape(item["version"].removeprefix("=="))
        there = _is_there(answer) and re.search(rf"-{version}(-|\.tar\.)", answer.content.decode("utf-8", "replace"))
        return [Found(item, PRESENT) if there else Found(item, MISSING, "it isn't there")]

    # ------------------------------------------------------------------ lists

    def _charts(self, own: list[Item], until: float) -> list[Found]:
        if own[0]["place"].startswith("oci://"):
            [item] = own
            return [self._manifest(item, f"{item['place'].removeprefix('oci://')}:{item['version']}", until)]
        if own[0]["place"].endswith(".tgz"):
            return self._file(own, until)
        answer = self._fetch(f"{own[0]['place'].rstrip('/')}/index.yaml", until, LARGEST_INDEX)
        if not _is_there(answer):
            return [Found(item, MISSING, "there is no index.yaml") for item in own]
        try:
            versions = {
                item["name"]: {
                    str(entry["version"]).lstrip("v") for entry in index.entries(answer.content, item["name"])
                }
                for item in own
            }
        except BadInput as error:
            raise _Unknown(f"its index.yaml {error}") from error
        return [
            Found(item, PRESENT)
            if item["version"].lstrip("v") in versions[item["name"]]
            else Found(item, MISSING, _others(versions[item["name"]]))
            for item in own
        ]

    def _apt(self, own: list[Item], until: float) -> list[Found]:
        have = _Versions(own)
        for folder in own[0]["indexes"]:
            content = self._list(f"{own[0]['place'].rstrip('/')}/{folder}Packages", (".gz", ".xz", ""), until)
            if content is None:
                return [Found(item, MISSING, f"there is no list of packages ({folder}Packages)") for item in own]
            for name, version in _debs(content):
                have.add(name, version.partition(b":")[2] or version)
        return _matched(own, have)

    def _rpm(self, own: list[Item], until: float) -> list[Found]:
        place = own[0]["place"].rstrip("/")
        listed = self._fetch(f"{place}/repodata/repomd.xml", until, LARGEST_FILE)
        if not _is_there(listed):
            return [Found(item, MISSING, "there is no list of packages (repodata/repomd.xml)") for item in own]
        location = _PRIMARY.search(listed.content)
        if not location:
            raise _Unknown("its repodata/repomd.xml names no list of packages")
        path = location.group(1).decode("utf-8", "replace")
        if path.endswith(".zst"):
            raise _Unknown("its list of packages is compressed by zstd, which isn't read here")
        content = self._list(f"{place}/{path}", ("",), until)
        if content is None:
            return [Found(item, MISSING, f"there is no list of packages ({line(path)})") for item in own]
        have = _Versions(own)
        for package in _RPM.finditer(content):
            fields = dict(re.findall(rb"""(ver|rel)=["']([^"']*)["']""", package.group(2)))
            have.add(package.group(1), b"-".join((fields.get(b"ver", b""), fields.get(b"rel", b""))))
        return _matched(own, have)

    def _list(self, url: str, endings: t.Sequence[str], until: float) -> bytes | None:
        """Return a list of packages, decompressed; None where none of its forms is there."""
        for ending in endings:
            answer = self._fetch(url + ending, until, web.LARGEST)
            if _is_there(answer):
                return _decompressed(answer.content)
        return None


def _is_there(answer: Answer) -> bool:
    """Return whether an item is there.

    :raises _Unknown: the answer doesn't say.
    """
    if answer.failure:
        raise _Unknown(WORDS[answer.failure])
    if answer.status in (401, 403):
        raise _Unknown(f"it wants credentials that the controller hasn't (HTTP {answer.status})")
    if answer.status in (404, 410):
        return False
    if not 200 <= answer.status < 300:
        raise _Unknown(f"it answers with HTTP {answer.status}")
    return True


def _decompressed(content: bytes) -> bytes:
    try:
        if content.startswith(b"\x1f\x8b"):
            with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
                found = file.read(LARGEST_LIST + 1)
        elif content.startswith(b"\xfd7zXZ"):
            with lzma.LZMAFile(io.BytesIO(content)) as packed:
                found = packed.read(LARGEST_LIST + 1)
        else:
            found = content
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise _Unknown("its list of packages is damaged") from error
    if len(found) > LARGEST_LIST:
        raise _Unknown(f"its list of packages has more than {LARGEST_LIST >> 20} MiB")
    return found


class _Versions:
    """The versions that a list has of some packages; of others, and of very many, nothing is kept."""

    def __init__(self, own: list[Item]) -> None:
        self._found: dict[bytes, set[bytes]] = {item["name"].encode(): set() for item in own}

    def add(self, name: bytes, version: bytes) -> None:
        """Add what a list has.

        :raises _Unknown: there are more versions than a list has.
        """
        versions = self._found.get(name)
        if versions is None:
            return
        versions.add(version)
        if len(versions) > MOST_VERSIONS:
            raise _Unknown(f"its list of packages has more than {MOST_VERSIONS} versions of one")

    def of(self, name: str) -> set[str]:
        return {version.decode("utf-8", "replace") for version in self._found[name.encode()]}


def _debs(content: bytes) -> t.Iterator[tuple[bytes, bytes]]:
    """Yield name and version of each package of a list; an empty line is between two packages."""
    name = b""
    for field in _DEB.finditer(content):
        package, version = field.groups()
        if name and version:
            yield name, version
        name = package or b""


def _matched(own: list[Item], have: _Versions) -> list[Found]:
    """Compare packages with those of a list; a version of the list is a pattern, without its epoch."""
    found = []
    for item in own:
        versions = have.of(item["name"])
        pattern = item["version"] or "*"
        there = any(fnmatch.fnmatchcase(version, pattern) for version in versions)
        found.append(Found(item, PRESENT) if there else Found(item, MISSING, _others(versions)))
    return found


def _others(versions: t.Collection[str]) -> str:
    shown = [line(version) for version in sorted(versions)[-3:]]
    return f"there are only other versions, such as {', '.join(shown)}" if shown else "it isn't there"
