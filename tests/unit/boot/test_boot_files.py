# SPDX-License-Identifier: GPL-3.0-or-later
"""The files that decide the kernel's arguments, in the forms that people give them; a real shell reads them, too."""

from __future__ import annotations

import subprocess

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._boot import layout, places, words
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from boot_machines import DEBIAN_DEFAULT, OPTIONS, SUSE_DEFAULT, bls_entry, esp_entry, shell

NEW = ["intel_iommu=on", "iommu=pt"]
# Written for these tests, each after a form that was found in public repositories.
DEFAULTS = {
    "debian": DEBIAN_DEFAULT,
    "suse": SUSE_DEFAULT,
    "empty": "",
    "no-assignment": "GRUB_TIMEOUT=0\n",
    "no-last-line-end": 'GRUB_CMDLINE_LINUX="ro"',
    "single-quotes": "GRUB_CMDLINE_LINUX='cryptdevice=/dev/vg/root:root rw'\n",
    "unquoted": "GRUB_CMDLINE_LINUX=net.ifnames=0\nGRUB_CMDLINE_LINUX_DEFAULT=quiet\n",
    "split-by-backslash": 'GRUB_CMDLINE_LINUX="console=tty0 \\\n  console=ttyS0 \\\n  quiet"\nGRUB_TIMEOUT=1\n',
    "split-in-quotes": 'GRUB_CMDLINE_LINUX="console=tty0\n    mitigations=auto"\n',
    "twice": 'GRUB_CMDLINE_LINUX="rhgb quiet"\nGRUB_CMDLINE_LINUX="pci=noaer"\n',
    "appending": 'GRUB_CMDLINE_LINUX="ro"\nGRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX apparmor=1 security=apparmor"\n',
    "export": 'export GRUB_CMDLINE_LINUX="ro"\n',
    "comment-behind": 'GRUB_CMDLINE_LINUX="ro"  # intel_iommu=off broke the NIC\n',
    "commented-out": '#GRUB_CMDLINE_LINUX="intel_iommu=off"\nGRUB_CMDLINE_LINUX=""\n',
    "in-a-condition": 'GRUB_CMDLINE_LINUX="ro"\nif [ -e /nothing ]; then\n    GRUB_CMDLINE_LINUX="other"\nfi\n',
    "in-a-condition-at-the-margin": 'GRUB_CMDLINE_LINUX="ro"\nif [ -e /nothing ]; then\nGRUB_CMDLINE_LINUX="x"\nfi\n',
    "computed": 'GRUB_CMDLINE_LINUX="resume=$(echo "UUID=12 ab" | cut -d\' \' -f1) ro"\n',
    "backticks": "GRUB_CMDLINE_LINUX=`echo ro quiet`\n",
    "two-parts": "GRUB_CMDLINE_LINUX=\"ro \"'quiet'\n",
    "escaped-quotes": 'GRUB_CMDLINE_LINUX="ro dyndbg=\\"file drivers/pci/*.c +p\\""\n',
    "semicolon": 'GRUB_CMDLINE_LINUX="ds=nocloud;s=/dev/disk/by-label/CIDATA"; GRUB_TIMEOUT=1\n',
    "loop": 'GRUB_CMDLINE_LINUX="ro"\nfor one in quiet splash; do\n  case " $GRUB_CMDLINE_LINUX " in\n'
    '    *" $one "*) ;;\n    *) GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX $one" ;;\n  esac\ndone\n',
    "here-document": "cat >/dev/null <<'END'\nit's GRUB_CMDLINE_LINUX=\"no\nEND\nGRUB_CMDLINE_LINUX=\"ro\"\n",
    "windows": 'GRUB_CMDLINE_LINUX="ro"\r\nGRUB_TIMEOUT=1\r\n',
}
# A shell reads what stands there in another way than these files are read: they are refused, or the shell says so.
NOT_READ = {"here-document", "windows"}


@pytest.mark.parametrize("name", sorted(set(DEFAULTS) - NOT_READ))
def test_a_shell_sees_what_was_added_to_default_grub_beside_what_was_there(name: str) -> None:
    text, kind = DEFAULTS[name], places.DefaultGrub()
    linux, normal, chosen = shell(text, {})
    after = kind.add(layout.DEFAULT, text, NEW)
    now_linux, now_normal, now_chosen = shell(after, {})
    assert words.split(now_linux) == [*words.split(linux), *NEW]
    assert (now_normal, now_chosen) == (normal, chosen)
    # Every line stays as it was, but for those of the value.
    assert len(set(text.splitlines()) - set(after.splitlines())) <= 1
    assert shell(kind.remove(layout.DEFAULT, after, NEW), {}) == (linux, normal, chosen)


@pytest.mark.parametrize("name", ["debian", "suse", "single-quotes", "unquoted", "semicolon", "escaped-quotes"])
def test_words_of_default_grub_are_those_of_the_shell(name: str) -> None:
    linux, normal, _chosen = shell(DEFAULTS[name], {})
    found = places.DefaultGrub().read(layout.DEFAULT, DEFAULTS[name])
    assert sorted(found) == sorted([*words.split(linux), *words.split(normal)])


@pytest.mark.parametrize("name", ["commented-out", "comment-behind"])
def test_a_comment_is_no_argument(name: str) -> None:
    assert "intel_iommu=off" not in places.DefaultGrub().read(layout.DEFAULT, DEFAULTS[name])


def test_what_a_shell_reads_in_another_way_is_refused_or_shown_by_the_shell() -> None:
    with pytest.raises(BadInput, match=r"^/etc/default/grub: a quote that line 2 opens isn't closed$"):
        places.DefaultGrub().add(layout.DEFAULT, DEFAULTS["here-document"], NEW)
    with pytest.raises(BadInput, match="line 1 opens"):
        places.DefaultGrub().read(layout.DEFAULT, 'GRUB_CMDLINE_LINUX="ro\n')
    with pytest.raises(subprocess.CalledProcessError):
        shell('GRUB_CMDLINE_LINUX="ro\n', {})


def test_a_drop_in_adds_to_what_the_other_files_say() -> None:
    text = places.DropIn().add(layout.DROP_IN, "", NEW)
    name = layout.DROP_IN.rpartition("/")[2]
    linux, normal, _chosen = shell(SUSE_DEFAULT, {"50-cloudimg-settings.cfg": 'GRUB_CMDLINE_LINUX="ro"\n', name: text})
    assert words.split(linux) == ["ro", *NEW]
    assert normal.startswith("splash=silent")
    assert places.DropIn().add(layout.DROP_IN, text, []) == ""


ENTRIES = {
    "rocky": bls_entry("5.14.0-611.el9.x86_64", OPTIONS),
    "debian": esp_entry("6.12.117"),
    "no-options": "title Arch\nlinux /vmlinuz-linux\n",
    "no-last-line-end": "title Arch\nlinux /vmlinuz-linux\noptions root=PARTUUID=1 rw",
    "twice": "linux /vmlinuz\noptions root=PARTUUID=1 rw\noptions quiet\n# options intel_iommu=off\n",
    "init": "linux /vmlinuz\noptions root=PARTUUID=1 -- single\noptions quiet\n",
    "windows": "title x\r\nlinux /vmlinuz\r\noptions root=1\r\n",
    "tabs": "linux\t/vmlinuz\noptions\troot=1  rw \n",
}


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_an_entry_has_what_was_added_and_every_other_line(name: str) -> None:
    text, kind = ENTRIES[name], places.LoaderEntry()
    before = words.of_kernel(kind.read("x.conf", text))
    after = kind.add("x.conf", text, NEW)
    found = words.of_kernel(kind.read("x.conf", after))
    assert [word for word in found if word not in NEW] == before
    assert set(NEW) <= set(found)
    assert len(set(text.splitlines()) - set(after.splitlines())) <= 1
    assert words.split(kind.remove("x.conf", after, NEW).rpartition("options")[0]) == words.split(
        text.rpartition("options")[0] or text
    )


def test_the_files_of_commands_have_comments_and_several_lines() -> None:
    kind = places.Cmdline()
    text = "# of this machine\nroot=UUID=2f5a ro\nquiet\n\n"
    after = kind.add(layout.CMDLINE, text, NEW)
    assert after == "# of this machine\nroot=UUID=2f5a ro\nquiet intel_iommu=on iommu=pt\n\n"
    assert kind.remove(layout.CMDLINE, after, NEW) == text
    assert kind.read(layout.CMDLINE, "# intel_iommu=off\nro") == ["ro"]
    assert kind.add(layout.CMDLINE, "", NEW) == "intel_iommu=on iommu=pt\n"


def test_kernelstub_keeps_the_order_and_the_rest() -> None:
    kind = places.Kernelstub()
    text = '{"default": {"kernel_options": ["quiet"]},\n  "user": {"esp_path": "/efi", "kernel_options": ["b", "a"]}}\n'
    after = kind.add(layout.KERNELSTUB, text, NEW)
    assert after == text.replace('["b", "a"]', '["b", "a", "intel_iommu=on", "iommu=pt"]')
    assert kind.remove(layout.KERNELSTUB, after, NEW) == text
    for bad in ("[]", '{"user": {"kernel_options": "quiet splash"}}', '{"user": 1}', "{"):
        with pytest.raises(BadInput, match=layout.KERNELSTUB):
            kind.read(layout.KERNELSTUB, bad)


def test_rescue_kernels_and_other_systems_are_left_alone() -> None:
    own, other = "0" * 31 + "1", "0" * 31 + "2"
    names = [f"{own}-6.1.conf", f"{other}-6.2.conf", f"{own}-0-rescue.conf", "custom.conf", "windows.conf"]
    files = {f"/efi/loader/entries/{name}": "linux /vmlinuz\noptions ro\n" for name in names}
    files["/efi/loader/entries/windows.conf"] = "efi /EFI/Microsoft/Boot/bootmgfw.efi\n"
    found = [path.rpartition("/")[2] for path in layout.own_entries(files, own)]
    assert found == [f"{own}-6.1.conf", "custom.conf"]
    # An image that was copied to other machines has the entries of the one that it was made on.
    assert len(layout.own_entries(files, "f" * 32)) == 3
