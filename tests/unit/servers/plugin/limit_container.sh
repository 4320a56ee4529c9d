#!/usr/bin/env bash
# SPDX-License-Identifier: GPL-3.0-or-later
#
# A container made by NVIDIA's real runtime (jit-cdi), its real hook and the real runc, in a mount namespace of its own that looks like a
# GPU node; run it under `unshare -m`. Simulated are the driver and the silicon (lab/driver).
#
# usage: limit_container.sh FOLDER VERSION 1|2 COMMAND [NAME=VALUE...]
#   FOLDER   empty, and gone from sight outside of this namespace
#   VERSION  of the driver that was compiled into $LIMIT_DRIVER
#   1|2      the version of cgroups; 1 takes the machine's own
#   COMMAND  of the container's shell; NAME=VALUE is its environment
# Prints what the container says; exit status 3 where the runtime doesn't create it. $LIMIT_BESIDE is run once it is there.
set -eu
folder=$1 version=$2 cgroups=$3 command=$4
shift 4
id=$(printf '%064x' $$)
group=kubepods-test$$/podaa-bb

mount --make-rprivate /
mount -t tmpfs none "$folder"
root=$folder/driver
firmware=$root/lib/firmware/nvidia/$version
hardware=$folder/var/kubegpu-lab/hardware
rootfs=$folder/bundle/rootfs
mkdir -p "$root/usr/lib64" "$root/usr/bin" "$root/dev" "$root/etc" "$firmware" "$hardware" "$folder/proc/nvidia/gpus" "$folder/dev"

# What the driver's packages and its module leave on a node.
cp "$LIMIT_DRIVER/usr/lib64/libnvidia-ml.so.$version" "$LIMIT_DRIVER/libcuda.so.$version" "$root/usr/lib64/"
ln -s "libnvidia-ml.so.$version" "$root/usr/lib64/libnvidia-ml.so.1"
ln -s "libcuda.so.$version" "$root/usr/lib64/libcuda.so.1"
cp "$LIMIT_DRIVER/nvidia-smi" "$root/usr/bin/"
cp "$LIMIT_FOLDER/cards" "$firmware/gsp_sim.bin"
: >"$firmware/gsp_sim_limits.bin"
touch "$hardware/cards" "$hardware/cards.limits"
echo "NVRM version: NVIDIA UNIX Open Kernel Module for $(uname -m)  $version  Release Build  (SIMULATED)" >"$folder/proc/nvidia/version"
while read -r name major minor; do
    mknod -m 666 "$folder/dev/$name" c "$major" "$minor"
    case $name in nvidia*) mknod -m 666 "$root/dev/$name" c "$major" "$minor" ;; esac
done <<'NODES'
null 1 3
zero 1 5
full 1 7
random 1 8
urandom 1 9
tty 5 0
nvidia1 195 1
nvidia3 195 3
nvidiactl 195 255
nvidia-uvm 510 0
nvidia-uvm-tools 510 1
NODES
ln -s /proc/self/fd "$folder/dev/fd"
mkdir "$folder/dev/shm" "$folder/dev/pts"

# The toolkit as role toolkit leaves it, at places of this namespace's own.
mkdir -p "$folder/bin" "$folder/etc/nvidia-container-runtime"
cp "$LIMIT_TOOLKIT"/nvidia-* "$folder/bin/"
cat >"$folder/etc/nvidia-container-runtime/config.toml" <<CONFIG
[nvidia-container-cli]
root = "$root"
[nvidia-container-runtime]
mode = "jit-cdi"
runtimes = ["runc"]
debug = "$folder/runtime.log"
[nvidia-ctk]
path = "$folder/bin/nvidia-ctk"
CONFIG

# An image with a shell.
mkdir -p "$rootfs"/{proc,sys,dev,tmp,run,usr/bin,usr/lib64,etc/ld.so.conf.d}
echo "include /etc/ld.so.conf.d/*.conf" >"$rootfs/etc/ld.so.conf"
for program in sh sleep cat; do
    mkdir -p "$rootfs/bin"
    cp "$(command -v "$program")" "$rootfs/bin/"
    ldd "$(command -v "$program")" | grep -o '/[^ ]*' | while read -r library; do
        mkdir -p "$rootfs${library%/*}"
        cp -n "$library" "$rootfs$library"
    done
done
"$LIMIT_PYTHON" - "$folder/bundle/config.json" "$command" "/$group/$id" "$@" <<'SPEC'
import json
import sys

path, command, cgroup, *environment = sys.argv[1:]
mounts = [("/proc", "proc"), ("/dev", "tmpfs"), ("/sys", "sysfs"), ("/sys/fs/cgroup", "cgroup")]
spec = {
    "ociVersion": "1.0.2",
    "root": {"path": "rootfs"},
    "process": {
        "user": {"uid": 0, "gid": 0},
        "cwd": "/",
        "args": ["/bin/sh", "-c", command],
        "env": ["PATH=/usr/bin:/bin", *environment],
        "noNewPrivileges": True,
        "capabilities": {kind: ["CAP_CHOWN"] for kind in ("bounding", "effective", "permitted")},
    },
    "mounts": [{"destination": where, "type": what, "source": what} for where, what in mounts],
    "linux": {
        "cgroupsPath": cgroup,
        "resources": {"devices": [{"allow": False, "access": "rwm"}]},
        "namespaces": [{"type": kind} for kind in ("pid", "mount", "ipc", "uts", "cgroup")],
    },
}
with open(path, "w") as file:
    json.dump(spec, file)
SPEC

if [ "$cgroups" = 2 ]; then mount -t cgroup2 none /sys/fs/cgroup; fi
mount --bind "$folder/proc" /proc/driver
mount --rbind "$folder/dev" /dev
mount --bind "$firmware/gsp_sim.bin" "$hardware/cards"
mount --bind "$firmware/gsp_sim_limits.bin" "$hardware/cards.limits"
mount --rbind "$folder/var" /var/lib

export XDG_CONFIG_HOME=$folder/etc PATH=$folder/bin:$PATH LIMIT_CONTAINER=$id
end() {
    runc --root "$folder/state" delete --force "$id" 2>/dev/null || :
    find /sys/fs/cgroup -depth -type d -path "*/kubepods-test$$*" -exec rmdir {} \; 2>/dev/null || :
}
trap end EXIT
if ! nvidia-container-runtime --root "$folder/state" create --bundle "$folder/bundle" "$id" >"$folder/said" 2>&1 </dev/null; then
    cat "$folder/said" >&2
    exit 3
fi
if [ -n "${LIMIT_BESIDE-}" ]; then LD_LIBRARY_PATH=$root/usr/lib64 "$LIMIT_PYTHON" -c "$LIMIT_BESIDE"; fi
runc --root "$folder/state" start "$id"
for _ in $(seq 200); do
    if runc --root "$folder/state" state "$id" | grep -q '"status": "stopped"'; then break; fi
    sleep 0.1
done
cat "$folder/said"
