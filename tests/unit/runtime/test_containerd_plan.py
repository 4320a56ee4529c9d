# SPDX-License-Identifier: GPL-3.0-or-later
"""Plans for containerd's files, validated by the real containerd programs of this machine."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import real_containerd
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, NotInEffect
from ansible_collections.kubegpu.share.plugins.module_utils._runtime import containerd
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.containerd import Options
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.containerd_apply import losses, unmet_requirements
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.containerd_plan import UNIT, make_plan
from runtime_kit import ABSENT, AVAILABLE, PRESENT, REPLACED, containerd_state

REAL = pytest.mark.parametrize("release", real_containerd.PARAMETERS)

V2 = """version = 2
# the platform team's
[plugins]
  [plugins."io.containerd.grpc.v1.cri"] # CRI
    sandbox_image = "registry.example/pause:3.9"
    [plugins."io.containerd.grpc.v1.cri".registry]
      config_path = "/etc/containerd/certs.d"
    [plugins."io.containerd.grpc.v1.cri".containerd]
      default_runtime_name = "runc"  # the default
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
        runtime_type = "io.containerd.runc.v2"
        [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
          SystemdCgroup = true
          ShimCgroup = "/shims"

[grpc]
  gid = 7
"""
V3 = """version = 3
root = "/srv/containerd"
imports = ["/etc/containerd/none.d/*.toml"]

[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = "registry.example/pause:3.10" # as kubeadm names it
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
  SystemdCgroup = true
"""


NVIDIA = f"""
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.nvidia]
runtime_type = 'io.containerd.runc.v2'
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.nvidia.options]
BinaryName = '{PRESENT.binary}'
SystemdCgroup = false
"""


@pytest.mark.parametrize("release", real_containerd.USUAL)
def test_users_default_nvidia_keeps_systemds_cgroups_that_runc_hasnt(release: str, tmp_path: Path) -> None:
    """``containerd config dump`` of a node whose files name nvidia alone has the built-in runc beside it."""
    base = 'plugins."io.containerd.grpc.v1.cri".containerd'
    nvidia = f'[{base}.runtimes.nvidia.options]\nBinaryName = "/opt/old"\nSystemdCgroup = true\n'
    text = f'version = 2\n[{base}]\ndefault_runtime_name = "nvidia"\n[{base}.runtimes.nvidia]\n'
    text += f'runtime_type = "io.containerd.runc.v2"\n{nvidia}[{base}.runtimes.runc]\n'
    text += 'runtime_type = "io.containerd.runc.v2"\n'
    text += f"[{base}.runtimes.runc.options]\nSystemdCgroup = false\nNoNewKeyring = true\n"
    binary, config = real_containerd.of(release), tmp_path / "config.toml"
    config.write_text(text)
    real_containerd.apply(make_plan(PRESENT, real_containerd.observe(binary, config)).files)
    seen = containerd.effective(str(real_containerd.observe(binary, config)["dump"]))
    ours = seen.runtimes["nvidia"]
    assert ours[("options", "BinaryName")] == PRESENT.binary and ours[("options", "SystemdCgroup")] is True
    assert unmet_requirements(seen, PRESENT, "nvidia") == []
    assert make_plan(PRESENT, real_containerd.observe(binary, config)).plan.empty
    real_containerd.apply(make_plan(ABSENT, real_containerd.observe(binary, config)).files)
    assert config.read_text() == text


@pytest.mark.parametrize(
    ("release", "text"),
    [
        ("1.7", V2),
        ("2.4", V2),
        ("2.4", V3),
        *(pytest.param(one, V2, marks=pytest.mark.long) for one in real_containerd.FURTHER),
    ],
)
def test_our_runtime_copies_the_options_of_runc(release: str, text: str, tmp_path: Path) -> None:
    """The corpus' test covers addition, repetition and removal for many more files."""
    binary, config = real_containerd.of(release), tmp_path / "config.toml"
    config.write_text(text)
    before = real_containerd.observe(binary, config)
    planned = make_plan(PRESENT, before)
    assert planned.plan.changes[-1].header == UNIT
    real_containerd.apply(planned.files)
    after = real_containerd.observe(binary, config)
    old, new = containerd.effective(str(before["dump"])), containerd.effective(str(after["dump"]))
    assert after["error"] == ""
    assert unmet_requirements(new, PRESENT) == []
    assert losses(old, new, PRESENT, {}) == []
    assert new.runtimes["nvidia"][("options", "BinaryName")] == PRESENT.binary
    assert new.runtimes["nvidia"].get(("options", "ShimCgroup")) == new.runtimes["runc"].get(("options", "ShimCgroup"))


@REAL
def test_another_binary_is_an_update(release: str, tmp_path: Path) -> None:
    binary, config = real_containerd.of(release), tmp_path / "config.toml"
    config.write_text(V2)
    real_containerd.apply(make_plan(PRESENT, real_containerd.observe(binary, config)).files)
    other = Options(present=True, binary="/opt/bin/nvidia-container-runtime", default=False)
    planned = make_plan(other, real_containerd.observe(binary, config))
    assert len(planned.files) == 1
    real_containerd.apply(planned.files)
    seen = real_containerd.observe(binary, config)
    assert make_plan(other, seen).plan.empty
    assert containerd.effective(str(seen["dump"])).default_runtime == "runc"
    real_containerd.apply(make_plan(ABSENT, seen).files)
    assert config.read_text() == V2


@REAL
@pytest.mark.parametrize("less", [AVAILABLE, dataclasses.replace(PRESENT, cdi=False)])
@pytest.mark.parametrize("text", ["version = 2\n", V2])
def test_what_is_no_longer_requested_is_taken_back(release: str, less: Options, text: str, tmp_path: Path) -> None:
    binary, config, direct = real_containerd.of(release), tmp_path / "a" / "config.toml", tmp_path / "b" / "config.toml"
    for path in (config, direct):
        path.parent.mkdir()
        path.write_text(text)
    for path, options in ((config, PRESENT), (config, less), (direct, less)):
        real_containerd.apply(make_plan(options, real_containerd.observe(binary, path)).files)
    ours = {path.name: path.read_text().replace("/a/", "/b/") for path in config.parent.rglob("*.toml")}
    assert ours == {path.name: path.read_text() for path in direct.parent.rglob("*.toml")}
    seen = real_containerd.observe(binary, config)
    assert make_plan(less, seen).plan.empty
    assert containerd.effective(str(seen["dump"])).default_runtime == ("nvidia" if less.default else "runc")
    real_containerd.apply(make_plan(ABSENT, seen).files)
    assert config.read_text() == text


def test_a_default_that_stays_nvidia_is_reported() -> None:
    files = {"/etc/containerd/config.toml": "version = 3\nimports = ['conf.d/99-kubegpu-*.toml']\n"}
    ours = {str(row["path"]): str(row["after"]) for row in make_plan(AVAILABLE, containerd_state(files)).files}
    dump = f"{containerd_state({})['dump']}{NVIDIA}".replace("'runc'\n", "'nvidia'\n", 1)
    with pytest.raises(NotInEffect, match="default_runtime_name is 'nvidia' and not 'runc'"):
        make_plan(AVAILABLE, containerd_state({**files, **ours}, drop_in="", dump=dump))


CRI_OFF = 'disabled_plugins = ["cri", "x"] # Docker\'s\n'


def test_the_cri_stays_enabled_where_the_kubelet_uses_it() -> None:
    path = "/etc/containerd/config.toml"
    enable = dataclasses.replace(PRESENT, enable_cri=True)
    planned = make_plan(enable, containerd_state({path: CRI_OFF}, dump='disabled_plugins = ["cri", "x"]\n'))
    changed = {str(row["path"]): str(row["after"]) for row in planned.files}

    def removed(files: dict[str, str], serves_kubelet: bool = False) -> tuple[str, tuple[str, ...]]:
        planned = make_plan(ABSENT, containerd_state(files, config_path=path), serves_kubelet)
        return next(str(row["after"]) for row in planned.files if row["path"] == path), planned.warnings

    assert removed(changed) == (CRI_OFF, ())
    edited = {**changed, path: changed[path].replace('["x"]', '["x", "y"]')}
    assert removed(edited)[0] == 'disabled_plugins = ["x", "y", "cri"] # Docker\'s\n', "somebody's change stays"
    text, (warning,) = removed(changed, serves_kubelet=True)
    assert text == 'disabled_plugins = ["x"] # Docker\'s\n'
    assert "stays enabled, because this node's kubelet uses it" in warning
    assert make_plan(ABSENT, containerd_state({path: text}), serves_kubelet=True).plan.empty


def test_a_foreign_broken_file_stops_no_removal() -> None:
    broken = {"/etc/containerd/config.toml": "imports = ['/b.toml']\n", "/b.toml": "[unclosed\n"}
    assert make_plan(ABSENT, containerd_state(broken, error="b.toml: bad")).plan.empty
    ours = {**broken, "/etc/containerd/config.toml": "version = 3 # kubegpu.share\nimports = ['/b.toml']\n"}
    with pytest.raises(BadInput, match=r"can't read its own configuration: b\.toml: bad"):
        make_plan(ABSENT, containerd_state(ours, error="b.toml: bad"))


def test_a_snapshotter_that_takes_effect_is_announced(tmp_path: Path) -> None:
    binary, config = real_containerd.of("2.2"), tmp_path / "config.toml"
    text = 'version = 2\n[plugins."io.containerd.grpc.v1.cri".containerd]\n  snapshotter = "stargz"\n'
    config.write_text(text)
    planned = make_plan(PRESENT, real_containerd.observe(binary, config))
    path = ("plugins", "io.containerd.cri.v1.images", "snapshotter")
    assert planned.expected == ({"path": list(path), "value": "stargz"},)
    assert f'ignored `snapshotter = "stargz"` in {config} so far' in planned.warnings[0]
    before = containerd.effective(str(real_containerd.observe(binary, config)["dump"]))
    real_containerd.apply(planned.files)
    seen = real_containerd.observe(binary, config)
    after = containerd.effective(str(seen["dump"]))
    assert [loss.path for loss in losses(before, after, PRESENT, {})] == [path]
    assert losses(before, after, PRESENT, {path: "stargz"}) == []
    assert [loss.path for loss in losses(before, after, PRESENT, {path: "other"})] == [path]
    planned = make_plan(PRESENT, seen)
    assert planned.plan.empty and planned.warnings == ()
    assert losses(after, before, ABSENT, {path: "stargz"}) == []
    assert make_plan(ABSENT, seen).expected == ({"path": list(path), "value": "stargz"},)


@pytest.mark.parametrize(
    ("name", "runtime_type", "lost"),
    [("kata", "io.containerd.kata.v2", "Kata"), ("runsc", "io.containerd.runsc.v1", "gVisor")],
)
def test_a_sandbox_is_replaced_only_if_the_user_says_so(name: str, runtime_type: str, lost: str) -> None:
    base = "plugins.'io.containerd.cri.v1.runtime'.containerd"
    text = f"[{base}]\ndefault_runtime_name = '{name}'\n[{base}.runtimes.{name}]\nruntime_type = '{runtime_type}'\n"
    path = "/etc/containerd/config.toml"
    seen = containerd_state({path: f"version = 3\n{text}"}, dump=text)
    with pytest.raises(BadInput, match=rf"runtime is {name} \({lost}\), .*runtime_replace_default: true"):
        make_plan(PRESENT, seen)
    allowed = dataclasses.replace(PRESENT, replace_default=True)
    files = {str(row["path"]): str(row["after"]) for row in make_plan(allowed, seen).files}
    assert files and make_plan(AVAILABLE, seen).files
    # Ours in place hides the user's default in the dump, not in his file.
    there = containerd_state({**seen["files"], **files}, dump=f"{text}{NVIDIA}".replace(f"'{name}'", "'nvidia'", 1))
    again = make_plan(PRESENT, there)
    assert again.files == () and REPLACED.format("containerd", f"{name} ({lost})") in again.warnings[0]
    assert make_plan(allowed, there).warnings == make_plan(AVAILABLE, there).warnings == ()


def test_an_upgrade_to_containerd_2_moves_to_the_drop_in(tmp_path: Path) -> None:
    old, new = real_containerd.of("1.7"), real_containerd.of("2.4")
    config = tmp_path / "config.toml"
    config.write_text(V2)
    real_containerd.apply(make_plan(PRESENT, real_containerd.observe(old, config)).files)
    assert "kubegpu.share" in config.read_text() and not (tmp_path / "conf.d").exists()
    real_containerd.apply(make_plan(PRESENT, real_containerd.observe(new, config)).files)
    assert (tmp_path / "conf.d" / containerd.DROP_IN_NAME).exists()
    seen = real_containerd.observe(new, config)
    assert make_plan(PRESENT, seen).plan.empty
    real_containerd.apply(make_plan(ABSENT, seen).files)
    assert config.read_text() == V2


def test_before_2_0_the_importing_file_with_the_section_counts(tmp_path: Path) -> None:
    binary = real_containerd.of("1.7")
    config, other = tmp_path / "config.toml", tmp_path / "other.toml"
    config.write_text('version = 2\nimports = ["other.toml"]\n')
    other.write_text(V2)
    planned = make_plan(PRESENT, real_containerd.observe(binary, config))
    assert [row["path"] for row in planned.files] == [str(other)]
    real_containerd.apply(planned.files)
    seen = real_containerd.observe(binary, config)
    assert unmet_requirements(containerd.effective(str(seen["dump"])), PRESENT) == []


@pytest.mark.parametrize(
    ("observed", "message"),
    [
        (containerd_state({}, embedded="k3s"), "runtime_name: .* belongs to k3s"),
        (containerd_state({}, embedded="rke2", version=""), "runtime_name: .*(isn't installed|belongs to rke2)"),
        (containerd_state({}, operator=True), "GPU Operator"),
        (containerd_state({"/c": "version = 2\n"}, error="bad thing"), "can't read its own configuration: .*bad thing"),
        (containerd_state({"/c": "version = 9\n"}), "version 9 .* isn't supported"),
        (containerd_state({"/c": 'a = "\ufffd"\n'}), "isn't UTF-8"),
        (containerd_state({"/c": 'disabled_plugins = ["io.containerd.cri.v1.runtime"]\n'}), "runtime_enable_cri"),
        (containerd_state({"/c": "version = 2\nplugins = 1\n"}, version="1.7.1"), "/c is written .*edited safely"),
        (containerd_state({"/c": "version = 2\nplugins = 1\n"}, error="bad"), "can't read its own configuration"),
    ],
)
def test_refusals(observed: dict[str, object], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        make_plan(PRESENT, observed)


@pytest.mark.parametrize("changes", [{"stale": True}, {"pending": True}, {"service_active": False}])
def test_an_outdated_daemon_is_restarted(changes: dict[str, object], tmp_path: Path) -> None:
    binary = real_containerd.of("2.4")
    config = tmp_path / "config.toml"
    real_containerd.apply(make_plan(PRESENT, real_containerd.observe(binary, config)).files)
    seen = real_containerd.observe(binary, config)
    planned = make_plan(PRESENT, {**seen, **changes})
    assert [change.header for change in planned.plan.changes] == [UNIT] and planned.files == ()
    assert make_plan(ABSENT, containerd_state({"/c": V3}, **changes | {"pending": False})).plan.empty


def test_a_later_files_key_is_changed_and_restored(tmp_path: Path) -> None:
    binary = real_containerd.of("2.4")
    config, later_drop_ins = tmp_path / "config.toml", tmp_path / "zz.toml"
    config.write_text('version = 3\nimports = ["conf.d/99-kubegpu-*.toml", "zz.toml"]\n')
    text = "version = 3\n[plugins.'io.containerd.cri.v1.runtime'.containerd]\ndefault_runtime_name = 'runc' # mine\n"
    later_drop_ins.write_text(text)
    real_containerd.apply(make_plan(PRESENT, real_containerd.observe(binary, config)).files)
    assert """default_runtime_name = "nvidia" # mine # kubegpu.share, was 'runc'""" in later_drop_ins.read_text()
    seen = real_containerd.observe(binary, config)
    assert make_plan(PRESENT, seen).plan.empty
    real_containerd.apply(make_plan(ABSENT, seen).files)
    assert later_drop_ins.read_text() == text


def test_files_that_only_our_import_or_drop_in_reaches_do_not_count() -> None:
    """The run takes the import out, or writes the drop-in anew."""
    main, folder = "/etc/containerd/config.toml", "/etc/containerd/conf.d"
    extra = f"{folder}/99-kubegpu-extra.toml"
    cri = 'version = 2\n[plugins."io.containerd.grpc.v1.cri"]\nsandbox_image = "pause"\n'
    files = {main: f'version = 2\nimports = ["{folder}/99-kubegpu-*.toml"] # kubegpu.share\n', extra: cri}
    base = 'plugins."io.containerd.grpc.v1.cri".containerd'
    dump = f'[{base}]\ndefault_runtime_name = "runc"\n[{base}.runtimes.runc]\nruntime_type = "io.containerd.runc.v2"\n'
    planned = make_plan(PRESENT, containerd_state(files, version="1.7.20", dump=dump))
    after = {str(row["path"]): str(row["after"]) for row in planned.files}
    assert 'default_runtime_name = "nvidia"' in after[main] and after.get(extra, cri) == cri
    drop_in, other = f"{folder}/99-kubegpu-nvidia.toml", "/etc/containerd/x.toml"
    files = {
        main: V3.replace("none.d", "conf.d"),
        drop_in: f'version = 3\nimports = ["{other}"]\n',
        other: "version = 9\n",
    }
    assert make_plan(PRESENT, containerd_state(files, drop_in=files[drop_in])).users_default == "runc"


def test_a_list_keeps_the_users_later_change() -> None:
    text = 'version = 3\nimports = ["/a.d/*.toml", ] # theirs\n'
    files = {"/etc/containerd/config.toml": text}
    (main,) = (row for row in make_plan(PRESENT, containerd_state(files)).files if row["path"] in files)
    assert 'was ["/a.d/*.toml", ]' in str(main["after"])
    later_drop_ins = str(main["after"]).replace('"/a.d/*.toml", ', '"/a.d/*.toml", "/b.d/*.toml", ', 1)
    (back,) = make_plan(ABSENT, containerd_state({"/etc/containerd/config.toml": later_drop_ins})).files
    assert back["after"] == 'version = 3\nimports = ["/a.d/*.toml", "/b.d/*.toml"] # theirs\n'


def test_a_different_effective_configuration_is_reported() -> None:
    files = {"/c": 'version = 3\nimports = ["/conf.d/99-kubegpu-*.toml"]\n', "/x": "default_runtime = 1\n"}
    planned = make_plan(PRESENT, containerd_state(files))
    ours = {str(row["path"]): str(row["after"]) for row in planned.files}
    seen = containerd_state({**files, **ours}, drop_in=ours["/conf.d/99-kubegpu-nvidia.toml"])
    with pytest.raises(NotInEffect, match=r"default_runtime_name is 'runc'.*check /x"):
        make_plan(PRESENT, seen)
