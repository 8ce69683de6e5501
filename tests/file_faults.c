/* Preloaded into a process, this library numbers every operation that changes a file below one folder, and at a chosen
 * number fails the call or kills the process. Reads of a path can be made to fail as well.
 *
 * Everything is set from the process itself (ctypes, see fault_process.py), so that one process with its imports done can
 * fork a child for each fault.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char watched[PATH_MAX], unreadable[PATH_MAX];
static atomic_long counted;
static long chosen;
static int failure, journal = -1;

/* Watch the folder. At operation `number` (0: never) fail with `error`, or with 0 kill the process.
 * The name of every operation goes to the descriptor `list`, unless that is -1. */
void faults_arm(const char *folder, long number, int error, int list) {
    snprintf(watched, sizeof watched, "%s", folder);
    chosen = number;
    failure = error;
    journal = list;
    atomic_store(&counted, 0);
}

long faults_counted(void) { return atomic_load(&counted); }

/* Reads of files below `path` fail with EIO, and the folder itself cannot be listed; "" ends this. */
void faults_unreadable(const char *path) { snprintf(unreadable, sizeof unreadable, "%s", path); }

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

static int is_below(const char *path, const char *folder) { return folder[0] && strncmp(path, folder, strlen(folder)) == 0; }

static void path_of(int descriptor, char *out) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t size = readlink(link, out, PATH_MAX - 1);
    out[size > 0 ? size : 0] = 0;
}

static void absolute(int folder, const char *path, char *out) {
    if (path[0] == '/') { snprintf(out, PATH_MAX, "%s", path); return; }
    char base[PATH_MAX];
    if (folder == AT_FDCWD) { if (!getcwd(base, sizeof base)) base[0] = 0; }
    else path_of(folder, base);
    if (snprintf(out, PATH_MAX, "%s/%s", base, path) >= PATH_MAX) out[0] = 0;
}

/* Whether this operation is the one to fail; a process that is to die does not return. */
static int is_hit(const char *operation, const char *path) {
    if (!is_below(path, watched)) return 0;
    long number = atomic_fetch_add(&counted, 1) + 1;
    if (journal >= 0) dprintf(journal, "%ld %s %s\n", number, operation, path + strlen(watched));
    if (number != chosen) return 0;
    if (!failure) { kill(getpid(), SIGKILL); for (;;) pause(); }
    errno = failure;
    return 1;
}

static int hits(const char *operation, int folder, const char *path) {
    if (!watched[0]) return 0;
    char whole[PATH_MAX];
    absolute(folder, path, whole);
    return is_hit(operation, whole);
}

static int hits_open(const char *operation, int descriptor) {
    if (!watched[0] || descriptor == journal) return 0;
    char path[PATH_MAX];
    path_of(descriptor, path);
    return is_hit(operation, path);
}

ssize_t write(int d, const void *data, size_t size) { REAL(write); return hits_open("write", d) ? -1 : real(d, data, size); }
ssize_t writev(int d, const struct iovec *v, int n) { REAL(writev); return hits_open("write", d) ? -1 : real(d, v, n); }
ssize_t pwrite64(int d, const void *data, size_t size, off64_t at) { REAL(pwrite64); return hits_open("write", d) ? -1 : real(d, data, size, at); }
ssize_t pwrite(int d, const void *data, size_t size, off_t at) { return pwrite64(d, data, size, at); }
int ftruncate64(int d, off64_t size) { REAL(ftruncate64); return hits_open("truncate", d) ? -1 : real(d, size); }
int ftruncate(int d, off_t size) { return ftruncate64(d, size); }
int fsync(int d) { REAL(fsync); return hits_open("fsync", d) ? -1 : real(d); }
int rename(const char *from, const char *to) { REAL(rename); return hits("rename", AT_FDCWD, from) ? -1 : real(from, to); }
int renameat2(int a, const char *from, int b, const char *to, unsigned flags) { REAL(renameat2); return hits("exchange", a, from) ? -1 : real(a, from, b, to, flags); }
int unlink(const char *path) { REAL(unlink); return hits("unlink", AT_FDCWD, path) ? -1 : real(path); }
int rmdir(const char *path) { REAL(rmdir); return hits("rmdir", AT_FDCWD, path) ? -1 : real(path); }
int unlinkat(int d, const char *path, int flags) { REAL(unlinkat); return hits("unlink", d, path) ? -1 : real(d, path, flags); }
int symlink(const char *target, const char *path) { REAL(symlink); return hits("symlink", AT_FDCWD, path) ? -1 : real(target, path); }
int mkdir(const char *path, mode_t mode) { REAL(mkdir); return hits("mkdir", AT_FDCWD, path) ? -1 : real(path, mode); }
int chmod(const char *path, mode_t mode) { REAL(chmod); return hits("chmod", AT_FDCWD, path) ? -1 : real(path, mode); }

static int hits_opening(int folder, const char *path, int flags) {
    return (flags & (O_WRONLY | O_RDWR | O_CREAT)) && hits("open", folder, path);
}
#define MODE(flags) mode_t mode = 0; if ((flags) & (O_CREAT | O_TMPFILE)) { va_list more; va_start(more, flags); mode = va_arg(more, mode_t); va_end(more); }
int open64(const char *path, int flags, ...) { REAL(open64); MODE(flags) return hits_opening(AT_FDCWD, path, flags) ? -1 : real(path, flags, mode); }
int open(const char *path, int flags, ...) { REAL(open); MODE(flags) return hits_opening(AT_FDCWD, path, flags) ? -1 : real(path, flags, mode); }
int openat64(int d, const char *path, int flags, ...) { REAL(openat64); MODE(flags) return hits_opening(d, path, flags) ? -1 : real(d, path, flags, mode); }
int openat(int d, const char *path, int flags, ...) { REAL(openat); MODE(flags) return hits_opening(d, path, flags) ? -1 : real(d, path, flags, mode); }

ssize_t read(int d, void *data, size_t size) {
    REAL(read);
    if (unreadable[0]) {
        char path[PATH_MAX];
        path_of(d, path);
        if (is_below(path, unreadable)) { errno = EIO; return -1; }
    }
    return real(d, data, size);
}
DIR *opendir(const char *path) {
    REAL(opendir);
    if (unreadable[0]) {
        char whole[PATH_MAX];
        absolute(AT_FDCWD, path, whole);
        if (is_below(whole, unreadable)) { errno = EACCES; return NULL; }
    }
    return real(path);
}
