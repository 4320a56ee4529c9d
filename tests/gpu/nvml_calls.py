# SPDX-License-Identifier: GPL-3.0-or-later
"""Call every function of NVML that the lab's stand-in has or that this project calls, and print what it answers.

The same program runs over NVIDIA's library and over the stand-in, without nvidia-ml-py, so that arguments which a
binding never passes are passed, too. Needs the standard library only.

usage: nvml_calls.py [LIBRARY]; prints JSON: by the call's name its return code, and what it wrote. Each group of calls
runs in a process of its own. So does each call with an argument that may end it: the library doesn't always look.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
import typing as t

# What a structure's memory holds before the call, to see what the call writes.
FILL = 0xA5
PRESENT = 0  # the first card
NOBODY = 4194303  # a PID that no process has
XID = 0x8
RECOVERY_FIELD = 230
HANDLE, EVENTS = "handle", "events"
# A handle that the library never gave, for each function in a process of its own.
WILD = ("nvmlDeviceGetUUID", "nvmlDeviceGetMemoryInfo", "nvmlEventSetFree")


class Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("total", "free", "used")]


class Memory2(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint32),
        *((name, ctypes.c_uint64) for name in ("total", "reserved", "free", "used")),
    ]


class Process1(ctypes.Structure):
    _fields_ = [("pid", ctypes.c_uint32), ("used", ctypes.c_uint64)]


class Process2(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint32),
        ("used", ctypes.c_uint64),
        ("gpu_instance", ctypes.c_uint32),
        ("compute_instance", ctypes.c_uint32),
    ]


class Pci(ctypes.Structure):
    _fields_ = [
        ("legacy", ctypes.c_char * 16),
        *((name, ctypes.c_uint32) for name in ("domain", "bus", "device", "id", "subsystem")),
        ("address", ctypes.c_char * 32),
    ]


class Event(ctypes.Structure):
    _fields_ = [
        ("handle", ctypes.c_void_p),
        ("type", ctypes.c_uint64),
        ("data", ctypes.c_uint64),
        ("gpu_instance", ctypes.c_uint32),
        ("compute_instance", ctypes.c_uint32),
    ]


class Event1(ctypes.Structure):
    _fields_ = [("handle", ctypes.c_void_p), ("type", ctypes.c_uint64), ("data", ctypes.c_uint64)]


class Field(ctypes.Structure):
    _fields_ = [
        ("id", ctypes.c_uint32),
        ("scope", ctypes.c_uint32),
        ("time", ctypes.c_int64),
        ("latency", ctypes.c_int64),
        ("type", ctypes.c_uint32),
        ("code", ctypes.c_int32),
        ("value", ctypes.c_uint64),
    ]


NUMBERS = {
    ctypes.c_uint32: (
        "nvmlDeviceGetMinorNumber",
        "nvmlDeviceGetIndex",
        "nvmlDeviceGetBrand",
        "nvmlDeviceGetArchitecture",
        "nvmlDeviceGetPersistenceMode",
        "nvmlDeviceGetComputeMode",
        "nvmlDeviceIsMigDeviceHandle",
        "nvmlDeviceGetMaxMigDeviceCount",
        "nvmlDeviceGetPowerManagementLimit",
        "nvmlDeviceGetEnforcedPowerLimit",
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetMaxPcieLinkGeneration",
        "nvmlDeviceGetMaxPcieLinkWidth",
        "nvmlDeviceGetGpuInstanceId",
        "nvmlDeviceGetComputeInstanceId",
        "nvmlDeviceGetRetiredPagesPendingStatus",
    ),
    ctypes.c_uint64: ("nvmlDeviceGetSupportedEventTypes",),
}
LISTS = tuple(
    (f"nvmlDeviceGet{kind}RunningProcesses{version}", layout)
    for kind in ("Compute", "Graphics", "MPSCompute")
    for version, layout in (("", Process1), ("_v2", Process2), ("_v3", Process2))
)


class Nvml:
    """A library, which prints each answer at once.

    :param risky: make the calls that may end a process, and no others.
    """

    def __init__(self, path: str, risky: bool = False) -> None:
        self._library = ctypes.CDLL(path)
        self._risky = risky
        self._labels: set[str] = set()

    def start(self) -> t.Any:
        """Initialise the library, and return the first card's handle."""
        handle = ctypes.c_void_p()
        self.call("nvmlInit_v2")
        self.call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint32(PRESENT), ctypes.byref(handle))
        return handle

    def call(self, function: str, *arguments: t.Any) -> int:
        """Call a function; 13 ("function not found") if the library doesn't have it."""
        if self._risky:
            return 1
        try:
            found = getattr(self._library, function)
        except AttributeError:
            return 13
        return int(found(*arguments))

    def note(self, label: str, code: int, **values: t.Any) -> int:
        """Print an answer: the values only where the call succeeded."""
        self.add(label, {"code": code, **(values if code == 0 else {})})
        return code

    def add(self, label: str, answer: t.Any) -> None:
        if not self._risky:
            self._print(label, answer)

    def _print(self, label: str, answer: t.Any) -> None:
        assert label not in self._labels, label
        self._labels.add(label)
        print(json.dumps({label: answer}), flush=True)

    def risky(self, label: str, function: str, *arguments: t.Any) -> None:
        """Make a call in a process of its own, and print its return code or the signal that ended it.

        The library refuses a process whose parent has initialised it, so this one never does.

        :param arguments: HANDLE stands for the first card's, EVENTS for a set of events.
        """
        if not self._risky:
            return
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            self._risky = False
            handle, events = self.start(), ctypes.c_void_p()
            self.call("nvmlEventSetCreate", ctypes.byref(events))
            real = {HANDLE: handle, EVENTS: events}
            given = [real.get(argument, argument) if isinstance(argument, str) else argument for argument in arguments]
            os.write(writer, str(self.call(function, *given)).encode())
            os._exit(0)
        os.close(writer)
        text, status = os.read(reader, 32), os.waitpid(child, 0)[1]
        os.close(reader)
        self._print(label, {"code": int(text)} if text else {"signal": os.WTERMSIG(status)})

    def words(self, code: int) -> str:
        self._library.nvmlErrorString.restype = ctypes.c_char_p
        return t.cast(bytes, self._library.nvmlErrorString(code)).decode()

    def text(self, label: str, function: str, *before: t.Any, length: int = 96) -> str:
        """A call that ends with a buffer for text and its length."""
        buffer = ctypes.create_string_buffer(256)
        self.note(label, self.call(function, *before, buffer, length), text=buffer.value.decode())
        return buffer.value.decode()

    def number(self, label: str, function: str, *before: t.Any, kind: t.Any = ctypes.c_uint32) -> int:
        """A call that ends with a pointer to a number."""
        value = kind()
        self.note(label, self.call(function, *before, ctypes.byref(value)), value=value.value)
        return int(value.value)


def plain(structure: ctypes.Structure) -> dict[str, t.Any]:
    values = {name: getattr(structure, name) for name, *_rest in structure._fields_}
    return {
        name: value.decode("ascii", "replace") if isinstance(value, bytes) else value for name, value in values.items()
    }


def filled(layout: t.Any) -> t.Any:
    one = layout()
    ctypes.memset(ctypes.byref(one), FILL, ctypes.sizeof(one))
    return one


def before(nvml: Nvml) -> None:
    """What is asked before the library is initialised, and after all its users have gone."""
    count, version = ctypes.c_uint32(), ctypes.create_string_buffer(96)
    for moment in ("before init", "after shutdown"):
        nvml.note(f"{moment}: shutdown", nvml.call("nvmlShutdown"))
        nvml.note(f"{moment}: count", nvml.call("nvmlDeviceGetCount_v2", ctypes.byref(count)))
        nvml.note(f"{moment}: driver", nvml.call("nvmlSystemGetDriverVersion", version, 96))
        nvml.note(f"{moment}: events", nvml.call("nvmlEventSetCreate", ctypes.byref(ctypes.c_void_p())))
        nvml.note(f"{moment}: UUID of no handle", nvml.call("nvmlDeviceGetUUID", None, version, 96))
        if moment == "before init":
            nvml.note("init", nvml.call("nvmlInit_v2"))
            nvml.note("init again", nvml.call("nvmlInitWithFlags", 0))
            nvml.note("shutdown of two", nvml.call("nvmlShutdown"))
            nvml.note("count with one user", nvml.call("nvmlDeviceGetCount_v2", ctypes.byref(count)), value=count.value)
            nvml.note("shutdown of one", nvml.call("nvmlShutdown"))


def system(nvml: Nvml) -> None:
    nvml.call("nvmlInit_v2")
    for name in ("nvmlSystemGetDriverVersion", "nvmlSystemGetNVMLVersion"):
        nvml.text(name, name, length=80)
        nvml.text(f"{name}, short", name, length=4)
        nvml.risky(f"{name}, NULL", name, None, 80)
    for name in ("nvmlSystemGetCudaDriverVersion", "nvmlSystemGetCudaDriverVersion_v2"):
        nvml.number(name, name, kind=ctypes.c_int)
        nvml.risky(f"{name}, NULL", name, None)
    nvml.text("name of this process", "nvmlSystemGetProcessName", os.getpid(), length=256)
    nvml.text("name of this process, short", "nvmlSystemGetProcessName", os.getpid(), length=4)
    nvml.text("name of no process", "nvmlSystemGetProcessName", NOBODY, length=256)
    nvml.risky("name of this process, NULL", "nvmlSystemGetProcessName", os.getpid(), None, 256)
    nvml.number("count", "nvmlDeviceGetCount_v2")
    nvml.risky("count, NULL", "nvmlDeviceGetCount_v2", None)
    nvml.add("words", {str(code): nvml.words(code) for code in (*range(32), 999, 12345, -1)})


def finding(nvml: Nvml) -> None:
    """All ways to a handle."""
    handle = nvml.start()
    for index in (PRESENT, 64, 0xFFFFFFFF):
        label = f"handle by index {index}"
        nvml.note(label, nvml.call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint32(index), ctypes.byref(handle)))
    nvml.risky("handle by index, NULL", "nvmlDeviceGetHandleByIndex_v2", PRESENT, None)
    handle = nvml.start()
    uuid = nvml.text("UUID", "nvmlDeviceGetUUID", handle)
    pci = filled(Pci)
    nvml.note("PCI", nvml.call("nvmlDeviceGetPciInfo_v3", handle, ctypes.byref(pci)), **plain(pci))
    address = pci.address.decode("ascii", "replace")
    other = ctypes.c_void_p()
    for label, words in (
        ("itself", uuid),
        ("upper case", uuid[:4] + uuid[4:].upper()),
        ("without its prefix", uuid[4:]),
        ("of no card", "GPU-00000000-0000-0000-0000-000000000000"),
        ("no UUID", "x"),
        ("empty", ""),
    ):
        code = nvml.call("nvmlDeviceGetHandleByUUID", words.encode(), ctypes.byref(other))
        nvml.note(f"handle by UUID, {label}", code, same=other.value == handle.value)
    nvml.risky("handle by UUID, NULL", "nvmlDeviceGetHandleByUUID", None, ctypes.byref(other))
    for label, words in (
        ("itself", address),
        ("lower case", address.lower()),
        ("short domain", address[4:]),
        ("without its domain", address[9:]),
        ("without its function", address[:-2]),
        ("another function", address[:-1] + "1"),
        ("of no card", "00000000:FE:1E.0"),
        ("no address", "x"),
        ("empty", ""),
    ):
        code = nvml.call("nvmlDeviceGetHandleByPciBusId_v2", words.encode(), ctypes.byref(other))
        nvml.note(f"handle by PCI, {label}", code, same=other.value == handle.value)


def properties(nvml: Nvml) -> None:
    handle = nvml.start()
    for name in ("nvmlDeviceGetName", "nvmlDeviceGetUUID", "nvmlDeviceGetSerial"):
        nvml.text(name, name, handle)
        nvml.text(f"{name}, short", name, handle, length=4)
        nvml.risky(f"{name}, NULL", name, HANDLE, None, 96)
        nvml.risky(f"{name} of no handle", name, None, ctypes.create_string_buffer(96), 96)
    for kind, names in NUMBERS.items():
        for name in names:
            nvml.number(name, name, handle, kind=kind)
            nvml.risky(f"{name}, NULL", name, HANDLE, None)
            nvml.risky(f"{name} of no handle", name, None, ctypes.byref(kind()))
    major, minor = ctypes.c_int(), ctypes.c_int()
    code = nvml.call("nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor))
    nvml.note("compute capability", code, major=major.value, minor=minor.value)
    for kind in (0, 2, 4):
        nvml.number(f"nvmlDeviceGetMaxClockInfo {kind}", "nvmlDeviceGetMaxClockInfo", handle, kind)
        nvml.number(f"nvmlDeviceGetClockInfo {kind}", "nvmlDeviceGetClockInfo", handle, kind)
    for sensor in (0, 1):
        nvml.number(f"nvmlDeviceGetTemperature {sensor}", "nvmlDeviceGetTemperature", handle, sensor)
    rates = (ctypes.c_uint32 * 2)()
    nvml.note("utilization", nvml.call("nvmlDeviceGetUtilizationRates", handle, rates), rates=list(rates))


def memory(nvml: Nvml) -> None:
    handle = nvml.start()
    for name in ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetBAR1MemoryInfo"):
        one = filled(Memory)
        nvml.note(name, nvml.call(name, handle, ctypes.byref(one)), **plain(one))
        nvml.risky(f"{name}, NULL", name, HANDLE, None)
        nvml.risky(f"{name} of no handle", name, None, ctypes.byref(one))
    two = ctypes.sizeof(Memory2)
    for label, version in (("2", two | 2 << 24), ("1", two | 1 << 24), ("3", two | 3 << 24), ("none", 0)):
        one = filled(Memory2)
        one.version = version
        code = nvml.call("nvmlDeviceGetMemoryInfo_v2", handle, ctypes.byref(one))
        nvml.note(f"memory, version {label}", code, **plain(one))
    nvml.risky("memory, version 2, NULL", "nvmlDeviceGetMemoryInfo_v2", HANDLE, None)


def processes(nvml: Nvml) -> None:
    handle = nvml.start()
    for name, layout in LISTS:
        count = ctypes.c_uint32(0)
        code = nvml.call(name, handle, ctypes.byref(count), None)
        nvml.add(f"{name}, size", {"code": code, "count": count.value})
        count, rows = ctypes.c_uint32(64), (layout * 64)()
        code = nvml.call(name, handle, ctypes.byref(count), rows)
        found = [plain(row) for row in rows[: count.value]] if code == 0 else []
        nvml.note(name, code, rows=sorted(found, key=lambda row: int(row["pid"])))
        if count.value > 1:
            count = ctypes.c_uint32(1)
            code = nvml.call(name, handle, ctypes.byref(count), rows)
            nvml.add(f"{name}, too short", {"code": code, "count": count.value})
        nvml.risky(f"{name}, NULL", name, HANDLE, None, rows)
        count = ctypes.c_uint32(64)
        nvml.risky(f"{name}, no list", name, HANDLE, ctypes.byref(count), None)
        count = ctypes.c_uint32(64)
        nvml.risky(f"{name} of no handle", name, None, ctypes.byref(count), rows)


def health(nvml: Nvml) -> None:
    handle = nvml.start()
    for error in (0, 1, 2):
        for counter in (0, 1, 2):
            label = f"ECC errors {error} {counter}"
            nvml.number(label, "nvmlDeviceGetTotalEccErrors", handle, error, counter, kind=ctypes.c_uint64)
    rows = [ctypes.c_uint32() for _each in range(4)]
    code = nvml.call("nvmlDeviceGetRemappedRows", handle, *(ctypes.byref(row) for row in rows))
    nvml.note("remapped rows", code, rows=[row.value for row in rows])
    nvml.risky("remapped rows, NULL", "nvmlDeviceGetRemappedRows", HANDLE, None, None, None, None)
    for field in (RECOVERY_FIELD, 65535):
        one = Field(id=field)
        code = nvml.call("nvmlDeviceGetFieldValues", handle, 1, ctypes.byref(one))
        nvml.note(f"field {field}", code, field_code=one.code, type=one.type, value=one.value if not one.code else None)


def mig_and_links(nvml: Nvml) -> None:
    handle = nvml.start()
    current, pending = ctypes.c_uint32(), ctypes.c_uint32()
    code = nvml.call("nvmlDeviceGetMigMode", handle, ctypes.byref(current), ctypes.byref(pending))
    nvml.note("MIG mode", code, current=current.value, pending=pending.value)
    nvml.risky("MIG mode, NULL", "nvmlDeviceGetMigMode", HANDLE, None, None)
    instance = ctypes.c_void_p()
    for index in (0, 6, 7, 100):
        code = nvml.call("nvmlDeviceGetMigDeviceHandleByIndex", handle, index, ctypes.byref(instance))
        nvml.note(f"MIG device {index}", code)
    nvml.risky("MIG device, NULL", "nvmlDeviceGetMigDeviceHandleByIndex", HANDLE, 0, None)
    code = nvml.call("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle, ctypes.byref(instance))
    nvml.note("card of a card", code)
    room = ctypes.create_string_buffer(4096)
    for name in ("nvmlDeviceGetAttributes_v2", "nvmlDeviceGetGpuFabricInfo"):
        nvml.note(name, nvml.call(name, handle, room))
    level = ctypes.c_int()
    code = nvml.call("nvmlDeviceGetTopologyCommonAncestor", handle, handle, ctypes.byref(level))
    nvml.note("topology with itself", code, level=level.value)
    for capability in (0, 3):
        code = nvml.call("nvmlDeviceGetP2PStatus", handle, handle, capability, ctypes.byref(level))
        nvml.note(f"P2P with itself {capability}", code, status=level.value)
    for link in (0, 63):
        nvml.number(f"NVLink {link}", "nvmlDeviceGetNvLinkState", handle, link)


def events(nvml: Nvml) -> None:
    handle = nvml.start()
    made = ctypes.c_void_p()
    nvml.note("event set", nvml.call("nvmlEventSetCreate", ctypes.byref(made)))
    nvml.risky("event set, NULL", "nvmlEventSetCreate", None)
    types = ctypes.c_uint64
    nvml.note("register XID", nvml.call("nvmlDeviceRegisterEvents", handle, types(XID), made))
    nvml.note("register XID again", nvml.call("nvmlDeviceRegisterEvents", handle, types(XID), made))
    nvml.note("register nothing", nvml.call("nvmlDeviceRegisterEvents", handle, types(0), made))
    nvml.note("register unknown types", nvml.call("nvmlDeviceRegisterEvents", handle, types(1 << 40), made))
    nvml.risky("register for no handle", "nvmlDeviceRegisterEvents", None, types(XID), EVENTS)
    nvml.risky("register for no set", "nvmlDeviceRegisterEvents", HANDLE, types(XID), None)
    for name, layout in (("nvmlEventSetWait", Event1), ("nvmlEventSetWait_v2", Event)):
        for milliseconds in (0, 300):
            event, began = filled(layout), time.monotonic()
            code = nvml.call(name, made, ctypes.byref(event), milliseconds)
            waited = round((time.monotonic() - began) * 10) * 100
            # A busy machine continues a process late.
            waited = milliseconds if milliseconds < waited < milliseconds + 1000 else waited
            nvml.add(f"{name} {milliseconds} ms", {"code": code, "waited": waited})
        nvml.risky(f"{name}, no set", name, None, ctypes.byref(event), 0)
        nvml.risky(f"{name}, NULL", name, EVENTS, None, 0)
    nvml.note("free", nvml.call("nvmlEventSetFree", made))
    nvml.risky("free no set", "nvmlEventSetFree", None)


def wild(nvml: Nvml) -> None:
    """Pass a handle that the library never gave."""
    room = ctypes.create_string_buffer(4096)
    for function in WILD:
        buffer = ctypes.create_string_buffer(256)
        nvml.risky(f"{function} of a wild handle", function, ctypes.byref(room, 1024), buffer, 96)


def forked(nvml: Nvml) -> None:
    """What a process gets whose parent has initialised the library, or had."""

    def counted(label: str) -> None:
        count = ctypes.c_uint32()
        code = nvml.call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        nvml.note(label, code, value=count.value)

    for moment in ("is there", "is over"):
        nvml.call("nvmlInit_v2")
        if moment == "is over":
            nvml.call("nvmlShutdown")
            nvml.call("nvmlShutdown")
        child = os.fork()
        if not child:
            label = f"in a copy of a process whose init {moment}"
            counted(f"{label}: count")
            nvml.note(f"{label}: init", nvml.call("nvmlInit_v2"))
            counted(f"{label}: count again")
            os._exit(0)
        os.waitpid(child, 0)
    nvml.call("nvmlInit_v2")
    counted("in the process itself after all")


GROUPS: dict[str, t.Callable[[Nvml], None]] = {
    "before": before,
    "system": system,
    "finding": finding,
    "properties": properties,
    "memory": memory,
    "processes": processes,
    "health": health,
    "mig and links": mig_and_links,
    "events": events,
    "wild": wild,
    "forked": forked,
}


def answers(path: str) -> dict[str, t.Any]:
    """All answers of a library, in the order of the calls; of a group that ended its process, those before."""
    found: dict[str, t.Any] = {}
    for group in GROUPS:
        for risky in ("", "risky"):
            command = [sys.executable, __file__, path, group, *filter(None, [risky])]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=120)
            for line in done.stdout.splitlines():
                found.update(json.loads(line))
            if done.returncode:
                found[f"{group} {risky}: crashed"] = {"status": done.returncode}
    return found


if __name__ == "__main__":
    if len(sys.argv) > 2:
        GROUPS[sys.argv[2]](Nvml(sys.argv[1], risky=len(sys.argv) > 3))
    else:
        print(json.dumps(answers(sys.argv[1] if len(sys.argv) > 1 else "libnvidia-ml.so.1"), indent=1))
