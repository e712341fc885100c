/* A disk and a clock that fail on request: preloaded into a process, it stands before the calls of the C library.
 *
 * FAULT="KIND:N:ACTION:ERRNO:FOLDER" is about the N-th call of a kind on a path below FOLDER, counted from 1 in each
 * process since fault_arm(). KIND: a name below, or "any". ACTION: kill (SIGKILL before the call), once (the call fails
 * with ERRNO), full (it and all later ones do), torn (a write ends in its middle and kills), short (it is made for half
 * of the bytes), flip (a read has one other bit), slow (every call takes 2 ms), back (from then on, the clock is an
 * hour late), list (every call is appended to the file in FAULT_LIST).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static char kind[16], action[16], folder[2048];
static long at, code;
static int armed, list;
static atomic_long calls;

#define REAL(name) ((typeof(&name))dlsym(RTLD_NEXT, #name))

__attribute__((constructor)) void fault_arm(void) {
    const char *fault = getenv("FAULT"), *file = getenv("FAULT_LIST");
    armed = fault && sscanf(fault, "%15[^:]:%ld:%15[^:]:%ld:%2047s", kind, &at, action, &code, folder) == 5;
    calls = 0;
    list = file ? REAL(open)(file, O_WRONLY | O_CREAT | O_APPEND, 0666) : -1;
}

static int is(const char *name) { return !strcmp(action, name); }

/* Whether the fault is at this call; 0 also for an action that is complete. */
static int hit(const char *name, const char *path) {
    if (strcmp(kind, "any") && strcmp(kind, name)) return 0;
    if (strncmp(path, folder, strlen(folder))) return 0;
    long call = ++calls;
    if (is("list")) dprintf(list, "%s %s\n", name, path);
    if (is("slow")) usleep(2000);
    if (call < at || (call > at && !is("full"))) return 0;
    if (is("kill")) kill(getpid(), SIGKILL);
    return is("once") || is("full") || is("torn") || is("short") || is("flip");
}

static int on_path(const char *name, int start, const char *path) {
    char whole[8192] = "", link[64];
    if (!armed) return 0;
    if (path[0] != '/') {
        snprintf(link, sizeof link, start == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", start);
        long size = readlink(link, whole, 4000);
        whole[size < 0 ? 0 : size] = '\0';
        strcat(whole, "/");
    }
    return hit(name, strncat(whole, path, 4000));
}

static int on_file(const char *name, int file) {
    char link[64], path[4096];
    if (!armed) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    long size = readlink(link, path, sizeof path - 1);
    path[size < 0 ? 0 : size] = '\0';
    return hit(name, path);
}

#define FAIL do { errno = (int)code; return -1; } while (0)
#define ON_PATH(name, function, arguments, start, path, ...) \
    int function arguments { if (on_path(name, start, path)) FAIL; return REAL(function)(__VA_ARGS__); }
#define ON_FILE(name, function, arguments, ...) \
    int function arguments { if (on_file(name, file)) FAIL; return REAL(function)(__VA_ARGS__); }
#define OPEN(function, parameters, start, ...) \
    int function parameters { \
        va_list more; va_start(more, flags); mode_t mode = va_arg(more, mode_t); va_end(more); \
        if (on_path(flags & (O_WRONLY | O_RDWR | O_CREAT) ? "create" : "open", start, path)) FAIL; \
        return REAL(function)(__VA_ARGS__, flags, mode); }
#define READ(function, parameters, ...) \
    ssize_t function parameters { \
        int bad = on_file("read", file); \
        if (bad && !is("flip") && !is("short")) FAIL; \
        if (bad && is("short")) size = (size + 1) / 2; \
        ssize_t done = REAL(function)(__VA_ARGS__); \
        if (bad && is("flip") && done > 0) ((char *)data)[done / 2] ^= 4; \
        return done; }
#define WRITE(function, parameters, ...) \
    ssize_t function parameters { \
        int bad = on_file("write", file); \
        if (bad && !is("torn") && !is("short")) FAIL; \
        if (bad) size = (size + 1) / 2; \
        ssize_t done = REAL(function)(__VA_ARGS__); \
        if (bad && is("torn")) kill(getpid(), SIGKILL); \
        return done; }

OPEN(open, (const char *path, int flags, ...), AT_FDCWD, path)
OPEN(open64, (const char *path, int flags, ...), AT_FDCWD, path)
OPEN(openat, (int start, const char *path, int flags, ...), start, start, path)
OPEN(openat64, (int start, const char *path, int flags, ...), start, start, path)
READ(read, (int file, void *data, size_t size), file, data, size)
READ(pread, (int file, void *data, size_t size, off_t from), file, data, size, from)
READ(pread64, (int file, void *data, size_t size, off64_t from), file, data, size, from)
WRITE(write, (int file, const void *data, size_t size), file, data, size)
WRITE(pwrite, (int file, const void *data, size_t size, off_t from), file, data, size, from)
WRITE(pwrite64, (int file, const void *data, size_t size, off64_t from), file, data, size, from)
ON_FILE("sync", fsync, (int file), file)
ON_FILE("sync", fdatasync, (int file), file)
ON_FILE("truncate", ftruncate, (int file, off_t size), file, size)
ON_FILE("truncate", ftruncate64, (int file, off64_t size), file, size)
ON_PATH("rename", rename, (const char *path, const char *to), AT_FDCWD, path, path, to)
ON_PATH("remove", unlink, (const char *path), AT_FDCWD, path, path)
ON_PATH("remove", unlinkat, (int start, const char *path, int flags), start, path, start, path, flags)
ON_PATH("remove", rmdir, (const char *path), AT_FDCWD, path, path)
ON_PATH("mkdir", mkdir, (const char *path, mode_t mode), AT_FDCWD, path, path, mode)

/* Python reads into memory with preadv: the first buffer alone, as the kernel may do. */
ssize_t preadv64(int file, const struct iovec *parts, int count, off64_t from) {
    return count ? pread64(file, parts[0].iov_base, parts[0].iov_len, from) : 0;
}

ssize_t preadv(int file, const struct iovec *parts, int count, off_t from) { return preadv64(file, parts, count, from); }

FILE *fopen64(const char *path, const char *mode) {
    if (on_path(mode[0] == 'r' ? "open" : "create", AT_FDCWD, path)) return errno = (int)code, NULL;
    return REAL(fopen64)(path, mode);
}

FILE *fopen(const char *path, const char *mode) { return fopen64(path, mode); }

int clock_gettime(clockid_t clock, struct timespec *time) {
    int result = REAL(clock_gettime)(clock, time);
    if (armed && clock == CLOCK_REALTIME && is("back") && ++calls >= at) time->tv_sec -= 3600;
    return result;
}
