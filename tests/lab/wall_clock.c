/* Clocks that can be wrong: preloaded, it adds the seconds that stand in the file
   $MSRUN_TESTS_CLOCK to what the process takes for the time of day, and takes the nanoseconds
   behind them from the monotonic clock, which stands still while a machine is suspended.
   A jump reaches every process that has the file at once. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define BILLION 1000000000

struct clocks {
    int64_t ahead_seconds;
    int64_t stood_still_nanoseconds;
};
static const volatile struct clocks *offset;

__attribute__((constructor)) static void find_offset(void) {
    const char *path = getenv("MSRUN_TESTS_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0)
        return;
    void *page = mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
    if (page != MAP_FAILED)
        offset = page;
    close(file);
}

static void add(struct timespec *time, int64_t nanoseconds) {
    int64_t sum = time->tv_sec * (int64_t)BILLION + time->tv_nsec + nanoseconds;
    time->tv_sec = sum / BILLION;
    time->tv_nsec = sum % BILLION;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = (int)syscall(SYS_clock_gettime, clock, now);
    if (result || !offset)
        return result;
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)
        now->tv_sec += offset->ahead_seconds;
    if (clock == CLOCK_MONOTONIC || clock == CLOCK_MONOTONIC_COARSE)
        add(now, -offset->stood_still_nanoseconds);
    return 0;
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *until,
                    struct timespec *left) {
    struct timespec real = *until;
    if (offset && flags == TIMER_ABSTIME && clock == CLOCK_MONOTONIC)
        add(&real, offset->stood_still_nanoseconds);
    return syscall(SYS_clock_nanosleep, clock, flags, &real, left) ? errno : 0;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *seconds) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (seconds)
        *seconds = now.tv_sec;
    return now.tv_sec;
}
