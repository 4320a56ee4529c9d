/* SPDX-License-Identifier: GPL-3.0-or-later
 *
 * SIMULATION. libnvidia-ml.so.1 of the kubegpu.share lab: it answers the NVML calls that nvidia-ml-py, GPU sharing device plugins,
 * NVIDIA's device plugin and NVIDIA's container toolkit make, from a small text file. There is no GPU behind it and no NVIDIA code in it;
 * only names, struct layouts and codes of the public interface.
 *
 * The file, first found: $KUBEGPU_SIM_CARDS; HARDWARE (a lab node); FIRMWARE (inside a container: the container toolkit mounts gsp*.bin of
 * the driver's version). It is read again whenever it changes. Change it in place and by one write: a container's mount stays with the file
 * that it was given, and never sees another one of the same name. Lines:
 *
 *   # comment
 *   driver 580.95.05                 what the lab offers; not read here: a library knows its own version
 *   cuda 13000                       what the driver says of CUDA
 *   card <index> uuid=GPU-... minor=<n> memory=<MiB> bus=0000:01:00.0 name=Simulated_GPU [mig=disabled|enabled] [mode=<0 to 3>]
 *        [reserved=<MiB>]            what driver and firmware keep of the memory; 256 by default
 *        [ecc=<volatile>:<aggregate>] [remapped=<correctable>:<uncorrectable>:<pending>:<failed>]     "not supported" without them
 *   mig <index> <instance> <profile> uuid=MIG-...
 *                                    a device of a card with mig=enabled; its profile as 1g.5gb, by the card's memory (see mig.c), its
 *                                    instance from 1 to 14; nvidia-sim makes its capability files
 *   process <index> <pid> <MiB> [compute|graphics|mps] [instance]
 *                                    a client of MPS computes, too, and is in both lists
 *   fault init:<code> | count0 | slow:<seconds> | card:<index>:<code> | hang:init | hang:<index>
 *                                    what hangs gives no answer until the line is gone; nobody else waits for it
 *   xid <index> <code>               an event for every event set that watches the card when the line appears
 *   limits misc|dmem|off             how limits per cgroup are kept, since branch 615; misc by default (see limits.c)
 *
 * As with the real one, a caller has the cards whose /dev/nvidia<minor> is there, numbered anew: in a container only its own. And
 * as with that, a caller without /dev/nvidiactl has no driver. (Under
 * $KUBEGPU_SIM_CARDS it has all, unless $KUBEGPU_SIM_DEV names a folder in the place of /dev.)
 *
 * On a lab node the simulated kernel module counts too, as it does on a real one: its version file missing means "driver not loaded" (9),
 * another version in it "driver/library version mismatch" (18). A container doesn't see that file and skips the question.
 */
#define _GNU_SOURCE
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#ifndef DRIVER_VERSION
#error "compile with -DDRIVER_VERSION=\"<version>\""
#endif
/* Of the version, for what a branch has or hasn't. */
#ifndef DRIVER_MAJOR
#error "compile with -DDRIVER_MAJOR=<number>"
#endif

#define HARDWARE "/var/lib/kubegpu-lab/hardware/cards"
#define FIRMWARE "/lib/firmware/nvidia/" DRIVER_VERSION "/gsp_sim.bin"
#define MODULE_VERSION_FILE "/proc/driver/nvidia/version"
#define PERSISTENCE_FILE "/run/nvidia-sim/persistence-mode"

#define API __attribute__((visibility("default")))
#define SAME_AS(other) __attribute__((visibility("default"), alias(#other)))

enum {
    MAX_CARDS = 64,
    MAX_HANDLES = 1024,
    MAX_LINES = 512, /* of processes, and of events */
    MAX_SETS = 64,
    MAX_MIGS = 7 * MAX_CARDS,
    UUID_SIZE = 80,
    NAME_SIZE = 96,
    POLL_MS = 100
};

#define MIB 1048576ULL
#define NO_INSTANCE 0xFFFFFFFFu
#define EVENT_XID 0x8ULL
#define EVENT_TYPES 0xFF9FULL /* that can be registered for; only XIDs ever happen here */
#define FLAG_NO_GPUS 1u

typedef int Return;
enum {
    OK = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NO_PERMISSION = 4,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    TIMEOUT = 10,
    FUNCTION_NOT_FOUND = 13,
    GPU_IS_LOST = 15,
    OPERATING_SYSTEM = 17,
    LIB_RM_VERSION_MISMATCH = 18,
    IN_USE = 19,
    INSUFFICIENT_MEMORY = 20,
    INSUFFICIENT_RESOURCES = 23,
    UNKNOWN = 999
};

enum kind { COMPUTE, GRAPHICS, MPS };
enum mig { MIG_NONE, MIG_DISABLED, MIG_ENABLED };
enum limits { LIMITS_MISC, LIMITS_DMEM, LIMITS_OFF };

struct card {
    int index;    /* in the file */
    int position; /* among those that the caller has */
    char uuid[UUID_SIZE], name[NAME_SIZE];
    unsigned minor, domain, bus, device;
    uint64_t memory_mib, reserved_mib;
    int has_reserved;
    enum mig mig;
    int mode; /* compute mode */
    int has_ecc, has_remapped;
    unsigned ecc[2], remapped[4];
    Return fault;
    int hangs;
};

/* A MIG device: a GPU instance that one compute instance fills. */
struct instance {
    int index; /* of its card in the file */
    char uuid[UUID_SIZE], text[24];
    unsigned gi;
    int profile; /* in mig.c's table */
};

struct process {
    int index;
    unsigned pid;
    uint64_t mib;
    enum kind kind;
    unsigned gi; /* the instance that has it; NO_INSTANCE for the card itself */
};

struct xid {
    int index;
    uint64_t code;
};

/* All that the file says. */
struct hardware {
    int cuda;
    struct card cards[MAX_CARDS];
    int card_count;
    struct instance migs[MAX_MIGS];
    int mig_count;
    struct process processes[MAX_LINES];
    int process_count;
    struct xid xids[MAX_LINES];
    int xid_count;
    Return init_fault;
    int no_cards, init_hangs;
    double slow;
    enum limits limits;
};

/* A handle belongs to a card by its UUID, so that it outlives every new reading of the file. */
typedef struct handle {
    char uuid[UUID_SIZE];
} Handle;

typedef struct event_set {
    int used;
    uint64_t watched[MAX_HANDLES]; /* event types, by handle */
    struct xid seen[MAX_LINES];    /* lines that were reported, or were there before the card was watched */
    int seen_count;
} EventSet;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int users;        /* init calls without their shutdown */
static pid_t users_pid; /* the process of these calls: its copy by fork() begins anew */
static unsigned flags;   /* of the last init */
static struct hardware hw, fresh;
static Return hw_state = DRIVER_NOT_LOADED;
static struct statx hw_stat;
static Handle handles[MAX_HANDLES];
static int handle_count;
static EventSet sets[MAX_SETS];
static struct card *shown[MAX_CARDS]; /* the cards that the caller has */
static int shown_count;

/* ---------------------------------------------------------------------------------------------------------------- the file */

static int whole(const char *text, uint64_t most, uint64_t *value)
{
    char *end;
    if (!isdigit((unsigned char)*text))
        return 0;
    errno = 0;
    *value = strtoull(text, &end, 0);
    return !errno && !*end && *value <= most;
}

static struct card *card_numbered(struct hardware *h, int index)
{
    for (int i = 0; i < h->card_count; i++)
        if (h->cards[i].index == index)
            return &h->cards[i];
    return NULL;
}

static int parse_bus(const char *text, unsigned *domain, unsigned *bus, unsigned *device)
{
    unsigned function;
    int used = 0;
    return sscanf(text, "%8x:%2x:%2x.%1x%n", domain, bus, device, &function, &used) == 4 && !text[used] && function == 0;
}

/* Exactly so many numbers with colons between them. */
static int numbers(char *text, unsigned *values, int count)
{
    uint64_t number;
    for (int i = 0; i < count; i++) {
        char *end = strchr(text, ':');
        if (!end == (i < count - 1))
            return 0;
        if (end)
            *end = 0;
        if (!whole(text, UINT32_MAX, &number))
            return 0;
        values[i] = (unsigned)number;
        text = end + 1;
    }
    return 1;
}

static const char *parse_card(struct hardware *h, char **words, int count)
{
    uint64_t number;
    int has_minor = 0, has_bus = 0;
    if (h->card_count == MAX_CARDS)
        return "too many cards";
    struct card *card = &h->cards[h->card_count];
    memset(card, 0, sizeof *card);
    if (count < 2 || !whole(words[1], MAX_CARDS - 1, &number))
        return "card needs its index";
    card->index = (int)number;
    for (int i = 2; i < count; i++) {
        char *value = strchr(words[i], '=');
        if (!value)
            return "a card's properties are key=value";
        *value++ = 0;
        if (!strcmp(words[i], "uuid") && *value && strlen(value) < UUID_SIZE)
            strcpy(card->uuid, value);
        else if (!strcmp(words[i], "name") && *value && strlen(value) < NAME_SIZE) {
            strcpy(card->name, value);
            for (char *c = card->name; *c; c++)
                if (*c == '_')
                    *c = ' ';
        } else if (!strcmp(words[i], "minor") && whole(value, 254, &number)) {
            card->minor = (unsigned)number;
            has_minor = 1;
        } else if (!strcmp(words[i], "memory") && whole(value, 1 << 24, &number) && number)
            card->memory_mib = number;
        else if (!strcmp(words[i], "reserved") && whole(value, 1 << 24, &number)) {
            card->reserved_mib = number;
            card->has_reserved = 1;
        }
        else if (!strcmp(words[i], "bus") && parse_bus(value, &card->domain, &card->bus, &card->device))
            has_bus = 1;
        else if (!strcmp(words[i], "mig") && (!strcmp(value, "disabled") || !strcmp(value, "enabled")))
            card->mig = *value == 'd' ? MIG_DISABLED : MIG_ENABLED;
        else if (!strcmp(words[i], "mode") && whole(value, 3, &number))
            card->mode = (int)number;
        else if (!strcmp(words[i], "ecc") && numbers(value, card->ecc, 2))
            card->has_ecc = 1;
        else if (!strcmp(words[i], "remapped") && numbers(value, card->remapped, 4))
            card->has_remapped = 1;
        else
            return "a card's property is unknown, or its value is";
    }
    if (!*card->uuid || !*card->name || !card->memory_mib || !has_minor || !has_bus)
        return "a card needs uuid, minor, memory, bus and name";
    if (!card->has_reserved)
        card->reserved_mib = card->memory_mib >= 2048 ? 256 : card->memory_mib / 8;
    if (card->reserved_mib > card->memory_mib)
        return "a card can't keep more memory than it has";
    for (int i = 0; i < h->card_count; i++) {
        const struct card *other = &h->cards[i];
        if (other->index == card->index || other->minor == card->minor || !strcmp(other->uuid, card->uuid)
            || (other->domain == card->domain && other->bus == card->bus && other->device == card->device))
            return "two cards share an index, a minor, a UUID or a bus address";
    }
    h->card_count++;
    return NULL;
}

static const char *parse_process(struct hardware *h, char **words, int count)
{
    uint64_t index, pid, mib;
    struct process *process = &h->processes[h->process_count];
    if (h->process_count == MAX_LINES)
        return "too many processes";
    uint64_t gi = NO_INSTANCE;
    if (count < 4 || count > 6 || !whole(words[1], MAX_CARDS - 1, &index) || !whole(words[2], INT32_MAX, &pid)
        || !whole(words[3], 1 << 24, &mib))
        return "process needs index, pid and MiB";
    if (count == 6 && !whole(words[5], 14, &gi))
        return "a process's instance is a number";
    const char *kind = count >= 5 ? words[4] : "compute";
    if (!strcmp(kind, "compute"))
        process->kind = COMPUTE;
    else if (!strcmp(kind, "graphics"))
        process->kind = GRAPHICS;
    else if (!strcmp(kind, "mps"))
        process->kind = MPS;
    else
        return "a process is compute, graphics or mps";
    process->index = (int)index;
    process->pid = (unsigned)pid;
    process->mib = mib;
    process->gi = (unsigned)gi;
    h->process_count++;
    return NULL;
}

enum { HANGS = -1 }; /* among the faults, which are codes else */

/* `faults` collects them by card index, because a card may be described below its fault. */
static const char *parse_fault(struct hardware *h, const char *what, Return *faults)
{
    uint64_t code;
    unsigned index;
    int used = 0;
    if (!strcmp(what, "count0")) {
        h->no_cards = 1;
        return NULL;
    }
    if (!strncmp(what, "init:", 5) && whole(what + 5, UNKNOWN, &code)) {
        h->init_fault = (Return)code;
        return NULL;
    }
    if (!strcmp(what, "hang:init")) {
        h->init_hangs = 1;
        return NULL;
    }
    if (!strncmp(what, "hang:", 5) && whole(what + 5, MAX_CARDS - 1, &code)) {
        faults[code] = HANGS;
        return NULL;
    }
    if (!strncmp(what, "slow:", 5)) {
        char *end;
        h->slow = strtod(what + 5, &end);
        if (end != what + 5 && !*end && h->slow >= 0 && h->slow <= 3600)
            return NULL;
    }
    if (sscanf(what, "card:%3u:%n", &index, &used) == 1 && used && index < MAX_CARDS && whole(what + used, UNKNOWN, &code)) {
        faults[index] = (Return)code;
        return NULL;
    }
    return "fault is init:<code>, count0, slow:<seconds>, card:<index>:<code>, hang:init or hang:<index>";
}

static const char *parse_limits(struct hardware *h, const char *how)
{
    if (!strcmp(how, "misc"))
        h->limits = LIMITS_MISC;
    else if (!strcmp(how, "dmem"))
        h->limits = LIMITS_DMEM;
    else if (!strcmp(how, "off"))
        h->limits = LIMITS_OFF;
    else
        return "limits are misc, dmem or off";
    return NULL;
}

static const char *parse_mig(struct hardware *h, char **words, int count);
static const char *check_migs(struct hardware *h);

static const char *parse_line(struct hardware *h, char **words, int count, Return *faults)
{
    uint64_t number, index;
    if (!strcmp(words[0], "driver"))
        return count == 2 ? NULL : "driver needs its version";
    if (!strcmp(words[0], "cuda")) {
        if (count != 2 || !whole(words[1], INT32_MAX, &number))
            return "cuda needs its number, 13000 for 13.0";
        h->cuda = (int)number;
        return NULL;
    }
    if (!strcmp(words[0], "card"))
        return parse_card(h, words, count);
    if (!strcmp(words[0], "mig"))
        return parse_mig(h, words, count);
    if (!strcmp(words[0], "process"))
        return parse_process(h, words, count);
    if (!strcmp(words[0], "limits"))
        return count == 2 ? parse_limits(h, words[1]) : "limits need to say how";
    if (!strcmp(words[0], "fault"))
        return count == 2 ? parse_fault(h, words[1], faults) : "fault needs to say which";
    if (!strcmp(words[0], "xid")) {
        if (h->xid_count == MAX_LINES)
            return "too many xid lines";
        if (count != 3 || !whole(words[1], MAX_CARDS - 1, &index) || !whole(words[2], UINT32_MAX, &number))
            return "xid needs index and code";
        h->xids[h->xid_count++] = (struct xid){(int)index, number};
        return NULL;
    }
    return "unknown line";
}

static int by_index(const void *a, const void *b)
{
    return ((const struct card *)a)->index - ((const struct card *)b)->index;
}

/* Reads the file into `fresh`; a mistake in it is reported on stderr, with its line. */
static int parse(FILE *file, const char *path)
{
    char line[1024];
    Return faults[MAX_CARDS] = {0};
    memset(&fresh, 0, sizeof fresh);
    fresh.cuda = 13000;
    for (int number = 1; fgets(line, sizeof line, file); number++) {
        char *words[16], *rest = NULL;
        int count = 0;
        line[strcspn(line, "#")] = 0;
        for (char *word = strtok_r(line, " \t\r\n", &rest); word && count < 16; word = strtok_r(NULL, " \t\r\n", &rest))
            words[count++] = word;
        const char *wrong = count ? parse_line(&fresh, words, count, faults) : NULL;
        if (wrong) {
            fprintf(stderr, "simulated NVML: %s:%d: %s\n", path, number, wrong);
            return 0;
        }
    }
    for (int i = 0; i < MAX_CARDS; i++) {
        struct card *card = card_numbered(&fresh, i);
        if (card && faults[i] == HANGS)
            card->hangs = 1;
        else if (card)
            card->fault = faults[i];
    }
    const char *wrong = check_migs(&fresh);
    if (wrong) {
        fprintf(stderr, "simulated NVML: %s: %s\n", path, wrong);
        return 0;
    }
    qsort(fresh.cards, (size_t)fresh.card_count, sizeof *fresh.cards, by_index);
    return 1;
}

static const char *cards_path(void)
{
    const char *path = secure_getenv("KUBEGPU_SIM_CARDS");
    if (path && *path)
        return path;
    return access(HARDWARE, R_OK) ? FIRMWARE : HARDWARE;
}

static int same_file(const struct statx *a, const struct statx *b)
{
    return a->stx_ino == b->stx_ino && a->stx_size == b->stx_size && a->stx_mtime.tv_sec == b->stx_mtime.tv_sec
           && a->stx_mtime.tv_nsec == b->stx_mtime.tv_nsec && a->stx_dev_minor == b->stx_dev_minor;
}

/* Holds `hw` at what the file says now; a mistake in a changed file leaves the last good state, and so does one just being written. */
static void reread(void)
{
    const char *path = cards_path();
    struct statx now;
    if (statx(AT_FDCWD, path, 0, STATX_BASIC_STATS, &now)) {
        hw_state = DRIVER_NOT_LOADED;
        memset(&hw_stat, 0, sizeof hw_stat);
        return;
    }
    if (!now.stx_size || same_file(&now, &hw_stat))
        return;
    FILE *file = fopen(path, "re");
    int good = file && parse(file, path);
    if (file)
        fclose(file);
    hw_stat = now;
    if (good) {
        hw = fresh;
        hw_state = OK;
    } else if (hw_state == DRIVER_NOT_LOADED)
        hw_state = UNKNOWN;
}

/* The folder whose device nodes say which cards the caller has; none where all are shown. */
static const char *dev_folder(void)
{
    const char *cards = secure_getenv("KUBEGPU_SIM_CARDS"), *folder = secure_getenv("KUBEGPU_SIM_DEV");
    if (folder && *folder)
        return folder;
    return cards && *cards ? NULL : "/dev";
}

/* The file and the device nodes as they are now; nodes can come and go without the file. */
static void refresh(void)
{
    char path[4096];
    const char *folder = dev_folder();
    reread();
    shown_count = 0;
    for (int i = 0; hw_state == OK && !hw.no_cards && i < hw.card_count; i++) {
        if (folder) {
            snprintf(path, sizeof path, "%s/nvidia%u", folder, hw.cards[i].minor);
            if (access(path, F_OK))
                continue;
        }
        hw.cards[i].position = shown_count;
        shown[shown_count++] = &hw.cards[i];
    }
}

/* What the simulated kernel module of a lab node says; a container and a test have none to ask. Without its control device there is none. */
static Return module_state(void)
{
    char text[512] = "";
    const char *folder = dev_folder();
    snprintf(text, sizeof text, "%s/nvidiactl", folder ? folder : "");
    if (folder && access(text, F_OK))
        return DRIVER_NOT_LOADED;
    if (strcmp(cards_path(), HARDWARE))
        return OK;
    FILE *file = fopen(MODULE_VERSION_FILE, "re");
    if (!file)
        return DRIVER_NOT_LOADED;
    char *line = fgets(text, sizeof text, file);
    fclose(file);
    return line && strstr(line, "  " DRIVER_VERSION "  ") ? OK : LIB_RM_VERSION_MISMATCH;
}

/* ------------------------------------------------------------------------------------------------------------ entering calls */

static void nap(double seconds)
{
    struct timespec rest = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    while (nanosleep(&rest, &rest) && errno == EINTR)
        ;
}

static Return leave(Return code)
{
    pthread_mutex_unlock(&lock);
    return code;
}

/* The lock, with `hw` as the file has it; a slow card keeps its caller waiting, nobody else. */
static void take(void)
{
    pthread_mutex_lock(&lock);
    refresh();
    if (hw_state == OK && hw.slow > 0) {
        double seconds = hw.slow;
        pthread_mutex_unlock(&lock);
        nap(seconds);
        pthread_mutex_lock(&lock);
    }
}

/* Every call begins here; after OK the lock is held, and leave() gives it back. */
static Return enter(void)
{
    take();
    return users && users_pid == getpid() ? OK : leave(UNINITIALIZED);
}

static int present(void)
{
    return flags & FLAG_NO_GPUS ? 0 : shown_count;
}

static int valid(const Handle *handle)
{
    return handle >= handles && handle < handles + handle_count && ((const char *)handle - (const char *)handles) % sizeof *handle == 0;
}

static struct instance *mig_called(const char *uuid);

/* The card of a handle, which isn't that of a MIG device; one that has gone from the file has fallen off the bus. */
static Return card_of(const Handle *handle, struct card **card)
{
    if (!valid(handle) || mig_called(handle->uuid))
        return INVALID_ARGUMENT;
    for (int i = 0; i < present(); i++)
        if (!strcmp(shown[i]->uuid, handle->uuid)) {
            *card = shown[i];
            return shown[i]->fault;
        }
    return GPU_IS_LOST;
}

/* Gives the lock away for a moment; what was read of the file before is void. */
static void wait_a_moment(void)
{
    pthread_mutex_unlock(&lock);
    nap(POLL_MS / 1000.0);
    pthread_mutex_lock(&lock);
    refresh();
}

static Return enter_card(const Handle *handle, struct card **card)
{
    Return code = enter();
    if (code)
        return code;
    while (!(code = card_of(handle, card)) && (*card)->hangs)
        wait_a_moment();
    return code ? leave(code) : OK;
}

/* The same, and INVALID_ARGUMENT unless the call's other arguments are valid. */
static Return enter_card_if(_Bool valid, const Handle *handle, struct card **card)
{
    Return code = enter_card(handle, card);
    return (code || valid) ? code : leave(INVALID_ARGUMENT);
}

static Return handle_for(const struct card *card, Handle **handle)
{
    for (int i = 0; i < handle_count; i++)
        if (!strcmp(handles[i].uuid, card->uuid)) {
            *handle = &handles[i];
            return card->fault;
        }
    if (handle_count == MAX_HANDLES)
        return INSUFFICIENT_RESOURCES;
    strcpy(handles[handle_count].uuid, card->uuid);
    *handle = &handles[handle_count++];
    return card->fault;
}

static Return put(char *buffer, unsigned length, const char *text)
{
    if (!buffer)
        return INVALID_ARGUMENT;
    if (length < strlen(text) + 1)
        return INSUFFICIENT_SIZE;
    strcpy(buffer, text);
    return OK;
}

/* ---------------------------------------------------------------------------------------------------------------- the system */

API const char *nvmlErrorString(Return code)
{
    static const char *const words[] = {
        "Success", "Uninitialized", "Invalid Argument", "Not Supported", "Insufficient Permissions", "Already Initialized", "Not Found",
        "Insufficient Size", "Insufficient External Power", "Driver Not Loaded", "Timeout", "Interrupt Request Issue",
        "NVML Shared Library Not Found", "Function Not Found", "Corrupted infoROM", "GPU is lost", "GPU requires reset",
        "GPU access blocked by the operating system", "Driver/library version mismatch", "In use by another client",
        "Insufficient Memory", "No data", "vGPU ECC not supported", "Insufficient Resources", "Invalid Frequency",
        "Argument version mismatch", "Requested functionality has been deprecated", "System is not in ready state",
        "No supported GPUs were found", "Resource not in correct state to perform requested operation",
        "Reset type is not supported for given device"};
    return code >= 0 && code < (int)(sizeof words / sizeof *words) ? words[code] : "Unknown Error";
}

API Return nvmlInitWithFlags(unsigned wanted)
{
    take();
    while (hw_state == OK && hw.init_hangs)
        wait_a_moment();
    Return code = hw_state == OK ? hw.init_fault : hw_state;
    if (!code)
        code = module_state();
    if (!code) {
        if (users_pid != getpid()) {
            users = 0;
            memset(sets, 0, sizeof sets);
        }
        users_pid = getpid();
        users++;
        flags = wanted;
    }
    return leave(code);
}

API Return nvmlInit_v2(void)
{
    return nvmlInitWithFlags(0);
}

Return nvmlInit(void) SAME_AS(nvmlInit_v2);

API Return nvmlShutdown(void)
{
    Return code = enter();
    if (code)
        return code;
    if (!--users)
        memset(sets, 0, sizeof sets);
    return leave(OK);
}

static Return system_text(char *buffer, unsigned length, const char *text)
{
    Return code = enter();
    return code ? code : leave(put(buffer, length, text));
}

API Return nvmlSystemGetDriverVersion(char *buffer, unsigned length)
{
    return system_text(buffer, length, DRIVER_VERSION);
}

API Return nvmlSystemGetNVMLVersion(char *buffer, unsigned length)
{
    char text[80];
    Return code = enter();
    if (code)
        return code;
    snprintf(text, sizeof text, "%d.%s", hw.cuda / 1000, DRIVER_VERSION);
    return leave(put(buffer, length, text));
}

API Return nvmlSystemGetCudaDriverVersion(int *version)
{
    Return code = enter();
    if (code)
        return code;
    if (!version)
        return leave(INVALID_ARGUMENT);
    *version = hw.cuda;
    return leave(OK);
}

Return nvmlSystemGetCudaDriverVersion_v2(int *version) SAME_AS(nvmlSystemGetCudaDriverVersion);

API Return nvmlSystemGetProcessName(unsigned pid, char *name, unsigned length)
{
    char path[64], text[1024] = "";
    Return code = enter();
    if (code)
        return code;
    if (!name)
        return leave(INVALID_ARGUMENT);
    snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
    FILE *file = fopen(path, "re");
    if (!file)
        return leave(NOT_FOUND);
    size_t got = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    if (!got)
        return leave(NOT_FOUND);
    snprintf(name, length, "%s", text); /* as much as there is room for */
    return leave(OK);
}

#define NUMBER(name, type, value)                           \
    API Return name(Handle *handle, type *number)           \
    {                                                       \
        struct card *card;                                  \
        Return code = enter_card_if(number, handle, &card); \
        if (code)                                           \
            return code;                                    \
        *number = (type)(value);                            \
        return leave(OK);                                   \
    }

#include "mig.c"

/* ----------------------------------------------------------------------------------------------------------- finding a device */

API Return nvmlDeviceGetCount_v2(unsigned *count)
{
    Return code = enter();
    if (code)
        return code;
    if (!count)
        return leave(INVALID_ARGUMENT);
    *count = (unsigned)present();
    return leave(OK);
}

Return nvmlDeviceGetCount(unsigned *count) SAME_AS(nvmlDeviceGetCount_v2);

API Return nvmlDeviceGetHandleByIndex_v2(unsigned index, Handle **handle)
{
    Return code = enter();
    if (code)
        return code;
    if (!handle || index >= (unsigned)present())
        return leave(INVALID_ARGUMENT);
    return leave(handle_for(shown[index], handle));
}

Return nvmlDeviceGetHandleByIndex(unsigned index, Handle **handle) SAME_AS(nvmlDeviceGetHandleByIndex_v2);

API Return nvmlDeviceGetHandleByUUID(const char *uuid, Handle **handle)
{
    Return code = enter();
    if (code)
        return code;
    if (!uuid || !handle)
        return leave(INVALID_ARGUMENT);
    for (int i = 0; i < present(); i++)
        if (!strcmp(shown[i]->uuid, uuid) || (!strncmp(shown[i]->uuid, "GPU-", 4) && !strcmp(shown[i]->uuid + 4, uuid)))
            return leave(handle_for(shown[i], handle));
    for (int i = 0; i < present(); i++)
        for (unsigned n = 0; mig_at(shown[i], n); n++)
            if (!strcmp(mig_at(shown[i], n)->uuid, uuid))
                return leave(mig_handle(mig_at(shown[i], n), handle));
    return leave(NOT_FOUND);
}

/* Domain and function may be left out. */
static int parse_address(const char *text, unsigned *domain, unsigned *bus, unsigned *device)
{
    unsigned function = 0;
    int used = 0;
    *domain = 0;
    if (sscanf(text, "%8x:%2x:%2x%n", domain, bus, device, &used) != 3) {
        *domain = 0;
        if (sscanf(text, "%2x:%2x%n", bus, device, &used) != 2)
            return 0;
    }
    if (text[used] == '.') {
        int more = 0;
        if (sscanf(text + used, ".%1x%n", &function, &more) != 1)
            return 0;
        used += more;
    }
    return !text[used] && function == 0;
}

API Return nvmlDeviceGetHandleByPciBusId_v2(const char *address, Handle **handle)
{
    unsigned domain, bus, device;
    Return code = enter();
    if (code)
        return code;
    if (!address || !handle || !parse_address(address, &domain, &bus, &device))
        return leave(INVALID_ARGUMENT);
    for (int i = 0; i < present(); i++)
        if (shown[i]->domain == domain && shown[i]->bus == bus && shown[i]->device == device)
            return leave(handle_for(shown[i], handle));
    return leave(NOT_FOUND);
}

Return nvmlDeviceGetHandleByPciBusId(const char *address, Handle **handle) SAME_AS(nvmlDeviceGetHandleByPciBusId_v2);

/* -------------------------------------------------------------------------------------------------------- what a device is */

/* A question that this card's kind has no answer to. */
static Return unsupported_if(_Bool valid, Handle *handle)
{
    struct card *card;
    Return code = enter_card_if(valid, handle, &card);
    return code ? code : leave(NOT_SUPPORTED);
}

static Return unsupported(Handle *handle)
{
    return unsupported_if(1, handle);
}

NUMBER(nvmlDeviceGetMinorNumber, unsigned, card->minor)
NUMBER(nvmlDeviceGetIndex, unsigned, card->position)
NUMBER(nvmlDeviceGetBrand, int, 14)       /* "NVIDIA" */
NUMBER(nvmlDeviceGetArchitecture, unsigned, 6) /* Turing, as the compute capability says */
NUMBER(nvmlDeviceGetPersistenceMode, int, access(PERSISTENCE_FILE, F_OK) == 0)
NUMBER(nvmlDeviceGetComputeMode, int, card->mode) /* 0: shared by processes */
/* As the interface says: zero where MIG isn't there or isn't on. */
NUMBER(nvmlDeviceGetMaxMigDeviceCount, unsigned, card->mig == MIG_ENABLED ? 7 : 0)
#include "compute_mode.c"
NUMBER(nvmlDeviceGetPowerManagementLimit, unsigned, 70000)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, unsigned, 70000)
NUMBER(nvmlDeviceGetPowerUsage, unsigned, 9000)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, 3)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, unsigned, 16)
NUMBER(nvmlDeviceGetSupportedEventTypes, uint64_t, EVENT_TYPES)

API Return nvmlDeviceGetCudaComputeCapability(Handle *handle, int *major, int *minor)
{
    struct card *card;
    Return code = enter_card_if(major && minor, handle, &card);
    if (code)
        return code;
    *major = 7;
    *minor = 5;
    return leave(OK);
}

static Return typed(Handle *handle, int type, int most, unsigned value, unsigned *number)
{
    struct card *card;
    Return code = enter_card_if(number && type >= 0 && type <= most, handle, &card);
    if (code)
        return code;
    *number = value;
    return leave(OK);
}

API Return nvmlDeviceGetMaxClockInfo(Handle *handle, int type, unsigned *mhz)
{
    return typed(handle, type, 3, type == 2 ? 5001 : 1590, mhz);
}

API Return nvmlDeviceGetClockInfo(Handle *handle, int type, unsigned *mhz)
{
    return type > 3 ? unsupported(handle) : typed(handle, type, 3, type == 2 ? 405 : 300, mhz);
}

API Return nvmlDeviceGetTemperature(Handle *handle, int sensor, unsigned *celsius)
{
    return typed(handle, sensor, 0, 40, celsius);
}

struct utilization {
    unsigned gpu, memory;
};

API Return nvmlDeviceGetUtilizationRates(Handle *handle, struct utilization *rates)
{
    struct card *card;
    Return code = enter_card_if(rates, handle, &card);
    if (code)
        return code;
    *rates = (struct utilization){0, 0};
    return leave(OK);
}

struct pci {
    char legacy[16];
    uint32_t domain, bus, device, id, subsystem;
    char address[32];
};

API Return nvmlDeviceGetPciInfo_v3(Handle *handle, struct pci *pci)
{
    struct card *card;
    Return code = enter_card_if(pci, handle, &card);
    if (code)
        return code;
    memset(pci, 0, sizeof *pci);
    pci->domain = card->domain;
    pci->bus = card->bus;
    pci->device = card->device;
    pci->id = 0x1EB810DE; /* device over NVIDIA's vendor id */
    pci->subsystem = 0x12A210DE;
    snprintf(pci->legacy, sizeof pci->legacy, "%04X:%02X:%02X.0", card->domain & 0xFFFF, card->bus & 0xFF, card->device & 0xFF);
    snprintf(pci->address, sizeof pci->address, "%08X:%02X:%02X.0", card->domain, card->bus, card->device);
    return leave(OK);
}

/* ------------------------------------------------------------------------------------------------------ memory and processes */

struct memory {
    uint64_t total, free, used;
};

struct memory_v2 {
    uint32_t version, padding;
    uint64_t total, reserved, free, used;
};

static uint64_t allocated_mib(const struct card *card);
#if DRIVER_MAJOR >= 615
static int own_limit(const struct card *card, uint64_t *hard, uint64_t *used);
#endif

/* What the description says that the card's processes hold. */
static uint64_t described_mib(const struct card *card)
{
    uint64_t sum = 0;
    for (int i = 0; i < hw.process_count; i++)
        if (hw.processes[i].index == card->index)
            sum += hw.processes[i].mib;
    return sum;
}

/* All that is held of a card, never more than there is to hold. */
static uint64_t held_mib(const struct card *card)
{
    uint64_t sum = described_mib(card) + allocated_mib(card), most = card->memory_mib - card->reserved_mib;
    return sum < most ? sum : most;
}

/* What the description says that the processes of an instance hold. */
static uint64_t instance_mib(const struct instance *mig)
{
    uint64_t sum = 0;
    for (int i = 0; i < hw.process_count; i++)
        if (hw.processes[i].index == mig->index && hw.processes[i].gi == mig->gi)
            sum += hw.processes[i].mib;
    return sum;
}

/* Version 1 counts the reserve as used, version 2 separates the two. */
API Return nvmlDeviceGetMemoryInfo(Handle *handle, struct memory *memory)
{
    struct card *card;
    struct instance *mig;
    Return code = enter_device(memory, handle, &card, &mig);
    if (code)
        return code;
    if (mig) {
        memory->total = profile_mib(card, profile_of(mig)) * MIB;
        memory->used = instance_mib(mig) * MIB;
        memory->free = memory->total - memory->used;
        return leave(OK);
    }
    memory->total = card->memory_mib * MIB;
    memory->used = (card->reserved_mib + held_mib(card)) * MIB;
    memory->free = memory->total - memory->used;
    return leave(OK);
}

API Return nvmlDeviceGetMemoryInfo_v2(Handle *handle, struct memory_v2 *memory)
{
    struct card *card;
    struct instance *mig;
    Return code = enter_device(memory, handle, &card, &mig);
    if (code)
        return code;
    if (memory->version != (sizeof *memory | 2u << 24))
        return leave(FUNCTION_NOT_FOUND);
    if (mig) {
        memory->total = profile_mib(card, profile_of(mig)) * MIB;
        memory->reserved = 0;
        memory->used = instance_mib(mig) * MIB;
        memory->free = memory->total - memory->used;
        return leave(OK);
    }
    memory->total = card->memory_mib * MIB;
    memory->reserved = card->reserved_mib * MIB;
    memory->used = held_mib(card) * MIB;
    memory->free = memory->total - memory->reserved - memory->used;
#if DRIVER_MAJOR >= 615
    uint64_t hard, used;
    if (own_limit(card, &hard, &used)) { /* in a limited cgroup the limit is the card */
        memory->total = hard;
        memory->reserved = 0;
        memory->used = used * MIB < hard ? used * MIB : hard;
        memory->free = hard - memory->used;
    }
#endif
    return leave(OK);
}

API Return nvmlDeviceGetBAR1MemoryInfo(Handle *handle, struct memory *memory)
{
    struct card *card;
    Return code = enter_card_if(memory, handle, &card);
    if (code)
        return code;
    *memory = (struct memory){256 * MIB, 254 * MIB, 2 * MIB};
    return leave(OK);
}

struct process_v1 {
    uint32_t pid;
    uint64_t used;
};

struct process_v2 {
    uint32_t pid;
    uint64_t used;
    uint32_t gpu_instance, compute_instance;
};

/* A list to be filled: `size` entries of version 1 or 2 from `at`, and how many it would take. */
struct filling {
    void *at;
    unsigned size, found;
    int version;
};

static void add_process(struct filling *list, unsigned pid, uint64_t mib, unsigned gi)
{
    if (list->found < list->size && list->version == 1)
        ((struct process_v1 *)list->at)[list->found] = (struct process_v1){pid, mib * MIB};
    else if (list->found < list->size)
        ((struct process_v2 *)list->at)[list->found] = (struct process_v2){pid, mib * MIB, gi, gi == NO_INSTANCE ? gi : 0};
    list->found++;
}

static void add_holders(const struct card *card, struct filling *list);

static int is_listed(enum kind of, enum kind list)
{
    return of == list || (of == MPS && list == COMPUTE);
}

/* `list` holds *count entries; too few of them is an answer too. What is held here is held for computing. */
static Return list_processes(Handle *handle, enum kind kind, unsigned *count, void *list, int version)
{
    struct card *card;
    struct instance *mig;
    Return code = enter_device(count, handle, &card, &mig);
    if (code)
        return code;
    struct filling filling = {list, list ? *count : 0, 0, version};
    for (int i = 0; i < hw.process_count; i++)
        if (hw.processes[i].index == card->index && is_listed(hw.processes[i].kind, kind) && (!mig || hw.processes[i].gi == mig->gi))
            add_process(&filling, hw.processes[i].pid, hw.processes[i].mib, hw.processes[i].gi);
    if (kind == COMPUTE && !mig)
        add_holders(card, &filling);
    if (*count && !list && filling.found)
        return leave(INVALID_ARGUMENT);
    *count = filling.found;
    return leave(filling.found > filling.size ? INSUFFICIENT_SIZE : OK);
}

#define PROCESSES(name, kind, version)                                \
    API Return name(Handle *handle, unsigned *count, void *list)       \
    {                                                                  \
        return list_processes(handle, (kind), count, list, (version)); \
    }

PROCESSES(nvmlDeviceGetComputeRunningProcesses, COMPUTE, 1)
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v2, COMPUTE, 2)
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3, COMPUTE, 2)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses, GRAPHICS, 1)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2, GRAPHICS, 2)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, GRAPHICS, 2)
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses, MPS, 1)
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v2, MPS, 2)
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3, MPS, 2)

struct process_utilization {
    uint32_t pid;
    uint64_t time;
    uint32_t sm, memory, encoder, decoder;
};

/* Nothing ever computes here, so there is no sample; libraries that limit computing ask again and again. */
API Return nvmlDeviceGetProcessUtilization(Handle *handle, struct process_utilization *samples, unsigned *count, uint64_t since)
{
    struct card *card;
    Return code = enter_card_if(count, handle, &card);
    if (code)
        return code;
    (void)since;
    if (card->mig == MIG_ENABLED)
        return leave(NOT_SUPPORTED);
    *count = samples ? 0 : 1;
    return leave(samples ? NOT_FOUND : INSUFFICIENT_SIZE);
}

#include "limits.c"
#include "holders.c"

/* ---------------------------------------------------------------------------------------------------------------------- health */

enum { UNCORRECTED = 1 }; /* kind of error; of the two counters, 0 is since the driver was loaded, 1 since the card was made */

API Return nvmlDeviceGetTotalEccErrors(Handle *handle, int error, int counter, uint64_t *errors)
{
    struct card *card;
    Return code = enter_card_if(errors && error >= 0 && error <= UNCORRECTED && counter >= 0 && counter <= 1, handle, &card);
    if (code)
        return code;
    *errors = error == UNCORRECTED ? card->ecc[counter] : 0;
    return leave(card->has_ecc ? OK : NOT_SUPPORTED);
}

API Return nvmlDeviceGetRemappedRows(Handle *handle, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed)
{
    struct card *card;
    Return code = enter_card_if(corrected && uncorrected && pending && failed, handle, &card);
    if (code)
        return code;
    *corrected = card->remapped[0];
    *uncorrected = card->remapped[1];
    *pending = card->remapped[2];
    *failed = card->remapped[3];
    return leave(card->has_remapped ? OK : NOT_SUPPORTED);
}

struct field {
    uint32_t id, scope;
    int64_t time, latency;
    uint32_t type;
    Return code;
    uint64_t value;
};

enum { FIELD_RECOVERY_ACTION = 230, TYPE_UNSIGNED = 1 };

/* The call succeeds, and each field has a code of its own; the only one here is that no card has to be recovered. */
API Return nvmlDeviceGetFieldValues(Handle *handle, int count, struct field *fields)
{
    struct card *card;
    Return code = enter_card_if(count > 0 && fields, handle, &card);
    if (code)
        return code;
    for (int i = 0; i < count; i++) {
        int known = fields[i].id == FIELD_RECOVERY_ACTION;
        fields[i].code = known ? OK : INVALID_ARGUMENT;
        fields[i].type = known ? TYPE_UNSIGNED : 0;
        fields[i].value = 0;
    }
    return leave(OK);
}

/* ------------------------------------------------------------------------------------------------ MIG, links, other cards */

API Return nvmlDeviceGetMigMode(Handle *handle, unsigned *current, unsigned *pending)
{
    struct card *card;
    Return code = enter_card_if(current && pending, handle, &card);
    if (code)
        return code;
    if (card->mig == MIG_NONE)
        return leave(NOT_SUPPORTED);
    *current = *pending = card->mig == MIG_ENABLED;
    return leave(OK);
}

#define UNSUPPORTED(name)                          \
    API Return name(Handle *handle, void *answer)  \
    {                                              \
        return unsupported_if(answer, handle);     \
    }

UNSUPPORTED(nvmlDeviceGetRetiredPagesPendingStatus)
UNSUPPORTED(nvmlDeviceGetGpuFabricInfo)
UNSUPPORTED(nvmlDeviceGetGpuFabricInfoV)
UNSUPPORTED(nvmlDeviceGetAddressingMode)
UNSUPPORTED(nvmlDeviceGetPlatformInfo)

API Return nvmlDeviceGetSerial(Handle *handle, char *buffer, unsigned length)
{
    (void)buffer, (void)length;
    return unsupported(handle);
}

API Return nvmlDeviceGetNvLinkState(Handle *handle, unsigned link, int *active)
{
    (void)link, (void)active;
    return unsupported(handle);
}

API Return nvmlDeviceGetNvLinkRemotePciInfo_v2(Handle *handle, unsigned link, struct pci *pci)
{
    (void)link, (void)pci;
    return unsupported(handle);
}

static Return pair(Handle *one, Handle *other, int *answer, int self, int else_)
{
    struct card *card;
    Return code = enter_card(one, &card);
    if (code)
        return code;
    code = card_of(other, &card);
    if (code)
        return leave(code);
    if (!answer)
        return leave(INVALID_ARGUMENT);
    *answer = one == other ? self : else_;
    return leave(OK);
}

/* Two cards meet at the host bridge. */
API Return nvmlDeviceGetTopologyCommonAncestor(Handle *one, Handle *other, int *level)
{
    return pair(one, other, level, 0, 30);
}

/* No peer access: "chipset not supported". */
API Return nvmlDeviceGetP2PStatus(Handle *one, Handle *other, int capability, int *status)
{
    (void)capability;
    return pair(one, other, status, 1, 1);
}

/* ------------------------------------------------------------------------------------------------------------------- events */

struct event {
    Handle *handle;
    uint64_t type, data;
    uint32_t gpu_instance, compute_instance; /* not in version 1 */
};

static int valid_set(const EventSet *set)
{
    return set >= sets && set < sets + MAX_SETS && ((const char *)set - (const char *)sets) % sizeof *set == 0 && set->used;
}

API Return nvmlEventSetCreate(EventSet **set)
{
    Return code = enter();
    if (code)
        return code;
    if (!set)
        return leave(INVALID_ARGUMENT);
    for (int i = 0; i < MAX_SETS; i++)
        if (!sets[i].used) {
            memset(&sets[i], 0, sizeof sets[i]);
            sets[i].used = 1;
            *set = &sets[i];
            return leave(OK);
        }
    return leave(INSUFFICIENT_RESOURCES);
}

API Return nvmlEventSetFree(EventSet *set)
{
    Return code = enter();
    if (code)
        return code;
    if (!valid_set(set))
        return leave(INVALID_ARGUMENT);
    set->used = 0;
    return leave(OK);
}

static int same_xid(const struct xid *a, const struct xid *b)
{
    return a->index == b->index && a->code == b->code;
}

static int occurrences(const struct xid *list, int count, const struct xid *wanted)
{
    int found = 0;
    for (int i = 0; i < count; i++)
        found += same_xid(&list[i], wanted);
    return found;
}

/* Lines that were taken out of the file are dropped, so that the same event can come again. */
static void drop_removed(EventSet *set)
{
    int kept = 0;
    for (int i = 0; i < set->seen_count; i++)
        if (occurrences(set->seen, kept, &set->seen[i]) < occurrences(hw.xids, hw.xid_count, &set->seen[i]))
            set->seen[kept++] = set->seen[i];
    set->seen_count = kept;
}

/* Of equal lines, as many count as seen as were reported. */
static int unseen(const EventSet *set, int line)
{
    return set->seen_count < MAX_LINES
           && occurrences(set->seen, set->seen_count, &hw.xids[line]) < occurrences(hw.xids, line + 1, &hw.xids[line]);
}

/* The first line that the set hasn't seen, or none; watched or not, it is seen now. */
static const struct xid *next_xid(EventSet *set)
{
    drop_removed(set);
    for (int i = 0; i < hw.xid_count; i++)
        if (unseen(set, i)) {
            set->seen[set->seen_count++] = hw.xids[i];
            return &hw.xids[i];
        }
    return NULL;
}

/* As with the real one, what happened before the registration isn't reported. */
API Return nvmlDeviceRegisterEvents(Handle *handle, uint64_t types, EventSet *set)
{
    struct card *card;
    Return code = enter_card(handle, &card);
    if (code)
        return code;
    if (!valid_set(set))
        return leave(INVALID_ARGUMENT);
    if (types & ~EVENT_TYPES)
        return leave(NOT_SUPPORTED);
    drop_removed(set);
    for (int i = 0; i < hw.xid_count; i++)
        if (hw.xids[i].index == card->index && unseen(set, i))
            set->seen[set->seen_count++] = hw.xids[i];
    set->watched[handle - handles] |= types;
    return leave(OK);
}

/* Polls once: OK with the event filled in, TIMEOUT for nothing new, GPU_IS_LOST if a watched card is. */
static Return poll_events(EventSet *set, struct event *event)
{
    const struct xid *xid;
    int lost = 0;
    while ((xid = next_xid(set)))
        for (int i = 0; i < handle_count; i++) {
            const struct card *card = card_numbered(&hw, xid->index);
            if (card && (set->watched[i] & EVENT_XID) && !strcmp(handles[i].uuid, card->uuid)) {
                *event = (struct event){&handles[i], EVENT_XID, xid->code, NO_INSTANCE, NO_INSTANCE};
                return OK;
            }
        }
    for (int i = 0; i < handle_count; i++) {
        struct card *card;
        lost |= set->watched[i] && card_of(&handles[i], &card) == GPU_IS_LOST;
    }
    return lost ? GPU_IS_LOST : TIMEOUT;
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

/* Waits without the lock, and polls ten times a second. */
static Return wait_event(EventSet *set, void *answer, size_t size, unsigned timeout_ms)
{
    struct event event = {0};
    double end = now() + timeout_ms / 1000.0;
    Return code = enter();
    if (code)
        return code;
    if (!valid_set(set) || !answer)
        return leave(INVALID_ARGUMENT);
    memset(answer, 0, size);
    for (int polls = 0;; polls++) {
        code = users ? (set->used ? poll_events(set, &event) : INVALID_ARGUMENT) : UNINITIALIZED;
        double left = end - now();
        /* A lost card is reported after a moment, so that a caller who only loops doesn't spin. */
        if ((code != TIMEOUT && (code != GPU_IS_LOST || polls)) || left <= 0)
            break;
        pthread_mutex_unlock(&lock);
        nap(left < POLL_MS / 1000.0 ? left : POLL_MS / 1000.0);
        pthread_mutex_lock(&lock);
        refresh();
    }
    if (code == OK)
        memcpy(answer, &event, size);
    return leave(code);
}

API Return nvmlEventSetWait(EventSet *set, void *event, unsigned timeout_ms)
{
    return wait_event(set, event, 24, timeout_ms);
}

API Return nvmlEventSetWait_v2(EventSet *set, void *event, unsigned timeout_ms)
{
    return wait_event(set, event, sizeof(struct event), timeout_ms);
}

_Static_assert(sizeof(struct memory) == 24 && sizeof(struct memory_v2) == 40 && sizeof(struct pci) == 68, "ABI of nvml.h");
_Static_assert(sizeof(struct process_v1) == 16 && sizeof(struct process_v2) == 24 && sizeof(struct event) == 32, "ABI of nvml.h");
_Static_assert(sizeof(struct field) == 40, "ABI of nvml.h");
