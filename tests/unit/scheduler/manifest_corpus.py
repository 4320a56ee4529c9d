# SPDX-License-Identifier: GPL-3.0-or-later
"""kube-scheduler's manifests as kubeadm, installers and people leave them, and such as can't be edited."""

from __future__ import annotations

import json
from pathlib import Path

import manifests
import yaml

FOLDER = Path(__file__).parent / "corpus"
NEWEST = 37


def _texts(suffix: str) -> dict[str, str]:
    return {path.stem: path.read_text() for path in sorted(FOLDER.glob(f"*.{suffix}"))}


def _variants() -> dict[str, str]:
    """Return manifests that git would change, and other layouts of the files."""
    plain, comments, wide = manifests.kubeadm(36), _texts("manifest")["comments"], _texts("manifest")["json-wide"]
    pod = yaml.safe_load(plain)
    no_mounts = plain.replace(plain[plain.index("    volumeMounts:") : plain.index("  hostNetwork:")], "")
    return {
        "full": manifests.FULL,
        "with-config": manifests.WITH_CONFIG,
        "config-in-two-words": manifests.WITH_CONFIG.replace("- --config=", "- --config\n    - "),
        "carriage-returns": plain.replace("\n", "\r\n"),
        "comments-with-carriage-returns": comments.replace("\n", "\r\n"),
        "no-newline-at-the-end": plain.rstrip("\n"),
        "many-newlines-at-the-end": plain + "\n\n\n",
        "trailing-blanks": "\n".join(line + "  " * (number % 3) for number, line in enumerate(plain.split("\n"))),
        "tabs-before-comments": plain.replace("leader-elect=true\n", "leader-elect=true\t# tab\n")
        .replace("name: kubeconfig\n", "name: kubeconfig \t \n")
        .replace("spec:\n", "spec:\t#\ttabs\n"),
        "three-dashes": f"---\n{plain}",
        "comment-above-three-dashes": f"# ours\n\n--- # here\n{comments}",
        "directive": f"%YAML 1.1\n---\n{plain}...\n",
        "nothing-after-three-dashes": f"{plain}---\n# nothing more\n",
        "byte-order-mark": f"\ufeff{plain}",
        "json-wide-with-newline": wide + "\n",
        "json-with-tabs": json.dumps(pod, indent="\t") + "\n",
        "json-compact": json.dumps(pod, separators=(",", ":")),
        "json-one-line": json.dumps(pod),
        "lists-in-brackets": yaml.safe_dump(pod, default_flow_style=None, width=60),
        "four-blanks": yaml.safe_dump(pod, indent=4),
        "no-mounts": no_mounts,
        "empty-lists": no_mounts.replace("  hostNetwork", "    volumeMounts: [ ]\n  hostNetwork"),
        "no-labels-then-annotations": plain.replace(
            "  namespace: kube-system\n", "  namespace: kube-system\n  annotations: {}\n"
        ),
        "annotations": plain.replace("metadata:\n", "metadata:\n  annotations:\n    example.org/owner: platform\n"),
        "annotations-in-one-line": plain.replace("metadata:\n", "metadata:\n  annotations: {a: b} # one\n"),
        "host-aliases-last": plain.replace("status: {}\n", "  hostAliases: [{ip: 127.0.0.1, hostnames: [a, b]}]\n"),
        "a-mapping-of-one": plain.replace("status: {}\n", ""),
        "words-in-quotes": plain.replace("    - --leader-elect=true", '    - "--leader-elect=true"  # quoted'),
    }


def editable() -> dict[str, str]:
    return {
        **{f"kubeadm-1.{minor}": manifests.kubeadm(minor) for minor in range(18, NEWEST + 1)},
        **_texts("manifest"),
        **_variants(),
    }


def refused() -> dict[str, tuple[str, str]]:
    """Return manifests and the message that refuses them."""
    plain, texts = manifests.kubeadm(36), _texts("refused")
    last = plain.count("\n") + 1
    half = plain[: plain.index("status:")].replace("hostPath:", "hostPath: {")
    mount = "    volumeMounts:\n    - {mountPath: /etc/kubernetes/kubegpu-share/, name: x}\n"

    def changed(old: str, new: str) -> str:
        assert old in plain
        return plain.replace(old, new)

    return {
        "shell": (texts["shell"], "line 11, starts kube-scheduler by /bin/sh"),
        "shared-mounts": (texts["shared-mounts"], "line 15, is written in a way .*volumeMounts is an alias"),
        "documents": (f"{plain}---\n{plain}", f"line {last}, can't be parsed .*several documents"),
        "tab": (changed("  hostNetwork", "\thostNetwork"), r"line 6\d, can't be parsed .*'\\t'"),
        "twice": (plain + "spec: {}\n", f"line {last}, can't be parsed .the key spec is there twice"),
        "cut-short": (half, r"line \d+, can't be parsed"),
        "empty": ("", "line 1, can't be parsed .it isn't a mapping"),
        "text": ("hello\n", "line 1, can't be parsed .it isn't a mapping"),
        "list": ("apiVersion: v1\nkind: List\nitems: []\n", "line 2, is a List, not a Pod"),
        "no-kind": ("# x\nspec: {}\n", "line 2, is a mapping without a kind, not a Pod"),
        "no-scheduler": (
            plain.replace("    name: kube-scheduler\n", "    name: s\n")
            .replace("    - kube-scheduler\n", "    - s\n")
            .replace("/kube-scheduler:", "/s:"),
            "line 10, has no container kube-scheduler",
        ),
        "two-schedulers": (
            changed("  hostNetwork", "  - {name: kube-scheduler, image: x}\n  hostNetwork"),
            "line 10, has 2 containers kube-scheduler",
        ),
        "no-list": (changed("  volumes:\n", "  volumes: 1\n  x:\n"), r"line \d+, has a .* that isn't a list"),
        "no-mappings": (changed("  volumes:\n", "  volumes:\n  - 7\n"), "line 68, has .* an item that isn't a mapping"),
        "no-words": (changed("--leader-elect=true\n", "[a]\n"), "line 17, has a .* an item that isn't a string"),
        "folder-taken": (
            changed("    volumeMounts:\n", mount),
            r"line \d+, mounts x at /etc/kubernetes/kubegpu-share, the path of our folder",
        ),
        "merged": (
            changed("metadata:\n", "metadata:\n  <<: {annotations: {a: b}}\n"),
            "line 4, is written in a way .*merge key",
        ),
    }
