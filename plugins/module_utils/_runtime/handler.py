# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Kata's runtime of containerd on a node: its settings, and the change with its proof; module ``kata_handler``."""

from __future__ import annotations

import dataclasses
import json
import posixpath
import typing as t

from .._core.errors import BadInput
from .._core.types import JsonObject
from .._host.file_transaction import Replacement, replacements
from .._host.system import System
from . import cri
from .containerd import Flat, Options, drop_in_path, effective
from .containerd_apply import ContainerdEngine
from .engine import ConfigOnDisk, ConfigUpdate
from .types import Loss

DROP_IN_NAME = "99-kubegpu-kata.toml"
ABSENT = Options(present=False)


@dataclasses.dataclass(frozen=True)
class Handler:
    """
    :param name: of the runtime, and of the RuntimeClass's handler.
    :param shim: path of its shim.
    :param config: path of the shim's configuration.
    """

    name: str
    shim: str
    config: str

    @property
    def settings(self) -> Flat:
        """The settings of its table, as kata-deploy 4.1.0 writes them (binary/src/runtime/containerd.rs)."""
        return {
            ("runtime_type",): f"io.containerd.{self.name}.v2",
            ("runtime_path",): self.shim,
            ("privileged_without_host_devices",): True,
            ("pod_annotations",): ["io.katacontainers.*"],
            ("container_annotations",): ["io.kubernetes.container.terminationMessage*"],
            ("options", "ConfigPath"): self.config,
        }


def own_path(main: str) -> str:
    """Return the path of the drop-in, by that of the main configuration file."""
    return posixpath.join(posixpath.dirname(drop_in_path(main)), DROP_IN_NAME)


def differences(dump: str, handler: Handler) -> list[str]:
    """List how a runtime in containerd's dump differs from the wanted one; one that isn't there differs as a whole."""
    there = effective(dump).runtimes.get(handler.name)
    if there is None:
        return [f"containerd has no runtime {handler.name!r}"]
    return [
        f"{handler.name}.{'.'.join(path)} is {there.get(path)!r} and not {value!r}"
        for path, value in handler.settings.items()
        if there.get(path) != value
    ]


class HandlerEngine(ContainerdEngine):
    """A node's containerd, with the runtime or without it.

    :param wanted: None where it is removed.
    """

    def __init__(self, system: System, name: str, wanted: Handler | None) -> None:
        super().__init__(system, ABSENT)
        self._name, self._handler = name, wanted

    def check_preconditions(self, changes: t.Sequence[Replacement]) -> None:
        for what, path in (
            (("shim", self._handler.shim), ("configuration", self._handler.config)) if self._handler else ()
        ):
            if not self._system.exists(path):
                raise BadInput(f"kata_folder: {path}, the {what} of Kata, isn't on this node: install Kata first")
        super().check_preconditions(changes)

    def own_files(self) -> list[str]:
        return [own_path(self._config)]

    def compare(self, before: ConfigOnDisk, after: ConfigOnDisk) -> tuple[list[str], list[Loss]]:
        unmet = differences(after.value, self._handler) if self._handler else []
        old, new = (self._others(dump.value) for dump in (before, after))
        changed = sorted(path for path in {*old, *new} if old.get(path) != new.get(path))
        return unmet, [Loss(path, _written(old, path), _written(new, path)) for path in changed]

    def _others(self, dump: str) -> Flat:
        """Return all settings of a dump but the runtime's; the files and the format's number aren't settings."""
        seen = effective(dump)
        runtime = ("plugins", seen.plugin, "containerd", "runtimes", self._name)
        return {
            path: value
            for path, value in seen.flat.items()
            if path not in (("imports",), ("version",))
            and path[: len(runtime)] != runtime
            and value not in ("", 0, [], {})
        }

    def unmet_requirements(self) -> list[str]:
        """Query crictl, where the node has one; the dump was validated before."""
        if not self._handler or not self._system.exists("/usr/bin/crictl"):
            return []
        info = cri.query(self._system, self._socket())
        known = info.binaries if info else {}
        return [] if not known or self._name in known else [f"it has no runtime {self._name!r}"]


def _written(flat: Flat, path: tuple[str, ...]) -> str | None:
    return json.dumps(flat[path], ensure_ascii=False) if path in flat else None


ARGUMENTS: JsonObject = {
    "name": {"type": "str", "required": True},
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "shim": {"type": "path", "default": "/opt/kata/bin/containerd-shim-kata-v2"},
    "config": {"type": "path", "default": ""},
    "timeout": {"type": "int", "default": 120},
    "observed": {"type": "dict"},
    "plan": {"type": "dict"},
}


def handler_of(params: JsonObject) -> Handler:
    """Convert the module's arguments."""
    return Handler(params["name"], params["shim"] or "", params["config"] or "")


def work(params: JsonObject, system: System) -> JsonObject:
    """Execute the plan that the action plugin made on the controller.

    :raises BadInput: the shim or its configuration isn't there; nothing was changed.
    :raises NotInEffect: the change was rolled back.
    """
    plan = params["plan"]
    if not plan:
        raise BadInput("plan: this module only runs through its action plugin, which makes the plan")
    engine = HandlerEngine(system, params["name"], handler_of(params) if params["state"] == "present" else None)
    done = ConfigUpdate(system, engine, params["timeout"]).run(replacements(plan["files"]))
    return {"changed": True, **done}
