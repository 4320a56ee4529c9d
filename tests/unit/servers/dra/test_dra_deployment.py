# SPDX-License-Identifier: GPL-3.0-or-later
"""The role's DaemonSet gives the driver its options, its folders, and exactly the rights that its tests run with."""

from __future__ import annotations

import typing as t
from pathlib import Path

import pytest
from dra_cluster import RULES
from gpushare.dra import command
from gpushare.dra.claims import DRIVER
from gpushare_objects import rendered
from role_templates import one

OTHERS = {"gpushare_ignore_xids": [13, 31], "gpushare_memory_limit": "off", "gpushare_cdi_folders": []}


@pytest.fixture(params=[{}, {"gpushare_kubelet_root": "/data/kubelet", **OTHERS}], ids=["defaults", "others"])
def deployed(request: pytest.FixtureRequest) -> tuple[t.Any, t.Any]:
    """The pod's specification, and all objects of the role, by its defaults and by other values."""
    objects = rendered("dra", **request.param)
    return one(objects, "DaemonSet", command.COMPONENT)["spec"]["template"]["spec"], objects


def test_the_options_and_folders(deployed: tuple[t.Any, t.Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE_NAME", "gpu1")
    spec, _objects = deployed
    (container,) = spec["containers"]
    assert container["command"][0] == command.COMPONENT
    options = command.parse(container["command"][1:])
    mounts = {mount["mountPath"]: mount.get("readOnly", False) for mount in container["volumeMounts"]}
    kubelet = Path(options.kubelet_dir)
    assert all(path.startswith(f"{kubelet}/") for path in mounts if "kubelet" in path)
    written = [kubelet / "plugins" / DRIVER, kubelet / "plugins_registry", Path(options.claim_cdi_folder)]
    assert [mounts.get(str(folder)) for folder in written] == [False] * 3
    assert str(kubelet / "pod-resources") in mounts and options.cgroup_root in mounts
    assert set(options.cdi_folders.split(",")) <= set(mounts)
    # kubelet is told of the socket by its path in the container.
    paths = {volume["name"]: volume["hostPath"]["path"] for volume in spec["volumes"] if "hostPath" in volume}
    for mount in container["volumeMounts"]:
        assert paths.get(mount["name"], mount["mountPath"]) == mount["mountPath"]


def test_the_rights(deployed: tuple[t.Any, t.Any]) -> None:
    _spec, objects = deployed
    assert one(objects, "ClusterRole", "gpushare:dra-driver")["rules"] == RULES
    assert one(objects, "DeviceClass", DRIVER)["spec"]["selectors"]
