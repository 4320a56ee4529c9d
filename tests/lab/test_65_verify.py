# SPDX-License-Identifier: GPL-3.0-or-later
"""``verify.yml`` reports each contradiction by name, and nothing on a healthy cluster."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from _greedy import images
from _lab import INVENTORY, REPORT, ROOT, JsonObject, Lab, until, without_machines
from _pods import body, container, create, delete_pods, plugin, pods, restart_plugin
from _upstream import upstream

from lab import engine as engines

PLAYBOOK = "playbooks/verify.yml"
NAMESPACE = "lab-verify"
# Seconds between two samples: transient states end by then.
GRACE = ("-e", "verify_grace=3")


@pytest.fixture(scope="module")
def namespace(lab: Lab) -> Iterator[str]:
    with lab.api.namespace(NAMESPACE) as name:
        yield name


class Verdict:
    """The result of verify.yml, from its JSON report."""

    def __init__(self, rc: int, out: str, report: JsonObject) -> None:
        self.rc, self.out, self.report = rc, out, report

    def findings(self, check: str = "", level: str = "") -> list[JsonObject]:
        found: list[JsonObject] = self.report["findings"]
        return [one for one in found if check in ("", one["check"]) and level in ("", one["level"])]

    def fails(self) -> set[str]:
        return {finding["check"] for finding in self.findings(level="FAIL")}

    def compared(self, check: str) -> int:
        return int(next(one["n"] for one in self.report["checks"] if one["id"] == check))

    def one(self, check: str, **fields: object) -> JsonObject:
        """Return the only finding of a check with these fields."""
        found = [
            finding for finding in self.findings(check) if all(finding[key] == value for key, value in fields.items())
        ]
        assert len(found) == 1, f"{check} {fields}: {json.dumps(self.report['findings'], indent=1)}"
        return found[0]


@pytest.fixture
def verify(lab: Lab, tmp_path: Path) -> Run:
    return Run(lab, tmp_path)


class Run:
    def __init__(self, lab: Lab, folder: Path) -> None:
        self._lab, self.folder = lab, folder

    def __call__(self, *arguments: str, inventory: str = INVENTORY) -> Verdict:
        path = self.folder / "report.json"
        path.unlink(missing_ok=True)
        done = self._lab.playbook(PLAYBOOK, *GRACE, "-e", f"verify_json={path}", *arguments, inventory=inventory)
        assert path.exists(), done.out[-6000:]
        verdict = Verdict(done.rc, done.out, json.loads(path.read_text()))
        # The exit status is the verdict's.
        assert (done.rc == 0) == (verdict.report["result"] != "FAIL"), done.out[-6000:]
        for finding in verdict.findings(level="FAIL"):
            assert finding["what"] in " ".join(done.out.split()), f"{finding['what']} isn't in what was printed"
        return verdict


def process_of(lab: Lab, namespace: str, pod: str) -> int:
    """Return the process ID, on its node, of a container's first process."""
    found = lab.api.pod(namespace, pod)
    container_id = found["status"]["containerStatuses"][0]["containerID"].rpartition("/")[2]
    paths = lab.ssh(found["spec"]["nodeName"], f"grep -ls {container_id} /proc/[0-9]*/cgroup; true").split()
    # Processes end meanwhile, which grep takes for an error.
    # The shim has a control group of its own; of the container's own processes the oldest.
    return min(int(path.split("/")[2]) for path in paths)


@contextlib.contextmanager
def holding(lab: Lab, node: str, card: int, pid: int, mib: int) -> Iterator[None]:
    """A process that holds memory of a simulated card, as the driver reports it."""
    path = ROOT / lab.nodes[node]["hardware"] / "cards"
    before = path.read_text()
    # In place: containers hold on to the file.
    path.write_text(f"{before}process {card} {pid} {mib} compute\n")
    try:
        yield
    finally:
        path.write_text(before)


def card_of(lab: Lab, namespace: str, pod: str) -> int:
    return int(lab.api.pod(namespace, pod)["metadata"]["annotations"]["ALIYUN_COM_GPU_MEM_IDX"])


# --------------------------------------------------------------------------- a healthy cluster


def test_healthy_cluster_and_report_files(lab: Lab, namespace: str, verify: Run) -> None:
    bodies = [body(f"fine-{number}", container(lab, 2), node=node) for number, node in enumerate(lab.gpu_nodes)]
    bodies.append(body("two", container(lab, 1), container(lab, 2, name="c1"), node=lab.gpu_nodes[0]))
    files = {name: verify.folder / f"report.{name}" for name in ("html", "junit", "prometheus")}
    arguments = [word for name, path in files.items() for word in ("-e", f"verify_{name}={path}")]
    with pods(lab, namespace, *bodies):
        place = card_of(lab, namespace, "fine-0")
        with holding(lab, lab.gpu_nodes[0], place, process_of(lab, namespace, "fine-0"), 700):
            found = verify(*arguments)
    assert found.fails() == set(), found.out[-6000:]
    for check, least in {"C2": 1, "C3": 1, "C4": 3, "G3": 3, "G4": 3, "G6": 4, "G7": 3, "G8": 3, "G10": 3}.items():
        assert found.compared(check) >= least, (check, found.report["checks"])
    assert found.report["samples"] == 1 or found.findings(), "a healthy cluster isn't sampled twice"
    card = next(node for node in found.report["nodes"] if node["name"] == lab.gpu_nodes[0])["cards"][place]
    used = {pod["pod"]: pod["used_mib"] for pod in card["pods"]}
    assert used[f"{NAMESPACE}/fine-0"] == 700, card
    page = files["html"].read_text()
    assert f"{NAMESPACE}/fine-0" in page
    # It loads nothing; the policy lets the filter's script run and no other.
    assert not re.search(r"<link|<img|src=|url\(|href=[\"']?http", page)
    assert page.count("<script") == 1 and "script-src 'sha256-" in page
    suites = ElementTree.parse(files["junit"]).getroot()
    assert list(suites.iter("testcase")) and not list(suites.iter("failure"))
    assert "kubegpu_card_memory_claimed" in files["prometheus"].read_text()


def check_by_pods(lab: Lab, found: Verdict) -> None:
    """What the device plugins' pods tell is compared, and what they can't know isn't claimed."""
    assert found.fails() == set(), found.out[-6000:]
    plugins = {f"pod gpushare-system/{plugin(lab, node)['metadata']['name']}" for node in lab.gpu_nodes}
    assert {node["source"] for node in found.report["nodes"]} == plugins
    for check, least in {"C4": 1, "C5": 1, "C9": len(lab.gpu_nodes), "G1": 1, "G7": 1, "G8": 1}.items():
        assert found.compared(check) >= least, (check, found.report["checks"])
        assert not found.findings(check), found.findings(check)
    assert {one["cause"] for one in found.findings("C2")} == {"no_data_gpu"}, "no pod has its node's process IDs"


def test_nodes_pods_answer_where_nobody_logs_in(lab: Lab, namespace: str, verify: Run) -> None:
    with pods(lab, namespace, body("seen", container(lab, 2), node=lab.gpu_nodes[0])):
        check_by_pods(lab, verify(inventory=without_machines(lab, verify.folder)))


@pytest.mark.long
def test_read_only_account(lab: Lab, namespace: str, verify: Run) -> None:
    kubeconfig = verify.folder / "readonly.kubeconfig"
    try:
        given = ("-e", f"readonly_access_kubeconfig={kubeconfig}", "-e", "readonly_access_ask_pods=true")
        done = lab.playbook("playbooks/readonly_access.yml", *given)
        assert done.rc == 0, done.out[-4000:]
        with pods(lab, namespace, body("read", container(lab, 2), node=lab.gpu_nodes[0])):
            found = verify("-e", f"gpu_kubeconfig={kubeconfig}")
            check_by_pods(lab, verify(inventory=without_machines(lab, verify.folder, kubeconfig)))
        assert found.fails() == set() and found.compared("G3") >= 1, found.out[-6000:]
        refused = [finding for finding in found.report["findings"] if "lacks a permission" in json.dumps(finding)]
        assert refused == [], refused
    finally:
        done = lab.playbook("playbooks/readonly_access.yml", "-e", "readonly_access_state=absent")
        assert done.rc == 0, done.out[-4000:]


# --------------------------------------------------------------------------- with our servers


def test_pod_that_bypassed_the_scheduler(lab: Lab, namespace: str, verify: Run) -> None:
    lab.api.create_pod(namespace, "around", [2], lab.image(), lab.gpu_nodes[0], bound=True)
    try:
        lab.api.wait_running(namespace, ["around"])
        found = verify()
        named = [finding for finding in found.findings() if finding["pod"] == f"{NAMESPACE}/around"]
        assert [(one["check"], one["cause"]) for one in named] == [("G12", "bypassed_scheduler")], named
    finally:
        delete_pods(lab, namespace, ["around"])


@pytest.mark.long
def test_process_outside_any_pod(lab: Lab, verify: Run) -> None:
    node = lab.gpu_nodes[0]
    pid = int(lab.ssh(node, "nohup sleep 600 >/dev/null 2>&1 & echo $!"))
    try:
        with holding(lab, node, 1, pid, 512):
            found = verify()
    finally:
        lab.ssh(node, f"kill {pid}")
    one = found.one("C2", level="FAIL", node=node)
    assert one["card"] == 1 and str(pid) in json.dumps(one) and "512" in json.dumps(one), one
    assert found.fails() == {"C2"}


@pytest.mark.long
def test_process_above_its_share(lab: Lab, namespace: str, verify: Run) -> None:
    node = lab.gpu_nodes[0]
    with pods(lab, namespace, body("greedy", container(lab, 1), node=node)):
        pid = process_of(lab, namespace, "greedy")
        with holding(lab, node, card_of(lab, namespace, "greedy"), pid, 3000):
            found = verify()
    one = found.one("G9", pod=f"{NAMESPACE}/greedy")
    assert one["level"] == "WARN" and "3000" in json.dumps(one) and "1024" in json.dumps(one), one
    assert found.fails() == set()


@pytest.mark.long
def test_pod_that_got_a_card_through_its_image(lab: Lab, namespace: str, verify: Run) -> None:
    """The pod requests nothing, and the API shows nothing; only the card does."""
    node = lab.gpu_nodes[0]
    with images(lab, node, {"all": "NVIDIA_VISIBLE_DEVICES=all"}) as names:
        create(lab, namespace, body("thief", container(lab, image=names["all"]), node=node))
        try:
            lab.api.wait_running(namespace, ["thief"])
            with holding(lab, node, 0, process_of(lab, namespace, "thief"), 256):
                found = verify()
            assert found.one("C2", level="FAIL", pod=f"{NAMESPACE}/thief")["node"] == node
        finally:
            delete_pods(lab, namespace, ["thief"])


@pytest.mark.long
def test_plugin_killed_and_restarted(lab: Lab, namespace: str, verify: Run) -> None:
    node = lab.gpu_nodes[0]
    with pods(lab, namespace, body("stays", container(lab, 2), node=node)):
        restart_plugin(lab, node)
        assert verify().fails() == set()


@pytest.mark.long
def test_extender_with_a_stale_cache(lab: Lab, namespace: str, verify: Run) -> None:
    """STAND-IN: an answer of an hour ago, served in the extender's place, since ours can't be made stale."""
    node = lab.gpu_nodes[0]
    first = lab.control_planes[0]
    old = lab.ssh(first, "curl -s http://127.0.0.1:12345/gpushare-scheduler/inspect")
    with pods(lab, namespace, body("unheard", container(lab, 2), node=node)):
        server = (
            "import http.server as h\n"
            "class S(h.BaseHTTPRequestHandler):\n"
            " def do_GET(s):\n"
            "  s.send_response(200); s.end_headers(); s.wfile.write(open('/tmp/lab-stale','rb').read())\n"
            "h.HTTPServer(('127.0.0.1', 12399), S).serve_forever()\n"
        )
        pids = {}
        try:
            for name in lab.control_planes:
                lab.ssh(
                    name, f"cat > /tmp/lab-stale <<'END'\n{old}\nEND\ncat > /tmp/lab-stale.py <<'END'\n{server}\nEND"
                )
                pids[name] = lab.ssh(name, "nohup python3 /tmp/lab-stale.py >/dev/null 2>&1 & echo $!").strip()
            found = verify("-e", "verify_extender_url=http://127.0.0.1:12399/gpushare-scheduler/inspect")
        finally:
            for name, pid in pids.items():
                lab.ssh(name, f"kill {pid}; rm -f /tmp/lab-stale /tmp/lab-stale.py")
    named = found.findings("G10", "FAIL")
    assert named and all(one["node"] == node for one in named), found.report["findings"]
    assert any(f"{NAMESPACE}/unheard" in json.dumps(one) for one in named), named
    assert found.fails() == {"G10"}


@pytest.mark.long
def test_stopped_kubelet(lab: Lab, verify: Run) -> None:
    node = lab.gpu_nodes[-1]
    lab.ssh(node, "systemctl stop kubelet")
    try:
        until(lambda: "Ready" not in ready(lab, node), f"{node} isn't ready", 120)
        found = verify()
        assert any(finding["node"] == node for finding in found.findings(level="FAIL")), found.report["findings"]
    finally:
        lab.ssh(node, "systemctl start kubelet")
        returned(lab, node)


@pytest.mark.long
def test_stopped_machine(lab: Lab, verify: Run) -> None:
    node, engine = lab.gpu_nodes[-1], engines.find()
    assert engine is not None
    engine.docker("kill", lab.nodes[node]["container"])
    try:
        until(lambda: "Ready" not in ready(lab, node), f"{node} isn't ready", 120)
        found = verify()
        of_node = [finding for finding in found.report["findings"] if finding["node"] == node]
        assert "FAIL" in {one["level"] for one in of_node}, of_node
        assert "unreachable" in {one["cause"] for one in of_node if one["level"] == "UNKNOWN"}, of_node
        # Nobody else is blamed; S1, of the servers as a whole, names it in words.
        fails = found.findings(level="FAIL")
        assert all(node in f"{one['node']} {one['what']}" for one in fails), fails
    finally:
        lab.manage("up")
        returned(lab, node)


def returned(lab: Lab, node: str) -> None:
    lab.wait_ready()
    until(lambda: lab.allocatable(node) > 0, f"{node} has its units back", 90)


def ready(lab: Lab, node: str) -> list[str]:
    return [
        condition["type"] for condition in lab.api.node(node)["status"]["conditions"] if condition["status"] == "True"
    ]


# --------------------------------------------------------------------------- with a stand-in for upstream's plugin


@pytest.mark.long
def test_upstream_plugin(lab: Lab, namespace: str, verify: Run) -> None:
    """STAND-IN for upstream's plugin: healthy, with an edited annotation, with a pod that bypassed the scheduler."""
    node = lab.gpu_nodes[-1]
    with upstream(lab, node):
        create(lab, namespace, body("old", container(lab, 2), node=node))
        try:
            lab.api.wait_running(namespace, ["old"])
            ours = {"S1"}  # our plugin isn't there, which is a finding
            assert verify().fails() - ours == set()
            path = f"/api/v1/namespaces/{namespace}/pods/old"
            index = lab.api.pod(namespace, "old")["metadata"]["annotations"]["ALIYUN_COM_GPU_MEM_IDX"]
            other = {"metadata": {"annotations": {"ALIYUN_COM_GPU_MEM_IDX": str(1 - int(index))}}}
            lab.api.call("PATCH", path, other, "application/merge-patch+json")
            lab.api.create_pod(namespace, "around", [3], lab.image(), node, bound=True)
            found = verify()
            assert found.one("G7", pod=f"{NAMESPACE}/old")["level"] == "FAIL"
            assert found.one("G3", pod=f"{NAMESPACE}/around")["level"] == "FAIL"
        finally:
            delete_pods(lab, namespace, ["old", "around"])


# --------------------------------------------------------------------------- the canary


@pytest.mark.long
def test_canary(lab: Lab, verify: Run) -> None:
    before = set(lab.api.namespaces())
    found = verify("-e", "verify_canary=true")
    assert found.fails() == set(), found.out[-6000:]
    steps = [check for check in found.report["checks"] if check["id"].startswith("Y")]
    assert steps and all(step["result"] in ("PASS", "UNKNOWN") for step in steps), steps
    assert any(step["result"] == "PASS" for step in steps), steps
    assert set(lab.api.namespaces()) == before


# --------------------------------------------------------------------------- and no false alarm


class Churn:
    """Create and delete pods continuously."""

    def __init__(self, lab: Lab, namespace: str, pause: float) -> None:
        self._lab, self._namespace, self._pause = lab, namespace, pause
        self._api, self._stop = lab.api_of(lab.control_planes[0], 60), threading.Event()
        self.made, self.failed = 0, ""

    def _go(self) -> None:
        path = f"/api/v1/namespaces/{self._namespace}/pods"
        try:
            while not self._stop.wait(self._pause):
                node = self._lab.gpu_nodes[self.made % len(self._lab.gpu_nodes)]
                one = body(f"churn-{self.made}", container(self._lab, 1 + self.made % 4), node=node)
                self._api.call("POST", path, one)
                self.made += 1
                if self.made > 6:
                    self._lab.api.delete(f"{path}/churn-{self.made - 7}")
        except Exception as error:
            self.failed = repr(error)

    def __enter__(self) -> Churn:
        self._thread = threading.Thread(target=self._go, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stop.set()
        self._thread.join(30)


def runs_under_churn(lab: Lab, verify: Run, count: int) -> None:
    began, transient = time.monotonic(), 0
    with lab.api.namespace("lab-churn") as name, Churn(lab, name, 1.5) as churn:
        for number in range(count):
            found = verify("-e", "verify_grace=15")
            assert found.fails() == set(), f"run {number}: {json.dumps(found.findings(level='FAIL'), indent=1)}"
            transient += found.report["transient"]
            assert churn.failed == ""
        made = churn.made
    seconds = time.monotonic() - began
    REPORT.append(f"verify under churn: {count} runs in {seconds:.0f} s, {made} pods, {transient} passing findings")
    assert made >= count


@pytest.mark.long
def test_fifty_runs_in_a_row_under_churn(lab: Lab, verify: Run) -> None:
    runs_under_churn(lab, verify, 50)


def test_tests_leave_nothing_behind(lab: Lab) -> None:
    assert not [namespace for namespace in lab.api.namespaces() if "canary" in namespace]
    for node in lab.gpu_nodes:
        assert plugin(lab, node)
