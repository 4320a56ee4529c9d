# SPDX-License-Identifier: GPL-3.0-or-later
"""The nvidia-ml-py that is used, the search for NVML's library, and missing functions of both."""

from __future__ import annotations

import sys
import types
import typing as t
from pathlib import Path
from unittest.mock import Mock

import pytest
from ansible_collections.kubegpu.share.plugins.action import nvml_info as action
from ansible_collections.kubegpu.share.plugins.module_utils._nvml import binding as binding_module
from ansible_collections.kubegpu.share.plugins.module_utils._nvml.binding import NvmlRefused, describe
from nvml_kit import PYNVML, FakeError, FakePynvml, gpu


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the module of that name for other tests."""
    monkeypatch.setitem(sys.modules, "pynvml", types.ModuleType("pynvml"))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)


def test_the_controllers_copy_is_preferred(tmp_path: Path) -> None:
    path = tmp_path / "pynvml.py"
    path.write_text("brought = True\n")
    assert binding_module.load(str(path)).brought
    assert list(tmp_path.iterdir()) == [path], "no compiled file remains in Ansible's directory"
    assert binding_module.load(PYNVML).nvmlMemory_v2 == 0x2000028


@pytest.mark.parametrize("text", [None, "raise RuntimeError('x')", "def (", "\0"])
def test_the_nodes_copy_is_the_fallback(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "pynvml.py"
    if text is not None:
        path.write_text(text)
    own = types.ModuleType("pynvml")
    sys.modules["pynvml"] = own
    found = binding_module.load(str(path))
    # The name in sys.modules is restored after a failed import.
    assert found is own or found.__file__ == PYNVML


def test_without_both_copies_the_error_has_a_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NvmlRefused) as caught:
        binding_module.load(None)
    assert describe(caught.value) == (
        "NVML can't be called: nvidia-ml-py isn't on this node, and the controller has none to copy. "
        "Install nvidia-ml-py with pip on the controller, in the environment of ansible-core."
    )
    path = tmp_path / "x.py"
    path.write_text("import nothing_like_that\n")
    monkeypatch.setattr(binding_module.importlib, "import_module", Mock(side_effect=ImportError))
    with pytest.raises(NvmlRefused, match="ModuleNotFoundError"):
        binding_module.load(str(path))


def test_nvmls_library_is_searched_in_known_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(binding_module.ctypes, "CDLL", lambda path: loaded.append(path) or path)

    class Module(FakePynvml):
        def nvmlInit(self) -> None:
            if not loaded:
                raise FakeError(12)

    (tmp_path / "b").mkdir()
    (tmp_path / "b" / binding_module.NAME).touch()
    module = Module(gpu())
    library = binding_module.Library(module, [str(tmp_path / "a"), str(tmp_path / "b")])
    assert loaded == [f"{tmp_path}/b/{binding_module.NAME}"] and library.call("nvmlDeviceGetCount") == 1
    assert module.nvmlLib == loaded[0]
    loaded.clear()
    with pytest.raises(NvmlRefused) as caught:
        binding_module.Library(Module(gpu()), [str(tmp_path / "a")])
    assert caught.value.code == 12


def test_a_damaged_library(tmp_path: Path) -> None:
    (tmp_path / binding_module.NAME).write_text("no library")
    with pytest.raises(NvmlRefused, match="NVML's library can't be loaded: "):
        binding_module.Library(FakePynvml(nvmlInit=FakeError(12)), [str(tmp_path)])


@pytest.mark.parametrize(("value", "code"), [(18, 18), ("x", -1)])
def test_other_errors_are_raised(tmp_path: Path, value: t.Any, code: int) -> None:
    (tmp_path / binding_module.NAME).touch()
    with pytest.raises(NvmlRefused) as caught:
        binding_module.Library(FakePynvml(nvmlInit=FakeError(value)), [str(tmp_path)])
    assert caught.value.code == code


def test_an_older_binding() -> None:
    class Old(FakePynvml):
        nvmlMemory_v2 = None
        NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = None
        c_nvmlGetMemoryLimits_v1_t = None

    card = gpu()
    library = binding_module.Library(Old(card))
    assert set(library.memory(card)) == {"total", "used", "free"}
    for call in (
        lambda: library.field(card, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"),
        lambda: library.limit(card, "/"),
        lambda: library.call("noSuchFunction"),
    ):
        with pytest.raises(NvmlRefused) as caught:
            call()
        assert caught.value.code == 13


def test_the_controllers_binding_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pynvml")
    assert action.binding() == PYNVML
    # Another project's package of the same name isn't one file.
    (tmp_path / "pynvml").mkdir()
    (tmp_path / "pynvml" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert action.binding() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert action.binding() is None
