# SPDX-License-Identifier: GPL-3.0-or-later
"""The templates of role gpushare, rendered by Ansible and validated against Kubernetes' schemas."""

from __future__ import annotations

import pytest
import role_templates
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._allocation.node_backends import ALLOCATORS
from ansible_collections.kubegpu.share.plugins.module_utils._contracts import gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._contracts.backends import RESTRICTED
from gpushare.dra import command as dra_command
from gpushare.extender import command as extender_command
from gpushare.node import limits
from gpushare.plugin import command as plugin_command
from gpushare.templates import command as templates_command
from gpushare_objects import DEFAULTS, rendered
from role_templates import one

OURS = ("extender", "device_plugin")
ALL = (*OURS, "extender_upstream", "device_plugin_upstream")
UPSTREAM = {"gpushare_extender_image": "example.org/e:1", "gpushare_device_plugin_image": "example.org/p:1"}


def pod_of(name, **variables):
    return one(rendered(name, **UPSTREAM, **variables), "DaemonSet")["spec"]["template"]


def container_of(name, **variables):
    (container,) = pod_of(name, **variables)["spec"]["containers"]
    return container


@pytest.mark.parametrize("name", ALL)
def test_each_component_is_complete_and_consistent(name):
    objects = rendered("namespace", name, **UPSTREAM, gpushare_namespace="elsewhere")
    more = {"extender": ["Role", "RoleBinding"], "device_plugin": ["NetworkPolicy"]}.get(name, [])
    kinds = ["Namespace", "ServiceAccount", "ClusterRole", "ClusterRoleBinding", *more, "ResourceQuota", "DaemonSet"]
    assert sorted(each["kind"] for each in objects) == sorted(kinds)
    account, binding, workload = (one(objects, kind) for kind in ("ServiceAccount", "ClusterRoleBinding", "DaemonSet"))
    subject = {"kind": "ServiceAccount", "name": account["metadata"]["name"], "namespace": "elsewhere"}
    assert binding["subjects"] == [subject]
    assert binding["roleRef"]["name"] == one(objects, "ClusterRole")["metadata"]["name"]
    for each in objects[1:]:
        wide = each["kind"].startswith("Cluster")
        assert each["metadata"].get("namespace") == (None if wide else "elsewhere")
    template = workload["spec"]["template"]
    assert template["spec"]["serviceAccountName"] == account["metadata"]["name"]
    assert workload["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    text = yaml.safe_dump(objects)
    for broken in ("critical-pod", "serviceAccount:", "nodePort", "KUBECONFIG", "node-role.kubernetes.io/master: ''"):
        assert broken not in text
    assert one(objects, "Namespace")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "privileged"


@pytest.mark.parametrize(("name", "command"), [("extender", extender_command), ("device_plugin", plugin_command)])
@pytest.mark.parametrize(
    ("unit", "limit", "placement", "preemption", "injection"),
    [
        ("GiB", "auto", "binpack", True, "auto"),
        ("MiB", "required", "spread", False, "cdi"),
        ("GiB", "off", "binpack", False, "envvar"),
    ],
)
def test_the_servers_accept_their_command_lines(
    name, command, unit, limit, placement, preemption, injection, monkeypatch
):
    monkeypatch.setenv("NODE_NAME", "gpu1")
    words = container_of(
        name,
        gpushare_memory_unit=unit,
        gpushare_memory_limit=limit,
        gpushare_placement=placement,
        gpushare_preemption=preemption,
        gpushare_device_injection=injection,
        gpushare_cdi_folders=["/etc/cdi", "/opt/cdi"],
        gpushare_ignore_xids=[94, 63] if limit == "auto" else [],
        gpushare_xid_quiet=60,
        gpushare_reserved_memory=300,
        gpushare_memory_limit_violation="evict" if limit == "required" else "report",
        gpushare_log_format="json",
    )["command"]
    assert words[0] == {"extender": "gpushare-extender", "device_plugin": "gpushare-device-plugin"}[name]
    options = command.parse(words[1:])
    assert options.log_format == "json"
    if name == "extender":
        assert (options.address, options.port, options.placement) == ("127.0.0.1", contract.EXTENDER_PORT, placement)
        assert options.preemption == ("on" if preemption else "off")
    else:
        assert (options.memory_unit, options.metrics, options.xid_quiet) == (unit, None, 60)
        assert (options.memory_limit, options.device_injection) == (limit, injection)
        assert options.reserved_memory == 300
        assert (options.memory_limit_violation == "evict") == (limit == "required")
        assert options.ignore_xids == ("94,63" if limit == "auto" else "")
        assert (options.cdi_folders == "/etc/cdi,/opt/cdi") == (injection != "envvar")


@pytest.mark.parametrize("name", ["extender", "extender_upstream"])
def test_the_extender_runs_beside_each_scheduler(name):
    spec = pod_of(name)["spec"]
    assert spec["hostNetwork"] is True
    assert spec["priorityClassName"] == "system-cluster-critical"
    keys = [f"node-role.kubernetes.io/{role}" for role in ("control-plane", "master")]
    terms = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert [term["matchExpressions"] for term in terms] == [[{"key": key, "operator": "Exists"}] for key in keys]
    # Whatever taint its control plane has: etcd, CriticalAddonsOnly, an administrator's own.
    assert spec["tolerations"] == [{"operator": "Exists"}]


@pytest.mark.parametrize(("name", "command"), [("extender", extender_command), ("device_plugin", plugin_command)])
def test_probes_share_no_port_with_other_clients(name, command, monkeypatch):
    monkeypatch.setenv("NODE_NAME", "gpu1")
    container = container_of(name)
    socket = command.parse(container["command"][1:]).status_socket
    (folder,) = [mount for mount in container["volumeMounts"] if socket.startswith(mount["mountPath"] + "/")]
    (volume,) = [one for one in pod_of(name)["spec"]["volumes"] if one["name"] == folder["name"]]
    assert "emptyDir" in volume
    for probe in ("livenessProbe", "readinessProbe"):
        assert socket in container[probe]["exec"]["command"][-1] and "httpGet" not in container[probe]
    assert "ports" not in container or [port["hostIP"] for port in container["ports"]] == ["127.0.0.1"]


def test_the_server_of_templates_accepts_its_command_line():
    deployed = one(rendered("dra", gpushare_templates_per_namespace=7, gpushare_memory_unit="MiB"), "Deployment")
    (container,) = deployed["spec"]["template"]["spec"]["containers"]
    options = templates_command.parse(container["command"][1:])
    assert container["command"][0] == "gpushare-dra-templates"
    assert (options.templates_per_namespace, options.memory_unit) == (7, "MiB")


@pytest.mark.parametrize("namespaces", [[], ["monitoring"]])
@pytest.mark.parametrize(
    ("template", "name", "command"),
    [("dra", "gpushare-dra-driver", dra_command), ("device_plugin", "gpushare-device-plugin", plugin_command)],
)
def test_metrics_of_a_nodes_server(template, name, command, namespaces, monkeypatch):
    monkeypatch.setenv("NODE_NAME", "gpu1")
    chosen = {"gpushare_device_plugin_metrics": True, "gpushare_metrics_namespaces": namespaces}
    objects = rendered(template, **chosen)
    pod = one(objects, "DaemonSet")["spec"]["template"]
    closed = one(rendered(template), "NetworkPolicy", name)["spec"]
    assert closed["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert (closed["policyTypes"], closed["ingress"]) == (["Ingress"], [])
    server, container = pod["spec"]["containers"]
    # What other clients reach has neither the server's capability nor kubelet's sockets.
    assert command.parse(server["command"][1:]).metrics is None and "ports" not in server
    assert server["securityContext"]["capabilities"]["add"] == ["SYS_ADMIN"]
    assert container["securityContext"] == LOCKED
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/tmp", "/etc/gpushare-metrics"}
    assert all(mount["readOnly"] for mount in container["volumeMounts"])
    options = command.parse(container["command"][1:])
    assert options.serve_metrics
    assert options.status_socket == command.parse(server["command"][1:]).status_socket
    assert (options.metrics.address, options.metrics.port) == ("$(POD_IP)", plugin_command.METRICS_PORT)
    assert [port["containerPort"] for port in container["ports"]] == [options.metrics.port]
    ingress = {each["metadata"]["name"]: each["spec"]["ingress"] for each in objects if each["kind"] == "NetworkPolicy"}
    (rule,) = ingress.pop(name)
    assert rule["ports"] == [{"port": options.metrics.port, "protocol": "TCP"}]
    ((peer,),) = [rule["from"]]
    matched = [{"key": "kubernetes.io/metadata.name", "operator": "In", "values": namespaces}] if namespaces else None
    assert peer["namespaceSelector"].get("matchExpressions") == matched
    assert not any(ingress.values()), "nobody has business with the other servers"
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert volumes["metrics-tls"]["secret"]["secretName"] == f"{name}-metrics-tls"


@pytest.mark.parametrize(("given", "mounted"), [("", "gpushare-{}-metrics-tls"), ("mine", "mine")])
@pytest.mark.parametrize("name", OURS)
def test_certificate_and_rights_of_metrics(name, given, mounted):
    chosen = {"gpushare_device_plugin_metrics": True, "gpushare_extender_metrics": True}
    spec = pod_of(name, **chosen, gpushare_metrics_secret=given)["spec"]
    component = name.replace("_", "-")
    (volume,) = [one for one in spec["volumes"] if one["name"] == "metrics-tls"]
    assert volume["secret"]["secretName"] == mounted.format(component)
    server = {"name": f"gpushare-{component}", "component": component, "account": f"gpushare-{component}"}
    server |= {"namespace": "gpushare-system", "secret": given, "found": []}
    objects = rendered("metrics", metrics={**server, "state": "present"})
    binding = one(objects, "ClusterRoleBinding")
    assert binding["roleRef"]["name"] == "system:auth-delegator"
    assert binding["subjects"][0]["name"] == spec["serviceAccountName"]
    assert [one["metadata"]["name"] for one in objects if one["kind"] == "Secret"] == (
        [] if given else [volume["secret"]["secretName"]]
    )
    # The removal names the same objects.
    gone = rendered("metrics", metrics={**server, "state": "absent"})
    assert [(one["kind"], one["metadata"]["name"]) for one in gone] == [
        (one["kind"], one["metadata"]["name"]) for one in objects
    ]


LOCKED = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}


def test_fault_19_the_extender_has_as_little_privilege_as_possible():
    spec = pod_of("extender")["spec"]
    (container,) = spec["containers"]
    assert container["securityContext"] == LOCKED
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert "requests" in container["resources"] and "memory" in container["resources"]["limits"]
    assert (spec["securityContext"]["runAsNonRoot"], spec["securityContext"]["runAsUser"]) == (True, 65532)
    assert not [volume for volume in spec["volumes"] if "hostPath" in volume]


KUBELET = {"/var/lib/kubelet/device-plugins", "/var/lib/kubelet/pod-resources"}
CDI = {"/etc/cdi", "/var/run/cdi"}


@pytest.mark.parametrize(("name", "server"), [("device_plugin", "device-plugin"), ("dra", "dra-driver")])
def test_the_nodes_process_ids_come_with_the_variable_only(name, server):
    def spec_of(**variables):
        found = [one for one in rendered(name, **variables) if one["kind"] == "DaemonSet"]
        (spec,) = [one["spec"]["template"]["spec"] for one in found]
        return spec, next(each for each in spec["containers"] if each["name"] == server)

    without, before = spec_of()
    assert "hostPID" not in without and "--host-pid" not in before["command"]
    with_it, after = spec_of(gpushare_host_pid=True)
    assert with_it["hostPID"] is True and "--host-pid" in after["command"]
    assert after["securityContext"] == before["securityContext"], "no capability is added"


@pytest.mark.parametrize(
    ("limit", "injection", "accepted", "paths", "added"),
    [
        ("auto", "auto", True, KUBELET | CDI, ["SYS_ADMIN"]),
        ("required", "envvar", True, KUBELET, ["SYS_ADMIN"]),
        ("off", "cdi", True, KUBELET | CDI, []),
        ("off", "cdi", False, KUBELET | CDI, ["SYS_ADMIN"]),
        # As YAML reads off.
        (False, "envvar", True, KUBELET, []),
    ],
)
def test_the_device_plugin_has_only_the_privileges_it_needs(limit, injection, accepted, paths, added):
    chosen = {"gpushare_memory_limit": limit, "gpushare_device_injection": injection}
    spec = pod_of("device_plugin", **chosen, toolkit_accept_unprivileged=accepted)["spec"]
    (container,) = spec["containers"]
    assert container["securityContext"] == {
        **LOCKED,
        "capabilities": {"drop": ["ALL"], **({"add": added} if added else {})},
    }
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert "hostNetwork" not in spec and "hostPID" not in spec
    volumes = {volume["name"]: volume["hostPath"]["path"] for volume in spec["volumes"] if "hostPath" in volume}
    assert set(volumes.values()) == paths | {"/sys/fs/cgroup"}
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    for name, path in volumes.items():
        assert mounts[path]["name"] == name, "the driver and kubelet get paths of the node"
        # NVIDIA's library writes into a control group's folder where the kernel has the controller dmem.
        writable = KUBELET | ({"/sys/fs/cgroup"} if limit in ("auto", "required") else set())
        assert mounts[path].get("readOnly", False) == (path not in writable)


def with_drivers(*versions, nodes=2, deployed=None, **variables):
    """The capabilities that the device plugin has where these drivers run; None where a node couldn't be asked.

    :param variables: of each host.
    :param deployed: the template of the pods that the cluster has, where the role has read it.
    """
    seen = [
        {} if version is None else {"gpu_node": {"driver": {"module_version": version or None}}} for version in versions
    ]
    hosts = {f"gpu{number}": {**variables, **one} for number, one in enumerate(seen)}
    given = {"groups": {"gpu_nodes": list(hosts)}, "hostvars": hosts, "gpushare_nodes": ["n"] * nodes}
    if deployed is not None:
        given["__gpushare_deployed"] = {"resources": [{"spec": {"template": deployed}}]}
    (container,) = pod_of("device_plugin", **given)["spec"]["containers"]
    return container["securityContext"]["capabilities"].get("add", [])


def test_the_device_plugin_has_sys_admin_only_where_a_driver_can_limit():
    assert with_drivers("580.95.05", "610.1") == []
    older = str(limits.DRIVER - 1)
    assert with_drivers(older, older) == [] and with_drivers(older, str(limits.DRIVER)) == ["SYS_ADMIN"]
    # A driver that isn't known: the machine wasn't asked, isn't in the inventory, or others install its driver.
    assert with_drivers("580.95.05", None) == with_drivers("580.95.05", "", driver_state="external") == ["SYS_ADMIN"]
    # A machine that role driver is about to give one, as one that joins a running cluster.
    assert with_drivers("580.95.05", "") == with_drivers("580.95.05", "", driver_version=f"{older}.1") == []
    assert with_drivers("580.95.05", "", driver_version=f"{limits.DRIVER}.1") == ["SYS_ADMIN"]
    assert with_drivers("580.95.05") == ["SYS_ADMIN"] and with_drivers(nodes=0) == ["SYS_ADMIN"]


def test_with_a_limit_the_deployed_device_plugin_tells_of_the_other_hosts():
    without, having = (pod_of("device_plugin", gpushare_memory_limit=limit) for limit in ("off", "auto"))
    assert with_drivers("580.95.05", None, deployed=without) == []
    assert with_drivers("580.95.05", None, deployed=having) == ["SYS_ADMIN"]
    assert with_drivers(f"{limits.DRIVER}.1", None, deployed=without) == ["SYS_ADMIN"]
    # A run that has asked all hosts decides by what they said.
    assert with_drivers("580.95.05", "580.95.05", deployed=having) == []


def selinux_type(name, machine, image="", **variables):
    """The type of the device plugin's, or the DRA driver's, container; ``machine`` is None where it isn't observed."""
    hosts = {"gpu1": {} if machine is None else {"gpu_node": {"driver": {}, "security": {"selinux": machine}}}}
    cluster = {"nodes": [{"name": "gpu1", "os": image}, {"name": "other", "os": "Red Hat Enterprise Linux 9.6"}]}
    hosts["localhost"] = {"__scheduler_cluster_info": cluster}
    given = {"groups": {"gpu_nodes": ["gpu1"]}, "hostvars": hosts, "gpushare_nodes": ["gpu1"]}
    made = one(rendered(name, **UPSTREAM, **given, **variables), "DaemonSet")["spec"]["template"]["spec"]
    options = [container["securityContext"].get("seLinuxOptions") for container in made["containers"]]
    assert "seLinuxOptions" not in made["securityContext"] and options[1:] == [None] * (len(options) - 1)
    return options[0]


@pytest.mark.parametrize("name", ["device_plugin", "device_plugin_upstream", "dra"])
def test_the_device_plugin_leaves_selinuxs_confinement_where_a_node_has_it(name):
    """Confined, it may neither connect to kubelet nor read its sockets (container-selinux)."""
    free = {"type": "spc_t", "level": "s0"}
    assert selinux_type(name, "enforcing") == selinux_type(name, "permissive") == free
    assert selinux_type(name, "disabled") is None and selinux_type(name, "") is None
    # The machine's own answer counts more than its system's name.
    assert selinux_type(name, "disabled", "Rocky Linux 9.6 (Blue Onyx)") is None
    for image in (
        "Rocky Linux 9.6 (Blue Onyx)",
        "Red Hat Enterprise Linux CoreOS 418.94.202501221327-0",
        "SUSE Linux Micro 6.1",
        "Amazon Linux 2023.6.20250115",
        "Fedora CoreOS 41.20250117.3.0",
    ):
        assert selinux_type(name, None, image) == free, image
    for image in ("Ubuntu 24.04.1 LTS", "Debian GNU/Linux 13 (trixie)", "Bottlerocket OS 1.32.0 (aws-k8s-1.31)", ""):
        assert selinux_type(name, None, image) is None, image
    assert selinux_type(name, None, gpushare_selinux_type="super_t")["type"] == "super_t"
    assert selinux_type(name, "enforcing", gpushare_selinux_type="") is None


def test_the_container_of_the_metrics_stays_confined():
    assert selinux_type("device_plugin", "enforcing", gpushare_device_plugin_metrics=True)["type"] == "spc_t"


def test_without_limits_no_control_groups_are_writable():
    spec = pod_of("device_plugin", gpushare_device_plugin_capabilities=[])["spec"]
    (container,) = spec["containers"]
    assert {mount["mountPath"]: mount.get("readOnly") for mount in container["volumeMounts"]}["/sys/fs/cgroup"] is True


@pytest.mark.parametrize("name", ["device_plugin", "device_plugin_upstream"])
def test_the_device_plugin_runs_on_tainted_gpu_nodes_and_gets_all_gpus(name):
    spec = pod_of(name)["spec"]
    assert spec["nodeSelector"] == {contract.NODE_LABEL: contract.NODE_LABEL_VALUE, RESTRICTED: "extender"}
    assert spec["priorityClassName"] == "system-node-critical"
    # By the labels alone administrators choose its nodes, whatever taints these have.
    assert spec["tolerations"] == [{"operator": "Exists"}]
    mine = [{"key": "sku", "operator": "Equal", "value": "gpu", "effect": "NoSchedule"}]
    assert pod_of(name, gpushare_tolerations=mine)["spec"]["tolerations"] == mine
    assert "runtimeClassName" not in spec
    assert pod_of(name, gpushare_runtime_class="nvidia")["spec"]["runtimeClassName"] == "nvidia"
    (container,) = spec["containers"]
    environment = {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}
    assert environment == {
        "NODE_NAME": {"fieldRef": {"fieldPath": "spec.nodeName"}},
        "NVIDIA_VISIBLE_DEVICES": "all",
        "NVIDIA_DRIVER_CAPABILITIES": "utility",
    }


def rights(name, **variables):
    rules = one(rendered(name, **UPSTREAM, **variables), "ClusterRole")["rules"]
    return {f"{verb} {resource}" for rule in rules for resource in rule["resources"] for verb in rule["verbs"]}


def test_without_preemption_the_extender_evicts_nothing():
    """A real API server lists the other permissions in test_gpushare_on_api."""
    only = {"create pods/eviction", "get validatingadmissionpolicybindings"}
    assert rights("extender") - rights("extender", gpushare_preemption=False) == only


def test_upstream_images_get_upstream_commands_and_permissions():
    container = container_of("extender_upstream")
    assert container["image"] == "example.org/e:1"
    assert {"name": "PORT", "value": "12345"} in container["env"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/version"
    assert "list configmaps" in rights("extender_upstream")
    container = container_of("device_plugin_upstream", gpushare_memory_unit="MiB")
    assert container["image"] == "example.org/p:1"
    assert container["command"] == ["gpushare-device-plugin-v2", "-logtostderr", "--v=5", "--memory-unit=MiB"]


def test_another_image_of_the_same_name_recreates_the_pods(tmp_path):
    archive = tmp_path / "image.tar"
    computed = {"__gpushare_image_sha256": role_templates.variables_of("gpushare", "vars")["__gpushare_image_sha256"]}

    def annotations(name, **variables):
        return pod_of(name, **computed, **variables)["metadata"].get("annotations") or {}

    for name in OURS:
        built = annotations(name)
        assert len(built["kubegpu.share/image-archive-sha256"]) == 64
        assert annotations(name, image_build_base="docker.io/library/debian:13") != built
        archive.write_text("one")
        imported = annotations(name, gpushare_image_archive=str(archive))
        assert imported != built
        archive.write_text("another")
        assert annotations(name, gpushare_image_archive=str(archive)) not in ({}, imported)
        assert annotations(name, gpushare_image="registry.example.org/gpushare:1") == {}


def test_pull_secrets_are_in_the_pods():
    for name in ALL:
        spec = pod_of(name, gpushare_image_pull_secrets=["one", "two"])["spec"]
        assert spec["imagePullSecrets"] == [{"name": "one"}, {"name": "two"}]


def test_nodes_are_only_labelled():
    assert rendered("nodes", gpushare_nodes=["gpu1", "gpu2"]) == [
        {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {"gpushare": "true"}}}
        for name in ("gpu1", "gpu2")
    ]
    assert rendered("nodes", gpushare_nodes=[]) == []


@pytest.mark.parametrize("allocation", ["extender", "dra"])
def test_all_nodes_of_either_allocation_get_the_label_that_no_kubelet_may_set(allocation):
    """One DaemonSet selects also the nodes that a switch of a single one doesn't name."""
    given = {"gpushare_component_nodes": ["gpu1"], "__gpushare_allocation": allocation}
    local = {"gpu_backends": {"extender": ["gpu2"], "dra": ["gpu3"]}}

    def labels(**more):
        found = rendered("restricted_label", **given, **more)
        return {one["metadata"]["name"]: one["metadata"]["labels"] for one in found}

    assert labels() == {"gpu1": {RESTRICTED: allocation}}
    everybody = {"gpu1": {RESTRICTED: allocation}, "gpu2": {RESTRICTED: "extender"}, "gpu3": {RESTRICTED: "dra"}}
    assert labels(hostvars={"localhost": local}) == everybody
    # Only those that are named lose it.
    assert labels(hostvars={"localhost": local}, gpushare_state="absent") == {"gpu1": {RESTRICTED: allocation}}


def test_each_allocators_daemon_set_selects_its_two_labels():
    for name, allocator in (("device_plugin", "extender"), ("device_plugin_upstream", "extender"), ("dra", "dra")):
        spec = one(rendered(name), "DaemonSet")["spec"]["template"]["spec"]
        assert spec["nodeSelector"] == dict((ALLOCATORS[allocator].label, ALLOCATORS[allocator].restricted))


@pytest.mark.parametrize(
    ("dump", "enabled"),
    [
        ("[plugins.'io.containerd.cri.v1.runtime']\n  enable_cdi = true\n", "true"),
        ('[plugins."io.containerd.grpc.v1.cri"]\n    enable_cdi = false\n    cdi_spec_dirs = ["/etc/cdi"]\n', "false"),
        ('[plugins."io.containerd.grpc.v1.cri"]\n', "false"),
        ("", None),
        (None, None),
    ],
)
@pytest.mark.parametrize("version", ["2.2.9", "2.4.2"])
def test_nodes_are_annotated_with_the_cdi_state_of_their_runtime(dump, enabled, version):
    if version == "2.4.2" and dump and "enable_cdi" not in dump:
        # It has no such setting, and CDI is always on.
        enabled = "true"
    seen = {"gpu_node_name": "gpu1", "gpu_node": {"runtimes": {"containerd": {"dump": dump, "version": version}}}}
    docker = {"gpu_node": {"runtimes": {"containerd": None}}}
    hosts = {"one": seen, "without-facts": {}, "docker": docker, "without-node": seen | {"gpu_node_name": "x"}}
    found = rendered("node_runtimes", gpushare_nodes=["gpu1"], groups={"gpu_nodes": list(hosts)}, hostvars=hosts)
    annotations = {"kubegpu.share/runtime-cdi": enabled}
    wanted = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "gpu1", "annotations": annotations}}
    assert found == ([wanted] if enabled else [])


@pytest.mark.parametrize(
    ("version", "served"),
    [("v1.29.14", False), ("v1.30.0", True), ("v1.36.3+k3s1", True), ("v1.31.2-eks-7f9249a", True), ("", False)],
)
@pytest.mark.parametrize(
    ("admission", "state", "wanted"),
    [("deny", "present", True), ("warn", "present", True), ("none", "present", False), ("deny", "absent", False)],
)
def test_admission_policies_where_they_are_served_and_wanted(version, served, admission, state, wanted):
    given = {**DEFAULTS, "__gpushare_cluster": {"version": version}}
    given |= {"gpushare_admission": admission, "gpushare_state": state}
    found = [role_templates.value("gpushare", f"__gpushare_admission_{one}", **given) for one in ("served", "wanted")]
    assert found == [served, wanted]


@pytest.mark.parametrize(
    ("version", "needed"), [("v1.30.4", False), ("v1.31.9", False), ("v1.32.0", True), ("", False)]
)
def test_a_plugins_token_needs_its_node_where_every_token_has_one(version, needed):
    given = {**DEFAULTS, "__gpushare_cluster": {"version": version}}
    assert role_templates.value("gpushare", "__gpushare_node_in_tokens", **given) == needed
    policy = one(rendered("rights", **given), "ValidatingAdmissionPolicy", "device-plugin")
    tied = next(each["expression"] for each in policy["spec"]["validations"] if "variables.place" in each["expression"])
    assert ("variables.node == ''" in tied) != needed


@pytest.mark.parametrize(("upstream", "kept"), [({}, "gpushare:{}"), (UPSTREAM, "gpushare-{}")])
@pytest.mark.parametrize("component", ["extender", "device_plugin"])
def test_former_rights_are_those_of_the_other_variant(component, upstream, kept):
    """Earlier versions had upstream's names for other rights, which are revoked after the update."""
    name = kept.format(component.replace("_", "-"))
    (other,) = {"gpushare:{}", "gpushare-{}"} - {kept}
    found = rendered("former_rights", gpushare_component=component, **upstream)
    assert [each["kind"] for each in found] == ["ClusterRole", "ClusterRoleBinding"]
    assert {each["metadata"]["name"] for each in found} == {other.format(component.replace("_", "-"))}
    template = f"{component}_upstream" if upstream else component
    assert one(rendered(template, **upstream), "ClusterRole")["metadata"]["name"] == name
