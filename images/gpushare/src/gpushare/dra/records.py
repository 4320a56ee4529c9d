# SPDX-License-Identifier: GPL-3.0-or-later
"""The prepared claims on disk: one file for each, written atomically and synced, so that any of our ends loses none.

A record holds the claim, the devices that kubelet was told, and the CDI specification, so that a repeated request has
the same answer, and a specification that is gone (the machine was restarted) is written again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import typing as t
from pathlib import Path

from gpushare.dra.claims import Claim, Unbooked, from_json, to_json, valid_uid
from gpushare.kubelet.dra import Device
from gpushare.shared._core.types import JsonObject

log = logging.getLogger("gpushare.dra")

VERSION = 1
# Neither kubelet nor a runtime reads files with these endings.
_TEMPORARY, _DAMAGED = ".tmp", ".damaged"


@dataclasses.dataclass(frozen=True)
class Record:
    """A prepared claim.

    :param devices: as kubelet was told.
    :param specification: the claim's own CDI devices.
    :param unbooked: what it holds without having it in the API, as far as that is known.
    """

    claim: Claim
    devices: tuple[Device, ...]
    specification: JsonObject
    unbooked: Unbooked | None = None


def write(path: Path, text: str) -> None:
    """Write a file so that after any end of this process or machine it is the old one or the new one.

    :raises OSError: it can't be written.
    """
    temporary = path.with_name(f".{path.name}{_TEMPORARY}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync(path.parent)


def remove(path: Path) -> None:
    """Remove a file for good; one that isn't there is no error.

    :raises OSError: it can't be removed.
    """
    try:
        path.unlink()
    except FileNotFoundError:
        return
    sync(path.parent)


def sync(folder: Path) -> None:
    """Write a folder's entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Records:
    """The records in a folder; one process uses it at a time.

    :param folder: of ours alone; it is created.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self) -> dict[str, Record]:
        """Return all records by the claims' UIDs, and remove what an interrupted write has left.

        A file that can't be read is renamed: kubelet asks for its claim again, or to unprepare it.

        :raises OSError: the folder can't be used.
        """
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        records: dict[str, Record] = {}
        for file in sorted(self._folder.iterdir()):
            if file.name.endswith(_TEMPORARY):
                file.unlink()
            elif file.suffix == ".json":
                try:
                    record = _decode(json.loads(file.read_text(encoding="utf-8")))
                    if record.claim.uid != file.stem:
                        raise ValueError(f"it is of claim {record.claim.uid}")
                except (ValueError, RecursionError) as error:
                    log.error("%s can't be read and is renamed: %s", file, error)
                    file.replace(file.with_name(file.name + _DAMAGED))
                else:
                    records[file.stem] = record
        return records

    def put(self, record: Record) -> None:
        """Write a record.

        :raises OSError: it can't be written.
        """
        write(self._file(record.claim.uid), json.dumps(_encode(record), separators=(",", ":")))

    def remove(self, uid: str) -> None:
        """Remove a claim's record.

        :raises OSError: it can't be removed.
        """
        remove(self._file(uid))

    def _file(self, uid: str) -> Path:
        assert valid_uid(uid)
        return self._folder / f"{uid}.json"


def _encode(record: Record) -> JsonObject:
    lost = record.unbooked
    return {
        "version": VERSION,
        "claim": to_json(record.claim),
        "devices": [dataclasses.asdict(device) for device in record.devices],
        "specification": record.specification,
        **({"unbooked": {"code": lost.code, "mib": dict(lost.mib)}} if lost else {}),
    }


def _decode(value: t.Any) -> Record:
    try:
        if value["version"] != VERSION:
            raise ValueError(f"it has version {value['version']}, and this is version {VERSION}")
        devices = tuple(
            Device(
                str(device["request"]),
                str(device["pool"]),
                str(device["name"]),
                tuple(map(str, device["cdi"])),
                str(device["share"]),
            )
            for device in value["devices"]
        )
        specification = value["specification"]
        if not isinstance(specification, dict):
            raise ValueError("its specification is no object")
        lost = value.get("unbooked")
        unbooked = Unbooked(str(lost["code"]), {str(k): int(v) for k, v in lost["mib"].items()}) if lost else None
        return Record(from_json(value["claim"]), devices, specification, unbooked)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no record: {error!r}") from error
