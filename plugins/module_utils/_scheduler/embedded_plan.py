# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Plan the change of kube-scheduler on k3s and RKE2, on the controller. Pure.

Each server gets a drop-in, which adds arguments to those that are set elsewhere, and a configuration for
kube-scheduler. Where the user's settings already name a configuration, the extender is merged into it, and the drop-in
only records that.
"""

from __future__ import annotations

import posixpath
import typing as t

from .._core.digest import digest
from .._core.errors import BadInput
from .._core.libraries import yaml
from .._core.plan import Plan
from .._rancher import settings
from . import config, embedded
from .control_plane import ControlPlane, health_base
from .plan import (
    NEWEST,
    File,
    ObserveAgain,
    Options,
    SchedulerPlan,
    changed,
    changes_of,
    outdated,
    refuse_half_upgraded,
)
from .static_pod_plan import Stamp

# First minor version of 1.x that reads drop-ins.
DROP_INS_SINCE = 21
# First minor version of 1.x whose kube-scheduler serves its health over TLS.
TLS_SINCE = 22


def make_plan(options: Options, observed: ControlPlane) -> SchedulerPlan:
    """Compare a server of k3s or RKE2 with the options.

    :raises BadInput: it can't be configured as requested; nothing was changed.
    :raises ObserveAgain: observe again, with these arguments.
    """
    server, places = _server(observed), embedded.PLACES[observed["kind"]]
    ours = (server["drop_in"], server["unread"], observed["ours"], observed["merged"])
    if not options.present and all(text is None for text in ours) and not observed["pending"]:
        return SchedulerPlan(Plan(), kind=observed["kind"])
    minor = _minor(options, places, server["version"])
    if server["settings"]["problem"]:
        raise BadInput(f"scheduler_mode: {settings.explain(places.kind.title, server['settings']['problem'])}")
    users = _Users.of(server)
    named = _named(users, places)
    path = _host_path(users, named) if places.kind.name == "rke2" else named
    if options.present:
        files, stamp = _present(options, observed, minor, users, _UsersFile(named, path))
        after, on_disk = named or places.config, path or places.config
    else:
        files, stamp, after, on_disk = _absent(options, observed, _UsersFile(named, path)), "", named, path
    # Ours at the default place, where the settings were before.
    files = changed((*files, File(places.drop_in, server["unread"], None)))
    if files:
        refuse_half_upgraded(options)
    text = {file: text for file, _before, text in files}.get(on_disk, _text(observed, on_disk))
    flags = _flags(users)
    return SchedulerPlan(
        plan=changes_of(files, "" if files else _reason(options, observed, after, stamp)),
        kind=observed["kind"],
        files=tuple(files),
        config=after,
        before=(server["named"], ""),
        # k3s is its own process, which sees the machine's files.
        loads={after: on_disk} if options.present and places.kind.name == "rke2" else {},
        urls=_urls(flags, minor),
        lease=config.lease_of(text, flags, minor),
        # k3s elects no leader where its datastore is SQLite.
        lease_certain=False,
        extender=options.extender.url if options.present else "",
    )


def _minor(options: Options, places: embedded.Places, version: str) -> int:
    if not version and not options.version:
        if options.present:
            raise BadInput(f"scheduler_version: {places.kind.title} doesn't report its version; set this variable")
        return NEWEST
    return config.minor_of("", options.version or version)


def _server(observed: ControlPlane) -> embedded.Server:
    if observed["server"] is None:
        raise BadInput("observed: this isn't a server of k3s or RKE2")
    return observed["server"]


class _Users(t.NamedTuple):
    """The user's own settings for kube-scheduler, without our drop-in."""

    arguments: list[str]
    mounts: list[str]
    disabled: bool

    @classmethod
    def of(cls, server: embedded.Server) -> _Users:
        found, ours = server["settings"], (server["drop_in_path"],)
        arguments, mounts = (settings.values(found, key, ours) for key in (embedded.ARG, embedded.MOUNT))
        return cls(arguments, mounts, settings.on(found, embedded.DISABLED, ours))


def _text(observed: ControlPlane, path: str) -> str | None:
    """Return the configuration on disk."""
    return observed["config"] if path and path == observed["config_path"] else observed["ours"]


def _reason(options: Options, observed: ControlPlane, named: str, stamp: str) -> str:
    """Return why it has to be restarted though its files don't change; empty for no restart."""
    if observed["pending"]:
        return "an earlier run was interrupted"
    server = _server(observed)
    if not options.present:
        return ""
    if not server["active"]:
        return f"{server['unit']} isn't running"
    if observed["kind"] == "rke2":
        running = [(process["config"], process["stamp"]) for process in observed["running"]]
        if (named, stamp) not in running:
            return "not running with this configuration"
    elif server["stale"]:
        return f"{server['unit']} is older than this configuration"
    return "" if observed["health"] == 200 else "not healthy"


# --------------------------------------------------------------------------- files


class _UsersFile(t.NamedTuple):
    """A user's own configuration; empty for none.

    :param named: its path as kube-scheduler's --config has it, and ``path`` the one on the machine.
    """

    named: str
    path: str


def _host_path(users: _Users, path: str) -> str:
    """Return the path on the machine of a path in RKE2's pod; other files of its arguments have the same path in it."""
    mounts = [word.split(":") for word in users.mounts]
    for host, folder in sorted(
        (mount[:2] for mount in mounts if len(mount) > 1), key=lambda mount: len(mount[1]), reverse=True
    ):
        folder = posixpath.normpath(folder)
        if path == folder or path.startswith(f"{folder.rstrip('/')}/"):
            return posixpath.normpath(f"{host}/{path[len(folder) :]}")
    return path


def _present(
    options: Options, observed: ControlPlane, minor: int, users: _Users, theirs: _UsersFile
) -> tuple[tuple[File, ...], str]:
    server, places, (named, path) = _server(observed), embedded.PLACES[observed["kind"]], theirs
    _refuse(options, observed, places, minor, users)
    if named:
        if observed["config_path"] != path:
            raise ObserveAgain(config_path=path)
        before = observed["config"]
        if before is None:
            raise BadInput(f"{path}, which {places.kind.title} gives kube-scheduler as its --config, doesn't exist")
        noted = config.read(observed["merged"])
        ours = _records(server, named)
        text, note = config.put_in(path, "config", before, minor, options.extender, noted, ours)
        files = [_noted(observed, places, note), File(path, before, text)]
    else:
        kubeconfig = posixpath.join(server["data"], "server/cred/scheduler.kubeconfig")
        # The flags that both pass to kube-scheduler, which it ignores with a configuration.
        flags = {"kubeconfig": kubeconfig, "profiling": "false", "address": "127.0.0.1", **_flags(users)}
        before = observed["ours"]
        text = config.FORM.new(minor, flags, options.extender)
        files = [File(places.config, before, text)]
    stamp = ""
    if places.kind.name == "rke2":
        restart = text != before or outdated(observed, {"config": named or places.config}, "config", text)
        last = Stamp.parse(embedded.stamp_of(server["drop_in"] or ""))
        stamp = str(last.following(digest(text), restart=restart, interrupted=observed["pending"]))
    added = _added(places, named, stamp)
    _refuse_overridden(server, places, added)
    drop_in = config.HEAD + (f"# {named} has gpushare's extender in it.\n" if named else "")
    drop_in += yaml.safe_dump(added, sort_keys=False, width=1 << 20) if added else ""
    files.append(File(server["drop_in_path"], server["drop_in"], drop_in))
    if named:
        files.append(File(places.config, observed["ours"], None))
    return tuple(files), stamp


def _absent(options: Options, observed: ControlPlane, theirs: _UsersFile) -> tuple[File, ...]:
    server, places = _server(observed), embedded.PLACES[observed["kind"]]
    files: list[File] = []
    note = config.read(observed["merged"])
    path = theirs.path if _records(server, theirs.named) else ""
    if note is not None:
        path = note.path
    if path:
        if observed["config_path"] != path:
            raise ObserveAgain(config_path=path)
        if observed["config"] is not None:
            after = config.take_out(path, "config", observed["config"], options.extender, note)
            files.append(File(path, observed["config"], after))
    # The drop-in names the file, so it is removed first.
    drop_in = File(server["drop_in_path"], server["drop_in"], None)
    return (*files, drop_in, File(places.config, observed["ours"], None), _noted(observed, places, None))


def _records(server: embedded.Server, named: str) -> bool:
    """Return whether our drop-in records that the user's configuration has our extender."""
    return bool(named) and f"# {named} " in (server["drop_in"] or "")


def _noted(observed: ControlPlane, places: embedded.Places, note: config.Note | None) -> File:
    return File(places.merged, observed["merged"], note.text() if note is not None else None)


def _added(places: embedded.Places, named: str, stamp: str) -> dict[str, list[str]]:
    """Return the settings of our drop-in."""
    added: dict[str, list[str]] = {}
    if not named:
        added[f"{embedded.ARG}+"] = [f"config={places.config}"]
        if places.kind.name == "rke2":
            added[f"{embedded.MOUNT}+"] = [f"{places.folder}:{places.folder}:ro"]
    if stamp:
        added[f"{embedded.ENV}+"] = [f"{embedded.STAMP}={stamp}"]
    return added


# --------------------------------------------------------------------------- settings


def _flags(users: _Users) -> dict[str, str]:
    """Return kube-scheduler's flags in the settings, except --config."""
    flags = {}
    for word in users.arguments:
        name, equals, value = word.lstrip("-").partition("=")
        if name != "config":
            flags[name] = value if equals else "true"
    return flags


def _named(users: _Users, places: embedded.Places) -> str:
    """Return the path of the user's own configuration, of several the last, which counts; empty for none."""
    named = [value for value in embedded.named(users.arguments) if value != places.config]
    return named[-1] if named else ""


def _refuse(options: Options, observed: ControlPlane, places: embedded.Places, minor: int, users: _Users) -> None:
    title = places.kind.title
    if config.form_of(minor, options.configuration) == "policy":
        raise BadInput(
            f"scheduler_configuration: {title}'s kube-scheduler gets the extender in a configuration file; set "
            "scheduler_configuration: config, which needs 1.19"
        )
    if minor < DROP_INS_SINCE:
        raise BadInput(f"scheduler_mode: {title} {observed['version']} reads no drop-ins; 1.{DROP_INS_SINCE} does")
    if users.disabled:
        raise BadInput(f"scheduler_mode: {title} runs no kube-scheduler on this machine ({embedded.DISABLED})")


def _refuse_overridden(server: embedded.Server, places: embedded.Places, added: dict[str, list[str]]) -> None:
    """Refuse settings that override our drop-in, or that it would override."""
    ours = server["drop_in_path"]
    with_ours = settings.replaced(server["settings"], ours, added)
    for key in (name.rstrip("+") for name in added):
        variable = settings.variable(server["settings"], key, places.kind.name, (ours,))
        if variable:
            raise BadInput(
                f"scheduler_mode: {server['unit']} has {variable} in its environment, and {places.kind.title} ignores "
                f"it once its files have {key}; move its value to {key} in {server['settings']['path']}"
            )
        if not set(added[f"{key}+"]) <= set(settings.values(with_ours, key)):
            raise BadInput(
                f"scheduler_mode: {', '.join(settings.after(with_ours, ours, key))} is read after "
                f"{embedded.DROP_IN_NAME} and overrides {key}; write {key}+ there, or rename it so that it sorts before"
            )


def _urls(flags: t.Mapping[str, str], minor: int) -> tuple[str, ...]:
    # Both disable the port with TLS where they serve the health without.
    base = health_base({"secure-port": "0", **flags} if minor < TLS_SINCE else flags, minor)
    return tuple(base + path for path in config.health_paths(minor))
