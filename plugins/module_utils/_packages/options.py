# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The options of the module ``pinned_packages``: the package set, the key of its repository, and their validation.

What only one package manager restricts is validated by its planner (``apt``, ``rpm``).
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import re
import typing as t

from .._core.digest import digest
from .._core.errors import BadInput, ShareError
from .._core.types import JsonObject
from .names import matches_any


@dataclasses.dataclass(frozen=True)
class Repository:
    """One repository and its key; exactly one of ``key_url`` and ``key_text`` is set.

    :param suites: apt only, as are ``components``, ``architectures`` and ``targets``.
    :param signed: rpm only: ``packages``, ``metadata`` or both.
    :param key_fingerprint: of the only key in the file, in capitals; read where ``key_sha256`` is empty.
    """

    name: str
    url: str
    suites: tuple[str, ...]
    components: tuple[str, ...]
    architectures: tuple[str, ...]
    signed: tuple[str, ...]
    key_url: str
    key_text: str
    key_sha256: str
    key_fingerprint: str = ""
    targets: tuple[str, ...] = ()

    @property
    def key_origin(self) -> str:
        return self.key_url or "given as text"


@dataclasses.dataclass(frozen=True)
class Pin:
    """One entry of apt's preferences."""

    package: str
    pin: str
    priority: int


@dataclasses.dataclass(frozen=True)
class Stream:
    """A module stream of dnf 4; ``switch``: replace another stream although packages of the set are installed."""

    module: str
    stream: str
    switch: bool

    def __str__(self) -> str:
        return f"{self.module}:{self.stream}"


@dataclasses.dataclass(frozen=True)
class Package:
    """A package and the pattern of its version; an empty pattern matches every version."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name}={self.version}" if self.version else self.name


@dataclasses.dataclass(frozen=True)
class PackageSet:
    """The options of the module ``pinned_packages``, validated.

    :param present: whether the set is wanted; where ``verified``, neither it nor its absence is.
    :param verified: only the keys of its repositories are checked.
    :param exclusive: repositories that it has written and that aren't listed any more are removed.
    """

    name: str
    present: bool
    repositories: tuple[Repository, ...]
    pins: tuple[Pin, ...]
    streams: tuple[Stream, ...]
    packages: tuple[Package, ...]
    hold: bool
    hold_also: tuple[str, ...]
    never_upgrade: tuple[str, ...]
    conflicts: tuple[str, ...]
    replaces: tuple[str, ...]
    node_dir: str
    keep: tuple[str, ...]
    erase_dependencies: bool
    verified: bool = False
    exclusive: bool = False

    @property
    def names(self) -> frozenset[str]:
        return frozenset(package.name for package in self.packages)

    def manages(self, name: str) -> bool:
        """Return whether a lock of this package belongs to this set."""
        return name in self.names or matches_any(name, self.hold_also)

    def replaceable(self, name: str) -> bool:
        """Return whether an installed package may be removed to make place for the set."""
        return name not in self.names and matches_any(name, self.replaces)

    def kept(self, name: str) -> bool:
        """Return whether a package stays installed when the set is removed."""
        return matches_any(name, self.keep)


ARMOUR = ("-----BEGIN PGP PUBLIC KEY BLOCK-----", "-----END PGP PUBLIC KEY BLOCK-----")

# Bytes; the keys of distributions and of NVIDIA have 1 to 30 KiB.
LARGEST = 1 << 20
# The packets of a key without subkeys: the key, a name, a signature.
PLAIN_KEY = (6, 13, 2)

Fetch = t.Callable[[str], bytes]


def check_key(repository: Repository, text: str) -> None:
    """Validate a repository's key.

    :raises KeyRefused: it isn't the key that ``key_sha256`` or, without it, ``key_fingerprint`` names.
    :raises ShareError: it isn't an armoured key.
    """
    lines = [line.strip() for line in text.splitlines()]
    if any(line not in lines for line in ARMOUR):
        raise _not_a_key(repository)
    if repository.key_sha256:
        if digest(text) != repository.key_sha256:
            raise KeyRefused(repository, "key_sha256", repository.key_sha256, digest(text))
    elif repository.key_fingerprint:
        actual = fingerprint(text)
        if actual != repository.key_fingerprint:
            raise KeyRefused(repository, "key_fingerprint", repository.key_fingerprint, actual or "no single key")


def _not_a_key(repository: Repository) -> ShareError:
    return ShareError(
        f"repositories: {repository.name}: the key ({repository.key_origin}) isn't an armoured OpenPGP public key"
    )


class KeyRefused(ShareError):
    """A key that isn't the pinned one."""

    def __init__(self, repository: Repository, option: str, expected: str, found: str) -> None:
        what = "SHA-256" if option == "key_sha256" else "fingerprint"
        super().__init__(
            f"repositories: {repository.name}: the key ({repository.key_origin}) has {what} {found}, and {option} is "
            f"{expected}: nothing was changed; where the repository's owner announces this key, set {option} to it "
            "(the roles' variables end with repo_key_sha256), and otherwise don't use this repository",
            code="key_refused",
            repository=repository.name,
            origin=repository.key_origin,
            expected=expected,
            found=found,
        )


def fetch_key(url: str) -> bytes:
    """Download a key; proxies are those of the environment.

    :raises ShareError: it is larger than any key.
    """
    from ansible.module_utils.urls import open_url

    with open_url(url, timeout=30) as answer:
        key = t.cast(bytes, answer.read(LARGEST + 1))
    if len(key) > LARGEST:
        raise ShareError(f"it has more than {LARGEST >> 10} KiB")
    return key


def key_of(repository: Repository, fetch: Fetch) -> str:
    """Return the repository's key, downloaded unless the options contain it.

    :raises ShareError: it can't be downloaded, or isn't the expected key.
    """
    text = repository.key_text
    if not text:
        try:
            text = fetch(repository.key_url).decode()
        except UnicodeDecodeError as error:
            raise _not_a_key(repository) from error
        except Exception as error:
            raise ShareError(
                f"repositories: {repository.name}: the key at {repository.key_url} can't be downloaded: {error}"
            ) from error
    check_key(repository, text)
    return text


def fingerprint(text: str) -> str:
    """Return the fingerprint of the version 4 key that a text consists of, in capital hexadecimal digits.

    Empty where the text has anything beside that key, its names and their signatures: a package manager might read more
    keys in it than this function.
    """
    rows = [line.strip() for line in text.splitlines() if line.strip()]
    if not text.isascii() or len(rows) < 3 or (rows[0], rows[-1]) != ARMOUR:
        return ""
    body = [line.strip() for line in text.strip().splitlines()[1:-1]]
    # Headers end with an empty line; the checksum begins with =.
    end = body.index("") if "" in body else -1
    if any(not re.fullmatch(r"[A-Z][A-Za-z]*: [ -~]*", line) for line in body[: max(end, 0)]):
        return ""
    lines = body[end + 1 :]
    if lines and re.fullmatch(r"=[A-Za-z0-9+/]{4}", lines[-1]):
        lines.pop()
    try:
        data = base64.b64decode("".join(lines), validate=True)
    except (binascii.Error, ValueError):
        return ""
    packets = list(_packets(data))
    whole = sum(size for _tag, _body, size in packets) == len(data)
    tags = [tag for tag, _body, _size in packets]
    if not whole or tags[:1] != [6] or tags.count(6) != 1 or any(tag not in PLAIN_KEY for tag in tags):
        return ""
    return _fingerprint(packets[0][1]).upper()


def _fingerprint(packet: bytes) -> str:
    """Return the fingerprint of a version 4 key packet (RFC 9580, section 5.5.4.2); empty for another version."""
    if packet[:1] != b"\x04":
        return ""
    return hashlib.sha1(b"\x99" + len(packet).to_bytes(2, "big") + packet).hexdigest()


def rpm_names(text: str) -> list[str]:
    """Return rpm's names of the keys of an armoured block: ``<last 8 digits of the key id>-<creation time>``.

    Only version 4 keys, which are all that rpm 4 reads; others are left out.
    """
    names: list[str] = []
    body: list[str] = []
    inside = False
    for line in [*text.splitlines(), ARMOUR[1]]:
        word = line.strip()
        if word == ARMOUR[0]:
            inside, body = True, []
        elif word == ARMOUR[1] and inside:
            inside = False
            names += _names(body)
        elif inside:
            body.append(word)
    return names


def _names(lines: t.Sequence[str]) -> t.Iterator[str]:
    # Headers end with an empty line; the checksum begins with =.
    start = lines.index("") + 1 if "" in lines else 0
    try:
        data = base64.b64decode("".join(line for line in lines[start:] if not line.startswith("=")))
    except (binascii.Error, ValueError):
        return
    for tag, packet, _size in _packets(data):
        if tag == 6 and packet[:1] == b"\x04":
            yield f"{_fingerprint(packet)[-8:]}-{packet[1:5].hex()}"


def _packets(data: bytes) -> t.Iterator[tuple[int, bytes, int]]:
    """Yield tag, body and size of each packet of an OpenPGP message (RFC 9580, section 4.2) that is whole."""
    while len(data) > 1 and data[0] & 0x80:
        first = data[0]
        if first & 0x40:
            tag, size, start = first & 0x3F, data[1], 2
            if 192 <= size < 224 and len(data) > 2:
                size, start = ((size - 192) << 8) + data[2] + 192, 3
            elif size == 255:
                size, start = int.from_bytes(data[2:6], "big"), 6
            elif size >= 224:
                return
        else:
            width = (1, 2, 4, 0)[first & 3]
            tag, start = (first & 0x3C) >> 2, 1 + width
            size = int.from_bytes(data[1:start], "big") if width else len(data) - 1
        if start + size > len(data):
            return
        yield tag, data[start : start + size], start + size
        data = data[start + size :]


_WORDS: JsonObject = {"type": "list", "elements": "str", "default": []}

ARGUMENTS: JsonObject = {
    "name": {"type": "str", "required": True},
    "state": {"type": "str", "choices": ["present", "absent", "verified"], "default": "present"},
    "repositories": {
        "type": "list",
        "elements": "dict",
        "default": [],
        "options": {
            "name": {"type": "str", "required": True},
            "url": {"type": "str", "required": True},
            "suites": {**_WORDS, "default": ["/"]},
            "components": _WORDS,
            "architectures": _WORDS,
            "targets": _WORDS,
            "signed": {**_WORDS, "choices": ["packages", "metadata"], "default": ["packages"]},
            "key_url": {"type": "str", "no_log": False},
            "key_text": {"type": "str", "no_log": False},
            "key_sha256": {"type": "str", "no_log": False},
            "key_fingerprint": {"type": "str", "no_log": False},
        },
        "mutually_exclusive": [("key_url", "key_text")],
        "required_one_of": [("key_url", "key_text")],
    },
    "pins": {
        "type": "list",
        "elements": "dict",
        "default": [],
        "options": {
            "package": {"type": "str", "required": True},
            "pin": {"type": "str", "required": True},
            "priority": {"type": "int", "default": 1001},
        },
    },
    "streams": {
        "type": "list",
        "elements": "dict",
        "default": [],
        "options": {
            "module": {"type": "str", "required": True},
            "stream": {"type": "str", "required": True},
            "switch": {"type": "bool", "default": False},
        },
    },
    "packages": _WORDS,
    "hold": {"type": "bool", "default": True},
    "hold_also": _WORDS,
    "never_upgrade": _WORDS,
    "conflicts": _WORDS,
    "replaces": _WORDS,
    "source_dir": {"type": "path"},
    "node_dir": {"type": "path"},
    "keep": _WORDS,
    "erase_dependencies": {"type": "bool", "default": False},
    "exclusive": {"type": "bool", "default": False},
    "observed": {"type": "dict"},
}


def package_set(params: JsonObject) -> PackageSet:
    """Return the desired state that the module's options describe.

    :raises BadInput: an option is invalid; the message names it.
    """
    check_word("name", params["name"])
    repositories = tuple(_repository(repository) for repository in params["repositories"])
    packages = tuple(_package(text) for text in params["packages"])
    _refuse_twice("repositories", [repository.name for repository in repositories])
    _refuse_twice("packages", [package.name for package in packages])
    for pin in params["pins"]:
        for field in ("package", "pin"):
            if not pin[field].strip() or "\n" in pin[field]:
                raise BadInput(f"pins: {field}: {pin[field]!r} isn't one line of text")
    for pattern in params["never_upgrade"]:
        if not re.fullmatch(r'[^"\s]+', pattern):
            raise BadInput(f"never_upgrade: {pattern!r} isn't a pattern of package names")
    for option in ("hold_also", "conflicts", "replaces", "keep"):
        for pattern in params[option]:
            if not re.fullmatch(r"[A-Za-z0-9_.+*?\[\]!-]+", pattern):
                raise BadInput(f"{option}: {pattern!r} isn't a pattern of package names")
    return PackageSet(
        name=params["name"],
        present=params["state"] == "present",
        repositories=repositories,
        pins=tuple(Pin(pin["package"], pin["pin"], pin["priority"]) for pin in params["pins"]),
        streams=tuple(_stream(stream) for stream in params["streams"]),
        packages=packages,
        hold=params["hold"],
        hold_also=tuple(params["hold_also"]),
        never_upgrade=tuple(params["never_upgrade"]),
        conflicts=tuple(params["conflicts"]),
        replaces=tuple(params["replaces"]),
        node_dir=params["node_dir"] or "",
        keep=tuple(params["keep"]),
        erase_dependencies=params["erase_dependencies"],
        verified=params["state"] == "verified",
        exclusive=params["exclusive"],
    )


def check_word(option: str, value: str) -> None:
    """Refuse a name that can't be part of the name of a file that package managers read.

    :raises BadInput: it holds something else than lowercase letters, digits, ``-`` and ``_``.
    """
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", value):
        raise BadInput(f"{option}: {value!r} may contain only lowercase letters, digits, - and _")


def _refuse_twice(option: str, names: t.Sequence[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise BadInput(f"{option}: {', '.join(twice)} is given twice")


def _repository(option: JsonObject) -> Repository:
    name = option["name"]
    check_word("repositories: name", name)
    where = f"repositories: {name}:"
    if not re.fullmatch(r"[a-z+]+://?[^\s]+", option["url"]):
        raise BadInput(f"{where} url {option['url']!r} isn't the URL of a repository")
    if option.get("key_url") and not re.fullmatch(r"(https?|file)://[^\s]+", option["key_url"]):
        raise BadInput(f"{where} key_url {option['key_url']!r} isn't the URL of a key")
    sha256 = (option.get("key_sha256") or "").lower()
    if sha256 and not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise BadInput(f"{where} key_sha256 isn't 64 hexadecimal digits")
    fingerprint = (option.get("key_fingerprint") or "").replace(" ", "").upper()
    if fingerprint and not re.fullmatch(r"[0-9A-F]{40}", fingerprint):
        raise BadInput(f"{where} key_fingerprint isn't 40 hexadecimal digits")
    for field in ("suites", "components", "architectures", "targets"):
        for word in option[field]:
            if not re.fullmatch(r"[^\s]+", word):
                raise BadInput(f"{where} {field}: {word!r} isn't one word")
    text = (option.get("key_text") or "").strip()
    repository = Repository(
        name=name,
        url=option["url"],
        suites=tuple(option["suites"]),
        components=tuple(option["components"]),
        architectures=tuple(option["architectures"]),
        signed=tuple(option["signed"]),
        key_url=option.get("key_url") or "",
        key_text=text + "\n" if text else "",
        key_sha256=sha256,
        key_fingerprint=fingerprint,
        targets=tuple(option["targets"]),
    )
    if repository.key_text:
        check_key(repository, repository.key_text)
    return repository


def _package(text: str) -> Package:
    match = re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9_.+-]*)(?:=([0-9A-Za-z][0-9A-Za-z._+~^:-]*\*?))?", text)
    if not match:
        raise BadInput(f"packages: {text!r} is neither a package name nor name=version")
    return Package(match.group(1), match.group(2) or "")


def _stream(option: JsonObject) -> Stream:
    for field in ("module", "stream"):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.+-]*", option[field]):
            raise BadInput(f"streams: {field} {option[field]!r} isn't one word")
    return Stream(option["module"], option["stream"], option["switch"])
