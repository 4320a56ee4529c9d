# SPDX-License-Identifier: GPL-3.0-or-later
"""Keys of repositories that aren't the pinned ones, downloaded from a real web server; the real gpg makes them."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess

import pytest
import served
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._packages import options as signing_key
from ansible_collections.kubegpu.share.plugins.module_utils._packages.planner import planner
from package_sets import KEY, apply, package_set
from test_packages_action import Node, apt_facts
from test_packages_apt import KEYRING, machine

BEGIN, END = signing_key.ARMOUR


@pytest.fixture(scope="module")
def gpg(tmp_path_factory):
    """Run gpg with a home of its own."""
    if not shutil.which("gpg"):
        pytest.skip("no gpg")
    home = tmp_path_factory.mktemp("gnupg")
    home.chmod(0o700)

    def run(*words, given=None):
        command = ["gpg", "--homedir", str(home), "--batch", "--quiet", "--passphrase", "", *words]
        return subprocess.run(command, input=given, capture_output=True, text=True, check=True).stdout

    yield run
    subprocess.run(["gpgconf", "--homedir", str(home), "--kill", "all"], check=False)


@pytest.fixture(scope="module")
def keys(gpg):
    """Three armoured keys, the last one with a subkey, and the fingerprints of gpg."""
    made = {}
    for name, kind in (("one", "rsa2048"), ("two", "ed25519"), ("sub", "ed25519")):
        gpg("--quick-gen-key", f"{name} <{name}@example.org>", kind, "sign", "never")
        [fingerprint] = [
            row.split(":")[9] for row in gpg("--with-colons", "-k", name).splitlines() if row.startswith("fpr:")
        ]
        if name == "sub":
            gpg("--quick-add-key", fingerprint, "ed25519", "sign", "never")
        made[name] = (gpg("--armor", "--export", name), fingerprint)
    made["both"] = (gpg("--armor", "--export", "one", "two"), "")
    return made


def armoured(data):
    rows = base64.encodebytes(data).decode()
    return f"{BEGIN}\n\n{rows}{END}\n"


def body(text):
    return base64.b64decode("".join(row for row in text.splitlines()[2:-1] if not row.startswith("=")))


def test_the_fingerprint_is_gpgs(keys):
    for name in ("one", "two"):
        text, fingerprint = keys[name]
        assert signing_key.fingerprint(text) == fingerprint
        assert (
            signing_key.fingerprint(text.replace("\n\n", "\nVersion: GnuPG v2.0.22 (GNU/Linux)\n\n", 1)) == fingerprint
        )
        assert signing_key.fingerprint(armoured(body(text))) == fingerprint, "without its checksum"


def test_a_file_with_more_than_the_key_has_no_fingerprint(keys):
    one, two = (keys[name][0] for name in ("one", "two"))
    data, other = body(one), body(two)
    for text in (
        keys["sub"][0],
        keys["both"][0],
        one + two,
        two + one,
        f"text\n{one}",
        f"{one}text\n",
        one.replace("\n\n", "\n-----BEGIN PGP PUBLIC KEY BLOCK-----\n\n", 1),
        # What one parser leaves out, another one may read.
        armoured(data + other),
        armoured(data[:-1]),
        armoured(data + b"\x99"),
        armoured(data + b"\xc6\xe1" + other),
        armoured(b"\x99\x00\x00" + data),
        one.replace("\n\n", "\n\n!", 1),
        one.replace("\n\n", "\n\n=AAAA\n", 1),
        f"{BEGIN}\n\n{END}\n",
        "",
    ):
        assert signing_key.fingerprint(text) == "", text


@pytest.fixture
def mirror():
    """A web server, and the address of its file FILE."""
    with served.Server().running() as server:
        yield server, f"{server.url}{FILE}"


FILE = "/cuda.asc"


def options(url, state="present", **pins):
    repository = {"name": "cuda", "url": "https://example.org/cuda/", "key_url": url, **pins}
    return package_set(name="driver", state=state, repositories=[repository])


def pins_of(keys, name):
    text, fingerprint = keys[name]
    return ({"key_sha256": hashlib.sha256(text.encode()).hexdigest()}, {"key_fingerprint": fingerprint})


@pytest.mark.parametrize("state", ["verified", "present"])
@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("which", [0, 1])
def test_another_key_is_refused_before_anything_changes(keys, mirror, state, check, which):
    server, url = mirror
    pin = pins_of(keys, "one")[which]
    server.files[FILE] = keys["two"][0].encode()
    node = machine()
    before = dict(node.files)
    if state == "present" and check:
        # A prediction downloads nothing: that is what the state verified is for.
        apply(options(url, state, **pin), node, "debian", check=True, fetch=signing_key.fetch_key)
        assert server.asked == []
        return
    with pytest.raises(signing_key.KeyRefused) as caught:
        apply(options(url, state, **pin), node, "debian", check=check, fetch=signing_key.fetch_key)
    [(option, expected)] = pin.items()
    found = pins_of(keys, "two")[which][option]
    for words in (
        "repositories: cuda:",
        url,
        f"{option} is {expected}",
        f" {found},",
        "nothing was changed",
        "set key_",
    ):
        assert words in str(caught.value)
    fields = {"code": "key_refused", "repository": "cuda", "origin": url, "expected": expected, "found": found}
    assert caught.value.details.items() >= fields.items()
    assert node.files == before


@pytest.mark.parametrize("which", [0, 1])
def test_the_pinned_key_is_taken(keys, mirror, which):
    server, url = mirror
    server.files[FILE] = keys["one"][0].encode()
    pin = pins_of(keys, "one")[which]
    node = machine()
    done = apply(options(url, "verified", **pin), node, "debian", fetch=signing_key.fetch_key)
    assert done == {"changed": False, "diff": []}
    assert server.asked == [("GET", FILE)] and KEYRING not in node.files


def test_a_key_that_doesnt_end_is_refused(mirror):
    server, url = mirror
    server.files[FILE] = KEY.encode() * 100_000
    with pytest.raises(ShareError, match="more than 1024 KiB"):
        apply(options(url, "verified"), machine(), "debian", fetch=signing_key.fetch_key)


@pytest.mark.parametrize(("have", "executed"), [(None, 1), ("b" * 64, 1), ("a" * 64, 0)])
@pytest.mark.parametrize("check", [False, True])
def test_only_a_key_that_the_node_lacks_is_verified(monkeypatch, have, executed, check):
    repository = {
        "name": "cuda",
        "url": "https://example.org/",
        "key_url": "https://example.org/k",
        "key_sha256": "a" * 64,
    }
    facts = apt_facts({})
    facts["apt"]["keys"] = {KEYRING: have} if have else {}
    given = {"name": "driver", "state": "verified", "repositories": [repository], "observed": facts}
    node = Node(given, monkeypatch, answers=[{"changed": False}], check=check)
    assert node.run()["changed"] is False and len(node.executed) == executed
    # So the plan of site.yml has no step for it.
    assert planner(package_set(**{**given, "observed": None}), facts).plan().empty
