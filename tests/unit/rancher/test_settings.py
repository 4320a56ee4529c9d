# SPDX-License-Identifier: GPL-3.0-or-later
"""The settings of k3s and RKE2: our reader beside recorded answers of k3s' own parser, and beside PyYAML."""

from __future__ import annotations

import json
import random
import time
import typing as t
from pathlib import Path

import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._rancher import settings, yaml_reader
from ansible_collections.kubegpu.share.plugins.module_utils._rancher.yaml_reader import Pairs, Unreadable, plain, read

# What k3s 1.34.10 makes of files, arguments and environment: its flags that are set, or null where it doesn't start.
# Recorded by its own packages for the command line and its files, with an action that prints the flags.
ANSWERS = json.loads((Path(__file__).parent / "answers_of_k3s.json").read_text())
# Valid for k3s, and refused here in a sentence.
STRICTER = {
    "'kata'#c": "end",
    "{a: b}": "value",
    "[[a, b]]": "value",
    "%YAML": "tag",
    "? default-runtime": "key",
}
CONFIG = "/etc/rancher/k3s/config.yaml"


def given(files: dict[str, str], arguments: str = "server", **environment: str) -> settings.Settings:
    def names(folder: str) -> list[str]:
        return [path[len(folder) + 1 :] for path in files if path.startswith(f"{folder}/")]

    return settings.read("k3s", arguments.split(), environment, files.get, names)


def flags(found: settings.Settings) -> dict[str, t.Any]:
    words = ("data-dir", "default-runtime", "container-runtime-endpoint")
    lists = ("kube-scheduler-arg", "kubelet-arg")
    seen: dict[str, t.Any] = {key: settings.value(found, key) for key in words}
    seen |= {key: settings.on(found, key) for key in settings.SWITCHES}
    seen |= {key: settings.values(found, key) for key in lists}
    return {key: value for key, value in seen.items() if value}


@pytest.mark.parametrize("row", ANSWERS, ids=lambda row: json.dumps(row["files"])[:60])
def test_settings_are_those_of_k3s(row: dict[str, t.Any]) -> None:
    found = given(row["files"], row["arguments"], **row.get("environment", {}))
    stricter = [code for mark, code in STRICTER.items() if any(mark in text for text in row["files"].values())]
    if row["k3s"] is None or stricter:
        problem = found["problem"]
        assert problem and (not stricter or problem["code"] == stricter[0])
        assert problem["path"] in settings.explain("k3s", problem)
    else:
        assert found["problem"] is None and flags(found) == row["k3s"]


def test_all_that_k3s_reads_is_read_but_what_is_listed() -> None:
    rejected = [row for row in ANSWERS if row["k3s"] is None]
    assert len(ANSWERS) > 100 and 10 < len(rejected) < 30


@pytest.mark.parametrize(
    ("text", "line", "code"),
    [
        ("a: 1\ndefault-runtime: [x\n", 2, "flow"),
        ("a: 1\n\n  b: 2\n", 3, "colon"),
        ('token: "secret\n', 1, "quote"),
        ("a: *b\n", 1, "alias"),
        ("a: b: c\n", 1, "colon"),
        ("a: @b\n", 1, "plain"),
        ('a: "\\q"\n', 1, "escape"),
        ("a: \x00\n", 1, "character"),
        ("a: !!binary eA==\n", 1, "tag"),
        ("- a\n", 1, "mapping"),
        ("a: " + "[" * 50, 1, "depth"),
        ("a: 1\nb\n", 2, "key"),
        ("a: 1\n<<: b\n", 2, "merge"),
    ],
)
def test_what_is_not_read_has_its_line(text: str, line: int, code: str) -> None:
    with pytest.raises(Unreadable) as error:
        read(text)
    assert (error.value.line, error.value.code) == (line, code)
    problem = given({CONFIG: text})["problem"]
    assert problem == {"path": CONFIG, "line": line, "code": code}
    assert settings.explain("k3s", problem).startswith(f"{CONFIG}, line {line}: k3s's settings can't be read here: ")


@pytest.mark.parametrize("number", ["12e4567", "-1e999", "9" * 400, "9" * 5000, "0x" + "f" * 5000])
def test_numbers_out_of_range_are_text(number: str) -> None:
    """A random token may look like one."""
    found = given({CONFIG: f"token: {number}\ndata-dir: {number}\n"})
    assert found["problem"] is None and settings.value(found, "data-dir") == number


def test_settings_on_another_machine_are_refused() -> None:
    assert given({}, "server --config https://host/k3s.yaml")["problem"] == {
        "path": "https://host/k3s.yaml",
        "line": 0,
        "code": "place",
    }


def test_a_drop_in_that_is_written_next() -> None:
    files = {CONFIG: "default-runtime: crun\n", f"{CONFIG}.d/99-z.yaml": "default-runtime: kata\n"}
    found = settings.replaced(given(files), f"{CONFIG}.d/99-kubegpu.yaml", {"default-runtime": ["nvidia"]})
    assert settings.value(found, "default-runtime") == "kata"
    assert settings.after(found, f"{CONFIG}.d/99-kubegpu.yaml", "default-runtime") == [f"{CONFIG}.d/99-z.yaml"]
    assert settings.value(found, "default-runtime", without=(f"{CONFIG}.d/99-z.yaml",)) == "nvidia"


# --------------------------------------------------------------------------- beside PyYAML

SEEDS = [
    """# c
token: "a b"
default-runtime: kata # x
kube-scheduler-arg:
- v=2
- config=/a
node-label+: ["a=b", 'c=d',
   e=f ]
x: {a: b, "c": [1,2], d: }
y: >-
   folded
   text

   more
    indented
z: |
  lit
   eral

last: &a foo
list:
  - *a
  - - n1
    - n2
  - k: v
    l: w
  -
    m: 1
plain: several
  lines of

  text
q: "esc \\n \\"x\\" \\
   cont
   fold"
""",
    '{"token": "x", "default-runtime": "kata",\n "kube-scheduler-arg": ["v=2"], "docker": true, "n": null}\n',
    '  a: 1\n  b :\n    c: d\n  "e" : [x, y]\n',
    "---\ndocker: yes\ndata-dir: /x\n...\nfoo\n",
    "default-runtime: kata\nd: ~\n'k': 'it''s'\n",
]
PIECES = [*" \n:-#'\"[]{},&*|>", "- ", ": ", "\n  ", "\n- ", "a: b\n", " #", "---\n", "\n\n", "&a ", "*a", "  ", '"a"']


def mutated(seed: int) -> str:
    drawn = random.Random(seed)
    text = drawn.choice(SEEDS)
    for _number in range(drawn.randint(0, 3)):
        at = drawn.randrange(len(text) + 1)
        kind = drawn.random()
        if kind < 0.5:
            text = text[:at] + drawn.choice(PIECES) + text[at:]
        elif kind < 0.8:
            text = text[:at] + text[at + drawn.randint(1, 4) :]
        else:
            other = drawn.randrange(len(text) + 1)
            text = text[:at] + text[other : other + drawn.randint(1, 12)] + text[at:]
    return text


def by_pyyaml(text: str) -> t.Any:
    loader = yaml.SafeLoader(text)

    def value(node: t.Any) -> t.Any:
        if isinstance(node, yaml.ScalarNode):
            return plain(node.value) if node.style is None else node.value.strip()
        if isinstance(node, yaml.SequenceNode):
            return [value(one) for one in node.value]
        return [((value(key) or "").strip(), value(one)) for key, one in node.value]

    return (value(loader.get_node()) if loader.check_node() else None) or []


def stripped(found: t.Any) -> t.Any:
    """Go trims each value."""
    if isinstance(found, Pairs):
        return [(key.strip(), stripped(one)) for key, one in found]
    return [stripped(one) for one in found] if isinstance(found, list) else found.strip() if found else found


def test_what_is_read_is_what_yaml_means() -> None:
    both = refused = 0
    for seed in range(1500):
        text = mutated(seed)
        try:
            found = read(text)
        except Unreadable:
            refused += 1
            continue
        try:
            wanted = by_pyyaml(text)
        except yaml.YAMLError:
            # PyYAML is stricter in few places; go-yaml answers in the table above.
            continue
        assert stripped(found) == wanted, text
        both += 1
    assert both > 500 and refused > 300


@pytest.mark.parametrize("code", sorted(settings.WHY))
def test_every_code_has_words(code: str) -> None:
    assert settings.WHY[code] and yaml_reader.WHY.keys() <= settings.WHY.keys()


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("a: [" + "x," * 200_000 + "]", "size"),
        ("x: &a [" + "y," * 3000 + "]\n" + "kubelet-arg: *a\n" * 3000, "size"),
        ("token: " + "1" * 200_000 + "x", ""),
        ("token: " + "1" * 200_000 + "e", ""),
    ],
    ids=["long", "aliases", "digits", "exponent"],
)
def test_settings_without_measure_are_refused_at_once(text: str, code: str) -> None:
    begun = time.process_time()
    problem = given({CONFIG: text})["problem"]
    assert (problem["code"] if problem else "") == code
    assert time.process_time() - begun < 10


def test_names_of_drop_ins_may_be_any_bytes() -> None:
    names = [name.decode("utf-8", "surrogateescape") for name in (b"\xff.yaml", b"\xc3\xa9.yaml", b"a.yaml")]
    assert settings.drop_ins(names) == [names[2], names[1], names[0]]
    found = given({f"{CONFIG}.d/{name}": "docker: true" for name in names})
    assert settings.replaced(found, f"{CONFIG}.d/b.yaml", {})["files"][1]["path"] == f"{CONFIG}.d/b.yaml"


def test_thousands_of_files_take_no_time() -> None:
    """They are facts on the controller, and a machine that was taken chooses them."""
    entry: settings.Entry = {"key": "kubelet-arg", "add": True, "single": False, "values": ["a"]}
    for files in ([("x", 50_000)], [(f"x{number}", 1) for number in range(50_000)]):
        found = given({})
        found["files"] = [{"path": path, "entries": [entry] * number} for path, number in files]
        begun = time.process_time()
        assert settings.values(found, "kubelet-arg") == ["a"] * 50_000
        assert len(settings.after(found, files[0][0], "kubelet-arg")) == len(files) - 1
        assert time.process_time() - begun < 3
