# SPDX-License-Identifier: GPL-3.0-or-later
"""A simulated API server: server-side apply with field owners, defaults, canonical quantities and generations."""

from __future__ import annotations

import collections
import copy
import itertools
import json

from ansible_collections.kubegpu.share.plugins.module_utils._kube.apply_set import ARGUMENTS, ensure
from ansible_collections.kubegpu.share.plugins.module_utils._kube.compare import LIST_KEYS
from ansible_collections.kubegpu.share.plugins.module_utils._kube.errors import KubeError
from ansible_collections.kubegpu.share.plugins.module_utils._kube.refs import FIELD_MANAGER, KINDS, Ref, ref_of
from merge_patch import merge_patch

ATOMIC = {"selector", "fieldRef", "requiredDuringSchedulingIgnoredDuringExecution"}
UNOWNED = {("f:apiVersion",), ("f:kind",), *(("f:metadata", f"f:{key}") for key in ("name", "namespace", "uid"))}


def key_of(field, item):
    keys = {key: item[key] for key in LIST_KEYS[field] if key in item}
    if field == "ports":
        keys.setdefault("protocol", "TCP")
    return "k:" + json.dumps(keys, sort_keys=True)


def leaves(value, path=(), field=""):
    """Yield the paths that an applied object owns, in the format fieldsV1."""
    if isinstance(value, dict) and value and field not in ATOMIC:
        for key, one in value.items():
            yield from leaves(one, (*path, f"f:{key}"), key)
    elif isinstance(value, list) and field in LIST_KEYS:
        for item in value:
            step = key_of(field, item)
            yield (*path, step, ".")
            for key, one in item.items():
                yield from leaves(one, (*path, step, f"f:{key}"), key)
    else:
        yield path


def nested(paths):
    tree = {}
    for path in paths:
        at = tree
        for step in path:
            at = at.setdefault(step, {})
    return tree


def find(value, step):
    if step.startswith("f:"):
        return value.get(step[2:]) if isinstance(value, dict) else None
    wanted = json.loads(step[2:])
    for item in value or []:
        if all(item.get(key, "TCP" if key == "protocol" else None) == one for key, one in wanted.items()):
            return item
    return None


def remove(value, path):
    for step in path[:-1]:
        value = find(value, step)
        if value is None:
            return
    last = path[-1]
    if last == ".":
        return
    if last.startswith("f:"):
        value.pop(last[2:], None)


def merge(live, desired, field=""):
    if isinstance(live, dict) and isinstance(desired, dict) and field not in ATOMIC:
        return {**live, **{key: merge(live[key], one, key) if key in live else one for key, one in desired.items()}}
    if isinstance(live, list) and isinstance(desired, list) and field in LIST_KEYS:
        result = list(live)
        for item in desired:
            found = find(result, key_of(field, item))
            if found is None:
                result.append(item)
            else:
                result[result.index(found)] = merge(found, item)
        return result
    return desired


def default(value, field=""):
    """Set the defaults of the real API server, as far as the tests need them."""
    if isinstance(value, list):
        return [default(one, field) for one in value]
    if not isinstance(value, dict):
        return value
    if field in ("limits", "requests"):
        return {key: canonical(one) for key, one in value.items()}
    value = {key: default(one, key) for key, one in value.items()}
    if field == "ports":
        value.setdefault("protocol", "TCP")
    if field in ("containers", "initContainers"):
        usual = {"terminationMessagePath": "/dev/termination-log", "resources": {}, "imagePullPolicy": "Always"}
        value = {**usual, **value}
    if field in ("livenessProbe", "readinessProbe"):
        value = {"successThreshold": 1, "failureThreshold": 3, "timeoutSeconds": 1, **value}
    if field == "httpGet":
        value = {"scheme": "HTTP", **value}
    if field == "fieldRef":
        value = {"apiVersion": "v1", **value}
    if field == "template":
        value["spec"] = {"restartPolicy": "Always", "dnsPolicy": "ClusterFirst", **value.get("spec", {})}
    return value


def canonical(value):
    return {"0.5": "500m", "1000m": "1", "1024Mi": "1Gi", 2: "2"}.get(value, str(value))


class FakeKube:
    server = "https://192.0.2.1:6443"

    def __init__(self, *objects):
        self.requests = collections.Counter()
        self.calls = []
        self.objects = {}
        self.owners = collections.defaultdict(lambda: collections.defaultdict(set))
        self.numbers = itertools.count(1)
        self.version_answer = {"gitVersion": "v1.36.3"}
        self.failures = []
        self.logs = {}
        for one in objects:
            self.add(one)

    def add(self, definition, manager="others"):
        ref = ref_of(definition)
        live = default(copy.deepcopy(definition))
        live["metadata"].setdefault("uid", f"uid-{next(self.numbers)}")
        live["metadata"].setdefault("generation", 1)
        self.objects[ref] = live
        self.owners[ref][manager] |= set(leaves(definition)) - UNOWNED
        return live

    def edit(self, ref, path, value, manager="kubectl-edit"):
        """Change a field as another manager, which owns it from then on."""
        at = self.objects[ref]
        for step in path[:-1]:
            at = find(at, step)
        at[path[-1][2:]] = value
        for owned in self.owners[ref].values():
            owned.discard(tuple(path))
        self.owners[ref][manager].add(tuple(path))

    def _count(self, verb, target):
        self.requests[verb] += 1
        self.calls.append(f"{verb} {target}")
        if self.failures:
            failure = self.failures.pop(0)
            if failure is not None:
                raise failure

    def _read(self, ref):
        live = copy.deepcopy(self.objects[ref])
        live["metadata"]["managedFields"] = [
            {"manager": name, "operation": "Apply" if name == FIELD_MANAGER else "Update", "fieldsV1": nested(paths)}
            for name, paths in self.owners[ref].items()
            if paths
        ]
        return live

    def get(self, ref):
        self._count("GET", ref)
        return self._read(ref) if ref in self.objects else None

    def list_all(self, api_version, kind, namespace="", field_selector="", label_selector=""):
        self._count("GET", f"{kind}s {namespace}")
        selected = [one.partition("=") for one in label_selector.split(",") if one]
        node = field_selector.removeprefix("spec.nodeName=") if field_selector.startswith("spec.nodeName=") else None
        found = []
        for ref, live in self.objects.items():
            same = (ref.api_version, ref.kind) == (api_version, kind) and namespace in ("", ref.namespace)
            same = same and node in (None, live.get("spec", {}).get("nodeName"))
            labels = live["metadata"].get("labels") or {}
            if same and all(name in labels and (not equal or labels[name] == text) for name, equal, text in selected):
                found.append(self._read(ref))
        return found

    def apply(self, definition, manager):
        ref = ref_of(definition)
        self._count("PATCH", ref)
        if KINDS[(ref.api_version, ref.kind)][1] and Ref("v1", "Namespace", "", ref.namespace) not in self.objects:
            raise KubeError(f'namespaces "{ref.namespace}" not found', 404, "NotFound")
        desired = copy.deepcopy(definition)
        uid = desired["metadata"].pop("uid", None)
        if uid and (ref not in self.objects or self.objects[ref]["metadata"]["uid"] != uid):
            raise KubeError(f"{ref}: uid mismatch (409)", 409, "Conflict")
        paths = set(leaves(desired)) - UNOWNED
        if ref not in self.objects:
            self.objects[ref] = {"metadata": {"uid": f"uid-{next(self.numbers)}", "generation": 0}}
        live = self.objects[ref]
        before = copy.deepcopy(live.get("spec"))
        others = set().union(*(owned for name, owned in self.owners[ref].items() if name != manager), set())
        for path in sorted(self.owners[ref][manager] - paths - others, key=len, reverse=True):
            remove(live, path)
        self.objects[ref] = live = default(merge(live, desired))
        self.owners[ref][manager] = paths
        if live.get("spec") != before or live["metadata"]["generation"] == 0:
            live["metadata"]["generation"] += 1
        return self._read(ref)

    def patch(self, ref, body, subresource=""):
        self._count("PATCH", ref)
        assert set(body) == {subresource or "metadata"}
        merge_patch(self.objects[ref], body)
        return self._read(ref)

    def try_create(self, definition):
        self._count("POST", ref_of(definition))
        return copy.deepcopy(definition)

    def delete(self, ref, version=""):
        self._count("DELETE", ref)
        self.objects.pop(ref, None)
        self.owners.pop(ref, None)

    def evict(self, namespace, pod, grace=None):
        self._count("POST", f"eviction of {namespace}/{pod}")
        self.objects.pop(Ref("v1", "Pod", namespace, pod), None)

    def log(self, namespace, pod, container, lines):
        self._count("GET", f"log {namespace}/{pod}/{container}")
        return self.logs.get(pod, "")

    def version(self):
        self._count("GET", "/version")
        return self.version_answer


def apply_options(definitions, **params):
    """The options of ``cluster_objects`` with its own defaults; a wait ends after 5 seconds."""
    usual = {name: rules.get("default") for name, rules in ARGUMENTS.items()}
    return {**usual, "state": "present", "wait_timeout": 5, "definitions": definitions, **params}


def apply_set(kube, definitions, check=False, waiting=None, **params):
    """Run ``cluster_objects`` with its defaults, without waiting; return its result with this run's requests."""
    given = apply_options(copy.deepcopy(definitions), **params)
    kube.requests.clear()
    return ensure(kube, given, check, waiting)


def actions(result):
    return {one["kind"]: one["action"] for one in result["objects"]}


def settle(kube, *refs):
    """Set the status of a DaemonSet that is rolled out on one node."""
    for ref in refs:
        live = kube.objects[ref]
        counts = ("desiredNumberScheduled", "updatedNumberScheduled", "numberReady", "numberAvailable")
        live["status"] = {"observedGeneration": live["metadata"]["generation"], **dict.fromkeys(counts, 1)}
