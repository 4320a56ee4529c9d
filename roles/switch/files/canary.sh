# SPDX-License-Identifier: GPL-3.0-or-later
# shellcheck shell=sh disable=SC2086 # lists are split at their commas
# Ends with 0 if this container has as many cards as its pod asked for, and only those that its environment names, if that names any.
# $1: cards or MIG devices that the pod asked for; $2: the folder of device nodes.
# The image of a device plugin has a shell and few programs, so nothing is started but nvidia-smi.

refuse() {
    echo "$1; NVIDIA_VISIBLE_DEVICES is '$NVIDIA_VISIBLE_DEVICES', and nvidia-smi -L lists: ${listed:-nothing}"
    exit 1
}

wanted=$1
nodes=$2
listed=$(nvidia-smi -L) || refuse "nvidia-smi -L ended with $?"

set -f
# A line a device: "GPU 0: NAME (UUID: GPU-...)", and behind that of a card its MIG devices, "  MIG 1g.5gb  Device  0: (UUID: MIG-...)".
IFS='
'
card=
devices=
for line in $listed; do
    uuid=${line##*UUID: }
    uuid=${uuid%)*}
    case $line in
        GPU\ *) devices="$devices$card" card=",$uuid" ;;
        *\ MIG\ *) devices="$devices,$uuid" card= ;;
    esac
done
devices="$devices$card"

IFS=,
set -- ${devices#,}
[ $# = "$wanted" ] || refuse "the container sees $# devices, and its pod asked for $wanted"
devices=$*
case $NVIDIA_VISIBLE_DEVICES in
    GPU-* | MIG-* | [0-9]*)
        set -- $NVIDIA_VISIBLE_DEVICES
        [ $# = "$wanted" ] || refuse "the container was given $# devices, and its pod asked for $wanted"
        ;;
esac
# By its index a device can't be compared: a container's are counted from 0 again.
case $NVIDIA_VISIBLE_DEVICES in
    GPU-* | MIG-*)
        for uuid in $devices; do
            case ,$NVIDIA_VISIBLE_DEVICES, in
                *,"$uuid",*) ;;
                *) refuse "the container sees $uuid, which it wasn't given" ;;
            esac
        done
        ;;
esac
set +f
set -- "$nodes"/nvidia[0-9]*
[ -e "$1" ] || refuse "the container has no device node $nodes/nvidiaN"
echo "$devices"
