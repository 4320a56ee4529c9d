/* SPDX-License-Identifier: GPL-3.0-or-later
 *
 * SIMULATION. nvidia-smi of the kubegpu.share lab: the questions that administrators and scripts ask most, over the public calls of
 * libnvidia-ml.so.1 alone. Where NVIDIA's words and exit codes are publicly known, they are used; the table says SIMULATED.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#ifndef DRIVER_VERSION
#error "compile with -DDRIVER_VERSION=\"<version>\""
#endif

enum { OK = 0, BAD_ARGUMENT = 2, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, NOT_LOADED = 9, NO_LIBRARY = 12, NO_FUNCTION = 13, LOST = 15,
       MISMATCH = 18, INSUFFICIENT_MEMORY = 20, OTHER = 255 };
/* Of simulated-allocation where memory is refused, as option allocate_command of gpu_acceptance expects it; CUDA's own code is 2. */
enum { OUT_OF_MEMORY = 102, CUDA_OUT_OF_MEMORY = 2 };
enum { MAX_CARDS = 64, MAX_FIELDS = 64, MAX_PROCESSES = 512 };

#define MIB 1048576ULL
#define MEMORY_V2 0x2000028u

typedef struct device Device;

struct memory { uint32_t version, padding; uint64_t total, reserved, free, used; };
struct pci { char legacy[16]; uint32_t domain, bus, device, id, subsystem; char address[32]; };
struct limits { const char *name_space; uint64_t soft, hard, used; }; /* the call that sets has no `used` */
struct process { uint32_t pid; uint64_t used; uint32_t gpu_instance, compute_instance; };

static int (*init)(void), (*count_of)(unsigned *), (*by_index)(unsigned, Device **);
static int (*name_of)(Device *, char *, unsigned), (*uuid_of)(Device *, char *, unsigned), (*driver_of)(char *, unsigned);
static int (*memory_of)(Device *, struct memory *), (*pci_of)(Device *, struct pci *), (*minor_of)(Device *, unsigned *);
static int (*persistence_of)(Device *, int *), (*compute_mode_of)(Device *, int *), (*cuda_of)(int *);
static int (*mig_of)(Device *, unsigned *, unsigned *), (*capability_of)(Device *, int *, int *);
static int (*processes_of)(Device *, unsigned *, struct process *), (*process_name)(unsigned, char *, unsigned);
static const char *(*words_of)(int);
static int (*set_mode)(Device *, int), (*mig_device)(Device *, unsigned, Device **), (*allocate)(Device *, uint64_t);
/* Since branch 615; a driver before it has none of them. */
static int (*set_limits)(Device *, struct limits *), (*get_limits)(Device *, struct limits *);

struct card {
    unsigned index, minor;
    char name[96], uuid[96], mig[16], capability[16];
    struct memory memory;
    struct pci pci;
    int persistence, compute_mode, failed;
    struct process processes[MAX_PROCESSES];
    unsigned process_count;
};

static struct card cards[MAX_CARDS];
static unsigned card_count;
static char driver[80];
static int cuda;

/* ---------------------------------------------------------------------------------------------------------------- the library */

static int load(void)
{
    const struct { void *function; const char *symbol; } needed[] = {
        {&init, "nvmlInit_v2"}, {&count_of, "nvmlDeviceGetCount_v2"}, {&by_index, "nvmlDeviceGetHandleByIndex_v2"},
        {&name_of, "nvmlDeviceGetName"}, {&uuid_of, "nvmlDeviceGetUUID"}, {&driver_of, "nvmlSystemGetDriverVersion"},
        {&memory_of, "nvmlDeviceGetMemoryInfo_v2"}, {&pci_of, "nvmlDeviceGetPciInfo_v3"}, {&minor_of, "nvmlDeviceGetMinorNumber"},
        {&persistence_of, "nvmlDeviceGetPersistenceMode"}, {&compute_mode_of, "nvmlDeviceGetComputeMode"},
        {&cuda_of, "nvmlSystemGetCudaDriverVersion"}, {&mig_of, "nvmlDeviceGetMigMode"},
        {&capability_of, "nvmlDeviceGetCudaComputeCapability"}, {&processes_of, "nvmlDeviceGetComputeRunningProcesses_v3"},
        {&process_name, "nvmlSystemGetProcessName"}, {&words_of, "nvmlErrorString"}, {&allocate, "kubegpuSimAllocate"}};
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!library) {
        puts("NVIDIA-SMI couldn't find libnvidia-ml.so library in your system. Please make sure that the NVIDIA Display Driver is properly "
             "installed and present in your system.\n"
             "Please also try adding directory that contains libnvidia-ml.so to your system PATH.");
        return NO_LIBRARY;
    }
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++) {
        void *symbol = dlsym(library, needed[i].symbol);
        if (!symbol) {
            printf("Failed to initialize NVML: Function Not Found\n");
            return NO_FUNCTION;
        }
        memcpy(needed[i].function, &symbol, sizeof symbol);
    }
    const struct { void *function; const char *symbol; } optional[] = {
        {&set_mode, "nvmlDeviceSetComputeMode"}, {&mig_device, "nvmlDeviceGetMigDeviceHandleByIndex"},
        {&set_limits, "nvmlDeviceSetMemoryLimits_v1"}, {&get_limits, "nvmlDeviceGetMemoryLimits_v1"}};
    for (size_t i = 0; i < sizeof optional / sizeof *optional; i++) {
        void *symbol = dlsym(library, optional[i].symbol);
        memcpy(optional[i].function, &symbol, sizeof symbol);
    }
    return OK;
}

static int exit_code(int code)
{
    return code > 0 && code < OTHER ? code : OTHER;
}

static int start(void)
{
    int code = load();
    if (code)
        return code;
    code = init();
    if (code == NOT_LOADED) {
        puts("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA driver is "
             "installed and running.\n");
        return NOT_LOADED;
    }
    if (code) {
        printf("Failed to initialize NVML: %s\n", words_of(code));
        if (code == MISMATCH) /* the library's branch and release, without the rest */
            printf("NVML library version: %.*s\n", (int)strcspn(strchr(DRIVER_VERSION, '.') + 1, ".") + 4, DRIVER_VERSION);
        return exit_code(code);
    }
    return OK;
}

static int read_card(Device *device, struct card *card)
{
    unsigned current, pending;
    int major, minor, code;
    card->memory.version = MEMORY_V2;
    card->process_count = MAX_PROCESSES;
    if ((code = name_of(device, card->name, sizeof card->name)) || (code = uuid_of(device, card->uuid, sizeof card->uuid))
        || (code = memory_of(device, &card->memory)) || (code = pci_of(device, &card->pci)) || (code = minor_of(device, &card->minor))
        || (code = persistence_of(device, &card->persistence)) || (code = compute_mode_of(device, &card->compute_mode))
        || (code = capability_of(device, &major, &minor))
        || (code = processes_of(device, &card->process_count, card->processes)))
        return code;
    snprintf(card->capability, sizeof card->capability, "%d.%d", major, minor);
    strcpy(card->mig, mig_of(device, &current, &pending) ? "[N/A]" : current ? "Enabled" : "Disabled");
    return OK;
}

static int observe(void)
{
    int code;
    if ((code = driver_of(driver, sizeof driver)) || (code = cuda_of(&cuda)) || (code = count_of(&card_count))) {
        printf("Failed to initialize NVML: %s\n", words_of(code));
        return exit_code(code);
    }
    if (!card_count) {
        puts("No devices were found");
        return NOT_FOUND;
    }
    for (unsigned i = 0; i < card_count && i < MAX_CARDS; i++) {
        Device *device = NULL;
        cards[i].index = i;
        code = by_index(i, &device);
        if (!code)
            code = read_card(device, &cards[i]);
        if (code) {
            printf("Unable to determine the device handle for GPU%u: %s%s\n", i, words_of(code),
                   code == LOST ? ".  Reboot the system to recover this GPU" : "");
            return exit_code(code);
        }
    }
    return OK;
}

/* ---------------------------------------------------------------------------------------------------------------- the questions */

static const char *mode(int compute_mode)
{
    static const char *const names[] = {"Default", "Exclusive_Thread", "Prohibited", "Exclusive_Process"};
    return compute_mode >= 0 && compute_mode < 4 ? names[compute_mode] : "[Unknown Error]";
}

/* A field's text; 0 if there is no such field. With no card, only its heading is asked for. */
static int gpu_field(const struct card *card, const char *field, char *text, size_t size, const char **unit)
{
    static const struct card nothing;
    const struct card *c = card ? card : &nothing;
    *unit = "";
    if (!strcmp(field, "index"))
        snprintf(text, size, "%u", c->index);
    else if (!strcmp(field, "uuid") || !strcmp(field, "gpu_uuid"))
        snprintf(text, size, "%s", c->uuid);
    else if (!strcmp(field, "name") || !strcmp(field, "gpu_name"))
        snprintf(text, size, "%s", c->name);
    else if (!strcmp(field, "pci.bus_id") || !strcmp(field, "gpu_bus_id"))
        snprintf(text, size, "%s", c->pci.address);
    else if (!strcmp(field, "driver_version"))
        snprintf(text, size, "%s", driver);
    else if (!strcmp(field, "count"))
        snprintf(text, size, "%u", card_count);
    else if (!strcmp(field, "persistence_mode"))
        snprintf(text, size, "%s", c->persistence ? "Enabled" : "Disabled");
    else if (!strcmp(field, "compute_mode"))
        snprintf(text, size, "%s", mode(c->compute_mode));
    else if (!strcmp(field, "compute_cap"))
        snprintf(text, size, "%s", c->capability);
    else if (!strcmp(field, "mig.mode.current") || !strcmp(field, "mig.mode.pending"))
        snprintf(text, size, "%s", c->mig);
    /* The cards are none of a board with NVSwitches. */
    else if (!strcmp(field, "fabric.state"))
        snprintf(text, size, "[N/A]");
    else if (!strncmp(field, "memory.", 7)) {
        const char *which = field + 7;
        uint64_t bytes;
        if (!strcmp(which, "total"))
            bytes = c->memory.total;
        else if (!strcmp(which, "used"))
            bytes = c->memory.used;
        else if (!strcmp(which, "free"))
            bytes = c->memory.free;
        else if (!strcmp(which, "reserved"))
            bytes = c->memory.reserved;
        else
            return 0;
        *unit = "MiB";
        snprintf(text, size, "%llu", (unsigned long long)(bytes / MIB));
    } else
        return 0;
    return 1;
}

static int app_field(const struct card *card, const struct process *process, const char *field, char *text, size_t size, const char **unit)
{
    *unit = "";
    if (!strcmp(field, "pid"))
        snprintf(text, size, "%u", process ? process->pid : 0);
    else if (!strcmp(field, "used_memory") || !strcmp(field, "used_gpu_memory")) {
        *unit = "MiB";
        snprintf(text, size, "%llu", (unsigned long long)(process ? process->used / MIB : 0));
    } else if (!strcmp(field, "process_name") || !strcmp(field, "name")) {
        if (process && process_name(process->pid, text, (unsigned)size))
            snprintf(text, size, "[Not Found]");
    } else
        return !strcmp(field, "gpu_uuid") || !strcmp(field, "gpu_name") || !strcmp(field, "gpu_bus_id")
                   ? gpu_field(card, field, text, size, unit)
                   : 0;
    return 1;
}

struct query {
    char *fields[MAX_FIELDS];
    int field_count;
    int apps, headings, units;
};

/* A line of headings (process and card empty) or of values. */
static void csv_line(const struct query *query, const struct card *card, const struct process *process, int heading)
{
    for (int i = 0; i < query->field_count; i++) {
        char text[256] = "";
        const char *field = query->fields[i], *unit;
        if (query->apps)
            app_field(card, process, field, text, sizeof text, &unit);
        else
            gpu_field(card, field, text, sizeof text, &unit);
        printf("%s", i ? ", " : "");
        if (heading && *unit)
            printf("%s [%s]", query->apps ? "used_gpu_memory" : field, unit);
        else if (heading)
            printf("%s", field);
        else
            printf("%s%s%s", text, *unit && query->units ? " " : "", query->units ? unit : "");
    }
    putchar('\n');
}

static int wanted(const struct card *card, const char *id)
{
    char number[16];
    snprintf(number, sizeof number, "%u", card->index);
    return !id || !strcmp(id, number) || !strcmp(id, card->uuid) || !strcasecmp(id, card->pci.address) || !strcasecmp(id, card->pci.legacy);
}

static int csv(struct query *query, const char *id)
{
    for (int i = 0; i < query->field_count; i++) {
        char text[256];
        const char *unit;
        if (query->apps ? !app_field(NULL, NULL, query->fields[i], text, sizeof text, &unit)
                        : !gpu_field(NULL, query->fields[i], text, sizeof text, &unit)) {
            printf("Field \"%s\" is not a valid field to query.\n\n", query->fields[i]);
            return BAD_ARGUMENT;
        }
    }
    if (query->headings)
        csv_line(query, NULL, NULL, 1);
    for (unsigned i = 0; i < card_count; i++) {
        if (!wanted(&cards[i], id))
            continue;
        if (!query->apps)
            csv_line(query, &cards[i], NULL, 0);
        for (unsigned n = 0; query->apps && n < cards[i].process_count; n++)
            csv_line(query, &cards[i], &cards[i].processes[n], 0);
    }
    return OK;
}

/* The MIG devices of a card below it, by their profiles. */
static void list_mig(unsigned index)
{
    Device *card, *device;
    char name[128], uuid[96];
    for (unsigned i = 0; !by_index(index, &card) && !mig_device(card, i, &device); i++)
        if (!name_of(device, name, sizeof name) && !uuid_of(device, uuid, sizeof uuid))
            printf("  MIG %-15s Device %2u: (UUID: %s)\n", strstr(name, " MIG ") ? strstr(name, " MIG ") + 5 : name, i, uuid);
}

static int list(const char *id)
{
    for (unsigned i = 0; i < card_count; i++)
        if (wanted(&cards[i], id)) {
            printf("GPU %u: %s (UUID: %s)\n", cards[i].index, cards[i].name, cards[i].uuid);
            list_mig(i);
        }
    return OK;
}

static int details(const char *id)
{
    printf("\n==============NVSMI LOG (SIMULATED, kubegpu.share lab)==============\n\n");
    printf("%-42s: %s\n%-42s: %d.%d\n\n%-42s: %u\n", "Driver Version", driver, "CUDA Version", cuda / 1000, cuda % 1000 / 10, "Attached GPUs",
           card_count);
    for (unsigned i = 0; i < card_count; i++) {
        const struct card *c = &cards[i];
        if (!wanted(c, id))
            continue;
        printf("GPU %s\n", c->pci.address);
        printf("    %-38s: %s\n    %-38s: %s\n    %-38s: %s\n    %-38s: %u\n    %-38s: %s\n", "Product Name", c->name, "Persistence Mode",
               c->persistence ? "Enabled" : "Disabled", "GPU UUID", c->uuid, "Minor Number", c->minor, "Compute Mode", mode(c->compute_mode));
        printf("    FB Memory Usage\n        %-34s: %llu MiB\n        %-34s: %llu MiB\n        %-34s: %llu MiB\n        %-34s: %llu MiB\n\n",
               "Total", (unsigned long long)(c->memory.total / MIB), "Reserved", (unsigned long long)(c->memory.reserved / MIB), "Used",
               (unsigned long long)(c->memory.used / MIB), "Free", (unsigned long long)(c->memory.free / MIB));
    }
    return OK;
}

static void rule(char fill)
{
    putchar('+');
    for (int i = 0; i < 89; i++)
        putchar(fill);
    puts("+");
}

static int table(const char *id)
{
    unsigned shown = 0;
    char text[96];
    rule('-');
    printf("| %-87s |\n", "SIMULATED by the kubegpu.share lab: there is no GPU in this machine");
    snprintf(text, sizeof text, "%d.%d", cuda / 1000, cuda % 1000 / 10);
    printf("| NVIDIA-SMI %-22s Driver Version: %-15s CUDA Version: %-7s |\n", driver, driver, text);
    rule('-');
    printf("| %3s  %-34s %-4s  %-16s  %-23s |\n", "GPU", "Name", "Pers", "Bus-Id", "Memory-Usage");
    rule('=');
    for (unsigned i = 0; i < card_count; i++) {
        const struct card *c = &cards[i];
        if (!wanted(c, id))
            continue;
        snprintf(text, sizeof text, "%7lluMiB / %7lluMiB", (unsigned long long)(c->memory.used / MIB),
                 (unsigned long long)(c->memory.total / MIB));
        printf("| %3u  %-34.34s %-4s  %-16s  %-23s |\n", c->index, c->name, c->persistence ? "On" : "Off", c->pci.address, text);
    }
    rule('-');
    printf("| %-87s |\n| %3s  %10s  %-54s %15s |\n", "Processes:", "GPU", "PID", "Process name", "GPU Memory");
    rule('=');
    for (unsigned i = 0; i < card_count; i++)
        for (unsigned n = 0; wanted(&cards[i], id) && n < cards[i].process_count; n++, shown++) {
            const struct process *process = &cards[i].processes[n];
            if (process_name(process->pid, text, sizeof text))
                strcpy(text, "[Not Found]");
            printf("| %3u  %10u  %-54.54s %12lluMiB |\n", cards[i].index, process->pid, text, (unsigned long long)(process->used / MIB));
        }
    if (!shown)
        printf("| %-87s |\n", "No running processes found");
    rule('-');
    return OK;
}

/* ---------------------------------------------------------------------------------------------------------------- the command line */

static int help(void)
{
    puts("nvidia-smi SIMULATED by the kubegpu.share lab\n\n"
         "    nvidia-smi [-i ID]                            the table\n"
         "    nvidia-smi -L                                 the list of GPUs\n"
         "    nvidia-smi -q                                 details\n"
         "    nvidia-smi [-i ID] -c DEFAULT|EXCLUSIVE_PROCESS|PROHIBITED     the compute mode, as root\n"
         "    nvidia-smi --query-gpu=FIELDS --format=csv[,noheader][,nounits] [-i ID]\n"
         "        index uuid gpu_uuid name gpu_name count driver_version pci.bus_id gpu_bus_id memory.total memory.reserved\n"
         "        memory.used memory.free persistence_mode compute_mode compute_cap mig.mode.current mig.mode.pending\n"
         "        fabric.state\n"
         "    nvidia-smi --query-compute-apps=FIELDS --format=csv[,noheader][,nounits]\n"
         "        pid process_name used_memory used_gpu_memory gpu_uuid gpu_name gpu_bus_id\n"
         "    nvidia-smi memory-limits --get -n CGROUP -i ID                        since driver branch 615\n"
         "    nvidia-smi memory-limits --set -n CGROUP --soft-limit MiB|max --hard-limit MiB|max -i ID\n"
         "    nvidia-smi simulated-allocation MiB [-i ID | --cuda] [--seconds N]    of the lab: holds memory, as a program would\n\n"
         "ID is an index, a UUID or a PCI bus address.");
    return OK;
}

static int bad(const char *argument)
{
    printf("Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.\n(%s)\n", argument);
    return BAD_ARGUMENT;
}

/* The value of --name=value, or of --name value; NULL if it is another option. */
static char *option(char **argv, int *i, const char *name)
{
    size_t length = strlen(name);
    if (strncmp(argv[*i], name, length) || (argv[*i][length] && argv[*i][length] != '='))
        return NULL;
    if (argv[*i][length])
        return argv[*i] + length + 1;
    return argv[*i + 1] ? argv[++*i] : argv[*i] + length;
}

static void split(char *text, char **words, int *count)
{
    char *rest = NULL;
    for (char *word = strtok_r(text, ", ", &rest); word && *count < MAX_FIELDS; word = strtok_r(NULL, ", ", &rest))
        words[(*count)++] = word;
}

/* ------------------------------------------------------------------------------------------- memory limits and held memory */

static int mib_of(const char *text, uint64_t *bytes)
{
    char *end;
    if (!strcmp(text, "max")) {
        *bytes = UINT64_MAX;
        return 1;
    }
    unsigned long long mib = strtoull(text, &end, 10);
    *bytes = mib * MIB;
    return *text >= '0' && *text <= '9' && !*end && mib < 1ull << 40;
}

static int print_error(int code)
{
    if (!code)
        return OK;
    printf("%s\n", words_of(code));
    return exit_code(code);
}

static int device_called(const char *id, Device **device)
{
    int code;
    if ((code = start()) || (code = observe()))
        return code;
    for (unsigned i = 0; i < card_count; i++)
        if (wanted(&cards[i], id))
            return print_error(by_index(i, device));
    puts("No devices were found");
    return NOT_FOUND;
}

static int memory_limits(char **argv)
{
    struct limits limits = {0};
    char *value, *id = NULL;
    int set = 0, get = 0, code;
    Device *device;
    for (int i = 2; argv[i]; i++) {
        if (!strcmp(argv[i], "--set") || !strcmp(argv[i], "--get"))
            *(argv[i][2] == 's' ? &set : &get) = 1;
        else if ((value = option(argv, &i, "-i")) || (value = option(argv, &i, "--id")))
            id = value;
        else if ((value = option(argv, &i, "-n")) || (value = option(argv, &i, "--namespace")))
            limits.name_space = value;
        else if ((value = option(argv, &i, "--soft-limit")) ? !mib_of(value, &limits.soft)
                                                            : !(value = option(argv, &i, "--hard-limit")) || !mib_of(value, &limits.hard))
            return bad(argv[i]);
    }
    if (set == get || !limits.name_space)
        return bad("memory-limits needs --set or --get, and -n");
    if ((code = device_called(id, &device)))
        return code;
    if (!set_limits || !get_limits) {
        puts("Function Not Found");
        return NO_FUNCTION;
    }
    if (set)
        return print_error(set_limits(device, &limits));
    if ((code = print_error(get_limits(device, &limits))))
        return code;
    printf("namespace: %s\n", limits.name_space);
    const struct { const char *name; uint64_t bytes; } rows[] = {
        {"soft limit", limits.soft}, {"hard limit", limits.hard}, {"current used", limits.used}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (rows[i].bytes == UINT64_MAX)
            printf("%s: max\n", rows[i].name);
        else
            printf("%s: %llu MiB\n", rows[i].name, (unsigned long long)(rows[i].bytes / MIB));
    return OK;
}

static int change_mode(const char *id, const char *text)
{
    static const char *const names[] = {"DEFAULT", "EXCLUSIVE_THREAD", "PROHIBITED", "EXCLUSIVE_PROCESS"};
    int mode = 0;
    while (mode < 4 && strcmp(text, names[mode]) && !(text[0] == '0' + mode && !text[1]))
        mode++;
    if (mode == 4)
        return bad("the compute mode");
    for (unsigned i = 0; i < card_count; i++) {
        Device *device;
        if (!wanted(&cards[i], id))
            continue;
        int code = by_index(i, &device);
        if (!code)
            code = set_mode(device, mode);
        if (code) {
            printf("Unable to set the compute mode for GPU %s: %s\nTerminating early due to previous errors.\n", cards[i].pci.address,
                   words_of(code));
            return exit_code(code);
        }
        printf("Set compute mode to %s for GPU %s.\n", names[mode], cards[i].pci.address);
    }
    puts("All done.");
    return OK;
}

/* As a program does it: by libcuda, so that a library which limits memory is asked. Of the first card that CUDA shows. */
static int allocate_by_cuda(unsigned long long mib)
{
    int (*start)(unsigned), (*device_of)(int *, int), (*retain)(void **, int), (*use)(void *), (*take)(uint64_t *, size_t);
    int (*name)(int, const char **);
    const struct { void *function; const char *symbol; } needed[] = {
        {&start, "cuInit"}, {&device_of, "cuDeviceGet"}, {&retain, "cuDevicePrimaryCtxRetain"}, {&use, "cuCtxSetCurrent"},
        {&take, "cuMemAlloc_v2"}, {&name, "cuGetErrorName"}};
    void *library = dlopen("libcuda.so.1", RTLD_NOW), *context;
    int code, device;
    uint64_t address;
    const char *text = NULL;
    for (size_t i = 0; library && i < sizeof needed / sizeof *needed; i++) {
        void *symbol = dlsym(library, needed[i].symbol);
        if (!symbol)
            library = NULL;
        memcpy(needed[i].function, &symbol, sizeof symbol);
    }
    if (!library) {
        puts("libcuda.so.1 can't be loaded");
        return NO_LIBRARY;
    }
    if (!(code = start(0)) && !(code = device_of(&device, 0)) && !(code = retain(&context, device)) && !(code = use(context)))
        code = take(&address, mib << 20);
    if (code) {
        name(code, &text);
        printf("%s\n", text ? text : "an unknown error of CUDA");
    }
    return code == CUDA_OUT_OF_MEMORY ? OUT_OF_MEMORY : code ? OTHER : OK;
}

static int simulated_allocation(char **argv)
{
    char *value, *id = NULL, *end = NULL;
    unsigned long long mib = 0, seconds = 0;
    int code, by_cuda = 0;
    Device *device;
    for (int i = 2; argv[i]; i++) {
        if ((value = option(argv, &i, "-i")) || (value = option(argv, &i, "--id")))
            id = value;
        else if ((value = option(argv, &i, "--seconds")))
            seconds = strtoull(value, &end, 10);
        else if (!strcmp(argv[i], "--cuda"))
            by_cuda = 1;
        else
            mib = strtoull(argv[i], &end, 10);
        if (end && *end)
            return bad(argv[i]);
    }
    if (!mib)
        return bad("simulated-allocation needs a number of MiB");
    if (by_cuda) {
        if (id)
            return bad("--cuda has no card's number");
        if ((code = allocate_by_cuda(mib)))
            return code;
    } else if ((code = device_called(id, &device)) || (code = print_error(allocate(device, mib))))
        return code == INSUFFICIENT_MEMORY ? OUT_OF_MEMORY : code;
    printf("holding %llu MiB\n", mib);
    fflush(stdout);
    if (seconds)
        sleep((unsigned)seconds);
    else
        pause();
    return OK;
}

int main(int argc, char **argv)
{
    struct query query = {.headings = 1, .units = 1};
    char *value, *id = NULL, *mode_text = NULL, *formats[MAX_FIELDS];
    int format_count = 0, is_csv = 0, code;
    int (*answer)(const char *) = table;
    if (argc > 1 && !strcmp(argv[1], "memory-limits"))
        return memory_limits(argv);
    if (argc > 1 && !strcmp(argv[1], "simulated-allocation"))
        return simulated_allocation(argv);
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "-h") || !strcmp(argv[i], "--help"))
            return help();
        else if (!strcmp(argv[i], "-L") || !strcmp(argv[i], "--list-gpus"))
            answer = list;
        else if (!strcmp(argv[i], "-q") || !strcmp(argv[i], "--query"))
            answer = details;
        else if ((value = option(argv, &i, "-i")) || (value = option(argv, &i, "--id")))
            id = value;
        else if ((value = option(argv, &i, "-c")) || (value = option(argv, &i, "--compute-mode")))
            mode_text = value;
        else if ((value = option(argv, &i, "--query-gpu")))
            split(value, query.fields, &query.field_count);
        else if ((value = option(argv, &i, "--query-compute-apps"))) {
            query.apps = 1;
            split(value, query.fields, &query.field_count);
        } else if ((value = option(argv, &i, "--format")))
            split(value, formats, &format_count);
        else
            return bad(argv[i]);
    }
    for (int i = 0; i < format_count; i++) {
        if (!strcmp(formats[i], "csv"))
            is_csv = 1;
        else if (!strcmp(formats[i], "noheader"))
            query.headings = 0;
        else if (!strcmp(formats[i], "nounits"))
            query.units = 0;
        else
            return bad(formats[i]);
    }
    if (query.field_count ? !is_csv : format_count)
        return bad(query.field_count ? "a query needs --format=csv" : "--format needs a query");
    if ((code = start()) || (code = observe()))
        return code;
    if (id) {
        int found = 0;
        for (unsigned i = 0; i < card_count; i++)
            found |= wanted(&cards[i], id);
        if (!found) {
            puts("No devices were found");
            return NOT_FOUND;
        }
    }
    if (mode_text)
        return change_mode(id, mode_text);
    return query.field_count ? csv(&query, id) : answer(id);
}
