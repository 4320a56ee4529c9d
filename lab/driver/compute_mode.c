/* SPDX-License-Identifier: GPL-3.0-or-later
 *
 * SIMULATION. Part of nvml.c: root sets a card's compute mode, which is the last word of its line in the description. In a container
 * that is a read-only mount of the node's file; a real driver is asked through a device node, which a namespace of mounts doesn't matter
 * to. So here a process that sees the node's processes, as NVIDIA's MPS daemon does, writes the file by the root of the first of them.
 */

static int description_to_write(void)
{
    const char *own = cards_path();
    int fd = open(own, O_RDWR | O_CLOEXEC);
    return fd < 0 && !strcmp(own, FIRMWARE) ? open("/proc/1/root" HARDWARE, O_RDWR | O_CLOEXEC) : fd;
}

/* Where in the text the card's line has its mode, or ends; NULL for no such line. */
static char *mode_of_line(char *text, int index, int *has)
{
    for (char *line = text; line && *line; line = strchr(line, '\n'), line += line != NULL) {
        int number, used = 0;
        if (sscanf(line, "card %d%n", &number, &used) != 1 || number != index)
            continue;
        char *end = line + strcspn(line, "#\n"), *mode = memmem(line, (size_t)(end - line), " mode=", 6);
        *has = mode != NULL;
        while (!mode && end > line && isspace((unsigned char)end[-1]))
            end--;
        return mode ? mode + 6 : end;
    }
    return NULL;
}

/* In place and by one write, as for every change of the description. */
static Return write_mode(int fd, const struct card *card, int mode)
{
    static char text[1 << 18], word[16];
    ssize_t length = pread(fd, text, sizeof text - sizeof word, 0);
    int has = 0;
    char *at = length > 0 && length < (ssize_t)(sizeof text - sizeof word) ? (text[length] = 0, mode_of_line(text, card->index, &has)) : NULL;
    if (!at)
        return UNKNOWN;
    if (has) {
        *at = (char)('0' + mode);
    } else {
        int more = snprintf(word, sizeof word, " mode=%d", mode);
        memmove(at + more, at, (size_t)(text + length - at));
        memcpy(at, word, (size_t)more);
        length += more;
    }
    return pwrite(fd, text, (size_t)length, 0) == length ? OK : UNKNOWN;
}

API Return nvmlDeviceSetComputeMode(Handle *handle, int mode)
{
    struct card *card;
    /* One of them, exclusive by thread, has been gone since CUDA 8. */
    Return code = enter_card_if(mode >= 0 && mode <= 3, handle, &card);
    if (code)
        return code;
    if (mode == 1)
        return leave(NOT_SUPPORTED);
    if (geteuid())
        return leave(NO_PERMISSION);
    int fd = description_to_write();
    if (fd < 0)
        return leave(NO_PERMISSION);
    code = write_mode(fd, card, mode);
    close(fd);
    return leave(code);
}
