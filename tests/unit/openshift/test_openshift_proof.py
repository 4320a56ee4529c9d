# SPDX-License-Identifier: GPL-3.0-or-later
"""The proof on OpenShift by the role's tasks: a real API server, the real extender with TLS, and a played kubelet.

The kubelet runs the pod's command on this machine, where the Service's name is the loopback address.
"""

from __future__ import annotations

import contextlib
import json
import ssl
import subprocess
import sys
import threading
import typing as t
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible_collections.kubegpu.share.plugins.filter.scheduler import extender_answer
from ansible_collections.kubegpu.share.plugins.module_utils._host.http_probe import post
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.apply import REQUEST
from api_double import ApiDouble, make_node
from extender_kit import eventually
from gpushare.extender.command import Extender
from own_cluster import run_playbook
from prometheus_client import CollectorRegistry
from real_apiserver import MERGE, ApiServer, Refused, api_server
from tls_files import Files

__all__ = ["api_server"]

NAMESPACE = "gpushare-proof"
ROOT = Path(__file__).resolve().parents[3]
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
POD = f"{PODS}/gpushare-extender-proof"


@pytest.fixture(scope="module")
def server(api_server: ApiServer) -> ApiServer:
    api_server.request("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    return api_server


class Kubelet:
    """Runs the pod, and reports how it ended."""

    def __init__(self, server: ApiServer, folder: Path, port: int) -> None:
        self.server, self.folder, self.port = server, folder, port
        self.seen: list[dict[str, t.Any]] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Kubelet:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(60)

    def _run(self) -> None:
        done = ""
        while not self._stopped.wait(0.2):
            with contextlib.suppress(Refused):
                pod = self.server.request("GET", POD)
                if pod["metadata"]["uid"] != done:
                    done = pod["metadata"]["uid"]
                    self.seen.append(pod)
                    self.server.request("PATCH", f"{POD}/status", {"status": self._status(pod)}, MERGE)

    def _status(self, pod: dict[str, t.Any]) -> dict[str, t.Any]:
        [container] = pod["spec"]["containers"]
        _python, flags, program, url, request, _seconds, folder, _written = container["command"]
        [mount] = container["volumeMounts"]
        assert (flags, folder) == ("-ISc", mount["mountPath"])
        there = url.replace(f"gpushare-extender.{NAMESPACE}.svc:12345", f"127.0.0.1:{self.port}")
        words = [there, request, "1", str(self.folder), str(self.folder / "written")]
        subprocess.run([sys.executable, flags, program, *words], check=True)
        message = (self.folder / "written").read_text()
        state = {"terminated": {"exitCode": 0, "reason": "Completed", "message": message}}
        return {"phase": "Succeeded", "containerStatuses": [self._container(state)]}

    def _container(self, state: dict[str, t.Any]) -> dict[str, t.Any]:
        return {"name": "proof", "image": "i", "imageID": "", "ready": False, "restartCount": 0, "state": state}


@contextlib.contextmanager
def serving(tmp_path: Path, failures: int = 0) -> Iterator[tuple[Path, Extender]]:
    """The scheduler's certificate as the Secret has it, and an extender that asks for it.

    :param failures: how often it can't read the nodes.
    """
    (tmp_path / "files").mkdir()
    files, api = Files(tmp_path / "files"), ApiDouble()
    api.put("nodes", make_node("a", 16))
    if failures:
        api.fail("GET", "/nodes", times=failures)
    started = Extender(api, port=0, registry=CollectorRegistry(), tls=files.tls())
    started.start()
    folder = tmp_path / "client"
    folder.mkdir()
    certificate, key = files.authority.sign("client", "kube-scheduler")
    for source, name in ((certificate, "tls.crt"), (key, "tls.key"), (files.authority.folder / "ca.crt", "ca.crt")):
        (folder / name).write_bytes(Path(source).read_bytes())
    yield folder, started
    started.stop()


@pytest.fixture
def extender(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    with serving(tmp_path) as (folder, started):
        eventually(lambda: started.unsynced() is None)
        yield folder, started.service.port


def client_context(folder: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=f"{folder}/ca.crt")
    context.load_cert_chain(f"{folder}/tls.crt", f"{folder}/tls.key")
    return context


def prove(server: ApiServer, folder: Path) -> t.Any:
    variables = {
        "scheduler_kubeconfig": str(server.kubeconfig),
        "gpushare_namespace": NAMESPACE,
        "gpushare_image": "registry.example.org/gpushare:1",
        "scheduler_detection": {"mode": "openshift", "openshift": "4.20.1"},
        "scheduler_step": "openshift_proof",
    }
    role = {"name": "kubegpu.share.scheduler", "rolespec_validate": False}
    task = {"ansible.builtin.include_role": role, "vars": variables}
    return run_playbook(folder, [{"hosts": "localhost", "gather_facts": False, "tasks": [task]}])


def test_the_extender_is_asked_with_the_schedulers_certificate(
    server: ApiServer, extender: tuple[Path, int], tmp_path: Path
) -> None:
    folder, port = extender
    with Kubelet(server, folder, port) as kubelet:
        done = prove(server, tmp_path)
    assert done.rc == 0, done.text
    assert len(kubelet.seen) == 1 and server.ask("GET", POD)[0] == 404


def test_an_extender_that_has_just_started_is_asked_until_it_is_ready(tmp_path: Path) -> None:
    sources = ("plugins/module_utils/_host/http_probe.py", "roles/scheduler/files/ask_extender.py")
    program = "".join((ROOT / source).read_text() for source in sources)
    with serving(tmp_path, failures=5) as (folder, started):
        url = f"https://127.0.0.1:{started.service.port}/gpushare-scheduler/filter"
        assert json.loads(post(url, REQUEST, client_context(folder)).text)["Error"]
        written = tmp_path / "written"
        words = [url, REQUEST, "60", str(folder), str(written)]
        subprocess.run([sys.executable, "-ISc", program, *words], check=True)
    assert extender_answer(written.read_text(), url)["reason"] == ""
    # It is gone.
    subprocess.run([sys.executable, "-ISc", program, url, REQUEST, "1", str(folder), str(written)], check=True)
    answer = extender_answer(written.read_text(), url)
    assert answer["reason"] == "refused" and "connection refused" in answer["problem"], answer


def test_what_another_kubelet_reports_is_neither_run_nor_printed(server: ApiServer, tmp_path: Path) -> None:
    """The node that the pod is on reports its words, whatever the pod has written."""

    class Other(Kubelet):
        def _status(self, pod: dict[str, t.Any]) -> dict[str, t.Any]:
            words = (
                "{{ lookup('ansible.builtin.pipe', 'touch "
                + str(tmp_path / "run")
                + "') }}\x1b[2J\x9b\n\u202eok: [localhost]"
            )
            state = {"terminated": {"exitCode": 0, "reason": "{{ 7 * 7 }}", "message": words * 500}}
            return {"phase": "Succeeded", "containerStatuses": [self._container(state)]}

    with Other(server, tmp_path, 1):
        done = prove(server, tmp_path)
    text = " ".join(done.text.split())
    stopped = "The secondary scheduler isn't changed, because the extender doesn't answer https://gpushare-extender."
    assert done.rc != 0 and f"{stopped}{NAMESPACE}.svc:12345/gpushare-scheduler/filter" in text, done.text
    assert "it can't be reached ({{ lookup(" in text and server.ask("GET", POD)[0] == 404
    assert not (tmp_path / "run").exists() and not any(one in done.text for one in "\x1b\x9b\u202e")
    assert len(done.text) < 20_000


@pytest.mark.parametrize(
    ("text", "reason", "words"),
    [
        ("", "unreachable", "has written nothing"),
        ("its pod ImagePullBackOff", "unreachable", "ImagePullBackOff"),
        ('{"status": 0, "failure": "nonsense", "text": "x"}', "unreachable", "x"),
        ('{"status": 0, "failure": "tls", "text": "certificate verify failed"}', "tls", "certificate verify failed"),
        # kubelet, which reports it, may be another's.
        ('{"status": Infinity, "failure": "", "text": ""}', "unreachable", "Infinity"),
        ("[" * 60000, "unreachable", "[["),
        ("\x1b[2J{{ 7 * 7 }} {0}\n\u202e", "unreachable", "{{ 7 * 7 }} {0} \ufffd)."),
        ('{"status": 200, "failure": "", "text": "{}"}', "not_an_extender", "no extender"),
        ('{"status": 200, "failure": "", "text": "{\\"NodeNames\\": []}"}', "", ""),
    ],
)
def test_what_the_pod_has_written_is_judged_as_on_machines(text: str, reason: str, words: str) -> None:
    found = extender_answer(text, "https://x/filter")
    assert found["reason"] == reason and words in found["problem"], found
