# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Adapter to NVML through nvidia-ml-py (pynvml).

A faulty driver can hang or crash either: only the worker process of ``worker`` uses this file.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import sys
import types
import typing as t

from .return_codes import BROKEN, FUNCTION_NOT_FOUND, LIBRARY_NOT_FOUND, NOT_FOUND, NOT_SUPPORTED, NvmlRefused

NAME = "libnvidia-ml.so.1"
# Directories that the linker doesn't search: the GPU operator's driver container, GKE's, WSL's.
FOLDERS = (
    "/run/nvidia/driver/usr/lib64",
    "/run/nvidia/driver/usr/lib/x86_64-linux-gnu",
    "/run/nvidia/driver/usr/lib/aarch64-linux-gnu",
    "/home/kubernetes/bin/nvidia/lib64",
    "/usr/lib/wsl/lib",
    "/usr/local/nvidia/lib64",
)
INVALID_ARGUMENT, VERSION_MISMATCH = 2, 25
# The member of nvmlValue_t by nvmlValueType_t, of unsigned whole numbers.
MEMBERS = {1: "uiVal", 2: "ulVal", 3: "ullVal"}


def load(binding: str | None) -> t.Any:
    """Import nvidia-ml-py: the file that was copied from the controller, or else the node's own.

    :raises NvmlRefused: neither can be imported.
    """
    sys.dont_write_bytecode = True
    reason = ""
    if binding:
        try:
            return _of_file(binding)
        except Exception as error:
            # Third-party code may raise anything; the node's own may work.
            reason = f" ({type(error).__name__}: {error})"
    try:
        return importlib.import_module("pynvml")
    except Exception as error:
        copied = f"the controller's copy can't be imported{reason}" if binding else "the controller has none to copy"
        raise NvmlRefused(
            BROKEN,
            f"NVML can't be called: nvidia-ml-py isn't on this node, and {copied}. Install nvidia-ml-py with pip on "
            "the controller, in the environment of ansible-core.",
        ) from error


def _of_file(path: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("pynvml", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} isn't a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules["pynvml"] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules["pynvml"]
        raise
    return module


class Library:
    """The initialised library.

    :param module: nvidia-ml-py.
    :param folders: searched if the linker doesn't find the library.
    :raises NvmlRefused: it isn't found, or can't be initialised.
    """

    def __init__(self, module: t.Any, folders: t.Sequence[str] = FOLDERS) -> None:
        # nvidia-ml-py has no types; only this class uses it.
        self._module = module
        try:
            self.call("nvmlInit")
        except NvmlRefused as refused:
            path = next((path for path in (f"{one}/{NAME}" for one in folders) if os.path.exists(path)), None)
            if refused.code != LIBRARY_NOT_FOUND or path is None:
                raise
            try:
                self._module.nvmlLib = ctypes.CDLL(path)
            except OSError as error:
                raise NvmlRefused(BROKEN, f"NVML's library can't be loaded: {error}") from error
            self.call("nvmlInit")

    def call(self, function: str, *arguments: t.Any) -> t.Any:
        try:
            return getattr(self._module, function)(*arguments)
        except self._module.NVMLError as error:
            raise NvmlRefused(_code(error)) from error
        except UnicodeDecodeError as error:
            return error.object.decode("utf-8", "replace")
        except AttributeError as error:
            # The node's own binding may be too old for it.
            raise NvmlRefused(FUNCTION_NOT_FOUND) from error
        except Exception as error:
            # For example MemoryError, if NVML reports an implausible number of entries.
            raise NvmlRefused(BROKEN, f"nvidia-ml-py failed with {type(error).__name__}") from error

    def memory(self, handle: t.Any) -> t.Mapping[str, t.Any]:
        try:
            version = getattr(self._module, "nvmlMemory_v2", None)
            if version is None:
                raise NvmlRefused(FUNCTION_NOT_FOUND)
            answer, keys = self.call("nvmlDeviceGetMemoryInfo", handle, version), ("total", "used", "free", "reserved")
        except NvmlRefused as refused:
            if refused.code not in (INVALID_ARGUMENT, NOT_SUPPORTED, FUNCTION_NOT_FOUND, VERSION_MISMATCH, BROKEN):
                raise
            answer, keys = self.call("nvmlDeviceGetMemoryInfo", handle), ("total", "used", "free", "")
        return {key: getattr(answer, key, None) for key in keys if key}

    def field(self, handle: t.Any, name: str) -> t.Any:
        number = getattr(self._module, name, None)
        if number is None:
            raise NvmlRefused(FUNCTION_NOT_FOUND)
        answers = self.call("nvmlDeviceGetFieldValues", handle, [number])
        try:
            code, kind, value = int(answers[0].nvmlReturn), int(answers[0].valueType), answers[0].value
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            raise NvmlRefused(BROKEN, "the field has no value") from error
        if code or kind not in MEMBERS:
            # A driver that doesn't know the field reports an invalid argument.
            raise NvmlRefused(NOT_SUPPORTED if code in (0, INVALID_ARGUMENT) else code)
        return getattr(value, MEMBERS[kind], None)

    def fabric(self, handle: t.Any) -> tuple[t.Any, t.Any]:
        make = getattr(self._module, "c_nvmlGpuFabricInfo_t", None)
        if make is None:
            raise NvmlRefused(FUNCTION_NOT_FOUND)
        answer = make()
        self.call("nvmlDeviceGetGpuFabricInfo", handle, ctypes.byref(answer))
        return answer.state, answer.status

    def limit(self, handle: t.Any, folder: str) -> tuple[t.Any, t.Any, t.Any]:
        make = getattr(self._module, "c_nvmlGetMemoryLimits_v1_t", None)
        if make is None:
            raise NvmlRefused(FUNCTION_NOT_FOUND)
        answer = make(nameSpace=os.fsencode(folder))
        try:
            self.call("nvmlDeviceGetMemoryLimits_v1", handle, answer)
        except NvmlRefused as refused:
            if not os.path.isdir(folder):
                raise NvmlRefused(NOT_FOUND) from refused
            raise
        return answer.softLimit, answer.hardLimit, answer.currentUsed

    def has(self, function: str) -> bool:
        # ctypes looks the function up in the library.
        return hasattr(self._module, function) and hasattr(self._module.nvmlLib, function)


def _code(error: t.Any) -> int:
    try:
        return int(error.value)
    except (AttributeError, TypeError, ValueError):
        return BROKEN
