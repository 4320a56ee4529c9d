# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Which driver a node gets, in which packages, and why it can't have it. Pure.

Three things decide: the node (``gpu_node``), what its distribution calls things (the catalogue of role driver, so that
nothing here knows a distribution by name), and what the user asks for.
"""

from __future__ import annotations

import fnmatch
import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _driver_flavour as flavours
from ansible_collections.kubegpu.share.plugins.module_utils._driver_catalog import Catalog
from ansible_collections.kubegpu.share.plugins.module_utils._driver_conflicts import conflicts

Json = t.Mapping[str, t.Any]

STATES = ("present", "external", "absent")
SOURCES = ("repository", "distribution", "packages", "runfile")
MAINTENANCE = ("never", "drain", "reboot")
VERSION = re.compile(r"[0-9]{3,}([.][0-9]+){1,2}")
SHA256 = re.compile(r"[0-9a-fA-F]{64}")

PERSISTENCED, FABRIC = "nvidia-persistenced", "nvidia-fabricmanager"


# By these files and locks a later run knows that the role has been here.
OUR_FILE = re.compile(r"/(90)?kubegpu-(driver|cuda)[.]?[a-z]*$")
DRIVER = re.compile(r"nvidia-(driver|kernel|dkms|headless|open)|kmod-nvidia")


def choose(gpu_node: Json, catalog: Json | None, options: Json) -> dict[str, t.Any]:
    """What role driver does on this node.

    :param catalog: what the node's distribution calls things; empty where there is no file for it.
    :param options: role driver's variables without their prefix, and ``host``.
    :returns: see the documentation of the filter ``driver_choice``.
    """
    return _Choice(gpu_node, Catalog(gpu_node, catalog or {}, options), options).result()


def verify(gpu_node: Json, options: Json) -> list[str]:
    """What is wrong with the driver as it is, the cause before its consequences; one sentence each."""
    host = options["host"]
    driver: Json = gpu_node.get("driver") or {}
    module, version, error = driver.get("module_version"), driver.get("version"), driver.get("error")
    cards = [card for card in gpu_node.get("gpus") or [] if card.get("driver") != "vfio-pci"]
    problems = []
    if any(card.get("driver") == "nouveau" for card in cards):
        problems.append(f"Nouveau still has cards of host {host}: reboot it and run this again.")
    if (module and version and module != version) or "version mismatch" in (error or ""):
        problems.append(
            f"Host {host} has kernel module {module} loaded, and nvidia-smi says {error or version}: "
            "reboot it and run this again."
        )
    if error:
        signed = " (Secure Boot is on: a module that was built here must be signed with an enrolled key)"
        problems.append(
            f"The driver of host {host} fails, nvidia-smi says: {error}"
            + (signed if gpu_node.get("secure_boot") else "")
        )
    listed = len(driver.get("cards") or [])
    if listed != len(cards):
        problems.append(f"Host {host} has {len(cards)} NVIDIA cards on PCI and nvidia-smi lists {listed}.")
    wanted = options.get("version")
    if options.get("state", "present") == "present" and version not in (None, wanted):
        problems.append(f"driver_version is {wanted} and nvidia-smi of host {host} says {version}.")
    return problems


class _Choice:
    """One node's choice, made step by step; ``refusals`` collects what forbids it."""

    def __init__(self, gpu_node: Json, catalog: Catalog, options: Json) -> None:
        self.seen = gpu_node
        self.catalog = catalog
        self.options = options
        self.host = str(options.get("host") or "")
        self.state = str(options.get("state") or "present")
        self.source_name = str(options.get("source") or "repository")
        self.version = str(options.get("version") or "")
        self.branch = catalog.branch
        self.refusals: list[str] = []
        self.notes: list[str] = []
        self.distribution: Json = gpu_node.get("distribution") or {}
        self.kernel: Json = gpu_node.get("kernel") or {}
        self.driver: Json = gpu_node.get("driver") or {}
        # Cards that a virtual machine owns are no concern of this node's driver.
        cards = [card for card in gpu_node.get("gpus") or [] if card.get("driver") != "vfio-pci"]
        self.generations = tuple(sorted({str(card.get("generation") or flavours.UNKNOWN) for card in cards}))

    # ------------------------------------------------------------------ the answer

    def result(self) -> dict[str, t.Any]:
        answer = self._nothing()
        if self.state == "absent":
            return {**answer, **self._absent()}
        if self.state != "external":
            self._refuse_words()
            answer.update({} if self.refusals else self._present())
        # They are complete only now: each step may have added to them.
        return {**answer, "refusals": self.refusals, "notes": self.notes}

    def _present(self) -> dict[str, t.Any]:
        of_runfile = self.source_name == "runfile"
        flavour = self._flavour()
        self._refuse_source()
        names = self.catalog.packages(flavour) if not (self.refusals or of_runfile) else []
        built = self._built(names)
        self._refuse_secure_boot(flavour, built)
        fabric = self._fabric()
        headers = built and self.options.get("install_headers", "auto") == "auto"
        return {
            "manager": self.catalog.manager if not of_runfile else "runfile",
            "flavour": flavour,
            "repositories": self.catalog.repositories(),
            "streams": self.catalog.streams(flavour),
            "pins": self.catalog.pins(),
            "headers": self.catalog.missing_headers() if headers else [],
            "prerequisites": self._prerequisites(),
            "build": self._build_tools(),
            "packages": [*names, *fabric],
            "replaced": self.catalog.replaced([*names, *fabric], flavour),
            "replaces": self.catalog.replaceable(),
            "hold_also": self.catalog.words("hold_also"),
            "never_upgrade": self.catalog.words("never_upgrade"),
            "services": [PERSISTENCED, *([FABRIC] if fabric else [])],
            "persistence_override": self.catalog.persistence_override if not of_runfile else "",
            "conflicts": self._conflicts(),
            "maintenance": self._maintenance(flavour),
        }

    def _nothing(self) -> dict[str, t.Any]:
        return {
            "refusals": [],
            "notes": [],
            "conflicts": [],
            "manager": "none",
            "flavour": "",
            "branch": self.branch,
            "maintenance": "",
            "repositories": [],
            "streams": [],
            "pins": [],
            "headers": [],
            "prerequisites": [],
            "build": [],
            "packages": [],
            "replaced": [],
            "replaces": [],
            "hold_also": [],
            "never_upgrade": [],
            "hold": bool(self.options.get("hold", True)),
            "source_dir": str(self.options.get("packages_dir") or "") if self.source_name == "packages" else "",
            "services": [],
            "persistence_override": "",
        }

    # ------------------------------------------------------------------ what can't be served at all

    def _refuse_words(self) -> None:
        for name, value, known in (
            ("driver_state", self.state, STATES),
            ("driver_source", self.source_name, SOURCES),
            ("driver_flavour", str(self.options.get("flavour") or "auto"), flavours.FLAVOURS),
            ("driver_maintenance", str(self.options.get("maintenance") or "never"), MAINTENANCE),
        ):
            if value not in known:
                self.refusals.append(f"{name} is {value}, which isn't known: it can be {' or '.join(known)}.")
        if not VERSION.fullmatch(self.version):
            self.refusals.append(f"driver_version is {self.version}, which is no driver version such as 580.95.05.")
        if not self.catalog.known:
            self.refusals.append(
                f"Host {self.host} runs {self.distribution.get('id')} {self.distribution.get('version')}, which role "
                "driver has no packages for: install the driver and set driver_state to external."
            )
        else:
            self._refuse_options()

    def _refuse_options(self) -> None:
        if self.source_name == "packages" and not self.options.get("packages_dir"):
            self.refusals.append("driver_packages_dir is empty, and driver_source packages takes the packages from it.")
        if self.source_name == "runfile":
            if not self.options.get("runfile"):
                self.refusals.append("driver_runfile is empty, and driver_source runfile installs it.")
            if not SHA256.fullmatch(str(self.options.get("runfile_sha256") or "")):
                self.refusals.append("driver_runfile_sha256 isn't a SHA-256, and a .run file is only run with one.")
        arch = str(self.distribution.get("arch"))
        if arch not in self.catalog.architectures:
            known = " or ".join(self.catalog.architectures)
            self.refusals.append(
                f"Host {self.host} is of architecture {arch}, and {self.catalog.name} has a driver for {known}."
            )

    def _refuse_source(self) -> None:
        name, source = self.catalog.name, self.catalog.source
        if not source:
            self.refusals.append(
                f"driver_source is distribution, and {self.distribution.get('id')} {self.distribution.get('version')} "
                f"(host {self.host}) has no driver of its own: set it to repository."
            )
            return
        if self.source_name == "runfile":
            return
        branches = source.get("branches")
        if branches and self.branch not in branches:
            own = " or ".join(map(str, branches))
            self.refusals.append(
                f"driver_version is {self.version}, and {name}'s own packages (driver_source: distribution) are "
                f"of branch {own}."
            )
        since, until = source.get("since", 0), source.get("until")
        if self.branch < since or (until and self.branch > until):
            bound = f"begin with branch {since}" if self.branch < since else f"end with branch {until}"
            self.refusals.append(
                f"driver_version is {self.version}, and the packages for {name} (driver_source: {self.source_name}) "
                f"{bound}."
            )
        doubtful = source.get("doubtful_after")
        if doubtful and self.branch > doubtful:
            self.notes.append(
                f"The packages for {name} are known up to branch {doubtful}: if driver_version {self.version} isn't "
                "found there, take an older one, or driver_source: runfile."
            )

    def _flavour(self) -> str:
        cards = flavours.Cards(self.host, self.generations, str(self.distribution.get("arch")), self.version)
        self.refusals += flavours.refused_branches(cards)
        flavour, why, note = flavours.choose(str(self.options.get("flavour") or "auto"), cards, self._has)
        self.refusals += [why] if why else []
        self.notes += [note] if note else []
        return flavour

    def _has(self, flavour: str) -> bool:
        """Whether there are packages of a flavour; a .run file has both, and names of the user's own aren't judged."""
        if self.source_name == "runfile" or self.options.get("packages") or not self.catalog.source:
            return True
        return bool(self.catalog.row.get(flavour))

    def _built(self, names: t.Sequence[str]) -> bool:
        """Whether the module is compiled on the node."""
        if self.source_name == "runfile":
            return True
        if self.options.get("packages"):
            return any("dkms" in name for name in names)
        return bool(self.catalog.source.get("built", True)) and not any("-kmp-" in name for name in names)

    def _prerequisites(self) -> list[dict[str, t.Any]]:
        """What must be enabled on the machine first: commands to run, or the reason of a refusal."""
        wanted = str(self.options.get("prerequisites") or "report")
        # A folder of packages has all that it needs, or says what it lacks.
        if self.source_name == "packages" or wanted == "ignore":
            return []
        missing = self.catalog.missing_prerequisites()
        if missing and wanted == "report":
            shown = " && ".join(" ".join(command) for one in missing for command in one["commands"])
            self.refusals.append(
                f"Host {self.host} lacks {' and '.join(one['what'] for one in missing)}: run '{shown}' there, or set "
                "driver_manage_prerequisites to install."
            )
        return missing if wanted == "install" else []

    def _build_tools(self) -> list[str]:
        """What a .run file that is yet to be run needs."""
        there = self.driver.get("library_version") or self.driver.get("version")
        if self.source_name != "runfile" or ("runfile" in (self.driver.get("others") or []) and there == self.version):
            return []
        return self.catalog.words("build")

    # ------------------------------------------------------------------ services

    def _fabric(self) -> list[str]:
        """The fabric manager's packages, where NVSwitches are; it must be of the driver's very version."""
        wanted = str(self.options.get("fabric_manager") or "auto")
        needed = bool(self.seen.get("nvswitches")) or bool((self.driver.get("fabric") or {}).get("needed"))
        if wanted == "absent" or (wanted == "auto" and not needed):
            return []
        names = self.catalog.fabric("blackwell" in self.generations)
        if not names and not self.refusals:
            self.refusals.append(
                f"Host {self.host} has NVSwitches, and driver_source {self.source_name} has no fabric manager for "
                f"{self.catalog.name}: take driver_source repository, or set driver_fabric_manager to absent."
            )
        return names

    # ------------------------------------------------------------------ what stands in the way

    def _refuse_secure_boot(self, flavour: str, built: bool) -> None:
        # A container sees the firmware of a machine that isn't its own.
        if not self.seen.get("secure_boot") or not self.kernel.get("installed") or self.refusals:
            return
        if not built and self.catalog.source.get("signed"):
            return
        mok: Json = self.seen.get("mok") or {}
        if mok.get("enrolled"):
            return
        start = f"Host {self.host} has Secure Boot on, and the {flavour} module of driver_source {self.source_name} "
        start += "is signed with no key that its firmware knows: "
        other = ""
        if self.catalog.source_of("distribution").get("signed"):
            other = " (or set driver_source to distribution, whose module is signed)"
        if mok.get("pending"):
            how = "reboot it and confirm 'Enroll MOK' at its console"
        elif mok.get("key"):
            how = f"run 'mokutil --import {mok['key']}', reboot it and confirm 'Enroll MOK' at its console"
        else:
            how = (
                "make a key for DKMS, run 'mokutil --import' with it, reboot it and confirm 'Enroll MOK' at its console"
            )
        self.refusals.append(f"{start}{how}{other}, then run this again.")

    def _conflicts(self) -> list[dict[str, str]]:
        known = {"state": self.state, "source": self.source_name, "version": self.version}
        ignored = self.options.get("ignore") or []
        found = conflicts(self.seen, {**known, "repo_url": self.catalog.url()})
        return [one for one in found if one["id"] not in ignored and f"{one['id']}@{self.host}" not in ignored]

    def _maintenance(self, flavour: str) -> str:
        """Why the node must be emptied first; empty where it needn't be, or has been.

        A container's module is simulated: there nothing has to be unloaded, unless maintenance is asked for.
        """
        loaded, how = self.driver.get("module_version"), str(self.options.get("maintenance") or "never")
        if not loaded or self.options.get("in_maintenance"):
            return ""
        is_open = self.driver.get("module_open")
        same_version = loaded == self.version
        same_flavour = is_open is None or is_open == (flavour == flavours.OPEN)
        if same_version and same_flavour:
            return ""
        if not self.kernel.get("installed") and (how == "never" or same_version):
            return ""
        have = (
            f"the {flavours.OPEN if is_open else flavours.PROPRIETARY} module" if same_version else f"driver {loaded}"
        )
        wanted = f"the {flavour} one" if same_version else self.version
        why = f"Host {self.host} has {have} loaded, and pods that use its cards would lose them to {wanted}"
        if how != "never":
            return f"{why}."
        self.refusals.append(
            f"{why}: set gpu_maintenance to drain or reboot, which empties the node first, or empty it yourself and "
            "set driver_in_maintenance to true."
        )
        return ""

    # ------------------------------------------------------------------ out again

    def _absent(self) -> dict[str, t.Any]:
        """All that the role may have put there, whatever flavour and card; what isn't there is no work."""
        if not self.catalog.known:
            return {}
        keep = set(self.options.get("keep") or [])
        ours = self.source_name == "runfile" or self._was_here()
        names = self.catalog.ever_installed() if ours else []
        # Headers belong to the kernel: they only go where it is known that they weren't there before.
        installed = self.seen.get("packages") or {}
        headers = [name for name in self.catalog.header_names() if name in installed] if ours and keep else []
        had_driver = any(DRIVER.match(name) for name in keep)
        return {
            "manager": self.catalog.manager if self.source_name != "runfile" else "runfile",
            "repositories": self.catalog.repositories() if ours else [],
            "streams": self._streams_to_leave() if ours and not had_driver else [],
            "packages": [name for name in names if name not in keep],
            # What came along goes along.
            "hold_also": self.catalog.words("hold_also") if names else [],
            "build": [name for name in headers if name not in keep],
            "services": [PERSISTENCED, FABRIC] if ours and not had_driver else [],
            "persistence_override": self.catalog.persistence_override if ours else "",
        }

    def _streams_to_leave(self) -> list[dict[str, t.Any]]:
        """Those of both flavours, and an enabled one of another branch: the version may have been changed since."""
        found = [one for flavour in (flavours.OPEN, flavours.PROPRIETARY) for one in self.catalog.streams(flavour)]
        if not found:
            return []
        enabled: Json = (self.seen.get("rpm") or {}).get("streams") or {}
        for row in self.catalog.source["streams"]:
            patterns = [row[flavour].replace("{branch}", "[0-9]*") for flavour in (flavours.OPEN, flavours.PROPRIETARY)]
            stream = str(enabled.get(row["module"]) or "")
            if any(fnmatch.fnmatchcase(stream, pattern) for pattern in patterns):
                found.append({"module": row["module"], "stream": stream, "switch": True})
        return [one for at, one in enumerate(found) if one not in found[:at]]

    def _was_here(self) -> bool:
        """Whether the role's own files or locks are there: a driver that somebody else installed stays."""
        apt: Json = self.seen.get("apt") or {}
        rpm: Json = self.seen.get("rpm") or {}
        files = (*(apt.get("files") or ()), *(rpm.get("files") or ()))
        locks = [lock for lock in rpm.get("locks") or () if lock.get("ours") and DRIVER.match(str(lock.get("name")))]
        return bool(locks) or any(OUR_FILE.search(path) for path in files)
