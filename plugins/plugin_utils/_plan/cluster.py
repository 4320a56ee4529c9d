# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the roles' tasks that talk to the cluster would do, from one connection that reads each object once."""

from __future__ import annotations

import collections
import json
import os
import re
import tarfile
import typing as t

import yaml
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator

from ...module_utils._backends import chart
from ...module_utils._backends import cluster as backend
from ...module_utils._contracts import claim_templates
from ...module_utils._contracts.claims import Slice, slice_of
from ...module_utils._contracts.gpushare import ContractError
from ...module_utils._contracts.model import Node, node_of
from ...module_utils._core import tar_headers
from ...module_utils._core.errors import BadInput, ShareError
from ...module_utils._core.types import JsonObject
from ...module_utils._kube import apply_set, helm, setup_record
from ...module_utils._kube.api import Kube
from ...module_utils._kube.direct import connect
from ...module_utils._kube.errors import LibraryMissing
from ...module_utils._kube.options import auth_arguments
from ...module_utils._kube.refs import Ref
from ...module_utils._kubevirt import devices as kubevirt
from ...module_utils._openshift import gpu_operator, operator_setup
from ...module_utils._scheduler import detect, kubeadm
from ...module_utils._scheduler.kubeadm_plan import machines_of, plan_of
from .._actions.base import untagged
from .._actions.connection import Connection

K8S = "kubernetes.core.k8s"
K8S_INFO = "kubernetes.core.k8s_info"
HELM = "kubernetes.core.helm"
HELM_CHART = "kubegpu.share.helm_chart"
# One version; helm takes it with a v, too.
# Bytes of a Chart.yaml.
_LARGEST = 1 << 20
_VERSION = re.compile(r"v?[0-9]+\.[0-9]+\.[0-9]+([-+].*)?")


class ReadOnce:
    """A cluster of which each object and each list is requested once; it changes nothing."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._known: dict[tuple[t.Any, ...], t.Any] = {}
        self.requests: collections.Counter[str] = kube.requests
        self.server = kube.server

    def get(self, ref: Ref) -> JsonObject | None:
        return t.cast("JsonObject | None", self._once(("get", ref), lambda: self._kube.get(ref)))

    def list_all(
        self, api_version: str, kind: str, namespace: str = "", field_selector: str = "", label_selector: str = ""
    ) -> list[JsonObject]:
        asked = (api_version, kind, namespace, field_selector, label_selector)
        return t.cast("list[JsonObject]", self._once(("list", *asked), lambda: self._kube.list_all(*asked)))

    def version(self) -> JsonObject:
        return t.cast(JsonObject, self._once(("version",), self._kube.version))

    def apply(self, definition: JsonObject, manager: str) -> JsonObject:
        raise NotImplementedError("a plan applies nothing")

    def try_create(self, definition: JsonObject) -> JsonObject:
        return self._kube.try_create(definition)

    def create(self, definition: JsonObject) -> JsonObject:
        raise NotImplementedError("a plan creates nothing")

    def patch(self, ref: Ref, body: JsonObject, subresource: str = "") -> JsonObject:
        raise NotImplementedError("a plan patches nothing")

    def delete(self, ref: Ref, version: str = "") -> None:
        raise NotImplementedError("a plan deletes nothing")

    def evict(self, namespace: str, pod: str, grace: int | None = None) -> None:
        raise NotImplementedError("a plan evicts nothing")

    def log(self, namespace: str, pod: str, container: str, lines: int) -> str:
        return self._kube.log(namespace, pod, container, lines)

    def _once(self, key: tuple[t.Any, ...], read: t.Callable[[], t.Any]) -> t.Any:
        if key not in self._known:
            self._known[key] = read()
        return self._known[key]


def _kubeadm_config(kube: Kube, params: JsonObject) -> JsonObject:
    machines = machines_of(params)
    return plan_of(params, machines, kubeadm.work({"plan": None}, kube)["config_map"])[1]


Work = t.Callable[[Kube, JsonObject], JsonObject]

# By module: its options, and its function in check mode.
MODULES: dict[str, tuple[JsonObject, Work]] = {
    "backend_objects": (backend.ARGUMENTS, lambda kube, params: backend.ensure(kube, params, True)),
    "cluster_info": (detect.ARGUMENTS, detect.collect),
    "cluster_objects": (apply_set.ARGUMENTS, lambda kube, params: apply_set.ensure(kube, params, True)),
    "gpu_operator": (gpu_operator.ARGUMENTS, lambda kube, params: gpu_operator.work(kube, params, True)),
    "gpu_operator_setup": (operator_setup.ARGUMENTS, lambda kube, params: operator_setup.work(kube, params, True)),
    "kubevirt_devices": (kubevirt.ARGUMENTS, lambda kube, params: kubevirt.work(kube, params, True)),
    "kubeadm_config": (kubeadm.ARGUMENTS, _kubeadm_config),
}


def validated(arguments: JsonObject, options: JsonObject, rules: t.Mapping[str, t.Any] | None = None) -> JsonObject:
    """Return a task's options as its module gets them.

    :param arguments: the module's argument_spec.
    :param options: the task's.
    :param rules: ``required_if`` and the like.
    :raises BadInput: they are invalid.
    """
    result = ArgumentSpecValidator(arguments, **(rules or {})).validate(untagged(options))
    if result.error_messages:
        raise BadInput("; ".join(result.error_messages))
    return t.cast(JsonObject, result.validated_parameters)


class ClusterTasks:
    """Predicts the tasks that talk to the cluster.

    :ivar missing: why it can't, where ansible-playbook's own Python lacks a library that the connection needs.
    """

    def __init__(self) -> None:
        self._kubes: dict[str, tuple[Connection, Kube]] = {}
        self.missing = ""

    def nodes(self, options: JsonObject) -> list[Node] | None:
        """Return the cluster's nodes; None where ``missing`` says why.

        :param options: a task's, with those of the connection.
        :raises ShareError: they can't be read.
        """
        answer = self.predict(K8S_INFO, {**_auth(options), "api_version": "v1", "kind": "Node"})
        return [node for node in map(node_of, answer["resources"]) if node is not None] if answer else None

    def unverified(self, options: JsonObject) -> bool:
        """Return whether the checks haven't passed since a run of site.yml changed something.

        :param options: a task's, with those of the connection.
        :raises ShareError: the cluster can't be read.
        """
        answer = self._with(options, lambda kube: {"record": setup_record.read(kube, setup_record.PLAYBOOK)})
        return bool(answer and answer["record"]["unverified"])

    def slices(self, options: JsonObject) -> list[Slice]:
        """Return the cluster's ResourceSlices.

        :param options: a task's, with those of the connection.
        :raises ShareError: they can't be read.
        """
        answer = self._with(
            options, lambda kube: {"resources": kube.list_all(claim_templates.API_VERSION, "ResourceSlice")}
        )
        try:
            return [slice_of(raw) for raw in (answer or {})["resources"]]
        except ContractError as error:
            raise ShareError(str(error)) from error

    def predict(self, module: str, options: JsonObject) -> JsonObject | None:
        """Return the result of a task in check mode; None where it has to be executed or another module runs.

        Where ``missing`` says why, every task has to be executed.

        :param module: its full name.
        :raises ShareError: the task would fail.
        """
        if module == K8S_INFO:
            return self._with(options, lambda kube: _read(kube, options))
        if module == K8S:
            return self._with(options, lambda kube: _deleted(kube, options))
        if module == HELM_CHART:
            # The path is needed only for a version, which the task that deploys it names.
            params = validated(chart.ARGUMENTS, options)
            chart.expected_digest(params)
            return {"changed": False, "path": params["chart"], "repository": params["repository"], "sha256": ""}
        if module == HELM:
            return self._with(options, lambda kube: _helm(kube, options))
        name = module.rpartition(".")[2]
        if name not in MODULES:
            return None
        arguments, work = MODULES[name]
        params = validated(arguments, options)
        return self._with(params, lambda kube: work(kube, params))

    def _with(self, options: JsonObject, work: t.Callable[[Kube], JsonObject | None]) -> JsonObject | None:
        auth = _auth(options)
        key = json.dumps(auth, sort_keys=True)
        if key not in self._kubes:
            connection = Connection(auth)
            try:
                with connection.masked():
                    self._kubes[key] = (connection, ReadOnce(connect(connection)))
            except LibraryMissing as error:
                # The modules may run by another Python than ansible-playbook.
                self.missing = str(error)
                return None
        connection, kube = self._kubes[key]
        with connection.masked():
            return work(kube)


def _auth(options: JsonObject) -> JsonObject:
    return {name: options.get(name) for name in auth_arguments()}


def _read(kube: Kube, options: JsonObject) -> JsonObject:
    """Return the result of k8s_info; no objects of a kind that the cluster doesn't serve."""
    api_version, kind = options["api_version"], options["kind"]
    namespace = options.get("namespace") or ""
    labels, fields = (",".join(options.get(name) or []) for name in ("label_selectors", "field_selectors"))
    if options.get("name"):
        object_ = kube.get(Ref(api_version, kind, namespace, options["name"]))
        objects = [object_] if object_ else []
    else:
        objects = kube.list_all(api_version, kind, namespace, field_selector=fields, label_selector=labels)
    return {"changed": False, "resources": objects, "api_found": True}


def _deleted(kube: Kube, options: JsonObject) -> JsonObject | None:
    """Return the result of k8s that deletes what a selector matches; None for its other uses."""
    if options.get("state") != "absent" or not options.get("delete_all"):
        return None
    resources = _read(kube, options)["resources"]
    names = [f"{resource['kind']} {options.get('namespace')}/{resource['metadata']['name']}" for resource in resources]
    return {"changed": bool(names), "diff": [{"after_header": name} for name in names]}


def _helm(kube: Kube, options: JsonObject) -> JsonObject | None:
    """Return the result of helm by what it has recorded in the cluster, as its module compares without a plugin.

    None where a range of versions is asked for, of which only the repository knows the newest.
    """
    name, namespace = (options.get(short) or options[f"release_{short}"] for short in ("name", "namespace"))
    secrets = kube.list_all("v1", "Secret", namespace, label_selector=helm.selector(name))
    subject = f"helm release {namespace}/{name}"
    if options.get("release_state") == "absent":
        return {"changed": bool(secrets), "diff": [{"after_header": subject}] if secrets else []}
    release = helm.release(secrets)
    version = str(options.get("chart_version") or _chart_version(options["chart_ref"]))
    if version and not _VERSION.fullmatch(version):
        return None
    same = release is not None and (
        release["status"],
        release["chart_version"].removeprefix("v"),
        release["values"],
    ) == (
        *(helm.DEPLOYED, version.removeprefix("v")),
        options.get("release_values") or {},
    )
    changed = bool(options.get("force")) or not same
    return {"changed": changed, "diff": [{"after_header": subject}] if changed else []}


def _chart_version(path: str) -> str:
    """Return the version of a chart in a folder or an archive; empty where it can't be read."""
    try:
        if os.path.isdir(path):
            with open(os.path.join(path, "Chart.yaml"), encoding="utf-8") as file:
                text = file.read()
        else:
            with tarfile.open(path, tarinfo=tar_headers.Header) as archive:
                # The charts that it depends on are in folders below.
                [found] = [
                    member_info
                    for member_info in tar_headers.members(archive)
                    if member_info.name.count("/") == 1 and member_info.name.endswith("/Chart.yaml")
                ]
                member = archive.extractfile(found) if found.isreg() else None
                text = member.read(_LARGEST).decode() if member else ""
        return str(yaml.safe_load(text)["version"])
    except (OSError, ValueError, KeyError, TypeError, tarfile.TarError, yaml.YAMLError, RecursionError, EOFError):
        return ""
