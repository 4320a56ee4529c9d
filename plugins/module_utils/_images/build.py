# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Build the servers' image with podman, buildah or docker, and decide how the nodes get it.

Each platform gets an archive and its bill of materials. A record file beside them has the digests of their inputs and
of what was pushed; the next run compares them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import posixpath
import re
import typing as t

from .._core.errors import BadInput, NotInEffect
from .._core.plan import Change, Plan, run
from .._core.types import JsonObject
from .._host.system import System
from . import archives
from .delivery import PLATFORMS
from .engine import ENGINES, Engine, choose

CONTAINERFILE = "images/gpushare/Containerfile"
BILL = "opt/gpushare/sbom.cdx.json"
# Marks the first layer of the collection in the image's history; those before it are of the base.
MARK = "gpushare servers"

ARGUMENTS: JsonObject = {
    "reference": {"type": "str", "required": True},
    "engine": {"type": "str", "choices": ["auto", *ENGINES], "default": "auto"},
    "platforms": {"type": "list", "elements": "str", "choices": list(PLATFORMS), "default": list(PLATFORMS)},
    "base": {"type": "str", "required": True},
    "folder": {"type": "path", "required": True},
    "push": {"type": "bool", "default": False},
    "tls_verify": {"type": "bool", "default": True},
    "pip_args": {"type": "str", "default": ""},
    "epoch": {"type": "int", "default": 1767225600},
    "timeout": {"type": "int", "default": 3600},
    "sources": {"type": "str"},
    "context": {"type": "path"},
}


@dataclasses.dataclass(frozen=True)
class Build:
    """An archive to build.

    :param key: digest of its inputs.
    """

    platform: str
    key: str


@dataclasses.dataclass(frozen=True)
class Push:
    """The archives to push as one reference.

    :param key: digest of their inputs.
    """

    key: str


def archive_of(params: JsonObject, platform: str) -> str:
    """Return the path of a platform's archive."""
    name = re.split(r"[:@]", params["reference"].rpartition("/")[2])
    version = f"-{name[1]}" if len(name) > 1 else ""
    return posixpath.join(params["folder"], f"{name[0]}{version}-{platform.partition('/')[2]}.tar")


def bill_of(archive: str) -> str:
    """Return the path of an archive's bill of materials."""
    return re.sub(r"\.tar$", ".cdx.json", archive)


def record_of(params: JsonObject) -> str:
    """Return the path of the record."""
    return re.sub(r"-[^-]*\.tar$", ".json", archive_of(params, "linux/any"))


def identity_of(params: JsonObject) -> str:
    """Return the digest of what the image is built from; machines have it as a label on the image they imported."""
    parts = [params["sources"], params["base"], params["epoch"], params["reference"]]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def key_of(params: JsonObject, platform: str) -> str:
    """Return the digest of a platform's inputs."""
    return hashlib.sha256(f"{identity_of(params)} {platform}".encode()).hexdigest()


def validate(params: JsonObject) -> None:
    """Validate the options.

    :raises BadInput: an option is invalid.
    """
    last = params["reference"].rpartition("/")[2]
    if not re.fullmatch(r"[^\s:@]+:[\w][\w.-]{0,127}", last):
        raise BadInput(f"image_build_reference: {params['reference']!r} isn't an image name with a tag")
    if not params["platforms"]:
        raise BadInput("image_build_platforms: set at least one platform")
    if not params["folder"].startswith("/"):
        raise BadInput(f"image_build_folder: {params['folder']} isn't absolute")
    if params["push"] and params["reference"].startswith("localhost/"):
        raise BadInput(f"image_build_reference: {params['reference']} has no registry; image_build_push needs one")


def make_plan(params: JsonObject, state: JsonObject) -> Plan:
    """Plan the archives to build and the push.

    :param state: the record (``built``: by platform ``key`` and ``sha256``; ``pushed``: by reference a key), and by
        platform the SHA-256 of the existing archive as ``archives``.
    """
    built, pushed = state["record"].get("built") or {}, state["record"].get("pushed") or {}
    changes = []
    keys = []
    for platform in dict.fromkeys(params["platforms"]):
        key = key_of(params, platform)
        keys.append(key)
        recorded = built.get(platform) or {}
        existing = state["archives"].get(platform)
        if recorded.get("key") != key or existing is None or recorded.get("sha256") != existing:
            before = f"sources: {recorded.get('key', 'none')}\n" if existing else ""
            changes.append(Change(archive_of(params, platform), before, f"sources: {key}\n", Build(platform, key)))
    push_key = hashlib.sha256("".join(keys).encode()).hexdigest()
    if params["push"] and (changes or pushed.get(params["reference"]) != push_key):
        before = f"sources: {pushed[params['reference']]}\n" if params["reference"] in pushed else ""
        changes.append(Change(f"registry: {params['reference']}", before, f"sources: {push_key}\n", Push(push_key)))
    return Plan(tuple(changes))


class ImageBuild:
    """The ``Reconciler`` of archives and registry.

    :ivar record: as the file has it, once it was observed.
    """

    def __init__(self, system: System, params: JsonObject) -> None:
        self._system = system
        self._params = params
        self.record: JsonObject = {}
        self._context = ""

    def observe(self) -> JsonObject:
        try:
            self.record = json.loads(self._system.read(record_of(self._params)) or "{}")
        except ValueError:
            self.record = {}
        paths = {platform: archive_of(self._params, platform) for platform in self._params["platforms"]}
        return {
            "record": self.record,
            "archives": {platform: archives.digest_of(path) for platform, path in paths.items()},
        }

    def plan(self, state: JsonObject) -> Plan:
        return make_plan(self._params, state)

    def apply(self, state: JsonObject, plan: Plan) -> None:
        params = self._params
        tool = Engine(self._system, self.engine(plan), params["tls_verify"], params["timeout"])
        context = posixpath.join(posixpath.dirname(params["context"]), "sources")
        tool.do(["mkdir", "-p", context])
        tool.do(["tar", "-xf", params["context"], "-C", context])
        self._context = context
        for change in plan.changes:
            if isinstance(change.step, Build):
                sha256 = self._build(tool, change.step.platform)
                self._write_record("built", change.step.platform, {"key": change.step.key, "sha256": sha256})
        for change in plan.changes:
            if isinstance(change.step, Push):
                paths = {platform: archive_of(params, platform) for platform in params["platforms"]}
                digest = tool.push(params["reference"], paths)
                self._write_record("digests", params["reference"], digest)
                self._write_record("pushed", params["reference"], change.step.key)

    def engine(self, plan: Plan) -> str:
        """Return the first engine that works here and can build what is planned.

        :raises BadInput: there is none.
        """
        platforms = {change.step.platform for change in plan.changes if isinstance(change.step, Build)}
        return choose(self._system, self._params["engine"], platforms)

    def _write_record(self, section: str, name: str, value: t.Any) -> None:
        self.record.setdefault(section, {})[name] = value
        self._system.write(record_of(self._params), json.dumps(self.record, indent=2, sort_keys=True) + "\n")

    def _build(self, tool: Engine, platform: str) -> str:
        params, archive = self._params, archive_of(self._params, platform)
        fresh = f"{archive}.new"
        self._system.remove(fresh)
        tool.do(["mkdir", "-p", params["folder"]])
        # Not every builder takes a tag beside a digest.
        base = re.sub(r":[^:/@]+(?=@)", "", params["base"])
        arguments = {"BASE": base, "PIP_ARGS": params["pip_args"]}
        recipe = f"{self._context}/{CONTAINERFILE}"
        tool.build(recipe, self._context, platform, arguments, params["epoch"], params["reference"], fresh)
        archives.normalize(fresh, f"{fresh}.same", params["reference"], params["epoch"], MARK)
        bill = archives.file_in(f"{fresh}.same", BILL)
        if not bill:
            raise NotInEffect(f"the image for {platform} has no {BILL}")
        self._system.write(bill_of(archive), bill)
        tool.do(["mv", f"{fresh}.same", archive])
        self._system.remove(fresh)
        return str(archives.digest_of(archive))


def ensure(params: JsonObject, check_mode: bool, system: System) -> JsonObject:
    """Build and push what differs; without ``context`` only predict it.

    :returns: also the archives and bills by platform, and the digest under which the registry has what was pushed.
    :raises BadInput: an option is invalid, or nothing on this machine can build what differs.
    """
    validate(params)
    if not params["sources"]:
        raise BadInput("sources: the module runs only through its action plugin, which sets this option")
    build = ImageBuild(system, params)
    if check_mode or not params["context"]:
        plan = build.plan(build.observe())
        if not plan.empty:
            build.engine(plan)
        result: JsonObject = {"changed": not plan.empty, "diff": plan.diff()}
    else:
        result = run(build, check=False)
    paths = {platform: archive_of(params, platform) for platform in params["platforms"]}
    bills = {platform: bill_of(path) for platform, path in paths.items()}
    digest = (build.record.get("digests") or {}).get(params["reference"], "") if params["push"] else ""
    return {**result, "archives": paths, "bills": bills, "digest": digest}
