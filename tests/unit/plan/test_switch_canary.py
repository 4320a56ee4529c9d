# SPDX-License-Identifier: GPL-3.0-or-later
"""The pod that proves a switched node: what it asks for, and what its shell makes of a container's cards.

nvidia-smi is a script that prints what the real one does.
"""

from __future__ import annotations

import subprocess

import pytest
import yaml
from ansible.template import trust_as_template
from role_templates import ROLES, evaluated, objects, variables_of

FIRST, SECOND = "GPU-aaaaaaaa-0000-4000-8000-000000000001", "GPU-bbbbbbbb-0000-4000-8000-000000000002"
SLICE = "MIG-cccccccc-0000-5000-8000-000000000003"
CARD = f"GPU 0: NVIDIA A100-SXM4-40GB (UUID: {FIRST})\n"
OTHER = f"GPU 1: NVIDIA A100-SXM4-40GB (UUID: {SECOND})\n"
MIG = f"  MIG 1g.5gb      Device  0: (UUID: {SLICE})\n"
OLD_MIG = f"  MIG 1g.5gb      Device  0: (UUID: MIG-{FIRST}/7/0)\n"


def described(role):
    """What a back end's role says of its pod, without what depends on the cluster."""
    [task] = yaml.safe_load((ROLES / role / "tasks/backend_canary.yml").read_text())
    [needs] = task["ansible.builtin.set_fact"].values()
    return {**needs, "namespace": "default", "labels": {}, "resources": {}, "scheduler": "", "runtime_class": ""}


def canary(role):
    given = {"switch_canary_image": "i", "switch_node_name": "gpu1"}
    variables = {**variables_of("switch", "vars"), **given, "__switch_canary_needs": described(role)}
    [pod] = objects("switch", "canary", **variables)
    return pod["spec"]


def container(role):
    return canary(role)["containers"][0]


@pytest.mark.parametrize(
    ("role", "labels"),
    [("gpushare", None), ("hami", None), ("nvidia_device_plugin", {"kubegpu.share/backend": "nvidia"})],
)
def test_it_runs_on_its_node_by_name_and_has_no_token(role, labels):
    """Another node's kubelet may give itself any label of this node."""
    spec = canary(role)
    [term] = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term == {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["gpu1"]}]}
    assert spec.get("nodeSelector") == labels and spec["automountServiceAccountToken"] is False


def test_pods_of_hami_and_nvidia_have_one_command_and_nvidia_smi():
    hami, nvidia = container("hami"), container("nvidia_device_plugin")
    assert hami == nvidia
    assert hami["command"][:2] == ["sh", "-c"] and hami["command"][3:] == ["canary", "1", "/dev"]
    # nvidia-smi, and libcuda, which HAMi's library loads in every program.
    assert hami["env"] == [{"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "compute,utility"}]
    assert container("gpushare")["command"][0] == "python3"


@pytest.fixture
def run(tmp_path):
    """Run the command in a container that has these device nodes, and whose nvidia-smi prints this."""

    def in_container(listed, visible, nodes=("nvidia0", "nvidiactl"), wanted="1", status=0):
        (tmp_path / "dev").mkdir()
        for name in nodes:
            (tmp_path / "dev" / name).touch()
        (tmp_path / "list").write_text(listed)
        smi = tmp_path / "nvidia-smi"
        smi.write_text(f'#!/bin/sh\n[ "$*" = -L ] && /bin/cat {tmp_path}/list\nexit {status}\n')
        smi.chmod(0o755)
        shell, *words = container("hami")["command"][:-2]
        variables = {"PATH": str(tmp_path), **({} if visible is None else {"NVIDIA_VISIBLE_DEVICES": visible})}
        command = [f"/bin/{shell}", *words, wanted, str(tmp_path / "dev")]
        return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=20, check=False)

    return in_container


@pytest.mark.parametrize(
    ("listed", "visible", "wanted"),
    [
        (CARD, FIRST, "1"),
        (CARD + MIG, SLICE, "1"),
        (CARD + OLD_MIG, f"MIG-{FIRST}/7/0", "1"),
        (CARD + OTHER, f"{SECOND},{FIRST}", "2"),
        # The only card in the container is its first one, whatever it is on the node.
        (CARD, "3", "1"),
        # Given by CDI names or mounts.
        (CARD, "void", "1"),
        (CARD, "all", "1"),
        (CARD + MIG, "/var/run/nvidia-container-devices", "1"),
        (CARD, None, "1"),
        (f"a warning\n{CARD}", FIRST, "1"),
    ],
)
def test_a_pod_with_its_own_card_passes(run, listed, visible, wanted):
    done = run(listed, visible, wanted=wanted)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


@pytest.mark.parametrize(
    ("listed", "visible", "nodes", "reason"),
    [
        (CARD, SECOND, ("nvidia0",), f"the container sees {FIRST}, which it wasn't given"),
        # The whole card instead of its slice.
        (CARD, SLICE, ("nvidia0",), f"the container sees {FIRST}, which it wasn't given"),
        (CARD + OTHER, FIRST, ("nvidia0", "nvidia1"), "the container sees 2 devices, and its pod asked for 1"),
        (CARD + OTHER, "all", ("nvidia0", "nvidia1"), "the container sees 2 devices, and its pod asked for 1"),
        (CARD + MIG + MIG, "void", ("nvidia0",), "the container sees 2 devices, and its pod asked for 1"),
        (CARD, "0,1", ("nvidia0",), "the container was given 2 devices, and its pod asked for 1"),
        ("No devices found.\n", "void", ("nvidia0",), "the container sees 0 devices, and its pod asked for 1"),
        (CARD, FIRST, ("nvidiactl",), "the container has no device node"),
    ],
)
def test_a_pod_that_sees_other_cards_fails_and_says_why(run, listed, visible, nodes, reason):
    done = run(listed, visible, nodes)
    assert done.returncode == 1 and done.stdout.startswith(reason), done
    assert f"'{visible}'" in done.stdout and listed.strip() in done.stdout


def test_a_pod_without_nvidia_smi_or_whose_driver_does_not_answer_fails(run, tmp_path):
    done = run(CARD, FIRST, status=9)
    assert done.returncode == 1 and done.stdout.startswith("nvidia-smi -L ended with 9")


def test_the_play_fails_with_what_the_pod_said():
    tasks = yaml.safe_load((ROLES / "switch/tasks/canary.yml").read_text())
    tasks = [task for outer in tasks for task in outer.get("block", [outer])]
    [task] = [task for task in tasks if "ansible.builtin.fail" in task and "canary_phase" in task["when"]]
    needs = {"namespace": "hami-system", "resources": {"nvidia.com/gpu": 1}}
    known = {
        "switch_node_name": "gpu1",
        "__switch_to": "hami",
        "__switch_canary_needs": needs,
        "switch_canary_timeout": 180,
    }

    def play(**status):
        pod = {"resources": [{"status": status}] if status else []}
        variables = {**variables_of("switch", "vars"), **known, "__switch_canary_pod": pod}
        variables |= {name: trust_as_template(text) for name, text in task["vars"].items()}
        if evaluated("{{ " + task["when"] + " }}", **variables):
            return evaluated(task["ansible.builtin.fail"]["msg"], **variables)
        return ""

    ended = {"state": {"terminated": {"exitCode": 1, "message": "the container sees 2 devices\n"}}}
    assert play(phase="Succeeded", containerStatuses=[ended]) == ""
    said = play(phase="Failed", containerStatuses=[ended])
    assert said.startswith("Pod hami-system/gpushare-switch-") and "on node gpu1 didn't get from hami" in said
    assert said.endswith('({"nvidia.com/gpu": 1}): the container sees 2 devices'), said
    # kubelet refuses it, or deletes it before a container ran.
    assert play(phase="Failed", message="Pod was rejected").endswith(": Pod was rejected")
    assert play(phase="Failed").endswith(": it printed no reason")
    # It hasn't ended in time: the scheduler, or kubelet, says why.
    unscheduled = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}
    late = '{"nvidia.com/gpu": 1}), and is Pending after 180 s: '
    assert play(phase="Pending", conditions=[unscheduled]).endswith(f"{late}0/3 nodes are available")
    waits = {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}
    scheduled = {"type": "PodScheduled", "status": "True"}
    assert play(phase="Pending", conditions=[scheduled], containerStatuses=[waits]).endswith(
        f"{late}ImagePullBackOff: no such image"
    )
    assert "and is gone after 180 s" in play()


@pytest.mark.parametrize(
    ("to", "cordoned", "others", "place", "refused"),
    [
        ("dra", True, [], "gpu_nodes", True),
        ("dra", True, [], "control_plane", False),
        ("dra", True, ["gpu2"], "gpu_nodes", False),
        # It is uncordoned before the server is deployed.
        ("dra", False, [], "gpu_nodes", False),
        ("extender", True, [], "gpu_nodes", False),
    ],
)
def test_a_node_that_is_cordoned_and_the_only_one_for_the_claims_server_is_refused_first(
    to, cordoned, others, place, refused
):
    tasks = yaml.safe_load((ROLES / "switch/tasks/node.yml").read_text())
    names = [task["name"] for task in tasks]
    [at] = [number for number, name in enumerate(names) if name.startswith("Refuse to switch a cordoned node")]
    assert at < names.index("Annotate the node as being switched")
    here = {"node": "gpu1", "allocation": to, "present": ["hami"]}
    backends = {
        "nodes": [here],
        "extender": [],
        "dra": [*others, *["gpu1"][: to == "dra"]],
        "templates": {"place": place},
    }
    live = {"name": "gpu1", "annotations": {}, "schedulable": not cordoned}
    known = {"switch_node_name": "gpu1", "__preflight_cluster": {"backends": backends, "nodes": [live]}}
    variables = {**variables_of("switch", "vars"), **known}
    assert all(evaluated("{{ " + one + " }}", **variables) for one in tasks[at]["when"]) is refused
    assert "kubectl uncordon gpu1, and run this again" in evaluated(
        tasks[at]["ansible.builtin.fail"]["msg"], **variables
    )


@pytest.mark.parametrize(
    ("to", "there", "place", "imported", "refused"),
    [
        ("dra", (), "control_plane", True, True),
        ("dra", ("extender",), "control_plane", True, False),
        ("dra", ("dra",), "control_plane", True, False),
        ("dra", (), "control_plane", False, False),
        ("dra", (), "gpu_nodes", True, False),
        ("extender", (), "control_plane", True, False),
    ],
)
def test_a_node_waits_for_the_image_on_the_control_plane(to, there, place, imported, refused):
    """A switch connects to the machine of its node only; site.yml imports the image where servers will run."""
    tasks = yaml.safe_load((ROLES / "switch/tasks/node.yml").read_text())
    names = [task["name"] for task in tasks]
    [at] = [number for number, name in enumerate(names) if name.startswith("Refuse to switch a node to claims")]
    assert at < names.index("Annotate the node as being switched")
    here = {"node": "gpu1", "allocation": to, "present": ["hami"]}
    parts = {name: name in there for name in ("extender", "dra")}
    backends = {"nodes": [here], "there": parts, "templates": {"place": place, "imported": imported}}
    live = {"name": "gpu1", "annotations": {}, "schedulable": True}
    known = {"switch_node_name": "gpu1", "__preflight_cluster": {"backends": backends, "nodes": [live]}}
    variables = {**variables_of("switch", "vars"), **known}
    assert all(evaluated("{{ " + one + " }}", **variables) for one in tasks[at]["when"]) is refused
