# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Preflight of the variables: values that a role would refuse later, and names that no role knows."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
import textwrap
import typing as t

from ansible.errors import AnsibleError, AnsibleUndefinedVariable
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.module_utils.errors import ArgumentValueError

from ...module_utils._contracts import card_exclusion
from ...module_utils._contracts.backends import KATA, PASSTHROUGH
from ...module_utils._core.types import JsonObject
from ...module_utils._preflight.findings import NOTE, PROBLEM, WARNING, Finding, Findings
from ...module_utils._preflight.inventory import ALL_CARDS, listed
from .._actions.local_path import local_path
from .specifications import FACTS, PASSED, Option

try:
    # There is no public way to a tag. Without it the place isn't named.
    from ansible._internal._datatag._tags import Origin, VaultedValue
except ImportError:
    Origin = VaultedValue = None


def where(*tagged: t.Any) -> str:
    """Return where the first of these values that has a tag was set, in parentheses; empty where none is known."""
    for value in tagged if Origin else ():
        origin = Origin.get_tag(value)
        if origin is not None and origin.path:
            near = os.path.relpath(origin.path)
            path = origin.path if near.startswith(os.pardir) else near
            return f" ({path}:{origin.line_num})" if origin.line_num else f" ({path})"
        if origin is not None and origin.description:
            return f" ({origin.description.strip('<>')})"
    return ""


def is_vaulted(value: t.Any) -> bool:
    """Return whether the value was encrypted by ansible-vault, and mustn't be printed."""
    return VaultedValue is not None and VaultedValue.get_tag(value) is not None


EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
OPERATORS = ("Exists", "Equal")
FIELDS = ("key", "operator", "value", "effect", "tolerationSeconds")


def problem(entry: t.Any) -> str:
    """Return why the API server refuses an entry, as the end of a sentence about it; empty where it doesn't."""
    if not isinstance(entry, dict):
        return "is no mapping"
    others = sorted(str(name) for name in entry if name not in FIELDS)
    if others:
        return f"has {' and '.join(others)}, and a toleration has {', '.join(FIELDS)} only"
    for name in ("key", "operator", "value", "effect"):
        if not isinstance(entry.get(name), (str, type(None))):
            return f"has a {name} that is no text: quote it"
    seconds = entry.get("tolerationSeconds")
    if seconds is not None and (not isinstance(seconds, int) or isinstance(seconds, bool)):
        return "has tolerationSeconds that are no whole number"
    if entry.get("operator") not in (None, "", *OPERATORS):
        return f"has the operator {entry['operator']}, which is none of {', '.join(OPERATORS)}"
    if entry.get("effect") not in (None, "", *EFFECTS):
        return f"has the effect {entry['effect']}, which is none of {', '.join(EFFECTS)}"
    if not entry.get("key") and entry.get("operator") != "Exists":
        return "has no key: that is valid with the operator Exists only"
    if entry.get("operator") == "Exists" and entry.get("value"):
        return "has a value, which the operator Exists doesn't take"
    if seconds is not None and entry.get("effect") != "NoExecute":
        return "has tolerationSeconds, which need the effect NoExecute"
    return ""


def no_card(entry: t.Any) -> str:
    """Return why an entry names no card for virtual machines, as the end of a sentence; empty where it does."""
    text = str(entry).strip().lower()
    if card_exclusion.address_of(text) or card_exclusion.UUID.fullmatch(text) or text == ALL_CARDS:
        return ""
    return "is neither a PCI address (0000:3b:00.0) nor a UUID (GPU-…) nor all"


TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "list": "a list",
    "dict": "a mapping",
    "str": "a text",
    "path": "a path",
}
ELEMENTS = {"int": "whole numbers", "str": "texts", "dict": "mappings"}
# Lists whose entries argument specifications describe only in part, with what says why an entry is invalid.
ENTRIES: dict[str, t.Callable[[t.Any], str]] = {
    "gpu_exclude": card_exclusion.problem,
    "passthrough_cards": no_card,
    "gpushare_tolerations": problem,
    "hami_tolerations": problem,
    "hami_scheduler_tolerations": problem,
    "nvidia_device_plugin_tolerations": problem,
    "scheduler_dedicated_tolerations": problem,
    "acceptance_tolerations": problem,
}
# How much of a value or of a reason is printed, in characters.
MOST_CHARACTERS = 60
MOST_REASON = 200
# As difflib measures it, 1 is equal. A name without its role's prefix is short, so that one letter counts for much.
CLOSE_REST, CLOSE_NAME = 0.8, 0.85
# Variables that the playbooks pass to roles, or whose default they need. What a user sets, by an extra variable in
# all plays, would turn site.yml around: by one of the first it would remove what it is to set up, and by one of the
# second each role would do the same step.
STATES = (
    *("driver_state", "gpushare_state", "kubevirt_devices_state", "nouveau_state", "passthrough_state"),
    *("kata_state", "runtime_state", "scheduler_state", "toolkit_state", "vgpu_state"),
)
ABSENT = "absent"
STEPS = (
    *("gpu_operator_step", "gpushare_component", "gpushare_node_allocation", "hami_step", "node_baseline_state"),
    *("kata_step", "nvidia_device_plugin_step", "sandbox_device_plugin_kind", "sandbox_device_plugin_step"),
    "scheduler_step",
)
# A prefix that nobody else uses.
OWN_PREFIX = "gpushare_"
# Variables that name what must be there on the controller: which kind, and the variable's value for which it is used.
SOURCES: dict[str, tuple[t.Callable[[str], bool], tuple[str, str] | None]] = {
    "gpu_kubeconfig": (os.path.isfile, None),
    "driver_runfile": (os.path.isfile, ("driver_source", "runfile")),
    "driver_packages_dir": (os.path.isdir, ("driver_source", "packages")),
    "toolkit_source_dir": (os.path.isdir, ("toolkit_source", "packages")),
}


class Variables:
    """The variables of one host.

    :param places: the groups of ``specifications`` that it belongs to.
    :param effective: values by name, each evaluated when it is asked for.
    :param raw: returns the values before their templates are evaluated, which have the tags of their places.
    """

    def __init__(
        self,
        host: str,
        places: frozenset[str],
        effective: t.Mapping[str, t.Any],
        raw: t.Callable[[], t.Mapping[str, t.Any]],
    ) -> None:
        self.host = host
        self.places = places
        self.effective = effective
        self._raw = raw

    def where(self, name: str, of_name: bool = False) -> str:
        """Return where the variable is set.

        :param of_name: where the name is written is enough; true, false and null have no tag of their own.
        """
        raw = self._raw()
        keys = [key for key in raw if key == name] if of_name else []
        return where(raw.get(name), *keys)

    def uses(self, name: str) -> bool:
        """Return whether another variable's template names this one."""
        word = re.compile(rf"\b{re.escape(name)}\b")
        return any(key != name and word.search(text) for key, value in self._raw().items() for text in _texts(value))


def examine(
    options: t.Mapping[str, Option], prefixes: t.Sequence[str], hosts: t.Sequence[Variables], cluster: bool
) -> Findings:
    """Return all that is wrong with the variables, each finding once for all hosts that have it.

    :param options: the variables that a user may set.
    :param prefixes: beginnings of this collection's variables, longer ones first.
    :param cluster: there is a cluster; before there is one, its kubeconfig may be missing.
    """
    by_text: dict[tuple[str, ...], tuple[Finding, list[str]]] = {}
    for host in hosts:
        for finding in (
            *_values(options, host),
            *_missing_files(options, host, cluster),
            *(_of_playbooks(options, host) if cluster else ()),
            *_names(options, prefixes, host),
        ):
            by_text.setdefault((finding.id, finding.severity, finding.text), (finding, []))[1].append(host.host)
    return Findings(
        # What is wrong everywhere is no matter of a host.
        dataclasses.replace(finding, hosts=tuple(names)) if len(names) < len(hosts) else finding
        for finding, names in by_text.values()
    )


def _values(options: t.Mapping[str, Option], host: Variables) -> t.Iterator[Finding]:
    for name, option in options.items():
        if not option.places & host.places:
            continue
        if name not in host.effective:
            if option.rules.get("required") and name not in PASSED:
                yield Finding("missing-value", PROBLEM, "it isn't set", "set it", variable=name)
            continue
        try:
            wanted = _wanted(name, option.rules, host.effective[name])
        except AnsibleUndefinedVariable as error:
            fields = {"reason": _one_line(error), "where": host.where(name)}
            yield Finding("unknown-yet", NOTE, "it isn't known before the run: {reason}{where}", "", "", name, fields)
        except AnsibleError as error:
            fields = {"reason": _one_line(error), "where": host.where(name)}
            action = "correct its template"
            yield Finding("wrong-value", PROBLEM, "it can't be evaluated: {reason}{where}", action, "", name, fields)
        else:
            if not wanted and name in ENTRIES and host.effective[name] is None:
                wanted = TYPES["list"]
            if wanted:
                yield _wrong(name, option.rules, host, wanted)
            elif name in ENTRIES:
                yield from _entries(name, host)


def _wanted(name: str, rules: JsonObject, value: t.Any) -> str:
    """Return in words what a value must be; empty where it is accepted. Roles accept what Ansible can convert."""
    kind = rules["type"]
    # Ansible makes a text of any list, which no role expects.
    if kind in ("str", "path") and isinstance(value, (list, dict)):
        return TYPES[kind]
    errors = ArgumentSpecValidator({name: rules}).validate({name: value}).errors.errors
    if not errors:
        return ""
    if any(isinstance(error, ArgumentValueError) for error in errors):
        choices = rules["choices"]
        return f"one of {', '.join(map(repr, map(str, choices)))}" if len(choices) > 1 else repr(choices[0])
    return f"a list of {ELEMENTS[rules['elements']]}" if kind == "list" else TYPES[kind]


def _wrong(name: str, rules: JsonObject, host: Variables, wanted: str) -> Finding:
    value = host.effective[name]
    near = difflib.get_close_matches(str(value), map(str, rules.get("choices", ())), 1)
    fields = {
        "value": _shown(value),
        "wanted": wanted,
        "where": host.where(name),
        "nearest": near[0] if near else "",
    }
    action = "set it to '{nearest}'" if near else "set it to {wanted}"
    return Finding("wrong-value", PROBLEM, "{value} isn't {wanted}{where}", action, "", name, fields)


def _entries(name: str, host: Variables) -> t.Iterator[Finding]:
    """Report the entries of a list that no role can use."""
    given = host.effective[name]
    for entry in given if isinstance(given, (list, tuple)) else listed(given):
        why = ENTRIES[name](entry)
        if why:
            fields = {"value": _shown(entry), "why": why, "where": where(entry, given) or host.where(name)}
            yield Finding("wrong-value", PROBLEM, "{value} {why}{where}", "", "", name, fields)


def _of_playbooks(options: t.Mapping[str, Option], host: Variables) -> t.Iterator[Finding]:
    """Report variables that only playbooks may set, and values with which this run would remove what it sets up.

    In a play that imports a role its defaults are there, too.
    """
    for name in (*STATES, *STEPS):
        try:
            value = host.effective.get(name)
        except AnsibleError:
            # ``_values`` reports it.
            continue
        removes = name in STATES and str(value) == ABSENT and not (name == "driver_state" and _driverless(host))
        if removes or (name in STEPS and value not in (None, options[name].default)):
            yield Finding(
                "wrong-value",
                PROBLEM,
                "with {value} this run would remove what it is to set up{where}"
                if removes
                else "only the playbooks set it, each role's own{where}",
                "leave it out; uninstall.yml removes what is set up" if removes else "leave it out",
                "",
                name,
                {"value": _shown(value), "where": host.where(name)},
            )


def _driverless(host: Variables) -> bool:
    """Return whether virtual machines are to have all cards of a host, on which a driver may then be removed."""
    try:
        return host.effective.get("gpu_backend") in (PASSTHROUGH, KATA)
    except AnsibleError:
        return False


def _missing_files(options: t.Mapping[str, Option], host: Variables, cluster: bool) -> t.Iterator[Finding]:
    for name, (is_there, used) in SOURCES.items():
        if not options[name].places & host.places or (name == "gpu_kubeconfig" and not cluster):
            continue
        try:
            value = host.effective.get(name)
            unused = used is not None and host.effective.get(used[0]) != used[1]
        except AnsibleError:
            # ``_values`` reports it.
            continue
        # A kubeconfig may be given as its content, or as several, of which some may be missing.
        if unused or not isinstance(value, str) or not value or os.pathsep in value:
            continue
        path = local_path(value)
        if not is_there(path):
            fields = {"path": path, "where": host.where(name), "folder": os.getcwd()}
            what = "there is no {path}" if is_there is os.path.isfile else "there is no directory {path}"
            relative = not os.path.isabs(os.path.expanduser(value))
            action = "set it to a path on the controller" + ("; a relative one begins at {folder}" if relative else "")
            yield Finding("missing-file", PROBLEM, what + "{where}", action, "", name, fields)


def _names(options: t.Mapping[str, Option], prefixes: t.Sequence[str], host: Variables) -> t.Iterator[Finding]:
    for name in host.effective:
        prefix = next((candidate for candidate in prefixes if name.startswith(candidate)), "")
        if not prefix or name in options or name in FACTS:
            continue
        rests = [option.removeprefix(prefix) for option in options if option.startswith(prefix)]
        others = [option for option in options if not option.startswith(prefix)]
        rest = difflib.get_close_matches(name.removeprefix(prefix), rests, 1, CLOSE_REST)
        near = [prefix + rest[0]] if rest else difflib.get_close_matches(name, others, 1, CLOSE_NAME)
        # Others use prefixes such as image_ too, and inventories have variables that only other variables use.
        if not (near or prefix == OWN_PREFIX) or host.uses(name):
            continue
        fields = {"name": name, "where": host.where(name, of_name=True), "nearest": near[0] if near else ""}
        yield Finding(
            "unknown-variable",
            PROBLEM if rest else WARNING,
            "no role has a variable of this name{where}",
            ("write {nearest}" if near else "look for its name in the roles' documentation")
            + ", or set preflight_ignore: [unknown-variable@{name}] if it is your own",
            "",
            name,
            fields,
        )


def _texts(value: t.Any) -> t.Iterator[str]:
    """Yield every template in a value."""
    if isinstance(value, str) and "{" in value:
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _shown(value: t.Any) -> str:
    if is_vaulted(value):
        return "the encrypted value"
    text = f"'{value}'" if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}…"


def _one_line(error: AnsibleError) -> str:
    return textwrap.shorten(str(error), MOST_REASON, placeholder=" …")
