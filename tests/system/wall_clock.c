/* Moves the wall clock of a process by the seconds that a file holds, read anew at each look at the clock. Preloaded.

Only CLOCK_REALTIME moves, and what waits until a time of it. CLOCK_MONOTONIC and what waits for a duration stay: on
Linux that is how a machine comes back from sleep. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *seconds_ahead;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("TANDEM_TEST_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *page = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (page != MAP_FAILED) seconds_ahead = page;
}

static int64_t ahead(void) { return seconds_ahead ? *seconds_ahead : 0; }

static int is_wall(clockid_t clock) {
    return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE || clock == CLOCK_TAI;
}

/* Returns the real time of a wall clock time. A time of CLOCK_MONOTONIC is decades before, and stays. */
static const struct timespec *real_time(const struct timespec *at, struct timespec *moved) {
    struct timespec now;
    if (!at || !ahead()) return at;
    syscall(SYS_clock_gettime, CLOCK_REALTIME, &now);
    if (at->tv_sec < now.tv_sec / 2) return at;
    *moved = (struct timespec){at->tv_sec - ahead(), at->tv_nsec};
    return moved;
}

#define REAL(name) ((__typeof__(&name))real_function(#name))

static void *real_function(const char *name) { return dlsym(RTLD_NEXT, name); }

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = REAL(clock_gettime);
    int result = real(clock, now);
    if (!result && is_wall(clock)) now->tv_sec += ahead();
    return result;
}

time_t time(time_t *now) {
    struct timespec wall;
    clock_gettime(CLOCK_REALTIME, &wall);
    if (now) *now = wall.tv_sec;
    return wall.tv_sec;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec wall;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &wall);
    *now = (struct timeval){wall.tv_sec, wall.tv_nsec / 1000};
    return 0;
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *until, struct timespec *left) {
    struct timespec moved;
    if (is_wall(clock) && (flags & TIMER_ABSTIME)) until = real_time(until, &moved);
    return REAL(clock_nanosleep)(clock, flags, until, left);
}

int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    struct timespec moved;
    return REAL(pthread_cond_timedwait)(cond, mutex, real_time(until, &moved));
}

int pthread_cond_clockwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex, clockid_t clock,
                           const struct timespec *restrict until) {
    struct timespec moved;
    return REAL(pthread_cond_clockwait)(cond, mutex, clock, is_wall(clock) ? real_time(until, &moved) : until);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
    struct timespec moved;
    return REAL(sem_timedwait)(semaphore, real_time(until, &moved));
}

int sem_clockwait(sem_t *restrict semaphore, clockid_t clock, const struct timespec *restrict until) {
    struct timespec moved;
    return REAL(sem_clockwait)(semaphore, clock, is_wall(clock) ? real_time(until, &moved) : until);
}

long syscall(long number, ...) {
    static long (*real)(long, ...);
    long arguments[6];
    struct timespec moved;
    va_list list;
    va_start(list, number);
    for (int index = 0; index < 6; index++) arguments[index] = va_arg(list, long);
    va_end(list);
    if (!real) real = real_function("syscall");
    if (number == SYS_futex && (arguments[1] & FUTEX_CLOCK_REALTIME))
        arguments[3] = (long)real_time((const struct timespec *)arguments[3], &moved);
    return real(number, arguments[0], arguments[1], arguments[2], arguments[3], arguments[4], arguments[5]);
}
