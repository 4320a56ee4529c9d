/* SPDX-License-Identifier: GPL-3.0-or-later
 *
 * SIMULATION. Part of nvml.c: cards that are divided by MIG. Profiles, their numbers and their memory are those of an A100, scaled to the
 * card's memory; every card with mig=enabled in the description can have them. Nobody can make or remove an instance by a call: the
 * description has them.
 */

/* ------------------------------------------------------------------------------------------------------------ profiles */

#define MEMORY_SLICES 8

/* By the interface's number of the profile: its number on the card, its slices of computing and of memory, how many fit. */
static const struct profile {
    unsigned number, id, slices, memory_slices, most;
    const char *engines;
} profiles[] = {
    {0, 19, 1, 1, 7, ""}, {1, 14, 2, 2, 3, ""}, {2, 9, 3, 4, 2, ""}, {3, 5, 4, 4, 1, ""},
    {4, 0, 7, 8, 1, ""},  {7, 20, 1, 1, 1, "+me"}, {9, 15, 1, 2, 4, ""},
};
enum { PROFILES = sizeof profiles / sizeof *profiles, MULTIPROCESSORS = 14, PROFILE_COUNT = 18, COMPUTE_PROFILES = 8 };

static uint64_t profile_mib(const struct card *card, const struct profile *profile)
{
    /* Less than so many eighths: each instance has a reserve of its own. */
    uint64_t whole = card->memory_mib * profile->memory_slices / MEMORY_SLICES;
    return whole - whole / 64;
}

/* As the field names them: the memory in GB is that of eighths of the card. */
static void profile_name(const struct card *card, const struct profile *profile, char *text, size_t size)
{
    uint64_t gb = (card->memory_mib + 1023) / 1024;
    unsigned part = (unsigned)((gb * profile->memory_slices * 2 + MEMORY_SLICES) / (MEMORY_SLICES * 2));
    snprintf(text, size, "%ug.%ugb%s", profile->slices, part, profile->engines);
}

static const struct profile *profile_of(const struct instance *mig)
{
    return &profiles[mig->profile];
}

/* Number of the compute profile that is as large as its GPU instance: 1, 2, 3, 4 and 7 slices. */
static unsigned compute_profile(unsigned slices)
{
    return slices == 7 ? 4 : slices - 1;
}

/* ------------------------------------------------------------------------------------------------------------- the file */

static const char *parse_mig(struct hardware *h, char **words, int count)
{
    uint64_t index, gi;
    struct instance *mig = &h->migs[h->mig_count];
    if (h->mig_count == MAX_MIGS)
        return "too many MIG devices";
    memset(mig, 0, sizeof *mig);
    if (count != 5 || !whole(words[1], MAX_CARDS - 1, &index) || !whole(words[2], 14, &gi) || !gi || strncmp(words[4], "uuid=MIG-", 9)
        || strlen(words[4]) >= UUID_SIZE)
        return "mig needs index, instance (1 to 14), profile and uuid=MIG-...";
    mig->index = (int)index;
    mig->gi = (unsigned)gi;
    snprintf(mig->text, sizeof mig->text, "%s", words[3]);
    strcpy(mig->uuid, words[4] + 5);
    for (int i = 0; i < h->mig_count; i++)
        if ((h->migs[i].index == mig->index && h->migs[i].gi == mig->gi) || !strcmp(h->migs[i].uuid, mig->uuid))
            return "two MIG devices share an instance or a UUID";
    h->mig_count++;
    return NULL;
}

/* What only the whole description shows: the cards of the instances. */
static const char *check_migs(struct hardware *h)
{
    char name[24];
    for (int i = 0; i < h->mig_count; i++) {
        struct instance *mig = &h->migs[i];
        struct card *card = card_numbered(h, mig->index);
        unsigned slices = 0, memory = 0;
        if (!card || card->mig != MIG_ENABLED)
            return "a MIG device needs a card with mig=enabled";
        for (mig->profile = 0; mig->profile < PROFILES; mig->profile++) {
            profile_name(card, profile_of(mig), name, sizeof name);
            if (!strcmp(name, mig->text))
                break;
        }
        if (mig->profile == PROFILES)
            return "a card of this size has no such profile";
        for (int n = 0; n <= i; n++)
            if (h->migs[n].index == mig->index) {
                slices += profile_of(&h->migs[n])->slices;
                memory += profile_of(&h->migs[n])->memory_slices;
            }
        if (slices > 7 || memory > MEMORY_SLICES)
            return "a card's MIG devices need more than it has";
    }
    return NULL;
}

/* ------------------------------------------------------------------------------------------------------------- devices */

static struct instance *mig_called(const char *uuid)
{
    for (int i = 0; i < hw.mig_count; i++)
        if (!strcmp(hw.migs[i].uuid, uuid))
            return &hw.migs[i];
    return NULL;
}

/* The instance of a handle and its card; no instance for a handle of a card. */
static Return device_of(const Handle *handle, struct card **card, struct instance **mig)
{
    *mig = valid(handle) ? mig_called(handle->uuid) : NULL;
    if (!*mig)
        return card_of(handle, card);
    for (int i = 0; i < present(); i++)
        if (shown[i]->index == (*mig)->index) {
            *card = shown[i];
            return shown[i]->fault;
        }
    return GPU_IS_LOST;
}

static Return enter_device(_Bool valid, const Handle *handle, struct card **card, struct instance **mig)
{
    Return code = enter();
    if (code)
        return code;
    while (!(code = device_of(handle, card, mig)) && (*card)->hangs)
        wait_a_moment();
    if (!code && !valid)
        code = INVALID_ARGUMENT;
    return code ? leave(code) : OK;
}

/* The same for what is asked of MIG devices alone. */
static Return enter_mig(_Bool valid, const Handle *handle, struct card **card, struct instance **mig)
{
    Return code = enter_device(valid, handle, card, mig);
    return code || *mig ? code : leave(INVALID_ARGUMENT);
}

static Return mig_handle(const struct instance *mig, Handle **handle)
{
    struct card named = {0};
    strcpy(named.uuid, mig->uuid);
    return handle_for(&named, handle);
}

/* By an instance's index among those of its card, which has no gaps. */
static struct instance *mig_at(const struct card *card, unsigned index)
{
    for (int i = 0; i < hw.mig_count; i++)
        if (hw.migs[i].index == card->index && !index--)
            return &hw.migs[i];
    return NULL;
}

API Return nvmlDeviceGetMigDeviceHandleByIndex(Handle *handle, unsigned index, Handle **instance)
{
    struct card *card;
    Return code = enter_card(handle, &card);
    if (code)
        return code;
    if (!instance)
        return leave(INVALID_ARGUMENT);
    if (card->mig == MIG_NONE)
        return leave(NOT_SUPPORTED);
    struct instance *mig = mig_at(card, index);
    return leave(mig ? mig_handle(mig, instance) : NOT_FOUND);
}

API Return nvmlDeviceIsMigDeviceHandle(Handle *handle, unsigned *is_mig)
{
    struct card *card;
    struct instance *mig;
    Return code = enter_device(is_mig, handle, &card, &mig);
    if (code)
        return code;
    *is_mig = mig != NULL;
    return leave(OK);
}

API Return nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Handle *handle, Handle **parent)
{
    struct card *card;
    struct instance *mig;
    Return code = enter_mig(parent, handle, &card, &mig);
    return code ? code : leave(handle_for(card, parent));
}

API Return nvmlDeviceGetUUID(Handle *handle, char *buffer, unsigned length)
{
    struct card *card;
    struct instance *mig;
    Return code = enter_device(1, handle, &card, &mig);
    return code ? code : leave(put(buffer, length, mig ? mig->uuid : card->uuid));
}

API Return nvmlDeviceGetName(Handle *handle, char *buffer, unsigned length)
{
    struct card *card;
    struct instance *mig;
    char text[NAME_SIZE + 32];
    Return code = enter_device(1, handle, &card, &mig);
    if (code)
        return code;
    snprintf(text, sizeof text, "%s%s%s", card->name, mig ? " MIG " : "", mig ? mig->text : "");
    return leave(put(buffer, length, text));
}

API Return nvmlDeviceGetGpuInstanceId(Handle *handle, unsigned *id)
{
    struct card *card;
    struct instance *mig;
    Return code = enter_mig(id, handle, &card, &mig);
    if (code)
        return code;
    *id = mig->gi;
    return leave(OK);
}

API Return nvmlDeviceGetComputeInstanceId(Handle *handle, unsigned *id)
{
    struct card *card;
    struct instance *mig;
    Return code = enter_mig(id, handle, &card, &mig);
    if (code)
        return code;
    *id = 0; /* the whole GPU instance */
    return leave(OK);
}

struct attributes {
    unsigned multiprocessors, copy, decoder, encoder, jpeg, ofa, gpu_slices, compute_slices;
    unsigned long long memory_mib;
};

API Return nvmlDeviceGetAttributes_v2(Handle *handle, struct attributes *answer)
{
    struct card *card;
    struct instance *mig;
    Return code = enter_device(answer, handle, &card, &mig);
    if (code)
        return code;
    if (!mig)
        return leave(NOT_SUPPORTED);
    unsigned slices = profile_of(mig)->slices;
    *answer = (struct attributes){.multiprocessors = slices * MULTIPROCESSORS, .copy = slices, .gpu_slices = slices,
                                  .compute_slices = slices, .memory_mib = profile_mib(card, profile_of(mig))};
    return leave(OK);
}

Return nvmlDeviceGetAttributes(Handle *handle, struct attributes *answer) SAME_AS(nvmlDeviceGetAttributes_v2);

/* ----------------------------------------------------------------------------------------------------------- instances */

struct gpu_profile {
    unsigned id, p2p, slices, most, multiprocessors, copy, decoder, encoder, jpeg, ofa;
    unsigned long long memory_mib;
};

API Return nvmlDeviceGetGpuInstanceProfileInfo(Handle *handle, unsigned number, struct gpu_profile *answer)
{
    struct card *card;
    Return code = enter_card_if(answer && number < PROFILE_COUNT, handle, &card);
    if (code)
        return code;
    for (int i = 0; card->mig != MIG_NONE && i < PROFILES; i++)
        if (profiles[i].number == number) {
            unsigned slices = profiles[i].slices;
            *answer = (struct gpu_profile){.id = profiles[i].id, .slices = slices, .most = profiles[i].most,
                                           .multiprocessors = slices * MULTIPROCESSORS, .copy = slices,
                                           .memory_mib = profile_mib(card, &profiles[i])};
            return leave(OK);
        }
    return leave(NOT_SUPPORTED);
}

/* A handle of a GPU instance, and of the compute instance that fills it, is that of its MIG device. */
API Return nvmlDeviceGetGpuInstanceById(Handle *handle, unsigned id, Handle **instance)
{
    struct card *card;
    Return code = enter_card_if(instance, handle, &card);
    if (code)
        return code;
    if (card->mig != MIG_ENABLED)
        return leave(NOT_SUPPORTED);
    for (int i = 0; i < hw.mig_count; i++)
        if (hw.migs[i].index == card->index && hw.migs[i].gi == id)
            return leave(mig_handle(&hw.migs[i], instance));
    return leave(NOT_FOUND);
}

API Return nvmlGpuInstanceGetComputeInstanceById(Handle *handle, unsigned id, Handle **instance)
{
    struct card *card;
    struct instance *mig;
    Return code = enter_mig(instance, handle, &card, &mig);
    return code ? code : leave(id ? NOT_FOUND : mig_handle(mig, instance));
}

struct gpu_instance {
    Handle *device;
    unsigned id, profile, start, size;
};

API Return nvmlGpuInstanceGetInfo(Handle *handle, struct gpu_instance *answer)
{
    struct card *card;
    struct instance *mig;
    Return code = enter_mig(answer, handle, &card, &mig);
    if (code)
        return code;
    *answer = (struct gpu_instance){.id = mig->gi, .profile = profile_of(mig)->id, .size = profile_of(mig)->memory_slices};
    for (const struct instance *one = hw.migs; one < mig; one++)
        if (one->index == mig->index)
            answer->start += profile_of(one)->memory_slices;
    return leave(handle_for(card, &answer->device));
}

struct compute_profile {
    unsigned id, slices, most, multiprocessors, copy, decoder, encoder, jpeg, ofa;
};

API Return nvmlGpuInstanceGetComputeInstanceProfileInfo(Handle *handle, unsigned number, unsigned engine, struct compute_profile *answer)
{
    static const unsigned slices_of[] = {1, 2, 3, 4, 7};
    struct card *card;
    struct instance *mig;
    Return code = enter_mig(answer && number < COMPUTE_PROFILES && !engine, handle, &card, &mig);
    if (code)
        return code;
    unsigned slices = number < sizeof slices_of / sizeof *slices_of ? slices_of[number] : 0, all = profile_of(mig)->slices;
    if (!slices || slices > all)
        return leave(NOT_SUPPORTED);
    *answer = (struct compute_profile){.id = number, .slices = slices, .most = all / slices, .multiprocessors = slices * MULTIPROCESSORS,
                                       .copy = all};
    return leave(OK);
}

struct compute_instance {
    Handle *device, *gpu_instance;
    unsigned id, profile, start, size;
};

API Return nvmlComputeInstanceGetInfo_v2(Handle *handle, struct compute_instance *answer)
{
    struct card *card;
    struct instance *mig;
    Return code = enter_mig(answer, handle, &card, &mig);
    if (code)
        return code;
    unsigned slices = profile_of(mig)->slices;
    *answer = (struct compute_instance){.gpu_instance = handle, .profile = compute_profile(slices), .size = slices};
    return leave(handle_for(card, &answer->device));
}

Return nvmlComputeInstanceGetInfo(Handle *handle, struct compute_instance *answer) SAME_AS(nvmlComputeInstanceGetInfo_v2);

_Static_assert(sizeof(struct attributes) == 40 && sizeof(struct gpu_profile) == 48 && sizeof(struct gpu_instance) == 24, "ABI of nvml.h");
_Static_assert(sizeof(struct compute_profile) == 36 && sizeof(struct compute_instance) == 32, "ABI of nvml.h");
