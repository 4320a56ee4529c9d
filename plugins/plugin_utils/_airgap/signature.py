# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Signatures of the user's OpenPGP key: made by gpg where the archive is made, verified by gpgv where it is used."""

from __future__ import annotations

import base64
import binascii
import os
import re
import tempfile
import typing as t

from ...module_utils._core.errors import BadInput
from ...module_utils._core.untrusted import line
from .programs import NOT_INSTALLED, Run, last_words, run

# Bytes of a file of public keys, and of a signature.
LARGEST_KEYS = 4 << 20
LARGEST = 64 << 10
# OpenPGP's numbers of MD5, SHA-1 and RIPEMD-160, which sign nothing any more.
BROKEN_HASHES = ("1", "2", "3")
_BLOCK = re.compile(rb"-----BEGIN PGP PUBLIC KEY BLOCK-----\r?\n(.*?)-----END PGP PUBLIC KEY BLOCK-----", re.DOTALL)
_FINGERPRINT = re.compile(r"^fpr:*([0-9A-F]{40,64}):", re.MULTILINE)
_STATUS = re.compile(r"^\[GNUPG:\] ([A-Z_]+) ?(.*)$", re.MULTILINE)


class Refused(Exception):
    """A signature doesn't say that a key of the user's has signed this; the message continues a sentence.

    :ivar code: why: ``other_content``, ``unknown_key``, ``expired``, ``revoked``, ``weak`` or ``none``.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def sign(path: str, target: str, key: str, program: Run = run, home: str = "") -> None:
    """Write the detached, armoured signature of a file.

    :param key: as gpg's --local-user has it: a fingerprint, or an address; its secret key is in gpg's keyring, and
        gpg-agent knows its passphrase, or asks for it.
    :param home: gpg's folder; empty for the user's.
    :raises BadInput: gpg is missing, or doesn't sign.
    """
    own = ["--homedir", home] if home else []
    command = ["gpg", *own, "--batch", "--yes", "--no-tty", "--armor", "--digest-algo", "SHA256", "--local-user", key]
    done = program([*command, "--output", target, "--detach-sign", path], timeout=300)
    if done.rc == NOT_INSTALLED:
        raise _no_gpg()
    if done.rc != 0:
        raise BadInput(f"airgap_signing_key: gpg doesn't sign with {key}: {last_words(done)}", code="not_signed")


def require(key: str, program: Run = run, home: str = "") -> frozenset[str]:
    """Return the fingerprints of a key whose secret half gpg has, and of its subkeys.

    :raises BadInput: it hasn't, or is missing.
    """
    own = ["--homedir", home] if home else []
    done = program(["gpg", *own, "--batch", "--no-tty", "--with-colons", "--list-secret-keys", "--", key])
    if done.rc == NOT_INSTALLED:
        raise _no_gpg()
    if done.rc != 0:
        raise BadInput(f"airgap_signing_key: gpg has no secret key {key}: {last_words(done, 1)}", code="no_key")
    return frozenset(_FINGERPRINT.findall(done.out))


def _no_gpg() -> BadInput:
    return BadInput("airgap_signing_key: this machine has no gpg; install gnupg", code="no_gpg")


def is_signed(path: str, signature: str, fingerprints: t.Collection[str], program: Run = run, home: str = "") -> bool:
    """Return whether a signature is that of a file by one of these keys of gpg's keyring."""
    own = ["--homedir", home] if home else []
    done = program(["gpg", *own, "--batch", "--no-tty", "--status-fd", "1", "--verify", signature, path], timeout=300)
    words: dict[str, list[str]] = {name: rest.split() for name, rest in _STATUS.findall(done.out)}
    return done.rc == 0 and bool(set(words.get("VALIDSIG", ())) & set(fingerprints))


def verify(content: bytes, signature: bytes, key_file: str, program: Run = run) -> str:
    """Return the fingerprint of the key that signed a text: the primary key's.

    :param key_file: public keys, armoured or not.
    :raises Refused: none of these keys has.
    :raises BadInput: the file has no keys, or gpgv is missing.
    """
    keys = _keys(key_file)
    if not 0 < len(signature) <= LARGEST:
        raise Refused("none", "is empty, or no signature")
    with tempfile.TemporaryDirectory(prefix="kubegpu-") as folder:
        paths = {}
        for name, data in (("keys.gpg", keys), ("signature", signature), ("signed", content)):
            paths[name] = os.path.join(folder, name)
            with open(paths[name], "wb") as file:
                file.write(data)
        # A folder of its own: no configuration of the user's adds a keyring.
        command = ["gpgv", "--homedir", folder, "--status-fd", "1", "--keyring", paths["keys.gpg"]]
        done = program([*command, paths["signature"], paths["signed"]], timeout=300)
    if done.rc == NOT_INSTALLED:
        raise BadInput("airgap_verification_key: this machine has no gpgv; install gpgv, or gnupg2", code="no_gpgv")
    words: dict[str, list[str]] = {name: rest.split() for name, rest in _STATUS.findall(done.out)}
    valid = words.get("VALIDSIG") or []
    if done.rc == 0 and "GOODSIG" in words and len(valid) >= 8:
        if valid[7] in BROKEN_HASHES:
            raise Refused("weak", "uses a broken hash (MD5 or SHA-1)")
        return valid[-1]
    raise _refused(words, key_file)


def _refused(words: t.Mapping[str, list[str]], key_file: str) -> Refused:
    if "BADSIG" in words:
        return Refused("other_content", "was made for another content")
    if "EXPKEYSIG" in words or "EXPSIG" in words:
        return Refused("expired", "is by a key that has expired, or has expired itself")
    if "REVKEYSIG" in words:
        return Refused("revoked", "is by a key that was revoked")
    if "NO_PUBKEY" in words:
        key = line((words["NO_PUBKEY"] or ["?"])[0], 60)
        return Refused("unknown_key", f"is by key {key}, which {key_file} hasn't")
    return Refused("none", "isn't one that gpgv understands")


def _keys(path: str) -> bytes:
    """Return public keys as gpgv reads them: without armour."""
    try:
        with open(path, "rb") as file:
            content = file.read(LARGEST_KEYS + 1)
    except OSError as error:
        raise BadInput(f"airgap_verification_key: {path} can't be read: {error.strerror}") from error
    if len(content) > LARGEST_KEYS:
        raise BadInput(f"airgap_verification_key: {path} has more than {LARGEST_KEYS >> 20} MiB")
    # The first byte of a packet has its highest bit set.
    if content[:1] >= b"\x80":
        return content
    found = b""
    for block in _BLOCK.finditer(content):
        # Headers end with an empty line; the checksum begins with =.
        body = re.split(rb"\r?\n\s*\r?\n", b"\n" + block.group(1), maxsplit=1)[-1]
        rows = [row.strip() for row in body.splitlines() if row.strip()]
        try:
            found += base64.b64decode(b"".join(row for row in rows if not row.startswith(b"=")), validate=True)
        except (binascii.Error, ValueError):
            found = b""
            break
    if not found:
        raise BadInput(f"airgap_verification_key: {path} isn't a file of OpenPGP public keys")
    return found
