# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Change containerd: what a new dump must have, what it would lose, the restart, and the proof by CRI."""

from __future__ import annotations

import json
import posixpath
import typing as t

from .._core.types import JsonObject
from .._host.file_transaction import Replacement
from .._host.system import System
from .._host.systemd import Unit, stale, unit
from . import cri
from .containerd import (
    CRI_PLUGIN,
    DEFAULT_RUNTIME,
    DEFAULT_TABLE,
    PENDING_PATH,
    RUNC_SHIMS,
    RUNTIME_NAME,
    UNIT,
    EffectiveConfig,
    Flat,
    Options,
    config_path,
    drop_in_path,
    dump,
    effective,
    mask,
    read_files,
    unmask,
)
from .engine import ConfigOnDisk, Engine, require_binary
from .types import Loss

# The settings of the CRI plugin that this collection sets beside its runtime.
SETTINGS = (
    ("containerd", "default_runtime_name"),
    ("containerd", DEFAULT_RUNTIME, "runtime_type"),
    ("enable_cdi",),
)
CRI_PARTS = (CRI_PLUGIN[2], CRI_PLUGIN[3], "io.containerd.cri.v1.images")
# Distributions whose containerd only their own file can configure.
ELSEWHERE = {
    "microk8s": "/var/snap/microk8s/current/args/containerd-template.toml",
    "k0s": "/etc/k0s/containerd.d",
}


def belongs_to(name: str) -> str:
    """Explain why the containerd of a distribution isn't configured itself, and what is instead."""
    if name in ELSEWHERE:
        return (
            f"runtime_name: this node's containerd belongs to {name}, which generates its configuration; "
            f"set the default runtime in {ELSEWHERE[name]}"
        )
    return f"runtime_name: this node's containerd belongs to {name}; set runtime_name: {name} (or auto)"


def shows_options(seen: EffectiveConfig) -> bool:
    """Return whether a dump has the runtimes' options; containerd 1.4 prints such tables empty."""
    base = ("plugins", seen.plugin, "containerd", "runtimes")
    return any(path[: len(base)] == base and path[len(base) + 1 : -1] == ("options",) for path in seen.flat)


def runtime_settings(seen: EffectiveConfig, binary: str, model: str) -> Flat:
    """Return the settings of our runtime: those of its model, with another binary."""
    settings = dict(seen.runtimes.get(model, {}))
    # Settings of older shims: with any other shim the CRI plugin doesn't load.
    for old in ("runtime_engine", "runtime_root"):
        settings.pop((old,), None)
    if settings.get(("sandboxer",)) == "podsandbox":
        # The built-in value, which only the dump has.
        del settings[("sandboxer",)]
    if settings.get(("runtime_type",)) not in RUNC_SHIMS or (model == DEFAULT_TABLE and seen.default_is_table):
        # The default runtime as a table has no type any more once ours replaces it.
        settings[("runtime_type",)] = RUNC_SHIMS[0]
    settings[("options", "BinaryName")] = binary
    settings[("options", "SystemdCgroup")] = bool(settings.get(("options", "SystemdCgroup"), False))
    return settings


def unmet_requirements(seen: EffectiveConfig, wanted: Options, users_default: str | None = None) -> list[str]:
    """List how a dump differs from the requested state.

    :param users_default: the default runtime of the user's files; None for an unknown one.
    """
    if not wanted.present:
        return []
    if not seen.plugin:
        return ["the CRI plugin isn't in containerd's configuration"]
    unmet = []
    if wanted.default and seen.default_runtime != RUNTIME_NAME:
        unmet.append(f"default_runtime_name is {seen.default_runtime!r}")
    if not wanted.default and users_default not in (None, RUNTIME_NAME) and seen.default_runtime == RUNTIME_NAME:
        unmet.append(f"default_runtime_name is {RUNTIME_NAME!r} and not {users_default!r}")
    # A copy of any runtime; of itself, where runc has built-in settings alone, or where it is the user's default.
    models = list(seen.models)
    if set(seen.runtimes.get("runc", {})) <= {("runtime_type",), ("sandboxer",)} or users_default == RUNTIME_NAME:
        models.append(RUNTIME_NAME)
    if users_default == DEFAULT_TABLE and seen.default_is_table:
        models.append(users_default)
    ours, has_options = seen.runtimes.get(RUNTIME_NAME, {}), shows_options(seen)
    differences = [
        [
            f"runtimes.{RUNTIME_NAME}.{'.'.join(path)} is {ours.get(path)!r} and not {value!r}"
            for path, value in sorted(runtime_settings(seen, wanted.binary, model).items())
            # A setting that isn't there is false.
            if ours.get(path, False) != value and (path[0] != "options" or has_options)
        ]
        for model in models or [""]
    ]
    nearest = min(differences, key=len)
    unmet += nearest
    if wanted.cdi and seen.cdi is False:
        unmet.append("enable_cdi is false")
    if cri_disabled(seen):
        unmet.append('disabled_plugins holds "cri"')
    return unmet


def cri_disabled(seen: EffectiveConfig) -> bool:
    """Return whether the CRI plugin is disabled, under any of its names."""
    disabled = seen.flat.get(("disabled_plugins",)) or []
    return any(name in ("cri", *CRI_PLUGIN.values()) for name in disabled)


def losses(
    before: EffectiveConfig, after: EffectiveConfig, wanted: Options, expected: t.Mapping[tuple[str, ...], t.Any]
) -> list[Loss]:
    """List the user's settings that a change removed or altered.

    :param expected: values of the user's files that the change brings into effect, or out of it where it removes ours.
    """
    # Without the CRI plugin a dump has no name for it.
    plugins = {before.plugin, after.plugin} - {""}
    # The files and the format's number aren't settings.
    ours: set[tuple[str, ...]] = {("imports",), ("version",)}
    hidden: list[tuple[str, ...]] = []
    for plugin in plugins:
        ours |= {("plugins", plugin, *key) for key in SETTINGS}
        hidden.append(("plugins", plugin, "containerd", "runtimes", RUNTIME_NAME))
    was_off, is_off = (cri_disabled(config) or not config.plugin for config in (before, after))
    if (wanted.enable_cri and was_off) or (not wanted.present and is_off and not was_off):
        # The CRI plugin is enabled, or disabled again; a dump leaves out disabled plugins.
        hidden += [("plugins", name) for name in CRI_PARTS]
        ours.add(("disabled_plugins",))

    def theirs(flat: Flat) -> Flat:
        return {
            path: value
            for path, value in flat.items()
            if path not in ours
            and not any(path[: len(prefix)] == prefix for prefix in hidden)
            and value not in ("", 0, [], {})
        }

    old, new = theirs(before.flat), theirs(after.flat)
    changed = sorted(path for path in set(old) | set(new) if old.get(path) != new.get(path))
    # Zero and false are values too, where the user's file has them.
    side = after if wanted.present else before
    changed = [path for path in changed if path not in expected or side.flat.get(path) != expected[path]]
    return [Loss(path, _written(old, path), _written(new, path)) for path in changed]


def _written(flat: Flat, path: tuple[str, ...]) -> str | None:
    return json.dumps(flat[path], ensure_ascii=False) if path in flat else None


class ContainerdEngine(Engine):
    """A node's containerd.

    :param wanted: the requested state of its effective configuration.
    :param expected: as ``losses`` takes it, with each path's parts in a list.
    :param users_default: the default runtime of the user's files; None for an unknown one.
    """

    name = "containerd"
    unit = UNIT
    record = PENDING_PATH
    redact, unredact = staticmethod(mask), staticmethod(unmask)

    def __init__(
        self,
        system: System,
        wanted: Options,
        expected: t.Iterable[JsonObject] = (),
        users_default: str | None = None,
    ) -> None:
        super().__init__(system)
        self._wanted = wanted
        self._expected = {tuple(setting["path"]): setting["value"] for setting in expected}
        self._users_default = users_default
        daemon = self._daemon()
        self._binary = daemon.binary or "containerd"
        self._config = config_path(daemon)

    def check_preconditions(self, changes: t.Sequence[Replacement]) -> None:
        if self._wanted.present:
            require_binary(self._system, self._wanted.binary, "without which containerd couldn't start any pod")
        daemon = self._daemon()
        text = self.config_on_disk().value
        paths = list(read_files(self._system, self._config))
        fresh = daemon.active and not stale(self._system, daemon.pid, paths)
        if changes and fresh and text and not self._system.exists(self.record):
            self._active = text

    def config_on_disk(self) -> ConfigOnDisk:
        return ConfigOnDisk(*dump(self._system, self._binary, self._config))

    def own_files(self) -> list[str]:
        return [drop_in_path(self._config)]

    def compare(self, before: ConfigOnDisk, after: ConfigOnDisk) -> tuple[list[str], list[Loss]]:
        old, new = effective(before.value), effective(after.value)
        unmet = unmet_requirements(new, self._wanted, self._users_default)
        return unmet, losses(old, new, self._wanted, self._expected)

    def health_error(self) -> tuple[str, bool]:
        ctr = posixpath.join(posixpath.dirname(self._binary), "ctr")
        command = [ctr, "--address", self._socket(), "--connect-timeout", "2s", "plugins", "ls"]
        done = self._system.run(command, timeout=10)
        state = cri_state(done.out) if done.rc == 0 else ""
        if state == "missing" and cri_disabled(effective(self.config_on_disk().value or "")):
            # It is disabled on purpose, and only our settings were removed.
            state = "ok"
        if state == "ok" and self._daemon().active:
            return "", True
        return ("its CRI plugin failed to load", True) if state == "error" else ("its CRI plugin didn't answer", False)

    def unmet_requirements(self) -> list[str]:
        """Query crictl, where the node has one; the dump was validated before."""
        if not self._wanted.present or not self._system.exists("/usr/bin/crictl"):
            return []
        return cri.differences(cri.query(self._system, self._socket()), self._wanted)

    def result(self) -> JsonObject:
        return {"effective": mask(self.config_on_disk().value), "restarted": self.restarted}

    def _daemon(self) -> Unit:
        return unit(self._system, UNIT)

    def _socket(self) -> str:
        return effective(self.config_on_disk().value or "").socket


def cri_state(listing: str) -> str:
    """Return the CRI's state in ``ctr plugins ls``: ok, error as soon as one part has failed, or missing."""
    states = []
    for line in listing.splitlines():
        columns = line.split()
        # Since 2.0 the CRI is three plugins: images, runtime and the service itself.
        if len(columns) >= 3 and (
            columns[0] == "io.containerd.cri.v1" or columns[:2] == ["io.containerd.grpc.v1", "cri"]
        ):
            states.append(columns[-1])
    if not states:
        return "missing"
    return "ok" if all(state == "ok" for state in states) else "error"
