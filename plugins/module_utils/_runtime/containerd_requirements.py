# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Compare containerd's effective configuration with the requested state, and with the one before a change. Pure."""

from __future__ import annotations

import json
import typing as t

from .containerd import (
    CRI_PLUGIN,
    DEFAULT_RUNTIME,
    DEFAULT_TABLE,
    RUNC_SHIMS,
    RUNTIME_NAME,
    EffectiveConfig,
    Flat,
    Options,
)
from .types import Loss

# Of the CRI plugin's, those that this collection sets beside its runtime.
SETTINGS = (
    ("containerd", "default_runtime_name"),
    ("containerd", DEFAULT_RUNTIME, "runtime_type"),
    ("enable_cdi",),
)
CRI_PARTS = (CRI_PLUGIN[2], CRI_PLUGIN[3], "io.containerd.cri.v1.images")


def runtime_settings(seen: EffectiveConfig, binary: str, model: str) -> Flat:
    """Return the settings of our runtime: those of its model, with another binary."""
    settings = dict(seen.runtime(model)) if model else {}
    # Settings of older shims: with any other shim the CRI plugin doesn't load.
    for old in ("runtime_engine", "runtime_root"):
        settings.pop((old,), None)
    if settings.get(("sandboxer",)) == "podsandbox":
        # The built-in value, which only the dump has.
        del settings[("sandboxer",)]
    if settings.get(("runtime_type",)) not in RUNC_SHIMS or seen.is_table(model):
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
    found = []
    if wanted.default and seen.default_runtime != RUNTIME_NAME:
        found.append(f"default_runtime_name is {seen.default_runtime!r}")
    if not wanted.default and users_default not in (None, RUNTIME_NAME) and seen.default_runtime == RUNTIME_NAME:
        found.append(f"default_runtime_name is {RUNTIME_NAME!r} and not {users_default!r}")
    # A copy of any runtime; of itself, where no other is configured, or where it is the user's default.
    models = seen.models() + ([RUNTIME_NAME] if seen.bare_runc() or users_default == RUNTIME_NAME else [])
    models += [users_default] if users_default == DEFAULT_TABLE and seen.is_table(users_default) else []
    found += sorted([_differences(seen, wanted.binary, model) for model in models or [""]], key=len)[0]
    if wanted.cdi and seen.cdi is False:
        found.append("enable_cdi is false")
    if cri_disabled(seen):
        found.append('disabled_plugins holds "cri"')
    return found


def _differences(seen: EffectiveConfig, binary: str, model: str) -> list[str]:
    ours = seen.runtime(RUNTIME_NAME)
    return [
        f"runtimes.{RUNTIME_NAME}.{'.'.join(path)} is {ours.get(path)!r} and not {value!r}"
        for path, value in sorted(runtime_settings(seen, binary, model).items())
        if ours.get(path, False if value is False else None) != value and (path[0] != "options" or seen.shows_options())
    ]


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
    was_off, is_off = (cri_disabled(one) or not one.plugin for one in (before, after))
    if (wanted.enable_cri and was_off) or (not wanted.present and is_off and not was_off):
        # The CRI plugin is enabled, or disabled again; a dump leaves out disabled plugins.
        hidden += [("plugins", name) for name in CRI_PARTS]
        ours.add(("disabled_plugins",))

    def theirs(flat: Flat) -> Flat:
        return {
            path: value
            for path, value in flat.items()
            if path not in ours and not any(path[: len(one)] == one for one in hidden) and value not in ("", 0, [], {})
        }

    old, new = theirs(before.flat), theirs(after.flat)
    changed = sorted(path for path in set(old) | set(new) if old.get(path) != new.get(path))
    # Zero and false are values too, where the user's file has them.
    side = after if wanted.present else before
    changed = [path for path in changed if path not in expected or side.flat.get(path) != expected[path]]
    return [Loss(path, _written(old, path), _written(new, path)) for path in changed]


def _written(flat: Flat, path: tuple[str, ...]) -> str | None:
    return json.dumps(flat[path], ensure_ascii=False) if path in flat else None
