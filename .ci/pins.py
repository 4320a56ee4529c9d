# SPDX-License-Identifier: GPL-3.0-or-later
"""Update every digest of meta/pins.yml, and the base image in images/gpushare/Containerfile, in one go: ``make pins``.

In lab/released.yml it fills in what isn't known of the lab's own versions, from the lists that their projects publish
beside the files. A released file never changes, so another digest than a known one is a failure.

Downloads each key and chart from its URL, asks each image's registry, prints what changed, and writes the files. With
--dry-run nothing is written; with --mirror FROM=TO what begins with FROM is downloaded from TO. Versions of charts are
those of the roles' defaults. Whoever runs it compares what is printed with what the owners announce: a digest proves
that nothing changed since, and not that it was right then.

A download that fails is printed, keeps its digest, and makes the command fail; the others are written.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import http.client
import json
import re
import signal
import sys
import typing as t
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / ".collections"), str(ROOT)]

from ansible_collections.kubegpu.share.plugins.module_utils._core.untrusted import line as printable  # noqa: E402
from ansible_collections.kubegpu.share.plugins.module_utils._packages.options import LARGEST, fingerprint  # noqa: E402
from ansible_collections.kubegpu.share.plugins.plugin_utils._pins import table  # noqa: E402

from lab import build, released, settings  # noqa: E402

# Bytes; charts have some 100 KiB, indexes of repositories some MiB.
LARGEST_FILE = 64 << 20
# Of one answer, from the name server's to its last byte.
SECONDS = 60
# Levels of a repository's index: one has six.
DEEPEST = 50
RELEASED = "lab/released.yml"
SHA256 = re.compile(r"[0-9a-f]{64}")
CONTAINERFILE = "images/gpushare/Containerfile"
BASE = re.compile(r"^(ARG BASE=).*$", re.MULTILINE)
INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MANIFESTS = ("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")
# Where the name of a registry in references isn't its address.
HUB = {"docker.io": "registry-1.docker.io"}
# By chart, where the role's defaults have its version; another one keeps the version of the table.
VERSIONS = {
    "hami": ("hami", "hami_chart_version"),
    "nvidia-device-plugin": ("nvidia_device_plugin", "nvidia_device_plugin_chart_version"),
    "gpu-operator": ("gpu_operator", "gpu_operator_chart_version"),
    "dcgm-exporter": ("nvidia_device_plugin", "nvidia_device_plugin_dcgm_exporter_chart_version"),
}


class Plain(yaml.SafeDumper):
    """Writes equal rows twice, instead of a reference to the first."""

    def ignore_aliases(self, data: t.Any) -> bool:
        return True


class NotUpdated(Exception):
    """A digest that couldn't be learnt; the message says where and why."""


class Answer(t.NamedTuple):
    headers: t.Mapping[str, str]
    content: bytes


@contextlib.contextmanager
def within(seconds: float) -> t.Iterator[None]:
    """End what runs in the main thread: a server may send one byte at a time, and a timeout is for each of them.

    :raises TimeoutError: the time is over.
    """

    def end(_number: int, _frame: object) -> None:
        raise TimeoutError(f"no complete answer within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def fetch(url: str, headers: t.Mapping[str, str] | None = None, largest: int = LARGEST_FILE) -> Answer:
    """Download a file; proxies are those of the environment.

    :param largest: in bytes.
    :raises NotUpdated: it can't be had, or is larger.
    """
    try:
        asked = urllib.request.Request(url, headers=dict(headers or {}))
        with within(SECONDS), urllib.request.urlopen(asked, timeout=SECONDS) as answer:
            content = answer.read(largest + 1)
            found = Answer(dict(answer.headers.items()), content)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise NotUpdated(f"{url} can't be downloaded: {error}") from error
    if len(content) > largest:
        raise NotUpdated(f"{url} has more than {largest} bytes")
    return found


def mirrored(url: str, mirrors: t.Mapping[str, str]) -> str:
    """Return the address from which a file, a repository or an image is downloaded."""
    found = max((one for one in mirrors if url.startswith(one)), key=len, default="")
    return mirrors[found] + url[len(found) :] if found else url


def key(pin: dict[str, str]) -> dict[str, str]:
    """Return the digests of a key."""
    content = fetch(pin["url"], largest=LARGEST).content
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise NotUpdated(f"{pin['url']} isn't an armoured OpenPGP public key") from error
    if "-----BEGIN PGP PUBLIC KEY BLOCK-----" not in text:
        raise NotUpdated(f"{pin['url']} isn't an armoured OpenPGP public key")
    return {"sha256": hashlib.sha256(content).hexdigest(), "fingerprint": fingerprint(text)}


def entries_of(url: str, name: str) -> list[dict[str, t.Any]]:
    """Return the entries of a chart in its repository's index.

    :param url: of the index.
    :raises NotUpdated: it has none, or isn't an index.
    """
    content = fetch(url).content
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        depth = 0
        # libyaml's own events first: what makes objects of them recurses in C.
        for event in yaml.parse(content, loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST or isinstance(event, yaml.AliasEvent):
                raise NotUpdated(f"{url} has aliases, or more than {DEEPEST} levels")
        entries = yaml.load(content, loader)["entries"][name]
    except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise NotUpdated(f"{url} has no chart {name}") from error
    return [one for one in entries if isinstance(one, dict) and isinstance(one.get("version"), (str, float))]


def chart(name: str, pin: dict[str, str], version: str) -> dict[str, str]:
    """Return version and digest of a chart, from its archive: an index may claim any digest."""
    folder = pin["url"].rstrip("/") + "/"
    entries = entries_of(f"{folder}index.yaml", name)
    try:
        [entry] = [one for one in entries if str(one["version"]).removeprefix("v") == version.removeprefix("v")]
        url = urllib.parse.urljoin(folder, str(entry["urls"][0]))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise NotUpdated(f"{folder}index.yaml has no chart {name} {version}") from error
    if not url.startswith(("http://", "https://")):
        raise NotUpdated(f"{folder}index.yaml: chart {name} {version} is at {url!r}, which is no web address")
    found = hashlib.sha256(fetch(url).content).hexdigest()
    if entry.get("digest") not in (None, "", found):
        raise NotUpdated(f"{url} has SHA-256 {found}, and {folder}index.yaml says {entry['digest']}")
    return {"version": version, "sha256": found}


def image(pin: dict[str, str], scheme: str = "https") -> dict[str, str]:
    """Return the digest of an image's index: that of one platform would leave out the others.

    The digest is computed from what the registry sends, and has to be the one that it names.
    """
    registry, _slash, rest = pin["url"].partition("/")
    repository, colon, tag = rest.rpartition(":")
    if not colon or "/" in tag or "@" in rest:
        raise NotUpdated(f"{pin['url']} isn't an image's name with registry and tag")
    url = f"{scheme}://{HUB.get(registry, registry)}/v2/{repository}/manifests/{tag}"
    headers = {"Accept": ", ".join((*INDEXES, *MANIFESTS))}
    answer = _with_token(url, headers)
    kind = next((value for name, value in answer.headers.items() if name.lower() == "content-type"), "").split(";")[0]
    try:
        kind = json.loads(answer.content).get("mediaType") or kind
    except (ValueError, AttributeError) as error:
        raise NotUpdated(f"{url} isn't a manifest") from error
    if kind not in INDEXES:
        raise NotUpdated(f"{url} is {kind or 'of no known type'}, and not an index of several platforms")
    digest = f"sha256:{hashlib.sha256(answer.content).hexdigest()}"
    named = next((value for name, value in answer.headers.items() if name.lower() == "docker-content-digest"), digest)
    if named != digest:
        raise NotUpdated(f"{url} has digest {digest}, and its registry says {named}")
    return {"digest": digest}


def _with_token(url: str, headers: dict[str, str]) -> Answer:
    """Download from a registry, with a token for anybody where it wants one."""
    try:
        return fetch(url, headers)
    except NotUpdated as error:
        cause = error.__cause__
        if not isinstance(cause, urllib.error.HTTPError) or cause.code != 401:
            raise
        words = dict(re.findall(r'([a-z]+)="([^"]*)"', cause.headers.get("WWW-Authenticate", "")))
        realm = words.pop("realm", "")
        if not realm.startswith(("http://", "https://")):
            raise
    query = urllib.parse.urlencode({name: words[name] for name in ("service", "scope") if name in words})
    try:
        granted = json.loads(fetch(f"{realm}?{query}").content)
        token = granted.get("token") or granted["access_token"]
    except (ValueError, KeyError, AttributeError) as error:
        raise NotUpdated(f"{realm} gives no token") from error
    return fetch(url, {**headers, "Authorization": f"Bearer {token}"})


def version_of(root: Path, name: str, pin: dict[str, str]) -> str:
    """Return the version of a chart that its role deploys by default."""
    role, variable = VERSIONS.get(name, ("", ""))
    if not role:
        return pin["version"]
    defaults = yaml.safe_load((root / f"roles/{role}/defaults/main.yml").read_text())
    return str(defaults[variable] or pin["version"])


def update(
    root: Path, today: str, mirrors: t.Mapping[str, str], scheme: str = "https"
) -> tuple[dict[str, t.Any], list[str], list[str]]:
    """Return the new table, a line for each change, and the failures.

    :param mirrors: beginnings of URLs, and what replaces them for the download.
    :param scheme: of registries.
    """
    path = root / "meta/pins.yml"
    pins = table.load(path.read_text(encoding="utf-8"), str(path))
    lines, failures = [], []
    for section, entries in pins.items():
        for name, pin in entries.items():
            source = {**pin, "url": mirrored(pin["url"], mirrors)}
            try:
                if section == "keys":
                    new = key(source)
                elif section == "charts":
                    new = chart(name, source, version_of(root, name, pin))
                else:
                    new = image(source, scheme)
            except NotUpdated as error:
                failures.append(f"{section}: {name}: {error}")
                continue
            changed = [field for field, value in new.items() if pin[field] != value]
            lines += [f"{section}: {name}: {field}: {pin[field] or 'unknown'} -> {new[field]}" for field in changed]
            if changed:
                pin.update(new, known=f"{today}: downloaded from {source['url']}")
    return pins, lines, failures


def published(url: str, name: str) -> str:
    """Return a file's SHA-256 from a project's list, which has it alone, or a line for each file."""
    for line in fetch(url).content.decode("utf-8", "replace").splitlines():
        digest, _space, rest = line.strip().partition(" ")
        if SHA256.fullmatch(digest) and rest.strip().lstrip("*") in ("", name):
            return digest
    raise NotUpdated(f"{url} has no SHA-256 of {name}")


def update_released(
    root: Path, today: str, mirrors: t.Mapping[str, str]
) -> tuple[dict[str, t.Any], list[str], list[str]]:
    """Return the new table of the lab's downloads, a line for each change, and the failures.

    Its rows are the lab's own versions: others are dropped.
    """
    old = yaml.safe_load((root / RELEASED).read_text(encoding="utf-8"))
    new: dict[str, t.Any] = {source.name: {} for source in released.SOURCES.values()}
    lines, failures = [], []
    for tools in (*build.TOOL_SETS, *build.OLDER):
        source = released.SOURCES.get(tools.module)
        if source is None:
            continue
        row = new[source.name][tools.version] = {"known": "", **old[source.name].get(tools.version, {})}
        for architecture in released.ARCHITECTURES.values():
            found, place = {}, mirrored(settings.DOWNLOADS[source.name], mirrors)
            for file in released.files(source, tools.version, architecture, tools.binaries):
                try:
                    found[file.name] = published(f"{place}/{file.published}", file.path.rpartition("/")[2])
                except NotUpdated as error:
                    failures.append(f"{source.name} {tools.version}: {error}")
                    break
            else:
                known = row.get(architecture) or {}
                changed = [name for name, digest in found.items() if known.get(name, digest) != digest]
                if changed:
                    name = changed[0]
                    words = f"{place} has SHA-256 {found[name]} of {name} for {architecture}, which was {known[name]}"
                    failures.append(f"{source.name} {tools.version}: {words}")
                elif known != found:
                    row[architecture] = found
                    row["known"] = f"{today}: downloaded from {place}"
                    lines.append(f"{source.name} {tools.version} {architecture}: {len(found)} digests")
            row.setdefault(architecture, {})
    for name, versions in old.items():
        lines += [f"{name} {version}: dropped" for version in versions if version not in new[name]]
    return new, lines, failures


def written(pins: dict[str, t.Any], text: str) -> str:
    """Return the file with a new table.

    :param text: the file as it is, whose first comment stays.
    """
    head = text[: text.index(f"\n{next(iter(pins))}:") + 1]
    return head + yaml.dump(pins, Dumper=Plain, sort_keys=False, width=1000, default_flow_style=False)


def main(arguments: t.Sequence[str] | None = None, root: Path = ROOT, scheme: str = "https") -> int:
    parser = argparse.ArgumentParser(description="Update every digest of meta/pins.yml.")
    parser.add_argument("--dry-run", action="store_true", help="print what would change, and write nothing")
    parser.add_argument("--mirror", action="append", default=[], metavar="FROM=TO", help="download from TO instead")
    given = parser.parse_args(arguments)
    mirrors = dict(one.split("=", 1) for one in given.mirror if "=" in one)
    if len(mirrors) != len(given.mirror):
        parser.error("--mirror needs the beginning of a URL, =, and what replaces it, and each beginning once")
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    pins, lines, failures = update(root, today, mirrors, scheme)
    downloads, further, failed = update_released(root, today, mirrors)
    failures += failed
    for line in [*lines, *further] or ["Nothing changed."]:
        print(printable(line))
    for line in failures:
        print(f"not updated: {printable(line)}", file=sys.stderr)
    if further and not given.dry_run:
        path = root / RELEASED
        path.write_text(written(downloads, path.read_text(encoding="utf-8")), encoding="utf-8")
    if lines and not given.dry_run:
        path = root / "meta/pins.yml"
        path.write_text(written(pins, path.read_text(encoding="utf-8")), encoding="utf-8")
        base = pins["images"]["base"]
        file = root / CONTAINERFILE
        reference = f"{base['url']}@{base['digest']}" if base["digest"] else base["url"]
        file.write_text(BASE.sub(rf"\g<1>{reference}", file.read_text(encoding="utf-8")), encoding="utf-8")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
