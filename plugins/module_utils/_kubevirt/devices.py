# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Permit cards and vGPUs to KubeVirt's virtual machines: entries of permittedHostDevices, and who makes vGPUs.

Where a HyperConverged object stands above KubeVirt, as on OpenShift, its operator reverts what anybody writes into
KubeVirt, so it is written there. KubeVirt's lists are atomic: an applied list would replace those of others. So the
whole list is patched with the version that was read, and an annotation records which entries are ours.

Fields: kubevirt.io/api core/v1 (main of 2026-08-22), hco.kubevirt.io v1 and v1beta1 (main of 2026-08-21).
"""

from __future__ import annotations

import dataclasses
import json
import re
import typing as t

from .._contracts import virtual
from .._core.errors import BadInput
from .._core.plan import Change, Plan, run
from .._core.types import JsonObject
from .._core.wait import Waiting
from .._kube.api import Kube
from .._kube.errors import KubeError
from .._kube.objects import diff_texts
from .._kube.options import auth_arguments
from .._kube.refs import Ref, ref_of
from . import announced

ARGUMENTS: JsonObject = {
    **auth_arguments(),
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "pci": {"type": "list", "elements": "dict", "default": []},
    "mediated": {"type": "list", "elements": "dict", "default": []},
    "create_mediated": {"type": "bool"},
    "cards": {"type": "dict", "default": {}},
    "wait_timeout": {"type": "int", "default": 180},
    "keep": {"type": "list", "elements": "str", "choices": ["pci", "mediated"], "default": []},
}
OURS = "kubegpu.share/permitted-devices"
KUBEVIRT = (virtual.API, "KubeVirt")
# Newest first.
HYPERCONVERGED = (("hco.kubevirt.io/v1", "HyperConverged"), ("hco.kubevirt.io/v1beta1", "HyperConverged"))
DEFINITION = Ref("apiextensions.k8s.io/v1", "CustomResourceDefinition", "", "kubevirts.kubevirt.io")
# Before KubeVirt 1.8 a gate says that others make vGPUs.
GATE = "DisableMDEVConfiguration"
SELECTOR = re.compile(r"[0-9A-F]{4}:[0-9A-F]{4}")
RESOURCE = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
KEYS = frozenset(("selector", "resource", "external_provider"))


@dataclasses.dataclass(frozen=True)
class Device:
    """
    :param list: ``pci`` or ``mediated``.
    :param selector: ``10DE:2236``, or the name of a vGPU type as sysfs has it.
    :param external: a device plugin announces the resource, and not KubeVirt.
    """

    list: str
    selector: str
    resource: str
    external: bool


@dataclasses.dataclass(frozen=True)
class Fields:
    """Where an object has the lists, by the paths of their keys.

    :param selectors: the key of the selector by list.
    """

    devices: tuple[str, ...]
    mediated: tuple[str, ...]
    names: t.Mapping[str, str]
    selectors: t.Mapping[str, str]


LISTS = {"pci": "pciHostDevices", "mediated": "mediatedDevices"}
OF_KUBEVIRT = Fields(
    ("spec", "configuration", "permittedHostDevices"),
    ("spec", "configuration", "mediatedDevicesConfiguration", "enabled"),
    LISTS,
    {"pci": "pciVendorSelector", "mediated": "mdevNameSelector"},
)
SELECTORS = {"pci": "pciDeviceSelector", "mediated": "mdevNameSelector"}
OF_HYPERCONVERGED = {
    HYPERCONVERGED[0][0]: Fields(
        ("spec", "virtualization", "permittedHostDevices"),
        ("spec", "virtualization", "mediatedDevicesConfiguration", "enabled"),
        LISTS,
        SELECTORS,
    ),
    HYPERCONVERGED[1][0]: Fields(
        ("spec", "permittedHostDevices"), ("spec", "mediatedDevicesConfiguration", "enabled"), LISTS, SELECTORS
    ),
}


def devices_of(params: JsonObject) -> list[Device]:
    """Return the devices of the options.

    :raises BadInput: an entry isn't one, or two are for the same cards.
    """
    devices: list[Device] = []
    for kind in LISTS:
        for number, row in enumerate(params[kind] or ()):
            where = f"kubevirt_devices_{kind}[{number}]"
            if not {"selector", "resource"} <= set(row) <= KEYS:
                raise BadInput(f"{where}: it needs selector and resource, and may have external_provider")
            selector = str(row["selector"]).upper() if kind == "pci" else str(row["selector"])
            if kind == "pci" and not SELECTOR.fullmatch(selector):
                raise BadInput(f"{where}: {selector!r} isn't vendor and device of a PCI device, as 10DE:2236")
            if not RESOURCE.fullmatch(str(row["resource"])) or not selector:
                raise BadInput(f"{where}: {row['resource']!r} isn't the name of a resource, as nvidia.com/GA102GL_A10")
            if any((each.list, each.selector) == (kind, selector) for each in devices):
                raise BadInput(f"{where}: another entry is for {selector}, too")
            external = row.get("external_provider", True)
            if not isinstance(external, bool):
                raise BadInput(f"{where}.external_provider: it is true or false")
            devices.append(Device(kind, selector, str(row["resource"]), external))
    return devices


class Live(t.NamedTuple):
    """The object that has the lists.

    :param gate: who makes vGPUs is said by a gate, because this KubeVirt has no field for it.
    """

    item: JsonObject
    fields: Fields
    gate: bool

    @property
    def ref(self) -> Ref:
        return ref_of(self.item)


def find(kube: Kube) -> Live | None:
    """Return the cluster's HyperConverged, else its KubeVirt; None where there is neither.

    :raises BadInput: there are several.
    """
    for api_version, kind in (*HYPERCONVERGED, KUBEVIRT):
        items = kube.list_all(api_version, kind)
        if len(items) > 1:
            names = ", ".join(sorted(str(ref_of(item)) for item in items))
            raise BadInput(f"kubevirt_devices: the cluster has {names}, and virtual machines obey one of them")
        if items:
            of_kubevirt = (api_version, kind) == KUBEVIRT
            fields = OF_KUBEVIRT if of_kubevirt else OF_HYPERCONVERGED[api_version]
            return Live(items[0], fields, of_kubevirt and not _has_field(kube))
    return None


def _has_field(kube: Kube) -> bool:
    """Return whether KubeVirt's definition has a field for who makes vGPUs: from 1.8 on."""
    definition = kube.get(DEFINITION) or {}
    versions = (definition.get("spec") or {}).get("versions") or []
    of_version: JsonObject = next((row for row in versions if row.get("name") == KUBEVIRT[0].partition("/")[2]), {})
    node: t.Any = (of_version.get("schema") or {}).get("openAPIV3Schema") or {}
    for key in OF_KUBEVIRT.mediated:
        node = ((node.get("properties") or {}).get(key)) or {}
    return bool(node)


def _at(item: JsonObject, path: t.Sequence[str]) -> t.Any:
    node: t.Any = item
    for key in path:
        node = (node or {}).get(key)
    return node


def _entry(device: Device, fields: Fields) -> JsonObject:
    entry: JsonObject = {fields.selectors[device.list]: device.selector, "resourceName": device.resource}
    return {**entry, "externalResourceProvider": True} if device.external else entry


class Recorded(t.TypedDict, total=False):
    """What of an object is ours.

    :ivar entries: by list.
    :ivar before: whether KubeVirt made vGPUs, None where its object didn't say; absent where that was left alone.
    """

    entries: dict[str, list[JsonObject]]
    before: bool | None


def _recorded(item: JsonObject) -> Recorded:
    text = ((item.get("metadata") or {}).get("annotations") or {}).get(OURS)
    try:
        record = json.loads(text) if text else {"entries": {}}
        if set(record) <= {"entries", "before"} and all(isinstance(rows, list) for rows in record["entries"].values()):
            return t.cast(Recorded, record)
    except (ValueError, TypeError, KeyError, AttributeError):
        pass
    raise BadInput(
        f"kubevirt_devices: the annotation {OURS} of {ref_of(item)} isn't ours any more: restore it, or remove it and "
        "the entries by hand"
    )


def is_ours(item: JsonObject) -> bool:
    """Return whether an object has anything of this collection."""
    return OURS in ((item.get("metadata") or {}).get("annotations") or {})


def make_body(
    live: Live, devices: t.Sequence[Device], create_mediated: bool | None, keep: t.Collection[str] = ()
) -> JsonObject:
    """Return the merge patch that permits these devices and no others of ours; empty where nothing differs.

    :param create_mediated: whether KubeVirt makes vGPUs itself; None leaves that alone.
    :param keep: lists in which our entries for other cards stay.
    :raises BadInput: somebody else's entry is for the same cards, with another resource.
    """
    item, fields = live.item, live.fields
    record = _recorded(item)
    lists: dict[str, list[JsonObject]] = {}
    ours: Recorded = {"entries": {}}
    for kind, name in fields.names.items():
        have = list(_at(item, (*fields.devices, name)) or ())
        # What somebody has changed since is his.
        theirs = [row for row in have if row not in record["entries"].get(kind, [])]
        wanted = [_entry(device, fields) for device in devices if device.list == kind]
        key = fields.selectors[kind]
        named = {str(row[key]).upper() for row in wanted}
        if kind in keep:
            own = record["entries"].get(kind, [])
            wanted += [row for row in own if row in have and str(row.get(key)).upper() not in named]
        for row in theirs:
            same = [each for each in wanted if str(each[key]).upper() == str(row.get(key)).upper()]
            for each in same:
                if each["resourceName"] != row.get("resourceName") or row.get("disabled"):
                    raise BadInput(
                        f"kubevirt_devices: {live.ref} permits {row.get(key)} as {row.get('resourceName')} already"
                        f"{', disabled' if row.get('disabled') else ''}, and not as {each['resourceName']}: "
                        "change one of them",
                        code="device_of_others",
                        entry=row,
                    )
                wanted.remove(each)
        kept = [row for row in have if row in theirs or row in wanted]
        after = [*kept, *(row for row in wanted if row not in kept)]
        if after != have:
            lists[name] = after
        if wanted:
            ours["entries"][kind] = wanted
    body: JsonObject = {}
    if lists:
        _put(body, fields.devices, lists)
    _who_makes(live, create_mediated, record, ours, body)
    text = json.dumps(ours, sort_keys=True) if ours["entries"] or "before" in ours else None
    if text != ((item.get("metadata") or {}).get("annotations") or {}).get(OURS):
        _put(body, ("metadata", "annotations"), {OURS: text})
    if body:
        _put(body, ("metadata", "resourceVersion"), item["metadata"]["resourceVersion"])
    return body


def _who_makes(live: Live, create: bool | None, record: Recorded, ours: Recorded, body: JsonObject) -> None:
    """Set who makes vGPUs, or what it was before where that is left alone now."""
    fields = live.fields
    path = ("spec", "configuration", "developerConfiguration", "featureGates") if live.gate else fields.mediated
    have = _at(live.item, path)
    gates = list(have or ()) if live.gate else []
    now: bool | None = GATE not in gates if live.gate else have
    wanted = now
    if create is None:
        wanted = record.get("before", now)
    # An object that doesn't say has KubeVirt make them.
    elif "before" in record or create != (now is not False):
        ours["before"] = record.get("before", now)
        wanted = create
    if wanted == now:
        return
    if live.gate:
        _put(body, path, [*(gate for gate in gates if gate != GATE), *([] if wanted else [GATE])])
    else:
        _put(body, path, wanted)


def _put(body: JsonObject, path: t.Sequence[str], value: t.Any) -> None:
    node = body
    for key in path[:-1]:
        node = node.setdefault(key, {})
    if isinstance(value, dict):
        node.setdefault(path[-1], {}).update(value)
    else:
        node[path[-1]] = value


def patched(item: t.Any, body: t.Any) -> t.Any:
    """Return an object as the API server has it after a merge patch (RFC 7396): a null removes a field."""
    if not isinstance(body, dict):
        return body
    merged = dict(item) if isinstance(item, dict) else {}
    for key, value in body.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = patched(merged.get(key), value)
    return merged


def _shown(item: JsonObject) -> JsonObject:
    """Return an object without what the API server keeps of it."""
    metadata = {key: item["metadata"].get(key) for key in ("name", "namespace", "annotations")}
    return {**{key: item.get(key) for key in ("apiVersion", "kind", "spec")}, "metadata": metadata}


class Reconciler:
    """The devices that are permitted to virtual machines."""

    def __init__(
        self, kube: Kube, devices: t.Sequence[Device], create_mediated: bool | None, keep: t.Collection[str] = ()
    ) -> None:
        self._kube = kube
        self._devices = devices
        self._create = create_mediated
        self._keep = keep
        # Of KubeVirt, whose own pods are there; empty as long as it isn't known.
        self.namespace = ""

    def observe(self) -> Live | None:
        live = find(self._kube)
        self.namespace = live.ref.namespace if live else ""
        return live

    def plan(self, state: Live | None) -> Plan:
        if state is None:
            if self._devices or self._create is not None:
                raise BadInput("kubevirt_devices: the cluster has no KubeVirt: install it first")
            return Plan()
        body = make_body(state, self._devices, self._create, self._keep)
        if not body:
            return Plan()
        texts = diff_texts(_shown(state.item), _shown(patched(state.item, body)))
        return Plan((Change(str(state.ref), *texts, body),))

    def apply(self, state: Live | None, plan: Plan) -> None:
        [change] = plan.changes
        ref = t.cast(Live, state).ref
        try:
            self._kube.patch(ref, change.step)
        except KubeError as error:
            if error.status != 409:
                raise
            raise BadInput(f"kubevirt_devices: somebody else has written {ref} meanwhile; run again") from error


def work(kube: Kube, params: JsonObject, check: bool, waiting: Waiting | None = None) -> JsonObject:
    """Run the module ``kubevirt_devices``.

    :param check: predict the change without making it.
    :raises BadInput: an entry isn't one, is another's already, or there is no KubeVirt.
    :raises NotInEffect: KubeVirt doesn't announce a node's cards.
    """
    present = params["state"] == "present"
    devices = devices_of(params)
    create = params.get("create_mediated")
    keep = params.get("keep") or () if present else ()
    reconciler = Reconciler(kube, devices if present else (), create if present else None, keep)
    result = run(reconciler, check)
    own = {device.selector.upper(): device.resource for device in devices if not device.external}
    wanted = announced.numbers_of(params.get("cards") or {}, own) if present else {}
    if check:
        # Where KubeVirt's object changes, virt-handler may see the cards by that.
        behind = [] if result["changed"] else announced.missing(kube, wanted)
        replaced = sorted({row.node for row in behind})
    else:
        timeout = float(params.get("wait_timeout") or 0)
        replaced = announced.ensure(kube, wanted, result["changed"], waiting or Waiting(timeout), reconciler.namespace)
    return {**result, "changed": result["changed"] or bool(replaced), "replaced": replaced}
