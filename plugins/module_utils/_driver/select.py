# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Choose a node's driver: its packages and its kernel module, or the reasons why the node can't have it.

By the node's facts, the catalogue of its distribution (role driver's ``vars``, so that nothing here names a
distribution) and the user's options.
"""

from __future__ import annotations

import fnmatch
import re
import typing as t

from .._core.types import JsonObject
from . import available as flavours
from . import nvidia_smi
from .catalog import MACHINES, PINNED, SECTIONS, Catalog, DriverOptions, driver_options, kernel_flavour
from .conflicts import conflicts
from .nouveau import IN_KERNEL
from .runfile import SHA256, VERSION
from .types import (
    FABRIC_MODULES,
    MISMATCH,
    Choice,
    Conflict,
    Headers,
    NodeFacts,
    Prerequisite,
    StreamOption,
)

KNOWN = {
    "driver_state": ("present", "external", "absent"),
    "driver_source": ("repository", "distribution", "packages", "runfile"),
    "driver_flavour": flavours.FLAVOUR_OPTIONS,
    "driver_maintenance": ("never", "drain", "reboot"),
}

PERSISTENCED, FABRIC = "nvidia-persistenced", "nvidia-fabricmanager"
# Files and locks that show a later run that the role has installed the driver.
OUR_FILE = re.compile(r"/(90)?kubegpu-(driver|cuda)[.]?[a-z]*$")
DRIVER = re.compile(r"nvidia-(driver|kernel|dkms|headless|open)|kmod-nvidia")


def choose(gpu_node: NodeFacts, catalog: JsonObject | None, options: JsonObject) -> Choice:
    """Return what role driver does on this node.

    :param catalog: the catalogue of the node's distribution; empty where there is none.
    :param options: role driver's variables without their prefix, and ``host``.
    :returns: see the documentation of the filter ``driver_choice``.
    """
    parsed = driver_options(options)
    return _Chooser(gpu_node, Catalog(gpu_node, catalog or {}, parsed), parsed).result()


def verify(gpu_node: NodeFacts, options: JsonObject) -> list[str]:
    """Return the problems of the driver as it is, one message each, a cause before its consequences.

    :param options: ``host``, ``state``, ``version`` and ``ignore`` as role driver has them.
    """
    host = options["host"]
    ignored = [entry for entry in options.get("ignore") or [] if entry.partition("@")[2] in ("", host)]
    ids = {entry.partition("@")[0] for entry in ignored}
    return [text for id, text in _problems(gpu_node, options, host) if id not in ids]


def _problems(gpu_node: NodeFacts, options: JsonObject, host: str) -> list[tuple[str, str]]:
    """Return id and message of each problem; the ids are those of preflight's findings."""
    driver: t.Mapping[str, t.Any] = gpu_node.get("driver") or {}
    module, version, error = driver.get("module_version"), driver.get("version"), driver.get("error")
    cards = [card for card in gpu_node.get("gpus") or [] if "vfio" not in (card.get("driver") or "")]
    problems: list[tuple[str, str]] = []
    for module_name, shown in IN_KERNEL.items():
        if any(card.get("driver") == module_name for card in cards):
            what = f"{shown} still drives GPUs of host {host}: reboot it and run this again."
            problems.append(("nouveau-in-use", what))
    if (module and version and module != version) or driver.get("code") == MISMATCH:
        what = f"Host {host} has kernel module {module} loaded, and nvidia-smi reports {error or version}: "
        problems.append(("driver-mismatch", f"{what}reboot it and run this again."))
    if error:
        signed = " (Secure Boot is on: a module that was built on the host must be signed with an enrolled key)"
        what = f"The driver of host {host} fails; nvidia-smi reports: {error}"
        problems.append(("driver-fails", what + (signed if gpu_node.get("secure_boot") else "")))
    listed = len(driver.get("cards") or [])
    if listed != len(cards):
        what = f"Host {host} has {len(cards)} NVIDIA cards on PCI and nvidia-smi lists {listed}."
        problems.append(("card-lost", what))
    wanted = options.get("version")
    # A driver that others provide has their version.
    own = options.get("state", "present") == "present" and not nvidia_smi.of(driver.get("others") or [])
    if own and version not in (None, wanted):
        problems.append(("", f"driver_version is {wanted} and nvidia-smi of host {host} reports {version}."))
    return problems


def provided_note(host: str, driver: t.Mapping[str, t.Any], wanted: str) -> str:
    """Return what is said of a driver that others provide.

    :param driver: section ``driver`` of ``gpu_node``.
    :param wanted: ``driver_version``.
    """
    provider = nvidia_smi.of(driver.get("others") or [])
    version = driver.get("module_version") or driver.get("version") or "none loaded"
    who = provider.who if provider else ""
    other = f", and not driver_version {wanted}" if version != wanted else ""
    return f"Host {host} has its driver ({version}{other}) from {who}: role driver leaves it alone and installs none."


Problem = t.TypeVar("Problem", bound=Conflict)


def _told(row: JsonObject) -> str:
    """Return who says what a repository holds, and when."""
    return f"{row['source']}, {row['date']}"


class _Chooser:
    """Makes one node's choice step by step; ``refusals`` collects what prevents it."""

    def __init__(self, gpu_node: NodeFacts, catalog: Catalog, options: DriverOptions) -> None:
        self.node = gpu_node
        self.known = (gpu_node, catalog.data, options)
        self.catalog = catalog
        self.options = options
        self.host = options.host
        self.source_name = options.source
        self.version = options.version
        self.branch = catalog.branch
        self.refusals: list[str] = []
        self.notes: list[str] = []
        self.distribution: t.Mapping[str, t.Any] = gpu_node.get("distribution") or {}
        self.kernel: t.Mapping[str, t.Any] = gpu_node.get("kernel") or {}
        self.driver: t.Mapping[str, t.Any] = gpu_node.get("driver") or {}
        self.provider = nvidia_smi.of(self.driver.get("others") or [])
        # The host's driver doesn't serve cards that a virtual machine owns.
        cards = [card for card in gpu_node.get("gpus") or [] if "vfio" not in (card.get("driver") or "")]
        self.generations = tuple(sorted({str(card.get("generation") or flavours.UNKNOWN) for card in cards}))

    # ------------------------------------------------------------------ the result

    def result(self) -> Choice:
        choice = self._nothing()
        if self.options.state == "absent":
            self._absent(choice)
        elif self.options.state == "present" and self.provider:
            choice["provided"] = self.provider.id
            choice["conflicts"] = self._conflicts()
            self.notes.append(provided_note(self.host, self.driver, self.version))
        elif self.options.state != "external":
            self._refuse_values()
            if not self.refusals:
                self._present(choice)
        # They are complete only now: each step may have added some.
        choice["refusals"], choice["notes"] = self.refusals, self.notes
        return choice

    def _present(self, choice: Choice) -> None:
        of_runfile = self.options.of_runfile
        flavour = self._flavour()
        self._refuse_source(flavour)
        names = self.catalog.packages(flavour) if not (self.refusals or of_runfile) else []
        built = self._built(names)
        self._refuse_secure_boot(flavour, built)
        fabric = self._fabric()
        headers = built and self.options.install_headers == "auto"
        choice["manager"] = self.catalog.manager if not of_runfile else "runfile"
        choice["flavour"] = flavour
        choice["repositories"] = self.catalog.repositories()
        if (
            choice["repositories"]
            and self.options.repo_key_sha256 == PINNED
            and not any(self.catalog.key_pin().values())
        ):
            self.notes.append(
                f"The key of NVIDIA's repository for {self.catalog.name} is in no table of the collection: it is taken "
                "as the repository has it, unless driver_repo_key_sha256 has its SHA-256."
            )
        choice["streams"] = self.catalog.streams(flavour)
        choice["pins"] = self.catalog.pins()
        choice["headers"] = self._headers() if headers else []
        choice["prerequisites"] = self._prerequisites()
        choice["build"] = self._build_tools()
        choice["packages"] = [*names, *fabric]
        choice["replaced"] = self.catalog.replaced([*names, *fabric], flavour)
        choice["replaces"] = self.catalog.replaceable()
        choice["hold_also"] = self.catalog.entries("hold_also")
        choice["never_upgrade"] = self.catalog.entries("never_upgrade")
        choice["services"] = [PERSISTENCED, *([FABRIC] if fabric else [])]
        choice["modules"] = self._fabric_modules() if fabric else []
        choice["persistence_override"] = self.catalog.persistence_override if not of_runfile else ""
        choice["conflicts"] = self._conflicts()
        if not self.refusals:
            choice["follows"] = self._follows(flavour)
            # A repository that is enabled first isn't in the lists yet.
            asked = choice["packages"] if not choice["prerequisites"] else []
            problems = flavours.findings(*self.known, flavour, asked, choice["headers"])
            choice["lists"] = self._accepted(problems)
        choice["maintenance"] = self._maintenance(flavour)

    def _nothing(self) -> Choice:
        return {
            "refusals": [],
            "notes": [],
            "conflicts": [],
            "lists": [],
            "provided": "",
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
            "follows": [],
            "replaced": [],
            "replaces": [],
            "hold_also": [],
            "never_upgrade": [],
            "hold": self.options.hold,
            "source_dir": self.options.packages_dir if self.source_name == "packages" else "",
            "services": [],
            "modules": [],
            "persistence_override": "",
        }

    # ------------------------------------------------------------------ invalid options

    def _refuse_values(self) -> None:
        for name, known in KNOWN.items():
            value = getattr(self.options, name.partition("_")[2])
            if value not in known:
                self.refusals.append(f"{name} is {value}, which is invalid: it can be {' or '.join(known)}.")
        if not VERSION.fullmatch(self.version):
            self.refusals.append(f"driver_version is {self.version}, which isn't a driver version such as 580.95.05.")
        if not self.catalog.known:
            self.refusals.append(
                f"Host {self.host} runs {self.distribution.get('id')} {self.distribution.get('version')}, which role "
                "driver has no packages for: install the driver and set driver_state to external."
            )
        else:
            self._refuse_options()

    def _refuse_options(self) -> None:
        if self.source_name == "packages" and not self.options.packages_dir:
            self.refusals.append("driver_packages_dir is empty, and driver_source packages takes the packages from it.")
        if self.options.of_runfile:
            if not self.options.runfile:
                self.refusals.append("driver_runfile is empty, and driver_source runfile installs it.")
            if not SHA256.fullmatch(self.options.runfile_sha256):
                self.refusals.append(
                    "driver_runfile_sha256 isn't a SHA-256, and a .run file is executed only with one."
                )
        digest = self.options.repo_key_sha256
        if digest and digest != PINNED and not SHA256.fullmatch(digest):
            self.refusals.append(
                f"driver_repo_key_sha256 is {digest}, which is neither a SHA-256, nor {PINNED}, nor empty."
            )
        arch = str(self.distribution.get("arch"))
        if arch not in MACHINES:
            self.refusals.append(
                f"Host {self.host} is of architecture {arch}, and NVIDIA's driver exists for {' and '.join(MACHINES)} "
                "only."
            )

    def _refuse_source(self, flavour: str) -> None:
        name, source = self.catalog.name, self.catalog.source
        if not source:
            self.refusals.append(
                f"driver_source is distribution, and {self.distribution.get('id')} {self.distribution.get('version')} "
                f"(host {self.host}) has no driver of its own: set it to repository."
            )
            return
        if self.options.of_runfile:
            return
        rows = self.catalog.holds(self.source_name)
        arch = str(self.distribution.get("arch"))
        if self.options.source not in SECTIONS or self.options.repo_url:
            return
        if arch in rows:
            self._refuse_branch(name, rows[arch])
            self._refuse_kernels(flavour, rows[arch])
        else:
            only = "no packages that the collection knows of"
            if rows:
                only = f"packages for {' and '.join(rows)} only ({_told(next(iter(rows.values())))})"
            whose = f"NVIDIA's repository for {name}" if self.source_name != "distribution" else f"{name}'s own source"
            self.refusals.append(
                f"Host {self.host} is of architecture {arch}, and {whose} (driver_source: {self.source_name}) has "
                f"{only}: {self._elsewhere()}."
            )

    def _refuse_branch(self, name: str, row: JsonObject) -> None:
        first, last = row["first"], row["last"]
        before, after = bool(first and self.branch < first), bool(last and self.branch > last)
        if not (before or after):
            return
        oldest, newest = flavours.branches(self.generations)
        fits = (newest is None or not first or first <= newest) and (not last or last >= oldest)
        which = "one of them" if first != last else f"one of branch {first}"
        do = f"set driver_version to {which}, or " if fits else "none of them supports its cards: "
        bound = f"begin with branch {first}" if before else f"end with branch {last}"
        bound = f"are of branch {first}" if first == last else bound
        whose = f"{name}'s own packages" if self.source_name == "distribution" else f"NVIDIA's packages for {name}"
        self.refusals.append(
            f"driver_version is {self.version}, and {whose} (driver_source: {self.source_name}) {bound} "
            f"({_told(row)}): {do}{self._elsewhere()}."
        )

    def _refuse_kernels(self, flavour: str, row: JsonObject) -> None:
        """Refuse kernels for which the source has no compiled modules."""
        compiled = self.catalog.compiled_for(flavour) if row["kernels"] else []
        others = [kernel for kernel in compiled if kernel_flavour(kernel) not in row["kernels"]]
        if others:
            self.refusals.append(
                f"Host {self.host} has kernel {' and '.join(others)}, and the compiled modules of driver_source "
                f"{self.source_name} are for kernels of flavour {' and '.join(row['kernels'])} ({_told(row)}): boot "
                "one of these and remove the others, or set driver_source to repository, whose module is built there."
            )

    def _elsewhere(self) -> str:
        """Return which other source has packages for this node's architecture and cards, as the end of a refusal."""
        other = "distribution" if self.source_name == "repository" else "repository"
        row = self.catalog.holds(other).get(str(self.distribution.get("arch"))) or {}
        oldest, newest = flavours.branches(self.generations)
        first, last = row.get("first"), row.get("last")
        if not row or (newest and first and first > newest) or (last and last < oldest):
            return "install a driver and set driver_state to external"
        known = f" up to branch {last}" if last else ""
        if first:
            known = f" of branch {first}" if first == last else f" from branch {first} on"
        return f"set driver_source to {other}" + (f", whose packages are{known}" if known else "")

    def _flavour(self) -> str:
        cards = flavours.Cards(self.host, self.generations, str(self.distribution.get("arch")), self.version)
        self.refusals += flavours.refused_branches(cards)
        flavour, why, note = flavours.choose(self.options.flavour, cards, self._has)
        self.refusals += [why] if why else []
        self.notes += [note] if note else []
        return flavour

    def _has(self, flavour: str) -> bool:
        """Return whether there are packages of a flavour; a .run file has both, the user's names may have both."""
        if self.options.of_runfile or self.options.packages or not self.catalog.source:
            return True
        named = self.catalog.row.get(flavour) or (self.catalog.row.get("per_kernel") or {}).get(flavour)
        return bool(named) and flavour in (self.catalog.bounds.get("modules") or flavours.FLAVOUR_OPTIONS)

    def _built(self, names: t.Sequence[str]) -> bool:
        """Return whether the module is compiled on the node."""
        if self.options.of_runfile:
            return True
        if self.options.packages:
            return any("dkms" in name for name in names)
        return bool(self.catalog.source.get("built", True)) and not any("-kmp-" in name for name in names)

    def _headers(self) -> list[Headers]:
        """Return the packages of missing headers; a kernel that isn't the distribution's has unknown ones."""
        sets = self.catalog.missing_headers()
        unknown = [headers["kernel"] for headers in sets if not headers["packages"]]
        if unknown:
            self.refusals.append(
                f"Host {self.host} lacks the headers of kernel {' and '.join(unknown)}, with which the driver's module "
                f"is built, and that is no kernel of {self.catalog.name} whose package role driver knows: install the "
                "headers yourself, or boot the distribution's own kernel and remove this one."
            )
        following = [
            headers for headers in self.catalog.following() if flavours.may_have(self.node, headers["packages"])
        ]
        return [headers for headers in sets if headers["packages"]] + following

    def _follows(self, flavour: str) -> list[str]:
        """Return the packages that have to follow the kernel, and therefore aren't held: compiled modules.

        A metapackage is taken where the lists have it for the installed kernel: a newer one would bring its kernel.
        """
        kernels = tuple(f"-{kernel}" for kernel in self.catalog.kernels())
        modules = [package for package in self.catalog.packages(flavour) if kernels and package.endswith(kernels)]
        installed = self.node.get("packages") or {}
        followers = self.catalog.followers(flavour) if modules else {}
        return modules + [
            name
            for name, kernel in followers.items()
            if name in installed or flavours.has_release(self.node, name, str(installed[kernel].get("version")))
        ]

    def _prerequisites(self) -> list[Prerequisite]:
        """Return the repositories to enable first, or refuse with the commands."""
        wanted = self.options.prerequisites
        # A directory of packages contains all dependencies, or the installation names the missing ones.
        if self.source_name == "packages" or wanted == "ignore":
            return []
        missing = self.catalog.missing_prerequisites()
        if missing and wanted == "report":
            shown = " && ".join(" ".join(command) for row in missing for command in row["commands"])
            self.refusals.append(
                f"Host {self.host} lacks {' and '.join(row['what'] for row in missing)}: run '{shown}' there, or set "
                "driver_manage_prerequisites to install."
            )
        return missing if wanted == "install" else []

    def _build_tools(self) -> list[str]:
        """Return the packages that a .run file needs that has to be executed."""
        there = self.driver.get("library_version") or self.driver.get("version")
        if not self.options.of_runfile or ("runfile" in (self.driver.get("others") or []) and there == self.version):
            return []
        return self.catalog.entries("build")

    # ------------------------------------------------------------------ services

    def _fabric(self) -> list[str]:
        """Return the fabric manager's packages on machines with NVSwitches, at exactly the driver's version."""
        wanted = self.options.fabric_manager
        needed = bool(self.node.get("nvswitches")) or bool((self.driver.get("fabric") or {}).get("needed"))
        if wanted == "absent" or (wanted == "auto" and not needed):
            return []
        names = self.catalog.fabric("blackwell" in self.generations)
        if not names and not self.refusals:
            self.refusals.append(
                f"Host {self.host} has NVSwitches, and driver_source {self.source_name} has no fabric manager for "
                f"{self.catalog.name}: set driver_source to repository, or driver_fabric_manager to absent."
            )
        return names

    def _fabric_modules(self) -> list[str]:
        """Return the modules through which NVSwitches of NVLink 5 are managed; a container has its host's."""
        fabric: t.Mapping[str, t.Any] = self.driver.get("fabric") or {}
        if not fabric.get("nvlink5") or not self.kernel.get("installed"):
            return []
        missing = fabric["missing"]
        if missing and not self.refusals:
            release, without = self.kernel.get("release"), " and no ".join(missing)
            self.refusals.append(
                f"Host {self.host} has NVSwitches of NVLink 5, and its kernel {release} has no {without}: without it "
                "no fabric manager starts. Install the kernel's package with it (on Ubuntu "
                f"linux-modules-extra-{release}), or set driver_fabric_manager to absent."
            )
        return list(FABRIC_MODULES)

    # ------------------------------------------------------------------ obstacles on the node

    def _refuse_secure_boot(self, flavour: str, built: bool) -> None:
        # A container reports the firmware of its host.
        if not self.node.get("secure_boot") or not self.kernel.get("installed") or self.refusals:
            return
        if not built and self.catalog.source.get("signed"):
            return
        mok: t.Mapping[str, t.Any] = self.node.get("mok") or {}
        if mok.get("enrolled"):
            return
        start = f"Host {self.host} has Secure Boot on, and the {flavour} module of driver_source {self.source_name} "
        start += "isn't signed with a key that its firmware trusts: "
        other = ""
        if self.catalog.source_of("distribution").get("signed"):
            other = " (or set driver_source to distribution, whose module is signed)"
        if mok.get("pending"):
            how = "reboot it and confirm 'Enroll MOK' at its console"
        elif mok.get("key"):
            how = f"run 'mokutil --import {mok['key']}', reboot it and confirm 'Enroll MOK' at its console"
        else:
            how = (
                "create a key for DKMS, run 'mokutil --import' with it, reboot and confirm 'Enroll MOK' at its console"
            )
        self.refusals.append(f"{start}{how}{other}, then run this again.")

    def _conflicts(self) -> list[Conflict]:
        problems = conflicts(self.node, self.options.state, self.source_name, self.version, self.catalog.url())
        return self._accepted(problems)

    def _accepted(self, problems: t.Sequence[Problem]) -> list[Problem]:
        """Return what the user doesn't ignore."""
        ignored = self.options.ignore
        return [
            problem
            for problem in problems
            if problem["id"] not in ignored and f"{problem['id']}@{self.host}" not in ignored
        ]

    def _maintenance(self, flavour: str) -> str:
        """Return why the node has to be drained first; empty where it needn't be, or has been.

        A container's module is its host's: there nothing has to be unloaded, unless maintenance is requested.
        """
        loaded, how = self.driver.get("module_version"), self.options.maintenance
        if not loaded or self.options.in_maintenance:
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
            f"{why}: set gpu_maintenance to drain or reboot, which drains the node first, or drain it yourself and "
            "set driver_in_maintenance to true."
        )
        return ""

    # ------------------------------------------------------------------ absent

    def _absent(self, choice: Choice) -> None:
        """Choose all that the role may have installed, for any flavour and card; missing packages do no harm."""
        if not self.catalog.known:
            return
        keep = set(self.options.keep)
        ours = self.options.of_runfile or self._was_here()
        names = self.catalog.ever_installed() if ours else []
        # Headers belong to the kernel: they are removed only where the packages from before are known.
        installed = self.node.get("packages") or {}
        headers = [name for name in self.catalog.header_names() if name in installed] if ours and keep else []
        had_driver = any(DRIVER.match(name) for name in keep)
        choice["manager"] = self.catalog.manager if not self.options.of_runfile else "runfile"
        choice["repositories"] = self.catalog.repositories() if ours else []
        choice["streams"] = self._streams_to_reset() if ours and not had_driver else []
        choice["packages"] = [name for name in names if name not in keep]
        # What was installed with the packages is removed with them.
        choice["hold_also"] = self.catalog.entries("hold_also") if names else []
        choice["build"] = [name for name in headers if name not in keep]
        choice["services"] = [PERSISTENCED, FABRIC] if ours and not had_driver else []
        choice["persistence_override"] = self.catalog.persistence_override if ours else ""

    def _streams_to_reset(self) -> list[StreamOption]:
        """Return the streams of both flavours, and an enabled one of another branch: the version may have changed."""
        streams = [
            stream for flavour in (flavours.OPEN, flavours.PROPRIETARY) for stream in self.catalog.streams(flavour)
        ]
        if not streams:
            return []
        rpm: t.Mapping[str, t.Any] = self.node.get("rpm") or {}
        enabled: t.Mapping[str, str] = rpm.get("streams") or {}
        for row in self.catalog.source["streams"]:
            patterns = [row[flavour].replace("{branch}", "[0-9]*") for flavour in (flavours.OPEN, flavours.PROPRIETARY)]
            stream = str(enabled.get(row["module"]) or "")
            if any(fnmatch.fnmatchcase(stream, pattern) for pattern in patterns):
                streams.append({"module": row["module"], "stream": stream, "switch": True})
        return [option for at, option in enumerate(streams) if option not in streams[:at]]

    def _was_here(self) -> bool:
        """Return whether the role's own files or locks exist: a driver that was installed otherwise stays."""
        apt: t.Mapping[str, t.Any] = self.node.get("apt") or {}
        rpm: t.Mapping[str, t.Any] = self.node.get("rpm") or {}
        files = (*(apt.get("files") or ()), *(rpm.get("files") or ()))
        locks = [lock for lock in rpm.get("locks") or () if lock.get("ours") and DRIVER.match(str(lock.get("name")))]
        return bool(locks) or any(OUR_FILE.search(path) for path in files)
