/* SPDX-License-Identifier: GPL-3.0-or-later
 *
 * SIMULATION, a part of nvml.c: which processes hold memory of a card.
 *
 * The kernel doesn't report the owner of the locks that represent held memory (see limits.c), but a process's own file
 * descriptors show them. So those of every process that the caller can see are searched; seeing those of others needs root. A process in
 * a PID namespace of its own has the caller's number for it, as with the real one.
 */
/* Bytes that one line of fdinfo says are locked of a range:  lock:  1: OFDLCK ADVISORY  READ -1 fe:00:99 <first> <last> */
static uint64_t locked_by_line(const char *line, uint64_t from, uint64_t to)
{
    unsigned long long first, last;
    const char *lock = strstr(line, "OFDLCK");
    if (!lock || sscanf(lock, "%*s %*s %*s %*s %*s %llu %llu", &first, &last) != 2 || first < from || last >= to)
        return 0;
    return last - first + 1;
}

static uint64_t locked_by_descriptor(int process, const char *number, uint64_t from, uint64_t to)
{
    char path[64], line[512];
    uint64_t sum = 0;
    snprintf(path, sizeof path, "fdinfo/%.20s", number);
    int fd = openat(process, path, O_RDONLY | O_CLOEXEC);
    FILE *file = fd < 0 ? NULL : fdopen(fd, "r");
    while (file && fgets(line, sizeof line, file))
        sum += strncmp(line, "lock:", 5) ? 0 : locked_by_line(line, from, to);
    if (file)
        fclose(file);
    else if (fd >= 0)
        close(fd);
    return sum;
}

/* MiB of the range that a process holds through its descriptors of the file of limits. */
static uint64_t locked_by_process(int process, const struct stat *limits_file, uint64_t from, uint64_t to)
{
    uint64_t sum = 0;
    int folder = openat(process, "fd", O_DIRECTORY | O_RDONLY | O_CLOEXEC);
    DIR *entries = folder < 0 ? NULL : fdopendir(folder);
    for (struct dirent *entry; entries && (entry = readdir(entries));) {
        struct stat about;
        if (isdigit((unsigned char)*entry->d_name) && !fstatat(folder, entry->d_name, &about, 0) && about.st_ino == limits_file->st_ino
            && about.st_dev == limits_file->st_dev)
            sum += locked_by_descriptor(process, entry->d_name, from, to);
    }
    if (entries)
        closedir(entries);
    else if (folder >= 0)
        close(folder);
    return sum;
}

static void add_holders(const struct card *card, struct filling *list)
{
    struct stat limits_file;
    uint64_t from = place(card, 0), to = from + (1ull << CARD_SHIFT), number;
    int fd = open_limits(LOCK_SH);
    int any = fd >= 0 && !fstat(fd, &limits_file) && locked(fd, from, to);
    DIR *entries = any ? opendir("/proc") : NULL;
    for (struct dirent *entry; entries && (entry = readdir(entries));) {
        int process = whole(entry->d_name, INT32_MAX, &number) ? openat(dirfd(entries), entry->d_name, O_DIRECTORY | O_RDONLY | O_CLOEXEC) : -1;
        uint64_t mib = process < 0 ? 0 : locked_by_process(process, &limits_file, from, to);
        if (mib)
            add_process(list, (unsigned)number, mib, NO_INSTANCE);
        if (process >= 0)
            close(process);
    }
    if (entries)
        closedir(entries);
    if (fd >= 0)
        close(fd);
}
