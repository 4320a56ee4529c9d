# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The certificates by which kube-scheduler and an extender in another pod authenticate each other, and metrics' ones.

Two Secrets hold them, of type kubernetes.io/tls with a ``ca.crt`` beside: the extender's, whose ``ca.crt`` signs its
clients, and kube-scheduler's, whose ``ca.crt`` signs the extender. Existing valid certificates are kept, also those of
another authority such as cert-manager. The key of our own authority is discarded, so a renewal makes all of them.
The metrics' Secret has a server's certificate alone: their readers have tokens.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import ipaddress
import typing as t

from .._core.errors import BadInput
from .._core.types import JsonObject

try:
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    MISSING = ""
except ImportError as error:
    MISSING = str(error)

Side = dict[str, str]


class Certificates(t.TypedDict):
    """Each side's ``authority``, ``certificate`` and ``key`` as PEM texts, and whether this collection made them."""

    ours: bool
    server: Side
    client: Side


SERVER, CLIENT = "gpushare-extender-tls", "gpushare-extender-client"
AUTHORITY = "gpushare extender authority"
DAYS = 3650
# A run in the last year renews them, before they expire.
RENEW_DAYS = 365
# Allows for different clocks.
EARLIER = datetime.timedelta(hours=1)
PARTS = {"authority": "ca.crt", "certificate": "tls.crt", "key": "tls.key"}


def fitting(secrets: t.Sequence[JsonObject], names: t.Sequence[str], now: datetime.datetime) -> Certificates:
    """Return both sides' certificates, the existing ones or new ones.

    :param secrets: the existing ones of the two Secrets, as objects of the API.
    :param names: the extender's host names for kube-scheduler.
    :param now: with a time zone.
    :raises BadInput: those of another authority are invalid, or the package cryptography is missing.
    """
    if MISSING:
        raise BadInput(f"certificates need the Python package cryptography on the controller: {MISSING}")
    texts = {str(secret["metadata"]["name"]): _texts(secret) for secret in secrets}
    if not texts:
        return _new(names, now)
    server, client = texts.get(SERVER, {}), texts.get(CLIENT, {})
    reason = _reason(server, client, names, now)
    ours = all(_ours(side) for side in texts.values())
    if not reason and not (ours and _ends_soon((server, client), now)):
        return {"ours": ours, "server": server, "client": client}
    if not ours:
        raise BadInput(f"{reason}. Correct it, or delete both Secrets to have new ones made")
    return _new(names, now)


def of_server(secrets: t.Sequence[JsonObject], names: t.Sequence[str], now: datetime.datetime) -> Side:
    """Return the certificate of a server whose clients have none, the existing one or a new one.

    :param secrets: the existing Secret, as an object of the API, if any.
    :param names: the server's host names and addresses.
    :param now: with a time zone.
    :raises BadInput: the package cryptography is missing.
    """
    if MISSING:
        raise BadInput(f"certificates need the Python package cryptography on the controller: {MISSING}")
    for secret in secrets:
        side = _texts(secret)
        if _reason_of(str(secret["metadata"]["name"]), side, side, now) or _ends_soon((side,), now):
            continue
        if set(names) <= set(_names(_certificate(side["certificate"]))):
            return side
    return _new(names, now)["server"]


def _texts(secret: JsonObject) -> Side:
    data = secret.get("data") or {}
    try:
        return {part: base64.b64decode(data.get(key) or "").decode() for part, key in PARTS.items()}
    except (binascii.Error, UnicodeDecodeError):
        return {}


def _reason(server: Side, client: Side, names: t.Sequence[str], now: datetime.datetime) -> str:
    """Return why these certificates can't be used; empty where they can."""
    for secret, side in ((SERVER, server), (CLIENT, client)):
        if not any(side.values()):
            return f"Secret {secret}: it doesn't exist, or has no certificate and key"
    for secret, side, signer in ((SERVER, server, client), (CLIENT, client, server)):
        if reason := _reason_of(secret, side, signer, now):
            return reason
    missing = [name for name in names if name not in _names(_certificate(server["certificate"]))]
    return f"Secret {SERVER}: its certificate isn't for {', '.join(missing)}" if missing else ""


def _reason_of(secret: str, side: Side, signer: Side, now: datetime.datetime) -> str:
    """Return why one Secret's certificate can't be used with the authority of ``signer``; empty where it can."""
    try:
        certificate = _certificate(side["certificate"])
        key = serialization.load_pem_private_key(side["key"].encode(), None)
        authorities = x509.load_pem_x509_certificates(signer["authority"].encode())
    except (KeyError, ValueError, TypeError):
        return f"Secret {secret}: it, or the ca.crt of the other one, has no readable certificate"
    if _public(key.public_key()) != _public(certificate.public_key()):
        return f"Secret {secret}: tls.key isn't the key of tls.crt"
    if not _begins(certificate) <= now <= _ends(certificate):
        return f"Secret {secret}: its certificate is valid from {_begins(certificate)} to {_ends(certificate)}"
    if not any(_signed(certificate, authority) for authority in authorities):
        return f"Secret {secret}: its certificate isn't signed by a certificate in ca.crt of the other one"
    return ""


def _ends_soon(sides: t.Iterable[Side], now: datetime.datetime) -> bool:
    limit = now + datetime.timedelta(days=RENEW_DAYS)
    return any(_ends(_certificate(side["certificate"])) < limit for side in sides)


def _ours(side: Side) -> bool:
    try:
        issuer = _certificate(side["certificate"]).issuer
    except (KeyError, ValueError):
        # An empty Secret is ours to fill.
        return not any(side.values())
    return [attribute.value for attribute in issuer.get_attributes_for_oid(NameOID.COMMON_NAME)] == [AUTHORITY]


# --------------------------------------------------------------------------- reading


def _certificate(text: str) -> x509.Certificate:
    """Parse the first certificate: those after it are its chain."""
    return x509.load_pem_x509_certificates(text.encode())[0]


def _signed(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _public(key: t.Any) -> bytes:
    return bytes(key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo))


def _names(certificate: x509.Certificate) -> list[str]:
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    names = extension.value
    return names.get_values_for_type(x509.DNSName) + [
        str(address) for address in names.get_values_for_type(x509.IPAddress)
    ]


def _begins(certificate: x509.Certificate) -> datetime.datetime:
    # cryptography before 42 has only the names without a time zone.
    return getattr(certificate, "not_valid_before_utc", None) or certificate.not_valid_before.replace(
        tzinfo=datetime.UTC
    )


def _ends(certificate: x509.Certificate) -> datetime.datetime:
    return getattr(certificate, "not_valid_after_utc", None) or certificate.not_valid_after.replace(tzinfo=datetime.UTC)


# --------------------------------------------------------------------------- making


def _new(names: t.Sequence[str], now: datetime.datetime) -> Certificates:
    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority = _signed_by(authority_key, AUTHORITY, authority_key, now, None, ())

    def side(name: str, usage: x509.ObjectIdentifier, alternatives: t.Sequence[str]) -> Side:
        key = ec.generate_private_key(ec.SECP256R1())
        return {
            "authority": _pem(authority),
            "certificate": _pem(_signed_by(key, name, authority_key, now, (usage,), alternatives)),
            "key": key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ).decode(),
        }

    server = side("gpushare-extender", ExtendedKeyUsageOID.SERVER_AUTH, names)
    return {"ours": True, "server": server, "client": side("gpushare-scheduler", ExtendedKeyUsageOID.CLIENT_AUTH, ())}


def _signed_by(
    key: ec.EllipticCurvePrivateKey,
    name: str,
    authority: ec.EllipticCurvePrivateKey,
    now: datetime.datetime,
    usage: t.Sequence[x509.ObjectIdentifier] | None,
    alternatives: t.Sequence[str],
) -> x509.Certificate:
    """Sign a certificate; without a usage it is the authority's own."""
    leaf = usage is not None
    bits = dict.fromkeys(("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False)
    bits |= dict.fromkeys(("encipher_only", "decipher_only"), False)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, AUTHORITY)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLIER)
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(x509.BasicConstraints(ca=not leaf, path_length=None if leaf else 0), critical=True)
        .add_extension(
            x509.KeyUsage(digital_signature=leaf, key_cert_sign=not leaf, crl_sign=not leaf, **bits), critical=True
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
    )
    if usage is not None:
        builder = builder.add_extension(x509.ExtendedKeyUsage(usage), critical=False)
    if alternatives:
        wanted = x509.SubjectAlternativeName([_general_name(alternative) for alternative in alternatives])
        builder = builder.add_extension(wanted, critical=False)
    return builder.sign(authority, hashes.SHA256())


def _general_name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()
