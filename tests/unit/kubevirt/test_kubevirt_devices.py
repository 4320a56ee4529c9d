# SPDX-License-Identifier: GPL-3.0-or-later
"""Devices that are permitted to virtual machines, on a real API server.

The definitions have those fields of KubeVirt's and HyperConverged's, and their kinds of lists, that the role writes, as
the projects had them in August 2026.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._kube.direct import connect
from ansible_collections.kubegpu.share.plugins.module_utils._kube.options import auth_arguments
from ansible_collections.kubegpu.share.plugins.module_utils._kubevirt.devices import ARGUMENTS, GATE, OURS, work
from own_cluster import until
from real_apiserver import MERGE, ApiServer

CARD = {"selector": "10de:2236", "resource": "nvidia.com/GA102GL_A10"}
VGPU = {"selector": "NVIDIA A10-12Q", "resource": "nvidia.com/NVIDIA_A10-12Q", "external_provider": False}
TEXT, BOOL = {"type": "string"}, {"type": "boolean"}


def fields(**properties):
    return {"type": "object", "properties": properties}


def rows(key, atomic):
    item = {**fields(**{key: TEXT}, resourceName=TEXT, externalResourceProvider=BOOL, disabled=BOOL)}
    kind = {"x-kubernetes-list-type": "atomic"}
    if not atomic:
        kind = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}
    return {"type": "array", "items": {**item, "required": [key, "resourceName"]}, **kind}


def permitted(pci, atomic):
    return fields(pciHostDevices=rows(pci, atomic), mediatedDevices=rows("mdevNameSelector", atomic))


def definition(group, plural, kind, version, spec):
    served = {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": fields(spec=spec)}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"plural": plural, "singular": kind.lower(), "kind": kind, "listKind": f"{kind}List"},
            "versions": [served],
        },
    }


def kubevirt(with_field=True):
    mediated = fields(mediatedDeviceTypes={"type": "array", "items": TEXT}, **({"enabled": BOOL} if with_field else {}))
    gates = {"type": "array", "items": TEXT, "x-kubernetes-list-type": "atomic"}
    configuration = fields(
        permittedHostDevices=permitted("pciVendorSelector", True),
        mediatedDevicesConfiguration=mediated,
        developerConfiguration=fields(featureGates=gates),
    )
    return definition("kubevirt.io", "kubevirts", "KubeVirt", "v1", fields(configuration=configuration))


def hyperconverged(version):
    within = {
        "permittedHostDevices": permitted("pciDeviceSelector", False),
        "mediatedDevicesConfiguration": fields(enabled=BOOL),
    }
    spec = fields(virtualization=fields(**within)) if version == "v1" else fields(**within)
    return definition("hco.kubevirt.io", "hyperconvergeds", "HyperConverged", version, spec)


class World:
    def __init__(self, server: ApiServer):
        self.server = server
        self.defined: list[str] = []

    def undefine(self):
        for path in self.defined:
            self.server.ask("DELETE", path)
            until(lambda path=path: self.server.ask("GET", path)[0] == 404)

    def define(self, crd):
        group, plural = crd["spec"]["group"], crd["spec"]["names"]["plural"]
        version = crd["spec"]["versions"][0]["name"]
        self.server.apply(crd)
        self.base = f"/apis/{group}/{version}/namespaces/kubevirt/{plural}"
        until(lambda: self.server.ask("GET", self.base)[0] == 200)
        self.defined.append(f"/apis/{crd['apiVersion']}/customresourcedefinitions/{crd['metadata']['name']}")
        self.kind = {"apiVersion": f"{group}/{version}", "kind": crd["spec"]["names"]["kind"]}

    def create(self, spec, name="kubevirt"):
        body = {**self.kind, "metadata": {"name": name, "namespace": "kubevirt"}, "spec": spec}
        self.server.request("POST", self.base, body)

    def live(self, name="kubevirt"):
        found = self.server.request("GET", f"{self.base}/{name}")
        return found["spec"], (found["metadata"].get("annotations") or {}).get(OURS)

    def run(self, state="present", check=False, **options):
        given = {**dict.fromkeys(auth_arguments()), "kubeconfig": str(self.server.kubeconfig)}
        kube = connect(SimpleNamespace(params=given, tmpdir=str(self.server.folder), no_log_values=set()))
        usual = {name: rules.get("default") for name, rules in ARGUMENTS.items()}
        return work(kube, {**usual, "state": state, **options}, check)["changed"]

    def edit(self, spec):
        self.server.request("PATCH", f"{self.base}/kubevirt", {"spec": spec}, MERGE)


@pytest.fixture
def world(api_server):
    found = World(api_server)
    api_server.ask("POST", "/api/v1/namespaces", {"metadata": {"name": "kubevirt"}})
    yield found
    found.undefine()


def permit(world, *pci, mediated=()):
    """Where each object has the lists."""
    within = {"pciHostDevices": list(pci), **({"mediatedDevices": list(mediated)} if mediated else {})}
    inner = {"permittedHostDevices": within}
    if world.kind["kind"] == "KubeVirt":
        return {"configuration": inner}
    return {"virtualization": inner} if world.kind["apiVersion"].endswith("/v1") else inner


CRDS = pytest.mark.parametrize(
    "crd", [kubevirt(), hyperconverged("v1"), hyperconverged("v1beta1")], ids=["kubevirt", "hco", "hco-v1beta1"]
)


@CRDS
def test_entries_are_added_beside_those_of_others_and_removed_exactly(world, crd):
    world.define(crd)
    key = "pciVendorSelector" if crd is CRDS.args[1][0] else "pciDeviceSelector"
    theirs = {key: "8086:6F54", "resourceName": "intel.com/qat", "externalResourceProvider": True}
    world.create(permit(world, theirs))
    before = world.live()
    assert world.run(pci=[CARD], mediated=[VGPU], check=True) and world.live() == before
    assert world.run(pci=[CARD], mediated=[VGPU])
    ours = {key: "10DE:2236", "resourceName": "nvidia.com/GA102GL_A10", "externalResourceProvider": True}
    vgpu = {"mdevNameSelector": "NVIDIA A10-12Q", "resourceName": "nvidia.com/NVIDIA_A10-12Q"}
    assert world.live()[0] == permit(world, theirs, ours, mediated=[vgpu])
    assert not world.run(pci=[CARD], mediated=[VGPU])
    # A changed entry replaces its former self, and one that left the variables goes.
    assert world.run(pci=[{**CARD, "resource": "example.org/a10"}])
    other = permit(world, theirs, {**ours, "resourceName": "example.org/a10"})
    assert world.live()[0] == _with_empty(other)
    assert world.run("absent")
    spec, annotation = world.live()
    assert spec in (before[0], _with_empty(before[0])) and annotation is None
    assert not world.run("absent")


def _with_empty(spec):
    """A list that is empty means the same as none."""
    for name, inner in spec.items():
        within = {**inner, "mediatedDevices": []} if name == "permittedHostDevices" else _with_empty(inner)
        return {name: within}
    return spec


def test_what_others_have_is_theirs(world):
    world.define(kubevirt())
    same = {"pciVendorSelector": "10DE:2236", "resourceName": "nvidia.com/GA102GL_A10"}
    world.create(permit(world, same))
    assert not world.run(pci=[CARD]) and not world.run("absent")
    assert world.live() == (permit(world, same), None)
    with pytest.raises(BadInput, match=r"nvidia\.com/GA102GL_A10 already") as error:
        world.run(pci=[{**CARD, "resource": "example.org/a10"}])
    assert error.value.details["code"] == "device_of_others"
    # Ours that somebody has changed is his from then on.
    world.run(pci=[{"selector": "10DE:20B5", "resource": "nvidia.com/A100"}])
    mine = {"pciVendorSelector": "10DE:20B5", "resourceName": "nvidia.com/A100", "externalResourceProvider": False}
    world.edit(permit(world, same, mine))
    assert world.run("absent") and world.live() == (permit(world, same, mine), None)


@pytest.mark.parametrize("with_field", [True, False], ids=["1.8", "1.7"])
def test_who_makes_mediated_devices_is_said_in_the_words_of_its_version_and_taken_back(world, with_field):
    world.define(kubevirt(with_field))
    gates = {"developerConfiguration": {"featureGates": ["HostDevices"]}}
    world.create({"configuration": gates})
    assert not world.run(create_mediated=True), "that is how KubeVirt comes"
    assert world.run(create_mediated=False) and not world.run(create_mediated=False)
    configuration = world.live()[0]["configuration"]
    if with_field:
        assert configuration == {**gates, "mediatedDevicesConfiguration": {"enabled": False}}
    else:
        assert configuration == {"developerConfiguration": {"featureGates": ["HostDevices", GATE]}}
    assert world.run()
    left, annotation = world.live()
    left["configuration"].pop("mediatedDevicesConfiguration", None)
    assert left == {"configuration": gates} and annotation is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pci": [{"selector": "2236", "resource": "a.b/c"}]}, r"kubevirt_devices_pci\[0\]: '2236'"),
        ({"pci": [{**CARD, "resource": "a10"}]}, "'a10' isn't the name of a resource"),
        ({"pci": [CARD, CARD]}, r"kubevirt_devices_pci\[1\]: another entry"),
        ({"mediated": [{**VGPU, "name": "x"}]}, "it needs selector and resource"),
        ({"mediated": [{**VGPU, "external_provider": "yes"}]}, "true or false"),
        ({"pci": [CARD]}, "the cluster has no KubeVirt"),
    ],
)
def test_bad_input_is_named(world, options, words):
    with pytest.raises(BadInput, match=words):
        world.run(**options)


def test_two_objects_and_a_foreign_annotation_are_refused(world):
    world.define(kubevirt())
    world.create({"configuration": {}})
    body = {"metadata": {"annotations": {OURS: '{"entries": {"pci": 3}}'}}}
    world.server.request("PATCH", f"{world.base}/kubevirt", body, MERGE)
    with pytest.raises(BadInput, match="isn't ours any more"):
        world.run(pci=[CARD])
    world.create({"configuration": {}}, "second")
    with pytest.raises(BadInput, match="KubeVirt kubevirt/kubevirt, KubeVirt kubevirt/second"):
        world.run(pci=[CARD])
