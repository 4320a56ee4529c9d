/* SPDX-License-Identifier: GPL-3.0-or-later
 *
 * SIMULATION, a part of nvml.c: memory to hold, and the memory limits per card and cgroup that NVIDIA's driver has since branch R615.
 *
 * The limits are lines of a file beside the description of the cards (cards.limits; in a container gsp_sim_limits.bin, mounted as the
 * description is): `set <uuid>` once a card was ever given one, `limit <uuid> <cgroup> <soft> <hard>`. A cgroup is its folder's inode,
 * which is the same in every mount and namespace, and isn't used again when a cgroup of that path is created again.
 *
 * Held memory is byte-range locks on that same file, one byte for a MiB, in a range of the card and the cgroup. So it is seen from
 * every namespace, can be taken where the file is read-only, and ends with the process, however that ends.
 *
 * Codes are the documented ones. Which one the driver gives when a limit is to be lowered below what is held isn't documented; here it is
 * "in use by another client".
 */
#include <dirent.h>
#include <linux/mount.h>
#include <sys/file.h>
#include <sys/syscall.h>
#include <sys/vfs.h>

#define LIMITS_IN_CONTAINER "/lib/firmware/nvidia/" DRIVER_VERSION "/gsp_sim_limits.bin"
#define NO_LIMIT UINT64_MAX
#define CGROUP2 0x63677270
#define CAP_SYS_ADMIN_BIT 21

enum { MAX_LIMITS = 4096, CARD_SHIFT = 57, GROUP_SHIFT = 32, DEEP = 16 };
#define GROUP_MASK 0x1FFFFFFull

struct limit {
    char uuid[UUID_SIZE];
    uint64_t group, soft, hard;
};

static struct limit limits[MAX_LIMITS];
static int limit_count;
static char ever_set[MAX_CARDS][UUID_SIZE];
static int ever_count;

/* ------------------------------------------------------------------------------------------------------------ the file of limits */

#if DRIVER_MAJOR >= 615
/* A container has the file read-only. A process that may set limits can have a writable mount; no other process sees that one. */
static int open_writable(const char *path)
{
    struct mount_attr writable = {.attr_clr = MOUNT_ATTR_RDONLY};
    char name[64];
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (fd >= 0 || errno != EROFS)
        return fd;
    int mount = (int)syscall(SYS_open_tree, AT_FDCWD, path, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
    if (mount < 0)
        return -1;
    snprintf(name, sizeof name, "/proc/self/fd/%d", mount);
    if (!syscall(SYS_mount_setattr, mount, "", AT_EMPTY_PATH, &writable, sizeof writable))
        fd = open(name, O_RDWR | O_CLOEXEC);
    close(mount);
    return fd;
}
#else
static int open_writable(const char *path)
{
    return open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
}
#endif

/* Opens it under a lock, LOCK_SH or LOCK_EX; -1 where there is none, or none to write. */
static int open_limits(int how)
{
    char path[4096];
    const char *cards = cards_path();
    snprintf(path, sizeof path, "%s", LIMITS_IN_CONTAINER);
    if (strcmp(cards, FIRMWARE))
        snprintf(path, sizeof path, "%s.limits", cards);
    int fd = how == LOCK_EX ? open_writable(path) : open(path, O_RDONLY | O_CLOEXEC);
    if (fd >= 0 && flock(fd, how)) {
        close(fd);
        return -1;
    }
    return fd;
}

static void read_limits(int fd)
{
    char line[256];
    limit_count = ever_count = 0;
    FILE *file = fd < 0 ? NULL : fdopen(dup(fd), "r");
    if (!file)
        return;
    rewind(file);
    while (fgets(line, sizeof line, file)) {
        struct limit *one = &limits[limit_count];
        unsigned long long group, soft, hard;
        if (ever_count < MAX_CARDS && sscanf(line, "set %79s", ever_set[ever_count]) == 1)
            ever_count++;
        else if (limit_count < MAX_LIMITS && sscanf(line, "limit %79s %llu %llu %llu", one->uuid, &group, &soft, &hard) == 4) {
            one->group = group;
            one->soft = soft;
            one->hard = hard;
            limit_count++;
        }
    }
    fclose(file);
}

#if DRIVER_MAJOR >= 615
/* In place, and only longer or equal while lines are written: the mounts of containers stay with this very file. */
static int write_limits(int fd)
{
    char line[256];
    off_t at = 0;
    for (int i = 0; i < ever_count + limit_count; i++) {
        const struct limit *one = &limits[i - ever_count];
        int length = i < ever_count ? snprintf(line, sizeof line, "set %s\n", ever_set[i])
                                    : snprintf(line, sizeof line, "limit %s %llu %llu %llu\n", one->uuid, (unsigned long long)one->group,
                                               (unsigned long long)one->soft, (unsigned long long)one->hard);
        if (pwrite(fd, line, (size_t)length, at) != length)
            return 0;
        at += length;
    }
    return !ftruncate(fd, at);
}
#endif

static struct limit *limit_of(const struct card *card, uint64_t group)
{
    for (int i = 0; i < limit_count; i++)
        if (limits[i].group == group && !strcmp(limits[i].uuid, card->uuid))
            return &limits[i];
    return NULL;
}

#if DRIVER_MAJOR >= 615
static int was_ever_set(const struct card *card)
{
    for (int i = 0; i < ever_count; i++)
        if (!strcmp(ever_set[i], card->uuid))
            return 1;
    return 0;
}
#endif

/* --------------------------------------------------------------------------------------------------------------------- cgroups */

static int is_cgroup(int folder)
{
    struct statfs about;
    return !fstatfs(folder, &about) && about.f_type == CGROUP2;
}

/* The folder's number; 0 for none. Elsewhere than in a cgroup an inode may be used again, so that its birth counts too. */
static uint64_t group_of(int folder)
{
    struct statx about;
    if (statx(folder, "", AT_EMPTY_PATH, STATX_INO | STATX_BTIME, &about))
        return 0;
    uint64_t born = (uint64_t)about.stx_btime.tv_sec * 1000000000u + about.stx_btime.tv_nsec;
    return is_cgroup(folder) ? about.stx_ino : about.stx_ino ^ born;
}

/* The nearest cgroup with a limit on the card, from this one upwards: an open folder, or -1. */
static int limited_from(int folder, const struct card *card, struct limit **found)
{
    int here = dup(folder);
    *found = NULL;
    for (int depth = 0; here >= 0 && depth < DEEP; depth++) {
        if ((*found = limit_of(card, group_of(here))))
            return here;
        int up = openat(here, "..", O_DIRECTORY | O_RDONLY | O_CLOEXEC);
        if (up >= 0 && (is_cgroup(up) != is_cgroup(here) || group_of(up) == group_of(here))) {
            close(up);
            up = -1;
        }
        close(here);
        here = up;
    }
    if (here >= 0)
        close(here);
    return -1;
}

/* The cgroup of the caller, as far up as it can see; -1 where it is in none. */
static int own_folder(void)
{
    static const char *const roots[] = {"/sys/fs/cgroup", "/sys/fs/cgroup/unified"};
    char line[4096], path[8192];
    const char *override = secure_getenv("KUBEGPU_SIM_CGROUP");
    if (override && *override)
        return open(override, O_DIRECTORY | O_RDONLY | O_CLOEXEC);
    FILE *file = fopen("/proc/self/cgroup", "re");
    int found = -1;
    while (file && found < 0 && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        for (int i = 0; !strncmp(line, "0::/", 4) && found < 0 && i < 2; i++) {
            snprintf(path, sizeof path, "%s%s", roots[i], line + 3);
            found = open(path, O_DIRECTORY | O_RDONLY | O_CLOEXEC);
            if (found >= 0 && !is_cgroup(found)) {
                close(found);
                found = -1;
            }
        }
    }
    if (file)
        fclose(file);
    return found;
}

/* ----------------------------------------------------------------------------------------------------------------- held memory */

static uint64_t place(const struct card *card, uint64_t group)
{
    return (uint64_t)card->index << CARD_SHIFT | (group & GROUP_MASK) << GROUP_SHIFT;
}

/* Locked bytes; the kernel reports any lock in the range, not the lowest, so the rest is on both sides of it. */
static uint64_t locked(int fd, uint64_t from, uint64_t to)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)from, .l_len = (off_t)(to - from)};
    if (from >= to || fcntl(fd, F_OFD_GETLK, &lock) || lock.l_type == F_UNLCK)
        return 0;
    uint64_t first = (uint64_t)lock.l_start > from ? (uint64_t)lock.l_start : from;
    uint64_t last = (uint64_t)lock.l_start + (uint64_t)lock.l_len;
    last = !lock.l_len || last > to ? to : last;
    return last - first + locked(fd, from, first) + locked(fd, last, to);
}

/* MiB that the processes of a cgroup hold, and those of the cgroups in it, except of those with a limit of their own. */
static uint64_t used_mib(int fd, int folder, const struct card *card, int depth)
{
    uint64_t start = place(card, group_of(folder)), sum = locked(fd, start, start + (1ull << GROUP_SHIFT));
    int again = depth < DEEP ? openat(folder, ".", O_DIRECTORY | O_RDONLY | O_CLOEXEC) : -1;
    DIR *entries = again < 0 ? NULL : fdopendir(again);
    for (struct dirent *entry; entries && (entry = readdir(entries));) {
        if (entry->d_type != DT_DIR || !strcmp(entry->d_name, ".") || !strcmp(entry->d_name, ".."))
            continue;
        int child = openat(folder, entry->d_name, O_DIRECTORY | O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
        if (child >= 0 && !limit_of(card, group_of(child)))
            sum += used_mib(fd, child, card, depth + 1);
        if (child >= 0)
            close(child);
    }
    if (entries)
        closedir(entries);
    return sum;
}

/* MiB of a card that processes hold through kubegpuSimAllocate, wherever they are. */
static uint64_t allocated_in(int fd, const struct card *card)
{
    uint64_t start = place(card, 0);
    return locked(fd, start, start + (1ull << CARD_SHIFT));
}

static uint64_t allocated_mib(const struct card *card)
{
    int fd = open_limits(LOCK_SH);
    uint64_t sum = fd < 0 ? 0 : allocated_in(fd, card);
    if (fd >= 0)
        close(fd);
    return sum;
}

#if DRIVER_MAJOR >= 615
/* The limit that the caller is under, if any, and what is held below it, in MiB. */
static int own_limit(const struct card *card, uint64_t *hard, uint64_t *used)
{
    struct limit *limit = NULL;
    int fd = open_limits(LOCK_SH), own = own_folder(), at = -1;
    read_limits(fd);
    if (fd >= 0 && own >= 0 && (at = limited_from(own, card, &limit)) >= 0 && limit->hard != NO_LIMIT) {
        *hard = limit->hard;
        *used = used_mib(fd, at, card, 0);
    }
    int limited = at >= 0 && limit->hard != NO_LIMIT;
    for (int i = 0, all[] = {fd, own, at}; i < 3; i++)
        if (all[i] >= 0)
            close(all[i]);
    return limited;
}

/* ------------------------------------------------------------------------------------------------------------------- the calls */

struct set_limits {
    const char *name_space;
    uint64_t soft, hard;
};

struct get_limits {
    const char *name_space;
    uint64_t soft, hard, used;
};

static int privileged(void)
{
    char line[256];
    unsigned long long effective = 0;
    FILE *file = fopen("/proc/self/status", "re");
    while (file && fgets(line, sizeof line, file))
        sscanf(line, "CapEff: %llx", &effective);
    if (file)
        fclose(file);
    return !geteuid() && effective >> CAP_SYS_ADMIN_BIT & 1;
}

/* Opens the caller's cgroup folder; the real driver knows version 2 alone, a test of its own any folder. */
static Return open_folder(const char *path, int writing, int *folder)
{
    *folder = open(path, O_DIRECTORY | O_RDONLY | O_CLOEXEC);
    if (*folder < 0)
        return OPERATING_SYSTEM;
    const char *test = secure_getenv("KUBEGPU_SIM_CARDS");
    /* With dmem a limit is a file in the folder, and a mount that is read-only would keep it from being written. */
    if (writing && hw.limits == LIMITS_DMEM && faccessat(*folder, ".", W_OK, 0)) {
        close(*folder);
        return OPERATING_SYSTEM;
    }
    if (is_cgroup(*folder) ? !faccessat(*folder, "cgroup.events", F_OK, 0) : test && *test)
        return OK;
    close(*folder);
    return NOT_SUPPORTED; /* version 1, or the root, which can't be limited */
}

static Return set_limit(int fd, int folder, const struct card *card, uint64_t soft, uint64_t hard)
{
    uint64_t group = group_of(folder);
    struct limit *one = limit_of(card, group);
    if (hard != NO_LIMIT && hw.limits == LIMITS_MISC && used_mib(fd, folder, card, 0) * MIB > hard)
        return IN_USE;
    if (!was_ever_set(card) && ever_count < MAX_CARDS)
        strcpy(ever_set[ever_count++], card->uuid);
    if (soft == 0 && hard == NO_LIMIT) {
        if (one)
            *one = limits[--limit_count];
    } else {
        if (!one) {
            if (limit_count == MAX_LIMITS)
                return INSUFFICIENT_RESOURCES;
            one = &limits[limit_count++];
            strcpy(one->uuid, card->uuid);
            one->group = group;
        }
        one->soft = soft;
        one->hard = hard;
    }
    return write_limits(fd) ? OK : UNKNOWN;
}

API Return nvmlDeviceSetMemoryLimits_v1(Handle *handle, struct set_limits *request)
{
    struct card *card;
    int folder;
    Return code = enter_card(handle, &card);
    if (code)
        return code;
    if (!request || !request->name_space || request->soft > request->hard
        || (request->hard != NO_LIMIT && request->hard > card->memory_mib * MIB)
        || (request->soft != NO_LIMIT && request->soft > card->memory_mib * MIB))
        return leave(INVALID_ARGUMENT);
    if (hw.limits == LIMITS_OFF || card->mig == MIG_ENABLED)
        return leave(NOT_SUPPORTED);
    if (!privileged())
        return leave(NO_PERMISSION);
    if ((code = open_folder(request->name_space, 1, &folder)))
        return leave(code);
    int fd = open_limits(LOCK_EX);
    if (fd >= 0) {
        read_limits(fd);
        code = set_limit(fd, folder, card, request->soft, request->hard);
        close(fd);
    } else
        code = UNKNOWN;
    close(folder);
    return leave(code);
}

API Return nvmlDeviceGetMemoryLimits_v1(Handle *handle, struct get_limits *answer)
{
    struct card *card;
    struct limit *limit;
    int folder;
    Return code = enter_card_if(answer && answer->name_space, handle, &card);
    if (code)
        return code;
    if (hw.limits == LIMITS_OFF || card->mig == MIG_ENABLED)
        return leave(NOT_SUPPORTED);
    if ((code = open_folder(answer->name_space, 0, &folder)))
        return leave(code);
    int fd = open_limits(LOCK_SH);
    read_limits(fd);
    int at = limited_from(folder, card, &limit);
    if (at >= 0) {
        answer->soft = limit->soft;
        answer->hard = limit->hard;
        answer->used = used_mib(fd, at, card, 0) * MIB;
        close(at);
    } else if (hw.limits == LIMITS_DMEM) {
        /* There the kernel has a file for every cgroup, and "max" in it. */
        answer->soft = 0;
        answer->hard = NO_LIMIT;
        answer->used = fd < 0 ? 0 : used_mib(fd, folder, card, 0) * MIB;
    } else
        code = was_ever_set(card) ? NOT_FOUND : NOT_SUPPORTED;
    if (fd >= 0)
        close(fd);
    close(folder);
    return leave(code);
}

_Static_assert(sizeof(struct set_limits) == 24 && sizeof(struct get_limits) == 32, "ABI of nvml.h");
#endif

/* ------------------------------------------------------------------------------------------------------------ of the lab alone */

/* Hold memory of a card until the file is closed, which the process's end does, too; -1 and a code where it can't. */
static int hold(const struct card *card, uint64_t mib, Return *code)
{
    struct limit *limit = NULL;
    int limits_fd = open_limits(LOCK_EX), fd = -1, at = -1;
    *code = OK;
    if (limits_fd < 0) /* in a container it is read-only, which a lock doesn't mind */
        limits_fd = open_limits(LOCK_SH);
    if (!mib || limits_fd < 0) {
        if (limits_fd >= 0)
            close(limits_fd);
        *code = mib ? INSUFFICIENT_RESOURCES : INVALID_ARGUMENT;
        return -1;
    }
    flock(limits_fd, LOCK_EX);
    read_limits(limits_fd);
    int own = own_folder();
    if (own >= 0 && (at = limited_from(own, card, &limit)) >= 0 && (used_mib(limits_fd, at, card, 0) + mib) * MIB > limit->hard)
        *code = INSUFFICIENT_MEMORY;
    if (described_mib(card) + allocated_in(limits_fd, card) + mib > card->memory_mib - card->reserved_mib)
        *code = INSUFFICIENT_MEMORY;
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", limits_fd);
    /* Another opening of it: what it has locked counts for others and for us. */
    if (!*code && (fd = open(path, O_RDONLY | O_CLOEXEC)) < 0)
        *code = INSUFFICIENT_RESOURCES;
    if (!*code) {
        uint64_t from = place(card, own < 0 ? 0 : group_of(own));
        for (struct flock lock;; from = (uint64_t)lock.l_start + (uint64_t)lock.l_len) {
            lock = (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)from, .l_len = (off_t)mib};
            if (fcntl(limits_fd, F_OFD_GETLK, &lock) || lock.l_type == F_UNLCK)
                break;
        }
        struct flock lock = {.l_type = F_RDLCK, .l_whence = SEEK_SET, .l_start = (off_t)from, .l_len = (off_t)mib};
        if (fcntl(fd, F_OFD_SETLK, &lock)) {
            *code = INSUFFICIENT_RESOURCES;
            close(fd);
            fd = -1;
        }
    }
    for (int i = 0, all[] = {limits_fd, own, at}; i < 3; i++)
        if (all[i] >= 0)
            close(all[i]);
    return fd;
}

/* What an allocation of device memory would be, held until the process ends. */
API Return kubegpuSimAllocate(Handle *handle, uint64_t mib)
{
    struct card *card;
    Return code = enter_card(handle, &card);
    if (code)
        return code;
    hold(card, mib, &code);
    return leave(code);
}

/* The same for cuda.c, which gives it back by closing the file; by the card's number among those that the caller has. */
API Return kubegpuSimHold(unsigned index, uint64_t mib, int *file)
{
    Handle *handle;
    struct card *card;
    Return code = nvmlDeviceGetHandleByIndex_v2(index, &handle);
    if (code || (code = enter_card_if(file, handle, &card)))
        return code;
    *file = hold(card, mib, &code);
    return leave(code);
}

/* The same card for cuda.c: its name, identity, and MiB in all and free. A library that is loaded before these two hides NVML's. */
API Return kubegpuSimCard(unsigned index, char *name, char *uuid, uint64_t *total, uint64_t *left)
{
    Handle *handle;
    struct card *card;
    Return code = nvmlDeviceGetHandleByIndex_v2(index, &handle);
    if (code || (code = enter_card_if(name && uuid && total && left, handle, &card)))
        return code;
    strcpy(name, card->name);
    strcpy(uuid, card->uuid);
    *total = card->memory_mib;
    *left = card->memory_mib - card->reserved_mib - held_mib(card);
    return leave(OK);
}
