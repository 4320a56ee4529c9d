# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Read one card: identity, memory, MIG, health. No I/O."""

from __future__ import annotations

import dataclasses
import re
import typing as t

from .binding import FUNCTION_NOT_FOUND, MIB, NOT_FOUND, NOT_SUPPORTED, NvmlRefused, Query
from .types import CardFacts, Fabric, Health, Memory, Mig, MigDeviceRow, RowRemap

UUID = re.compile(r"(?:GPU|MIG)-[0-9A-Za-z/-]{1,90}")
PCI = re.compile(r"[0-9A-F]{8}:[0-9A-F]{2}:[0-9A-F]{2}\.[0-9A-F]")
# nvmlComputeMode_t, in order.
COMPUTE_MODES = ("default", "exclusive_thread", "prohibited", "exclusive_process")
MIG_MODES = ("disabled", "enabled")
# NVML_GPU_RECOVERY_ACTION_*, in their order.
RECOVERY_ACTIONS = (
    "none",
    "gpu_reset",
    "node_reboot",
    "drain_p2p",
    "drain_and_reset",
    "recover_imex_domain",
    "bus_reset",
    "system_reboot",
)
# NVML_GPU_FABRIC_STATE_*, in their order.
FABRIC_STATES = ("not_supported", "not_started", "in_progress", "completed")
RECOVERY_FIELD = "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"
# nvmlMemoryErrorType_t and nvmlEccCounterType_t.
UNCORRECTED, VOLATILE, AGGREGATE = 1, 0, 1
# More than any card supports.
MAX_MIG_DEVICES = 64


@dataclasses.dataclass(frozen=True)
class MigDevice:
    """A MIG device, with NVML's handle of it."""

    handle: t.Any
    row: MigDeviceRow


def unknown_card(index: int) -> CardFacts:
    """Return a card with nothing known but its index."""
    return {
        "index": index,
        "minor": None,
        "uuid": "",
        "pci": "",
        "name": "",
        "problem": "",
        "memory": None,
        "mig": {"mode": "unknown", "pending": "unknown", "devices": []},
        "compute_mode": "unknown",
        "health": {
            "ecc_uncorrected_volatile": None,
            "ecc_uncorrected_aggregate": None,
            "row_remap": None,
            "retired_pages_pending": None,
            "recovery_action": None,
            "fabric": None,
            "xids": None,
        },
        "processes": None,
        "limits": None,
    }


def identify(query: Query, handle: t.Any, card: CardFacts) -> None:
    """Read the card's identity.

    :raises NvmlRefused: the card is lost; the same applies to all functions here.
    """
    card["uuid"] = query.text("its UUID", "nvmlDeviceGetUUID", handle)
    if card["uuid"] and not UUID.fullmatch(card["uuid"]):
        query.add_implausible(f"its UUID can't be {card['uuid']!r}")
        card["uuid"] = ""
    card["name"] = query.text("its name", "nvmlDeviceGetName", handle)
    card["minor"] = query.number("its minor number", "nvmlDeviceGetMinorNumber", handle)
    card["pci"] = _pci(query, handle)
    index = query.number("its index", "nvmlDeviceGetIndex", handle)
    if index not in (None, card["index"]):
        query.add_implausible(f"NVML lists it at index {card['index']} and reports index {index}")


def _pci(query: Query, handle: t.Any) -> str:
    answer = query.call("its PCI address", "nvmlDeviceGetPciInfo_v3", handle)
    try:
        address = getattr(answer, "busId", None)
    except ValueError:
        # nvidia-ml-py decodes the string on access.
        address = None
    if isinstance(address, bytes):
        address = address.decode("ascii", "replace")
    if answer is not None and not (isinstance(address, str) and PCI.fullmatch(address.upper())):
        query.add_implausible("its PCI address is malformed")
        return ""
    return address.upper() if isinstance(address, str) else ""


def memory(query: Query, handle: t.Any) -> Memory | None:
    """Read the card's memory; without version 2 ``used`` includes the driver's and firmware's reserve."""
    answer = query.attempt("its memory", lambda: query.nvml.memory(handle))
    if answer is None:
        return None
    total, used, free = (query.whole(f"its {key} memory", answer.get(key)) for key in ("total", "used", "free"))
    reserved = query.whole("its reserved memory", answer.get("reserved"))
    if total is None or used is None or free is None:
        return None
    if not total or max(used, free, reserved or 0) > total:
        query.add_implausible(
            f"its memory can't be {used // MIB} MiB used and {free // MIB} MiB free of {total // MIB} MiB"
        )
        return None
    # Up, as the device plugin and nvidia-smi: what isn't whole can't be given to a pod.
    mib = None if reserved is None else -(-reserved // MIB)
    return {"total_mib": total // MIB, "used_mib": used // MIB, "free_mib": free // MIB, "reserved_mib": mib}


def mig(query: Query, handle: t.Any) -> tuple[Mig, list[MigDevice]]:
    """Read the MIG mode, and the MIG devices with their handles."""
    state: Mig = {"mode": "unknown", "pending": "unknown", "devices": []}
    try:
        current, pending = query.nvml.call("nvmlDeviceGetMigMode", handle)
    except NvmlRefused as refused:
        if refused.code in (NOT_SUPPORTED, FUNCTION_NOT_FOUND):
            # Drivers without the function are older than MIG.
            state["mode"] = state["pending"] = "unsupported"
        else:
            query.add_refusal(refused, "its MIG mode")
        return state, []
    except (TypeError, ValueError):
        query.add_implausible("its MIG mode is malformed")
        return state, []
    state["mode"], state["pending"] = _mig_mode(query, current), _mig_mode(query, pending)
    devices = _mig_devices(query, handle) if state["mode"] == "enabled" else []
    state["devices"] = [device.row for device in devices]
    return state, devices


def _mig_mode(query: Query, value: t.Any) -> str:
    number = query.whole("its MIG mode", value)
    if number is not None and number < len(MIG_MODES):
        return MIG_MODES[number]
    if number is not None:
        query.add_implausible(f"its MIG mode can't be {number}")
    return "unknown"


def _mig_devices(query: Query, handle: t.Any) -> list[MigDevice]:
    most = query.number("its number of MIG devices", "nvmlDeviceGetMaxMigDeviceCount", handle) or 0
    if most > MAX_MIG_DEVICES:
        query.add_implausible(f"it can't have {most} MIG devices")
    devices: list[MigDevice] = []
    for index in range(min(most, MAX_MIG_DEVICES)):
        try:
            device = query.nvml.call("nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
        except NvmlRefused as refused:
            # Indexes without a device are skipped.
            if refused.code != NOT_FOUND:
                query.add_refusal(refused, f"MIG device {index}")
            continue
        devices.append(_mig_device(query, device, index))
    return devices


def _mig_device(query: Query, device: t.Any, index: int) -> MigDevice:
    name = f"MIG device {index}'s"
    uuid = query.text(f"{name} UUID", "nvmlDeviceGetUUID", device)
    if uuid and not UUID.fullmatch(uuid):
        query.add_implausible(f"{name} UUID can't be {uuid!r}")
        uuid = ""
    answer = query.attempt(f"{name} memory", lambda: query.nvml.memory(device)) or {}
    total, used = (query.whole(f"{name} memory", answer.get(key)) for key in ("total", "used"))
    if total is not None and used is not None and used > total:
        query.add_implausible(f"{name} memory can't be {used // MIB} MiB used of {total // MIB} MiB")
        total = used = None
    row: MigDeviceRow = {
        "uuid": uuid,
        "index": index,
        "gi": query.number(f"{name} GPU instance", "nvmlDeviceGetGpuInstanceId", device),
        "ci": query.number(f"{name} compute instance", "nvmlDeviceGetComputeInstanceId", device),
        "total_mib": None if total is None else total // MIB,
        "used_mib": None if used is None else used // MIB,
    }
    return MigDevice(device, row)


def compute_mode(query: Query, handle: t.Any) -> str:
    number = query.number("its compute mode", "nvmlDeviceGetComputeMode", handle)
    if number is not None and number >= len(COMPUTE_MODES):
        query.add_implausible(f"its compute mode can't be {number}")
        return "unknown"
    return "unknown" if number is None else COMPUTE_MODES[number]


def health(query: Query, handle: t.Any) -> Health:
    """Read the card's health, without Xids, which NVML doesn't record."""
    ecc = "nvmlDeviceGetTotalEccErrors"
    retired = query.number("its retired pages", "nvmlDeviceGetRetiredPagesPendingStatus", handle)
    action = query.whole(
        "its recovery action",
        query.attempt("its recovery action", lambda: query.nvml.field(handle, RECOVERY_FIELD)),
    )
    recovery = None
    if action is not None:
        # A newer driver may have further actions.
        recovery = RECOVERY_ACTIONS[action] if action < len(RECOVERY_ACTIONS) else f"action_{action}"
    return {
        "ecc_uncorrected_volatile": query.number("its ECC errors", ecc, handle, UNCORRECTED, VOLATILE),
        "ecc_uncorrected_aggregate": query.number("its ECC errors", ecc, handle, UNCORRECTED, AGGREGATE),
        "row_remap": _row_remap(query, handle),
        "retired_pages_pending": None if retired is None else bool(retired),
        "recovery_action": recovery,
        "fabric": _fabric(query, handle),
        "xids": None,
    }


def _fabric(query: Query, handle: t.Any) -> Fabric | None:
    answer = query.attempt("its registration with NVSwitches", lambda: query.nvml.fabric(handle))
    state, status = (query.whole("its registration with NVSwitches", answered) for answered in answer or (None, None))
    if state is None or status is None or not state:
        return None
    # A newer driver may have further states.
    return {"state": FABRIC_STATES[state] if state < len(FABRIC_STATES) else f"state_{state}", "status": status}


def _row_remap(query: Query, handle: t.Any) -> RowRemap | None:
    answer = query.call("its remapped rows", "nvmlDeviceGetRemappedRows", handle)
    if answer is None:
        return None
    if not isinstance(answer, (tuple, list)) or len(answer) != 4:
        query.add_implausible("its remapped rows aren't four numbers")
        return None
    correctable, uncorrectable, pending, failed = (query.whole("its remapped rows", count) for count in answer)
    if correctable is None or uncorrectable is None or pending is None or failed is None:
        return None
    return {
        "correctable": correctable,
        "uncorrectable": uncorrectable,
        "pending": bool(pending),
        "failed": bool(failed),
    }
