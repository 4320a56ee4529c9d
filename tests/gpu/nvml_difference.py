# SPDX-License-Identifier: GPL-3.0-or-later
"""Compare what nvml_calls.py got from NVIDIA's library and from the lab's stand-in, of one card. Pure."""

from __future__ import annotations

import typing as t

Answers = t.Mapping[str, t.Mapping[str, t.Any]]

MIB = 1 << 20
# What another card, machine or moment answers otherwise: by the call's name, the keys of its answer; none means all.
OWN: t.Mapping[str, frozenset[str]] = {
    label: frozenset(keys)
    for label, *keys in (
        ("name of this process", "text"),
        ("name of this process, short", "text"),
        ("PCI", "id", "subsystem"),
        ("compute capability", "major", "minor"),
        ("utilization", "rates"),
        ("nvmlDeviceGetArchitecture", "value"),
        ("nvmlDeviceGetBrand", "value"),
        ("nvmlDeviceGetPersistenceMode", "value"),
        ("nvmlDeviceGetPowerManagementLimit", "value"),
        ("nvmlDeviceGetEnforcedPowerLimit", "value"),
        ("nvmlDeviceGetPowerUsage", "value"),
        ("nvmlDeviceGetMaxPcieLinkGeneration", "value"),
        ("nvmlDeviceGetMaxPcieLinkWidth", "value"),
        ("nvmlDeviceGetTemperature 0", "value"),
        *((f"nvmlDeviceGet{name} {kind}", "value") for name in ("MaxClockInfo", "ClockInfo") for kind in (0, 2)),
        ("nvmlDeviceGetBAR1MemoryInfo", "total", "free", "used"),
        # A data centre's card has a serial number, NVLink and a fabric; the stand-in is a smaller one.
        ("nvmlDeviceGetSerial",),
        ("nvmlDeviceGetSerial, short",),
        ("nvmlDeviceGetSerial, NULL",),
        ("nvmlDeviceGetGpuFabricInfo",),
        ("NVLink 0",),
        ("NVLink 63",),
        # A virtual machine doesn't know the paths between cards.
        ("topology with itself",),
        ("P2P with itself 0", "status"),
        ("P2P with itself 3", "status"),
    )
}
# Memory is counted in smaller pieces than the MiB of the stand-in's description.
ROUNDED = frozenset(("nvmlDeviceGetMemoryInfo", "memory, version 2"))
TOLERANCE = 16 * MIB


def description(real: Answers) -> str:
    """Return the stand-in's description of the card, with its processes, from the library's answers."""
    about, memory = real["PCI"], real["memory, version 2"]
    words = [
        f"uuid={real['UUID']['text']}",
        f"minor={real['nvmlDeviceGetMinorNumber']['value']}",
        f"memory={memory['total'] // MIB}",
        f"reserved={-(-memory['reserved'] // MIB)}",
        f"bus={about['domain']:04x}:{about['bus']:02x}:{about['device']:02x}.0",
        f"name={real['nvmlDeviceGetName']['text'].replace(' ', '_')}",
        f"mode={real['nvmlDeviceGetComputeMode']['value']}",
    ]
    if real["MIG mode"]["code"] == 0:
        words.append(f"mig={'enabled' if real['MIG mode']['current'] else 'disabled'}")
    if real["ECC errors 1 0"]["code"] == 0:
        words.append(f"ecc={real['ECC errors 1 0']['value']}:{real['ECC errors 1 1']['value']}")
    if real["remapped rows"]["code"] == 0:
        words.append(f"remapped={':'.join(map(str, real['remapped rows']['rows']))}")
    lines = [
        f"driver {real['nvmlSystemGetDriverVersion']['text']}",
        f"cuda {real['nvmlSystemGetCudaDriverVersion_v2']['value']}",
        f"card 0 {' '.join(words)}",
    ]
    listed = {
        kind: real[f"nvmlDeviceGet{name}RunningProcesses_v3"]["rows"]
        for kind, name in (("mps", "MPSCompute"), ("compute", "Compute"), ("graphics", "Graphics"))
    }
    clients = {row["pid"] for row in listed["mps"]}
    for row in listed["compute"]:
        kind = "mps" if row["pid"] in clients else "compute"
        lines.append(f"process 0 {row['pid']} {row['used'] // MIB} {kind}")
    lines += [f"process 0 {row['pid']} {row['used'] // MIB} graphics" for row in listed["graphics"]]
    return "\n".join([*lines, ""])


def differences(real: Answers, stand_in: Answers) -> dict[str, tuple[t.Any, t.Any]]:
    """Return the calls with different answers, the library's first.

    A call that ends a program of the library's is not compared: it has no answer.
    """
    found = {}
    for label, answer in real.items():
        own = OWN.get(label)
        if "signal" in answer or "crashed" in label or own == frozenset():
            continue
        other = stand_in.get(label, {})
        if not all(key in (own or ()) or _alike(label, answer.get(key), other.get(key)) for key in {*answer, *other}):
            found[label] = (answer, other)
    return found


def _alike(label: str, one: t.Any, other: t.Any) -> bool:
    if label in ROUNDED and isinstance(one, int) and isinstance(other, int):
        return abs(one - other) <= TOLERANCE
    if isinstance(one, list) and isinstance(other, list) and one and isinstance(one[0], dict):
        # Processes: each one's memory is whole MiB in the description.
        return [{**row, "used": row["used"] // MIB} for row in one] == [
            {**row, "used": row["used"] // MIB} for row in other
        ]
    return bool(one == other)
