# SPDX-License-Identifier: GPL-3.0-or-later
"""Which nvidia-ml-py is used, where the library is looked for, and what of both may be missing."""

from __future__ import annotations

import sys
import types
import typing as t
from pathlib import Path

import pytest
from ansible_collections.kubegpu.share.plugins.action import nvml_info as action
from ansible_collections.kubegpu.share.plugins.module_utils import _nvml_door as door
from ansible_collections.kubegpu.share.plugins.module_utils._nvml_words import Refused, sentence
from nvml_kit import PYNVML, FakeError, FakePynvml, gpu


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is loaded here isn't what other tests know by that name."""
    monkeypatch.setitem(sys.modules, "pynvml", types.ModuleType("pynvml"))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)


def test_what_the_controller_brought_comes_first(tmp_path: Path) -> None:
    path = tmp_path / "pynvml.py"
    path.write_text("brought = True\n")
    assert door.load(str(path)).brought
    assert list(tmp_path.iterdir()) == [path], "nothing is left in Ansible's folder"


@pytest.mark.parametrize("text", [None, "raise RuntimeError('x')", "def (", "\0"])
def test_the_nodes_own_is_used_where_that_fails(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "pynvml.py"
    if text is not None:
        path.write_text(text)
    own = types.ModuleType("pynvml")
    sys.modules["pynvml"] = own
    found = door.load(str(path))
    # Of a file that can't be read nothing was begun, of another the name was taken and given back.
    assert found is own or found.__file__ == PYNVML


def test_without_both_it_is_said_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(Refused) as caught:
        door.load(None)
    assert sentence(caught.value) == (
        "NVML can't be asked: nvidia-ml-py isn't on this node, and the controller has none to bring; "
        "install nvidia-ml-py with pip on the controller, beside ansible-core"
    )
    path = tmp_path / "x.py"
    path.write_text("import nothing_like_that\n")
    monkeypatch.setattr(door.importlib, "import_module", _refuse)
    with pytest.raises(Refused, match="ModuleNotFoundError"):
        door.load(str(path))


def _refuse(name: str) -> t.Any:
    raise ImportError(name)


def test_the_real_one_loads_from_a_file() -> None:
    assert door.load(PYNVML).nvmlMemory_v2 == 0x2000028


def test_a_library_that_the_linker_doesnt_find_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(door.ctypes, "CDLL", lambda path: loaded.append(path) or path)

    class Module(FakePynvml):
        def nvmlInit(self) -> None:
            if not loaded:
                raise FakeError(12)

    (tmp_path / "b").mkdir()
    (tmp_path / "b" / door.NAME).touch()
    module = Module(gpu())
    library = door.Library(module, [str(tmp_path / "a"), str(tmp_path / "b")])
    assert loaded == [f"{tmp_path}/b/{door.NAME}"] and library.ask("nvmlDeviceGetCount") == 1
    assert module.nvmlLib == loaded[0]
    loaded.clear()
    with pytest.raises(Refused) as caught:
        door.Library(Module(gpu()), [str(tmp_path / "a")])
    assert caught.value.code == 12


def test_a_library_that_is_damaged(tmp_path: Path) -> None:
    (tmp_path / door.NAME).write_text("no library")
    with pytest.raises(Refused, match="NVML's library can't be loaded: "):
        door.Library(FakePynvml(nvmlInit=FakeError(12)), [str(tmp_path)])


def test_other_errors_arent_looked_around(tmp_path: Path) -> None:
    (tmp_path / door.NAME).touch()
    with pytest.raises(Refused) as caught:
        door.Library(FakePynvml(nvmlInit=FakeError(18)), [str(tmp_path)])
    assert caught.value.code == 18


def test_an_older_binding_lacks_things() -> None:
    class Old(FakePynvml):
        nvmlMemory_v2 = None
        NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = None
        c_nvmlGetMemoryLimits_v1_t = None

    card = gpu()
    library = door.Library(Old(card))
    assert set(library.memory(card)) == {"total", "used", "free"}
    for question in (
        lambda: library.field(card, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"),
        lambda: library.limit(card, "/"),
        lambda: library.ask("noSuchFunction"),
    ):
        with pytest.raises(Refused) as caught:
            question()
        assert caught.value.code == 13


def test_an_error_without_a_code() -> None:
    error = FakeError(1)
    error.value = t.cast(int, "x")
    with pytest.raises(Refused) as caught:
        door.Library(FakePynvml(nvmlInit=error))
    assert caught.value.code == -1


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
