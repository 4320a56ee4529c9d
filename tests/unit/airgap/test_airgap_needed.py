# SPDX-License-Identifier: GPL-3.0-or-later
"""What an inventory needs of the list, by its variables, its machines' choices and its cluster, and its formats."""

from __future__ import annotations

import dataclasses

import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap import formats, table
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap.inventory import inventory, variables
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap.needed import (
    Inventory,
    Machine,
    needed,
    without_credentials,
)
from ansible_runs import ROOT, ansible, write_inventory
from test_driver_choice import chosen, node

LIST = table.listed()
NVIDIA = "https://developer.download.nvidia.com/compute/cuda/repos/"


def machine(release, host="gpu1", **given):
    """A host with Ampere cards, and what role driver chooses for it."""
    lookup = variables(host, given)
    options = {name.removeprefix("driver_"): value for name, value in given.items() if name.startswith("driver_")}
    observed = node(release, "ampere")
    return Machine(host, observed["distribution"], lookup, chosen(observed, **options))


def of(
    *machines, kubernetes="v1.36.3+k3s1", openshift="", backends=("gpushare",), scheduler="", delivery="build", **given
):
    local = variables("localhost", given)
    return Inventory(kubernetes, openshift, frozenset(backends), scheduler, delivery, local, machines)


def listed(known, *kinds):
    return {item["name"]: item for item in needed(LIST, known) if item["kind"] in kinds}


def test_a_debian_node_that_builds_its_module():
    found = listed(of(machine("debian-12")), "apt")
    assert found["nvidia-driver-cuda"]["version"] == "580.95.05-*"
    assert found["nvidia-driver-cuda"]["source"] == f"{NVIDIA}debian12/x86_64/"
    assert (found["nvidia-driver-cuda"]["hosts"], found["nvidia-driver-cuda"]["architectures"]) == (["gpu1"], ["amd64"])
    # Of the distribution's own lists: the headers that the node lacks, and what compiles.
    assert {name for name, item in found.items() if not item["source"]} == {
        *("linux-headers-6.1.0-10-amd64", "gcc", "make", "libc6-dev", "dkms")
    }
    assert found["libnvidia-container1"]["version"] == "1.20.2-1"
    keys = listed(of(machine("debian-12")), "file")
    assert (
        keys["libnvidia-container/gpgkey"]["digest"]
        == f"sha256:{LIST['files']['key/libnvidia-container/gpgkey']['sha256']}"
    )
    assert keys["debian12/3bf863cc.pub"]["source"] == f"{NVIDIA}debian12/x86_64/3bf863cc.pub"


def test_machines_that_need_the_same_share_it_and_others_dont():
    found = needed(
        LIST, of(machine("ubuntu-24.04", "gpu2"), machine("ubuntu-24.04", "gpu1"), machine("rocky-9", "gpu3"))
    )
    hosts = {(item["kind"], item["name"]): item["hosts"] for item in found if item["kind"] in ("apt", "rpm")}
    assert hosts["apt", "nvidia-utils-580"] == ["gpu1", "gpu2"] and hosts["rpm", "nvidia-driver-cuda"] == ["gpu3"]
    assert len({tuple(sorted(item.items(), key=str)) for item in map(str_values, found)}) == len(found)


def str_values(item):
    return {name: str(value) for name, value in item.items()}


def test_what_is_taken_from_elsewhere_says_so():
    mirror = {"driver_repo_url": "https://m.example.org/nvidia/", "toolkit_repo_url": "https://m.example.org/toolkit"}
    known = of(
        machine("debian-12", **mirror),
        backends=("gpushare", "hami"),
        gpushare_image="m.example.org/gpushare:1",
        delivery="registry",
        hami_image="m.example.org/hami:v2.10.0",
        hami_kube_scheduler_image="m.example.org/kube-scheduler",
        hami_chart_ref="oci://m.example.org/charts/hami",
    )
    found = {item["name"]: item["place"] for item in needed(LIST, known) if item["place"]}
    places = {
        "m.example.org/gpushare:1": "m.example.org/gpushare:1",
        "docker.io/projecthami/hami:v2.10.0": "m.example.org/hami:v2.10.0",
        "registry.k8s.io/kube-scheduler:v1.36.3": "m.example.org/kube-scheduler:v1.36.3",
        "hami": "oci://m.example.org/charts/hami",
        "nvidia-persistenced": "https://m.example.org/nvidia/",
        "nvidia-container-toolkit": "https://m.example.org/toolkit",
        "debian12/3bf863cc.pub": "https://m.example.org/nvidia/3bf863cc.pub",
    }
    assert found.items() >= places.items() and "gcc" not in found and "libnvidia-container/gpgkey" not in found


@pytest.mark.parametrize(
    ("given", "images", "charts"),
    [
        ({}, {"docker.io/library/python:3.13-slim-bookworm"}, set()),
        ({"delivery": "registry"}, {"localhost/kubegpu/gpushare:1.1.0"}, set()),
        (
            {"delivery": "registry", "scheduler": "dedicated"},
            {"localhost/kubegpu/gpushare:1.1.0", "registry.k8s.io/kube-scheduler:v1.36.3"},
            set(),
        ),
        ({"backends": ["nvidia"]}, {"nvcr.io/nvidia/k8s-device-plugin:v0.20.0"}, {"nvidia-device-plugin"}),
        (
            {"backends": ["nvidia"], "nvidia_device_plugin_gfd": "yes", "nvidia_device_plugin_dcgm_exporter": True},
            {
                "nvcr.io/nvidia/k8s-device-plugin:v0.20.0",
                "registry.k8s.io/nfd/node-feature-discovery:v0.19.0",
                "nvcr.io/nvidia/k8s/dcgm-exporter:4.5.3-4.8.2-distroless",
            },
            {"nvidia-device-plugin", "dcgm-exporter"},
        ),
        (
            {"scheduler": "openshift", "kubernetes": "v1.35.2", "openshift": "4.22.1", "delivery": "registry"},
            {"localhost/kubegpu/gpushare:1.1.0", "registry.k8s.io/scheduler-plugins/kube-scheduler:v0.34.7"},
            set(),
        ),
        ({"backends": [], "acceptance_image": "example.org/cuda:1"}, {"example.org/cuda:1"}, set()),
        # AKS numbers its own patches: Kubernetes has the image of its last one.
        (
            {"backends": [], "scheduler": "dedicated", "kubernetes": "v1.28.101"},
            {"registry.k8s.io/kube-scheduler:v1.28.15"},
            set(),
        ),
    ],
)
def test_images_and_charts_by_mode_and_back_end(given, images, charts):
    known = of(**given)
    assert (set(listed(known, "image")), set(listed(known, "chart"))) == (images, charts)


def test_a_version_that_isnt_known_is_asked_for():
    with pytest.raises(BadInput, match=r"the cluster's version isn't known.*set airgap_kubernetes"):
        needed(LIST, of(kubernetes="", scheduler="dedicated"))


def test_an_operators_plugin_takes_no_chart_and_the_cluster_decides():
    hostvars = {"localhost": {}, "gpu1": {"gpu_node": {"distribution": {}}, "gpu_backend": "hami"}}
    cluster = {
        "version": "v1.36.3",
        "backends": {"parts": {"hami": False, "nvidia": True}, "gpushare": ["gpu1"]},
        "operators": [{"kind": "ClusterPolicy", "name": "p"}],
        "scheduler": {"mode": "dedicated", "openshift": "", "takes_policy": False},
    }
    known = inventory(hostvars, {"gpu1": {}}, cluster)
    assert (known.backends, known.scheduler, known.delivery) == ({"gpushare"}, "dedicated", "build")
    assert inventory(hostvars, {"gpu1": {}}, {}, "v1.36.3").backends == {"hami"}
    # What is carried in has to do for the switch as well.
    assert inventory(hostvars, {"gpu1": {}}, cluster, planned=True).backends == {"gpushare", "hami"}


def test_nodes_to_which_nobody_logs_in_count_without_the_cluster():
    hostvars = {"localhost": {"gpushare_nodes": ["n"], "gpu_node_software": "gpu_operator"}}
    known = inventory(hostvars, {}, {}, "v1.36.3")
    assert (known.backends, known.software, known.machines) == ({"gpushare"}, {"gpu_operator"}, ())
    names = listed(known, "chart", "image")
    assert "gpu-operator" in names and any(name.startswith("nvcr.io/nvidia/gpu-operator") for name in names)


def test_the_gpu_operators_nodes_get_its_images_and_no_packages():
    """Role gpu_operator's rows, as the list has them where the role is."""
    row = {
        "digest": "",
        "platforms": {},
        "made_by": "",
        "path": "",
        "licence": "x",
        "variables": ["gpu_operator_registry"],
    }
    row["when"] = {"software": ["gpu_operator"], "openshift": [False]}
    own = {
        "gpu-operator": {**row, "reference": "nvcr.io/nvidia/gpu-operator:v26.7.0"},
        "gpu-operator-driver": {**row, "reference": "nvcr.io/nvidia/driver:595.91.07"},
    }
    with_role = {**LIST, "images": own}
    hostvars = {
        "localhost": {"gpu_operator_registry": "m.example.org/all/"},
        "gpu1": {"gpu_node": node("ubuntu-24.04"), "gpu_node_software": "gpu_operator"},
    }
    known = inventory(hostvars, {"gpu1": chosen(node("ubuntu-24.04"))}, {}, "v1.36.3")
    found = needed(with_role, known)
    assert {item["source"]: item["place"] for item in found if item["kind"] == "image"} == {
        "nvcr.io/nvidia/gpu-operator:v26.7.0": "m.example.org/all/nvidia/gpu-operator:v26.7.0",
        "nvcr.io/nvidia/driver:595.91.07-ubuntu24.04": "m.example.org/all/nvidia/driver:595.91.07-ubuntu24.04",
    }
    assert not [item for item in found if item["kind"] == "apt"] and "helm" in {item["name"] for item in found}
    # What the cluster has decided counts more than a variable.
    software = {"roles": ["gpu1"], "gpu_operator": [], "installs": False}
    cluster = {
        "version": "v1.36.3",
        "backends": {"parts": {"hami": False, "nvidia": False}, "gpushare": [], "software": software},
    }
    found = needed(with_role, inventory(hostvars, {"gpu1": chosen(node("ubuntu-24.04"))}, cluster))
    assert [item for item in found if item["kind"] == "apt"] and not [item for item in found if item["kind"] == "image"]


# --------------------------------------------------------------------------- formats
# As read on 2026-11-30 in the sources, and tried with programs built of them, on images and a catalogue of our own:
# oc-mirror 855b64a3 refuses unknown fields, a catalogue, package or channel that is there twice, and a configuration
# without mirror; Hauler 923a92d ignores unknown fields, takes all platforms where none is named, skips a document
# without apiVersion or kind, and keeps one of several files whose names are equal without regard to case.


def operator(name, channel):
    return {"name": name, "defaultChannel": channel, "channels": [{"name": channel}]}


def test_oc_mirror_takes_the_gpu_operators_packages_each_catalogue_once():
    """By OLM come the operators' images, with all that their bundles name, and none of the chart's."""
    known = of(scheduler="openshift", kubernetes="v1.34.1", openshift="4.21.3", gpu_operator_channel="v25.10")
    known = dataclasses.replace(known, software=frozenset({"gpu_operator"}))
    items = needed(LIST, known)
    [document] = yaml.safe_load_all(formats.text("oc-mirror", items, known))
    assert document["mirror"]["operators"] == [
        {
            "catalog": "registry.redhat.io/redhat/certified-operator-index:v4.21",
            "packages": [operator("gpu-operator-certified", "v25.10")],
        },
        {
            "catalog": "registry.redhat.io/redhat/redhat-operator-index:v4.21",
            "packages": [operator("nfd", "stable"), operator("openshift-secondary-scheduler-operator", "stable")],
        },
    ]
    assert not [item["id"] for item in items if item["id"].startswith(("images/gpu-operator", "charts/gpu-operator"))]


def test_oc_mirror_takes_images_by_tag_and_the_operator():
    known = of(scheduler="openshift", kubernetes="v1.34.1", openshift="4.21.3", backends=["nvidia"])
    text = formats.text("oc-mirror", needed(LIST, known), known)
    [document] = yaml.safe_load_all(text)
    assert (document["apiVersion"], document["kind"]) == ("mirror.openshift.io/v2alpha1", "ImageSetConfiguration")
    assert document["mirror"] == {
        "operators": [
            {
                "catalog": "registry.redhat.io/redhat/redhat-operator-index:v4.21",
                "packages": [operator("openshift-secondary-scheduler-operator", "stable")],
            }
        ],
        "additionalImages": [
            {"name": "nvcr.io/nvidia/k8s-device-plugin:v0.20.0"},
            {"name": "registry.k8s.io/scheduler-plugins/kube-scheduler:v0.34.7"},
        ],
    }
    assert "# 1 chart; not in this format\n" in text and "# 2 images of unknown size\n" in text


def test_hauler_takes_images_charts_and_files():
    known = of(machine("rocky-9"), backends=["hami"])
    text = formats.text("hauler", needed(LIST, known), known)
    # It reads a document up to a line of three dashes, and warns of one without apiVersion.
    assert all("\napiVersion: " in f"\n{part}" for part in text.split("\n---\n")) and "\n---\n" in text
    documents = list(yaml.safe_load_all(text))
    assert {document["kind"] for document in documents} == {"Images", "Charts", "Files"}
    assert {document["apiVersion"] for document in documents} == {"content.hauler.cattle.io/v1"}
    by_kind = {document["kind"]: document["spec"][document["kind"].lower()] for document in documents}
    assert by_kind["Charts"] == [
        {"name": "hami", "repoURL": "https://project-hami.github.io/HAMi/", "version": "2.10.0"}
    ]
    assert {"path": f"{NVIDIA}rhel9/x86_64/D42D0685.pub"} in by_kind["Files"]
    assert [row["path"].rpartition("-")[2] for row in by_kind["Files"] if "helm" in row["path"]] == [
        "amd64.tar.gz",
        "arm64.tar.gz",
    ]


def test_hauler_gets_names_for_files_that_it_would_take_for_one():
    known = of(machine("debian-12"), machine("ubuntu-24.04", "gpu2"))
    documents = list(yaml.safe_load_all(formats.text("hauler", needed(LIST, known), known)))
    [files] = [document["spec"]["files"] for document in documents if document["kind"] == "Files"]
    names = {row["path"]: row.get("name") for row in files}
    place = NVIDIA.removeprefix("https://").replace("/", "-")
    assert {path: name for path, name in names.items() if name} == {
        f"{NVIDIA}{system}/x86_64/3bf863cc.pub": f"{place}{system}-x86_64-3bf863cc.pub"
        for system in ("debian12", "ubuntu2404")
    }
    stored = [name or path.rpartition("/")[2].lower() for path, name in names.items()]
    assert len(stored) == len(set(stored)) == 3


def test_a_name_that_a_node_gave_stays_in_its_line():
    known = of(machine("debian-12"))
    [item] = [each for each in needed(LIST, known) if each["name"] == "gcc"]
    text = formats.text("plain", [{**item, "name": "gcc\t\x1b[2Jx\nimage\tevil"}], known)
    [row] = [line for line in text.splitlines() if not line.startswith("#")]
    assert "\x1b" not in row and row.count("\t") == 4


def test_sizes_that_arent_known_are_no_zero():
    known = of(machine("debian-12"))
    items = needed(LIST, known)
    [images] = [row for row in formats.totals(items) if row["kind"] == "image"]
    assert images == {
        "kind": "image",
        "count": 1,
        "bytes": LIST["images"]["base"]["platforms"]["amd64"]["bytes"],
        "sizes_unknown": 0,
    }
    text = formats.text("plain", items, known)
    assert "# 1 image: 0.04 GB\n" in text
    assert any("NVIDIA's driver licence" in line for line in text.splitlines() if line.startswith("#"))
    rows = [line.split("\t") for line in text.splitlines() if not line.startswith("#")]
    assert len(rows) == len(items) and all(len(row) == 5 and all(row) for row in rows)


# --------------------------------------------------------------------------- the playbook


def test_the_playbook_lists_what_a_machine_needs_without_a_cluster(tmp_path):
    write_inventory(
        tmp_path, {"gpu_nodes": {"gpu1": {"gpu_backend": "nvidia", "driver_manage_prerequisites": "ignore"}}}
    )
    words = ("-i", "hosts.yml", ROOT / "playbooks/airgap_list.yml", "-e", "airgap_kubernetes=v1.36.3")
    done = ansible(tmp_path, "ansible-playbook", *words, "-e", "airgap_output=list.yml")
    assert done.rc == 0, done.text
    found = yaml.safe_load((tmp_path / "list.yml").read_text())
    assert found["kubernetes"] == "v1.36.3" and f"{len(found['items'])} items are listed in" in done.text
    kinds = {item["kind"] for item in found["items"]}
    assert kinds >= {"image", "chart", "wheel", "collection", "file"} and kinds & {"apt", "rpm"}
    assert {tuple(item["hosts"]) for item in found["items"] if item["kind"] in ("apt", "rpm")} == {("gpu1",)}


def test_a_node_that_isnt_reached_is_named_and_nothing_is_listed(tmp_path):
    away = {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1}
    write_inventory(tmp_path, {"gpu_nodes": {"gpu1": None, "gpu2": away}})
    words = ("-i", "hosts.yml", ROOT / "playbooks/airgap_list.yml", "-e", "airgap_kubernetes=v1.36.3")
    done = ansible(tmp_path, "ansible-playbook", *words, "-e", "airgap_output=list.yml")
    assert done.rc != 0 and "The facts of gpu2 aren't known" in done.text and "undefined" not in done.text, done.text
    assert not (tmp_path / "list.yml").exists()


def test_the_list_has_no_credentials_of_mirrors():
    given = {"driver_repo_url": "https://me:tok@m.example.org/cuda"}
    rows = [without_credentials(item) for item in needed(LIST, of(machine("debian-12", "gpu1", **given)))]
    places = {item["place"] for item in rows if item["place"]}
    assert places and all(place.startswith("https://m.example.org/cuda") for place in places)
