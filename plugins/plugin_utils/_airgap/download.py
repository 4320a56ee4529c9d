# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Fill the archive's folder with what an inventory needs, list it, sign it, and pack it: observe, plan, apply.

What is whole is kept: after a full disk, a lost connection or a killed run the next one goes on. SHA256SUMS is written
last, so that a folder without it is not an archive.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import sys
import typing as t

import yaml

from ...module_utils._core.errors import BadInput, ShareError
from ...module_utils._core.plan import Change, Plan
from ...module_utils._core.types import JsonObject
from ...module_utils._core.untrusted import line
from ...module_utils._mirrors.types import DESCRIPTION
from . import archive, pack, signature
from .archive import CONTENTS, INSTALLER, PACKAGES, PART, SIGNATURE, SUMS, Contents, Entry, LeftOut
from .artifacts import Artifact, entry
from .download_files import Chart, File, Local
from .download_images import UNFINISHED, Registry, images
from .download_python import MACHINES, OWN, Collections, Own, script, target, wheels
from .layout import BLOBS, INDEX, LAYOUT, blob_path
from .needed import CHART, COLLECTION, FILE, IMAGE, OPERATOR, WHEEL, Item
from .package_sets import MachineFacts, parsed
from .programs import Run, run
from .progress import Progress, Tell
from .store import Failed, Store
from .table import Table
from .web import Fetch, fetch

# Names of architectures that are downloaded for, as dpkg has them.
ARCHITECTURES = ("amd64", "arm64")
MOST_TO_SHOW = 5
RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the user has set.

    :param folder: the archive's, absolute.
    :param tar: the archive as a file; empty for the folder alone.
    :param signing_key: of gpg's keyring; empty for an archive without a signature.
    :param auth_file: credentials of registries; empty for those of the user who runs this.
    :param collection: tarball of this collection; empty for the one that is installed.
    :param controller_python: version of Python on the controller inside; empty for the one that runs this.
    :param controller_architecture: its processor; ``own_architecture`` is this machine's, empty for one without images.
    :param architectures: of the machines.
    :param kinds: of items that are fetched.
    :param repositories: folders of package repositories that this run has fetched; None to keep those that are there.
    :param gpg_home: gpg's folder; empty for the user's.
    :param unverified: files and charts are taken of which neither a digest nor TLS says that they are the right ones.
    """

    folder: str
    tar: str = ""
    signing_key: str = ""
    auth_file: str = ""
    collection: str = ""
    controller_python: str = ""
    controller_architecture: str = "amd64"
    own_architecture: str = "amd64"
    architectures: tuple[str, ...] = ("amd64",)
    kinds: tuple[str, ...] = (IMAGE, CHART, "apt", "rpm", FILE, WHEEL, COLLECTION)
    skopeo: str = "skopeo"
    repositories: tuple[str, ...] | None = None
    gpg_home: str = ""
    unverified: bool = False


@dataclasses.dataclass(frozen=True)
class State:
    """What the folder has.

    :param sums: SHA-256 of each file by its path.
    :param strange: paths of links and devices.
    :param held: by ``Artifact.request_sha256`` what a former run has fetched for it.
    """

    contents: Contents
    sums: t.Mapping[str, str]
    strange: tuple[str, ...]
    held: t.Mapping[str, list[Entry]]
    signed: bool
    packed: bool


class Requested(t.NamedTuple):
    """What is to be fetched, and what isn't."""

    artifacts: list[Artifact]
    packages: list[Item]
    left_out: list[LeftOut]


def requested(
    items: t.Sequence[Item],
    table: Table,
    settings: Settings,
    program: Run = run,
    fetcher: Fetch = fetch,
) -> Requested:
    """Return the artifacts that bring a list's items.

    :raises BadInput: a setting isn't valid.
    """
    registry = Registry(program, settings.auth_file, settings.skopeo)
    by_kind: dict[str, list[Item]] = {}
    left_out: list[LeftOut] = []
    for item in items:
        reason = _reason(item, settings.kinds)
        if reason:
            left_out.append(t.cast(LeftOut, {**item, "reason": reason}))
        else:
            by_kind.setdefault(item["kind"], []).append(item)
    own_images = by_kind.get(IMAGE, [])
    artifacts: list[Artifact] = [*images(registry, own_images)]
    artifacts += [Chart(fetcher, registry, item, settings.unverified) for item in by_kind.get(CHART, [])]
    for item in by_kind.get(FILE, []):
        key = str(table["files"].get(item["id"].removeprefix("files/"), {}).get("fingerprint") or "")
        remote = "://" in item["source"]
        architecture = settings.controller_architecture
        file = File(fetcher, item, architecture, key, settings.unverified)
        artifacts.append(file if remote else Local(item, item["place"]))
    _refuse_same_names([artifact for artifact in artifacts if isinstance(artifact, Local)])
    python, architecture = settings.controller_python, settings.controller_architecture
    own = RUNNING if not python and architecture != settings.own_architecture else python
    options = target(own, architecture) if own else []
    of_wheels = by_kind.get(WHEEL, [])
    artifacts += wheels(of_wheels, table["wheels"], own_images, settings.architectures, options, program)
    collections = by_kind.get(COLLECTION, [])
    others = [item for item in collections if item["name"] != OWN]
    artifacts += [Collections(others, program)] if others else []
    artifacts += [Own(item, settings.collection, program) for item in collections if item["name"] == OWN]
    return Requested(artifacts, [*by_kind.get("apt", []), *by_kind.get("rpm", [])], left_out)


def _refuse_same_names(files: t.Sequence[Local]) -> None:
    paths: dict[str, str] = {}
    for file in files:
        other = paths.setdefault(os.path.basename(file.path), file.path)
        if other != file.path:
            raise BadInput(f"{other} and {file.path} can't have the same name in an archive: rename one of them")


class Listed(t.NamedTuple):
    """A list that came from a file."""

    items: list[Item]
    machines: list[MachineFacts]


def listed(path: str) -> Listed:
    """Return a list that playbook airgap_list.yml has written in format yaml.

    :raises BadInput: it can't be read, or isn't one.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(archive.LARGEST + 1)
        if len(content) > archive.LARGEST:
            raise ValueError(f"it has more than {archive.LARGEST >> 20} MiB")
        known = yaml.load(content, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        if not isinstance(known, dict) or known.get("format") != archive.FORMAT or not known.get("items"):
            raise ValueError("it has no items of format 1")
        machines = [parsed(row) for row in known.get("machines") or ()]
        return Listed([archive.item_of(row) for row in known["items"]], machines)
    except OSError as error:
        raise BadInput(f"airgap_needed: {path} can't be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, RecursionError, yaml.YAMLError) as error:
        raise BadInput(
            f"airgap_needed: {path} isn't a list that playbook kubegpu.share.airgap_list has written with "
            f"airgap_format yaml: {line(error, 200)}"
        ) from error


def _reason(item: Item, kinds: t.Collection[str]) -> str:
    """Return why an item isn't fetched; empty where it is."""
    if item["kind"] == OPERATOR:
        return "operator"
    if item["kind"] not in kinds:
        return "not_selected"
    if item["kind"] == IMAGE and item["source"].startswith(("playbook ", "localhost/")):
        return "made_elsewhere"
    if item["kind"] == FILE and "://" not in item["source"] and not item["place"]:
        return "no_address"
    return ""


class Download:
    """Makes the archive; a ``Reconciler``.

    :param tell: prints a line for each artifact that is fetched.
    """

    def __init__(self, wanted: Requested, settings: Settings, tell: Tell, program: Run = run) -> None:
        self._wanted = wanted
        self._settings = settings
        self._tell = tell
        self._program = program
        self.store = Store(settings.folder)
        # Fingerprints of the key that signs.
        self._signers: frozenset[str] = frozenset()

    def require(self) -> None:
        """Refuse what would fail at the end only: a key that doesn't sign.

        :raises BadInput: gpg hasn't the key, or is missing.
        """
        if self._settings.signing_key:
            own = self._settings.signing_key, self._program, self._settings.gpg_home
            self._signers = signature.require(*own)

    # ------------------------------------------------------------------ observe

    def observe(self) -> State:
        store, settings = self.store, self._settings
        store.examine()
        sums, strange = store.files()
        state = State(store.contents(), sums, tuple(strange), {}, False, False)
        held = {artifact.request_sha256: artifact.held(store, state) for artifact in self._wanted.artifacts}
        signed = os.path.lexists(store.at(SIGNATURE))
        if settings.signing_key and signed:
            paths = store.at(SUMS), store.at(SIGNATURE)
            signed = signature.is_signed(*paths, self._signers, self._program, settings.gpg_home)
        try:
            packed = not settings.tar or pack.is_packed(store.folder, settings.tar)
        except BadInput:
            packed = False
        return dataclasses.replace(state, held=held, signed=signed, packed=packed)

    def summary(self, state: State) -> JsonObject:
        """Return what the task returns beside ``changed`` and ``diff``.

        ``unverified`` are files of which only the server's certificate, or nothing, says that they are the right ones,
        and charts of which that may be so.
        """
        artifacts = self._wanted.artifacts
        unverified = [
            artifact.name for artifact in artifacts if isinstance(artifact, (File, Chart)) and not artifact.verified
        ]
        fields = ("kind", "name", "version", "reason")
        rows = self._entries(state.held, state.sums).left_out
        left_out = [{field: value for field, value in each.items() if field in fields} for each in rows]
        return {"count": len(artifacts), "unverified": unverified, "left_out": left_out}

    # ------------------------------------------------------------------ plan

    def plan(self, state: State) -> Plan:
        changes = [
            Change(artifact.name, "", "in the archive\n", artifact)
            for artifact in self._wanted.artifacts
            if not state.held[artifact.request_sha256]
        ]
        fetched = bool(changes)
        if not fetched:
            changes += [Change(path, "in the folder\n", "") for path in self._superfluous(state)]
        if changes or not self._is_listed(state):
            changes.append(Change(SUMS, "", "of this content\n"))
        if changes or not state.packed:
            changes += [Change(self._settings.tar, "", "of this content\n")] if self._settings.tar else []
        return Plan(tuple(changes))

    def _entries(self, held: t.Mapping[str, list[Entry]], sums: t.Mapping[str, str]) -> Contents:
        """Return what contents.json has to say, but for its time."""
        found = [each for artifact in self._wanted.artifacts for each in held[artifact.request_sha256]]
        packages, unresolved = self._packages(sums)
        rows = sorted([*found, *packages], key=lambda each: (each["id"], each["name"], each["path"]))
        left_out = sorted([*self._wanted.left_out, *unresolved], key=lambda each: (each["id"], each["name"]))
        return Contents("", tuple(rows), tuple(left_out))

    def _packages(self, sums: t.Mapping[str, str]) -> tuple[list[Entry], list[LeftOut]]:
        """Return the packages that partial repositories in the folder have, and those that none has."""
        known: dict[tuple[str, str], dict[str, str]] = {}
        for path in sorted(sums):
            parts = path.split("/")
            if len(parts) == 4 and parts[0] == PACKAGES and parts[3] == DESCRIPTION:
                address, names = self._described(path)
                for name in names:
                    known.setdefault((parts[1], name), {})[path.rpartition("/")[0]] = address
        artifact = _Resolved()
        found: list[Entry] = []
        left_out: list[LeftOut] = []
        for item in self._wanted.packages:
            folders = known.get((item["kind"], item["name"]), {})
            # The distribution's own packages are those of each distribution that has resolved them.
            own = [folder for folder, address in folders.items() if address == item["source"].rstrip("/")]
            found += [entry(artifact, item, folder, 0, "") for folder in own or folders]
            if not folders:
                left_out.append(t.cast(LeftOut, {**item, "reason": "not_resolved"}))
        return found, left_out

    def _described(self, path: str) -> tuple[str, list[str]]:
        """Return a partial repository's address, and the names of the packages that it has."""
        try:
            known = json.loads(archive.small(self.store.folder, path))
            return str(known["address"]).rstrip("/"), [str(row["name"]) for row in known["packages"]]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise BadInput(f"{self.store.at(path)} isn't the description of a package repository") from error

    def _kept(self, held: t.Mapping[str, list[Entry]], sums: t.Mapping[str, str]) -> set[str]:
        """Return the paths of all files that the archive is to have."""
        known = self._settings.repositories
        packages = {path for path in sums if path.startswith(f"{PACKAGES}/")}
        if known is not None:
            packages = {path for path in packages if "/".join(path.split("/")[:3]) in known}
        kept = packages | {CONTENTS}
        entries = [each for rows in held.values() for each in rows]
        kept |= {each["path"] for each in entries if each["sha256"]}
        digests = {each["digest"] for each in entries if each["image"]}
        for digest in digests:
            kept |= {blob_path(part) for part in self.store.layout.parts(digest)}
        return kept | ({INDEX, LAYOUT} if digests else set()) | ({INSTALLER} if self._script(entries) else set())

    def _superfluous(self, state: State) -> list[str]:
        return sorted(set(state.sums) - self._kept(state.held, state.sums)) + sorted(state.strange)

    def _is_listed(self, state: State) -> bool:
        """Return whether contents.json, the script, SHA256SUMS and the signature are those of what is there."""
        contents = dataclasses.replace(self._entries(state.held, state.sums), created=state.contents.created)
        texts = {CONTENTS: archive.render(contents), INSTALLER: self._script(contents.items)}
        same = all(self._text(path) == (text or None) for path, text in texts.items())
        names = {each["image"] for each in contents.items if each["image"]}
        whole = same and self._text(SUMS) == archive.render_sums(state.sums) and set(self.store.images()) == names
        return whole and state.signed == bool(self._settings.signing_key)

    def _script(self, entries: t.Iterable[Entry]) -> str:
        own = self._settings
        return script(entries, own.controller_python or RUNNING, own.controller_architecture)

    def _text(self, path: str) -> str | None:
        try:
            return archive.small(self.store.folder, path).decode("utf-8", "replace")
        except BadInput:
            return None

    # ------------------------------------------------------------------ apply

    def apply(self, state: State, plan: Plan) -> None:
        """Fetch what is missing; each artifact that is there stays, whatever happens to the others.

        :raises BadInput: something can't be fetched or written.
        """
        artifacts = [change.step for change in plan.changes if change.step]
        listed = any(change.header == SUMS for change in plan.changes)
        with self.store.alone():
            if listed:
                self._begin(state)
                self._fetch(state, artifacts)
            if self._settings.tar:
                self._tell(f"packing {self._settings.tar}")
                pack.pack(self.store.folder, self._settings.tar)

    def _begin(self, state: State) -> None:
        """Make an incomplete folder of the archive, and remove what isn't what its name says."""
        for path in (SUMS, SIGNATURE, *state.strange):
            self.store.remove(path)
        for path, sha256 in state.sums.items():
            # skopeo would take a damaged blob for one that is there already.
            damaged = path.startswith(f"{BLOBS}/") and path.rpartition("/")[2] != sha256
            if damaged or path.startswith(UNFINISHED):
                self.store.remove(path)

    def _fetch(self, state: State, artifacts: t.Sequence[Artifact]) -> None:
        held, failed = dict(state.held), []
        progress = Progress(self._tell, [artifact.size for artifact in artifacts])
        for artifact in artifacts:
            progress.begin(artifact.name)
            artifact.watch = progress.within
            try:
                with self.store.work() as work:
                    brought = artifact.fetch(self.store, work)
                # Items of the same image have the same path and bytes.
                progress.end(sum({(each["path"], each["image"]): each["bytes"] for each in brought}.values()))
                held[artifact.request_sha256] = brought
                self._save(held)
            except Failed as error:
                progress.end(0)
                full = not error.stop and self.store.is_full()
                reason = f"the disk of {self.store.folder} is full" if full else str(error)
                code = "full" if full else error.code
                failed.append({**error.fields, "name": artifact.name, "code": code, "reason": reason})
                if error.stop or full:
                    break
        if failed:
            raise _incomplete(self.store.folder, failed, len(artifacts))
        try:
            self._finish(held)
        except Failed as error:
            name = {"name": SUMS, "code": error.code, "reason": str(error)}
            raise _incomplete(self.store.folder, [name], len(artifacts)) from error

    def _save(self, held: t.Mapping[str, list[Entry]]) -> None:
        """Write what is there so far, so that a killed run is taken up where it was."""
        contents = self._entries(held, self.store.files()[0])
        self.store.put(CONTENTS, archive.render(contents).encode())

    def _finish(self, held: t.Mapping[str, list[Entry]]) -> None:
        store = self.store
        sums, _strange = store.files()
        names = {each["image"] for rows in held.values() for each in rows if each["image"]}
        if names:
            store.write_images({name: each for name, each in store.images().items() if name in names})
        contents = self._entries(held, sums)
        created = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        store.put(CONTENTS, archive.render(dataclasses.replace(contents, created=created)).encode())
        text = self._script(contents.items)
        if text:
            store.put(INSTALLER, text.encode())
        kept = self._kept(held, sums)
        for path in store.files()[0]:
            if path not in kept:
                store.remove(path)
        store.put(SUMS, archive.render_sums(store.files()[0]).encode())
        if self._settings.signing_key:
            self._tell(f"signing {SUMS}")
            part = store.at(f"{SIGNATURE}{PART}")
            signature.sign(store.at(SUMS), part, self._settings.signing_key, self._program, self._settings.gpg_home)
            store.take(part, SIGNATURE)


class _Resolved(Artifact):
    """Packages that the distribution's own tool has resolved and fetched."""

    name, items = "packages", ()

    def request(self) -> t.Sequence[str]:
        return []

    def fetch(self, store: Store, work: str) -> list[Entry]:
        return []


def _incomplete(folder: str, failed: t.Sequence[JsonObject], count: int) -> ShareError:
    shown = [f"{line(each['name'], 200)}: {each['reason']}" for each in failed[:MOST_TO_SHOW]]
    more = f"; and {len(failed) - MOST_TO_SHOW} more" if len(failed) > MOST_TO_SHOW else ""
    return ShareError(
        f"{len(failed)} of {count} can't be fetched: {'; '.join(shown)}{more}. {folder} isn't a complete archive yet; "
        "what is there stays, and the next run goes on",
        code="download_incomplete",
        failed=list(failed),
    )


ARGUMENTS: JsonObject = {
    "needed": {"type": "path"},
    "folder": {"type": "path", "required": True},
    "archive": {"type": "path"},
    "signing_key": {"type": "str", "default": ""},
    "auth_file": {"type": "path"},
    "skopeo": {"type": "str", "default": "skopeo"},
    "repositories": {"type": "list", "elements": "str"},
    "collection": {"type": "path"},
    "controller_python": {"type": "str", "default": ""},
    "controller_architecture": {"type": "str", "default": ""},
    "unverified": {"type": "bool", "default": False},
    "kinds": {"type": "list", "elements": "str", "default": list(archive.FOLDERS)},
}


def settings(params: JsonObject, items: t.Sequence[Item], machine: str) -> Settings:
    """Return what the task's options say.

    :param params: as ``ARGUMENTS``.
    :param machine: uname's name of this machine's processor.
    :raises BadInput: one isn't valid.
    """
    own = {name: architecture for architecture, name in MACHINES.items()}.get(machine, "")
    controller = params["controller_architecture"] or own
    if controller not in ARCHITECTURES:
        raise BadInput(
            f"airgap_controller_architecture: {controller or machine!r} is none of {', '.join(ARCHITECTURES)}: "
            "set it to that of the controller without internet access"
        )
    unknown = sorted(set(params["kinds"]) - set(archive.FOLDERS))
    if unknown:
        raise BadInput(f"airgap_kinds: {line(unknown[0], 80)} is none of {', '.join(archive.FOLDERS)}")
    auth_file = params["auth_file"] or ""
    if auth_file and not os.path.isfile(auth_file):
        raise BadInput(f"airgap_source_auth_file: {auth_file} isn't a file")
    if not params["folder"]:
        raise BadInput("airgap_folder: name the folder that becomes the archive, a new one or that of a former run")
    tar = os.path.abspath(params["archive"]) if params["archive"] else ""
    folder = os.path.abspath(params["folder"])
    if tar and (tar == folder or tar.startswith(f"{folder}/")):
        raise BadInput(f"airgap_archive: {tar} is in airgap_folder, {folder}: name a path outside it")
    if tar and not os.path.isdir(os.path.dirname(tar)):
        raise BadInput(f"airgap_archive: the directory {os.path.dirname(tar)} doesn't exist; create it first")
    machines = {each for item in items for each in item["architectures"]} & set(ARCHITECTURES)
    return Settings(
        folder,
        tar,
        params["signing_key"],
        auth_file,
        params["collection"] or "",
        params["controller_python"],
        controller,
        own,
        tuple(sorted(machines or {controller})),
        tuple(params["kinds"]),
        params["skopeo"],
        None if params["repositories"] is None else tuple(params["repositories"]),
        unverified=params["unverified"],
    )


# What to do about what an archive lacks, by its reason; None where the user has said so.
LEFT_OUT: t.Mapping[str, str | None] = {
    "operator": "bring it by oc mirror",
    "made_elsewhere": "build it inside, or name an archive or a registry by its variable",
    "no_address": "name its file by its variable",
    "not_resolved": "put a host of the GPU nodes' distribution into group airgap_package_hosts, and run it again",
    "not_selected": None,
}


def lacking(left_out: t.Iterable[t.Mapping[str, t.Any]]) -> list[str]:
    """Return a sentence for each reason why something isn't in the archive."""
    names: dict[str, list[str]] = {}
    for each in left_out:
        names.setdefault(each["reason"], []).append(str(line(each["name"], 200)))
    return [
        f"{len(found)} needed but not in the archive ({', '.join(found[:MOST_TO_SHOW])}"
        f"{', ...' if len(found) > MOST_TO_SHOW else ''}): {LEFT_OUT[reason]}"
        for reason, found in names.items()
        if LEFT_OUT[reason]
    ]
