/* SPDX-License-Identifier: GPL-3.0-or-later
 *
 * SIMULATION. libcuda.so.1 of the kubegpu.share lab: enough for the container toolkit to find and mount it, and for a program to look at its
 * cards, to create contexts, and to allocate memory, which NVML then shows. No card computes: what would run on one is not supported.
 *
 * The cards and what is held of them are the simulated NVML's (see limits.c). A library between the two, which limits memory, sees the
 * same calls as with the real driver. There is no NVIDIA code in it; only names and codes of the public interface.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifndef CUDA_VERSION
#error "compile with -DCUDA_VERSION=<number>, 13000 for 13.0"
#endif

#define API __attribute__((visibility("default")))
#define MIB 1048576ULL

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    NOT_FOUND = 500,
    NOT_SUPPORTED = 801,
    UNKNOWN = 999
};

enum {
    MAX_CARDS = 64,
    MAX_DEPTH = 32, /* of a thread's contexts */
    CONTEXT_MIB = 64 /* what a context takes of its card; the real one depends on card and driver */
};

/* Numbers of CUdevice_attribute. */
enum { MAX_THREADS_PER_BLOCK = 1, WARP_SIZE = 10, MULTIPROCESSORS = 16, COMPUTE_MODE = 20, CAPABILITY_MAJOR = 75, CAPABILITY_MINOR = 76 };

struct context {
    int device, file, uses;
};

struct allocation {
    struct allocation *next;
    uint64_t address, bytes;
    int file;
};

static int (*nvml_init)(void), (*nvml_count)(unsigned *);
static int (*card)(unsigned, char *, char *, uint64_t *, uint64_t *), (*hold)(unsigned, uint64_t, int *);
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct allocation *allocations;
static uint64_t next_address = 0x7f0000000000;
static struct context primary[MAX_CARDS];
static unsigned device_count;
static int ready;
static __thread struct context *stack[MAX_DEPTH];
static __thread int depth;

static int find(void *function, void *library, const char *symbol)
{
    void *found = dlsym(library, symbol);
    memcpy(function, &found, sizeof found);
    return found != NULL;
}

API int cuInit(unsigned flags)
{
    if (flags)
        return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    void *library = ready ? NULL : dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (library && find(&nvml_init, library, "nvmlInit_v2") && find(&nvml_count, library, "nvmlDeviceGetCount_v2")
        && find(&card, library, "kubegpuSimCard") && find(&hold, library, "kubegpuSimHold") && !nvml_init() && !nvml_count(&device_count))
        ready = device_count && device_count <= MAX_CARDS;
    pthread_mutex_unlock(&lock);
    return ready ? SUCCESS : NO_DEVICE;
}

API int cuDriverGetVersion(int *version)
{
    if (!version)
        return INVALID_VALUE;
    *version = CUDA_VERSION;
    return SUCCESS;
}

static int check(const void *result, int device)
{
    if (!ready)
        return NOT_INITIALIZED;
    if (!result)
        return INVALID_VALUE;
    return device >= 0 && (unsigned)device < device_count ? SUCCESS : INVALID_DEVICE;
}

/* ----------------------------------------------------------------------------------------------------------------------- devices */

API int cuDeviceGetCount(int *count)
{
    int code = check(count, 0);
    if (!code)
        *count = (int)device_count;
    return code;
}

API int cuDeviceGet(int *device, int ordinal)
{
    int code = check(device, ordinal);
    if (!code)
        *device = ordinal;
    return code;
}

struct facts {
    char name[96], uuid[96];
    uint64_t total, left;
};

static int look(const void *result, int device, struct facts *facts)
{
    int code = check(result, device);
    return code ? code : card((unsigned)device, facts->name, facts->uuid, &facts->total, &facts->left) ? UNKNOWN : SUCCESS;
}

API int cuDeviceGetName(char *name, int size, int device)
{
    struct facts facts;
    int code = size > 0 ? look(name, device, &facts) : INVALID_VALUE;
    if (!code)
        snprintf(name, (size_t)size, "%s", facts.name);
    return code;
}

API int cuDeviceGetUuid_v2(unsigned char *uuid, int device)
{
    struct facts facts;
    int code = look(uuid, device, &facts), digits = 0;
    unsigned value;
    if (code)
        return code;
    memset(uuid, 0, 16);
    for (const char *at = facts.uuid + strlen("GPU-"); *at && digits < 32; at++)
        if (sscanf((char[]){*at, 0}, "%x", &value) == 1) {
            uuid[digits / 2] = (unsigned char)(uuid[digits / 2] << 4 | value);
            digits++;
        }
    return SUCCESS;
}

API int cuDeviceTotalMem_v2(size_t *bytes, int device)
{
    struct facts facts;
    int code = look(bytes, device, &facts);
    if (!code)
        *bytes = facts.total * MIB;
    return code;
}

API int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    static const struct { int attribute, value; } known[] = {
        {MAX_THREADS_PER_BLOCK, 1024}, {WARP_SIZE, 32}, {MULTIPROCESSORS, 1}, {COMPUTE_MODE, 0}, {CAPABILITY_MAJOR, 8}, {CAPABILITY_MINOR, 0}};
    int code = check(value, device);
    if (code)
        return code;
    *value = 0;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].attribute == attribute)
            *value = known[i].value;
    return SUCCESS;
}

/* ---------------------------------------------------------------------------------------------------------------------- contexts */

static int open_context(struct context *context, int device)
{
    if (hold((unsigned)device, CONTEXT_MIB, &context->file))
        return OUT_OF_MEMORY;
    context->device = device;
    return SUCCESS;
}

API int cuDevicePrimaryCtxRetain(struct context **context, int device)
{
    int code = check(context, device);
    if (code)
        return code;
    pthread_mutex_lock(&lock);
    *context = &primary[device];
    if (!(*context)->uses)
        code = open_context(*context, device);
    (*context)->uses += !code;
    pthread_mutex_unlock(&lock);
    return code;
}

API int cuDevicePrimaryCtxRelease_v2(int device)
{
    int code = check(&lock, device);
    if (code)
        return code;
    pthread_mutex_lock(&lock);
    if (!primary[device].uses)
        code = INVALID_CONTEXT;
    else if (!--primary[device].uses)
        close(primary[device].file);
    pthread_mutex_unlock(&lock);
    return code;
}

API int cuCtxPushCurrent_v2(struct context *context)
{
    if (!ready)
        return NOT_INITIALIZED;
    if (!context || depth == MAX_DEPTH)
        return context ? INVALID_VALUE : INVALID_CONTEXT;
    stack[depth++] = context;
    return SUCCESS;
}

API int cuCtxPopCurrent_v2(struct context **context)
{
    if (!ready)
        return NOT_INITIALIZED;
    if (!depth)
        return INVALID_CONTEXT;
    depth--;
    if (context)
        *context = stack[depth];
    return SUCCESS;
}

API int cuCtxCreate_v2(struct context **context, unsigned flags, int device)
{
    int code = check(context, device);
    (void)flags;
    if (code)
        return code;
    struct context *made = calloc(1, sizeof *made);
    if (!made || (code = open_context(made, device))) {
        free(made);
        return OUT_OF_MEMORY;
    }
    *context = made;
    return cuCtxPushCurrent_v2(made);
}

API int cuCtxDestroy_v2(struct context *context)
{
    if (!context)
        return INVALID_CONTEXT;
    if (depth && stack[depth - 1] == context)
        depth--;
    close(context->file);
    free(context);
    return SUCCESS;
}

API int cuCtxGetCurrent(struct context **context)
{
    if (!ready || !context)
        return ready ? INVALID_VALUE : NOT_INITIALIZED;
    *context = depth ? stack[depth - 1] : NULL;
    return SUCCESS;
}

API int cuCtxSetCurrent(struct context *context)
{
    if (!ready)
        return NOT_INITIALIZED;
    if (!context) {
        depth -= depth > 0;
        return SUCCESS;
    }
    stack[depth ? depth - 1 : depth++] = context;
    return SUCCESS;
}

static int current(const void *result, int *device)
{
    if (!ready)
        return NOT_INITIALIZED;
    if (!result || !depth)
        return result ? INVALID_CONTEXT : INVALID_VALUE;
    *device = stack[depth - 1]->device;
    return SUCCESS;
}

API int cuCtxGetDevice(int *device)
{
    return current(device, device);
}

API int cuCtxSynchronize(void)
{
    int device;
    return current(&lock, &device);
}

/* ------------------------------------------------------------------------------------------------------------------------ memory */

API int cuMemAlloc_v2(uint64_t *address, size_t bytes)
{
    int device, code = current(address, &device);
    if (code || !bytes)
        return code ? code : INVALID_VALUE;
    struct allocation *made = calloc(1, sizeof *made);
    if (!made || hold((unsigned)device, (bytes + MIB - 1) / MIB, &made->file)) {
        free(made);
        return OUT_OF_MEMORY;
    }
    pthread_mutex_lock(&lock);
    *address = made->address = next_address;
    made->bytes = bytes;
    made->next = allocations;
    next_address += (bytes + MIB - 1) / MIB * MIB;
    allocations = made;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

API int cuMemFree_v2(uint64_t address)
{
    int code = ready ? INVALID_VALUE : NOT_INITIALIZED;
    pthread_mutex_lock(&lock);
    for (struct allocation **at = &allocations, *one; (one = *at); at = &one->next)
        if (one->address == address) {
            *at = one->next;
            close(one->file);
            free(one);
            code = SUCCESS;
            break;
        }
    pthread_mutex_unlock(&lock);
    return code;
}

API int cuMemGetInfo_v2(size_t *left, size_t *total)
{
    struct facts facts;
    int device, code = current(left && total ? left : NULL, &device);
    if (code || (code = look(left, device, &facts)))
        return code;
    *left = facts.left * MIB;
    *total = facts.total * MIB;
    return SUCCESS;
}

/* What runs on a card. */
API int cuModuleLoadData(void **module, const void *image)
{
    int device, code = current(module && image ? module : NULL, &device);
    return code ? code : NOT_SUPPORTED;
}

/* ------------------------------------------------------------------------------------------------------------------------- names */

static const struct { int code; const char *name, *text; } codes[] = {
    {SUCCESS, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

static int describe(int code, const char **text, int as_name)
{
    for (size_t i = 0; text && i < sizeof codes / sizeof *codes; i++)
        if (codes[i].code == code) {
            *text = as_name ? codes[i].name : codes[i].text;
            return SUCCESS;
        }
    if (text)
        *text = NULL;
    return INVALID_VALUE;
}

API int cuGetErrorName(int code, const char **name)
{
    return describe(code, name, 1);
}

API int cuGetErrorString(int code, const char **text)
{
    return describe(code, text, 0);
}

API int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status);

API int cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags)
{
    return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}

/* By the name without a version, as programs ask for it. */
#define NAMED(symbol) {#symbol, (void (*)(void))symbol}
static const struct { const char *symbol; void (*function)(void); } functions[] = {
    NAMED(cuInit), NAMED(cuDriverGetVersion), NAMED(cuDeviceGet), NAMED(cuDeviceGetCount), NAMED(cuDeviceGetName), NAMED(cuDeviceGetAttribute),
    NAMED(cuDeviceGetUuid_v2), NAMED(cuDeviceTotalMem_v2), NAMED(cuDevicePrimaryCtxRetain), NAMED(cuDevicePrimaryCtxRelease_v2),
    NAMED(cuCtxCreate_v2), NAMED(cuCtxDestroy_v2), NAMED(cuCtxPushCurrent_v2), NAMED(cuCtxPopCurrent_v2), NAMED(cuCtxGetCurrent),
    NAMED(cuCtxSetCurrent), NAMED(cuCtxGetDevice), NAMED(cuCtxSynchronize), NAMED(cuMemAlloc_v2), NAMED(cuMemFree_v2), NAMED(cuMemGetInfo_v2),
    NAMED(cuModuleLoadData), NAMED(cuGetErrorName), NAMED(cuGetErrorString), NAMED(cuGetProcAddress), NAMED(cuGetProcAddress_v2)};

API int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status)
{
    size_t length = symbol ? strlen(symbol) : 0;
    (void)flags;
    if (!symbol || !function)
        return INVALID_VALUE;
    *function = NULL;
    /* Later entries are newer versions of a function. */
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
        if (!strncmp(functions[i].symbol, symbol, length) && (!functions[i].symbol[length] || !strcmp(functions[i].symbol + length, "_v2")))
            memcpy(function, &functions[i].function, sizeof *function);
    if (status)
        *status = *function ? 0 : version > CUDA_VERSION ? 2 : 1;
    return *function ? SUCCESS : NOT_FOUND;
}
