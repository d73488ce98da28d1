// faults.c: a disk that fails, for dev/crash_test: preloaded into a program, it stands between the kernel and its calls
// of write, fsync, rename and unlink; this program has no others that change its files.
//     cc -shared -fPIC -O1 -pthread -o faults.so faults.c -ldl
//     LD_PRELOAD=./faults.so FAULT_FOLDER=/absolute/folder FAULT=kind:at:count FAULT_SEED=1 FAULT_LOG=events.txt
//     program
//
// Only paths below FAULT_FOLDER are affected. Operations are counted from the first one on a checkpoint (a path with
// "/step_"). Each event is a line of FAULT_LOG. FAULT is one of
//     count                   no fault; at the end, FAULT_LOG gets "writes W fsyncs F file_fsyncs F renames R bytes B"
//     short                   any write may take only a part, or nothing because of a signal (EINTR): POSIX allows both
//     enospc:AT:COUNT         the disk is full after AT bytes: it takes the part that fits, then COUNT writes fail with
//                             ENOSPC, then there is room again
//     eio_write:AT:COUNT      COUNT writes fail with EIO, the first of them is number AT
//     eio_fsync:AT:COUNT      the same for fsync, of files and folders
//     eio_rename:AT:COUNT     the same for rename
//     slow_fsync:AT:SECONDS   fsync AT takes that long
//     power_cut:AT            the power fails during operation AT (all kinds counted together), see below
//     torn:AT:MORE            fsync AT of a checkpoint's file reports success and writes nothing; the power fails MORE
//                             operations later
//     lost_rename:AT:MORE     rename AT reports success and never becomes durable; the power fails MORE operations
//     later
//
// The power cut is the strictest that POSIX allows. The program is killed, and of its work only this is sure to
// survive: the bytes that a file had when it was last synced, and the names and renames in a folder when it was last
// synced. Of the rest a random part survives: files end anywhere after their synced bytes or continue in zeros, new
// names exist or do not, and the last few renames never happened. Files that existed when the program started are on
// the disk. Deletions are final. The writes of stdio go unseen (glibc does not call its own write by name), but their
// files lose what was not synced like all others.
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_FILES = 20000, MAX_RENAMES = 5000, MAX_PATH = 1024 };

// The function of this name that would be called without this file.
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char folder[MAX_PATH], kind[32], log_path[MAX_PATH];
static long long fault_at, fault_count;
static int armed;  // an operation on a checkpoint has been seen
static long long operations, writes, fsyncs, file_fsyncs, renames_done, bytes_written, crash_at = -1;
static uint64_t random_state;

// What is known to be on the disk.
static struct {
    ino_t inode;
    long long synced;  // bytes
    int named;         // its name has been synced
    int torn;          // its fsync lied
} files[MAX_FILES];
static int file_count;
static struct {
    char from[MAX_PATH], to[MAX_PATH];
    char replaced[MAX_PATH];  // a second name for the file that the rename replaced, or ""
} undurable[MAX_RENAMES];
static int rename_count;
static int rename_lost = -1;  // undurable[rename_lost] and all later ones stay undurable

static uint64_t draw(uint64_t below) {  // splitmix64
    uint64_t z = random_state += 0x9E3779B97F4A7C15ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return (z ^ z >> 31) % below;
}

static void note(const char* what, const char* path) {
    char line[2 * MAX_PATH];
    const int n = snprintf(line, sizeof line, "%s %s\n", what, path);
    const int fd = open(log_path, O_WRONLY | O_CREAT | O_APPEND, 0666);
    if (fd < 0 || REAL(write)(fd, line, (size_t)n) != n) _exit(99);
    close(fd);
}

static int refuse(const char* what, int error, const char* path) {
    note(what, path);
    errno = error;
    return -1;
}

static int is_kind(const char* name) { return strcmp(kind, name) == 0; }

static int is_ours(const char* path) {
    const size_t n = strlen(folder);
    return n > 0 && strncmp(path, folder, n) == 0 && (path[n] == 0 || path[n] == '/');
}

static int path_of(int fd, char* path) {  // 1: below the folder
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    const ssize_t n = readlink(link, path, MAX_PATH - 1);
    if (n <= 0) return 0;
    path[n] = 0;
    return is_ours(path);
}

static void absolute(const char* path, char* out) {
    char here[MAX_PATH / 2];
    if (path[0] == '/' || !getcwd(here, sizeof here)) snprintf(out, MAX_PATH, "%s", path);
    else snprintf(out, MAX_PATH, "%s/%s", here, path);
}

// ---------------------------------------------------------------------------------------------------------------------
// The model of the disk.

static int index_of(ino_t inode, int add) {
    for (int i = file_count - 1; i >= 0; i--)
        if (files[i].inode == inode) return i;
    if (!add) return -1;
    if (file_count == MAX_FILES) _exit(98);
    files[file_count].inode = inode;
    files[file_count].synced = files[file_count].named = files[file_count].torn = 0;
    return file_count++;
}

static void forget(const char* path) {  // the inode's number may be used again
    struct stat s;
    const int i = lstat(path, &s) == 0 ? index_of(s.st_ino, 0) : -1;
    if (i >= 0) files[i] = files[--file_count];
}

// The visitors of nftw, which go on.
static int is_on_disk(const char* path, const struct stat* s, int type, struct FTW* place) {
    (void)path, (void)place;
    if (type == FTW_NS) return 0;
    const int i = index_of(s->st_ino, 1);
    files[i].synced = s->st_size, files[i].named = 1;
    return 0;
}

static void folder_synced(const char* path) {
    DIR* d = opendir(path);
    for (struct dirent* e; d && (e = readdir(d));)
        if (strcmp(e->d_name, ".") && strcmp(e->d_name, "..")) files[index_of(e->d_ino, 1)].named = 1;
    if (d) closedir(d);
    int kept = 0;
    for (int i = 0; i < rename_count; i++) {
        const size_t n = strlen(path);
        const int is_inside =
            !strncmp(undurable[i].to, path, n) && undurable[i].to[n] == '/' && !strchr(undurable[i].to + n + 1, '/');
        if (is_inside && (rename_lost < 0 || i < rename_lost)) {
            if (undurable[i].replaced[0]) REAL(unlink)(undurable[i].replaced);
        } else {
            if (i == rename_lost) rename_lost = kept;
            if (kept != i) undurable[kept] = undurable[i];
            kept++;
        }
    }
    rename_count = kept;
}

static int lose_unsynced(const char* path, const struct stat* s, int type, struct FTW* place) {
    (void)place;
    if (type == FTW_NS) return 0;
    const int i = index_of(s->st_ino, 1);
    if (!S_ISREG(s->st_mode)) return 0;
    if (!files[i].named && draw(2)) return (void)REAL(unlink)(path), 0;
    const long long unsynced = (long long)s->st_size - files[i].synced;
    if (unsynced <= 0) return 0;
    const off_t end = (off_t)(files[i].synced + (long long)draw((uint64_t)unsynced));
    // 0: ends early, 1: continues in zeros, 2: ends where it was synced, 3: is whole
    const uint64_t fate = files[i].torn ? draw(2) : draw(4);
    if (fate <= 1 && truncate(path, end) != 0) _exit(97);
    if (fate == 1 && truncate(path, s->st_size) != 0) _exit(97);
    if (fate == 2 && truncate(path, (off_t)files[i].synced) != 0) _exit(97);
    return 0;
}

// A child undoes what was not durable after the program is dead, so that no other thread can interfere. It holds stdout
// open until it is done, so a parent that reads stdout to the end waits for it.
static void power_cut(const char* path) {
    note("power_cut", path);
    const pid_t program = getpid();
    if (fork() == 0) {
        while (getppid() == program) usleep(200);
        const int survive = rename_lost >= 0 ? rename_lost : (int)draw((uint64_t)rename_count + 1);
        for (int i = rename_count - 1; i >= survive; i--) {
            if (REAL(rename)(undurable[i].to, undurable[i].from) != 0) continue;
            if (undurable[i].replaced[0]) REAL(rename)(undurable[i].replaced, undurable[i].to);
        }
        nftw(folder, lose_unsynced, 16, FTW_PHYS | FTW_DEPTH);
        _exit(0);
    }
    kill(program, SIGKILL);
    for (;;) pause();
}

static int arm(const char* path) { return armed = armed || strstr(path, "/step_"); }

// Call once per operation, under the lock. Returns 1 if the power fails in it.
static int power_fails(void) {
    operations++;
    return (is_kind("power_cut") && operations == fault_at) || (crash_at >= 0 && operations >= crash_at);
}

static int in_range(long long number) { return number >= fault_at && number < fault_at + fault_count; }

// ---------------------------------------------------------------------------------------------------------------------
// The calls.

static const char* setting(const char* name) { return getenv(name) ? getenv(name) : ""; }

__attribute__((constructor)) static void begin(void) {
    snprintf(folder, sizeof folder, "%s", setting("FAULT_FOLDER"));
    snprintf(log_path, sizeof log_path, "%s", setting("FAULT_LOG"));
    random_state = strtoull(setting("FAULT_SEED"), NULL, 10);
    if (sscanf(setting("FAULT"), "%31[a-z_]:%lld:%lld", kind, &fault_at, &fault_count) < 1) folder[0] = 0;
    if (folder[0]) nftw(folder, is_on_disk, 16, FTW_PHYS | FTW_DEPTH);
}

__attribute__((destructor)) static void end(void) {
    char line[200];
    snprintf(line, sizeof line, "%lld fsyncs %lld file_fsyncs %lld renames %lld bytes %lld", writes, fsyncs,
             file_fsyncs, renames_done, bytes_written);
    if (is_kind("count")) note("writes", line);
}

// How many of the bytes to write, or -1 with errno set.
static ssize_t bytes_to_write(int fd, const char* path, size_t bytes) {
    const off_t at = lseek(fd, 0, SEEK_CUR);
    struct stat s;
    if (fstat(fd, &s) == 0) {
        const int i = index_of(s.st_ino, 1);
        if (at < files[i].synced) files[i].synced = at;
    }
    if (!arm(path)) return (ssize_t)bytes;
    writes++;
    if (power_fails()) {
        if (bytes > 1) (void)!REAL(write)(fd, "torn", draw(2) ? 1 : 0);  // a file that was longer for a moment
        power_cut(path);
    }
    if (is_kind("eio_write") && in_range(writes)) return refuse("eio_write", EIO, path);
    if (is_kind("enospc") && fault_count > 0 && bytes_written + (long long)bytes > fault_at) {
        const long long room = fault_at - bytes_written;
        if (room > 0) return (ssize_t)room;
        fault_count--;
        return refuse("enospc", ENOSPC, path);
    }
    if (is_kind("short")) {
        if (draw(8) == 0) return refuse("short", EINTR, path);
        note("short", path);
        if (bytes > 1 && draw(2)) return (ssize_t)(1 + draw(bytes - 1));
    }
    return (ssize_t)bytes;
}

ssize_t write(int fd, const void* data, size_t bytes) {
    char path[MAX_PATH];
    if (!path_of(fd, path)) return REAL(write)(fd, data, bytes);
    pthread_mutex_lock(&lock);
    ssize_t n = bytes_to_write(fd, path, bytes);
    if (n > 0) n = REAL(write)(fd, data, (size_t)n);
    if (n > 0 && armed) bytes_written += n;
    pthread_mutex_unlock(&lock);
    return n;
}

int fsync(int fd) {
    char path[MAX_PATH];
    struct stat s;
    if (!path_of(fd, path) || fstat(fd, &s) != 0) return REAL(fsync)(fd);
    pthread_mutex_lock(&lock);
    int result = 0, lies = 0;
    if (arm(path)) {
        fsyncs++;
        const int of_checkpoint = S_ISREG(s.st_mode) && strstr(path, "/step_");
        file_fsyncs += of_checkpoint;
        if (power_fails()) power_cut(path);
        if (is_kind("eio_fsync") && in_range(fsyncs)) result = refuse("eio_fsync", EIO, path);
        if (is_kind("slow_fsync") && fsyncs == fault_at) {
            note("slow_fsync", path);
            pthread_mutex_unlock(&lock);  // other threads write meanwhile
            sleep((unsigned)fault_count);
            pthread_mutex_lock(&lock);
        }
        if (is_kind("torn") && of_checkpoint && file_fsyncs == fault_at) {
            note("torn", path);
            lies = 1;
            crash_at = operations + fault_count;
            files[index_of(s.st_ino, 1)].torn = 1;
        }
    }
    if (result == 0) result = REAL(fsync)(fd);
    if (result == 0 && !lies) {
        if (S_ISDIR(s.st_mode)) folder_synced(path);
        else files[index_of(s.st_ino, 1)].synced = s.st_size;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

int rename(const char* from, const char* to) {
    char a[MAX_PATH], b[MAX_PATH];
    absolute(from, a), absolute(to, b);
    if (!is_ours(b)) return REAL(rename)(from, to);
    pthread_mutex_lock(&lock);
    int result = 0;
    if (arm(b)) {
        renames_done++;
        if (power_fails()) power_cut(b);
        if (is_kind("eio_rename") && in_range(renames_done)) result = refuse("eio_rename", EIO, b);
    }
    if (result == 0) {
        char replaced[MAX_PATH] = "";
        struct stat s;
        if (rename_count == MAX_RENAMES) _exit(98);
        if (lstat(b, &s) == 0 && S_ISREG(s.st_mode)) {  // a second name, beside the folder, keeps it
            snprintf(replaced, sizeof replaced, "%.*s.replaced.%d.%d", MAX_PATH - 64, folder, (int)getpid(),
                     (int)operations);
            if (link(b, replaced) != 0) replaced[0] = 0;
        }
        result = REAL(rename)(from, to);
        if (result == 0) {
            if (armed && is_kind("lost_rename") && renames_done == fault_at) {
                note("lost_rename", b);
                rename_lost = rename_count;
                crash_at = operations + fault_count;
            }
            snprintf(undurable[rename_count].from, MAX_PATH, "%s", a);
            snprintf(undurable[rename_count].to, MAX_PATH, "%s", b);
            snprintf(undurable[rename_count].replaced, MAX_PATH, "%s", replaced);
            rename_count++;
        }
    }
    pthread_mutex_unlock(&lock);
    return result;
}

int unlink(const char* path) {
    char a[MAX_PATH];
    absolute(path, a);
    pthread_mutex_lock(&lock);
    if (is_ours(a)) forget(a);
    const int result = REAL(unlink)(path);
    pthread_mutex_unlock(&lock);
    return result;
}
