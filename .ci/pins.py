# SPDX-License-Identifier: GPL-3.0-or-later
"""Update every digest of meta/pins.yml, and the base image in images/gpushare/Containerfile, in one go: ``make pins``.

In lab/released.yml it fills in what isn't known of the lab's own versions, from the lists that their projects publish
beside the files. A released file never changes, so another digest than a known one is a failure.

Downloads each key and chart from its URL, asks each image's registry, prints what changed, and writes the files. Charts
are rendered by helm: the tags of the images that they name come from there, and an image that a chart names and that
isn't in the table, or the other way around, is a failure. With
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
import shutil
import signal
import subprocess
import sys
import tempfile
import typing as t
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / ".collections"), str(ROOT)]

from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput  # noqa: E402
from ansible_collections.kubegpu.share.plugins.module_utils._core.untrusted import line as printable  # noqa: E402
from ansible_collections.kubegpu.share.plugins.module_utils._packages.options import LARGEST, fingerprint  # noqa: E402
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap import manifests, web  # noqa: E402
from ansible_collections.kubegpu.share.plugins.plugin_utils._pins import index, table  # noqa: E402

from lab import build, released, settings  # noqa: E402
from lab.shell import LabError  # noqa: E402

# Bytes; charts have some 100 KiB, indexes of repositories some MiB.
LARGEST_FILE = 64 << 20
# Of one answer, from the name server's to its last byte.
SECONDS = 60
RELEASED = "lab/released.yml"
SHA256 = re.compile(r"[0-9a-f]{64}")
CONTAINERFILE = "images/gpushare/Containerfile"
BASE = re.compile(r"^(ARG BASE=).*$", re.MULTILINE)
# Where the name of a registry in references isn't its address.
HUB = {"docker.io": "registry-1.docker.io"}
# By chart, where the role's defaults have its version; another one keeps the version of the table.
VERSIONS = {
    "hami": ("hami", "hami_chart_version"),
    "nvidia-device-plugin": ("nvidia_device_plugin", "nvidia_device_plugin_chart_version"),
    "gpu-operator": ("gpu_operator", "gpu_operator_chart_version"),
    "dcgm-exporter": ("nvidia_device_plugin", "nvidia_device_plugin_dcgm_exporter_chart_version"),
}


# By name, what has the version of a program.
PROGRAMS = {"helm": build.HELM}
# Of any chart: it isn't an entry of the table, since its tag is the cluster's version.
KUBE_SCHEDULER = "registry.k8s.io/kube-scheduler"
# By chart, the values by which it names all images that a node may pull, as its role gives them (test_airgap.py).
VALUES: dict[str, dict[str, t.Any]] = {
    "hami": {
        "scheduler": {
            # The role makes the certificate, and takes Kubernetes' own image of the cluster's version.
            "patch": {"enabled": False},
            "kubeScheduler": {"image": {"registry": "", "repository": KUBE_SCHEDULER, "tag": "v1"}},
        }
    },
    "nvidia-device-plugin": {
        "gfd": {"enabled": True},
        "nfd": {"enabled": True},
        "config": {"default": "one", "map": {"one": "version: v1"}},
    },
}


# Parts of a ClusterPolicy that run with its sandboxWorkloads only (NVIDIA/gpu-operator, controllers/state_manager.go).
SANDBOX = (
    *("vgpuManager", "vfioManager", "vgpuDeviceManager", "ccManager", "kataManager"),
    *("sandboxDevicePlugin", "kataSandboxDevicePlugin"),
)
# Images whose tags are complete with a node's distribution only: their registry isn't asked for one of all nodes.
OF_NODES = ("gpu-operator-driver",)


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
    try:
        found = index.entries(content, name)
    except BadInput as error:
        raise NotUpdated(f"{url} {error}") from error
    if not found:
        raise NotUpdated(f"{url} has no chart {name}")
    return found


def chart(name: str, pin: dict[str, str], version: str) -> tuple[dict[str, str], bytes]:
    """Return version and digest of a chart, and its archive: an index may claim any digest."""
    folder = pin["url"].rstrip("/") + "/"
    entries = entries_of(f"{folder}index.yaml", name)
    try:
        [entry] = [one for one in entries if str(one["version"]).removeprefix("v") == version.removeprefix("v")]
        url = urllib.parse.urljoin(folder, str(entry["urls"][0]))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise NotUpdated(f"{folder}index.yaml has no chart {name} {version}") from error
    if not url.startswith(("http://", "https://")):
        raise NotUpdated(f"{folder}index.yaml: chart {name} {version} is at {url!r}, which is no web address")
    content = fetch(url).content
    found = hashlib.sha256(content).hexdigest()
    if entry.get("digest") not in (None, "", found):
        raise NotUpdated(f"{url} has SHA-256 {found}, and {folder}index.yaml says {entry['digest']}")
    return {"version": version, "sha256": found}, content


def find_helm() -> str:
    """Return helm's path: the one in PATH, or the lab's, which is built where there is none.

    :raises NotUpdated: there is neither.
    """
    try:
        return shutil.which("helm") or str(build.built(build.HELM) / "helm")
    except (LabError, OSError) as error:
        raise NotUpdated(f"charts can't be rendered without helm: {error}") from error


def images_in(value: t.Any) -> set[str]:
    """Return the images in objects, at any depth: ``image``, or its parts as the GPU Operator's ClusterPolicy has them.

    What a ClusterPolicy has switched off isn't pulled.
    """
    if isinstance(value, list):
        return set().union(*map(images_in, value))
    if not isinstance(value, dict) or value.get("enabled") is False:
        return set()
    spec = value.get("spec")
    if value.get("kind") == "ClusterPolicy" and not (spec.get("sandboxWorkloads") or {}).get("enabled"):
        return images_in({name: part for name, part in spec.items() if name not in SANDBOX})
    own = {value["image"]} if isinstance(value.get("image"), str) else set()
    if own and value.get("repository") and value.get("version"):
        own = {f"{value['repository']}/{value['image']}:{value['version']}"}
    return own.union(*map(images_in, value.values()))


def named_images(name: str, content: bytes, helm: str) -> set[str]:
    """Return the images that a chart names, with tags, from what helm makes of its archive.

    :param name: the chart's.
    :raises NotUpdated: helm can't render it, or it names none.
    """
    with tempfile.TemporaryDirectory() as folder:
        archive, values = Path(folder) / "chart.tgz", Path(folder) / "values.yaml"
        archive.write_bytes(content)
        values.write_text(yaml.safe_dump(VALUES.get(name, {})), encoding="utf-8")
        command = (helm, "template", "x", archive, "--namespace", "x", "--kube-version", "1.36.3", "--values", values)
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False, cwd=folder)
    if done.returncode:
        raise NotUpdated(f"helm can't render it: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    try:
        objects = list(yaml.load_all(done.stdout, getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    except yaml.YAMLError as error:
        raise NotUpdated(f"helm makes no YAML of it: {error}") from error
    found = {each for each in images_in(objects) if each.rpartition(":")[0] != KUBE_SCHEDULER}
    if not found:
        raise NotUpdated("it names no image, so how the list of images is made has to follow it")
    return found


def taken_up(name: str, images: dict[str, t.Any], found: set[str]) -> list[str]:
    """Give the entries of a chart's images the tags that it names, and return a line for each change.

    :param found: names and tags of all images that the chart names.
    :raises NotUpdated: entries and images aren't the same.
    """
    own = {pin["url"].rpartition(":")[0]: (key, pin) for key, pin in images.items() if pin["chart"] == name}
    named = {each.rpartition(":")[0]: each for each in found}
    if set(own) != set(named) or len(named) != len(found):
        rows = ", ".join(sorted(own)) or "none"
        raise NotUpdated(f"it names {', '.join(sorted(found))}, and section images has {rows} of chart {name}")
    lines = []
    for repository, (key, pin) in own.items():
        if pin["url"] != named[repository]:
            lines.append(f"images: {key}: url: {pin['url']} -> {named[repository]}")
            pin.update(url=named[repository], digest="", platforms={}, known="the chart's archive, rendered")
    return lines


def image(pin: dict[str, t.Any], scheme: str = "https") -> dict[str, t.Any]:
    """Return the digest of an image's index, and of each architecture's manifest with the bytes of its download.

    That of one platform alone would leave out the others. A digest is computed from what the registry sends, and has to
    be the one that it, or the index, names.
    """
    registry, _slash, rest = pin["url"].partition("/")
    repository, colon, tag = rest.rpartition(":")
    if not colon or "/" in tag or "@" in rest:
        raise NotUpdated(f"{pin['url']} isn't an image's name with registry and tag")
    folder = f"{scheme}://{HUB.get(registry, registry)}/v2/{repository}/manifests"
    digest, listed = _manifest(f"{folder}/{tag}")
    if listed["mediaType"] not in manifests.INDEXES:
        kind = listed["mediaType"] or "of no known type"
        raise NotUpdated(f"{folder}/{tag} is {kind}, and not an index of several platforms")
    platforms = {}
    try:
        for row in listed.get("manifests") or ():
            platform = row.get("platform") or {}
            name = platform.get("architecture")
            if platform.get("os") != "linux" or name not in table.ARCHITECTURES or name in platforms:
                continue
            own, manifest = _manifest(f"{folder}/{row['digest']}", str(row["digest"]))
            size = sum(int(part["size"]) for part in (manifest["config"], *manifest["layers"]))
            platforms[name] = {"digest": own, "bytes": size + int(row["size"])}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise NotUpdated(f"{folder}/{tag} isn't an index with manifests of platforms: {error}") from error
    return {"digest": digest, "platforms": platforms}


def _manifest(url: str, expected: str = "") -> tuple[str, dict[str, t.Any]]:
    """Return the digest of a manifest or an index, and it with its type as ``mediaType``.

    :param expected: the digest; empty for the one that the registry names.
    """
    answer = _with_token(url, {"Accept": ", ".join((*manifests.INDEXES, *manifests.MANIFESTS))})
    headers = {name.lower(): value for name, value in answer.headers.items()}
    try:
        found = json.loads(answer.content)
        kind = found.get("mediaType") or headers.get("content-type", "").split(";")[0]
    except (ValueError, AttributeError) as error:
        raise NotUpdated(f"{url} isn't a manifest") from error
    digest = f"sha256:{hashlib.sha256(answer.content).hexdigest()}"
    named = expected or headers.get("docker-content-digest", digest)
    if named != digest:
        raise NotUpdated(f"{url} has digest {digest}, and its registry says {named}")
    return digest, {**found, "mediaType": kind}


def _with_token(url: str, headers: dict[str, str]) -> Answer:
    """Download from a registry, with a token for anybody where it wants one."""
    try:
        return fetch(url, headers)
    except NotUpdated as error:
        cause = error.__cause__
        if not isinstance(cause, urllib.error.HTTPError) or cause.code != 401:
            raise
        place = web.token_address(cause.headers.get("WWW-Authenticate", ""), ("http://", "https://"))
        if not place:
            raise
    try:
        token = web.token_of(fetch(place).content)
    except ValueError as error:
        raise NotUpdated(f"{place.partition('?')[0]} gives no token") from error
    return fetch(url, {**headers, "Authorization": f"Bearer {token}"})


def build_version(name: str) -> str:
    """Return the version of a program that the collection is tested with: the lab's."""
    return PROGRAMS[name].version


def program(pin: dict[str, str], version: str, mirrors: t.Mapping[str, str]) -> dict[str, str]:
    """Return address and digests of a program's release, as its project publishes them beside the files.

    :raises NotUpdated: a digest can't be had, or a release has another one than before.
    """
    url = pin["url"].replace(pin["version"], version)
    new = {"url": url, "version": version}
    for architecture in table.ARCHITECTURES:
        place = mirrored(url.replace("{architecture}", architecture), mirrors)
        new[architecture] = published(f"{place}.sha256sum", place.rpartition("/")[2])
        if version == pin["version"] and pin[architecture] not in ("", new[architecture]):
            raise NotUpdated(f"{place} has SHA-256 {new[architecture]}, which was {pin[architecture]}")
    return new


def version_of(root: Path, name: str, pin: dict[str, str]) -> str:
    """Return the version of a chart that its role deploys by default."""
    role, variable = VERSIONS.get(name, ("", ""))
    if not role:
        return pin["version"]
    defaults = yaml.safe_load((root / f"roles/{role}/defaults/main.yml").read_text())
    return str(defaults[variable] or pin["version"])


def update(
    root: Path,
    today: str,
    mirrors: t.Mapping[str, str],
    scheme: str = "https",
    rendered: t.Callable[[str, bytes], set[str]] = lambda name, content: named_images(name, content, find_helm()),
) -> tuple[dict[str, t.Any], list[str], list[str]]:
    """Return the new table, a line for each change, and the failures.

    :param mirrors: beginnings of URLs, and what replaces them for the download.
    :param scheme: of registries.
    :param rendered: returns the images that a chart names, by its name and its archive.
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
                elif section == "programs":
                    new = program(pin, build_version(name), mirrors)
                elif section == "charts":
                    new, content = chart(name, source, version_of(root, name, pin))
                    # The images come after the charts.
                    lines += taken_up(name, pins["images"], rendered(name, content))
                elif name in OF_NODES:
                    continue
                else:
                    new = image(source, scheme)
            except NotUpdated as error:
                failures.append(f"{section}: {name}: {error}")
                continue
            changed = [field for field, value in new.items() if pin[field] != value]
            lines += [f"{section}: {name}: {field}: {_shown(pin[field])} -> {_shown(new[field])}" for field in changed]
            if changed:
                pin.update(new, known=f"{today}: downloaded from {source['url']}")
    return pins, lines, failures


def _shown(value: t.Any) -> str:
    """Return a value of a pin for a line."""
    if isinstance(value, dict):
        value = ", ".join(f"{name} {row['digest']} ({row['bytes']} bytes)" for name, row in value.items())
    return str(value or "unknown")


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


def main(arguments: t.Sequence[str] | None = None, root: Path = ROOT, scheme: str = "https", **more: t.Any) -> int:
    parser = argparse.ArgumentParser(description="Update every digest of meta/pins.yml.")
    parser.add_argument("--dry-run", action="store_true", help="print what would change, and write nothing")
    parser.add_argument("--mirror", action="append", default=[], metavar="FROM=TO", help="download from TO instead")
    given = parser.parse_args(arguments)
    mirrors = dict(one.split("=", 1) for one in given.mirror if "=" in one)
    if len(mirrors) != len(given.mirror):
        parser.error("--mirror needs the beginning of a URL, =, and what replaces it, and each beginning once")
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    pins, lines, failures = update(root, today, mirrors, scheme, **more)
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
