# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""What of k3s or RKE2 has to change so that their kube-scheduler knows the extender; made on the controller.

Each gets one drop-in of ours, which adds arguments to those that are set elsewhere, and a configuration for
kube-scheduler. Where the user's settings name a configuration already, that one gets the extender, and our drop-in only
tells that it has.
"""

from __future__ import annotations

import collections
import hashlib
import posixpath
import typing as t

import yaml
from ansible_collections.kubegpu.share.plugins.module_utils import _embedded
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._runner import Plan
from ansible_collections.kubegpu.share.plugins.plugin_utils import _merged_file
from ansible_collections.kubegpu.share.plugins.plugin_utils import _scheduler_config as config
from ansible_collections.kubegpu.share.plugins.plugin_utils._scheduler_plan import (
    NEWEST,
    File,
    LookAgain,
    Options,
    Planned,
    changed,
    changes_of,
    lease_of,
    refuse_versions,
)

Json = dict[str, t.Any]
Settings = dict[str, list[str]]

HEAD = "# Written by kubegpu.share: what is changed here is lost.\n"
# Older ones read no drop-ins.
DROP_INS_SINCE = 21
# Older ones serve kube-scheduler's health without TLS.
TLS_SINCE = 22
LIVEZ_SINCE = 31


def make_plan(options: Options, observed: Json) -> Planned:
    """Compare the machine with what is asked for.

    :param observed: what ``control_plane_info`` returned of a server of k3s or RKE2.
    :raises BadInput: it can't be configured as asked for; nothing was changed.
    :raises LookAgain: look again, with these arguments.
    """
    server, places = observed["server"], _embedded.PLACES[observed["kind"]]
    ours = (server["drop_in"], observed["ours"], observed["merged"])
    if not options.present and ours == (None, None, None) and not observed["pending"]:
        return Planned(Plan(), kind=observed["kind"])
    minor = _minor(options, places, server["version"])
    users = _settings(server, server["files"], without=server["drop_in_path"])
    named = _named(users, places)
    if options.present:
        files, stamp = _present(options, observed, places, minor, users, named)
        after = named or places.config
    else:
        files, stamp, after = _absent(options, observed, places, named), "", named
    files = changed(files)
    if files:
        refuse_versions(options)
    text = {path: one for path, _before, one in files}.get(after, _text(observed, after))
    flags = _flags(users)
    return Planned(
        plan=changes_of(files, "" if files else _reason(options, observed, after, stamp)),
        kind=observed["kind"],
        files=tuple(files),
        config=after,
        before=(server["named"], ""),
        urls=_urls(flags, minor),
        lease=lease_of(text, flags, minor),
        # k3s elects no leader where its datastore is SQLite.
        lease_certain=False,
    )


def _minor(options: Options, places: _embedded.Places, version: str) -> int:
    if not version and not options.version:
        if options.present:
            raise BadInput(f"scheduler_version: {places.kind.title} doesn't tell its version; set this variable")
        return NEWEST
    return config.minor_of("", options.version or version)


def _text(observed: Json, path: str) -> str | None:
    """The configuration on disk."""
    return t.cast("str | None", observed["config"] if path and path == observed["config_path"] else observed["ours"])


def _reason(options: Options, observed: Json, named: str, stamp: str) -> str:
    """Why it has to be started again though its files are right, or nothing."""
    if observed["pending"]:
        return "an earlier run was cut short"
    server = observed["server"]
    if not options.present:
        return ""
    if not server["active"]:
        return f"{server['unit']} isn't running"
    if observed["kind"] == "rke2":
        found = [(one["config"], one.get("stamp", "")) for one in observed["running"]]
        if (named, stamp) not in found:
            return "not running with this configuration"
    elif server["stale"]:
        return f"{server['unit']} is older than this configuration"
    return "" if observed["health"] == 200 else "not healthy"


# --------------------------------------------------------------------------- files


def _present(
    options: Options, observed: Json, places: _embedded.Places, minor: int, users: Settings, named: str
) -> tuple[tuple[File, ...], str]:
    server = observed["server"]
    _refuse(options, observed, places, minor, users)
    if named:
        if observed["config_path"] != named:
            raise LookAgain(config_path=named)
        before = observed["config"]
        if before is None:
            raise BadInput(f"{named}, which {places.kind.title} gives kube-scheduler as its --config, isn't there")
        noted = _merged_file.read(observed["merged"])
        ours = _says(server, named)
        text, note = _merged_file.put_in(named, "config", before, minor, options.extender, noted, ours)
        files = [_noted(observed, places, note), File(named, before, text)]
    else:
        kubeconfig = posixpath.join(server["data"], "server/cred/scheduler.kubeconfig")
        # What both give kube-scheduler as flags, which a configuration makes it forget.
        flags = {"kubeconfig": kubeconfig, "profiling": "false", "address": "127.0.0.1", **_flags(users)}
        text = config.new_config(minor, flags, options.extender)
        files = [File(places.config, observed["ours"], text)]
    stamp = hashlib.sha256(text.encode()).hexdigest() if places.kind.name == "rke2" else ""
    drop_in = _drop_in(places, named, stamp)
    _refuse_overruled(server, places, drop_in, named)
    files.append(File(server["drop_in_path"], server["drop_in"], drop_in))
    if named:
        files.append(File(places.config, observed["ours"], None))
    return tuple(files), stamp


def _absent(options: Options, observed: Json, places: _embedded.Places, named: str) -> tuple[File, ...]:
    server = observed["server"]
    files: list[File] = []
    note = _merged_file.read(observed["merged"])
    path = note.path if note is not None else named if _says(server, named) else ""
    if path:
        if observed["config_path"] != path:
            raise LookAgain(config_path=path)
        if observed["config"] is not None:
            after = _merged_file.take_out(path, "config", observed["config"], options.extender, note)
            files.append(File(path, observed["config"], after))
    # What names a file goes before the file.
    drop_in = File(server["drop_in_path"], server["drop_in"], None)
    return (*files, drop_in, File(places.config, observed["ours"], None), _noted(observed, places, None))


def _says(server: Json, named: str) -> bool:
    """Whether our drop-in says that the user's configuration has our extender."""
    return bool(named) and f"# {named} " in (server["drop_in"] or "")


def _noted(observed: Json, places: _embedded.Places, note: _merged_file.Note | None) -> File:
    return File(places.merged, observed["merged"], note.text() if note is not None else None)


def _drop_in(places: _embedded.Places, named: str, stamp: str) -> str:
    settings: dict[str, list[str]] = {}
    if not named:
        settings[f"{_embedded.ARG}+"] = [f"config={places.config}"]
        if places.kind.name == "rke2":
            settings[f"{_embedded.MOUNT}+"] = [f"{places.folder}:{places.folder}:ro"]
    if stamp:
        settings[f"{_embedded.ENV}+"] = [f"{_embedded.STAMP}={stamp}"]
    head = HEAD + (f"# {named} has gpushare's extender in it.\n" if named else "")
    return head + (yaml.safe_dump(settings, sort_keys=False, width=1 << 20) if settings else "")


# --------------------------------------------------------------------------- settings


def _settings(server: Json, files: t.Sequence[Json], without: str = "") -> Settings:
    """What the settings amount to, as k3s and RKE2 read them: a later file wins, and a key with + adds to it.

    :raises BadInput: one of the files can't be read.
    """
    values: Settings = collections.defaultdict(list)
    for one in files:
        if one["path"] == without:
            continue
        for key, value in _parsed(one["path"], one["text"]).items():
            name = str(key)
            words = [str(word) for word in (value if isinstance(value, list) else [value]) if word is not None]
            values[name.rstrip("+")] = [*values[name.rstrip("+")], *words] if name.endswith("+") else words
    for key, words in server["flags"].items():
        values[key] = [*values[key], *words]
    return values


def _parsed(path: str, text: str) -> Json:
    try:
        found = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or "no plain YAML"
        raise BadInput(f"scheduler_mode: {path}: its settings of kube-scheduler can't be read ({problem})") from error
    if not isinstance(found, dict):
        raise BadInput(f"scheduler_mode: {path}: its settings of kube-scheduler can't be read (it isn't a mapping)")
    return found


def _flags(settings: Settings) -> dict[str, str]:
    """kube-scheduler's flags among the settings, but for its --config."""
    found = {}
    for word in settings[_embedded.ARG]:
        name, equals, value = word.lstrip("-").partition("=")
        if name != "config":
            found[name] = value if equals else "true"
    return found


def _named(settings: Settings, places: _embedded.Places) -> str:
    """The user's own configuration; empty where there is none.

    :raises BadInput: there are two.
    """
    words = [word.lstrip("-").partition("=") for word in settings[_embedded.ARG]]
    named = list(dict.fromkeys(value for name, _equals, value in words if name == "config" and value != places.config))
    if len(named) > 1:
        raise BadInput(
            f"scheduler_mode: {places.kind.title}'s {_embedded.ARG} names two configurations for kube-scheduler, "
            f"{' and '.join(named)}; take one out"
        )
    return named[0] if named else ""


def _refuse(options: Options, observed: Json, places: _embedded.Places, minor: int, users: Settings) -> None:
    title = places.kind.title
    if config.form_of(minor, options.configuration) == "policy":
        raise BadInput(
            f"scheduler_configuration: {title}'s kube-scheduler gets the extender by a configuration file; set "
            "scheduler_configuration: config, which needs 1.19"
        )
    if minor < DROP_INS_SINCE:
        raise BadInput(f"scheduler_mode: {title} {observed['version']} reads no drop-ins; 1.{DROP_INS_SINCE} does")
    if [word for word in users[_embedded.DISABLED] if word.lower() not in ("false", "0")]:
        raise BadInput(f"scheduler_mode: {title} runs no kube-scheduler on this machine ({_embedded.DISABLED})")


def _refuse_overruled(server: Json, places: _embedded.Places, drop_in: str, named: str) -> None:
    """Look whether the settings, read with our drop-in, are what we want."""
    others = [one for one in server["files"] if one["path"] != server["drop_in_path"]]
    ours = {"path": server["drop_in_path"], "text": drop_in}
    # The settings' file first, then the drop-ins by name.
    files = sorted([*others, ours], key=lambda one: (one["path"] != server["settings"], one["path"]))
    wanted = _settings({"flags": {}}, [ours])
    found = _settings(server, files)
    lost = [key for key, words in wanted.items() if not set(words) <= set(found[key])]
    if lost:
        later = [
            one["path"] for one in files[files.index(ours) + 1 :] if set(lost) & set(_parsed(one["path"], one["text"]))
        ]
        raise BadInput(
            f"scheduler_mode: {', '.join(later)} is read after {_embedded.DROP_IN_NAME} and sets {lost[0]} anew; write "
            f"{lost[0]}+ there, or give it a name that sorts before"
        )


def _urls(flags: t.Mapping[str, str], minor: int) -> tuple[str, ...]:
    if minor < TLS_SINCE and flags.get("secure-port", "0") == "0":
        return (f"http://127.0.0.1:{flags.get('port', '10251')}/healthz",)
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(flags.get("bind-address", ""), flags.get("bind-address", ""))
    host = f"[{address}]" if ":" in address else address or "127.0.0.1"
    base = f"https://{host}:{flags.get('secure-port', '10259')}"
    return tuple(base + path for path in (("/livez", "/readyz") if minor >= LIVEZ_SINCE else ("/healthz",)))
