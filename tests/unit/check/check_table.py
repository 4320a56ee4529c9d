# SPDX-License-Identifier: GPL-3.0-or-later
"""Write docs/invariants.md from the catalog of checks and the table of mutations.

``python tests/unit/check/check_table.py --write`` writes it.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(HERE), str(ROOT / "tests" / "unit")]
    importlib.import_module("conftest")

from ansible_collections.kubegpu.share.plugins.module_utils._check.registry import CHECKS  # noqa: E402
from ansible_collections.kubegpu.share.plugins.module_utils._check.result import FAIL  # noqa: E402
from check_mutations import MUTATIONS  # noqa: E402
from check_worlds import WORLDS  # noqa: E402

PAGE = ROOT / "docs" / "invariants.md"
BACKENDS = {
    "common": "Every sharing stack",
    "dra": "Claims on this collection's cards (gpushare_allocation: dra)",
    "gpushare": "gpushare, this collection's servers and upstream's",
    "hami": "HAMi",
    "kata": "Pods of Kata",
    "nvidia": "NVIDIA's device plugin",
    "servers": "This collection's gpushare servers",
    "virtual": "Cards for virtual machines",
}
INTRODUCTION = """# What verify.yml checks

The module [gpu_allocation_check](../plugins/modules/gpu_allocation_check.py) compares three sources: the API, kubelet's
allocations, and NVML, as they were at one moment. Each check is for the nodes of its own sharing stack. A finding says
what to do; [troubleshooting](reference/troubleshooting.md#what-verify-reports) has all of them.

| level | means |
|---|---|
| FAIL | the stack's contract is broken |
| WARN | the stack allows it, and it is a risk |
| UNKNOWN | evidence is missing or can't be read; it never counts as PASS |
| PASS | the sources agree; with `n` = 0 there was nothing to compare |

With two samples, a FAIL or WARN counts only if both samples have it for the same node, GPU, pod and container; others
are counted as transient. A sum fails only if its entries that both samples have exceed the limit. Each finding has the
code of its cause (`cause`), for programs.

The last column names the fault that a test injects into a healthy cluster, and the cause that the check then reports;
no other check reports FAIL. The level is FAIL unless it is named. The tests write this page
(`tests/unit/check/check_table.py --write`) and compare it.
"""


def page() -> str:
    lines = [INTRODUCTION]
    for backend, title in BACKENDS.items():
        lines += [
            f"## {title}\n",
            "| | holds where it passes | compares | levels | injected fault |",
            "|---|---|---|---|---|",
        ]
        for check in CHECKS:
            about = check.documentation
            if check.backend == backend:
                faults = [mutation for mutation in MUTATIONS if mutation.check == check.id]
                shown = "; ".join(
                    f"{row.what} (`{row.cause}`, `{row.world}`{'' if row.level == FAIL else f', {row.level}'})"
                    for row in faults
                )
                lines.append(f"| {check.id} | {about.title} | {about.compares} | {about.levels} | {shown} |")
        lines.append("")
    lines += ["## The healthy clusters\n", "| | |", "|---|---|"]
    lines += [f"| `{name}` | {' '.join((build.__doc__ or name).split())} |" for name, build in WORLDS.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    if sys.argv[1:] != ["--write"]:
        raise SystemExit("usage: check_table.py --write")
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
