/* SPDX-License-Identifier: GPL-3.0-or-later
 *
 * Hold memory of the first card that this process sees, by CUDA's driver interface alone: gcc builds it, and only libcuda.so.1 is loaded.
 *
 * usage: hold MIB    print the cards, allocate, compute on the card, and hold the memory until the process is killed
 *        hold cards  print the cards
 *        hold fault  let the card write to an address that isn't there: the driver reports XID 31, an error of the application
 *
 * Exit status: 2 for its arguments, 3 where there is no libcuda, 4 where CUDA refuses (the line names call and code).
 */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BLOCKS = 4096, THREADS = 256, LOOKED_AT = 1000 };

/* Each thread writes its number's square; PTX, which the driver compiles for the card. */
static const char PROGRAM[] = ".version 6.3\n"
                              ".target sm_75\n"
                              ".address_size 64\n"
                              ".visible .entry square(.param .u64 at) {\n"
                              ".reg .b32 %r<6>;\n"
                              ".reg .b64 %rd<4>;\n"
                              "ld.param.u64 %rd1, [at];\n"
                              "mov.u32 %r1, %ctaid.x;\n"
                              "mov.u32 %r2, %ntid.x;\n"
                              "mov.u32 %r3, %tid.x;\n"
                              "mad.lo.s32 %r4, %r1, %r2, %r3;\n"
                              "mul.wide.s32 %rd2, %r4, 4;\n"
                              "add.s64 %rd3, %rd1, %rd2;\n"
                              "mul.lo.s32 %r5, %r4, %r4;\n"
                              "st.global.u32 [%rd3], %r5;\n"
                              "ret;\n"
                              "}\n";

static void *library;

/* Call a function of the library; anything but success ends the program. */
#define CUDA(name, types, ...)                                     \
    do {                                                           \
        int(*call) types = (int(*) types)dlsym(library, name);     \
        int code = call ? call(__VA_ARGS__) : -1;                  \
        if (code) {                                                \
            printf("%s answers %d\n", name, code);                 \
            exit(4);                                               \
        }                                                          \
    } while (0)

static void print_cards(int count)
{
    for (int index = 0; index < count; index++) {
        unsigned char uuid[16];
        CUDA("cuDeviceGetUuid_v2", (void *, int), uuid, index);
        printf("card GPU-");
        for (int i = 0; i < 16; i++)
            printf("%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", uuid[i]);
        printf("\n");
    }
}

static void compute(uint64_t memory)
{
    void *module, *function, *arguments[] = {&memory};
    uint32_t found = 0;
    CUDA("cuModuleLoadData", (void **, const void *), &module, PROGRAM);
    CUDA("cuModuleGetFunction", (void **, void *, const char *), &function, module, "square");
    CUDA("cuLaunchKernel",
         (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **), function, BLOCKS, 1,
         1, THREADS, 1, 1, 0, NULL, arguments, NULL);
    CUDA("cuCtxSynchronize", (void), );
    CUDA("cuMemcpyDtoH_v2", (void *, uint64_t, size_t), &found, memory + 4 * LOOKED_AT, sizeof found);
    printf("%s\n", found == LOOKED_AT * LOOKED_AT ? "computed" : "computed wrongly");
}

int main(int count, char **words)
{
    int cards = 0;
    size_t free_bytes, total;
    void *context;
    uint64_t memory;
    unsigned long mib = count == 2 ? strtoul(words[1], NULL, 10) : 0;
    if (count != 2 || (!mib && strcmp(words[1], "cards") && strcmp(words[1], "fault"))) {
        fprintf(stderr, "usage: hold MIB | cards | fault\n");
        return 2;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        printf("no libcuda\n");
        return 3;
    }
    CUDA("cuInit", (unsigned), 0);
    CUDA("cuDeviceGetCount", (int *), &cards);
    print_cards(cards);
    if (!strcmp(words[1], "cards"))
        return 0;
    CUDA("cuCtxCreate_v2", (void **, unsigned, int), &context, 0, 0);
    if (!strcmp(words[1], "fault")) {
        compute(64);
        return 0;
    }
    CUDA("cuMemAlloc_v2", (uint64_t *, size_t), &memory, (size_t)mib << 20);
    compute(memory);
    CUDA("cuMemGetInfo_v2", (size_t *, size_t *), &free_bytes, &total);
    printf("holding %lu MiB of %zu MiB, %zu MiB free\n", mib, total >> 20, free_bytes >> 20);
    for (;;)
        pause();
}
