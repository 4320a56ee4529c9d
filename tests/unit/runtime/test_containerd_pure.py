# SPDX-License-Identifier: GPL-3.0-or-later
"""Containerd's configuration on a node, parsed without a TOML library."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import tomllib

import pytest
import real_containerd
from ansible_collections.kubegpu.share.plugins.module_utils._core.secrets import mask_words
from ansible_collections.kubegpu.share.plugins.module_utils._runtime import containerd as c
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.containerd_apply import (
    cri_state,
    losses,
    unmet_requirements,
)
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.containerd_files import loaded
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.engine import error_lines, explain
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.properties import injects_cdi
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.types import Loss
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("text", "version", "release"),
    [
        ("containerd github.com/containerd/containerd/v2 v2.2.9 \n", "2.2.9", (2, 2)),
        ("containerd github.com/containerd/containerd 1.6.20~ds1 1.6.20~ds1-1+deb12u3", "1.6.20~ds1", (1, 6)),
        ("containerd containerd.io 1.7.27 05044ec0a9a75232cad458027ca83437aae3f4da", "1.7.27", (1, 7)),
        ("containerd github.com/containerd/containerd/v2 v2.3.0-rc.1 abc", "2.3.0-rc.1", (2, 3)),
        ("", "", (0, 0)),
    ],
)
def test_version(text: str, version: str, release: tuple[int, int]) -> None:
    assert c.version_of(text) == version
    assert c.release(version) == release


@pytest.mark.parametrize(
    ("text", "imports"),
    [
        ("version = 2\nimports = [\"/a/*.toml\", 'b.toml']\n", ["/a/*.toml", "b.toml"]),
        ('imports = [\n  "/a", # "/not"\n  # "/neither"\n  "/b[1].toml",\n]\n', ["/a", "/b[1].toml"]),
        ('[plugins]\nimports = ["/a"]\n', []),
        ("imports = []\n", []),
        ("# imports = ['/a']\n", []),
    ],
)
def test_imports(text: str, imports: list[str]) -> None:
    assert c.imports_of(text) == imports


def test_imports_are_resolved_as_containerd_does() -> None:
    names = {"/etc/containerd/conf.d": ["b.toml", "a.toml", "c.txt"]}
    paths = c.resolve("/etc/containerd/config.toml", ["conf.d/*.toml", "../x.toml"], lambda f: names.get(f, []))
    assert paths == ["/etc/containerd/conf.d/a.toml", "/etc/containerd/conf.d/b.toml", "/etc/x.toml"]


def test_load_order_is_breadth_first_and_each_file_once() -> None:
    texts = dict.fromkeys(("/c/a.toml", "/c/z.toml", "/c/other.toml"), "")
    texts |= {"/c/m.toml": 'imports = ["b.toml", "a.toml"]\n', "/c/b.toml": 'imports = ["z.toml", "m.toml"]\n'}
    assert loaded("/c/m.toml", texts).order == ["/c/m.toml", "/c/b.toml", "/c/a.toml", "/c/z.toml"]


SECRETS = r"""[plugins."io.containerd.grpc.v1.cri".registry.configs."r".auth]
  username = "u"
  password = "p\"w"
  auth = 'YWJj'
[x]
  identitytoken = ""
  y = { auth = "in line", other = "kept" }
  z = [{ token = "t1", more = ["kept"] }, { token = ["t2", "t3"] }]
[plugins."io.containerd.grpc.v1.cri".registry.configs."https://me:t4@example".header]
  Authorization = [ # a list
    "Bearer t5", 'Bearer t6',
  ]
  "X-Auth-Token" = ["t7"]
[plugins."io.containerd.grpc.v1.cri".registry.mirrors."docker.io"]
  endpoint = ["https://mirror:5000", "https://user:t8@mirror", 'http://t9:t10@host@mirror/path@x'] # not https://u:t11@m
  # password = "t12" isn't used any more, and neither is auth = 't13'
[proxy]
  HTTPS_PROXY = "user:t14@proxy:3128"
  password = QQQ
t15 "quoted"
t16QQQ
  note = qqq
password = "kept"qqq
"a"."secret" = 't17'
a.b.api_key = 't18'
""".replace("QQQ", '"""').replace("qqq", "'''")


def test_credentials_are_masked_and_restored() -> None:
    masked = c.mask(SECRETS)
    assert "YWJj" not in masked and "in line" not in masked and 'p\\"w' not in masked
    assert re.findall(r"\bt[0-9]+", masked) == []
    assert '"u"' in masked and masked.count('"kept"') == SECRETS.count('"kept"') and 'identitytoken = ""' in masked
    assert '"https://mirror:5000"' in masked and "@host@" not in masked and "@mirror/path@x'" in masked
    tomllib.loads(masked)
    assert c.unmask(masked, SECRETS) == SECRETS
    assert c.unmask("# ours\n" + masked, SECRETS) == "# ours\n" + SECRETS


@pytest.mark.parametrize("before", ['x = "', "x = [1,", "x = [", "y = {", "y = { a = [", "]", "[grpc", '"""'])
def test_credentials_of_a_broken_file_are_masked(before: str) -> None:
    text = f"{before}\n[r]\nplain = 1\npassword = 's3cr3t'\nendpoint = ['https://u:s3cr3t@m']\n"
    assert "s3cr3t" not in c.mask(text) and c.unmask(c.mask(text), text) == text


@pytest.mark.parametrize(
    ("words", "masked"),
    [
        ('parse "https://me:pw@mirror/x": bad', 'parse "https://kubegpu-share-masked-1@mirror/x": bad'),
        ("level=error auth=pw msg=x", "level=error auth=kubegpu-share-masked-1 msg=x"),
        ('{"password":"p w"}', '{"password":"kubegpu-share-masked-1"}'),
        ("Authorization: Bearer pw, x", "Authorization: Bearer kubegpu-share-masked-1, x"),
        ("unexpected token: EOF (line 3)", "unexpected token: EOF (line 3)"),
    ],
)
def test_credentials_of_a_message_are_masked(words: str, masked: str) -> None:
    assert mask_words(words) == masked


PIECES = st.sampled_from(
    ["password", "auth", "name", " = ", "=", '"', "'", '"""', "\n", "[", "]", "{", "}", ", ", "#", "https://", "u:p@h"]
)


@settings(max_examples=300)
@given(st.lists(PIECES, max_size=14).map("".join))
def test_masking_is_reversible_and_keeps_the_form(text: str) -> None:
    masked = c.mask(text)
    assert c.unmask(masked, text) == text
    assert c.mask(masked) == masked
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return
    assert list(tomllib.loads(masked)) == [key if "@" not in key else c.mask(f'"{key}"')[1:-1] for key in tree]


@pytest.mark.parametrize("release", real_containerd.PARAMETERS)
def test_a_real_dump_is_parsed_as_toml(release: str) -> None:
    binary = real_containerd.of(release)
    text = subprocess.run([binary, "config", "default"], capture_output=True, text=True, check=True).stdout
    flat: dict[tuple[str, ...], object] = {}

    def walk(path: tuple[str, ...], tree: object) -> None:
        if isinstance(tree, list) and tree and isinstance(tree[0], dict):
            tree = {str(number): row for number, row in enumerate(tree)}
        if isinstance(tree, dict) and (tree or not path):
            for key, value in tree.items():
                walk((*path, key), value)
        else:
            flat[path] = tree

    walk((), tomllib.loads(text))
    # Fractions are left as text; nothing is decided on them.
    ours = {path: value for path, value in c.read_dump(text).items() if not isinstance(flat.get(path), float)}
    assert ours == {path: value for path, value in flat.items() if not isinstance(value, float)}


def dump(default: str = "runc", extra: str = "", systemd: str = "true") -> str:
    base = "plugins.'io.containerd.cri.v1.runtime'"
    return f"""version = 3
disabled_plugins = []
[{base}]
  enable_cdi = true
  [{base}.containerd]
    default_runtime_name = '{default}'
    [{base}.containerd.runtimes]
      [{base}.containerd.runtimes.runc]
        runtime_type = 'io.containerd.runc.v2'
        snapshotter = ''
        [{base}.containerd.runtimes.runc.options]
          BinaryName = ''
          SystemdCgroup = {systemd}
{extra}
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = 'pause:3'
"""


NVIDIA = """      [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.nvidia]
        runtime_type = 'io.containerd.runc.v2'
        [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.nvidia.options]
          BinaryName = '/b'
          SystemdCgroup = true
"""
WANTED = c.Options(present=True, binary="/b")


def test_a_dump_without_unmet_requirements() -> None:
    assert unmet_requirements(c.effective(dump("nvidia", NVIDIA)), WANTED) == []
    assert unmet_requirements(c.effective(dump("runc", NVIDIA)), c.Options(True, default=False, binary="/b")) == []
    assert unmet_requirements(c.effective(dump()), c.Options(present=False)) == []


def test_a_default_that_is_no_longer_requested_is_unmet() -> None:
    seen, wanted = c.effective(dump("nvidia", NVIDIA)), c.Options(True, default=False, binary="/b")
    assert unmet_requirements(seen, wanted, "runc") == ["default_runtime_name is 'nvidia' and not 'runc'"]
    assert unmet_requirements(seen, wanted, "nvidia") == [] and unmet_requirements(seen, wanted) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (dump(), "default_runtime_name is 'runc'"),
        (dump("nvidia", NVIDIA.replace("/b", "/other")), "options.BinaryName is '/other'"),
        (dump("nvidia", NVIDIA.replace("SystemdCgroup = true", "")), "options.SystemdCgroup is None"),
        (
            dump("nvidia", NVIDIA, systemd="false").replace("BinaryName = ''", "ShimCgroup = '/x'"),
            "options.SystemdCgroup is True and not False",
        ),
        (dump("nvidia", NVIDIA).replace("enable_cdi = true", "enable_cdi = false"), "enable_cdi is false"),
        (dump("nvidia", NVIDIA).replace("disabled_plugins = []", "disabled_plugins = ['cri']"), 'holds "cri"'),
        ("version = 3\n", "the CRI plugin isn't"),
    ],
)
def test_unmet_requirements_of_a_dump(text: str, words: str) -> None:
    assert any(words in unmet_requirement for unmet_requirement in unmet_requirements(c.effective(text), WANTED))


def test_losses_are_settings_of_the_user_only() -> None:
    before, after = c.effective(dump()), c.effective(dump("nvidia", NVIDIA))
    assert losses(before, after, WANTED, {}) == []
    lost = c.effective(dump("nvidia", NVIDIA, systemd="false").replace("'pause:3'", "'other:1'"))
    images, runtime = "io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime"
    found = losses(before, lost, WANTED, {})
    assert found == [
        Loss(("plugins", images, "pinned_images", "sandbox"), '"pause:3"', '"other:1"'),
        Loss(("plugins", runtime, "containerd", "runtimes", "runc", "options", "SystemdCgroup"), "true", None),
    ]
    words = explain("containerd", [*found, Loss(("a", "password"), '"s3cr3t"', None)], c.mask)
    assert f'your `sandbox` in [plugins."{images}".pinned_images] would be "other:1" instead of "pause:3"; ' in words
    assert "s3cr3t" not in words and "would be nothing instead of" in words


def test_enabling_the_cri_and_disabling_it_again_loses_nothing() -> None:
    off = c.effective("disabled_plugins = ['cri']\nroot = '/r'\n")
    on = c.effective("root = '/r'\n" + dump("nvidia", NVIDIA))
    enable, absent = dataclasses.replace(WANTED, enable_cri=True), c.Options(present=False)
    assert losses(off, on, enable, {}) == [] and losses(on, off, absent, {}) == []
    assert losses(off, on, WANTED, {}) != [] and losses(on, off, WANTED, {}) != []
    other = c.effective("disabled_plugins = ['cri']\nroot = '/s'\n")
    assert [loss.path for loss in losses(on, other, absent, {})] == [("root",)]


@pytest.mark.parametrize(
    ("listing", "state"),
    [
        ("TYPE ID PLATFORMS STATUS\nio.containerd.grpc.v1 cri linux/amd64 ok\n", "ok"),
        ("io.containerd.cri.v1 runtime linux/amd64 error\nio.containerd.grpc.v1 cri - error\n", "error"),
        ("io.containerd.cri.v1 images - ok\nio.containerd.cri.v1 runtime linux/amd64 ok\n", "ok"),
        ("io.containerd.cri.v1 images - ok\nio.containerd.grpc.v1 cri - skip\n", "error"),
        ("io.containerd.grpc.v1 healthcheck - ok\n", "missing"),
    ],
)
def test_state_of_the_cri(listing: str, state: str) -> None:
    assert cri_state(listing) == state


def test_error_lines_of_a_journal() -> None:
    assert error_lines("level=info a\nlevel=error b\nlevel=info c\n") == "level=error b"
    failed = 'level=warning msg="failed to load plugin" error="no such runtime" id=io.containerd.cri.v1.runtime'
    assert error_lines(f'time="2026" {failed}\ntime="2026" level=info msg=booted\n') == failed
    assert error_lines("a\nb\nc\nd\n") == "b | c | d"
    assert error_lines("") == "its journal is empty"


@pytest.mark.parametrize(
    ("version", "text", "injects"),
    [
        ("1.7.27", "  enable_cdi = false\n", False),
        ("2.2.9", "  enable_cdi = true\n", True),
        ("2.4.2", "  cdi_spec_dirs = ['/etc/cdi', '/var/run/cdi']\n", True),
        ("1.6.20", "", False),
        ("", "", False),
    ],
)
def test_cdi_is_always_on_where_containerd_has_no_setting_for_it_any_more(version, text, injects):
    assert injects_cdi({"version": version, "dump": text}) is injects
