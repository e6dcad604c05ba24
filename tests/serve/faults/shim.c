/* Faults of the disk and the clock, for a process that loads this library before the C library (LD_PRELOAD).
 * The test writes the file HONE_FAULTS, which is mapped here, so that a fault begins and ends at once. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static struct faults {
    volatile int64_t clock_seconds; /* The clock shows so much more than the time. */
    volatile int32_t hangs, is_full;
    char path[240]; /* Files whose path contains it cannot be written. */
} none, *faults = &none;

__attribute__((constructor)) static void start(void) {
    const char *name = getenv("HONE_FAULTS");
    int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
    void *map = file < 0 ? MAP_FAILED : mmap(NULL, sizeof none, PROT_READ, MAP_SHARED, file, 0);
    if (map != MAP_FAILED) faults = map;
    if (file >= 0) close(file);
}

static int concerns(int file) {
    char link[32], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    path[length < 0 ? 0 : length] = 0;
    return strstr(path, faults->path) != NULL;
}

/* Whether a call that needs space must fail. Waits while the disk hangs. */
static int refused(int file, int needs_space) {
    if ((!faults->hangs && !faults->is_full) || !concerns(file)) return 0;
    while (faults->hangs) usleep(1000);
    if (!needs_space || !faults->is_full) return 0;
    errno = ENOSPC;
    return 1;
}

#define WRAP(type, name, needs_space, parameters, arguments)                                 \
    type name parameters {                                                                   \
        static type(*real) parameters;                                                       \
        if (!real) real = (type(*) parameters)dlsym(RTLD_NEXT, #name);                       \
        return refused(file, needs_space) ? -1 : real arguments;                             \
    }

WRAP(ssize_t, write, 1, (int file, const void *data, size_t size), (file, data, size))
WRAP(ssize_t, pwrite64, 1, (int file, const void *data, size_t size, off64_t at), (file, data, size, at))
WRAP(int, ftruncate64, 0, (int file, off64_t size), (file, size))
WRAP(int, fsync, 0, (int file), (file))
WRAP(int, fdatasync, 0, (int file), (file))

int clock_gettime(clockid_t clock, struct timespec *time) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, time);
    if (result == 0 && clock == CLOCK_REALTIME) time->tv_sec += faults->clock_seconds;
    return result;
}
