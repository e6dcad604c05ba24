/* Faults of the disk and the clock, for a process that loads this library before the C library (LD_PRELOAD).
 * The test writes the file HONE_FAULTS, which is mapped here, so that a fault begins and ends at once. The file
 * HONE_FAULTS.log has a line for each sync and each rename. */
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

static int log_file = -1;

__attribute__((constructor)) static void start(void) {
    const char *name = getenv("HONE_FAULTS");
    int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
    void *map = file < 0 ? MAP_FAILED : mmap(NULL, sizeof none, PROT_READ, MAP_SHARED, file, 0);
    if (map != MAP_FAILED) faults = map;
    if (file >= 0) close(file);
    char log[4096];
    snprintf(log, sizeof log, "%s.log", name ? name : "");
    log_file = open(log, O_WRONLY | O_APPEND | O_CLOEXEC);
}

static void path_of(int file, char path[4096]) {
    char link[32];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, 4095);
    path[length < 0 ? 0 : length] = 0;
}

static int concerns(int file) {
    char path[4096];
    path_of(file, path);
    return strstr(path, faults->path) != NULL;
}

static int logged(int result, const char *format, const char *from, const char *to) {
    if (result == 0 && log_file >= 0) dprintf(log_file, format, from, to);
    return result;
}

static int logged_sync(int result, int file) {
    char path[4096];
    path_of(file, path);
    return logged(result, "sync %s%s\n", path, "");
}

/* Whether a call that needs space must fail. Waits while the disk hangs. */
static int refused(int file, int needs_space) {
    if ((!faults->hangs && !faults->is_full) || !concerns(file)) return 0;
    while (faults->hangs) usleep(1000);
    if (!needs_space || !faults->is_full) return 0;
    errno = ENOSPC;
    return 1;
}

#define REAL(type, name, parameters)        \
    static type(*real) parameters;          \
    if (!real) real = (type(*) parameters)dlsym(RTLD_NEXT, #name)

ssize_t write(int file, const void *data, size_t size) {
    REAL(ssize_t, write, (int, const void *, size_t));
    return refused(file, 1) ? -1 : real(file, data, size);
}

ssize_t pwrite64(int file, const void *data, size_t size, off64_t at) {
    REAL(ssize_t, pwrite64, (int, const void *, size_t, off64_t));
    return refused(file, 1) ? -1 : real(file, data, size, at);
}

int ftruncate64(int file, off64_t size) {
    REAL(int, ftruncate64, (int, off64_t));
    return refused(file, 0) ? -1 : real(file, size);
}

int fsync(int file) {
    REAL(int, fsync, (int));
    return refused(file, 0) ? -1 : logged_sync(real(file), file);
}

int fdatasync(int file) {
    REAL(int, fdatasync, (int));
    return refused(file, 0) ? -1 : logged_sync(real(file), file);
}

int rename(const char *from, const char *to) {
    REAL(int, rename, (const char *, const char *));
    return logged(real(from, to), "rename %s\t%s\n", from, to);
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    REAL(int, clock_gettime, (clockid_t, struct timespec *));
    int result = real(clock, time);
    if (result == 0 && clock == CLOCK_REALTIME) time->tv_sec += faults->clock_seconds;
    return result;
}
