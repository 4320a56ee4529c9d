# SPDX-License-Identifier: GPL-3.0-or-later
"""The module nouveau with the real update-initramfs and the real dracut: their images, and the state after a failure.

Long: each image takes a minute to build. ``test_node_nouveau`` has the same cases with scripted tools.
"""

from __future__ import annotations

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._driver import nouveau
from ansible_collections.kubegpu.share.plugins.module_utils._driver.nouveau_apply import NouveauReconciler, work
from real_initramfs import Machine

pytestmark = pytest.mark.long

both_tools = pytest.mark.parametrize("tool", ["initramfs-tools", "dracut"])


def images(node):
    return NouveauReconciler(True, node).observe()["nouveau"]["images"]


@both_tools
def test_every_kernels_image_is_rebuilt_then_nothing_and_restored(tool, tmp_path):
    kernels = 2 if tool == "initramfs-tools" else 1
    node = Machine(tmp_path / "tree", tool, kernels)
    assert [(image["nouveau"], image["blacklist"]) for image in images(node)] == [(True, False)] * kernels
    before = node.boot()
    result = work(True, False, node)
    # dracut's images are for every host here; they contain /etc/modprobe.d only with the drop-in.
    files = [nouveau.PATH] + [nouveau.DRACUT_PATH] * (tool == "dracut")
    paths = [image["path"] for image in images(node)]
    assert [row["before_header"] for row in result["diff"]] == files + paths
    assert [(image["nouveau"], image["blacklist"], image["newer"]) for image in images(node)] == [
        (True, True, True)
    ] * kernels
    after = node.boot()
    assert set(after) == set(before)
    assert [f"/boot/{name}" for name in after if after[name] != before[name]] == paths

    node.ran.clear()
    assert not work(True, False, node)["changed"]
    assert {line.split()[0] for line in node.ran} == {"uname", "stat", nouveau.LISTERS[tool]}

    assert work(False, False, node)["changed"]
    assert [(image["nouveau"], image["blacklist"]) for image in images(node)] == [(True, False)] * kernels
    assert set(node.boot()) == set(before)
    assert not [path for path in files if node.exists(path)]
    assert not work(False, False, node)["changed"]


# A file and its text that make a tool fail, or report success after a failure.
FAULTS = {
    ("initramfs-tools", "failed: "): ("/etc/initramfs-tools/hooks/zz", "exit 1\n"),
    ("initramfs-tools", "doesn't contain /etc/modprobe.d/blacklist-nouveau.conf"): (
        "/etc/initramfs-tools/hooks/zz",
        f'rm -f "$DESTDIR{nouveau.PATH}"\n',
    ),
    ("initramfs-tools", "can't be read"): ("/etc/initramfs/post-update.d/zz", 'truncate -s 9000 "$2"\n'),
    ("initramfs-tools", "didn't change "): ("/etc/initramfs-tools/update-initramfs.conf", "update_initramfs=no\n"),
    ("dracut", "failed: "): ("/etc/dracut.conf.d/zz.conf", 'compress="head -c 9000"\n'),
    ("dracut", "doesn't contain /etc/modprobe.d/blacklist-nouveau.conf"): (
        "/etc/dracut.conf.d/zz.conf",
        'install_items=""\n',
    ),
}


@both_tools
def test_failed_rebuild_keeps_the_old_image(tool, tmp_path):
    node = Machine(tmp_path / "tree", tool, kernels=1)
    before = node.boot()
    for (_tool, message), (path, text) in [row for row in FAULTS.items() if row[0][0] == tool]:
        old = node.read(path)
        node.put(path, text if "conf" in path else f'#!/bin/sh\n[ "$1" = prereqs ] && exit 0\n{text}', 0o755)
        with pytest.raises(ShareError, match=rf"({message}).*; the old /boot/\S+ is in its place$"):
            work(True, False, node)
        assert node.boot() == before, message
        if old is None:
            node.remove(path)
        else:
            node.put(path, old)
    assert work(True, False, node)["changed"]
    assert [image["blacklist"] for image in images(node)] == [True]
