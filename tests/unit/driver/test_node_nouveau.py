# SPDX-License-Identifier: GPL-3.0-or-later
"""The module nouveau: the file, the images, the kernel module; interruption at every step."""

from __future__ import annotations

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._driver import nouveau, nouveau_plan
from ansible_collections.kubegpu.share.plugins.module_utils._driver.nouveau_apply import observe, work
from ansible_collections.kubegpu.share.plugins.module_utils._host import mounts as mounts_of
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import Done
from node_fakes import FakeSystem, killed_at_every_step

BOTH = "blacklist nouveau\noptions nouveau modeset=0\nblacklist nova\nblacklist nova_drm\nblacklist nova_core\n"
KERNELS = ("6.1.0-18-amd64", "6.1.0-22-amd64")


ROCKY = 'ID="rocky"\nID_LIKE="rhel centos fedora"\n'
SLES = 'ID="sles"\nID_LIKE="suse"\n'
# Tool, os-release, and the path of a kernel's image.
DEBIAN = ("initramfs-tools", "ID=debian\nVERSION_ID=12\n", "/boot/initrd.img-{}")
MACHINES = [
    DEBIAN,
    ("dracut", "ID=debian\n", "/boot/initrd.img-{}"),
    ("dracut", ROCKY, "/boot/initramfs-{}.img"),
    ("dracut", SLES, "/boot/initrd-{}"),
]
PROGRAMS = {"initramfs-tools": ("/usr/sbin/update-initramfs", "/usr/sbin/mkinitramfs"), "dracut": ("/usr/bin/dracut",)}


class Node(FakeSystem):
    """A machine whose initramfs images contain /etc/modprobe.d as it was when they were built.

    ``contents``: inode to the image's modification time, size and text of our file inside (None: not inside).
    """

    def __init__(self, kernels=KERNELS, loaded="", files=None, machine=DEBIAN):
        self.tool, release, self.image = machine
        super().__init__({"/etc/os-release": release, **(files or {})})
        self.files["/proc/sys/kernel/osrelease"] = "6.1.0-22-amd64\n"
        self.files.update(dict.fromkeys(PROGRAMS[self.tool], ""))
        self.clock = 100.0
        self.times = {path: 1.0 for path in self.files}
        self.contents = {}
        self.ends = Done(0, "", "")
        self.links_known = True
        for release in kernels:
            self.files[f"/boot/vmlinuz-{release}"] = self.files[f"/lib/modules/{release}/modules.dep"] = ""
            self.add(self.image.format(release), 50.0, None)
        if loaded:
            self.files["/sys/module/nouveau/refcnt"] = loaded
        self.commands.update(
            {
                "stat -c %.9Y": self._stat,
                "stat -c %i": self._inode,
                "lsinit": self._list,
                "update-initramfs": self._update,
                "dracut": self._dracut,
                "ln -T": self._ln,
                "cp -a": self._cp,
                "mv -f -T": self._mv,
                "chmod": Done(0, "", ""),
                "sync": Done(0, "", ""),
                "modprobe -r": self._modprobe,
                "tee": self._tee,
            }
        )

    def add(self, path, when, inside, size=31457280):
        self.files[path] = str(len(self.contents))
        self.contents[self.files[path]] = (when, size, inside)

    def write(self, path, text, mode=0o644):
        self.clock += 1
        self.times[path] = self.clock
        super().write(path, text, mode)

    def _stat(self, argv):
        known = {path: (self.times[path], 4) for path in self.times if path in self.files}
        known.update({path: self.contents[inode][:2] for path, inode in self.files.items() if inode in self.contents})
        rows = ["{:.9f} {} {}".format(*known[path], path) for path in argv[3:] if path in known]
        return Done(0 if len(rows) == len(argv[3:]) else 1, "\n".join(rows) + "\n", "")

    def _inode(self, argv):
        return Done(0, f"{self.files[argv[3]]} {self.contents[self.files[argv[3]]][1]}\n", "")

    def _list(self, argv):
        assert argv[0] == {"initramfs-tools": "lsinitramfs", "dracut": "lsinitrd"}[self.tool]
        _when, size, inside = self.contents[self.files[argv[1]]]
        if size < 1000:
            return Done(2, "", "premature end of archive")
        names = ["init", "usr/lib/modules/6.1/kernel/drivers/gpu/drm/nouveau/nouveau.ko.xz"]
        names += [nouveau.PATH[1:]] if inside is not None else []
        start = "" if self.tool == "initramfs-tools" else "-rw-r--r--   1 root     root          624 Dec 10  2022 "
        return Done(0, "".join(f"{start}{name}\n" for name in names), "")

    def make(self, path):
        if self.ends.rc == 0:
            self.clock += 1
            inside = self.files.get(nouveau.PATH)
            # As dracut does for images that aren't for one host alone.
            if self.tool == "dracut" and nouveau.PATH not in self.files.get(nouveau.DRACUT_PATH, ""):
                inside = None
            self.add(path, self.clock, inside)
            self.step()
        return self.ends

    def _update(self, argv):
        assert list(argv[:3]) == ["update-initramfs", "-u", "-k"] and self.tool == "initramfs-tools"
        self.step()
        return self.make(self.image.format(argv[3]))

    def _dracut(self, argv):
        assert argv[1] == "--force" and argv[3] in argv[2] and self.tool == "dracut"
        self.step()
        return self.make(argv[2])

    def _ln(self, argv):
        self.step()
        if not self.links_known:
            return Done(1, "", "ln: Operation not permitted")
        self.files[argv[3]] = self.files[argv[2]]
        return Done(0, "", "")

    def _cp(self, argv):
        self.step()
        self.add(argv[4], *self.contents[self.files[argv[3]]][::2])
        return Done(0, "", "")

    def _mv(self, argv):
        self.step()
        self.files[argv[4]] = self.files.pop(argv[3])
        return Done(0, "", "")

    def _modprobe(self, argv):
        self.step()
        if self.files["/sys/module/nouveau/refcnt"].strip() != "0":
            return IN_USE
        for path in [path for path in self.files if path.startswith("/sys/module/nouveau/")]:
            del self.files[path]
        return Done(0, "", "")

    def _tee(self, argv):
        """An unbound console no longer uses the module."""
        self.step()
        self.files[argv[1]] = "0\n" if self.files[argv[1]] == "1\n" else "1\n"
        self.files["/sys/module/nouveau/refcnt"] = "0\n" if self.files[argv[1]] == "0\n" else "1\n"
        return Done(0, "", "")

    def inside(self):
        """Our file in each kernel's image, and other files of /boot."""
        images = {path: self.contents[inode][2] for path, inode in self.files.items() if path.startswith("/boot/init")}
        return images, [path for path in self.files if path.startswith("/boot/.")]

    def end(self):
        files = {path: text for path, text in self.files.items() if not path.startswith("/boot/init")}
        return files, {path: nouveau.blacklisted(text or "") for path, text in self.inside()[0].items()}


def headers(result):
    return [one["before_header"] for one in result["diff"]]


IMAGES = [f"/boot/initrd.img-{release}" for release in KERNELS]


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine[2].split("/")[-1] + "-" + machine[0])
def test_bare_machine_is_changed_once_and_restored(machine):
    node = Node(loaded="0\n", machine=machine)
    files = [nouveau.PATH, nouveau.DRACUT_PATH] if machine[0] == "dracut" else [nouveau.PATH]
    images = [machine[2].format(release) for release in KERNELS]
    assert headers(work(True, True, node)) == [*files, *images, "module nouveau"]
    assert nouveau.PATH not in node.files and node.events == 0
    result = work(True, False, node)
    assert headers(result) == [*files, *images, "module nouveau"] and not result["reboot_required"]
    assert node.files[nouveau.PATH] == BOTH
    assert node.inside() == (dict.fromkeys(images, BOTH), [])
    node.ran.clear()
    assert work(True, False, node) == {"changed": False, "diff": [], "reboot_required": False}
    assert not [line for line in node.ran if not line.startswith(("uname", "stat", "lsinit"))]
    assert headers(work(False, False, node)) == [*files, *images]
    assert node.inside() == (dict.fromkeys(images), [])
    assert not set(files) & set(node.files)
    assert not work(False, False, node)["changed"]


def test_observed_images():
    node = Node()
    observed = observe(node, "debian", KERNELS)
    assert observed["tool"] == "initramfs-tools" and observed["boot_free"] == node.free
    image = {"path": IMAGES[0], "release": KERNELS[0], "bytes": 31457280, "newer": True}
    assert observed["images"][0] == {**image, "nouveau": True, "blacklist": False, "kept": False}
    # Both are unknown for an unreadable image.
    node.add(IMAGES[0], 50.0, None, size=5)
    found = [(one["nouveau"], one["blacklist"]) for one in observe(node, "debian", KERNELS)["images"]]
    assert found == [(None, None), (True, False)]


def test_container_gets_only_the_file():
    for machine in MACHINES:
        node = Node(kernels=(), loaded="0\n", machine=machine)
        result = work(True, False, node)
        assert headers(result) == [nouveau.PATH] and not result["reboot_required"]
        assert not [line for line in node.ran if not line.startswith("uname")]
        assert not work(True, False, node)["changed"]


def test_images_of_rescue_kernels_and_crash_dumps_stay():
    node = Node(machine=MACHINES[2])
    others = ["/boot/initramfs-0-rescue-0123456789abcdef.img", f"/boot/initramfs-{KERNELS[0]}kdump.img"]
    node.files["/boot/vmlinuz-0-rescue-0123456789abcdef"] = ""
    for path in others:
        node.add(path, 50.0, None)
    result = work(True, False, node)
    assert not set(others) & set(headers(result))
    assert [node.inside()[0][path] for path in others] == [None, None]


CONSOLE = {
    "/sys/class/vtconsole/vtcon0/name": "(S) dummy device\n",
    "/sys/class/vtconsole/vtcon0/bind": "0\n",
    "/sys/class/vtconsole/vtcon1/name": "(M) frame buffer device\n",
    "/sys/class/vtconsole/vtcon1/bind": "1\n",
    "/sys/class/graphics/fb0/name": "nouveaudrmfb\n",
    "/sys/class/graphics/fbcon/rotate": "0\n",
}


IN_USE = Done(1, "", "modprobe: FATAL: Module nouveau is in use.")


def test_console_is_unbound_and_the_module_unloaded():
    node = Node(loaded="1\n", files=CONSOLE)
    result = work(True, False, node)
    assert "module nouveau" in headers(result) and not result["reboot_required"]
    assert "/sys/module/nouveau/refcnt" not in node.files
    assert [line for line in node.ran if line.startswith("tee")] == ["tee /sys/class/vtconsole/vtcon1/bind"]


def test_console_is_restored_where_the_module_stays():
    node = Node(loaded="1\n", files=CONSOLE)
    node.commands["modprobe -r"] = IN_USE
    assert work(True, False, node)["reboot_required"]
    assert node.files["/sys/class/vtconsole/vtcon1/bind"] == "1\n"


@pytest.mark.parametrize(
    "more",
    [
        # A display; the console of another card; another module; no console at all.
        {"/proc/77/comm": "Xorg\n", "/proc/77/fd/5": "/dev/dri/card0"},
        {"/sys/class/graphics/fb1/name": "astdrmfb\n"},
        {"/sys/module/nouveau/holders/mxm_wmi": ""},
        {"/sys/class/vtconsole/vtcon1/bind": None},
    ],
)
def test_module_with_another_user_requires_a_reboot(more):
    files = {path: text for path, text in {**CONSOLE, **more}.items() if text is not None}
    node = Node(loaded="2\n", files=files)
    node.links.update({path: files[path] for path in files if "/fd/" in path})
    result = work(True, False, node)
    assert result["reboot_required"] and "module nouveau" not in headers(result)
    assert work(True, False, node)["changed"] is False
    assert not [line for line in node.ran if line.startswith(("tee", "modprobe"))]


NOVA = {"/sys/bus/pci/drivers/NovaCore/bind": "", "/sys/module/nova_core/refcnt": "0\n"}
# nova_drm uses nova_core.
BOTH_OF_NOVA = {
    **NOVA,
    "/sys/module/nova_core/refcnt": "1\n",
    "/sys/module/nova_core/holders/nova_drm": "",
    "/sys/module/nova_drm/refcnt": "0\n",
}


# As the one that draws was called at first.
FIRST_OF_NOVA = {path.replace("nova_drm", "nova"): text for path, text in BOTH_OF_NOVA.items()}


@pytest.mark.parametrize(
    ("files", "modules"),
    [(NOVA, "nova_core"), (BOTH_OF_NOVA, "nova_drm nova_core"), (FIRST_OF_NOVA, "nova nova_core")],
    ids=["core", "both", "first"],
)
def test_nova_is_unloaded_with_what_uses_it(files, modules):
    node = Node(files=files)

    def unload(argv):
        for path in [path for path in node.files if path.startswith("/sys/module/nova")]:
            del node.files[path]
        return Done(0, "", "")

    node.commands["modprobe -r"] = unload
    assert "module nova_core" in headers(work(True, True, node))
    result = work(True, False, node)
    assert "module nova_core" in headers(result) and not result["reboot_required"]
    assert [line for line in node.ran if line.startswith("modprobe")] == [f"modprobe -r {modules}"]
    assert not work(True, False, node)["changed"]


@pytest.mark.parametrize("path", ["/sys/module/nova_core/refcnt", "/sys/module/nova_drm/refcnt"])
def test_nova_in_use_requires_a_reboot(path):
    node = Node(files={**BOTH_OF_NOVA, path: "2\n"})
    result = work(True, False, node)
    assert result["reboot_required"] and "module nova_core" not in headers(result)
    assert not work(True, False, node)["changed"]
    node = Node(files=NOVA)
    node.commands["modprobe -r"] = IN_USE
    assert work(True, False, node)["reboot_required"]


def test_no_reboot_removes_a_nova_that_is_built_in():
    node = Node(files={"/sys/bus/pci/drivers/NovaCore/bind": ""})
    assert observe(node, "debian", KERNELS)["nova"] == {"modules": [], "in_use": False, "built_in": True}
    assert not work(True, False, node)["reboot_required"]
    assert observe(Node(files=NOVA), "debian", KERNELS)["nova"]["built_in"] is False


@pytest.mark.parametrize("name", ["nouveau/nouveau.ko.xz", "nova-core/nova-core.ko.zst", "nova/nova_core.ko"])
def test_images_with_a_driver_of_the_kernels_own(name):
    listed = f"usr/lib/modules/7.0/kernel/drivers/gpu/{name}\ninit\n"
    assert nouveau.content(listed, nouveau.PATH).nouveau
    assert not nouveau.content(listed.replace("nova", "mova").replace("nouveau", "x"), nouveau.PATH).nouveau


def test_module_that_came_into_use_requires_a_reboot():
    node = Node(loaded="0\n")
    node.commands["modprobe -r"] = IN_USE
    assert work(True, False, node)["reboot_required"]


@pytest.mark.parametrize(
    ("text", "after"),
    [
        (
            "# mine\n blacklist\tnouveau # x\noptions nouveau  modeset=0\n"
            "blacklist nova\nblacklist nova_drm\nblacklist nova_core",
            None,
        ),
        ("blacklist nouveau\n", BOTH),
        # As this collection wrote it before it knew nova.
        ("blacklist nouveau\noptions nouveau modeset=0\n", BOTH),
        ("# mine\nblacklist pcspkr", "# mine\nblacklist pcspkr\n" + BOTH),
        ("#blacklist nouveau\n", "#blacklist nouveau\n" + BOTH),
    ],
)
def test_lines_of_the_user_stay(text, after):
    # The blacklist of a package doesn't replace ours.
    node = Node(files={nouveau.PATH: text, "/usr/lib/modprobe.d/nvidia.conf": "blacklist nouveau\n"})
    # The images may still lack a file of the user's.
    assert headers(work(True, False, node)) == ([nouveau.PATH] if after else []) + IMAGES
    assert node.files[nouveau.PATH] == (after or text)
    assert not work(True, False, node)["changed"]


@pytest.mark.parametrize("machine", [DEBIAN, MACHINES[2]], ids=lambda machine: machine[0])
def test_only_images_that_lack_the_file_are_rebuilt(machine):
    node = Node(machine=machine)
    work(True, False, node)
    images = [machine[2].format(release) for release in KERNELS]
    for inside, when in ((None, 10**6), ("", 1.0)):
        node.add(images[0], when, inside)
        assert headers(work(True, False, node)) == images[:1]
        assert node.inside() == (dict.fromkeys(images, BOTH), [])
    # Of an unreadable image only the time is compared.
    node.add(images[0], 10**6, None, size=5)
    assert not work(True, False, node)["changed"]


def bad(node, how):
    """A fault of a tool, and the message."""
    whole = node.make
    if how == "fails":
        node.ends = Done(1, "x\n", "a\nfailed for x with 1.\n")
        return "failed: failed for x with 1."
    if how == "full":
        node.ends = Done(1, "x\n", "zstd: No space left on device\nb\n")
        return "failed: zstd: No space left on device"
    if how == "nothing":
        node.make = lambda path: Done(0, "not updating\n", "")
        return "didn't change .*|created no"
    size, message = {
        "scrap": (7 * 2**20, "has 7340032 bytes where"),
        "broken": (999 * 2**13, "contains no init"),
        "unreadable": (5, "can't be read"),
        "forgets": (31457280, "doesn't contain"),
    }[how]

    def make(path):
        done = whole(path)
        when, _size, inside = node.contents[node.files[path]]
        node.add(path, when, None if how == "forgets" else inside, size)
        return done

    node.make = make
    if how == "broken":
        node.commands["lsinit"] = lambda argv: Done(0, f"{nouveau.PATH}\n", "")
    return message


@pytest.mark.parametrize("how", ["fails", "full", "nothing", "scrap", "broken", "unreadable", "forgets"])
@pytest.mark.parametrize("links_known", [True, False])
@pytest.mark.parametrize("machine", [DEBIAN, MACHINES[2]], ids=lambda machine: machine[0])
def test_failed_rebuild_keeps_the_old_image(machine, links_known, how):
    node = Node(machine=machine)
    node.links_known = links_known
    before = node.inside()
    message = bad(node, how)
    with pytest.raises(ShareError, match=rf"({message}).*; the old {machine[2].format(KERNELS[0])} is in its place$"):
        work(True, False, node)
    assert node.inside() == before


def test_image_without_backup_is_not_rebuilt():
    node = Node()
    node.links_known = False
    node.commands["cp -a"] = Done(1, "", "cp: error writing: No space left on device")
    with pytest.raises(ShareError, match=r"can't be backed up before the rebuild: cp: error writing: No space left"):
        work(True, False, node)
    assert node.inside() == (dict.fromkeys(IMAGES), [])
    assert not [line for line in node.ran if line.startswith("update-initramfs")]


def test_read_only_boot_is_refused_before_anything_changes():
    node = Node()
    node.files["/proc/self/mounts"] = "/dev/a / ext4 rw,relatime 0 0\n/dev/b /boot ext4 ro,relatime 0 0\n"
    with pytest.raises(BadInput, match=r"^/boot is mounted read-only"):
        work(True, False, node)
    assert node.events == 0


@pytest.mark.parametrize(
    ("mounts", "answer"),
    [
        ("", False),
        ("/dev/a / ext4 ro 0 0\n", True),
        ("/dev/a / ext4 ro 0 0\n/dev/b /boot ext4 rw 0 0\n", False),
        ("/dev/a / ext4 rw 0 0\n/dev/b /boot/efi vfat ro 0 0\n", False),
        ("/dev/a / ext4 rw,errors=remount-ro 0 0\n", False),
        ("/dev/b /boot ext4 ro 0 0\n/dev/c /boot ext4 rw 0 0\n", False),
        ("/dev/b /boots ext4 ro 0 0\n", False),
    ],
)
def test_read_only_mount_of_boot(mounts, answer):
    assert mounts_of.read_only(mounts, "/boot") is answer


def test_leftovers_of_a_removed_kernel_are_removed():
    node = Node()
    work(True, False, node)
    left = [nouveau.KEPT + "5.10.0-1-amd64", nouveau.BUILT + KERNELS[0]]
    for path in left:
        node.add(path, 1.0, None)
    assert headers(work(True, False, node)) == left[::-1]
    assert node.inside() == (dict.fromkeys(IMAGES, BOTH), [])


def test_image_of_an_interrupted_run_is_restored_first():
    node = Node()
    node.add(nouveau.KEPT + KERNELS[0], 50.0, None)
    node.add(IMAGES[0], 60.0, None, size=5)
    node.ends = Done(1, "", "still broken")
    with pytest.raises(ShareError, match="still broken"):
        work(True, False, node)
    assert node.contents[node.files[IMAGES[0]]] == (50.0, 31457280, None)


@pytest.mark.parametrize("check", [True, False])
def test_full_boot_is_refused_before_anything_changes(check):
    node = Node()
    node.free = 59 * 2**20
    with pytest.raises(BadInput, match=r"/boot has 59 MiB free .* needs 60 MiB"):
        work(True, check, node)
    assert node.events == 0
    node.free = 60 * 2**20
    assert work(True, check, node)["changed"]


def test_other_family_and_machine_without_any_tool_are_refused():
    node = Node(machine=(DEBIAN[0], "ID=alpine\n", DEBIAN[2]))
    with pytest.raises(BadInput, match="family 'alpine'"):
        work(True, False, node)
    node = Node()
    for path in PROGRAMS["initramfs-tools"]:
        del node.files[path]
    with pytest.raises(BadInput, match="install initramfs-tools or dracut"):
        work(True, False, node)


@pytest.mark.parametrize("text", [BOTH, "# mine\nblacklist pcspkr\n" + BOTH])
def test_absent_removes_our_lines_and_rebuilds_the_images(text):
    node = Node(files={nouveau.PATH: text}, loaded="3\n")
    result = work(False, False, node)
    assert headers(result) == [nouveau.PATH, *IMAGES] and not result["reboot_required"]
    rest = text.replace(BOTH, "")
    assert node.files.get(nouveau.PATH) == (rest or None)
    assert not any(node.end()[1].values())
    assert not work(False, False, node)["changed"]
    assert not work(False, False, Node())["changed"]


@pytest.mark.parametrize(
    ("present", "text"), [(True, ""), (True, "# mine\n"), (False, BOTH), (False, "# mine\n" + BOTH)]
)
@pytest.mark.parametrize("links_known", [True, False])
@pytest.mark.parametrize("machine", [DEBIAN, MACHINES[2]], ids=lambda machine: machine[0])
def test_after_a_kill_at_any_step_the_next_run_reaches_the_same_state(machine, links_known, present, text):
    image = machine[2]

    def fresh():
        node = Node(loaded="0\n", machine=machine)
        node.links_known = links_known
        if text:
            node.files[nouveau.PATH] = text
            node.times[nouveau.PATH] = 1.0
        if not present:
            for release in KERNELS:
                node.add(image.format(release), 50.0, text)
            if machine[0] == "dracut":
                node.files[nouveau.DRACUT_PATH] = nouveau_plan.DRACUT_TEXT
        return node

    whole = fresh()
    work(present, False, whole)
    for moment, node in enumerate(killed_at_every_step(fresh, lambda node: work(present, False, node)), 1):
        # Every kernel has a whole image at any moment.
        assert all(node.contents[node.files[image.format(release)]][1] for release in KERNELS), moment
        work(present, False, node)
        # The images' comments may differ, their blacklist may not.
        assert node.end() == whole.end(), moment
        assert not work(present, False, node)["changed"], moment
