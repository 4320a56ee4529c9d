# SPDX-License-Identifier: GPL-3.0-or-later
"""Form the Kubernetes cluster with kubeadm."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from lab import build, network
from lab.components import Archives
from lab.engine import Engine, bounding_set, may_raise_limits
from lab.nodes import Node, copy_in
from lab.paths import LAB
from lab.shell import LabError, each, step, wait_for
from lab.state import private_file

KUBECONFIG = LAB / "kubeconfig"
_INIT, _JOIN = "/etc/kubernetes/kubeadm-init.yaml", "/etc/kubernetes/kubeadm-join.yaml"
_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).resolve().parent / "templates"),
    undefined=StrictUndefined,
    keep_trailing_newline=True,
    autoescape=False,
)


def render(template: str, **values: object) -> str:
    return _TEMPLATES.get_template(template).render(**values)


def node_files(name: str, cidrs: dict[str, str], table: dict[str, str], pause: str) -> tuple[tuple[str, int, str], ...]:
    """Return the files that a node needs before kubeadm: runtime configuration, pod network, routes to other nodes."""
    ways = "".join(f"{cidr} {address}\n" for cidr, address in network.routes(name, cidrs, table))
    containerd = render(
        "containerd.toml.j2", pause_image=pause, restrict_oom_score_adj=not may_raise_limits(bounding_set())
    )
    return (
        ("etc/containerd/config.toml", 0o644, containerd),
        ("etc/cni/net.d/10-lab.conflist", 0o644, network.conflist(cidrs[name])),
        ("etc/kubegpu-lab/routes", 0o644, ways),
    )


def load_images(engine: Engine, nodes: list[Node], control_planes: set[str], archives: Archives) -> None:
    """Import the component images into each node's containerd."""

    def one(node: Node) -> None:
        wanted = [archives.every_node, *([archives.control_plane] if node.name in control_planes else [])]
        for path in wanted:
            with path.open("rb") as file:
                engine.docker(
                    "exec", "-i", node.container, "ctr", "--namespace=k8s.io", "images", "import", "-", source=file
                )

    with step("importing the component images"):
        each(one, nodes)


def form(engine: Engine, nodes: list[Node], control_planes: list[str], kubernetes_version: str) -> None:
    """Run kubeadm init on the first node and join on the others; return when all are Ready."""
    first, *others = nodes
    token = f"{secrets.token_hex(3)}.{secrets.token_hex(8)}"
    certificate_key = secrets.token_hex(32)
    common = {"token": token, "certificate_key": certificate_key, "endpoint": first.address}
    init = render(
        "kubeadm-init.yaml.j2",
        **common,
        node=first.name,
        address=first.address,
        kubernetes_version=kubernetes_version,
        etcd_version=build.SETS["etcd"].version,
        pod_network=network.POD_NETWORK,
        service_network=network.SERVICE_NETWORK,
    )
    with step(f"kubeadm init on {first.name}"):
        copy_in(engine, first.container, ((_INIT.lstrip("/"), 0o600, init),))
        upload = ("--upload-certs",) if len(control_planes) > 1 else ()
        _kubeadm(
            engine, first, "init", f"--config={_INIT}", "--ignore-preflight-errors=all", "--skip-phases=addon", *upload
        )
        _kubeadm(engine, first, "init", "phase", "addon", "kube-proxy", f"--config={_INIT}")
        _node(engine, first, "rm", _INIT)
        private_file(KUBECONFIG, _node(engine, first, "cat", "/etc/kubernetes/admin.conf"))
        ca_hash = _node(
            engine,
            first,
            "sh",
            "-c",
            "openssl x509 -pubkey -noout -in /etc/kubernetes/pki/ca.crt | openssl pkey -pubin -outform der | sha256sum",
        ).split()[0]

    def join(node: Node) -> None:
        text = render(
            "kubeadm-join.yaml.j2",
            **common,
            ca_hash=ca_hash,
            node=node.name,
            address=node.address,
            control_plane=node.name in control_planes,
        )
        copy_in(engine, node.container, ((_JOIN.lstrip("/"), 0o600, text),))
        _kubeadm(engine, node, "join", f"--config={_JOIN}", "--ignore-preflight-errors=all")
        _node(engine, node, "rm", _JOIN)

    def in_turn(queue: list[Node]) -> None:
        for node in queue:
            with step(f"kubeadm join of {node.name}"):
                join(node)

    # etcd accepts one new member at a time; GPU nodes aren't members and join in parallel.
    members = [node for node in others if node.name in control_planes]
    each(in_turn, [members, *([node] for node in others if node.name not in control_planes)])


def _node(engine: Engine, node: Node, *command: str) -> str:
    return engine.docker("exec", node.container, *command).stdout


def _kubeadm(engine: Engine, node: Node, *arguments: str) -> None:
    done = engine.docker("exec", node.container, "kubeadm", *arguments, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip() and "WARNING" not in line][-8:]
        raise LabError(f"kubeadm {arguments[0]} failed on {node.name}: " + "\n    ".join(said))


class Api:
    """Query the cluster with kubectl inside the first control plane, since the machine may have no kubectl."""

    def __init__(self, engine: Engine, container: str) -> None:
        self._engine, self._container = engine, container

    def _get(self, *arguments: str) -> str | None:
        done = self._engine.docker(
            "exec",
            self._container,
            "kubectl",
            "--kubeconfig=/etc/kubernetes/admin.conf",
            "--request-timeout=5s",
            *arguments,
            check=False,
        )
        return done.stdout if done.returncode == 0 else None

    def ready_nodes(self) -> set[str]:
        """Return the names of Ready nodes; empty when the API doesn't answer."""
        text = self._get("get", "nodes", "-o", "json")
        return _ready(text) if text else set()

    def ready_system_pods(self, label: str) -> int:
        """Count the Ready pods of kube-system with this label."""
        text = self._get("get", "pods", "-n", "kube-system", "-l", label, "-o", "json")
        return len(_ready(text)) if text else 0


def _ready(text: str) -> set[str]:
    return {
        item["metadata"]["name"]
        for item in json.loads(text)["items"]
        if any(each["type"] == "Ready" and each["status"] == "True" for each in item["status"].get("conditions", []))
    }


def wait_until_ready(engine: Engine, first: str, names: list[str], control_planes: int, seconds: float = 240) -> None:
    """Wait until every node and every pod of the control plane and of kube-proxy is Ready."""
    api = Api(engine, first)

    def pods() -> bool:
        # Four static pods on each control plane, a proxy on each node.
        return api.ready_system_pods("tier=control-plane") >= 4 * control_planes and api.ready_system_pods(
            "k8s-app=kube-proxy"
        ) >= len(names)

    with step("waiting until the nodes and kube-system are Ready"):
        wait_for("Ready on all nodes", lambda: set(names) <= api.ready_nodes(), seconds)
        wait_for("Ready on the control plane's pods and the proxies", pods, seconds)
