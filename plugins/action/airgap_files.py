# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Bring an archive's files to the machine that serves them: only what it lacks, in parts, and in place all at once."""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._core.untrusted import line
from ansible_collections.kubegpu.share.plugins.module_utils._host.file_tree import SPARE
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.base import ShareAction
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.terminal import show
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap import archive, served, web
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap.progress import Progress

ARGUMENTS: JsonObject = {
    "folder": {"type": "str", "default": ""},
    "verification_key": {"type": "str", "default": ""},
    "path": {"type": "str", "required": True},
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
}
# Of one part: bytes, and files.
LARGEST, MOST = 256 << 20, 64


class Part(t.NamedTuple):
    """:param names: SHA-256 of the files."""

    names: list[str]
    bytes: int


class ActionModule(ShareAction):
    """Copies files, and executes the module."""

    arguments = ARGUMENTS

    def ensure(self, params: JsonObject, task_vars: JsonObject | None) -> JsonObject:
        if params["state"] == "absent":
            return self.execute_module({"path": params["path"], "state": "absent"}, task_vars)
        # Step push of airgap_push has compared all files; each is compared once more where it arrives.
        found = archive.read(params["folder"], web.own_path(params["verification_key"]), whole=False)
        texts = {path: text.encode() for path, text in served.indexes(found).items()}
        sums = served.files(found)
        wanted = {**sums, **{path: hashlib.sha256(text).hexdigest() for path, text in texts.items()}}
        with tempfile.TemporaryDirectory(prefix="kubegpu-") as folder:
            sources = _sources(found.folder, sums, texts, folder)
            return self._bring(params, wanted, sources, task_vars)

    def _bring(
        self, params: JsonObject, wanted: dict[str, str], sources: dict[str, str], task_vars: JsonObject | None
    ) -> JsonObject:
        """Copy what the machine lacks.

        :param sources: paths on the controller by SHA-256; their names are it.
        """
        given = {"path": params["path"], "wanted": wanted}
        seen = self.execute_module({**given, "state": "observed"}, task_vars)
        if seen.get("failed"):
            return seen
        missing, stale = [str(name) for name in seen["missing"]], [line(name) for name in seen["stale"]]
        result: JsonObject = {"changed": bool(missing or stale), "files": len(wanted), "diff": []}
        if not result["changed"]:
            return result
        result["diff"] = [_diff(params["path"], [name for name in wanted if name in missing], stale, wanted)]
        lacking = sorted({wanted[name] for name in missing if name in wanted} - set(seen["have"]))
        parts = _parts(lacking, {name: os.path.getsize(sources[name]) for name in lacking})
        size = sum(part.bytes for part in parts)
        if size + SPARE > int(seen["free"]):
            raise BadInput(
                f"airgap_files_folder: {params['path']} needs {size + SPARE >> 20} MiB, and {int(seen['free']) >> 20} "
                "MiB are free there: make room, or name another folder; nothing was changed there"
            )
        if self._task.check_mode:
            return result
        progress = Progress(functools.partial(show, self._display), [part.bytes for part in parts])
        for part in parts:
            progress.begin(f"part with {len(part.names)} files")
            done = self.execute_with_files(
                [sources[name] for name in part.names],
                lambda source, _copies: {**given, "state": "taken", "source": source},
                task_vars,
            )
            progress.end(part.bytes)
            if done.get("failed"):
                return {**done, "diff": result["diff"]}
        done = self.execute_module({**given, "state": "present"}, task_vars)
        return {**done, **result} if not done.get("failed") else {**done, "diff": result["diff"]}


def _sources(
    archive_folder: str, sums: t.Mapping[str, str], texts: t.Mapping[str, bytes], folder: str
) -> dict[str, str]:
    """Return paths by SHA-256, in a folder in which that is each file's name."""
    paths: dict[str, str] = {}
    for path, sha256 in sums.items():
        if sha256 not in paths:
            paths[sha256] = os.path.join(folder, sha256)
            os.symlink(os.path.abspath(os.path.join(archive_folder, path)), paths[sha256])
    for content in texts.values():
        sha256 = hashlib.sha256(content).hexdigest()
        if sha256 not in paths:
            paths[sha256] = os.path.join(folder, sha256)
            with open(paths[sha256], "wb") as file:
                file.write(content)
    return paths


def _parts(names: t.Sequence[str], sizes: t.Mapping[str, int]) -> list[Part]:
    parts: list[Part] = []
    for name in names:
        if not parts or len(parts[-1].names) >= MOST or parts[-1].bytes + sizes[name] > LARGEST:
            parts.append(Part([], 0))
        parts[-1] = Part([*parts[-1].names, name], parts[-1].bytes + sizes[name])
    return parts


def _diff(path: str, new: t.Sequence[str], stale: t.Sequence[str], wanted: t.Mapping[str, str]) -> JsonObject:
    before = "".join(f"{name}\n" for name in stale)
    after = "".join(f"{wanted[name]}  {name}\n" for name in new)
    return {"before_header": path, "after_header": path, "before": before, "after": after}
