# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The variables that name an archive's items where they are now, and the text of group_vars/all/airgap.yml. Pure."""

from __future__ import annotations

import dataclasses
import json
import re
import typing as t
import urllib.parse

import yaml

from ...module_utils._core.errors import BadInput
from ...module_utils._core.untrusted import line
from ...module_utils._images.names import repository_and_tag
from ...module_utils._mirrors.types import MirroredRepository
from .archive import Entry
from .needed import CHART, FILE, IMAGE, REGISTRIES, WHEEL
from .push import Registry, Target, source_of
from .repositories import folders, machine_of, sources
from .served import CHART_INDEX, SIMPLE, TIME
from .table import Row, Table

# The first line of the file: without it, it is another's.
MARKER = "# Written by playbook kubegpu.share.airgap_push, which replaces it. Don't edit it.\n"
HEAD = f"""\
---
{MARKER}# What site.yml takes from the registry and the server of files inside. A variable that is set in a later file
# of this folder, by group, by host or on the command line counts more than one here.
"""
_MADE = "# Of the archive of {}; an older one is refused.\n"
# Of playbook airgap_push.yml itself.
OWN = (
    *("airgap_registry", "airgap_registry_ca", "airgap_registry_auth_file", "airgap_registry_insecure"),
    *("airgap_files_host", "airgap_files_folder", "airgap_files_address"),
)
# Which repositories of its distribution a machine takes; it is empty while nobody has its facts.
SOURCES, PREREQUISITES = "airgap_distribution_sources", "driver_manage_prerequisites"
MACHINE = (
    "gpu_node.distribution.id ~ '-' ~ gpu_node.distribution.version ~ '-' ~ gpu_node.distribution.arch "
    "if gpu_node is defined else ''"
)
# What roles driver and toolkit have written into the nodes' repositories by the time that the file goes.
NODE_REPOSITORIES = ("driver_repo_url", "toolkit_repo_url")
# Variables of files that the controller sends to machines.
ON_CONTROLLER = {"files/runfile": "driver_runfile", "images/gpushare": "gpushare_image_archive"}
PULL_SECRETS = (
    "gpushare_image_pull_secrets",
    "scheduler_dedicated_pull_secrets",
    "hami_image_pull_secrets",
    "gpu_operator_image_pull_secrets",
    "nvidia_device_plugin_image_pull_secrets",
)
_WORD = re.compile(r"\\\{[a-z_]+\\\}")
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
# What outside had another name that only the archive knows: by variable, the value inside and the one outside.
OUTSIDE = "airgap_outside"
# What a value may have: no template, no quote, nothing that controls a terminal.
_VALUE = re.compile(r"[\w.+~:@=%,/^()\[\] -]*", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Places:
    """Where an archive's items are now.

    :param registry: None where no image was pushed.
    :param url: of the folder that the server of files serves, without a slash at the end; empty where there is none.
    :param folder: the archive's, absolute: programs of the controller take some of its files themselves.
    :param pull_secrets: names of Secrets with the registry's credentials.
    :param own: variables of playbook airgap_push.yml that site.yml reads, too.
    """

    registry: Registry | None
    url: str
    folder: str = ""
    pull_secrets: tuple[str, ...] = ()
    own: t.Mapping[str, t.Any] = dataclasses.field(default_factory=dict)


def variables(
    table: Table,
    entries: t.Sequence[Entry],
    found: t.Sequence[Target],
    places: Places,
    rows: t.Sequence[MirroredRepository] = (),
) -> dict[str, t.Any]:
    """Return the variables with their values; where machines differ, a template that chooses by the host's name.

    :param found: as ``targets`` returned them.
    :param rows: the archive's repositories.
    :raises BadInput: an entry has what no variable may have.
    """
    by_host: dict[str, dict[str, str]] = {}
    values: dict[str, t.Any] = {}
    _check_names(table, entries)
    if places.registry:
        values |= _images(table, entries, found, places.registry)
        values |= {name: list(places.pull_secrets) for name in PULL_SECRETS if places.pull_secrets}
    if places.url:
        for entry in entries:
            kind, known = entry["kind"], entry["variables"]
            if kind == CHART and known:
                values[known[0]] = f"{places.url}/{CHART_INDEX.rpartition('/')[0]}"
            elif entry["id"].startswith("files/key/"):
                for host in entry["hosts"]:
                    by_host.setdefault(known[0], {})[host] = f"{places.url}/{entry['path']}"
            elif kind == WHEEL and known:
                host = urllib.parse.urlsplit(places.url).hostname or ""
                values[known[0]] = f"--index-url {places.url}/{SIMPLE}/ --trusted-host {host}"
        for (host, name), folder in folders(entries, rows).items():
            by_host.setdefault(name, {})[host] = f"{places.url}/{folder}"
        for entry in entries:
            if entry["kind"] == FILE and entry["id"] in ON_CONTROLLER:
                values[ON_CONTROLLER[entry["id"]]] = f"{places.folder}/{entry['path']}"
        machines = sources(rows, places.url)
        if machines:
            values[SOURCES] = "{{ " + json.dumps(machines) + f"[{MACHINE}] | default([]) }}}}"
            # EPEL and the like are among them, by names that the check for them doesn't know.
            rpm = sorted({machine_of(row) for row in rows if row["manager"] == "rpm"} & set(machines))
            if rpm:
                values[PREREQUISITES] = (
                    "{{ " + json.dumps(dict.fromkeys(rpm, "ignore")) + f"[{MACHINE}] | default('report') }}}}"
                )
    for name, hosts in by_host.items():
        values[name] = _by_host(name, hosts)
    values |= places.own
    for name, value in values.items():
        _check(name, value)
    outside = _outside(table, entries, values)
    values |= {OUTSIDE: outside} if outside else {}
    return dict(sorted(values.items()))


def _outside(table: Table, entries: t.Iterable[Entry], values: t.Mapping[str, t.Any]) -> dict[str, dict[str, str]]:
    """Return what these values were where the archive was made, as far as the table has no public name for it: images
    and files that the user alone names. A list that is made inside takes them from there.

    :raises BadInput: one would be a template.
    """
    found: dict[str, dict[str, str]] = {}
    for entry in entries:
        name, value = "", ""
        if entry["kind"] == FILE:
            name, value = ON_CONTROLLER.get(entry["id"], ""), entry["place"]
        elif entry["kind"] == IMAGE:
            row = table["images"].get(entry["id"].removeprefix("images/"))
            if row and not row["reference"]:
                name, value = row["variables"][0], entry["source"]
        if name in values and value:
            if "{" in value:
                raise BadInput(f"the archive's {line(entry['id'], 100)} would be a template: {line(value, 200)}")
            found[name] = {"inside": values[name], "outside": value}
    return found


def _check_names(table: Table, entries: t.Iterable[Entry]) -> None:
    """Refuse a variable that the list of this version hasn't: an archive doesn't set how Ansible reaches a host.

    :raises BadInput: an entry has one.
    """
    known = {name for rows in table.values() for row in rows.values() for name in row["variables"]}
    for entry in entries:
        other = next((name for name in entry["variables"] if name not in known), "")
        if other:
            raise BadInput(
                f"the archive's {line(entry['id'], 100)} sets variable {line(other, 100)}, which isn't one of this "
                "version of the collection's list: use the version that made the archive, or a newer one"
            )


def _by_host(name: str, rows: t.Mapping[str, str]) -> str:
    values = set(rows.values())
    for host, value in rows.items():
        if not _HOST.fullmatch(host):
            raise BadInput(f"the archive names a host that is none: {line(host, 100)}")
        _check(name, value)
    if len(values) == 1:
        return values.pop()
    # Hosts that aren't in it get the role's default.
    return "{{ " + json.dumps(dict(sorted(rows.items()))) + "[inventory_hostname] | default('') }}"


def _check(name: str, value: t.Any) -> None:
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str) and not text.startswith("{{ ") and not _VALUE.fullmatch(text):
            raise BadInput(f"{name} would be {line(text, 200)}, which has characters that no such value has")


def _images(
    table: Table, entries: t.Sequence[Entry], found: t.Sequence[Target], registry: Registry
) -> dict[str, t.Any]:
    """Return the variables that name images: one image may be another row's too, as kube-scheduler's is."""
    by_image = {(target.image, target.digest): target for target in found}
    values: dict[str, t.Any] = {}
    for entry in entries:
        if entry["kind"] != IMAGE:
            continue
        target = by_image[entry["image"], entry["digest"]]
        place = f"{registry.host}/{target.repository}"
        own = entry["id"].removeprefix("images/")
        for name, row in table["images"].items():
            variable = row["variables"][0]
            if variable in REGISTRIES:
                # It is for all images of the GPU Operator, so one that another row has as well doesn't set it.
                values |= {variable: registry.name} if name == own else {}
            elif name == own or _is_of(row, entry):
                values[variable] = place if _moves(row) else _exact(place, target)
    return values


def _moves(row: Row) -> bool:
    """Return whether the role names the tag, by the cluster's version."""
    return bool(_WORD.search(re.escape(repository_and_tag(row["reference"])[1])))


def _is_of(row: Row, entry: Entry) -> bool:
    """Return whether a row of the list names an image's repository and tag."""
    if not row["reference"]:
        return False
    source, tag, _digest = source_of(entry)
    pattern = _WORD.sub(r"[\\w.-]+", re.escape(row["reference"]))
    return bool(re.fullmatch(pattern, f"{source}:{tag}"))


def _exact(place: str, target: Target) -> str:
    return f"{place}:{target.tag}@{target.digest}" if target.tag else f"{place}@{target.digest}"


# --------------------------------------------------------------------------- the file


def text(values: t.Mapping[str, t.Any], created: str) -> str:
    """Return the text of group_vars/all/airgap.yml; the same values give the same text.

    :param created: of the archive, as contents.json has it.
    """
    made = _MADE.format(created) if TIME.fullmatch(created) else ""
    return HEAD + made + yaml.safe_dump(dict(values), sort_keys=True, default_flow_style=False, width=1000)


def created_of(content: str) -> str:
    """Return when the archive was made whose variables a file has; empty where it doesn't say."""
    match = re.compile(_MADE.format(f"({TIME.pattern})"), re.ASCII).match(content, len(HEAD))
    return match.group(1) if match else ""


def is_ours(content: str) -> bool:
    """Return whether the playbook has written a file with this content."""
    return MARKER in content[: len(HEAD)]


def parsed(content: str) -> dict[str, t.Any]:
    """Return the variables of a file that the playbook has written.

    :raises ValueError: somebody has made it something else.
    """
    try:
        found = yaml.safe_load(content)
    except yaml.YAMLError as error:
        raise ValueError("it isn't YAML") from error
    if not isinstance(found, dict):
        raise ValueError("it isn't a mapping")
    return found
