# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Take an archive inside: verify it, push its images, and write the variables by which site.yml finds its items.

Step ``push`` verifies all of it and all variables before anything changes. Step ``variables`` comes when the images and
files are there; ``remove`` removes what it has written.
"""

from __future__ import annotations

import functools
import ipaddress
import json
import os
import re
import shutil
import socket
import typing as t

import yaml
from ansible.errors import AnsibleError
from ansible_collections.kubegpu.share.plugins.module_utils._core import plan
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._core.untrusted import line
from ansible_collections.kubegpu.share.plugins.module_utils._report import outcome
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.base import ShareAction, untagged
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.terminal import show
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap import (
    archive,
    mirrored,
    named,
    push,
    served,
    table,
    unpack,
    web,
)
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap.layout import Layout
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap.needed import IMAGE
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap.pusher import Access, Pusher

ARGUMENTS: JsonObject = {
    "step": {"type": "str", "choices": ["push", "variables", "remove"], "required": True},
    "archive": {"type": "str", "default": ""},
    "folder": {"type": "str", "default": ""},
    "verification_key": {"type": "str", "default": ""},
    "unsigned": {"type": "bool", "default": False},
    "older": {"type": "bool", "default": False},
    "registry": {"type": "str", "default": ""},
    "auth_file": {"type": "str", "default": ""},
    "authority": {"type": "str", "default": ""},
    "insecure": {"type": "bool", "default": False},
    "skopeo": {"type": "str", "default": "skopeo"},
    "url": {"type": "str", "default": ""},
    "address": {"type": "str", "default": ""},
    "server": {"type": "str", "default": "localhost"},
    "hosts": {"type": "list", "elements": "str", "default": []},
    "variables_file": {"type": "str", "default": ""},
    "inventories": {"type": "list", "elements": "str", "default": []},
    "pull_secrets": {"type": "list", "elements": "str", "default": []},
    "mirrors_file": {"type": "str", "default": ""},
    "remembered": {"type": "dict", "default": {}},
}
FILE = "group_vars/all/airgap.yml"
_URL = re.compile(r"https?://(?:[A-Za-z0-9.-]+|\[[0-9a-fA-F:]+\])(?::[0-9]{1,5})?(?:/[\w.~-]+)*/?", re.ASCII)
_ADDRESS = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9.-]*|\[[0-9a-fA-F:]+\]):([0-9]{1,5})")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


class Taken(t.NamedTuple):
    """An archive that was read, and what follows from it.

    :param values: the variables that name its items.
    """

    archive: archive.Archive
    registry: push.Registry | None
    targets: list[push.Target]
    values: JsonObject


class ActionModule(ShareAction):
    """Runs one step on the controller."""

    _requires_connection = False
    arguments = ARGUMENTS

    def ensure(self, params: JsonObject, task_vars: JsonObject | None) -> JsonObject:
        params = untagged(params)
        step, file = params["step"], _variables_file(params)
        written, created = _written(file)
        if step == "remove":
            return self._remove(file, written)
        taken = self._taken(params, "" if params["older"] else created, whole=step == "push")
        if step == "push":
            return self._push(params, taken)
        return self._variables(params, taken, file, written, (task_vars or {})["hostvars"])

    def _taken(self, params: JsonObject, created: str, whole: bool) -> Taken:
        given = {name: web.own_path(params[name]) for name in ("archive", "folder", "verification_key")}
        if not params["unsigned"] and not given["verification_key"]:
            raise BadInput(
                "airgap_verification_key: set it to a file with the public key of who signed the archive; an archive "
                "without a signature is taken with airgap_unsigned: true alone"
            )
        if params["unsigned"] and given["verification_key"]:
            raise BadInput("airgap_unsigned: true and airgap_verification_key exclude each other; set one of them")
        if not given["archive"] and not given["folder"]:
            raise BadInput("airgap_archive: set it to the archive, or airgap_folder to its folder")
        folder = given["folder"] or f"{given['archive']}{unpack.FOLDER}"
        if given["archive"] and whole:
            accept = functools.partial(_not_older, created)
            unpack.unpack(given["archive"], folder, given["verification_key"], accept=accept)
            # That has compared all files.
            whole = False
        if not os.path.isdir(folder):
            raise BadInput(f"airgap_folder: there is no folder {folder} on the controller")
        found = archive.read(folder, given["verification_key"], whole=whole)
        _not_older(created, found.contents)
        return self._places(params, found)

    def _places(self, params: JsonObject, found: archive.Archive) -> Taken:
        entries = found.contents.items
        images = [entry for entry in entries if entry["kind"] == IMAGE]
        if images and not params["registry"]:
            raise BadInput(
                f"airgap_registry: the archive has {len(images)} images; set it to the registry that takes them"
            )
        files = served.files(found)
        url = params["url"].rstrip("/")
        if files and not url:
            raise BadInput(
                f"airgap_files_url: the archive has {len(files)} files for machines; set it to the address of the "
                "server that has them, or airgap_files_address to address and port of one that this playbook sets up"
            )
        if url and not _URL.fullmatch(url):
            raise BadInput(
                f"airgap_files_url: {line(url, 200)!r} isn't an address such as http://files.example.org:8080"
            )
        if files:
            _server(params)
        for name in params["pull_secrets"]:
            if not _NAME.fullmatch(name):
                raise BadInput(f"airgap_pull_secrets: {line(name, 100)!r} isn't the name of a Secret")
        served.indexes(found)
        registry = push.registry(params["registry"]) if images else None
        targets = push.targets(images, registry) if registry else []
        own: JsonObject = {"airgap_registry": params["registry"] if images else ""}
        own["airgap_registry_insecure"] = params["insecure"] and bool(images)
        own |= {name: str(value) for name, value in params["remembered"].items() if name in named.OWN and files}
        for name, option in (("airgap_registry_ca", "authority"), ("airgap_registry_auth_file", "auth_file")):
            own[name] = web.own_path(params[option])
        places = named.Places(
            registry,
            url if files else "",
            os.path.abspath(found.folder),
            tuple(params["pull_secrets"]),
            {name: value for name, value in own.items() if value},
        )
        rows = mirrored.repositories(found.folder, found.sums)
        values = named.variables(table.listed(), entries, targets, places, rows)
        return Taken(found, registry, targets, values)

    # ------------------------------------------------------------------ images

    def _push(self, params: JsonObject, taken: Taken) -> JsonObject:
        signed = taken.archive.signed_by
        result: JsonObject = {"changed": False, "diff": [], "folder": taken.archive.folder, "signed_by": signed}
        result["served"] = bool(served.files(taken.archive))
        result["images"] = len(taken.targets)
        if not taken.registry or not taken.targets:
            return result
        access = Access(web.own_path(params["auth_file"]), web.own_path(params["authority"]), params["insecure"])
        _auth_file(access.auth_file)
        if not shutil.which(params["skopeo"]):
            raise BadInput(f"airgap_skopeo: there is no {params['skopeo']} on the controller: install skopeo")
        tell = functools.partial(show, self._display)
        layout = Layout(taken.archive.folder, taken.archive.sums.get)
        pusher = Pusher(taken.registry, taken.targets, layout, access, params["skopeo"], tell)
        return {**result, **plan.run(pusher, bool(self._task.check_mode))}

    # ------------------------------------------------------------------ variables

    def _variables(
        self, params: JsonObject, taken: Taken, file: str, written: JsonObject, hostvars: t.Mapping[str, t.Any]
    ) -> JsonObject:
        sets = push.mirror_sets(taken.targets, taken.registry) if taken.registry else []
        text = named.text(taken.values, taken.archive.contents.created)
        targets = [outcome.Target("airgap_variables_file", file, text, 0o644)]
        if params["mirrors_file"] and sets:
            text = yaml.safe_dump_all(sets, sort_keys=False, explicit_start=True)
            targets.append(
                outcome.Target("airgap_openshift_mirrors_file", web.own_path(params["mirrors_file"]), text, 0o644)
            )
        check = bool(self._task.check_mode)
        folder = os.path.dirname(file)
        if not check:
            os.makedirs(folder, mode=0o755, exist_ok=True)
        elsewhere = _elsewhere(taken.values, written, hostvars)
        result: JsonObject = {"changed": True, "mirror_sets": sets, "variables": taken.values, "elsewhere": elsewhere}
        if os.path.isdir(folder):
            planned = outcome.plan(targets)
            result["changed"] = any(one.changed for one in planned)
            result["diff"] = [one.diff() for one in planned if one.changed]
            if not check:
                outcome.write(planned)
        for name, hosts in elsewhere.items():
            wanted = json.dumps(taken.values[name])
            text = f"{name} is set elsewhere for {line(', '.join(hosts), 200)}, which counts more than {file}"
            show(self._display, f"{text}: remove it there, or set it to {wanted}", stderr=True)
        return result

    def _remove(self, file: str, written: JsonObject) -> JsonObject:
        if not written:
            return {"changed": False, "node_repositories": []}
        with open(file, encoding="utf-8") as opened:
            before = opened.read()
        if not self._task.check_mode:
            os.unlink(file)
        diff = [{"before_header": file, "after_header": file, "before": before, "after": ""}]
        return {"changed": True, "diff": diff, "node_repositories": sorted(set(named.NODE_REPOSITORIES) & set(written))}


def _server(params: JsonObject) -> None:
    """Refuse a server of files that nobody could reach.

    :raises BadInput: its host isn't in the inventory, or its address is none.
    """
    if params["server"] not in (*params["hosts"], "localhost"):
        raise BadInput(
            f"airgap_files_host: the inventory has no host {line(params['server'], 100)}, nor is it localhost"
        )
    address = params["address"]
    match = _ADDRESS.fullmatch(address)
    wildcard = _is_wildcard(address.rpartition(":")[0].strip("[]"))
    # The unit's user may not listen at the ports below.
    if address and (not match or wildcard or not 1024 <= int(match.group(1)) <= 65535):
        raise BadInput(
            f"airgap_files_address: {line(address, 100)!r} isn't one address of the host with a port from 1024 on, "
            "such as 192.0.2.10:8090"
        )


def _is_wildcard(host: str) -> bool:
    """Return whether a server would listen at all addresses: in numbers that has many forms, such as 0 and 0::0."""
    try:
        rows = socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST)
    except OSError:
        return False
    return any(ipaddress.ip_address(row[4][0]).is_unspecified for row in rows)


def _auth_file(path: str) -> None:
    """Refuse a file without credentials before anything is asked with it.

    :raises BadInput: it isn't one.
    """
    if not path:
        return
    try:
        with open(path, encoding="utf-8") as file:
            auths = json.load(file)["auths"]
        if not isinstance(auths, dict) or not auths:
            raise ValueError("no credentials")
    except OSError as error:
        raise BadInput(f"airgap_registry_auth_file: {path} can't be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadInput(
            f"airgap_registry_auth_file: {path} has no credentials as podman login --authfile {path} writes them"
        ) from error


def _variables_file(params: JsonObject) -> str:
    """Return the path of the file of variables.

    :raises BadInput: there is none, or Ansible would read another file no more.
    """
    given = web.own_path(params["variables_file"])
    if not given:
        sources = [os.path.abspath(source) for source in params["inventories"] if os.path.exists(source)]
        if not sources:
            raise BadInput(
                "airgap_variables_file: there is no inventory's folder beside which it would be; set its path"
            )
        given = os.path.join(sources[0] if os.path.isdir(sources[0]) else os.path.dirname(sources[0]), FILE)
    folder = os.path.dirname(given)
    if os.path.basename(os.path.dirname(folder)) == "group_vars" and not os.path.isdir(folder):
        # Ansible reads the folder of this name, or else the file.
        beside = next((folder + end for end in (".yml", ".yaml", ".json") if os.path.exists(folder + end)), "")
        if beside:
            raise BadInput(
                f"airgap_variables_file: beside a folder {folder} Ansible doesn't read {beside} any more. Move it "
                f"there (mkdir {folder} && mv {beside} {folder}/main.yml), or name another file"
            )
    return given


def _not_older(created: str, contents: archive.Contents) -> None:
    """Refuse an archive that is older than the last one: its signature stays valid, and its packages' faults are known.

    :param created: of the last one; empty for any.
    :raises BadInput: it is.
    """
    own = contents.created if served.TIME.fullmatch(contents.created) else ""
    if own < created:
        raise BadInput(
            f"airgap_archive: it was made {own or 'at no known time'}, and the last one that was pushed {created}; "
            "where you do go back to an older one, set airgap_older: true; nothing was changed",
            code="archive_older",
        )


def _written(file: str) -> tuple[JsonObject, str]:
    """Return the variables of a file that an earlier run has written, and when its archive was made.

    Both are empty where there is none.

    :raises BadInput: it is somebody else's.
    """
    try:
        with open(file, encoding="utf-8") as opened:
            content = opened.read()
        if named.is_ours(content):
            return untagged(named.parsed(content)), named.created_of(content)
    except FileNotFoundError:
        return {}, ""
    except OSError as error:
        raise BadInput(f"airgap_variables_file: {file} can't be read: {error.strerror}") from error
    except ValueError:
        pass
    raise BadInput(
        f"airgap_variables_file: {file} isn't one that this playbook has written: move it, or name another one"
    )


def _elsewhere(values: JsonObject, written: JsonObject, hostvars: t.Mapping[str, t.Any]) -> dict[str, list[str]]:
    """Return the hosts by variables that somebody has set otherwise, which counts more than the file."""
    found: dict[str, list[str]] = {}
    for host in sorted({*hostvars, "localhost"} & set(hostvars)):
        for name, wanted in values.items():
            if name in (*named.OWN, named.SOURCES, named.PREREQUISITES, named.OUTSIDE):
                continue
            try:
                # The get of Ansible's hostvars has no default.
                value = untagged(hostvars[host][name]) if name in hostvars[host] else None
            except AnsibleError:
                value = None
            if value not in (None, _of_host(wanted, host), _of_host(written.get(name), host)):
                found.setdefault(name, []).append(host)
    return found


def _of_host(value: t.Any, host: str) -> t.Any:
    """Return what a value of the file is on a host."""
    if isinstance(value, str) and value.startswith("{{ "):
        return json.loads(value[3 : value.index("}") + 1]).get(host, "")
    return value
