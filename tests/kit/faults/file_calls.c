/* Counts, records and breaks the calls with which a process changes files below a directory.
 *
 * The library is preloaded; `file_calls_arm` starts the count. `action` applies to the calls `first` to
 * `last` of this process: SIGKILL before or after the call or in the middle of a write; failure of
 * the call; or a short write. Calls that succeeded are appended to a log, which several processes can
 * share. A record is a line "op, pid, number, offset, length, inode, path, other path", separated by
 * tabs, and then `length` bytes. Calls made without the C library, as by Rust's rustix, are not counted.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define MAX_FDS 4096
enum { NONE, KILL_BEFORE, KILL_AFTER, KILL_HALF_WAY, FAIL_ENOSPC, FAIL_EIO, SHORT };
enum { FAILED = -1, PASSED, HIT };
enum { KEEPS, GROWS }; /* GROWS: the call needs space on the disk */
static long count, first, last, hits;
static int action, armed, log_fd = -1;
static char under[PATH_MAX], until[NAME_MAX];
static char watched[MAX_FDS];

/* If `stop` is not empty, no call is broken after the first call of a path that contains `stop`. */
void file_calls_arm(const char *directory, const char *log, long from, long to, int how,
                    const char *stop) {
  strncpy(under, directory, sizeof under - 1);
  strncpy(until, stop, sizeof until - 1);
  if (*log) log_fd = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND, 0644);
  count = 0, first = from, last = to, action = how, armed = 1;
}
long file_calls_hits(void) { return hits; }

/* The kernel kills the process, also in the middle of a system call. */
int file_calls_kill_after(double seconds) {
  struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGKILL};
  long whole = (long)seconds;
  struct itimerspec when = {.it_value = {whole, (long)((seconds - whole) * 1e9) + 1}};
  timer_t timer;
  return timer_create(CLOCK_MONOTONIC, &event, &timer) || timer_settime(timer, 0, &when, NULL);
}

static void die(void) { kill(getpid(), SIGKILL); for (;;) pause(); }
static int is_inside(const char *path) {
  if (!armed || !path || !strstr(path, under)) return 0;
  if (*until && strstr(path, until)) action = NONE;
  return 1;
}
static int is_watched(int fd) { return armed && fd >= 0 && fd < MAX_FDS && watched[fd]; }
static void watch(int fd) { if (fd >= 0 && fd < MAX_FDS) watched[fd] = 1; }

static int begin(int grows) {
  long number = __atomic_add_fetch(&count, 1, __ATOMIC_SEQ_CST);
  if (number < first || number > last || action == NONE) return PASSED;
  if (action == KILL_BEFORE) die();
  if (action != FAIL_ENOSPC || grows) hits++;
  if (action == FAIL_EIO || (action == FAIL_ENOSPC && grows)) {
    errno = action == FAIL_EIO ? EIO : ENOSPC;
    return FAILED;
  }
  return HIT;
}
static void end(int state) {
  if (state == HIT && (action == KILL_AFTER || action == KILL_HALF_WAY)) die();
}
static size_t cut(int state, size_t size) {
  return state == HIT && (action == KILL_HALF_WAY || action == SHORT) ? (size + 1) / 2 : size;
}

static const char *path_of(int fd, char *into) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, into, PATH_MAX - 1);
  into[length < 0 ? 0 : length] = 0;
  return into;
}
static const char *resolve(int at, const char *path, char *into) {
  char base[PATH_MAX];
  if (*path == '/') return path;
  if (at == AT_FDCWD) { if (!getcwd(base, sizeof base)) *base = 0; }
  else path_of(at, base);
  if (snprintf(into, 2 * PATH_MAX, "%s/%s", base, path) < 0) *into = 0;
  return into;
}
static void note_all(const char *op, long offset, const void *data, size_t size, int fd,
                     const char *path, const char *other) {
  if (log_fd < 0) return;
  int before = errno;
  struct stat file = {0};
  if (fd >= 0) fstat(fd, &file);
  char line[4 * PATH_MAX];
  int length = snprintf(line, sizeof line, "%s\t%d\t%ld\t%ld\t%zu\t%ld\t%s\t%s\n", op, getpid(),
                        count, offset, size, (long)file.st_ino, path, other);
  struct iovec parts[] = {{line, length}, {(void *)data, size}};
  /* One call to a file opened with O_APPEND: records of several processes do not mix. */
  if (syscall(SYS_writev, log_fd, parts, size ? 2 : 1) != (ssize_t)(length + size)) abort();
  errno = before;
}
static void note(const char *op, const char *path, const char *other) {
  note_all(op, 0, NULL, 0, -1, path, other);
}
static void note_fd(const char *op, int fd, long offset, const void *data, size_t size) {
  char path[PATH_MAX];
  if (log_fd >= 0) note_all(op, offset, data, size, fd, path_of(fd, path), "");
}
/* Records bytes that the kernel copied between files, after reading them from the target. */
static void note_copied(int fd, long offset, size_t size) {
  char link[64], *data = malloc(size);
  if (log_fd < 0) return free(data);
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  int back = syscall(SYS_openat, AT_FDCWD, link, O_RDONLY, 0);
  if (pread(back, data, size, offset) != (ssize_t)size) abort();
  syscall(SYS_close, back);
  note_fd("write", fd, offset, data, size);
  free(data);
}

#define REAL(name) \
  static __typeof__(&name) real; \
  if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

static int opened(int state, int fd, const char *path, int flags, int is_new) {
  if (fd < 0) return fd;
  watch(fd);
  if (is_new || flags & O_TRUNC)
    note_all(is_new ? "create" : "truncate", 0, NULL, 0, fd, path, "");
  end(state);
  return fd;
}
#define OPEN(name, parameters, directory, ...) \
  int name parameters { \
    REAL(name); \
    va_list rest; \
    va_start(rest, flags); \
    mode_t mode = va_arg(rest, mode_t); \
    va_end(rest); \
    char whole[2 * PATH_MAX]; \
    if (!armed || !is_inside(path = resolve(directory, path, whole))) \
      return real(__VA_ARGS__); \
    struct stat found; \
    int is_new = (flags & O_CREAT) && stat(path, &found), state = begin(is_new); \
    if (state == FAILED) return -1; \
    return opened(state, real(__VA_ARGS__), path, flags, is_new); \
  }
OPEN(open, (const char *path, int flags, ...), AT_FDCWD, path, flags, mode)
OPEN(open64, (const char *path, int flags, ...), AT_FDCWD, path, flags, mode)
OPEN(openat, (int at, const char *path, int flags, ...), at, at, path, flags, mode)
OPEN(openat64, (int at, const char *path, int flags, ...), at, at, path, flags, mode)

int creat(const char *path, mode_t mode) {
  return open(path, O_CREAT | O_WRONLY | O_TRUNC, mode);
}
int close(int fd) {
  REAL(close);
  if (fd >= 0 && fd < MAX_FDS) watched[fd] = 0;
  return real(fd);
}

/* Counts a call on a watched descriptor or path, makes or breaks the call, and records the call. */
#define BREAKABLE(condition, grows, type, call, noting) \
  do { \
    if (!(condition)) return call; \
    int state = begin(grows); \
    if (state == FAILED) return -1; \
    type result = call; \
    if (result >= 0) { noting; } \
    end(state); \
    return result; \
  } while (0)
#define WRITE(condition, call, noting) \
  do { \
    if (!(condition)) return call; \
    int state = begin(GROWS); \
    if (state == FAILED) return -1; \
    size = cut(state, size); \
    ssize_t result = call; \
    if (result > 0) { noting; } \
    end(state); \
    return result; \
  } while (0)
#define AT (lseek(fd, 0, SEEK_CUR) - result)

ssize_t write(int fd, const void *data, size_t size) {
  REAL(write);
  WRITE(is_watched(fd), real(fd, data, size), note_fd("write", fd, AT, data, result));
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
  REAL(pwrite);
  WRITE(is_watched(fd), real(fd, data, size, offset), note_fd("write", fd, offset, data, result));
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) {
  REAL(pwrite64);
  WRITE(is_watched(fd), real(fd, data, size, offset), note_fd("write", fd, offset, data, result));
}
ssize_t sendfile(int fd, int from, off_t *offset, size_t size) {
  REAL(sendfile);
  WRITE(is_watched(fd), real(fd, from, offset, size), note_copied(fd, AT, result));
}
ssize_t sendfile64(int fd, int from, off64_t *offset, size_t size) {
  REAL(sendfile64);
  WRITE(is_watched(fd), real(fd, from, offset, size), note_copied(fd, AT, result));
}
ssize_t copy_file_range(int from, off64_t *offset, int fd, off64_t *at, size_t size, unsigned how) {
  REAL(copy_file_range);
  WRITE(is_watched(fd), real(from, offset, fd, at, size, how),
        note_copied(fd, at ? *at - result : AT, result));
}
/* Writes only the first buffer. A short result is permitted: all callers must handle it. */
ssize_t writev(int fd, const struct iovec *parts, int number) {
  REAL(writev);
  if (!is_watched(fd) || !number) return real(fd, parts, number);
  return write(fd, parts->iov_base, parts->iov_len);
}
ssize_t pwritev(int fd, const struct iovec *parts, int number, off_t offset) {
  REAL(pwritev);
  if (!is_watched(fd) || !number) return real(fd, parts, number, offset);
  return pwrite(fd, parts->iov_base, parts->iov_len, offset);
}
ssize_t pwritev64(int fd, const struct iovec *parts, int number, off64_t offset) {
  REAL(pwritev64);
  if (!is_watched(fd) || !number) return real(fd, parts, number, offset);
  return pwrite64(fd, parts->iov_base, parts->iov_len, offset);
}

#define OF_FD(name, type, grows, op) \
  int name(int fd, type length) { \
    REAL(name); \
    BREAKABLE(is_watched(fd), grows, int, real(fd, length), note_fd(op, fd, length, NULL, 0)); \
  }
OF_FD(ftruncate, off_t, GROWS, "truncate")
OF_FD(ftruncate64, off64_t, GROWS, "truncate")
#define SYNC(name) \
  int name(int fd) { \
    REAL(name); \
    BREAKABLE(is_watched(fd), KEEPS, int, real(fd), note_fd("fsync", fd, 0, NULL, 0)); \
  }
SYNC(fsync)
SYNC(fdatasync)
#define FALLOCATE(name, type) \
  int name(int fd, int mode, type offset, type length) { \
    REAL(name); \
    BREAKABLE(is_watched(fd), GROWS, int, real(fd, mode, offset, length), \
              note_fd("extend", fd, offset + length, NULL, 0)); \
  }
FALLOCATE(fallocate, off_t)
FALLOCATE(fallocate64, off64_t)
/* These calls return the error number instead of setting errno. */
#define POSIX_FALLOCATE(name, type) \
  int name(int fd, type offset, type length) { \
    REAL(name); \
    if (!is_watched(fd)) return real(fd, offset, length); \
    int state = begin(GROWS), result = state == FAILED ? errno : real(fd, offset, length); \
    if (!result) note_fd("extend", fd, offset + length, NULL, 0); \
    end(state); \
    return result; \
  }
POSIX_FALLOCATE(posix_fallocate, off_t)
POSIX_FALLOCATE(posix_fallocate64, off64_t)

int mkdir(const char *path, mode_t mode) {
  REAL(mkdir);
  char whole[2 * PATH_MAX];
  if (armed) path = resolve(AT_FDCWD, path, whole);
  BREAKABLE(is_inside(path), GROWS, int, real(path, mode), note("mkdir", path, ""));
}
int rmdir(const char *path) {
  REAL(rmdir);
  char whole[2 * PATH_MAX];
  if (armed) path = resolve(AT_FDCWD, path, whole);
  BREAKABLE(is_inside(path), KEEPS, int, real(path), note("unlink", path, ""));
}
int unlinkat(int at, const char *path, int flags) {
  REAL(unlinkat);
  char space[2 * PATH_MAX];
  const char *whole = armed ? resolve(at, path, space) : path;
  BREAKABLE(is_inside(whole), KEEPS, int, real(at, path, flags),
            note("unlink", whole, ""));
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int renameat(int at, const char *from, int there, const char *to) {
  REAL(renameat);
  char a[2 * PATH_MAX], b[2 * PATH_MAX];
  const char *old = armed ? resolve(at, from, a) : from, *new = armed ? resolve(there, to, b) : to;
  BREAKABLE(is_inside(old) || is_inside(new), GROWS, int, real(at, from, there, to),
            note("rename", old, new));
}
int rename(const char *from, const char *to) { return renameat(AT_FDCWD, from, AT_FDCWD, to); }
int linkat(int at, const char *from, int there, const char *to, int flags) {
  REAL(linkat);
  char a[2 * PATH_MAX], b[2 * PATH_MAX];
  const char *old = armed ? resolve(at, from, a) : from, *new = armed ? resolve(there, to, b) : to;
  BREAKABLE(is_inside(new), GROWS, int, real(at, from, there, to, flags),
            note("link", old, new));
}
int link(const char *from, const char *to) {
  return linkat(AT_FDCWD, from, AT_FDCWD, to, 0);
}
