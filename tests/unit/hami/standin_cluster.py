# SPDX-License-Identifier: GPL-3.0-or-later
"""Stand-ins for what runs nowhere in a test: kubelet with HAMi's device plugin, and HAMi's webhook and scheduler.

The API server, its controllers and helm are real. A thread plays kubelet for one node: it binds pods, reports them as
ready, and lets deleted ones go; where a pod of the device plugin is on the node, it announces slots and registers a
card, as HAMi's plugin does. The webhook changes pods as HAMi's does, with the certificate from its Secret.
"""

from __future__ import annotations

import base64
import contextlib
import http.server
import json
import ssl
import tempfile
import threading
import time
import typing as t
from pathlib import Path

from real_apiserver import MERGE, Refused

NODE = "gpu1"
REGISTER = "hami.io/node-nvidia-register"
# As HAMi 2.10's plugin writes it: false, 0 and empty values are left out.
CARD = {
    "id": "GPU-1",
    "count": 10,
    "devmem": 16384,
    "devcore": 100,
    "type": "NVIDIA-T4",
    "mode": "hami-core",
    "health": True,
}
COMPONENT = "app.kubernetes.io/component"


class Cluster:
    """The moving parts around a real API server.

    :ivar errors: of the threads; a test that ends well has none.
    """

    def __init__(self, api: t.Any, namespace: str = "hami-system") -> None:
        self.api, self.namespace = api, namespace
        self.errors: list[str] = []
        self.refuses = False
        self._end = threading.Event()
        self._server: http.server.HTTPServer | None = None

    @contextlib.contextmanager
    def running(self) -> t.Iterator[Cluster]:
        for name in (NODE, "other"):
            with contextlib.suppress(Refused):
                self.api.request("POST", "/api/v1/nodes", {"metadata": {"name": name}})
            # The API server taints a new node until kubelet reports it as ready.
            self.api.request("PATCH", f"/api/v1/nodes/{name}", {"spec": {"taints": None}}, MERGE)
        self._serve()
        threads = [threading.Thread(target=self._kubelet, daemon=True)]
        threads[0].start()
        try:
            yield self
        finally:
            self._end.set()
            threads[0].join(10)
            if self._server:
                self._server.shutdown()

    # ----------------------------------------------------------------- kubelet and device plugin

    def _kubelet(self) -> None:
        while not self._end.wait(0.2):
            try:
                self._pods()
                self._node()
            except (Refused, OSError, ValueError) as error:
                # Objects come and go meanwhile.
                self.errors.append(str(error))

    def _pods(self) -> None:
        path = f"/api/v1/namespaces/{self.namespace}/pods"
        for pod in self.api.request("GET", path)["items"]:
            name, status = pod["metadata"]["name"], pod.get("status") or {}
            if pod["metadata"].get("deletionTimestamp"):
                self.api.ask("DELETE", f"{path}/{name}?gracePeriodSeconds=0")
            elif not pod["spec"].get("nodeName"):
                target = {"apiVersion": "v1", "kind": "Node", "name": NODE}
                body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
                self.api.request("POST", f"{path}/{name}/binding", body)
            elif status.get("phase") != "Running":
                now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
                ready = {"type": "Ready", "status": "True", "lastTransitionTime": now}
                new = {"status": {"phase": "Running", "conditions": [ready], "startTime": now}}
                self.api.request("PATCH", f"{path}/{name}/status", new, MERGE)

    def plugins(self) -> list[t.Any]:
        path = f"/api/v1/namespaces/{self.namespace}/pods?labelSelector={COMPONENT}=hami-device-plugin"
        return [
            item for item in self.api.request("GET", path)["items"] if not item["metadata"].get("deletionTimestamp")
        ]

    def _node(self) -> None:
        node = self.api.request("GET", f"/api/v1/nodes/{NODE}")
        status = node.get("status") or {}
        capacity = (status.get("capacity") or {}).get("nvidia.com/gpu")
        allocatable = (status.get("allocatable") or {}).get("nvidia.com/gpu")
        runs = [plugin for plugin in self.plugins() if (plugin.get("status") or {}).get("phase") == "Running"]
        if runs and allocatable != "10":
            slots = {"nvidia.com/gpu": "10"}
            self._patch_status({"capacity": slots, "allocatable": slots})
            annotations = {REGISTER: json.dumps([CARD]), "hami.io/node-handshake": "Requesting_2026-11-26 09:00:00"}
            self.api.request("PATCH", f"/api/v1/nodes/{NODE}", {"metadata": {"annotations": annotations}}, MERGE)
        elif not runs and (allocatable, capacity) != (None, None) and (allocatable, capacity) != ("0", "0"):
            # kubelet's state after five minutes without the plugin.
            none = {"nvidia.com/gpu": "0"}
            self._patch_status({"capacity": none, "allocatable": none})

    def _patch_status(self, status: dict[str, t.Any]) -> None:
        self.api.request("PATCH", f"/api/v1/nodes/{NODE}/status", {"status": status}, MERGE)

    # ----------------------------------------------------------------- webhook

    @property
    def port(self) -> int:
        assert self._server is not None
        return self._server.server_address[1]

    def _serve(self) -> None:
        cluster = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = json.dumps(cluster.review(review)).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: t.Any) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            def get_request(self) -> t.Any:
                # The certificate is the Secret's at this moment: without it there is no server.
                connection, address = super().get_request()
                return cluster.context().wrap_socket(connection, server_side=True), address

            def handle_error(self, *_: t.Any) -> None:
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()

    def context(self) -> ssl.SSLContext:
        try:
            secret = self.api.request("GET", f"/api/v1/namespaces/{self.namespace}/secrets/hami-scheduler-tls")
        except Refused as error:
            raise OSError(str(error)) from error
        with tempfile.NamedTemporaryFile() as file:
            for key in ("tls.crt", "tls.key"):
                file.write(base64.b64decode(secret["data"][key]))
            file.flush()
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(file.name)
        return context

    def review(self, review: dict[str, t.Any]) -> dict[str, t.Any]:
        """Change a pod as HAMi's webhook does, for NVIDIA's cards."""
        pod, patch = review["request"]["object"], []
        for number, container in enumerate(pod["spec"]["containers"]):
            limits = (container.get("resources") or {}).get("limits") or {}
            if "nvidia.com/gpumem" in limits and "nvidia.com/gpu" not in limits:
                path = f"/spec/containers/{number}/resources/limits/nvidia.com~1gpu"
                patch.append({"op": "add", "path": path, "value": "1"})
        if patch and pod["spec"].get("schedulerName") in ("default-scheduler", "hami-scheduler"):
            patch.append({"op": "add", "path": "/spec/schedulerName", "value": "hami-scheduler"})
        response = {"uid": review["request"]["uid"], "allowed": True}
        if patch:
            response |= {"patchType": "JSONPatch", "patch": base64.b64encode(json.dumps(patch).encode()).decode()}
        return {"apiVersion": review["apiVersion"], "kind": "AdmissionReview", "response": response}


def chart() -> Path:
    return Path(__file__).parent / "standin_chart"
