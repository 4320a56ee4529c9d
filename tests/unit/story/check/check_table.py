# SPDX-License-Identifier: GPL-3.0-or-later
"""The recorded clusters and the documentation of the invariants, from the builder and the table of mutations.

``python tests/unit/story/check/check_table.py --write`` writes both.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[3]
if __name__ == "__main__":
    sys.path[:0] = [str(HERE), str(ROOT / "tests" / "unit")]
    importlib.import_module("conftest")

from ansible_collections.kubegpu.share.plugins.module_utils._check_run import CHECKS  # noqa: E402
from check_kit import SNAPSHOTS  # noqa: E402
from check_mutations import MUTATIONS  # noqa: E402
from check_worlds import WORLDS  # noqa: E402

PAGE = ROOT / "docs" / "invariants.md"
BACKENDS = {
    "common": "Every sharing stack",
    "gpushare": "gpushare, this collection's servers and upstream's",
    "hami": "HAMi",
    "nvidia": "NVIDIA's device plugin",
    "servers": "Servers",
}
INTRODUCTION = """# What verify.yml checks

The module [gpu_allocation_check](reference/gpu_allocation_check_module.rst) compares what the API claims, what kubelet
has given out and what NVML sees. Each check is a function of one moment of a cluster, and looks at nodes of its own
stack.

| level | means |
|---|---|
| FAIL | the contract is broken |
| WARN | the stack allows it, and it is risky |
| UNKNOWN | evidence is missing or can't be read; never taken for a pass |
| PASS | looked at, and right; with `n` = 0 there was nothing to look at |

With two samples FAIL and WARN count only where both have them at the same node, card, pod and container; the others
are counted as transient. What is too much in sum counts only if what both samples share of it is too much.

The last column says what was done to a recorded healthy cluster so that exactly this check found it, and no other had
a FAIL; where the level isn't FAIL it is named. This page is written by `tests/unit/story/check/check_table.py --write`,
and the tests compare it.
"""


def page() -> str:
    lines = [INTRODUCTION]
    for backend, title in BACKENDS.items():
        lines += [
            f"## {title}\n",
            "| | holds where it passes | compares | levels | found when |",
            "|---|---|---|---|---|",
        ]
        for check in CHECKS:
            if check.backend == backend:
                shown = "; ".join(
                    f"{one.what} (`{one.world}`{'' if one.level == 'FAIL' else f', {one.level}'})"
                    for one in MUTATIONS
                    if one.check == check.id
                )
                lines.append(f"| {check.id} | {check.title} | {check.compares} | {check.levels} | {shown} |")
        lines.append("")
    lines += ["## The recorded clusters\n", "| | |", "|---|---|"]
    lines += [f"| `{name}` | {' '.join((build.__doc__ or name).split())} |" for name, build in WORLDS.items()]
    return "\n".join(lines) + "\n"


def recording(name: str) -> str:
    return json.dumps(WORLDS[name](), indent=1, sort_keys=True) + "\n"


def main() -> None:
    if sys.argv[1:] != ["--write"]:
        raise SystemExit("usage: check_table.py --write")
    SNAPSHOTS.mkdir(exist_ok=True)
    for name in WORLDS:
        (SNAPSHOTS / f"{name}.json").write_text(recording(name))
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
