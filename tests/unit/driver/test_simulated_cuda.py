# SPDX-License-Identifier: GPL-3.0-or-later
"""The simulated libcuda: cards, contexts and memory, for programs and for a library that limits them."""

from __future__ import annotations

import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._e2e import cases
from ansible_collections.kubegpu.share.plugins.modules import gpu_acceptance
from simulated_driver import FIRST, VERSION, Driver

OUT_OF_MEMORY = 2
# With what a program ends that is refused memory, so that gpu_acceptance takes nothing else for a refusal.
REFUSED = cases.OUT_OF_MEMORY
_CALLS = """\
cuda = ctypes.CDLL("libcuda.so.1")

def allocate(mib):
    address = ctypes.c_uint64()
    code = cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(mib << 20))
    return code or address

def context(device):
    made = ctypes.c_void_p()
    return cuda.cuDevicePrimaryCtxRetain(ctypes.byref(made), device) or cuda.cuCtxSetCurrent(made)

def free():
    left, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert not cuda.cuMemGetInfo_v2(ctypes.byref(left), ctypes.byref(total))
    return left.value >> 20
"""
# A library between programs and libcuda, as HAMi's: dlsym gives its own function, which grants at most 1000 MiB.
BETWEEN = """\
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

static int (*next_alloc)(uint64_t *, size_t);

static int limited_alloc(uint64_t *address, size_t bytes)
{
    if (bytes > 1000ul << 20)
        return 2;
    return next_alloc(address, bytes);
}

void *dlsym(void *library, const char *symbol)
{
    void *(*next)(void *, const char *) = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
    if (!next)
        next = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    void *found = next(library, symbol);
    if (!strcmp(symbol, "cuMemAlloc_v2")) {
        memcpy(&next_alloc, &found, sizeof found);
        return (void *)limited_alloc;
    }
    return found;
}
"""


@pytest.fixture
def driver(driver_folder: Path, tmp_path: Path) -> Driver:
    made = Driver(driver_folder, tmp_path / "cards").describe()
    Path(f"{made.cards}.limits").touch()
    return made


def program(driver: Driver, script: str) -> Any:
    return driver.query(_CALLS + textwrap.dedent(script))


def test_memory_is_held_until_it_is_freed_and_nvml_shows_who_holds_it(driver: Driver) -> None:
    found = program(
        driver,
        """
        def seen():
            rows = n.nvmlDeviceGetComputeRunningProcesses(first)
            return [[row.pid == os.getpid(), row.usedGpuMemory >> 20] for row in rows]

        early = cuda.cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(1))
        count, total = ctypes.c_int(), ctypes.c_size_t()
        name, uuid = ctypes.create_string_buffer(96), (ctypes.c_ubyte * 16)()
        asked = cuda.cuInit(0), cuda.cuDeviceGetCount(ctypes.byref(count)), cuda.cuDeviceGetName(name, 96, 0)
        asked += cuda.cuDeviceGetUuid_v2(uuid, 0), cuda.cuDeviceTotalMem_v2(ctypes.byref(total), 0)
        without = allocate(1)
        made = context(0)
        at_first = free()
        held = allocate(2000)
        with_it, processes = free(), seen()
        too_much = allocate(at_first)
        freed = cuda.cuMemFree_v2(held), free()
        card = [early, list(asked), count.value, name.value.decode(), bytes(uuid).hex(), total.value >> 20]
        taken = [without, made, at_first - with_it, processes]
        report(card + taken + [too_much, freed[0], at_first - freed[1], cuda.cuMemFree_v2(held), seen()])
        """,
    )
    uuid = FIRST.removeprefix("GPU-").replace("-", "")
    assert found[:6] == [3, [0] * 5, 2, "Simulated NVIDIA GPU 16GiB", uuid, 16384]
    # A context takes memory of its own, and without one nothing is allocated.
    assert found[6:10] == [201, 0, 2000, [[True, 2064]]]
    assert found[10:] == [OUT_OF_MEMORY, 0, 0, 1, [[True, 64]]]


def test_nothing_computes_and_who_asks_for_samples_is_told_so(driver: Driver) -> None:
    """A library that limits computing asks in a thread of each program."""
    asked = driver.query("report(code(n.nvmlDeviceGetProcessUtilization, first, 0))")
    assert asked == 6  # not found


def test_a_function_is_found_by_its_name_without_a_version(driver: Driver) -> None:
    found = program(
        driver,
        """
        at, status = ctypes.c_void_p(), ctypes.c_int()
        function = ctypes.cast(cuda.cuMemAlloc_v2, ctypes.c_void_p).value

        def ask(name):
            code = cuda.cuGetProcAddress_v2(name, ctypes.byref(at), 12000, ctypes.c_uint64(0), ctypes.byref(status))
            return [code, at.value == function, bool(at.value), status.value]

        report([ask(b"cuMemAlloc"), ask(b"cuMemAlloc_v2"), ask(b"cuMem")])
        """,
    )
    assert found == [[0, True, True, 0], [0, True, True, 0], [500, False, False, 1]]


def test_a_program_asks_libcuda_and_so_a_library_between_the_two(driver: Driver, tmp_path: Path) -> None:
    (tmp_path / "between.c").write_text(BETWEEN)
    library = str(tmp_path / "between.so")
    command = ["gcc", "-shared", "-fPIC", "-o", library, str(tmp_path / "between.c"), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    smi = str(driver.folder / "nvidia-smi")
    results = {}
    for mib, limited in ((900, True), (2000, True), (2000, False), (17000, False)):
        preload = ["env", f"LD_PRELOAD={library}"] if limited else []
        program = [smi, "simulated-allocation", str(mib), "--cuda", "--seconds", "1"]
        results[mib, limited] = driver.run([*preload, *program])
    said = {case: (done.returncode, done.stdout.strip()) for case, done in results.items()}
    assert said == {
        (900, True): (0, "holding 900 MiB"),
        (2000, True): (REFUSED, "CUDA_ERROR_OUT_OF_MEMORY"),
        (2000, False): (0, "holding 2000 MiB"),
        (17000, False): (REFUSED, "CUDA_ERROR_OUT_OF_MEMORY"),
    }


def test_the_program_in_the_examples_says_whether_cuda_refused_it(driver: Driver, tmp_path: Path) -> None:
    [command] = [
        one["kubegpu.share.gpu_acceptance"]["allocate_command"]
        for one in yaml.safe_load(gpu_acceptance.EXAMPLES)
        if "allocate_command" in one.get("kubegpu.share.gpu_acceptance", {})
    ]
    less = [word.replace("64 << 30", "1 << 30") for word in command]
    assert less != command
    assert (driver.run(less).returncode, driver.run(command).returncode) == (0, REFUSED)
    none = Driver(driver.folder, tmp_path / "none")
    none.cards.write_text(f"driver {VERSION}\ncuda 13000\n")
    assert none.run(command).returncode == 1
