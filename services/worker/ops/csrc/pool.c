/* The pool's law: the caller can finish a job alone.
 *
 * A job is a range of items handed out in chunks. Helpers take chunks while the job is open; a
 * helper that has not begun when the caller runs out of chunks finds the job closed and leaves. So
 * a helper without a core costs nothing, where a barrier that every thread must reach costs a time
 * slice of whoever holds the core. Each chunk is computed whole by one thread, hence results do not
 * depend on the number of threads.
 */
#define _GNU_SOURCE
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

enum {
    MAX_HELPERS = 63,
    POLLS = 80,   /* looks for a new job before a helper sleeps: about 40 us on an idle core */
    PAUSES = 16,  /* idle instructions between two looks */
};

static struct {
    pthread_mutex_t lock;
    pthread_cond_t wake;
    atomic_int num_sleepers, num_inside, limit; /* limit: helpers that may take part */
    int num_helpers;
    _Atomic uint64_t open; /* number of the open job, 0 for none */
    uint64_t num_jobs;
    range_fn body;
    const void *context;
    int64_t count, chunk;
    _Atomic int64_t next;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

static void pause_briefly(void) {
    for (int i = 0; i < PAUSES; i++)
#if defined(__x86_64__)
        __builtin_ia32_pause();
#else
        __asm__ volatile("" ::: "memory");
#endif
}

static void take_chunks(void) {
    int64_t first;
    while ((first = atomic_fetch_add(&pool.next, pool.chunk)) < pool.count) {
        int64_t last = first + pool.chunk;
        pool.body(pool.context, first, last < pool.count ? last : pool.count);
    }
}

/* Wait for a job other than `seen`: look a while, giving way to others, then sleep. */
static uint64_t await_job(uint64_t seen) {
    uint64_t job;
    for (int poll = 0; poll < POLLS; poll++) {
        job = atomic_load(&pool.open);
        if (job && job != seen) return job;
        pause_briefly();
        sched_yield();
    }
    pthread_mutex_lock(&pool.lock);
    atomic_fetch_add(&pool.num_sleepers, 1);
    while (!(job = atomic_load(&pool.open)) || job == seen)
        pthread_cond_wait(&pool.wake, &pool.lock);
    atomic_fetch_sub(&pool.num_sleepers, 1);
    pthread_mutex_unlock(&pool.lock);
    return job;
}

static void *help(void *argument) {
    int index = (int)(intptr_t)argument;
    for (uint64_t job = 0;;) {
        job = await_job(job);
        if (index >= atomic_load(&pool.limit)) continue;
        /* Enter, then look again: the caller closes the job first and counts those inside after. */
        atomic_fetch_add(&pool.num_inside, 1);
        if (atomic_load(&pool.open) == job) take_chunks();
        atomic_fetch_sub(&pool.num_inside, 1);
    }
    return NULL;
}

int glm_set_num_threads(int64_t count) {
    int wanted = count < 1 ? 0 : (int)(count - 1 < MAX_HELPERS ? count - 1 : MAX_HELPERS);
    while (pool.num_helpers < wanted) {
        pthread_t thread;
        void *index = (void *)(intptr_t)pool.num_helpers;
        if (pthread_create(&thread, NULL, help, index)) return 1;
        pthread_detach(thread);
        pool.num_helpers++;
    }
    atomic_store(&pool.limit, wanted);
    return 0;
}

int64_t glm_num_threads(void) { return atomic_load(&pool.limit) + 1; }

void glm_run(int64_t count, int64_t chunk, range_fn body, const void *context) {
    if (count <= chunk || atomic_load(&pool.limit) == 0) {
        if (count > 0) body(context, 0, count);
        return;
    }
    pool.body = body;
    pool.context = context;
    pool.count = count;
    pool.chunk = chunk;
    atomic_store(&pool.next, 0);
    atomic_store(&pool.open, ++pool.num_jobs);
    if (atomic_load(&pool.num_sleepers) > 0) {
        pthread_mutex_lock(&pool.lock);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.lock);
    }
    take_chunks();
    atomic_store(&pool.open, 0);
    for (int poll = 0; atomic_load(&pool.num_inside) > 0; poll++) {
        pause_briefly();
        if (poll > POLLS) sched_yield();
    }
}
