# SPDX-License-Identifier: GPL-3.0-or-later
"""The state of a control plane after site.yml, as its own tools report it."""

from __future__ import annotations

from typing import Any

import yaml

testinfra_hosts = ["ansible://control_plane"]

MANIFESTS = "/etc/kubernetes/manifests"
KUBECTL = "kubectl --kubeconfig /etc/kubernetes/admin.conf"


def test_the_scheduler_reads_our_configuration(host: Any) -> None:
    container = yaml.safe_load(host.file(f"{MANIFESTS}/kube-scheduler.yaml").content_string)["spec"]["containers"][0]
    argument = next(word for word in container["command"] if word.startswith("--config="))
    path = argument.partition("=")[2]
    assert any(path.startswith(mount["mountPath"]) and mount.get("readOnly") for mount in container["volumeMounts"])
    configuration = yaml.safe_load(host.file(path).content_string)
    assert configuration["apiVersion"] == "kubescheduler.config.k8s.io/v1"
    assert configuration["clientConnection"]["kubeconfig"] == "/etc/kubernetes/scheduler.conf"
    extender = next(one for one in configuration["extenders"] if "gpushare-scheduler" in one["urlPrefix"])
    assert extender["urlPrefix"] == "http://127.0.0.1:12345/gpushare-scheduler"
    assert (extender["filterVerb"], extender["bindVerb"]) == ("filter", "bind")
    assert extender["nodeCacheCapable"] is True
    assert extender.get("ignorable", False) is False
    assert extender["managedResources"] == [{"name": "aliyun.com/gpu-mem", "ignoredByScheduler": False}]


def test_one_scheduler_runs_with_it(host: Any) -> None:
    running = [line for line in host.check_output("ps -eo args").splitlines() if line.startswith("kube-scheduler ")]
    assert len(running) == 1, running
    assert "--config=" in running[0]


def test_the_extender_listens_on_the_loopback_address_only(host: Any) -> None:
    """In /proc/net/tcp, 12345 is 3039 and 127.0.0.1 is 0100007F; 0A is LISTEN."""
    tables = host.check_output("cat /proc/net/tcp /proc/net/tcp6")
    listening = [line.split()[1] for line in tables.splitlines() if line.split()[3] == "0A"]
    assert [address for address in listening if address.endswith(":3039")] == ["0100007F:3039"]


def test_the_extender_is_ready(host: Any) -> None:
    script = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:12345/readyz').status)"
    assert host.check_output(f'python3 -c "{script}"') == "200"
