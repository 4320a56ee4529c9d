# SPDX-License-Identifier: GPL-3.0-or-later
"""A cluster in memory, for tests with hundreds of runs: one is killed before each change, and the next follows."""

from __future__ import annotations

import collections
import copy

from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._kube.refs import ref_of
from merge_patch import merge_patch


class Killed(BaseException):
    """A SIGKILL: no handler of the program runs."""


def merged(live, body):
    """Return a copy with a JSON merge patch."""
    result = copy.deepcopy(live or {})
    merge_patch(result, copy.deepcopy(body))
    return result


class MemoryKube:
    """An API server, and an operator that advances with the clock.

    :param operator: called with this cluster at each step of the clock.
    """

    def __init__(self, operator, *objects):
        self.requests = collections.Counter()
        self.objects = {}
        self.changes = []
        self.left = None
        self.refused = ()
        self.time = 0.0
        self._operator = operator
        for one in objects:
            self.objects[ref_of(one)] = copy.deepcopy(one)

    # ----------------------------------------------------------------- the clock

    def now(self):
        return self.time

    def sleep(self, seconds):
        self._live()
        self.time += seconds
        self._operator(self)

    # ----------------------------------------------------------------- kills

    def killed_after(self, changes, work):
        """Return whether the work was killed before it had made that many changes or sleeps."""
        self.left = changes
        try:
            work()
        except Killed:
            return True
        finally:
            self.left = None
        return False

    def _live(self):
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Killed

    # ----------------------------------------------------------------- the client

    def get(self, ref):
        return copy.deepcopy(self.objects.get(ref))

    def list_all(self, api_version, kind, namespace="", field_selector="", label_selector=""):
        return [
            copy.deepcopy(one)
            for ref, one in sorted(self.objects.items(), key=lambda pair: pair[0].name)
            if (ref.api_version, ref.kind) == (api_version, kind) and namespace in ("", ref.namespace)
        ]

    def patch(self, ref, body, subresource=""):
        self._change("patch", ref, body)
        if ref not in self.objects:
            raise ShareError(f"{ref}: not found (404)")
        self.set(ref, merged(self.objects[ref], body))

    def apply(self, definition, manager):
        ref = ref_of(definition)
        self._change("apply", ref, definition)
        live = self.objects.get(ref) or {}
        metadata = merged(live.get("metadata"), definition["metadata"])
        new = {**live, **copy.deepcopy(definition), "metadata": metadata}
        if "spec" in definition:
            spec = definition["spec"] if ref.kind == "MachineConfig" else merged(live.get("spec"), definition["spec"])
            new["spec"] = copy.deepcopy(spec)
        self.set(ref, new)

    def delete(self, ref, version=""):
        self._change("delete", ref, None)
        self.objects.pop(ref, None)

    def set(self, ref, new):
        """Write an object; its generation follows its spec."""
        old = self.objects.get(ref) or {}
        if old.get("spec") != new.get("spec"):
            new["metadata"]["generation"] = int((old.get("metadata") or {}).get("generation") or 0) + 1
        self.objects[ref] = new

    def _change(self, verb, ref, body):
        self._live()
        self.changes.append((verb, ref, copy.deepcopy(body)))
        if ref.name in self.refused:
            raise ShareError(f"{ref}: the API server refuses it (403)")
