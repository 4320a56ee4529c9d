# SPDX-License-Identifier: GPL-3.0-or-later
"""What NVIDIA's library answered on machines with an H100 and an H200, beside the lab's stand-in and the modules.

The recordings are those of tests/gpu/test_gpu_library.py; UUIDs, serial numbers and paths were replaced. To record
another card or driver, run that test with $KUBEGPU_GPU_RECORD.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nvml_calls
import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._driver.nvidia_smi import MESSAGES
from ansible_collections.kubegpu.share.plugins.module_utils._nvml.binding import CODES
from nvml_difference import description, differences
from simulated_driver import compiled

RECORDINGS = sorted((Path(__file__).parent / "recordings").glob("*.json"))


def recorded(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


@pytest.mark.parametrize("path", RECORDINGS, ids=[path.stem for path in RECORDINGS])
def test_the_stand_in_answers_as_the_library_did(path: Path, tmp_path: Path) -> None:
    real = recorded(path)
    folder = compiled(tmp_path, real["nvmlSystemGetDriverVersion"]["text"])
    cards = tmp_path / "cards"
    cards.write_text(description(real))
    done = subprocess.run(
        [sys.executable, nvml_calls.__file__, folder / "libnvidia-ml.so.1"],
        capture_output=True, text=True, check=True, timeout=120, env={**os.environ, "KUBEGPU_SIM_CARDS": str(cards)},
    )  # fmt: skip
    stand_in = json.loads(done.stdout)
    assert list(stand_in) == list(real)
    assert differences(real, stand_in) == {}


@pytest.mark.parametrize("path", RECORDINGS, ids=[path.stem for path in RECORDINGS])
def test_texts_of_return_codes_are_the_librarys(path: Path) -> None:
    words = recorded(path)["words"]
    assert {code: one.text for code, one in CODES.items()} == {code: words[str(code)] for code in CODES}
    # nvidia-smi prints the same.
    for part, code in MESSAGES:
        if part in (text.lower() for text in words.values()):
            assert words[str(code)].lower() == part
