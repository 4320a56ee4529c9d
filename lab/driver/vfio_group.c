/* SPDX-License-Identifier: GPL-3.0-or-later
 *
 * SIMULATION. What VFIO says of an IOMMU group on a lab node with cards that change drivers (simulated_pci.py), whose device files are no
 * VFIO's: by /etc/ld.so.preload it answers VFIO_GROUP_GET_STATUS, as the kernel does by the drivers of the group's functions: viable is a
 * group whose functions have VFIO's driver or none. All other requests go to the kernel.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* _IO(';', 100 + 3) of linux/vfio.h, the first flag of its answer, and where the groups' device files are. */
#define GET_STATUS 0x3B67UL
#define VIABLE 1u
#define DEVICES "/dev/vfio/"

struct status {
    uint32_t size, flags;
};

static int is_viable(const char *group) {
    char folder[192], link[512], driver[256];
    struct dirent *entry;
    int viable = 1;
    DIR *members;

    snprintf(folder, sizeof folder, "/sys/kernel/iommu_groups/%s/devices", group);
    members = opendir(folder);
    if (!members)
        return 0;
    while ((entry = readdir(members))) {
        ssize_t length;
        const char *name;

        if (entry->d_name[0] == '.')
            continue;
        snprintf(link, sizeof link, "%s/%s/driver", folder, entry->d_name);
        length = readlink(link, driver, sizeof driver - 1);
        if (length < 0)
            continue;
        driver[length] = 0;
        name = strrchr(driver, '/');
        viable = viable && !strcmp(name ? name + 1 : driver, "vfio-pci");
    }
    closedir(members);
    return viable;
}

__attribute__((visibility("default"))) int ioctl(int handle, unsigned long request, ...) {
    static int (*kernels)(int, unsigned long, void *);
    char link[64], path[128];
    ssize_t length;
    va_list rest;
    void *argument;

    va_start(rest, request);
    argument = va_arg(rest, void *);
    va_end(rest);
    if (!kernels)
        *(void **)&kernels = dlsym(RTLD_NEXT, "ioctl");
    if (request == GET_STATUS) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", handle);
        length = readlink(link, path, sizeof path - 1);
        path[length < 0 ? 0 : length] = 0;
        if (!strncmp(path, DEVICES, strlen(DEVICES))) {
            struct status *status = argument;
            status->flags = is_viable(path + strlen(DEVICES)) ? VIABLE : 0;
            return 0;
        }
    }
    return kernels(handle, request, argument);
}
