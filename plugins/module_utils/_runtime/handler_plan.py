# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plan for Kata's runtime of containerd: a drop-in of its own, and the way back. Pure.

Beside the drop-in of NVIDIA's runtime it is read by the same import, so that either is added and removed without the
other. Before containerd 2.0 an imported file replaces a whole plugin: there it is refused.
"""

from __future__ import annotations

import dataclasses
import typing as t

from .._core.errors import BadInput
from .._documents import toml_editor as toml
from .common import HEADER, FileChange, RuntimePlan, plan_of, restart_reason
from .containerd import drop_in_path
from .containerd_apply import belongs_to
from .containerd_files import DEEP_MERGE_SINCE, Files, cri_key
from .containerd_plan import NEW_FILE, UNIT, import_drop_in, keys_of, tables_of, texts_without_ours
from .handler import ABSENT, Handler, differences, own_path
from .types import ContainerdState


def make_plan(handler: Handler, present: bool, observed: ContainerdState | None) -> RuntimePlan:
    """Compare the node with the requested state.

    :param observed: ``gpu_node.runtimes.containerd``.
    :raises BadInput: this containerd can't have the runtime by a drop-in, or somebody else has given it another one.
    """
    own = own_path(observed["config_path"]) if observed else ""
    if not observed or observed["embedded"] or not observed["version"]:
        if not present:
            return RuntimePlan()
        if observed and observed["embedded"]:
            raise BadInput(
                f"{belongs_to(observed['embedded'])}; set kata_state: external and let kata-deploy configure it"
            )
        raise BadInput("kata_state: containerd isn't installed on this node, and Kata's pods need it")
    texts = _present(handler, own, observed) if present else _absent(own, observed)
    files = [FileChange(path, observed["files"].get(path), text) for path, text in texts.items()]
    changed = any(file.before != file.after for file in files)
    active = observed["service_active"] or not present or changed or observed["pending"]
    reason = restart_reason(present, active, changed or observed["pending"], observed["stale"])
    return dataclasses.replace(plan_of(files, UNIT, reason), runtime="containerd")


def _present(handler: Handler, own: str, observed: ContainerdState) -> dict[str, str | None]:
    files = Files(observed, True)
    if files.release < DEEP_MERGE_SINCE:
        raise BadInput(
            f"kata_state: containerd {observed['version']} replaces a whole plugin by an imported file, so no file "
            "of its own can add a runtime; upgrade to containerd 2, or set kata_state: external, with kata-deploy"
        )
    if own not in observed["files"] and handler.name in files.effective.names:
        # kata-deploy's, or the user's: it stays his.
        wrong = differences(observed["dump"], handler)
        if wrong:
            raise BadInput(
                f"kata_handler: containerd has a runtime {handler.name} that this role didn't add, and "
                f"{'; '.join(wrong)}: set kata_state: external to use it as it is, or choose another name",
                code="handler_of_others",
            )
        return {}
    users = files.without_ours()
    documents = dict(files.documents)
    documents.pop(own, None)
    main = documents.setdefault(files.main, toml.Document(files.main, ""))
    if not main.tree:
        main.set(("version",), users.version, toml.MARK if files.main in observed["files"] else NEW_FILE)
    import_drop_in(main, files.main, own)
    runtime = (*cri_key(users, "containerd", "runtimes"), handler.name)
    tables = [((*runtime, *sub), keys_of(handler.settings, sub)) for sub in tables_of(handler.settings)]
    text = toml.new_file(f"{HEADER}version = {users.version}\n", tables)
    return {own: text, files.main: main.checked()}


def _absent(own: str, observed: ContainerdState) -> dict[str, str | None]:
    if own not in observed["files"]:
        return {}
    if drop_in_path(observed["config_path"]) in observed["files"]:
        # The import is NVIDIA's runtime's, too.
        return {own: None}
    others = {path: text for path, text in observed["files"].items() if path != own}
    texts = texts_without_ours(ABSENT, t.cast(ContainerdState, {**observed, "files": others}))
    return {**{path: text for path, text in texts.items() if path in others}, own: None}
