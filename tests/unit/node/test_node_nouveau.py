# SPDX-License-Identifier: GPL-3.0-or-later
"""nouveau: the file, the images, the module; interrupted anywhere."""

from __future__ import annotations

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils import _nouveau
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput, NotInEffect, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._nouveau_apply import work
from ansible_collections.kubegpu.share.plugins.module_utils._system import Done
from node_fakes import FakeSystem, Killed

BOTH = "blacklist nouveau\noptions nouveau modeset=0\n"
KERNELS = ("6.1.0-18-amd64", "6.1.0-22-amd64")


class Node(FakeSystem):
    """A Debian machine whose initramfs images hold what /etc/modprobe.d held when they were made."""

    def __init__(self, kernels=KERNELS, loaded="", files=None):
        super().__init__({"/etc/os-release": "ID=debian\nVERSION_ID=12\n", **(files or {})})
        self.files["/proc/sys/kernel/osrelease"] = "6.1.0-22-amd64\n"
        self.clock = 100.0
        self.times = {path: 1.0 for path in self.files}
        self.images = {}
        for release in kernels:
            self.files[f"/boot/vmlinuz-{release}"] = self.files[f"/boot/initrd.img-{release}"] = ""
            self.images[f"/boot/initrd.img-{release}"] = (50.0, "")
        if loaded:
            self.files["/sys/module/nouveau/refcnt"] = loaded
        self.commands.update({"stat -c": self._stat, "update-initramfs": self._update, "modprobe -r": self._modprobe})

    def write(self, path, text, mode=0o644):
        self.clock += 1
        self.times[path] = self.clock
        super().write(path, text, mode)

    def _stat(self, argv):
        rows = [f"{self.times[path]:.9f} 4 {path}" for path in argv[3:] if path in self.files and path in self.times]
        rows += [f"{self.images[path][0]:.9f} 31457280 {path}" for path in argv[3:] if path in self.images]
        return Done(0 if len(rows) == len(argv[3:]) else 1, "\n".join(rows) + "\n", "")

    def _update(self, argv):
        assert list(argv) == ["update-initramfs", "-u", "-k", "all"]
        for path in self.images:
            self.step()
            self.clock += 1
            self.images[path] = (self.clock, self.files.get(_nouveau.PATH, ""))
        return Done(0, "", "")

    def _modprobe(self, argv):
        self.step()
        self.files.pop("/sys/module/nouveau/refcnt", None)
        return Done(0, "", "")

    def end(self):
        return dict(self.files), {path: text for path, (_when, text) in self.images.items()}


def headers(result):
    return [one["before_header"] for one in result["diff"]]


IMAGES = [f"/boot/initrd.img-{release}" for release in KERNELS]


def test_bare_machine_then_nothing():
    node = Node(loaded="0\n")
    assert headers(work(True, True, node)) == [_nouveau.PATH, *IMAGES, "module nouveau"]
    assert _nouveau.PATH not in node.files and node.events == 0
    result = work(True, False, node)
    assert headers(result) == [_nouveau.PATH, *IMAGES, "module nouveau"] and not result["reboot_required"]
    assert node.files[_nouveau.PATH] == BOTH
    assert set(node.end()[1].values()) == {BOTH}
    node.ran.clear()
    assert work(True, False, node) == {"changed": False, "diff": [], "reboot_required": False}
    assert not [line for line in node.ran if not line.startswith(("uname", "stat"))]


def test_container_has_only_the_file():
    node = Node(kernels=(), loaded="0\n")
    result = work(True, False, node)
    assert headers(result) == [_nouveau.PATH] and not result["reboot_required"]
    assert not [line for line in node.ran if not line.startswith("uname")]


def test_module_in_use_needs_a_reboot_and_is_left_alone():
    node = Node(loaded="3\n")
    result = work(True, False, node)
    assert result["reboot_required"] and "module nouveau" not in headers(result)
    assert work(True, False, node)["changed"] is False
    assert not [line for line in node.ran if line.startswith("modprobe")]


def test_module_that_came_into_use_is_left_for_the_reboot():
    node = Node(loaded="0\n")
    node.commands["modprobe -r"] = Done(1, "", "modprobe: FATAL: Module nouveau is in use.")
    assert work(True, False, node)["reboot_required"]


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("# mine\n blacklist\tnouveau # x\noptions nouveau  modeset=0", None),
        ("blacklist nouveau\n", BOTH),
        ("# mine\nblacklist pcspkr", "# mine\nblacklist pcspkr\n" + BOTH),
        ("#blacklist nouveau\n", "#blacklist nouveau\n" + BOTH),
    ],
)
def test_what_the_user_wrote_stays(text, after):
    node = Node(files={_nouveau.PATH: text})
    assert work(True, False, node)["changed"] is (after is not None)
    assert node.files[_nouveau.PATH] == (after or text)


def test_packaged_blacklist_is_seen_and_ours_written_beside_it():
    node = Node(files={"/usr/lib/modprobe.d/nvidia.conf": "blacklist nouveau\n"})
    assert work(True, False, node)["changed"]
    assert node.files[_nouveau.PATH] == BOTH


def test_image_older_than_the_file_is_made_anew():
    node = Node()
    work(True, False, node)
    node.images[IMAGES[0]] = (1.0, "")
    assert headers(work(True, False, node)) == IMAGES[:1]


def test_image_that_the_tool_leaves_alone_is_not_called_done():
    node = Node()
    node.commands["update-initramfs"] = Done(0, "", "")
    with pytest.raises(NotInEffect, match=IMAGES[0]):
        work(True, False, node)


def test_failing_tool_in_its_own_words():
    node = Node()
    node.commands["update-initramfs"] = Done(1, "x\n", "a\nupdate-initramfs: failed for x with 1.\n")
    with pytest.raises(ShareError, match=r"^update-initramfs -u -k all failed: update-initramfs: failed for"):
        work(True, False, node)


@pytest.mark.parametrize("check", [True, False])
def test_full_boot_is_refused_before_anything_changes(check):
    node = Node()
    node.free = 59 * 2**20
    with pytest.raises(BadInput, match=r"/boot has 59 MiB free .* needs 60 MiB"):
        work(True, check, node)
    assert node.events == 0
    node.free = 60 * 2**20
    assert work(True, check, node)["changed"]


def test_other_family_is_refused():
    node = Node()
    node.files["/etc/os-release"] = 'ID="rocky"\nID_LIKE="rhel centos fedora"\n'
    with pytest.raises(BadInput, match="family 'redhat'"):
        work(True, False, node)


@pytest.mark.parametrize("text", [BOTH, "# mine\nblacklist pcspkr\n" + BOTH])
def test_absent_takes_out_our_lines_and_makes_the_images(text):
    node = Node(files={_nouveau.PATH: text}, loaded="3\n")
    result = work(False, False, node)
    assert headers(result) == [_nouveau.PATH, *IMAGES] and not result["reboot_required"]
    rest = text.replace(BOTH, "")
    assert node.files.get(_nouveau.PATH) == (rest or None)
    assert all("blacklist nouveau" not in image for image in node.end()[1].values())
    assert not work(False, False, node)["changed"]
    assert not work(False, False, Node())["changed"]


@pytest.mark.parametrize(
    ("present", "text"), [(True, ""), (True, "# mine\n"), (False, BOTH), (False, "# mine\n" + BOTH)]
)
def test_killed_at_any_step_the_next_run_ends_in_the_same_state(present, text):
    def fresh():
        return Node(files={_nouveau.PATH: text} if text else {}, loaded="0\n")

    whole = fresh()
    work(present, False, whole)
    for moment in range(1, whole.events + 1):
        node = fresh()
        node.kill_at = moment
        with pytest.raises(Killed):
            work(present, False, node)
        node.kill_at = 0
        work(present, False, node)
        assert node.files == whole.files, moment
        # Comments in an image are nobody's concern: what counts is whether it keeps nouveau away.
        assert {_nouveau.blacklisted(image) for image in node.end()[1].values()} == {present}, moment
        assert not work(present, False, node)["changed"], moment
