/* SPDX-License-Identifier: GPL-3.0-or-later
 *
 * SIMULATION. nvidia-cuda-mps-control of the kubegpu.share lab. `-d` starts a daemon that answers on a socket in $CUDA_MPS_PIPE_DIRECTORY;
 * without it each line of the standard input is a command to the daemon, whose answer is printed. It keeps the limits that it is given and
 * applies none: nothing computes in the lab, and no nvidia-cuda-mps-server is started by it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { MAX_LIMITS = 64, LINE = 512, MIB_PER_GIB = 1024 };

static struct { char device[96], limit[32]; } limits[MAX_LIMITS];
static int limit_count;
static double percentage = 100;
static FILE *records;

static const char *folder(const char *variable, const char *otherwise)
{
    const char *value = getenv(variable);
    return value && *value ? value : otherwise;
}

static struct sockaddr_un address(void)
{
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    if (snprintf(at.sun_path, sizeof at.sun_path, "%s/control", folder("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")) >= (int)sizeof at.sun_path) {
        fprintf(stderr, "CUDA_MPS_PIPE_DIRECTORY is too long\n");
        exit(1);
    }
    return at;
}

static void record(const char *format, ...)
{
    va_list values;
    char at[32];
    time_t now = time(NULL);
    strftime(at, sizeof at, "%F %T", gmtime(&now));
    fprintf(records, "[%s.000 Control %d] ", at, (int)getpid());
    va_start(values, format);
    vfprintf(records, format, values);
    va_end(values);
    fputc('\n', records);
}

/* ------------------------------------------------------------------------------------------------------------- the daemon */

/* The daemon names a limit in whole GiB, whatever it was told; text that is no amount ends the device's limit. */
static void write_limit(char *at, size_t size, const char *text)
{
    char *end = NULL;
    unsigned long long amount = strtoull(text, &end, 10);
    int is_mib = !strcmp(end, "M"), is_gib = !strcmp(end, "G");
    if (!amount || (!is_mib && !is_gib))
        *at = 0;
    else if (is_mib && amount < MIB_PER_GIB)
        snprintf(at, size, "%lluM", amount);
    else
        snprintf(at, size, "%lluG", is_mib ? amount / MIB_PER_GIB : amount);
}

static void set_limit(const char *device, const char *limit)
{
    for (int i = 0; i < limit_count; i++)
        if (!strcmp(limits[i].device, device)) {
            write_limit(limits[i].limit, sizeof limits[i].limit, limit);
            return;
        }
    if (limit_count < MAX_LIMITS) {
        snprintf(limits[limit_count].device, sizeof limits[0].device, "%s", device);
        write_limit(limits[limit_count++].limit, sizeof limits[0].limit, limit);
    }
}

/* Answers one command; 0 for the last one. */
static int obey(char *line, FILE *answer)
{
    char *words[4] = {0}, *rest = NULL;
    int count = 0;
    for (char *word = strtok_r(line, " \t\r\n", &rest); word && count < 4; word = strtok_r(NULL, " \t\r\n", &rest))
        words[count++] = word;
    if (!count)
        words[0] = "";
    if (!strcmp(words[0], "quit"))
        return 0;
    if (!strcmp(words[0], "set_default_device_pinned_mem_limit") && count == 3) {
        set_limit(words[1], words[2]);
        record("set_default_device_pinned_mem_limit %s %s.", words[1], words[2]);
    } else if (!strcmp(words[0], "get_default_device_pinned_mem_limit") && count == 2) {
        for (int i = 0; i < limit_count; i++)
            if (!strcmp(limits[i].device, words[1]) && *limits[i].limit)
                fprintf(answer, "%s\n", limits[i].limit);
    } else if (!strcmp(words[0], "set_default_active_thread_percentage") && count == 2) {
        double wanted = strtod(words[1], NULL);
        if (wanted > 0 && wanted <= 100)
            percentage = wanted;
        else
            record("Invalid percentage, expected between (0.0, 100.0]");
        record("%.1f", percentage);
        fprintf(answer, "%.1f\n", percentage);
    } else if (!strcmp(words[0], "get_default_active_thread_percentage"))
        fprintf(answer, "%.1f\n", percentage);
    else if (!strcmp(words[0], "get_server_list"))
        ; /* no program is a client, so there is none */
    else if (!strcmp(words[0], "get_server_status") && count == 2)
        fprintf(answer, "Server %s not found\n", words[1]);
    else
        fprintf(answer, "Unknown command \"%s\"\n", words[0]);
    return 1;
}

static int serve(int listening)
{
    for (;;) {
        int fd = accept4(listening, NULL, NULL, SOCK_CLOEXEC), go_on = 1;
        char line[LINE];
        if (fd < 0)
            continue;
        int other = fcntl(fd, F_DUPFD_CLOEXEC, 0);
        FILE *commands = fdopen(fd, "r"), *answers = other < 0 ? NULL : fdopen(other, "w");
        while (commands && answers && go_on && fgets(line, sizeof line, commands))
            go_on = obey(line, answers);
        if (answers)
            fclose(answers);
        if (commands)
            fclose(commands);
        if (!go_on) {
            record("Exit");
            unlink(address().sun_path);
            return 0;
        }
    }
}

static int start(void)
{
    struct sockaddr_un at = address();
    char path[4096];
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return 1;
    if (!connect(fd, (struct sockaddr *)&at, sizeof at)) {
        fprintf(stderr, "An instance of this daemon is already running\n");
        return 1;
    }
    close(fd);
    unlink(at.sun_path); /* of a daemon that was killed */
    fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    snprintf(path, sizeof path, "%s/control.log", folder("CUDA_MPS_LOG_DIRECTORY", "/var/log/nvidia-mps"));
    records = fopen(path, "ae");
    if (fd < 0 || !records || bind(fd, (struct sockaddr *)&at, sizeof at) || listen(fd, 16)) {
        fprintf(stderr, "Cannot start the MPS control daemon: %s\n", strerror(errno));
        return 1;
    }
    chmod(at.sun_path, 0666);
    setvbuf(records, NULL, _IOLBF, 0);
    if (daemon(0, 0))
        return 1;
    record("Start (SIMULATED, kubegpu.share lab)");
    return serve(fd);
}

/* ------------------------------------------------------------------------------------------------------------ its client */

static int command(void)
{
    struct sockaddr_un at = address();
    char text[LINE];
    size_t got;
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&at, sizeof at)) {
        printf("Cannot find MPS control daemon process\n");
        return 1;
    }
    while ((got = fread(text, 1, sizeof text, stdin)) > 0)
        if (write(fd, text, got) != (ssize_t)got)
            return 1;
    shutdown(fd, SHUT_WR);
    ssize_t read_now;
    while ((read_now = read(fd, text, sizeof text)) > 0)
        fwrite(text, 1, (size_t)read_now, stdout);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc == 1)
        return command();
    if (argc == 2 && !strcmp(argv[1], "-d"))
        return start();
    fprintf(stderr, "usage: nvidia-cuda-mps-control [-d]\n");
    return 1;
}
