# SPDX-License-Identifier: GPL-3.0-or-later
"""STAND-IN for upstream's gpushare device plugin, for tests: what it tells kubelet and pods, and no more.

It runs in the servers' image, whose messages and gRPC it uses. As upstream's: one fake device per unit of the first
card's memory for each card, the number of cards as capacity gpu-count, a pod found by its size among those that wait,
its card taken from the annotation that the extender wrote, and nothing looked at ever again.
"""

from __future__ import annotations

import json
import os
import signal
import ssl
import time
import urllib.request
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
from gpushare.kubelet import wire
from gpushare.nvml.library import NvidiaMl
from gpushare.shared._core.types import JsonObject

FOLDER = Path("/var/lib/kubelet/device-plugins")
SOCKET = FOLDER / "aliyungpushare.sock"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
MEMORY, COUNT = "aliyun.com/gpu-mem", "aliyun.com/gpu-count"
MEM = "ALIYUN_COM_GPU_MEM"
NODE = os.environ["NODE_NAME"]


def api(method: str, path: str, body: JsonObject | None = None) -> JsonObject:
    """Send one request to the API server, as the pod's service account."""
    server = f"https://{os.environ['KUBERNETES_SERVICE_HOST']}:{os.environ['KUBERNETES_SERVICE_PORT']}"
    headers = {"Authorization": f"Bearer {(ACCOUNT / 'token').read_text()}"}
    data = None
    if body is not None:
        headers["Content-Type"] = "application/merge-patch+json"
        data = json.dumps(body).encode()
    request = urllib.request.Request(server + path, data, headers, method=method)
    with urllib.request.urlopen(request, context=ssl.create_default_context(cafile=ACCOUNT / "ca.crt")) as answer:
        found: JsonObject = json.load(answer)
    return found


def total(pod: JsonObject) -> int:
    return sum(
        int(container.get("resources", {}).get("limits", {}).get(MEMORY, 0)) for container in pod["spec"]["containers"]
    )


def waiting() -> list[JsonObject]:
    """Return the pods of this node that are booked and not assigned, the oldest booking first."""
    path = f"/api/v1/pods?fieldSelector=spec.nodeName={NODE},status.phase=Pending"
    found = []
    for pod in api("GET", path)["items"]:
        notes = pod["metadata"].get("annotations") or {}
        if notes.get(f"{MEM}_ASSIGNED") == "false" and f"{MEM}_ASSUME_TIME" in notes and total(pod):
            found.append((int(notes[f"{MEM}_ASSUME_TIME"]), pod))
    return [pod for _time, pod in sorted(found, key=lambda one: one[0])]


class Plugin:
    def __init__(self) -> None:
        self.cards = NvidiaMl().cards()
        # Upstream computes it from the first card and takes it for all of them.
        self.units = self.cards[0].memory_mib // 1024

    def devices(self, request: Any, context: grpc.ServicerContext) -> Any:
        answer = wire.message(wire.LIST_AND_WATCH.response)()
        for card in self.cards:
            for slot in range(self.units):
                answer.devices.add(ID=f"{card.uuid}-_-{slot}", health="Healthy")
        yield answer
        while context.is_active():
            time.sleep(1)

    def allocate(self, request: Any, context: grpc.ServicerContext) -> Any:
        answer = wire.message(wire.ALLOCATE.response)()
        for wanted in request.container_requests:
            size = len(wanted.devices_ids)
            pod = next((one for one in waiting() if total(one) == size), None)
            envs = {f"{MEM}_CONTAINER": str(size), f"{MEM}_DEV": str(self.units)}
            if pod is None:
                failure = f"no-gpu-has-{size}GiB-to-run"
                envs |= {"NVIDIA_VISIBLE_DEVICES": failure, f"{MEM}_IDX": "-1", f"{MEM}_POD": str(size)}
            else:
                meta = pod["metadata"]
                index = meta["annotations"][f"{MEM}_IDX"]
                envs |= {"NVIDIA_VISIBLE_DEVICES": index, f"{MEM}_IDX": index, f"{MEM}_POD": str(size)}
                notes = {f"{MEM}_ASSIGNED": "true", f"{MEM}_ASSUME_TIME": str(time.time_ns())}
                path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
                api("PATCH", path, {"metadata": {"annotations": notes}})
            response = answer.container_responses.add()
            for name, value in envs.items():
                response.envs[name] = value
        return answer


def main() -> None:
    signal.signal(signal.SIGTERM, lambda _number, _frame: os._exit(0))
    plugin = Plugin()
    SOCKET.unlink(missing_ok=True)
    server = grpc.server(futures.ThreadPoolExecutor(8))
    handlers = {
        wire.OPTIONS: lambda request, context: wire.message(wire.OPTIONS.response)(),
        wire.LIST_AND_WATCH: plugin.devices,
        wire.ALLOCATE: plugin.allocate,
        wire.PRE_START: lambda request, context: wire.message(wire.PRE_START.response)(),
    }
    server.add_generic_rpc_handlers((wire.handlers(handlers),))
    server.add_insecure_port(f"unix:{SOCKET}")
    server.start()
    count = {COUNT: str(len(plugin.cards))}
    api("PATCH", f"/api/v1/nodes/{NODE}/status", {"status": {"capacity": count, "allocatable": count}})
    ask = wire.message(wire.REGISTER.request)(version=wire.VERSION, endpoint=SOCKET.name, resource_name=MEMORY)
    wire.call(str(FOLDER / "kubelet.sock"), wire.REGISTER, ask, 10)
    print("registered", flush=True)
    server.wait_for_termination()


if __name__ == "__main__":
    main()
