# SPDX-License-Identifier: GPL-3.0-or-later
"""A fake nvidia-ml-py with arbitrary values and errors, a fake node, and the real library over the lab's driver."""

from __future__ import annotations

import ctypes
import time
import typing as t
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import pynvml

# The lab's driver is compiled by its own tests' helpers.
import simulated_driver
from ansible_collections.kubegpu.share.plugins.module_utils._contracts import card_exclusion as exclusion
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._nvml import facts as nvml
from ansible_collections.kubegpu.share.plugins.module_utils._nvml.binding import Library, load
from ansible_collections.kubegpu.share.plugins.module_utils._nvml.facts import Host, Request, Send, read
from ansible_collections.kubegpu.share.plugins.module_utils._nvml.host import NodeHost
from ansible_collections.kubegpu.share.plugins.module_utils._nvml.processes import ContainerCgroup
from ansible_collections.kubegpu.share.plugins.module_utils._nvml.worker import ForkedWorker

GIB = 1 << 30
NA = (1 << 64) - 1
PYNVML = str(pynvml.__file__)
NO_INSTANCE = 0xFFFFFFFF

compiled = simulated_driver.compiled
Driver = simulated_driver.Driver


class FakeError(Exception):
    """Has its code in ``value``, as nvidia-ml-py's error."""

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value


def gpu_uuid(number: int) -> str:
    return f"GPU-{number:08x}-1111-2222-3333-444444444444"


def process(pid: t.Any, mib: t.Any, gi: int = NO_INSTANCE, ci: int = NO_INSTANCE) -> t.Any:
    used = mib << 20 if isinstance(mib, int) and mib < 1 << 40 else mib
    return SimpleNamespace(pid=pid, usedGpuMemory=used, gpuInstanceId=gi, computeInstanceId=ci)


def memory(total: int = 16 * GIB, used: int = GIB, reserved: int = GIB // 4) -> t.Callable[..., t.Any]:
    """Version 1 includes the reserve in ``used``."""
    free = max(0, total - used - reserved)

    def answer(version: int | None = None) -> t.Any:
        if version:
            return SimpleNamespace(total=total, reserved=reserved, used=used, free=free)
        return SimpleNamespace(total=total, used=used + reserved, free=free)

    return answer


def gpu(index: int = 0, **changes: t.Any) -> JsonObject:
    """A healthy card by function: an exception is raised, a callable is called, other values are returned."""
    return {
        "nvmlDeviceGetUUID": gpu_uuid(index),
        "nvmlDeviceGetName": "NVIDIA Something",
        "nvmlDeviceGetMinorNumber": index,
        "nvmlDeviceGetIndex": index,
        "nvmlDeviceGetPciInfo_v3": SimpleNamespace(busId=f"00000000:{0x3B + index:02X}:00.0"),
        "nvmlDeviceGetMemoryInfo": memory(),
        "nvmlDeviceGetMigMode": FakeError(3),
        "nvmlDeviceGetComputeMode": 0,
        "nvmlDeviceGetTotalEccErrors": lambda error, counter: 10 * error + counter,
        "nvmlDeviceGetRemappedRows": (1, 2, 0, 1),
        "nvmlDeviceGetRetiredPagesPendingStatus": 0,
        "nvmlDeviceGetFieldValues": lambda _ids: [
            SimpleNamespace(nvmlReturn=0, valueType=1, value=SimpleNamespace(uiVal=0))
        ],
        "nvmlDeviceGetComputeRunningProcesses_v3": [],
        "nvmlDeviceGetGraphicsRunningProcesses_v3": [],
        "nvmlDeviceGetMPSComputeRunningProcesses_v3": [],
        "nvmlDeviceGetMemoryLimits_v1": FakeError(3),
        "nvmlDeviceGetGpuFabricInfo": FakeError(3),
        **changes,
    }


class FakePynvml:
    """nvidia-ml-py over fake cards; a card that is an exception is refused by index."""

    NVMLError = FakeError
    nvmlMemory_v2 = 0x2000028
    NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230
    c_nvmlGetMemoryLimits_v1_t = SimpleNamespace
    c_nvmlGpuFabricInfo_t = pynvml.c_nvmlGpuFabricInfo_t

    def __init__(self, *cards: t.Any, **system: t.Any) -> None:
        self._system = {
            "nvmlInit": None,
            "nvmlDeviceGetCount": len(cards),
            "nvmlDeviceGetHandleByIndex": lambda index: self._give(cards[index]),
            "nvmlSystemGetDriverVersion": "615.71.09",
            "nvmlSystemGetNVMLVersion": "13.615.71.09",
            "nvmlSystemGetCudaDriverVersion_v2": 13040,
            **system,
        }
        self.nvmlLib = SimpleNamespace(nvmlDeviceGetMemoryLimits_v1=None)

    def __getattr__(self, name: str) -> t.Any:
        if name in self._system:
            return lambda *arguments: self._give(self._system[name], *arguments)
        if name.startswith("nvmlDevice"):
            return lambda handle, *arguments: self._of_card(handle, name, *arguments)
        raise AttributeError(name)

    def _of_card(self, handle: t.Any, name: str, *arguments: t.Any) -> t.Any:
        return self._give(handle.get(name, FakeError(13)), *arguments)

    @staticmethod
    def _give(answer: t.Any, *arguments: t.Any) -> t.Any:
        if isinstance(answer, BaseException):
            raise answer
        return answer(*arguments) if callable(answer) else answer


class FakeHost:
    """A node whose processes are all in one pod."""

    def __init__(self, groups: Sequence[ContainerCgroup] = (), xids: Mapping[str, Sequence[int]] | None = None) -> None:
        self._groups, self._xids = groups, xids

    def now(self) -> int:
        return 1000

    def process(self, pid: int, listed: int) -> JsonObject:
        found = {"name": "python3", "start_time": str(pid), "cgroup": f"/kubepods/pod{pid}", "where": "pod"}
        return {**found, "pod_uid": "u", "container_id": "", "runtime": "", "static": False}

    def has_libvgpu(self, pid: int, start_time: str) -> bool | None:
        return pid % 2 == 0

    def container_cgroups(self) -> Sequence[ContainerCgroup]:
        return self._groups

    def xids(self) -> Mapping[str, Sequence[int]] | None:
        return self._xids


class LocalWorker:
    """Runs in this process: nothing hangs."""

    def __init__(self, module: t.Any, host: Host) -> None:
        self._module, self._host = module, host

    def run(self, request: Request, stall: float, seconds: float) -> nvml.WorkerResult:
        messages: list[JsonObject] = []
        read(lambda: Library(self._module), self._host, request, messages.append)
        return nvml.WorkerResult(messages, nvml.END)


def asked(
    *cards: t.Any, host: Host | None = None, exclude: exclusion.Exclusion = exclusion.NOTHING, **system: t.Any
) -> JsonObject:
    """Return the facts of these cards."""
    return nvml.facts(LocalWorker(FakePynvml(*cards, **system), host or FakeHost()), time.monotonic, 30, exclude)


def only(*cards: t.Any, **more: t.Any) -> JsonObject:
    """Return the first card; the facts must have no problem."""
    found = asked(*cards, **more)
    assert (found["available"], found["problem"]) == (True, "")
    first: JsonObject = found["cards"][0]
    return first


def really(driver: simulated_driver.Driver, timeout: int = 30, host: Host | None = None) -> JsonObject:
    """Return the facts of the real nvidia-ml-py over the lab's driver, in a child process."""

    def start() -> Library:
        module = load(PYNVML)
        # By its path: this machine may have a driver of its own.
        module.nvmlLib = ctypes.CDLL(str(driver.folder / "libnvidia-ml.so.1"))
        return Library(module)

    def work(request: Request, send: Send) -> None:
        read(start, host or NodeHost(), request, send)

    return nvml.facts(ForkedWorker(work), time.monotonic, timeout)
