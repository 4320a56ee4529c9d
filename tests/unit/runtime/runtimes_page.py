# SPDX-License-Identifier: GPL-3.0-or-later
"""Write docs/runtimes.md: every configuration of the corpus, what ours makes of it, and NVIDIA's tool beside it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

# It makes the collection importable.
import conftest  # noqa: F401, E402  # pylint: disable=unused-import
import corpus_containerd  # noqa: E402
import corpus_others  # noqa: E402
import real_containerd  # noqa: E402
import real_dockerd  # noqa: E402
from corpus_containerd import Outcome  # noqa: E402

PAGE = Path(__file__).resolve().parents[3] / "docs" / "runtimes.md"
HEAD = """\
# Who is right: `container_runtime` and `nvidia-ctk`

Every row is a configuration as people have them (`tests/unit/runtime/corpus/`). Each was given to this collection and
to NVIDIA's `nvidia-ctk runtime configure --set-as-default --cdi.enabled` ({ctk}); then the real container runtime was
asked what the files amount to. Right is a result in which

* nvidia is the default runtime, runs NVIDIA's binary, and has the cgroup driver that runc (or the default runtime) has,
* every other setting is what it was, and so is every comment,
* the CRI plugin (containerd), the daemon (Docker) and the monitor conmon (CRI-O) load.

Of ours it is checked beside that no byte outside its own keys changes, that a second run changes nothing, and that
`state: absent` gives the original bytes back. `refused` means: one sentence says why, and no file was touched.

Judges: containerd {containerds} (`containerd config dump`); two releases of dockerd
(`dockerd --validate`); for CRI-O, which can't be had as a program here, its documented rules of merging.

This page is made by `.venv/bin/python tests/unit/runtime/runtimes_page.py`; a test compares it.
"""


def missing() -> str:
    """Why the page can't be made on this machine; nothing where it can."""
    lacking = [release for release in real_containerd.RELEASES if not corpus_containerd.there(release)]
    if lacking:
        return f"no containerd {', '.join(lacking)} on this machine"
    if len(real_dockerd.binaries()) < 2:
        return "no dockerd on this machine"
    return "" if corpus_containerd.nvidia_ctk() else "no nvidia-ctk on this machine"


def page() -> str:
    text = HEAD.format(
        ctk=re.findall(r"toolkit-([0-9.]+)-", corpus_containerd.nvidia_ctk())[0],
        containerds=", ".join(real_containerd.RELEASES),
    )
    found = corpus_containerd.results()
    columns = ["cases", *(f"{who}: {what}" for who in ("ours", "nvidia-ctk") for what in ("right", "refused", "wrong"))]
    text += f"\n## Counted\n\n| | {' | '.join(columns)} |\n|{'---|' * 8}\n"
    text += _counted("containerd", [(cell.ours, cell.theirs) for cell in found.values()])
    for engine, title in (("docker", "Docker"), ("crio", "CRI-O")):
        text += _counted(title, [(cell.ours, cell.theirs) for cell in corpus_others.results(engine).values()])
    both = [(cell.ours, cell.theirs) for cell in found.values() if cell.theirs]
    mild = sum(bool(their.wrong) and all("comment" in one for one in their.wrong) for _our, their in both)
    braver = sum(bool(our.refused) and not their.refused and not their.wrong for our, their in both)
    text += f"\nOf nvidia-ctk's wrong results in containerd {mild} lose nothing but comments. In {braver} cases ours\n"
    text += "refuses where nvidia-ctk's result is right: files that containerd itself couldn't read before, that\n"
    text += "can't be edited key by key, or of a node that the GPU Operator configures.\n"
    text += "\n## containerd\n\n| configuration | containerd | ours | nvidia-ctk |\n|---|---|---|---|\n"
    text += "".join(f"{line}\n" for line in _containerd_lines())
    for engine, title in (("docker", "Docker"), ("crio", "CRI-O")):
        text += f"\n## {title}\n\n| configuration | ours | nvidia-ctk |\n|---|---|---|\n"
        for name, cell in sorted(corpus_others.results(engine).items()):
            text += f"| **{name}**: {_cell(cell.row.what)} | {_words(cell.ours)} | {_words(cell.theirs)} |\n"
    return text


def _counted(title: str, cells: list[tuple[Outcome, Outcome | None]]) -> str:
    def count(outcomes: list[Outcome]) -> str:
        wrong = sum(bool(one.wrong) for one in outcomes)
        refused = sum(bool(one.refused) and not one.wrong for one in outcomes)
        return f"{len(outcomes) - wrong - refused} | {refused} | {wrong}"

    ours, theirs = [one for one, _other in cells], [other for _one, other in cells if other]
    return f"| {title} | {len(cells)} | {count(ours)} | {count(theirs)} |\n"


def _containerd_lines() -> Iterator[str]:
    results = corpus_containerd.results()
    for row in corpus_containerd.rows():
        groups: dict[tuple[str, str], list[str]] = {}
        for release in row.releases:
            cell = results[row.name, release]
            groups.setdefault((_words(cell.ours), _words(cell.theirs)), []).append(release)
        for number, ((ours, theirs), releases) in enumerate(groups.items()):
            name = f"**{row.name}**: {_cell(row.what)}" if not number else ""
            yield f"| {name} | {' '.join(releases)} | {ours} | {theirs} |"


def _words(outcome: Outcome | None) -> str:
    if outcome is None:
        return ""
    refused = f"refused: {_cell(_short(outcome.refused))}" if outcome.refused else ""
    # A daemon's own words differ from release to release.
    faults = [one.partition(": ")[0] if "doesn't start" in one else one for one in outcome.wrong]
    wrong = f"**wrong**: {_cell('; '.join(faults))}" if faults else ""
    return "; ".join(one for one in (refused, wrong) if one) or "right"


def _short(words: str) -> str:
    words = re.sub(r"^(unable to \w+ \w+ for runtime \w+: |runtime_\w+: )", "", words)
    words = words.partition(": ")[0] if "can't read its own" in words else words
    return words if len(words) <= 110 else words[:110].rpartition(" ")[0] + " …"


def _cell(words: str) -> str:
    return (
        words.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ").replace("<", "&lt;").replace("\ufffd", "?")
    )


def main() -> int:
    if reason := missing():
        print(f"{PAGE.name} is left as it is: {reason}", file=sys.stderr)
        return 1
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
