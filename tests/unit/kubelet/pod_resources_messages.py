# SPDX-License-Identifier: GPL-3.0-or-later
"""PodResources' messages as protobuf classes, for doubles of kubelet; the code under test only decodes them."""

from __future__ import annotations

from gpushare.kubelet import wire

MESSAGES = wire.Messages(
    {
        "v1": {
            "ContainerDevices": {"resource_name": (1, "string"), "device_ids": (2, "string[]")},
            "ContainerResources": {"name": (1, "string"), "devices": (2, "ContainerDevices[]")},
            "PodResources": {
                "name": (1, "string"),
                "namespace": (2, "string"),
                "containers": (3, "ContainerResources[]"),
            },
            "ListPodResourcesResponse": {"pod_resources": (1, "PodResources[]")},
        }
    }
)
