# SPDX-License-Identifier: GPL-3.0-or-later
"""Random files of containerd: no setting of others is lost, and unparsable files are not changed."""

from __future__ import annotations

import re
import tomllib
import typing as t

import pytest
import tomlkit
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._documents.toml_editor import MARK
from ansible_collections.kubegpu.share.plugins.module_utils._runtime import containerd
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.containerd import Options
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.containerd_files import loaded
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.containerd_plan import make_plan
from hypothesis import example, given, settings
from hypothesis import strategies as st
from runtime_kit import ABSENT, AVAILABLE, BINARY, PRESENT, containerd_state

MAIN = "/etc/containerd/config.toml"
DROP_IN = "/etc/containerd/conf.d/99-kubegpu-nvidia.toml"
OLD, NEW = containerd.CRI_PLUGIN[2], containerd.CRI_PLUGIN[3]


def observed(files: dict[str, str], release: str) -> dict[str, t.Any]:
    """Return the state of a containerd that has our settings in effect wherever a file has them."""
    plugin = NEW if release >= "2" else OLD
    base = f"plugins.'{plugin}'.containerd"
    done = DROP_IN in files or any(MARK in text for text in files.values())
    dump = f"[{base}]\ndefault_runtime_name = '{'nvidia' if done else 'runc'}'\n"
    dump += f"[{base}.runtimes.runc]\nruntime_type = 'io.containerd.runc.v2'\n"
    if done:
        dump += f"[{base}.runtimes.nvidia]\nruntime_type = 'io.containerd.runc.v2'\n"
        dump += f"[{base}.runtimes.nvidia.options]\nBinaryName = '{BINARY}'\nSystemdCgroup = false\n"
    read = {path: files[path] for path in loaded(MAIN, files).order}
    return containerd_state(read, version=release, config_path=MAIN, drop_in=files.get(DROP_IN), dump=dump)


def applied(files: dict[str, str], options: Options, release: str) -> dict[str, str]:
    done = dict(files)
    for row in make_plan(options, observed(files, release)).files:
        if row["after"] is None:
            done.pop(row["path"], None)
        else:
            done[row["path"]] = row["after"]
    return done


# --------------------------------------------------------------------------- any valid file

KEYS = st.sampled_from(["gid", "level", "sandbox_image", "x y", "ünï", "a.b", "", "default_runtime_name", "nvidia"])
SCALARS = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=8),
    st.datetimes().map(lambda one: one.replace(microsecond=0)),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
PLUGINS = [("cri",), (OLD,), (NEW,), (OLD, "containerd"), (OLD, "registry", "mirrors", "docker.io")]
RUNTIMES = [(OLD, "runc"), (OLD, "runc", "options"), (OLD, "nvidia", "options"), (NEW, "runc", "options")]
NAMES = [("grpc",), ("debug",), ("plugins",), ("proxy_plugins", "x"), *(("plugins", *plugin) for plugin in PLUGINS)]
NAMES += [("plugins", plugin, "containerd", "runtimes", *rest) for plugin, *rest in RUNTIMES]
TABLES = st.lists(st.sampled_from(NAMES), max_size=6, unique=True)
NOISE = st.sampled_from(["", "# a comment", "  # ]", "", "\t"])


@st.composite
def files(draw: st.DrawFn) -> str:
    """A TOML file with containerd's tables in any order, comments, and values of every kind."""
    lines = [draw(NOISE)]
    version = draw(st.sampled_from([None, 2, 2, 3]))
    lines += [f"version = {version} # v"] if version else []
    lines += draw(st.sampled_from([[], ["imports = []"], ["imports = [", '  "/none/*.toml" # none', "]"]]))
    for table in draw(TABLES):
        lines += [draw(NOISE), f"[{tomlkit.key(list(table)).as_string()}]{draw(st.sampled_from(['', ' # t']))}"]
        for key, value in draw(st.dictionaries(KEYS, VALUES, max_size=3)).items():
            indent = draw(st.sampled_from(["", "  "]))
            lines.append(f"{indent}{tomlkit.key([key]).as_string()} = {_literal(value)}{draw(NOISE)}")
    end = draw(st.sampled_from(["\n", "\r\n"]))
    text = end.join(lines) + draw(st.sampled_from(["", end]))
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return ""
    return text


def _literal(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{tomlkit.key([k]).as_string()} = {_literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_literal(one) for one in value) + "]"
    return str(tomlkit.item(value).as_string())


def flat(tree: object, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], object]:
    if not isinstance(tree, dict):
        return {path: tree}
    return {key: one for name, value in tree.items() for key, one in flat(value, (*path, name)).items()}


def ours(path: tuple[str, ...]) -> bool:
    within = path[2:] if path[:1] == ("plugins",) else ()
    key = path in (("imports",), ("version",)) or within in (("containerd", "default_runtime_name"), ("enable_cdi",))
    return key or within[:3] == ("containerd", "runtimes", "nvidia")


# Options in a section that isn't the one of the file's format, and a dump that has none.
FOREIGN_OPTIONS = f'version = 2\n[plugins."{NEW}".containerd.runtimes.runc.options]\ngid = 1\n'


@settings(max_examples=80)
@example(FOREIGN_OPTIONS, "2.0.14")
@given(files(), st.sampled_from(["1.6.20", "1.7.24", "2.0.14", "2.2.9", "2.4.2"]))
def test_no_foreign_setting_is_lost(text: str, release: str) -> None:
    before = {MAIN: text}
    try:
        after = applied(before, PRESENT, release)
    except BadInput:
        return
    new = tomllib.loads(after[MAIN])
    old = {path: value for path, value in flat(tomllib.loads(text)).items() if not ours(path)}
    now = flat(new)
    assert {path: now.get(path) for path in old} == old
    # The runtime that an old containerd has by default is written beside ours; nothing else is added.
    added = {path for path in now if path not in flat(tomllib.loads(text)) and not ours(path)}
    assert all(path[2:5] == ("containerd", "runtimes", "runc") for path in added)
    kept = [line for line in text.splitlines() if line.strip()]
    there = after[MAIN].splitlines()
    for line in kept:
        key = line.partition("=")[0].strip()
        noted = [one for one in there if MARK in one and (one.partition("=")[0].strip() == key or line.strip() in one)]
        # In a list over several lines a comma follows the item that was the last one.
        continued = line.replace('" #', '", #') in there
        listed = any(one.startswith(line.rstrip("] ,")) for one in there if "kubegpu" in one)
        assert line in there or continued or noted or listed
    assert make_plan(PRESENT, observed(after, release)).files == (), "a second run changes nothing"
    back = applied(after, ABSENT, release)
    assert back == before
    assert applied(after, AVAILABLE, release) == applied(before, AVAILABLE, release), "the default is taken back"


# --------------------------------------------------------------------------- any bytes


@settings(max_examples=150)
@given(st.one_of(st.binary(max_size=60), st.text("[]{}=\"'#\n\\.,ab1 ", max_size=40).map(str.encode)))
def test_unparsable_files_are_not_changed(raw: bytes) -> None:
    # As the node reads it, and as JSON transports it.
    text = raw.decode(errors="replace")
    try:
        tomllib.loads(text.removeprefix("\ufeff"))
        broken = "\ufffd" in text
    except tomllib.TOMLDecodeError:
        broken = True
    try:
        make_plan(PRESENT, observed({MAIN: text}, "2.2.9"))
    except BadInput as error:
        assert MAIN in str(error)
        if broken:
            assert re.match(rf"{re.escape(MAIN)}(, line \d+, | is a template)", str(error))
    else:
        assert not broken
    # Nothing of ours is in it, so that it stops no removal.
    assert make_plan(ABSENT, observed({MAIN: text}, "2.2.9")).plan.empty


@pytest.mark.parametrize("release", ["1.7.24", "2.2.9"])
def test_credentials_are_restored(release: str) -> None:
    text = f'version = 2\n[plugins."{OLD}".registry.configs."https://u:s3cr3t@r".auth]\n  password = "p#[" # c\n'
    text += f'[plugins."{OLD}".registry.mirrors."d"]\n  endpoint = ["https://u:s3cr3t@m"]\n  token = """\ns3cr3t"""\n'
    masked = containerd.mask(text)
    assert "s3cr3t" not in masked
    after = applied({MAIN: masked}, PRESENT, release)
    real = containerd.unmask(after[MAIN], text)
    assert [line for line in text.splitlines() if line not in real.splitlines()] == []
    assert containerd.unmask(applied(after, ABSENT, release)[MAIN], text) == text
