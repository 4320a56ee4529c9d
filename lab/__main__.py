# SPDX-License-Identifier: GPL-3.0-or-later
"""`python -m lab up | down | status | image | packages | machine up | machine down`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from lab.settings import HELP, Settings, variable
from lab.shell import LabError


def _leave(number: int, _frame: FrameType | None) -> NoReturn:
    """Exit at once, as after SIGKILL; child processes end with this one."""
    print("lab: interrupted; the next `up` or `down` finishes the job.", file=sys.stderr, flush=True)
    os._exit(128 + number)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lab", description="A real Kubernetes cluster with simulated GPUs.")
    commands = parser.add_subparsers(dest="command", required=True)
    bring = commands.add_parser("up", help="start the lab, or check that it is up")
    defaults = Settings().as_dict()
    for name, text in HELP.items():
        flag = f"--{name.replace('_', '-')}"
        bring.add_argument(flag, dest=name, help=f"{text} (default {defaults[name]}; also {variable(name)})")
    commands.add_parser("down", help="remove the lab and keep only the cache")
    commands.add_parser("status", help="show what is up")
    commands.add_parser("image", help="build the servers' image again if its sources changed")
    commands.add_parser("packages", help="build the driver and toolkit packages again if their sources changed")
    machine = commands.add_parser("machine", help="machines without a cluster, of several distributions")
    machine.add_argument("what", choices=("up", "down"), help="start or remove")
    machine.add_argument("kinds", nargs="*", metavar="kind", help="kinds or groups (default all)")
    arguments = vars(parser.parse_args())
    command = arguments.pop("command")
    signal.signal(signal.SIGINT, _leave)
    signal.signal(signal.SIGTERM, _leave)
    try:
        from lab import commands as lab

        if command == "up":
            lab.up(arguments)
        elif command == "machine":
            from lab import machine_commands

            {"up": machine_commands.up, "down": machine_commands.down}[arguments["what"]](arguments["kinds"])
        elif command == "status":
            return lab.status()
        else:
            {"down": lab.down, "image": lab.image, "packages": lab.packages}[command]()
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
