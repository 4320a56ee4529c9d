# SPDX-License-Identifier: GPL-3.0-or-later
"""What becomes of containerd's files, judged by every real containerd of this machine."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import real_containerd
from ansible_collections.kubegpu.share.plugins.module_utils import _containerd
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput, NotInEffect
from ansible_collections.kubegpu.share.plugins.plugin_utils._containerd_plan import RESTART, Options, make_plan
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

PRESENT = Options(present=True, binary="/usr/bin/nvidia-container-runtime")
ABSENT = Options(present=False, binary="")
REAL = pytest.mark.parametrize("release", real_containerd.RELEASES)

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
CASES = {
    "no file": None,
    "empty": "",
    "comment": "# nothing yet\n",
    "v2": V2,
    "bare v2": "version = 2\n",
    "crun too": V2
    + """
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.crun]
  runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.crun.options]
    BinaryName = "/usr/bin/crun"
""",
    "nvidia already": V2
    + """
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia]
  runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia.options]
    BinaryName = "/opt/old" # by hand
""",
    "default": "DEFAULT",
    "v1": '[plugins.cri]\n  sandbox_image = "p:1"\n[plugins.cri.containerd]\n  snapshotter = "native"\n',
}


@REAL
@pytest.mark.parametrize("name", [*CASES, "v3"])
def test_real_containerd_does_what_the_files_say(release: str, name: str, tmp_path: Path) -> None:
    text = V3 if name == "v3" else CASES[name]
    if (name == "v3" and release < "2") or (name == "v1" and "2.0" <= release < "2.3"):
        pytest.skip("this containerd doesn't read that format")
    binary = real_containerd.of(release)
    if text == "DEFAULT":
        text = subprocess.run([binary, "config", "default"], capture_output=True, text=True, check=True).stdout
    config = tmp_path / "config.toml"
    if text is not None:
        config.write_text(text)
    before = real_containerd.observe(binary, config)
    planned = make_plan(PRESENT, before)
    assert planned.plan.changes[-1].header == RESTART
    real_containerd.apply(planned.files)
    after = real_containerd.observe(binary, config)

    old, new = _containerd.effective(str(before["dump"])), _containerd.effective(str(after["dump"]))
    assert after["error"] == ""
    assert _containerd.shortcomings(new, PRESENT.wanted()) == []
    assert _containerd.losses(old, new, PRESENT.wanted()) == []
    assert new.runtime("nvidia")[("options", "BinaryName")] == PRESENT.binary
    assert new.runtime("nvidia").get(("options", "ShimCgroup")) == new.runtime("runc").get(("options", "ShimCgroup"))
    assert make_plan(PRESENT, after).plan.empty, "a second run changes nothing"

    back = make_plan(ABSENT, after)
    real_containerd.apply(back.files)
    assert (config.read_text() if config.exists() else None) == text, "taken out again, to the byte"
    assert make_plan(ABSENT, real_containerd.observe(binary, config)).plan.empty


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
    assert _containerd.effective(str(seen["dump"])).default_runtime == "runc"
    real_containerd.apply(make_plan(ABSENT, seen).files)
    assert config.read_text() == V2


def test_an_upgrade_to_containerd_2_moves_to_the_drop_in(tmp_path: Path) -> None:
    old, new = real_containerd.of("1.7"), real_containerd.of("2.2")
    config = tmp_path / "config.toml"
    config.write_text(V2)
    real_containerd.apply(make_plan(PRESENT, real_containerd.observe(old, config)).files)
    assert "kubegpu.share" in config.read_text() and not (tmp_path / "conf.d").exists()
    real_containerd.apply(make_plan(PRESENT, real_containerd.observe(new, config)).files)
    assert (tmp_path / "conf.d" / _containerd.DROP_IN_NAME).exists()
    seen = real_containerd.observe(new, config)
    assert make_plan(PRESENT, seen).plan.empty
    real_containerd.apply(make_plan(ABSENT, seen).files)
    assert config.read_text() == V2


def test_in_old_containerd_the_importing_file_that_has_the_section_counts(tmp_path: Path) -> None:
    binary = real_containerd.of("1.7")
    config, other = tmp_path / "config.toml", tmp_path / "other.toml"
    config.write_text('version = 2\nimports = ["other.toml"]\n')
    other.write_text(V2)
    planned = make_plan(PRESENT, real_containerd.observe(binary, config))
    assert [row["path"] for row in planned.files] == [str(other)]
    real_containerd.apply(planned.files)
    seen = real_containerd.observe(binary, config)
    assert _containerd.shortcomings(_containerd.effective(str(seen["dump"])), PRESENT.wanted()) == []


@REAL
def test_docker_packages_configuration(release: str, tmp_path: Path) -> None:
    """``disabled_plugins = ["cri"]`` and no version: refused, or switched on where that is asked for."""
    binary, config = real_containerd.of(release), tmp_path / "config.toml"
    config.write_text('#   Copyright\n\ndisabled_plugins = ["cri"]\n')
    seen = real_containerd.observe(binary, config)
    with pytest.raises(BadInput, match=r"runtime_enable_cri|has no version"):
        make_plan(PRESENT, seen)
    mend = Options(present=True, binary="/b", enable_cri=True)
    real_containerd.apply(make_plan(mend, seen).files)
    after = real_containerd.observe(binary, config)
    assert _containerd.shortcomings(_containerd.effective(str(after["dump"])), mend.wanted()) == []
    assert make_plan(mend, after).plan.empty


def test_v1_on_containerd_2_is_refused_with_the_reason(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(str(CASES["v1"]))
    with pytest.raises(BadInput, match=r"config\.toml has no version.*ignores plugins' settings.*config migrate"):
        make_plan(PRESENT, real_containerd.observe(real_containerd.of("2.2"), config))


def test_unparsable_is_refused_with_file_and_line(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text("version = 2\n[plugins\n")
    with pytest.raises(BadInput, match=r"config\.toml, line 2, can't be parsed \(.+\); it is left as it is"):
        make_plan(PRESENT, observed({str(config): config.read_text()}, error="containerd: boo"))


def observed(files: dict[str, str], **changes: object) -> dict[str, object]:
    main = next(iter(files), "/etc/containerd/config.toml")
    base = "plugins.'io.containerd.cri.v1.runtime'.containerd"
    dump = f"[{base}]\ndefault_runtime_name = 'runc'\n[{base}.runtimes.runc]\nruntime_type = 'io.containerd.runc.v2'\n"
    return {
        "version": "2.2.9",
        "config_path": main,
        "files": files,
        "drop_in": None,
        "dump": dump,
        "error": "",
        "service_active": True,
        "stale": False,
        "pending": False,
        "embedded": "",
        "operator": False,
        **changes,
    }


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (None, "runtime_name: containerd isn't installed"),
        (observed({}, embedded="k3s"), "runtime_name: .* belongs to k3s"),
        (observed({}, embedded="rke2", version=""), "runtime_name: .*(isn't installed|belongs to rke2)"),
        (observed({}, operator=True), "GPU Operator"),
        (
            observed({"/c": "version = 2\n"}, error="containerd: bad thing"),
            "can't read its own configuration: .*bad thing",
        ),
        (observed({"/c": "version = 9\n"}), "version 9 .* isn't known"),
        (observed({"/c": 'a = "\ufffd"\n'}), "isn't UTF-8"),
        (observed({"/c": 'version = 3\ndisabled_plugins = ["io.containerd.cri.v1.runtime"]\n'}), "runtime_enable_cri"),
        (observed({"/c": "version = 2\nplugins = {}\n"}, version="1.7.1"), "/c is written .*can't be edited safely"),
    ],
)
def test_refused_before_anything_changes(seen: dict[str, object] | None, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        make_plan(PRESENT, seen)


def test_nothing_to_take_out() -> None:
    assert make_plan(ABSENT, None).plan.empty
    assert make_plan(ABSENT, observed({"/c": V3}, stale=True, service_active=False)).plan.empty


@pytest.mark.parametrize("changes", [{"stale": True}, {"pending": True}, {"service_active": False}])
def test_a_daemon_that_hasnt_read_its_files_is_restarted(changes: dict[str, object], tmp_path: Path) -> None:
    binary = real_containerd.of("2.2")
    config = tmp_path / "config.toml"
    real_containerd.apply(make_plan(PRESENT, real_containerd.observe(binary, config)).files)
    seen = real_containerd.observe(binary, config)
    planned = make_plan(PRESENT, {**seen, **changes})
    assert [one.header for one in planned.plan.changes] == [RESTART] and planned.files == ()


def test_a_later_file_that_decides_otherwise_is_changed_and_given_back(tmp_path: Path) -> None:
    binary = real_containerd.of("2.2")
    config, later = tmp_path / "config.toml", tmp_path / "zz.toml"
    config.write_text('version = 3\nimports = ["conf.d/99-kubegpu-*.toml", "zz.toml"]\n')
    text = "version = 3\n[plugins.'io.containerd.cri.v1.runtime'.containerd]\ndefault_runtime_name = 'runc' # mine\n"
    later.write_text(text)
    real_containerd.apply(make_plan(PRESENT, real_containerd.observe(binary, config)).files)
    assert """default_runtime_name = "nvidia" # mine # kubegpu.share, was 'runc'""" in later.read_text()
    seen = real_containerd.observe(binary, config)
    assert make_plan(PRESENT, seen).plan.empty
    real_containerd.apply(make_plan(ABSENT, seen).files)
    assert later.read_text() == text


def test_a_list_that_somebody_else_changed_meanwhile_keeps_that() -> None:
    text = 'version = 3\nimports = [\n  "/a.d/*.toml" # theirs\n]\n'
    files = {"/etc/containerd/config.toml": text}
    (main,) = (row for row in make_plan(PRESENT, observed(files)).files if row["path"] in files)
    assert r'was [\n  "/a.d/*.toml" # theirs\n]' in str(main["after"])
    later = str(main["after"]).replace('"/a.d/*.toml", ', '"/a.d/*.toml", "/b.d/*.toml", ', 1)
    (back,) = make_plan(ABSENT, observed({"/etc/containerd/config.toml": later})).files
    assert back["after"] == 'version = 3\nimports = ["/a.d/*.toml", "/b.d/*.toml"]\n'


def test_what_containerd_does_otherwise_is_named() -> None:
    files = {"/c": 'version = 3\nimports = ["/conf.d/99-kubegpu-*.toml"]\n', "/x": "default_runtime = 1\n"}
    planned = make_plan(PRESENT, observed(files))
    ours = {str(row["path"]): str(row["after"]) for row in planned.files}
    seen = observed({**files, **ours}, drop_in=ours["/conf.d/99-kubegpu-nvidia.toml"])
    with pytest.raises(NotInEffect, match=r"default_runtime_name is 'runc'.*look at /x"):
        make_plan(PRESENT, seen)


def test_credentials_arent_in_the_plan(tmp_path: Path) -> None:
    binary = real_containerd.of("1.7")
    config = tmp_path / "config.toml"
    secret = '\n[plugins."io.containerd.grpc.v1.cri".registry.configs."r".auth]\n  password = "hunter2"\n'
    config.write_text(V2 + secret)
    seen = real_containerd.observe(binary, config)
    assert "hunter2" not in repr(seen)
    planned = make_plan(PRESENT, seen)
    assert planned.files and "hunter2" not in repr(planned)


OPTIONS = st.dictionaries(
    st.sampled_from(["SystemdCgroup", "NoPivotRoot", "ShimCgroup", "Root"]),
    st.sampled_from([True, False, "", "/x"]),
    max_size=3,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    options=OPTIONS,
    default=st.sampled_from([None, "runc", "crun"]),
    comments=st.booleans(),
    imports=st.sampled_from([None, "[]", '[\n  "/none/*.toml"\n]', '["conf.d/*.toml"]']),
    tail=st.sampled_from(["", "\n", "\n[grpc]\n  gid = 5\n", "\n[debug]\nlevel = 'info'"]),
    which=st.integers(0, 9),
)
def test_any_users_file(
    options: dict[str, object],
    default: str | None,
    comments: bool,
    imports: str | None,
    tail: str,
    which: int,
    tmp_path: Path,
) -> None:
    binaries = real_containerd.binaries()
    if not binaries:
        pytest.skip("no containerd on this machine")
    typed = {k: v for k, v in options.items() if isinstance(v, bool) == (k in ("SystemdCgroup", "NoPivotRoot"))}
    cri = 'plugins."io.containerd.grpc.v1.cri".containerd'
    lines = ["version = 2"] + ([f"imports = {imports} # mine"] if imports else [])
    lines += [f"[{cri}]"] + ([f'default_runtime_name = "{default}"' + (" # c" if comments else "")] if default else [])
    for name in ("runc", "crun"):
        lines += [
            f"  [{cri}.runtimes.{name}]",
            "    runtime_type = 'io.containerd.runc.v2'",
            f"    [{cri}.runtimes.{name}.options]",
        ]
        lines += [
            f"      {key} = {str(value).lower() if isinstance(value, bool) else repr(value)}"
            for key, value in typed.items()
        ]
    text = "\n".join(lines) + "\n" + tail
    for old in sorted(tmp_path.rglob("*"), reverse=True):
        old.rmdir() if old.is_dir() else old.unlink()
    config = tmp_path / "config.toml"
    config.write_text(text)
    binary = binaries[which % len(binaries)]
    before = real_containerd.observe(binary, config)
    real_containerd.apply(make_plan(PRESENT, before).files)
    after = real_containerd.observe(binary, config)
    old_dump, new_dump = _containerd.effective(str(before["dump"])), _containerd.effective(str(after["dump"]))
    assert _containerd.shortcomings(new_dump, PRESENT.wanted()) == []
    assert _containerd.losses(old_dump, new_dump, PRESENT.wanted()) == []
    assert make_plan(PRESENT, after).plan.empty
    real_containerd.apply(make_plan(ABSENT, after).files)
    assert config.read_text() == text
