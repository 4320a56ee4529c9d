# SPDX-License-Identifier: GPL-3.0-or-later
"""What two runs must have in common: files, packages and images of each node, and objects of the cluster."""

from __future__ import annotations

import json

from _lab import LOGS, JsonObject, Lab

# What test_10 saw before anything was changed, and the diff that it was shown.
BASELINE = LOGS / "untouched.json"

# What differs between two clusters that were set up alike: keys, certificates, tokens, caches, packages' own state.
FOLDERS = "/etc /usr/local /opt /var/lib/kubelet/device-plugins /var/lib/kubelet/plugins /var/spool/cron"
PRUNED = (
    "/etc/kubernetes/pki",
    "/etc/ssh",
    "/etc/ssl",
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/etc/machine-id",
    "/etc/hostname",
    "/etc/hosts",
    "/etc/resolv.conf",
    "/etc/mtab",
    "/usr/local/bin",
)

KINDS = (
    "/apis/apps/v1/daemonsets",
    "/apis/apps/v1/deployments",
    "/api/v1/configmaps",
    "/api/v1/serviceaccounts",
    "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "/apis/rbac.authorization.k8s.io/v1/roles",
    "/apis/rbac.authorization.k8s.io/v1/rolebindings",
    "/apis/node.k8s.io/v1/runtimeclasses",
)


def node_files(lab: Lab, node: str) -> dict[str, str]:
    """Map the paths of configuration folders to mode and digest."""
    prune = " -o ".join(f"-path {path}" for path in PRUNED)
    script = (
        f"find {FOLDERS} \\( {prune} \\) -prune -o -type f -printf '%m %p\\n' -o -type l -printf 'link %p\\n'"
        " 2>/dev/null | sort -k2; true"
    )
    modes = dict(reversed(line.split(" ", 1)) for line in lab.ssh(node, script).splitlines())
    listed = "\n".join(path for path, mode in modes.items() if mode != "link")
    sums = lab.ssh(node, f"xargs -d '\\n' sha256sum <<'EOF'\n{listed}\nEOF\ntrue")
    digests = {path: digest for digest, path in (line.split("  ", 1) for line in sums.splitlines())}
    return {path: f"{mode} {digests.get(path, '')}" for path, mode in modes.items()}


def _compared(path: str) -> bool:
    own = path.startswith("/etc/kubernetes/") and path.endswith(".conf")
    # kubeadm lists etcd's members in the order of their identifiers, which differ between clusters.
    return not (own or path.endswith(("kubelet_internal_checkpoint", ".sock", "/manifests/etcd.yaml")))


def node_state(lab: Lab, node: str) -> JsonObject:
    """Return everything on a node that site.yml changes."""
    return {
        "files": {path: text for path, text in node_files(lab, node).items() if _compared(path)},
        "packages": lab.ssh(node, "dpkg-query -W -f '${Package} ${Version} ${db:Status-Status}\\n'").splitlines(),
        "held": lab.ssh(node, "apt-mark showhold").split(),
        "images": sorted(lab.ssh(node, "ctr -n k8s.io images ls -q | grep -v sha256: ; true").split()),
        "default runtime": lab.ssh(node, "containerd config dump | grep -E 'default_runtime_name'").split(),
        "half-written": lab.ssh(node, "find / -xdev -name '.kubegpu-*' 2>/dev/null; true").split(),
        "unfinished": lab.ssh(node, "dpkg --audit").splitlines(),
    }


def cluster_objects(lab: Lab) -> dict[str, str]:
    """Return the desired state of the cluster's objects, without fields that the API server sets."""
    found = {}
    for path in KINDS:
        for one in lab.api.items(path):
            metadata = one["metadata"]
            key = f"{path.rpartition('/')[2]} {metadata.get('namespace', '')}/{metadata['name']}"
            desired = {name: value for name, value in one.items() if name not in ("metadata", "status", "secrets")}
            desired["labels"] = metadata.get("labels", {})
            found[key] = json.dumps(desired, sort_keys=True)
    for node in lab.api.items("/api/v1/nodes"):
        labels = json.dumps(node["metadata"].get("labels", {}), sort_keys=True)
        # Kubernetes' own taints follow the node's conditions; a machine that has just become Ready still has one.
        taints = [
            taint for taint in node["spec"].get("taints", []) if not taint["key"].startswith("node.kubernetes.io/")
        ]
        found[f"nodes /{node['metadata']['name']}"] = labels + json.dumps(taints)
    # Certificates and the addresses in them are each cluster's own.
    for key in list(found):
        if key.startswith("configmaps") and (
            "kube-root-ca.crt" in key or "cluster-info" in key or "authentication" in key
        ):
            del found[key]
    return found


def everything(lab: Lab) -> JsonObject:
    """Return the end state of site.yml."""
    return {
        "nodes": {name: node_state(lab, name) for name in lab.nodes},
        "objects": cluster_objects(lab),
        "resources": {
            name: {key: value for key, value in lab.api.node(name)["status"]["allocatable"].items() if "aliyun" in key}
            for name in lab.gpu_nodes
        },
        "cards": {name: lab.cards(name) for name in lab.gpu_nodes},
    }
