# SPDX-License-Identifier: GPL-3.0-or-later
"""STAND-IN for KubeVirt's virt-handler, for tests: how it announces PCI cards to kubelet, and nothing of machines.

It runs in the servers' image, whose messages and gRPC it uses. As virt-handler's (pkg/virt-handler/device-manager at
d923fdb815): one device plugin for each resource of permittedHostDevices that nobody else provides, a device for each
card with that vendor and device that vfio-pci has, named after its IOMMU group, VFIO's device files and the card's
address for who gets it. It looks for cards when it starts and when KubeVirt's object is changed, and a resource that
has a plugin keeps the cards of its start; each is healthy while its group's device file is there.
"""

from __future__ import annotations

import json
import os
import signal
import ssl
import time
import urllib.request
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
from gpushare.kubelet import wire

FOLDER = Path("/var/lib/kubelet/device-plugins")
# Of the node: a container's own are the machine's, or those of its start.
DEVICES, VFIO = Path("/host/pci/devices"), Path("/host/dev/vfio")
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
KUBEVIRTS = "/apis/kubevirt.io/v1/kubevirts"
DRIVER = "vfio-pci"


def permitted() -> tuple[str, dict[str, str]]:
    """Return the version of KubeVirt's object, and the resource of each vendor and device that it permits."""
    server = f"https://{os.environ['KUBERNETES_SERVICE_HOST']}:{os.environ['KUBERNETES_SERVICE_PORT']}"
    request = urllib.request.Request(
        server + KUBEVIRTS, headers={"Authorization": f"Bearer {(ACCOUNT / 'token').read_text()}"}
    )
    with urllib.request.urlopen(request, context=ssl.create_default_context(cafile=ACCOUNT / "ca.crt")) as answer:
        [item] = json.load(answer)["items"]
    devices = item["spec"].get("configuration", {}).get("permittedHostDevices", {})
    rows = [row for row in devices.get("pciHostDevices") or [] if not row.get("externalResourceProvider")]
    resources = {row["pciVendorSelector"].upper(): row["resourceName"] for row in rows}
    return item["metadata"]["resourceVersion"], resources


def cards() -> Iterator[tuple[str, str, str]]:
    """Yield vendor and device, IOMMU group and address of each function that VFIO has."""
    for folder in sorted(DEVICES.iterdir()):
        try:
            driver = os.readlink(folder / "driver").rpartition("/")[2]
            group = os.readlink(folder / "iommu_group").rpartition("/")[2]
        except OSError:
            continue
        if driver == DRIVER:
            words = [(folder / name).read_text().strip().removeprefix("0x").upper() for name in ("vendor", "device")]
            yield ":".join(words), group, folder.name


class Plugin:
    """The device plugin of one resource."""

    def __init__(self, resource: str, cards: dict[str, str]) -> None:
        self.resource = resource
        # Addresses by IOMMU group.
        self.cards = cards
        self.socket = FOLDER / f"kubevirt-{resource.replace('/', '-')}.sock"
        self.socket.unlink(missing_ok=True)
        self._server = grpc.server(futures.ThreadPoolExecutor(8))
        handlers = {
            wire.OPTIONS: lambda request, context: wire.message(wire.OPTIONS.response)(),
            wire.LIST_AND_WATCH: self.devices,
            wire.ALLOCATE: self.allocate,
            wire.PRE_START: lambda request, context: wire.message(wire.PRE_START.response)(),
        }
        self._server.add_generic_rpc_handlers((wire.handlers(handlers),))
        self._server.add_insecure_port(f"unix:{self.socket}")

    def start(self) -> None:
        self._server.start()
        ask = wire.message(wire.REGISTER.request)(
            version=wire.VERSION, endpoint=self.socket.name, resource_name=self.resource
        )
        wire.call(str(FOLDER / "kubelet.sock"), wire.REGISTER, ask, 10)
        print(f"registered {self.resource}", flush=True)

    def stop(self) -> None:
        self._server.stop(0)
        self.socket.unlink(missing_ok=True)

    def devices(self, request: Any, context: grpc.ServicerContext) -> Any:
        sent = None
        while context.is_active():
            now = {group: (VFIO / group).exists() for group in sorted(self.cards)}
            if now != sent:
                answer = wire.message(wire.LIST_AND_WATCH.response)()
                for group, healthy in now.items():
                    answer.devices.add(ID=group, health="Healthy" if healthy else "Unhealthy")
                yield answer
                sent = now
            time.sleep(0.2)

    def allocate(self, request: Any, context: grpc.ServicerContext) -> Any:
        answer = wire.message(wire.ALLOCATE.response)()
        for wanted in request.container_requests:
            response = answer.container_responses.add()
            addresses = [self.cards[group] for group in wanted.devices_ids]
            name = self.resource.upper().replace("/", "_").replace(".", "_")
            response.envs[f"PCI_RESOURCE_{name}"] = ",".join(addresses)
            for path in ("/dev/vfio/vfio", *(f"/dev/vfio/{group}" for group in wanted.devices_ids)):
                response.devices.add(container_path=path, host_path=path, permissions="mrw")
        return answer


def main() -> None:
    signal.signal(signal.SIGTERM, lambda _number, _frame: os._exit(0))
    running: dict[str, Plugin] = {}
    seen = ""
    while True:
        try:
            version, allowed = permitted()
        except OSError as error:
            # The API server refuses or is away; virt-handler's watch goes on, too.
            print(f"no answer of the API server: {error}", flush=True)
            time.sleep(1)
            continue
        if version != seen:
            seen = version
            found: dict[str, dict[str, str]] = {}
            for selector, group, address in cards():
                if selector in allowed:
                    found.setdefault(allowed[selector], {})[group] = address
            for resource in [name for name in running if name not in found]:
                running.pop(resource).stop()
            for resource, own in found.items():
                if resource not in running:
                    running[resource] = Plugin(resource, own)
                    running[resource].start()
        time.sleep(1)


if __name__ == "__main__":
    main()
