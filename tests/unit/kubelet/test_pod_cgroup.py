# SPDX-License-Identifier: GPL-3.0-or-later
"""The owner of a process by the text of its cgroup: every driver, runtime and version that names them differently."""

from __future__ import annotations

import dataclasses

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._contracts.cgroup import (
    ProcessOwner,
    container_id,
    process_owner,
)
from hypothesis import given
from hypothesis import strategies as st

UID = "3f0e2a54-8f5b-4f5c-9d62-0d8a3f4b7a10"
UID_ = UID.replace("-", "_")
HASH = "5b1f4c0de0a94f6f9c3e8a7d21b6f0e4"
CID = "c0ffee" + "0123456789abcdef" * 3 + "deadbeef01"
NODE = "badcab1e" * 8
INNER = "feedface" * 8
OTHER = "11111111-2222-3333-4444-555555555555"
SLICE = f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UID_}.slice"
SCOPE = f"cri-containerd-{CID}.scope"
KUBELET = "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods"


def v1(path: str) -> str:
    """All of version 1's hierarchies, as a kernel of today lists them."""
    names = "13:rdma:|12:pids:|11:cpuset:|10:devices:|9:perf_event:|8:memory:|7:cpu,cpuacct:|1:name=systemd:|0::"
    return "".join(f"{one}{path}\n" for one in names.split("|"))


def pod(uid=UID, cid=CID, runtime="", static=False):
    return ("pod", uid, cid, runtime, static)


HOST = ("host", "", "", "", False)
UNKNOWN = ("unknown", "", "", "", False)
CONTAINERD, CRIO, DOCKER = (pod(runtime=name) for name in ("containerd", "cri-o", "docker"))
NO_CONTAINER = pod(cid="")
CONTAINER, DOCKER_ALONE = ("container", "", CID, "", False), ("container", "", CID, "docker", False)
# A path of cgroup version 2, or the whole text.
TABLE = {
    # kubelet and runtime both with systemd
    "systemd containerd burstable": (f"{SLICE}/{SCOPE}", CONTAINERD),
    "systemd containerd guaranteed": (f"/kubepods.slice/kubepods-pod{UID_}.slice/{SCOPE}", CONTAINERD),
    "systemd containerd v1": (v1(f"{SLICE}/{SCOPE}"), CONTAINERD),
    "systemd crio runc": (f"{SLICE}/crio-{CID}.scope", CRIO),
    "systemd crio crun": (f"{SLICE}/crio-{CID}.scope/container", CRIO),
    "crio monitor in the pod": (f"{SLICE}/crio-conmon-{CID}.scope", HOST),
    "crio monitor beside it": (f"/system.slice/crio-conmon-{CID}.scope", HOST),
    "crio monitor cgroupfs": (f"/kubepods/burstable/pod{UID}/crio-conmon-{CID}", HOST),
    "systemd docker": (f"{SLICE}/docker-{CID}.scope", DOCKER),
    "an init system in the container": (f"{SLICE}/{SCOPE}/system.slice/nginx.service", CONTAINERD),
    # cgroupfs
    "cgroupfs guaranteed": (f"/kubepods/pod{UID}/{CID}", pod()),
    "cgroupfs burstable v1": (v1(f"/kubepods/burstable/pod{UID}/{CID}"), pod()),
    "cgroupfs crio": (f"/kubepods/burstable/pod{UID}/crio-{CID}", CRIO),
    # kubelet with driver systemd, the runtime with cgroupfs
    "mixed under containerd": (
        f"/system.slice/containerd.service/kubepods-pod{UID_}.slice:cri-containerd:{CID}",
        CONTAINERD,
    ),
    "mixed at the root": (v1(f"/kubepods-besteffort-pod{UID_}.slice:cri-containerd:{CID}"), CONTAINERD),
    "mixed crio": (f"/kubepods-pod{UID_}.slice:crio:{CID}", CRIO),
    "mixed docker": (f"/kubepods-pod{UID_}.slice:docker:{CID}", DOCKER),
    # static pods
    "static systemd": (
        f"/kubepods.slice/kubepods-pod{HASH}.slice/{SCOPE}",
        pod(uid=HASH, runtime="containerd", static=True),
    ),
    "static cgroupfs": (v1(f"/kubepods/burstable/pod{HASH}/{CID}"), pod(uid=HASH, static=True)),
    # kubelet below something else
    "kind systemd from the host": (
        f"/system.slice/docker-{NODE}.scope{KUBELET}-burstable.slice/kubelet-kubepods-burstable-pod{UID_}.slice/{SCOPE}",
        CONTAINERD,
    ),
    "kind cgroupfs from the host": (v1(f"/docker/{NODE}/kubelet/kubepods/besteffort/pod{UID}/{CID}"), pod()),
    "kind from its node": (f"{KUBELET}-pod{UID_}.slice/{SCOPE}", CONTAINERD),
    "cgroup-root": (f"/gpu/team/kubepods/burstable/pod{UID}/{CID}", pod()),
    "kind's own kubelet": (
        f"/system.slice/docker-{NODE}.scope/kubelet.slice/kubelet.service",
        ("container", "", NODE, "docker", False),
    ),
    # containers in a pod's container, and one that impersonates a pod
    "docker in a pod": (f"/kubepods/burstable/pod{UID}/{CID}/docker/{INNER}", pod()),
    "a pod's cgroup created within a pod": (f"{SLICE}/{SCOPE}/kubepods/pod{OTHER}/{INNER}", CONTAINERD),
    # in the pod, in none of its containers
    "the pod itself": (f"{SLICE}", NO_CONTAINER),
    "kata": (f"/kubepods/burstable/pod{UID}/kata_{CID}", NO_CONTAINER),
    # several hierarchies
    "hybrid, v2 without information": (
        f"12:memory:{SLICE}/{SCOPE}\n1:name=systemd:/system.slice/x.service\n0::/\n",
        CONTAINERD,
    ),
    "memory without information": (
        f"9:memory:/\n8:devices:/kubepods/pod{UID}/{CID}\n1:name=systemd:/user.slice\n",
        pod(),
    ),
    "only a lesser controller": (f"3:cpu,cpuacct:/kubepods/pod{UID}/{CID}\n", pod()),
    "memory before devices": (f"2:devices:/kubepods/pod{OTHER}/{INNER}\n1:memory:/kubepods/pod{UID}/{CID}\n", pod()),
    "joint controllers": (f"2:cpu,memory:/kubepods/pod{UID}/{CID}\n1:pids:/kubepods/pod{OTHER}/{INNER}\n", pod()),
    "one hierarchy without information": (f"2:memory:/../..\n1:pids:/docker/{CID}\n", DOCKER_ALONE),
    "no conclusive hierarchy": ("2:memory:/system.slice/x.service\n0::/../..\n", UNKNOWN),
    # containers that no kubelet created
    "docker": (f"/system.slice/docker-{CID}.scope", DOCKER_ALONE),
    "docker v1": (v1(f"/docker/{CID}"), DOCKER_ALONE),
    "docker with a parent slice": (f"/gpu.slice:docker:{CID}", DOCKER_ALONE),
    "podman": (f"/machine.slice/libpod-{CID}.scope/container", CONTAINER),
    "podman of a user": (f"/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{CID}.scope", CONTAINER),
    "podman monitor": (f"/machine.slice/libpod-conmon-{CID}.scope", HOST),
    "nerdctl": (f"/system.slice/nerdctl-{CID}.scope", ("container", "", CID, "containerd", False)),
    "nerdctl cgroupfs": (f"/default/{CID}", CONTAINER),
    "lxc": ("/lxc.payload.web/system.slice/ssh.service", ("container", "", "", "", False)),
    "nspawn": ("/machine.slice/systemd-nspawn@web.service/payload", ("container", "", "", "", False)),
    # the machine's own
    "service": ("/system.slice/nvidia-persistenced.service", HOST),
    "session": (v1("/user.slice/user-0.slice/session-3.scope"), HOST),
    "root": ("/", HOST),
    "shim": ("/system.slice/containerd.service", HOST),
    # unknown
    "another namespace": ("/../..", UNKNOWN),
    "another namespace's service": (v1("/../../../system.slice/ssh.service"), UNKNOWN),
    "the pod's other container": (f"/../{SCOPE}", ("unknown", "", CID, "containerd", False)),
    "another pod, seen from a container": (f"/../../kubepods-burstable-pod{UID_}.slice/{SCOPE}", CONTAINERD),
    "a pod with no UID": (f"/kubepods/burstable/podmine/{CID}", ("unknown", "", CID, "", False)),
    "kubelet's, no pod": ("/kubepods.slice/kubepods-burstable.slice", UNKNOWN),
    "kind's, no pod": (f"/docker/{NODE}/kubelet.slice/kubelet-kubepods.slice", UNKNOWN),
    "gone": ("", UNKNOWN),
    "junk": ("\n::\n0:\nx\n0::relative\n", UNKNOWN),
    # removed while the process was in it
    "removed": (f"{SLICE}/{SCOPE} (deleted)", CONTAINERD),
    "removed pod": (f"/kubepods/pod{UID} (deleted)", NO_CONTAINER),
    # similar names
    "64 digits and more": (f"/kubepods/pod{UID}/{CID}0", NO_CONTAINER),
    "a UID and more": (f"/kubepods/pod{UID}0/{CID}", ("unknown", "", CID, "", False)),
    "a service named after a pod": (f"/system.slice/mypod{UID}.service", HOST),
    "capital letters": (f"/system.slice/docker-{CID.upper()}.scope", HOST),
}


@pytest.mark.parametrize("name", list(TABLE))
def test_owner(name):
    given, expected = TABLE[name]
    text = given if "\n" in given or not given else f"0::{given}\n"
    found = process_owner(text)
    assert dataclasses.astuple(found)[:-1] == expected
    assert found.path in text and not found.path.endswith("(deleted)")


@pytest.mark.parametrize(
    "name", [CID, f"cri-containerd-{CID}.scope", f"crio-{CID}", f"kubepods-pod{UID_}.slice:cri-containerd:{CID}"]
)
def test_container_id_of_a_directory(name):
    assert container_id(name) == CID


@pytest.mark.parametrize("name", ["", CID[1:], f"{CID}0", f"crio-conmon-{CID}.scope", f"x:{CID}", f"{CID}.slice"])
def test_directories_of_no_kubelet_container(name):
    assert container_id(name) == ""


def test_path_is_the_one_that_matched():
    assert process_owner(f"3:pids:/\n2:devices:/kubepods/pod{UID}/{CID}\n0::/\n").path == f"/kubepods/pod{UID}/{CID}"
    assert process_owner("") == ProcessOwner("unknown", "", "", "", False, "")
    assert process_owner("5:memory:/system.slice/a.service\n0::/system.slice\n").path == "/system.slice/a.service"


paths = st.lists(
    st.sampled_from(
        [
            "kubepods", "kubepods.slice", f"pod{UID}", f"kubepods-pod{UID_}.slice", f"pod{HASH}", CID, "..",
            "docker", f"cri-containerd-{CID}.scope", f"crio-conmon-{CID}.scope", f"x:docker:{CID}", "container", "",
            "system.slice",
        ]
    )
    | st.text(max_size=20),
    max_size=8,
).map(lambda parts: "/" + "/".join(parts))  # fmt: skip
controllers = st.sampled_from(["memory", "devices", "pids", "name=systemd", "", "cpu,cpuacct", "rdma", "\u0661"])
lines = st.builds("{}:{}:{}".format, st.integers(), controllers, paths) | st.text(max_size=200)


@given(st.lists(lines, max_size=12).map("\n".join))
def test_every_text_has_an_owner(text):
    found = process_owner(text)
    assert found.where in ("pod", "container", "host", "unknown")
    assert found.runtime in ("", "containerd", "cri-o", "docker")
    assert bool(found.pod_uid) == (found.where == "pod") and "_" not in found.pod_uid
    assert len(found.container_id) in (0, 64) and not (found.where == "host" and found.container_id)
    assert found.static == (len(found.pod_uid) == 32)
    assert found.path in text


@given(paths)
def test_a_pod_cant_impersonate_another_by_its_own_cgroups(below):
    """Cgroups below a container's own belong to that container."""
    found = process_owner(f"0::{SLICE}/cri-containerd-{CID}.scope{below}".partition("\n")[0])
    assert (found.where, found.pod_uid, found.container_id) == ("pod", UID, CID)
