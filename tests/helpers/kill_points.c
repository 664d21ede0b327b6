/* Numbers the calls with which a process changes files under one directory, and kills it at one.
 *
 * Preloaded; `kill_points_arm(n, mode, directory)` begins to count. At call n the process dies by
 * SIGKILL: before the call (mode 0), behind it (1), or, in a write, when half of it is done (2).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define MAX_FDS 4096
static long count, wanted = -1;
static int mode;
static char under[4096];
static char watched[MAX_FDS];

void kill_points_arm(long n, int how, const char *directory) {
  count = 0, wanted = n, mode = how;
  strncpy(under, directory, sizeof under - 1);
}
long kill_points_count(void) { return count; }

static void die(void) { kill(getpid(), SIGKILL); for (;;) pause(); }
static int inside(const char *path) { return wanted >= 0 && path && strstr(path, under); }
static int is_watched(int fd) { return wanted >= 0 && fd >= 0 && fd < MAX_FDS && watched[fd]; }
static int begins(void) {
  int now = ++count == wanted;
  if (now && mode == 0) die();
  return now;
}
#define REAL(name) \
  static __typeof__(&name) real; \
  if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define CALL(condition, type, expression) \
  do { \
    int counted = condition, now = counted && begins(); \
    type result = expression; \
    if (now) die(); \
    return result; \
  } while (0)

#define OPEN(name) \
  int name(const char *path, int flags, ...) { \
    REAL(name); \
    va_list rest; \
    va_start(rest, flags); \
    mode_t permissions = va_arg(rest, mode_t); \
    va_end(rest); \
    int counted = inside(path), now = counted && begins(); \
    int fd = real(path, flags, permissions); \
    if (fd >= 0 && fd < MAX_FDS) watched[fd] = counted; \
    if (now) die(); \
    return fd; \
  }
OPEN(open)
OPEN(open64)
#define OPENAT(name) \
  int name(int at, const char *path, int flags, ...) { \
    REAL(name); \
    va_list rest; \
    va_start(rest, flags); \
    mode_t permissions = va_arg(rest, mode_t); \
    va_end(rest); \
    int counted = inside(path) || is_watched(at), now = counted && begins(); \
    int fd = real(at, path, flags, permissions); \
    if (fd >= 0 && fd < MAX_FDS) watched[fd] = counted; \
    if (now) die(); \
    return fd; \
  }
OPENAT(openat)
OPENAT(openat64)

int close(int fd) {
  REAL(close);
  if (fd >= 0 && fd < MAX_FDS) watched[fd] = 0;
  return real(fd);
}
ssize_t write(int fd, const void *data, size_t size) {
  REAL(write);
  int now = is_watched(fd) && begins();
  if (now && mode == 2) size = (size + 1) / 2;
  ssize_t result = real(fd, data, size);
  if (now) die();
  return result;
}
int fsync(int fd) { REAL(fsync); CALL(is_watched(fd), int, real(fd)); }
int fdatasync(int fd) { REAL(fdatasync); CALL(is_watched(fd), int, real(fd)); }
int mkdir(const char *path, mode_t permissions) {
  REAL(mkdir);
  CALL(inside(path), int, real(path, permissions));
}
int rmdir(const char *path) { REAL(rmdir); CALL(inside(path), int, real(path)); }
int unlink(const char *path) { REAL(unlink); CALL(inside(path), int, real(path)); }
int unlinkat(int at, const char *path, int flags) {
  REAL(unlinkat);
  CALL(inside(path) || is_watched(at), int, real(at, path, flags));
}
int rename(const char *from, const char *to) {
  REAL(rename);
  CALL(inside(from) || inside(to), int, real(from, to));
}
int renameat(int at, const char *from, int there, const char *to) {
  REAL(renameat);
  CALL(inside(from) || inside(to), int, real(at, from, there, to));
}
