# SPDX-License-Identifier: GPL-3.0-or-later
"""Pods that name as many templates as the API accepts: what is made, how etcd grows, and that others wait no longer.

The role's own objects, and the server as a process with the rights that the role grants it. There is no controller of
claims, so that every template stays needed.
"""

from __future__ import annotations

import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dra_world import TEMPLATES, events, names, pod
from gpushare.shared._contracts import claim_templates as contract
from gpushare.templates.keeper import EVENT
from gpushare.templates.rows import filled
from own_cluster import until
from real_apiserver import ApiServer
from test_dra_templates import process
from test_dra_turns import LARGEST, LARGEST_STORED_KIB

# Of the longest names, whose templates were the largest ones.
LARGE = ["gpu-mem-" + "-".join(["1"] * 31 + [str(number)]) for number in range(1, 2401)]
# docs/claims.md says them.
PER_POD, PER_NAMESPACE, SECONDS = 8, 64, 2.0


def naming(name: str, wanted: list[str]) -> dict[str, Any]:
    claims = [{"name": f"c{number}", "resourceClaimTemplateName": one} for number, one in enumerate(wanted)]
    # Nobody takes the gate away: the pod waits for as long as its owner likes.
    gate = [{"name": "example.org/never"}]
    containers = [{"name": "c", "image": "i"}]
    return {
        "metadata": {"name": name},
        "spec": {"containers": containers, "resourceClaims": claims, "schedulingGates": gate},
    }


def stored(server: ApiServer) -> int:
    """Return the bytes of etcd's database that are in use."""
    assert server._ports is not None
    url = f"http://127.0.0.1:{server._ports[0]}/v3/maintenance/status"
    with urllib.request.urlopen(urllib.request.Request(url, b"{}", method="POST"), timeout=10) as answer:
        return int(json.load(answer)["dbSizeInUse"])


def until_a_victim_has_its_template(server: ApiServer, units: int) -> float:
    """Return the seconds from the creation of a pod in a namespace of its own until its template is there."""
    space = server.namespace("victim")
    began = time.monotonic()
    server.request("POST", f"/api/v1/namespaces/{space}/pods", pod("p", units))
    until(lambda: names(server, space) == {f"gpu-mem-{units}"}, 120)
    return time.monotonic() - began


def test_thousands_of_names_of_one_pod_and_of_many_pods(dra_api: ApiServer, tmp_path: Path) -> None:
    server = dra_api
    one, many = server.namespace("attacker"), server.namespace("attacker")
    server.request("POST", f"/api/v1/namespaces/{one}/pods", naming("large", LARGE))
    parts = [LARGE[at : at + PER_POD] for at in range(0, len(LARGE), PER_POD)]
    with ThreadPoolExecutor(4) as pool:
        pods = [naming(f"p{number}", part) for number, part in enumerate(parts)]
        list(pool.map(lambda each: server.request("POST", f"/api/v1/namespaces/{many}/pods", each), pods))
    before = stored(server)
    with process(server, tmp_path, "one"):
        until(lambda: names(server, many), 60)
        waited = [until_a_victim_has_its_template(server, units) for units in range(1, 6)]
        until(lambda: len(names(server, many)) >= PER_NAMESPACE, 60)
        time.sleep(5)
        made, growth = len(names(server, many)), stored(server) - before
        print(f"victims waited {max(waited):.2f} s; {made} templates; etcd grew by {growth / 1024:.0f} KiB")
        [message] = until(lambda: events(server, one, EVENT), 30)
        limited = until(lambda: events(server, many, EVENT), 30)
    assert max(waited) < SECONDS
    assert not names(server, one) and made == PER_NAMESPACE
    assert message.startswith("PodTemplateLimit: the pod names more than 8 different templates")
    assert (
        all(text.startswith("NamespaceTemplateLimit: template gpu-mem-1-1") for text in limited) and len(limited) <= 10
    )
    assert growth < (PER_NAMESPACE + 20) * LARGEST_STORED_KIB * 1024


def test_the_largest_template_in_etcd(dra_api: ApiServer) -> None:
    """With its namespace, which has half a KiB."""
    server, name = dra_api, contract.name_of(LARGEST)
    before = stored(server)
    path = f"/apis/{contract.API_VERSION}/namespaces/{{}}/{TEMPLATES}"
    for _number in range(40):
        space = server.namespace("large")
        server.request("POST", path.format(space), filled(space, name, "MiB"))
    growth = (stored(server) - before) / 40 / 1024
    print(f"{growth:.1f} KiB each")
    assert growth < LARGEST_STORED_KIB
