# SPDX-License-Identifier: GPL-3.0-or-later
"""kubelet's DRA messages against bytes that follow the published api.proto, and against the file itself."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from gpushare.kubelet import dra, wire

from lab import build
from lab.shell import LabError


def field(number: int, body: bytes) -> bytes:
    """A field of the wire type LEN."""
    assert len(body) < 128
    return bytes([number << 3 | 2, len(body)]) + body


def test_a_request_names_claims() -> None:
    claim = field(1, b"ns") + field(2, b"u-1") + field(3, b"n")
    request = dra.CLASSES[dra.PREPARE.request].FromString(field(1, claim) * 2)
    assert dra.claims(request) == [dra.ClaimRef("ns", "u-1", "n")]
    assert dra.PREPARE.path == "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources"
    assert dra.UNPREPARE.path == "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodeUnprepareResources"


def test_the_answer_has_an_entry_for_each_claim() -> None:
    device = dra.Device("r", "p", "d", ("k=a", "k=b"), "s")
    encoded = field(1, b"r") + field(2, b"p") + field(3, b"d") + field(4, b"k=a") + field(4, b"k=b") + field(5, b"s")
    for answer, body in (([device], field(1, encoded)), ("Code: why", field(2, b"Code: why")), ([], b"")):
        found = wire.encode(dra.prepared({"u": answer}))
        assert found == field(1, field(1, b"u") + field(2, body))
    assert wire.encode(dra.prepared({"u": [dra.Device("r", "p", "d", ())]})).count(b"\x2a") == 0, "no empty share ID"
    assert wire.encode(dra.unprepared({"u": ""})) == field(1, field(1, b"u") + field(2, b""))
    assert wire.encode(dra.unprepared({"u": "x"})) == field(1, field(1, b"u") + field(2, field(1, b"x")))


def test_the_registration() -> None:
    info = dra.plugin_info("gpu.kubegpu.share", "/e.sock")
    wanted = field(1, b"DRAPlugin") + field(2, b"gpu.kubegpu.share") + field(3, b"/e.sock") + field(4, b"v1.DRAPlugin")
    wanted += field(4, b"v1alpha1.DRAResourceHealth") + field(4, b"v1.DRAResourceHealth")
    assert wire.encode(info) == wanted
    status = dra.CLASSES[dra.NOTIFY.request].FromString(b"\x08\x01" + field(2, b"no"))
    assert status.plugin_registered and status.error == "no"
    assert (dra.INFO.path, dra.NOTIFY.path) == (
        "/pluginregistration.Registration/GetInfo",
        "/pluginregistration.Registration/NotifyRegistrationStatus",
    )


def test_the_health_of_devices() -> None:
    found = wire.encode(dra.health([dra.DeviceHealth("p", "d", ""), dra.DeviceHealth("p", "e", "X: y")], 7))
    good = field(1, field(1, b"p") + field(2, b"d")) + b"\x10\x01\x18\x07"
    bad = field(1, field(1, b"p") + field(2, b"e")) + b"\x10\x02\x18\x07" + field(5, b"X: y")
    assert found == field(1, good) + field(1, bad)
    assert [watch.path for watch in dra.WATCHES] == [
        "/v1alpha1.DRAResourceHealth/NodeWatchResources",
        "/v1.DRAResourceHealth/NodeWatchResources",
    ]


@pytest.mark.parametrize(
    "path", ["dra/v1", "dra-health/v1alpha1", "dra-health/v1", "pluginregistration/v1", "podresources/v1"]
)
def test_the_tables_agree_with_the_published_files(path: str) -> None:
    """The kubelet module that the lab's kubelet is built of has them, where Go has fetched it."""
    try:
        go = build.find_go()
    except LabError as missing:
        pytest.skip(str(missing))
    cache = subprocess.run([go, "env", "GOMODCACHE"], capture_output=True, text=True, check=True).stdout.strip()
    version = "v0." + build.SETS["kubernetes"].version.partition(".")[2]
    file = Path(cache) / f"k8s.io/kubelet@{version}/pkg/apis/{path}/api.proto"
    if not file.is_file():
        pytest.skip(f"there is no {file}")
    text = re.sub(r"//.*", "", file.read_text())
    (package,) = re.findall(r"^package ([\w.]+);", text, re.M)
    published = {
        (message, name): (int(number), kind.replace(" ", ""))
        for message, body in re.findall(r"^message (\w+) \{([^}]*)\}", text, re.M)
        for kind, name, number in re.findall(
            r"^\s*((?:repeated |optional )?[\w.]+|map<\w+, \w+>)\s+(\w+)\s*=\s*(\d+);", body, re.M
        )
    }
    table = dra.TABLE["v1alpha1" if path == "dra-health/v1" else package]
    ours = {(message, name): given for message, fields in table.items() for name, given in fields.items()}
    assert ours
    for key, (number, kind) in ours.items():
        plain = re.sub(r"^(repeated|optional)", "", published[key][1]).replace("HealthStatus", "int32")
        repeated = published[key][1].startswith("repeated")
        assert (number, kind) == (published[key][0], plain + "[]" * repeated), key


def test_a_pod_is_listed_with_its_cdi_names_and_the_names_of_their_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = dra.CLASSES[dra.PODS.response]()
    pod = answer.pod_resources.add(name="p", namespace="ns")
    pod.containers.add(name="plain")
    for name in ("a", "b"):
        given = pod.containers.add(name=name).dynamic_resources.add(claim_name="p-gpu-x1", claim_namespace="ns")
        given.claim_resources.add(driver_name="gpu.kubegpu.share").cdi_devices.add(
            name=f"gpu.kubegpu.share/claim=u-{name}"
        )
        given.claim_resources.add(driver_name="nic.example.org").cdi_devices.add(name="nic=1")
    listing = dra.ClaimListing("/nowhere", "gpu.kubegpu.share")
    monkeypatch.setattr(listing._connection, "call", lambda *given: answer)
    names = [f"gpu.kubegpu.share/claim=u-{name}" for name in ("a", "b")]
    claims = frozenset((name, "p-gpu-x1") for name in names)
    assert listing.list() == [dra.PodClaims("ns", "p", frozenset(names), 2, claims)]
