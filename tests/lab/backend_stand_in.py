#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""STAND-IN for the programs of HAMi and of NVIDIA's device plugin, for tests: what roles and kubelet see of them.

It runs on top of the servers' image, whose messages and gRPC it uses, and its name says what it is.
``nvidia-device-plugin`` gives whole cards as nvidia.com/gpu; where HAMi's chart has started it, ten parts of each, with
HAMi's register. ``scheduler`` is HAMi's webhook, which also names the node of pods that may run on one only, since
``kube-scheduler`` places nothing.
"""

from __future__ import annotations

import base64
import http.server
import json
import os
import signal
import ssl
import sys
import time
import urllib.request
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
from gpushare.kubelet import wire
from gpushare.nvml.library import NvidiaMl

FOLDER = Path("/var/lib/kubelet/device-plugins")
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
RESOURCE, MEMORY = "nvidia.com/gpu", "nvidia.com/gpumem"
# HAMi's chart sets it.
HAMI = "HOOK_PATH" in os.environ
PARTS = 10 if HAMI else 1


def annotate() -> None:
    """Register the node's cards as HAMi's device plugin does."""
    cards = [
        {
            **{"id": card.uuid, "index": card.index, "count": PARTS, "devmem": card.memory_mib, "devcore": 100},
            **{"type": "NVIDIA-Simulated", "mode": "hami-core", "health": True},
        }
        for card in NvidiaMl().cards()
    ]
    notes = {"hami.io/node-nvidia-register": json.dumps(cards), "hami.io/node-handshake": f"Reported {time.ctime()}"}
    server = f"https://{os.environ['KUBERNETES_SERVICE_HOST']}:{os.environ['KUBERNETES_SERVICE_PORT']}"
    request = urllib.request.Request(
        f"{server}/api/v1/nodes/{os.environ['NODE_NAME']}",
        json.dumps({"metadata": {"annotations": notes}}).encode(),
        {
            "Authorization": f"Bearer {(ACCOUNT / 'token').read_text()}",
            "Content-Type": "application/merge-patch+json",
        },
        method="PATCH",
    )
    with urllib.request.urlopen(request, context=ssl.create_default_context(cafile=ACCOUNT / "ca.crt")):
        pass


def devices(_request: Any, context: grpc.ServicerContext) -> Any:
    answer = wire.message(wire.LIST_AND_WATCH.response)()
    for card in NvidiaMl().cards():
        for part in range(PARTS):
            answer.devices.add(ID=f"{card.uuid}-{part}" if HAMI else card.uuid, health="Healthy")
    yield answer
    while context.is_active():
        time.sleep(1)


def allocate(request: Any, _context: grpc.ServicerContext) -> Any:
    answer = wire.message(wire.ALLOCATE.response)()
    for wanted in request.container_requests:
        uuids = sorted({one.rpartition("-")[0] if HAMI else one for one in wanted.devices_ids})
        answer.container_responses.add().envs["NVIDIA_VISIBLE_DEVICES"] = ",".join(uuids)
    return answer


def plugin() -> None:
    socket = FOLDER / ("hami.sock" if HAMI else "nvidia-gpu.sock")
    socket.unlink(missing_ok=True)
    server = grpc.server(futures.ThreadPoolExecutor(8))
    handlers = {
        wire.OPTIONS: lambda request, context: wire.message(wire.OPTIONS.response)(),
        wire.LIST_AND_WATCH: devices,
        wire.ALLOCATE: allocate,
        wire.PRE_START: lambda request, context: wire.message(wire.PRE_START.response)(),
    }
    server.add_generic_rpc_handlers((wire.handlers(handlers),))
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    ask = wire.message(wire.REGISTER.request)(version=wire.VERSION, endpoint=socket.name, resource_name=RESOURCE)
    wire.call(str(FOLDER / "kubelet.sock"), wire.REGISTER, ask, 10)
    print("registered", flush=True)
    while HAMI:
        annotate()
        time.sleep(30)
    server.wait_for_termination()


def named(spec: dict[str, Any]) -> list[str]:
    """Return the node that a pod's affinity names, if it names only that."""
    affinity = spec.get("affinity", {}).get("nodeAffinity", {})
    terms = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get("nodeSelectorTerms", [])
    names = [name for term in terms for field in term.get("matchFields", []) for name in field["values"]]
    return names if len(names) == 1 else []


class Webhook(http.server.BaseHTTPRequestHandler):
    """Gives pods that want HAMi's memory a card, and the node that their affinity names."""

    def do_POST(self) -> None:
        review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        request = review["request"]
        response = {"uid": request["uid"], "allowed": True}
        spec = request["object"]["spec"]
        limits = spec["containers"][0].get("resources", {}).get("limits", {})
        if MEMORY in limits:
            patch = [
                {"op": "add", "path": "/spec/schedulerName", "value": "hami-scheduler"},
                {"op": "add", "path": "/spec/containers/0/resources/limits", "value": {RESOURCE: "1", **limits}},
            ]
            patch += [{"op": "add", "path": "/spec/nodeName", "value": name} for name in named(spec)]
            response |= {"patchType": "JSONPatch", "patch": base64.b64encode(json.dumps(patch).encode()).decode()}
        content = json.dumps({**review, "request": None, "response": response}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def webhook() -> None:
    server = http.server.ThreadingHTTPServer(("", 443), Webhook)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain("/tls/tls.crt", "/tls/tls.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.serve_forever()


def nothing() -> None:
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda _number, _frame: os._exit(0))
    {"nvidia-device-plugin": plugin, "scheduler": webhook, "kube-scheduler": nothing}[Path(sys.argv[0]).name]()
