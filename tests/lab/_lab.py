# SPDX-License-Identifier: GPL-3.0-or-later
"""Access to the running lab without code of the collection: playbooks, the API, shells on the nodes."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import re
import shlex
import signal
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import typing as t
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import urllib3
import yaml

from lab.shell import in_background

ROOT = Path(__file__).resolve().parents[2]
LAB = ROOT / ".lab"
LOGS = ROOT / "tests" / "output" / "lab"
INVENTORY = "inventories/lab"
RESOURCE = "aliyun.com/gpu-mem"
CHECKPOINT = "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint"

JsonObject = dict[str, t.Any]


class Timeout(AssertionError):
    """A condition didn't become true in time."""


def until(true: Callable[[], t.Any], words: str, seconds: float = 60, pause: float = 0.5) -> t.Any:
    """Poll a condition and return its value once it is true.

    :raises Timeout: with the last error, if there was one.
    """
    end = time.monotonic() + seconds
    while True:
        last: object = None
        try:
            found = true()
            if found:
                return found
        except (AssertionError, OSError, KeyError, urllib3.exceptions.HTTPError, ApiError) as error:
            last = error
        if time.monotonic() > end:
            raise Timeout(f"{words}: not within {seconds:g} s ({last})")
        time.sleep(pause)


# --------------------------------------------------------------------------- the API


class ApiError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class Api:
    """The Kubernetes API with the administrator's certificate, as plain JSON.

    :param server: another API server of the cluster than the kubeconfig's.
    :param patience: seconds that an answer may take.
    """

    def __init__(self, kubeconfig: Path, server: str = "", patience: float = 30) -> None:
        config = yaml.safe_load(kubeconfig.read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        self.server = server or cluster["server"]
        self.secrets = [user["client-key-data"]]
        context = ssl.create_default_context(cadata=base64.b64decode(cluster["certificate-authority-data"]).decode())
        with tempfile.TemporaryDirectory() as folder:
            pair = Path(folder) / "pair.pem"
            pair.touch(mode=0o600)
            pair.write_bytes(
                base64.b64decode(user["client-certificate-data"]) + base64.b64decode(user["client-key-data"])
            )
            context.load_cert_chain(pair)
        timeout = urllib3.Timeout(min(patience, 5), patience)
        self._pool = urllib3.PoolManager(ssl_context=context, retries=False, timeout=timeout)
        # What the API server warned of in its last answer.
        self.warnings: list[str] = []

    def call(
        self, method: str, path: str, body: JsonObject | None = None, kind: str = "application/json", user: str = ""
    ) -> JsonObject:
        """Send a request and return the answer.

        :param body: sent as JSON. :param kind: its content type. :param user: who is impersonated.
        :raises ApiError: the API server refuses.
        """
        answer = self._pool.request(
            method,
            self.server + path,
            body=json.dumps(body) if body is not None else None,
            headers={"Content-Type": kind, **({"Impersonate-User": user} if user else {})},
        )
        self.warnings = answer.headers.getlist("Warning")
        found: JsonObject = json.loads(answer.data) if answer.data else {}
        if answer.status >= 400:
            raise ApiError(answer.status, str(found.get("message", "")))
        return found

    def text(self, path: str) -> str:
        """Return an answer that isn't JSON, such as a log."""
        answer = self._pool.request("GET", self.server + path)
        if answer.status >= 400:
            raise ApiError(answer.status, answer.data.decode(errors="replace"))
        return answer.data.decode(errors="replace")

    def watch(self, path: str, stop: threading.Event) -> Iterator[tuple[str, JsonObject]]:
        """Yield every change of a collection, existing objects first; end soon after ``stop`` is set."""
        version = ""
        found = self.call("GET", path)
        for item in found["items"]:
            yield "ADDED", item
        version = found["metadata"]["resourceVersion"]
        while not stop.is_set():
            # So often is it looked whether to stop, where nothing happens.
            wanted = f"{self.server}{path}?watch=1&resourceVersion={version}&timeoutSeconds=2"
            answer = self._pool.request("GET", wanted, preload_content=False)
            left = b""
            for chunk in answer.stream(65536):
                *lines, left = (left + chunk).split(b"\n")
                for line in lines:
                    event = json.loads(line)
                    assert event["type"] in ("ADDED", "MODIFIED", "DELETED"), event
                    version = event["object"]["metadata"]["resourceVersion"]
                    yield event["type"], event["object"]
            answer.release_conn()

    def items(self, path: str) -> list[JsonObject]:
        return list(self.call("GET", path)["items"])

    def node(self, name: str) -> JsonObject:
        return self.call("GET", f"/api/v1/nodes/{name}")

    def pods(self, namespace: str) -> list[JsonObject]:
        return self.items(f"/api/v1/namespaces/{namespace}/pods")

    def pod(self, namespace: str, name: str) -> JsonObject:
        return self.call("GET", f"/api/v1/namespaces/{namespace}/pods/{name}")

    def delete(self, path: str) -> None:
        with contextlib.suppress(ApiError):
            self.call("DELETE", path)

    @contextlib.contextmanager
    def namespace(self, name: str) -> Iterator[str]:
        """Create a namespace and delete it afterwards."""
        self.call("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        try:
            until(lambda: self.items(f"/api/v1/namespaces/{name}/serviceaccounts"), f"service account in {name}")
            yield name
        finally:
            self.delete(f"/api/v1/namespaces/{name}")
            until(lambda: name not in self.namespaces(), f"namespace {name} gone", 90)

    def namespaces(self) -> list[str]:
        return [one["metadata"]["name"] for one in self.items("/api/v1/namespaces")]

    def create_pod(
        self,
        namespace: str,
        name: str,
        units: list[int],
        image: str,
        node: str = "",
        bound: bool = False,
        scheduler: str = "",
    ) -> None:
        """Create a pod that sleeps.

        :param node: where it must run; through the scheduler, unless ``bound`` sets nodeName and so bypasses it.
        :param scheduler: the scheduler's name, if not the cluster's default.
        """
        containers = [
            {
                "name": f"c{number}",
                "image": image,
                "imagePullPolicy": "IfNotPresent",
                "command": ["sleep", "3600"],
                "resources": {"limits": {RESOURCE: str(count)}},
            }
            for number, count in enumerate(units)
        ]
        spec: JsonObject = {
            "containers": containers,
            "terminationGracePeriodSeconds": 0,
            "tolerations": [{"operator": "Exists"}],
            "automountServiceAccountToken": False,
        }
        if node and bound:
            spec["nodeName"] = node
        elif node:
            spec["nodeSelector"] = {"kubernetes.io/hostname": node}
        if scheduler:
            spec["schedulerName"] = scheduler
        body = {"metadata": {"name": name, "namespace": namespace}, "spec": spec}
        self.call("POST", f"/api/v1/namespaces/{namespace}/pods", body)

    def wait_running(self, namespace: str, names: Sequence[str], seconds: float = 60) -> list[JsonObject]:
        def running() -> list[JsonObject]:
            pods = {pod["metadata"]["name"]: pod for pod in self.pods(namespace)}
            for name in names:
                phase = pods[name]["status"].get("phase")
                assert phase == "Running", f"pod {name} is {phase}: {pods[name]['status']}"
            return [pods[name] for name in names]

        return t.cast("list[JsonObject]", until(running, f"pods {', '.join(names)} Running", seconds))


# --------------------------------------------------------------------------- commands


@dataclasses.dataclass(frozen=True)
class Done:
    rc: int
    out: str

    @property
    def recap(self) -> dict[str, dict[str, int]]:
        """Return the PLAY RECAP by host."""
        found = {}
        for line in self.out.splitlines():
            match = re.match(r"(\S+)\s+:\s+(ok=\d+.*)$", line)
            if match:
                found[match[1]] = {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", match[2])}
        return found

    def assert_unchanged(self) -> None:
        assert self.rc == 0, self.out[-6000:]
        assert self.recap, self.out[-6000:]
        assert {host: sums["changed"] for host, sums in self.recap.items() if sums["changed"]} == {}, self.out[-12000:]


class Commands:
    """Record every command line of any process on this machine, nodes included, while a playbook runs."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self._before: set[str] = set()
        self._settled: set[str] = set()
        self._stop = threading.Event()

    def sample(self) -> None:
        """Read the command lines of new processes, each in two samples, since it may replace its program."""
        present = {name for name in os.listdir("/proc") if name.isdigit()}
        for name in present - self._settled:
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{name}/cmdline").read_bytes()
                self.seen.add(text.replace(b"\0", b" ").decode(errors="replace"))
        self._settled = present & self._before
        self._before = present

    def _loop(self) -> None:
        while not self._stop.wait(0.2):
            self.sample()

    def watch(self) -> contextlib.AbstractContextManager[None]:
        self._stop.clear()
        return in_background(self._loop, self._stop)


def kill_tree(root: int) -> None:
    """SIGKILL a process and its descendants, including Ansible's workers, which have sessions of their own."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name, in brackets, may hold blanks.
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    below = [root]
    for pid in below:
        below += [child for child, parent in parents.items() if parent == pid]
    for pid in below:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# Lines that are printed at the end of the run.
REPORT: list[str] = []


class Lab:
    """The running lab."""

    def __init__(self) -> None:
        self.commands = Commands()
        self.load()

    def load(self) -> None:
        """Read the lab's state; call again after the lab was recreated."""
        self.state: JsonObject = json.loads((LAB / "state.json").read_text())
        self.kubeconfig = ROOT / self.state["kubeconfig"]
        self.api = Api(self.kubeconfig)
        self._began = time.monotonic_ns()
        self.nodes: dict[str, JsonObject] = self.state["nodes"]
        self.gpu_nodes = [name for name, node in self.nodes.items() if node["role"] == "gpu_node"]
        self.control_planes = [name for name, node in self.nodes.items() if node["role"] == "control_plane"]

    # ----------------------------------------------------------------- playbooks

    def _command(self, playbook: str, arguments: tuple[str, ...], inventory: str) -> tuple[list[str], dict[str, str]]:
        folder = Path(sys.executable).parent
        environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "ANSIBLE_NOCOLOR": "1"}
        return [str(folder / "ansible-playbook"), "-i", inventory, playbook, *arguments], environment

    def playbook(self, playbook: str, *arguments: str, inventory: str = INVENTORY, seconds: float = 600) -> Done:
        """Run a playbook to its end; its output is kept in tests/output/lab."""
        command, environment = self._command(playbook, arguments, inventory)
        with self.commands.watch():
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=seconds,
                check=False,
            )
        self.keep_output(playbook, done.stdout)
        return Done(done.returncode, done.stdout)

    def interrupted_playbook(
        self,
        playbook: str,
        *arguments: str,
        moment: Callable[[], bool],
        and_then: Callable[[], None] = lambda: None,
        seconds: float = 120,
    ) -> None:
        """Run a playbook, and SIGKILL all its processes as soon as ``moment`` is true, polled without a pause.

        :param and_then: called right before the kill.
        :raises AssertionError: the playbook ended before.
        """
        command, environment = self._command(playbook, arguments, INVENTORY)
        end = time.monotonic() + seconds
        with tempfile.TemporaryFile("w+") as sink:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            came = False
            try:
                while not came and process.poll() is None and time.monotonic() < end:
                    came = moment()
                if came:
                    and_then()
            finally:
                kill_tree(process.pid)
                process.wait()
            sink.seek(0)
            said = sink.read()
        self.keep_output(f"{playbook}-interrupted", said)
        assert came, f"it ended, or went on too long, before the moment came:\n{said[-6000:]}"

    def killed_playbook(self, playbook: str, marker: str, delay: float) -> str:
        """Run a playbook, and SIGKILL it with all its processes ``delay`` seconds after a line of its output matches.

        :returns: its output so far.
        :raises AssertionError: the playbook ended before.
        """
        command, environment = self._command(playbook, (), INVENTORY)
        lines: list[str] = []
        with self.commands.watch():
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**environment, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    lines.append(line)
                    if re.search(marker, line):
                        time.sleep(delay)
                        break
                ended = process.poll()
            finally:
                kill_tree(process.pid)
                process.wait()
        self.keep_output(f"{playbook}-killed", "".join(lines))
        assert ended is None, f"it ended before {marker!r} was seen:\n{''.join(lines)[-6000:]}"
        return "".join(lines)

    def keep_output(self, name: str, text: str) -> None:
        LOGS.mkdir(parents=True, exist_ok=True)
        number = len(list(LOGS.glob("*.log")))
        (LOGS / f"{number:03}-{Path(name).stem}.log").write_text(text)

    # ----------------------------------------------------------------- nodes

    def ssh(self, node: str, script: str, check: bool = True, seconds: float = 60) -> str:
        """Run a shell script on a node over the SSH access that Ansible uses, and return its output."""
        access = self.state["ssh"]
        options = [
            "BatchMode=yes",
            f"UserKnownHostsFile={ROOT / access['known_hosts']}",
            "StrictHostKeyChecking=yes",
            "ControlMaster=auto",
            "ControlPersist=120",
            f"ControlPath=/tmp/kubegpu-lab-test-{self._began}-%C",
        ]
        command = ["ssh", "-F", "none", "-i", str(ROOT / access["key"])]
        command += [word for option in options for word in ("-o", option)]
        command += [f"{access['user']}@{self.nodes[node]['address']}", script]
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
        if check:
            assert done.returncode == 0, f"{node}: {script}: {done.returncode}: {done.stderr}{done.stdout}"
        return done.stdout

    def api_of(self, control_plane: str, patience: float = 30) -> Api:
        """Return a client of one control plane's own API server; the kubeconfig names the first one's."""
        return Api(self.kubeconfig, f"https://{self.nodes[control_plane]['address']}:6443", patience)

    def api_answers(self, control_plane: str) -> bool:
        try:
            return bool(self.api_of(control_plane, 5).call("GET", "/version")["gitVersion"])
        except Exception:  # refused, reset, timed out, not ready: all of it is "away"
            return False

    def wait_ready(self) -> None:
        """Wait until every API server answers and every node is Ready."""

        def ready() -> bool:
            return all(
                any(
                    condition["type"] == "Ready" and condition["status"] == "True"
                    for condition in self.api.node(name)["status"]["conditions"]
                )
                for name in self.nodes
            )

        until(lambda: all(self.api_answers(name) for name in self.control_planes), "the API servers are back", 180)
        until(ready, "all nodes Ready", 180)

    def manage(self, command: str) -> None:
        """Run ``python -m lab up`` or ``down``."""
        done = subprocess.run(
            [sys.executable, "-m", "lab", command], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    def image(self) -> str:
        """Return the servers' image, from a plugin's pod."""
        for one in self.api.items("/apis/apps/v1/daemonsets"):
            for container in one["spec"]["template"]["spec"]["containers"]:
                if "gpushare-device-plugin" in " ".join(container.get("command", []) + container.get("args", [])):
                    return str(container["image"])
        raise AssertionError("no DaemonSet runs the device plugin: site.yml has not been run")

    def inside(self, namespace: str, pod: str, container: str, *command: str, check: bool = True) -> str:
        """Run a command in a container by ``kubectl exec``, and return its output."""
        kubectl = [str(LAB / "bin" / "kubectl"), f"--kubeconfig={self.kubeconfig}", f"--namespace={namespace}"]
        done = subprocess.run(
            [*kubectl, "exec", pod, f"--container={container}", "--", *command],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if check:
            assert done.returncode == 0, f"{pod}: {command}: {done.stderr}{done.stdout}"
        return done.stdout + ("" if check else done.stderr)

    def log(self, pod: JsonObject, container: str = "") -> str:
        metadata = pod["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/log"
        return self.api.text(path + (f"?container={container}" if container else ""))

    def events(self, namespace: str, name: str, reason: str = "") -> list[str]:
        """Return the messages of an object's Events."""
        wanted = f"involvedObject.name={name}" + (f",reason={reason}" if reason else "")
        return [
            one["message"] for one in self.api.items(f"/api/v1/namespaces/{namespace}/events?fieldSelector={wanted}")
        ]

    def server_pods(self, command: str) -> list[JsonObject]:
        """Return the pods of one of the servers."""
        found = []
        for pod in self.api.items("/api/v1/pods"):
            words = [
                w
                for container in pod["spec"]["containers"]
                for w in container.get("command", []) + container.get("args", [])
            ]
            if any(command in word for word in words):
                found.append(pod)
        return found

    # ----------------------------------------------------------------- sources compared

    def cards(self, node: str) -> list[JsonObject]:
        """Return the cards that the plugin announced on its node."""
        return t.cast(
            "list[JsonObject]", json.loads(self.api.node(node)["metadata"]["annotations"]["kubegpu.share/cards"])
        )

    def allocatable(self, node: str) -> int:
        return int(self.api.node(node)["status"]["allocatable"].get(RESOURCE, "0"))

    def checkpoint(self, node: str) -> dict[tuple[str, str], Given]:
        """Return kubelet's checkpoint by pod UID and container."""
        # Kubelet writes it with the first device plugin.
        data = json.loads(self.ssh(node, f"cat {CHECKPOINT} 2>/dev/null || echo '{{\"Data\": {{}}}}'"))["Data"]
        found = {}
        for entry in data.get("PodDeviceEntries") or []:
            if entry["ResourceName"] == RESOURCE:
                ids = [one for group in entry["DeviceIDs"].values() for one in group]
                answer = base64.b64decode(entry["AllocResp"])
                found[entry["PodUID"], entry["ContainerName"]] = Given(ids, environment_of(answer), cdi_of(answer))
        return found

    def devices(self, node: str, pod: JsonObject) -> list[list[str]]:
        """List the card device nodes in each container's /dev, read from the node."""
        script = (
            "for p in /proc/[0-9]*; do"
            ' [ "$(cat $p/comm 2>/dev/null)" = sleep ] && grep -q {uid} $p/cgroup 2>/dev/null'
            ' && echo "$(cd $p/root/dev && echo nvidia[0-9]*)"; done; true'
        ).format(uid=shlex.quote(pod["metadata"]["uid"].replace("-", "_")))
        lines = self.ssh(node, script).splitlines()
        return [sorted(word for word in line.split() if "*" not in word) for line in lines]

    def assert_agreement(self, pods: list[JsonObject]) -> bool:
        """Assert that annotation, kubelet's checkpoint and the containers' devices name the same cards for each pod."""
        for node in {pod["spec"]["nodeName"] for pod in pods}:
            cards = {card["index"]: card for card in self.cards(node)}
            records = self.checkpoint(node)
            for pod in (one for one in pods if one["spec"]["nodeName"] == node):
                self._assert_pod(node, pod, cards, records)
        return True

    def _assert_pod(
        self, node: str, pod: JsonObject, cards: dict[int, JsonObject], records: t.Mapping[tuple[str, str], Given]
    ) -> None:
        name, annotations = pod["metadata"]["name"], pod["metadata"].get("annotations", {})
        assert annotations.get("ALIYUN_COM_GPU_MEM_ASSIGNED") == "true", f"{name}: {annotations}"
        own = [cards[index] for index in indices_of(pod)]
        uuids = [card["uuid"] for card in own]
        total = 0
        for container in pod["spec"]["containers"]:
            wanted = int(container["resources"]["limits"][RESOURCE])
            total += wanted
            given = records[pod["metadata"]["uid"], container["name"]]
            held = [one.rpartition("-")[0] for one in given.ids]
            shares = [sum(bare(uuid).startswith(one) for one in held) for uuid in uuids]
            assert len(held) == wanted, f"{name}: kubelet gave {given.ids}"
            assert shares == [wanted // len(own)] * len(own), f"{name}: {given.ids} aren't equal shares of {uuids}"
            if given.cdi:
                assert given.cdi == [f"nvidia.com/gpu={uuid}" for uuid in uuids], f"{name}: {given.cdi}"
            visible = "void" if given.cdi else ",".join(uuids)
            assert given.variables["NVIDIA_VISIBLE_DEVICES"] == visible, f"{name}: {given.variables}"
        assert annotations["ALIYUN_COM_GPU_MEM_POD"] == str(total)
        seen = self.devices(node, pod)
        nodes = sorted(f"nvidia{card['minor']}" for card in own)
        assert seen == [nodes] * len(pod["spec"]["containers"]), f"{name}: sees {seen}, not {own}"


class Given(t.NamedTuple):
    """What kubelet gave a container.

    :param ids: of its devices.
    :param variables: that the plugin answered, and ``cdi`` the devices' CDI names.
    """

    ids: list[str]
    variables: dict[str, str]
    cdi: list[str]


def bare(uuid: str) -> str:
    """Return the card's UUID, with which a device ID begins."""
    return uuid.removeprefix("GPU-").replace("-", "")


def indices_of(pod: JsonObject) -> list[int]:
    """Return the cards that a pod's annotations name; empty if the pod isn't booked."""
    annotations = pod["metadata"].get("annotations") or {}
    first = annotations.get("ALIYUN_COM_GPU_MEM_IDX", "")
    return [int(one) for one in (annotations.get("kubegpu.share/card-indices") or first).split(",") if one]


def cdi_of(message: bytes) -> list[str]:
    """Decode field 5 (names of CDI devices) of a ContainerAllocateResponse."""
    return [dict(fields(value))[1].decode() for number, value in fields(message) if number == 5]


def environment_of(message: bytes) -> dict[str, str]:
    """Decode field 1 (envs, a map of strings) of a ContainerAllocateResponse."""
    found = {}
    for number, value in fields(message):
        if number == 1:
            entry = dict(fields(value))
            found[entry[1].decode()] = entry.get(2, b"").decode()
    return found


def fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Iterate over the length-delimited fields of a protobuf message, skipping others."""
    place = 0

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = message[place]
            place += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while place < len(message):
        key = varint()
        if key & 7 == 2:
            length = varint()
            yield key >> 3, message[place : place + length]
            place += length
        elif key & 7 == 0:
            varint()
        else:
            raise AssertionError(f"wire type {key & 7} in a message of strings and flags")


def without_machines(lab: Lab, folder: Path, kubeconfig: Path = LAB / "kubeconfig") -> str:
    """The inventory of a managed cluster: a kubeconfig, and nobody logs in to a machine."""
    path = folder / "managed.yml"
    given = {"gpu_kubeconfig": str(kubeconfig), "gpushare_nodes": lab.gpu_nodes}
    groups = {name: {"hosts": {}} for name in ("gpu_nodes", "control_plane")}
    path.write_text(json.dumps({**groups, "all": {"vars": given}}))
    return str(path)
