# SPDX-License-Identifier: GPL-3.0-or-later
"""gRPC and protobuf of kubelet's DRA plugin API (v1), of devices' health (v1alpha1, v1), of its plugin registration
(v1), and of claims in PodResources.

As in ``wire``, the messages are tables of fields. A field with presence (``share_id``) is one without it here: an empty
string isn't sent in either case. An enumeration's value is a number. Source: kubernetes v1.37.2, the files api.proto of
dra/v1, dra-health/v1alpha1 and v1 (the same), pluginregistration/v1 and podresources/v1 in
staging/src/k8s.io/kubelet/pkg/apis.
"""

from __future__ import annotations

import dataclasses
import typing as t

import grpc
from google.protobuf.message import DecodeError
from gpushare.kubelet import wire
from gpushare.kubelet.pod_resources import Unreadable, describe
from gpushare.shared._contracts.pod_resources import LIST, LIST_REQUEST

# The type and the service by which a plugin registers.
PLUGIN_TYPE, SERVICE = "DRAPlugin", "v1.DRAPlugin"
_DRA, _HEALTH = "k8s.io.kubelet.pkg.apis.dra.v1", "v1alpha1"
# kubelet 1.36 asks the first one in any case, kubelet 1.37 the newest one that the plugin names when it registers.
HEALTH_SERVICES = ("v1alpha1.DRAResourceHealth", "v1.DRAResourceHealth")
_REGISTRATION, _PODS = "pluginregistration", "v1"
# The enumeration HealthStatus.
HEALTHY, UNHEALTHY = 1, 2
# kubelet takes a device's health for unknown if it isn't told for half a minute.
HEALTH_SECONDS = 10.0
# kubelet's time for a list.
LIST_SECONDS = 2.0

TABLE: wire.Table = {
    _DRA: {
        "Claim": {"namespace": (1, "string"), "uid": (2, "string"), "name": (3, "string")},
        "Device": {
            "request_names": (1, "string[]"),
            "pool_name": (2, "string"),
            "device_name": (3, "string"),
            "cdi_device_ids": (4, "string[]"),
            "share_id": (5, "string"),
        },
        "NodePrepareResourcesRequest": {"claims": (1, "Claim[]")},
        "NodePrepareResourceResponse": {"devices": (1, "Device[]"), "error": (2, "string")},
        "NodePrepareResourcesResponse": {"claims": (1, "map<string,NodePrepareResourceResponse>")},
        "NodeUnprepareResourcesRequest": {"claims": (1, "Claim[]")},
        "NodeUnprepareResourceResponse": {"error": (1, "string")},
        "NodeUnprepareResourcesResponse": {"claims": (1, "map<string,NodeUnprepareResourceResponse>")},
    },
    _HEALTH: {
        "NodeWatchResourcesRequest": {},
        "DeviceIdentifier": {"pool_name": (1, "string"), "device_name": (2, "string")},
        "DeviceHealth": {
            "device": (1, "DeviceIdentifier"),
            "health": (2, "int32"),
            "last_updated_time": (3, "int64"),
            "message": (5, "string"),
        },
        "NodeWatchResourcesResponse": {"devices": (1, "DeviceHealth[]")},
    },
    _REGISTRATION: {
        "InfoRequest": {},
        "PluginInfo": {
            "type": (1, "string"),
            "name": (2, "string"),
            "endpoint": (3, "string"),
            "supported_versions": (4, "string[]"),
        },
        "RegistrationStatus": {"plugin_registered": (1, "bool"), "error": (2, "string")},
        "RegistrationStatusResponse": {},
    },
    _PODS: {
        "CDIDevice": {"name": (1, "string")},
        "ClaimResource": {"cdi_devices": (1, "CDIDevice[]"), "driver_name": (2, "string")},
        "DynamicResource": {
            "claim_name": (2, "string"),
            "claim_namespace": (3, "string"),
            "claim_resources": (4, "ClaimResource[]"),
        },
        "ContainerResources": {"name": (1, "string"), "dynamic_resources": (5, "DynamicResource[]")},
        "PodResources": {
            "name": (1, "string"),
            "namespace": (2, "string"),
            "containers": (3, "ContainerResources[]"),
        },
        "ListPodResourcesResponse": {"pod_resources": (1, "PodResources[]")},
    },
}
CLASSES = wire.Messages(TABLE)


def _method(package: str, service: str, name: str, request: str, response: str) -> wire.Method:
    return wire.Method(f"/{package}.{service}/{name}", f"{package}.{request}", f"{package}.{response}", CLASSES)


PREPARE = _method(
    _DRA, "DRAPlugin", "NodePrepareResources", "NodePrepareResourcesRequest", "NodePrepareResourcesResponse"
)
UNPREPARE = _method(
    _DRA, "DRAPlugin", "NodeUnprepareResources", "NodeUnprepareResourcesRequest", "NodeUnprepareResourcesResponse"
)
WATCHES = tuple(
    wire.Method(
        f"/{service}/NodeWatchResources",
        f"{_HEALTH}.NodeWatchResourcesRequest",
        f"{_HEALTH}.NodeWatchResourcesResponse",
        CLASSES,
        stream=True,
    )
    for service in HEALTH_SERVICES
)
INFO = _method(_REGISTRATION, "Registration", "GetInfo", "InfoRequest", "PluginInfo")
NOTIFY = _method(
    _REGISTRATION, "Registration", "NotifyRegistrationStatus", "RegistrationStatus", "RegistrationStatusResponse"
)
PODS = wire.Method(LIST, "", f"{_PODS}.ListPodResourcesResponse", CLASSES)


class ClaimRef(t.NamedTuple):
    """A claim that kubelet names."""

    namespace: str
    uid: str
    name: str


@dataclasses.dataclass(frozen=True)
class Device:
    """A prepared device of a claim.

    :param request: the claim's request, without a subrequest's name.
    :param cdi: the names that the runtime resolves.
    :param share: the ID of the share; empty for none.
    """

    request: str
    pool: str
    name: str
    cdi: tuple[str, ...]
    share: str = ""


def claims(request: t.Any) -> list[ClaimRef]:
    """Return the claims of a request to prepare or to unprepare, each once."""
    return list(dict.fromkeys(ClaimRef(claim.namespace, claim.uid, claim.name) for claim in request.claims))


def prepared(answers: t.Mapping[str, t.Sequence[Device] | str]) -> t.Any:
    """Return the response to a request to prepare.

    :param answers: the devices, or the error's text, by the claims' UIDs.
    """
    response = CLASSES[PREPARE.response]()
    for uid, answer in answers.items():
        if isinstance(answer, str):
            response.claims[uid].error = answer
            continue
        # A claim without devices has an entry, too.
        response.claims[uid].SetInParent()
        for device in answer:
            response.claims[uid].devices.add(
                request_names=[device.request],
                pool_name=device.pool,
                device_name=device.name,
                cdi_device_ids=list(device.cdi),
                share_id=device.share,
            )
    return response


def unprepared(answers: t.Mapping[str, str]) -> t.Any:
    """Return the response to a request to unprepare.

    :param answers: the error's text, empty for none, by the claims' UIDs.
    """
    response = CLASSES[UNPREPARE.response]()
    for uid, error in answers.items():
        response.claims[uid].error = error
    return response


class DeviceHealth(t.NamedTuple):
    """A device and its health.

    :param problem: why it isn't given to pods; empty if it is.
    """

    pool: str
    name: str
    problem: str


def health(devices: t.Iterable[DeviceHealth], now: int) -> t.Any:
    """Return all devices with their health.

    :param now: Unix time, in seconds.
    """
    response = CLASSES[f"{_HEALTH}.NodeWatchResourcesResponse"]()
    for device in devices:
        added = response.devices.add(
            health=UNHEALTHY if device.problem else HEALTHY, last_updated_time=now, message=device.problem
        )
        added.device.pool_name, added.device.device_name = device.pool, device.name
    return response


def plugin_info(driver: str, endpoint: str) -> t.Any:
    services = [SERVICE, *HEALTH_SERVICES]
    return CLASSES[INFO.response](type=PLUGIN_TYPE, name=driver, endpoint=endpoint, supported_versions=services)


class PodClaims(t.NamedTuple):
    """The CDI names that a pod's containers have of one driver, and the number of these containers.

    ``claims`` has for each of them the name of its ResourceClaim, too. kubelet lists pods without their UID, and no
    plain init containers.

    :param container: the name of the container; empty where it isn't one.
    """

    namespace: str
    name: str
    cdi: frozenset[str]
    containers: int = 1
    claims: frozenset[tuple[str, str]] = frozenset()
    container: str = ""


class ClaimListing:
    """The claims of running pods from kubelet's PodResources.

    :param driver: whose devices are listed.
    """

    def __init__(self, socket: str, driver: str) -> None:
        self._socket, self._driver = socket, driver
        self._connection = wire.Connection(socket, PODS)

    def list(self) -> list[PodClaims]:
        """Return the pods that have devices of the driver.

        :raises Unreadable: kubelet doesn't answer.
        """
        try:
            answer = self._connection.call(LIST_REQUEST, LIST_SECONDS)
        except grpc.RpcError as error:
            raise Unreadable(f"kubelet's PodResources ({self._socket}) can't be read: {describe(error)}") from error
        except DecodeError as error:
            raise Unreadable(f"kubelet's PodResources ({self._socket}) can't be decoded: {error}") from error
        pod_claims = []
        for pod in answer.pod_resources:
            found = ((str(container.name), frozenset(self._names(container))) for container in pod.containers)
            by_container = [(name, names) for name, names in found if names]
            if by_container:
                claims = frozenset[tuple[str, str]]().union(*(names for _name, names in by_container))
                cdi = frozenset(name for name, _claim in claims)
                only = by_container[0][0] if len(by_container) == 1 else ""
                pod_claims.append(PodClaims(pod.namespace, pod.name, cdi, len(by_container), claims, only))
        return pod_claims

    def close(self) -> None:
        self._connection.close()

    def _names(self, container: t.Any) -> t.Iterator[tuple[str, str]]:
        for resource in container.dynamic_resources:
            for part in resource.claim_resources:
                if part.driver_name == self._driver:
                    yield from ((device.name, resource.claim_name) for device in part.cdi_devices)
