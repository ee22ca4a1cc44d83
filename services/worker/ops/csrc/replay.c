/* A recorded step: kernels with their arguments, called one after the other without Python.
 *
 * Kernels take whole numbers, then fractions, then addresses. So a kernel's type is three counts,
 * and for each of them there is one function here that calls through that type: the compiler, not
 * this file, knows in which registers a machine passes what.
 */
#include <stddef.h>
#include <stdint.h>
#include <time.h>

enum { MOST_WHOLE = 9, MOST_FRACTIONS = 2, MOST_ADDRESSES = 10 };

typedef union {
    int64_t whole;
    double fraction;
    void *address;
} argument_t;

typedef void (*kernel_t)(void);
typedef int (*call_t)(kernel_t kernel, const argument_t *arguments);

typedef struct {
    call_t call;
    kernel_t kernel;
    const argument_t *arguments;
} record_t;

/* Types and values of the first n arguments of a kind; each list but the last ends in a comma. */
#define I0_TYPES
#define I1_TYPES int64_t,
#define I2_TYPES I1_TYPES int64_t,
#define I3_TYPES I2_TYPES int64_t,
#define I4_TYPES I3_TYPES int64_t,
#define I5_TYPES I4_TYPES int64_t,
#define I6_TYPES I5_TYPES int64_t,
#define I7_TYPES I6_TYPES int64_t,
#define I8_TYPES I7_TYPES int64_t,
#define I9_TYPES I8_TYPES int64_t,
#define I0_VALUES
#define I1_VALUES a[0].whole,
#define I2_VALUES I1_VALUES a[1].whole,
#define I3_VALUES I2_VALUES a[2].whole,
#define I4_VALUES I3_VALUES a[3].whole,
#define I5_VALUES I4_VALUES a[4].whole,
#define I6_VALUES I5_VALUES a[5].whole,
#define I7_VALUES I6_VALUES a[6].whole,
#define I8_VALUES I7_VALUES a[7].whole,
#define I9_VALUES I8_VALUES a[8].whole,
#define F0_TYPES
#define F1_TYPES double,
#define F2_TYPES F1_TYPES double,
#define F0_VALUES(at)
#define F1_VALUES(at) a[at].fraction,
#define F2_VALUES(at) F1_VALUES(at) a[at + 1].fraction,
#define P1_TYPES void *
#define P2_TYPES P1_TYPES, void *
#define P3_TYPES P2_TYPES, void *
#define P4_TYPES P3_TYPES, void *
#define P5_TYPES P4_TYPES, void *
#define P6_TYPES P5_TYPES, void *
#define P7_TYPES P6_TYPES, void *
#define P8_TYPES P7_TYPES, void *
#define P9_TYPES P8_TYPES, void *
#define P10_TYPES P9_TYPES, void *
#define P1_VALUES(at) a[at].address
#define P2_VALUES(at) P1_VALUES(at), a[at + 1].address
#define P3_VALUES(at) P2_VALUES(at), a[at + 2].address
#define P4_VALUES(at) P3_VALUES(at), a[at + 3].address
#define P5_VALUES(at) P4_VALUES(at), a[at + 4].address
#define P6_VALUES(at) P5_VALUES(at), a[at + 5].address
#define P7_VALUES(at) P6_VALUES(at), a[at + 6].address
#define P8_VALUES(at) P7_VALUES(at), a[at + 7].address
#define P9_VALUES(at) P8_VALUES(at), a[at + 8].address
#define P10_VALUES(at) P9_VALUES(at), a[at + 9].address

#define DEFINE(i, f, p) \
    static int call_##i##_##f##_##p(kernel_t kernel, const argument_t *a) { \
        return ((int (*)(I##i##_TYPES F##f##_TYPES P##p##_TYPES))kernel)( \
            I##i##_VALUES F##f##_VALUES(i) P##p##_VALUES(i + f)); \
    }
#define NAME(i, f, p) call_##i##_##f##_##p,
#define EACH_ADDRESSES(with, i, f) \
    with(i, f, 1) with(i, f, 2) with(i, f, 3) with(i, f, 4) with(i, f, 5) \
    with(i, f, 6) with(i, f, 7) with(i, f, 8) with(i, f, 9) with(i, f, 10)
#define EACH_FRACTIONS(with, i) \
    EACH_ADDRESSES(with, i, 0) EACH_ADDRESSES(with, i, 1) EACH_ADDRESSES(with, i, 2)
#define EACH(with) \
    EACH_FRACTIONS(with, 0) EACH_FRACTIONS(with, 1) EACH_FRACTIONS(with, 2) \
    EACH_FRACTIONS(with, 3) EACH_FRACTIONS(with, 4) EACH_FRACTIONS(with, 5) \
    EACH_FRACTIONS(with, 6) EACH_FRACTIONS(with, 7) EACH_FRACTIONS(with, 8) \
    EACH_FRACTIONS(with, 9)

EACH(DEFINE)

static const call_t calls[] = {EACH(NAME)};

/* The function that calls kernels with so many arguments of each kind; NULL where there is none. */
call_t glm_call_of(int64_t whole, int64_t fractions, int64_t addresses) {
    int is_known = whole >= 0 && whole <= MOST_WHOLE && fractions >= 0 &&
                   fractions <= MOST_FRACTIONS && addresses >= 1 && addresses <= MOST_ADDRESSES;
    if (!is_known) return NULL;
    return calls[(whole * (MOST_FRACTIONS + 1) + fractions) * MOST_ADDRESSES + addresses - 1];
}

/* Call each kernel in order. Returns 0, or the status of the one that failed; `*at` is its place. */
int glm_replay(int64_t count, const record_t *records, int64_t *at) {
    for (int64_t i = 0; i < count; i++) {
        int status = records[i].call(records[i].kernel, records[i].arguments);
        if (status) {
            *at = i;
            return status;
        }
    }
    return 0;
}

/* The same, adding the time of each to `seconds` [count]. */
int glm_replay_timed(int64_t count, const record_t *records, int64_t *at, double *seconds) {
    struct timespec before, after;
    clock_gettime(CLOCK_MONOTONIC, &before);
    for (int64_t i = 0; i < count; i++, before = after) {
        int status = glm_replay(1, records + i, at);
        clock_gettime(CLOCK_MONOTONIC, &after);
        if (status) {
            *at = i;
            return status;
        }
        seconds[i] += (double)(after.tv_sec - before.tv_sec) +
                      1e-9 * (double)(after.tv_nsec - before.tv_nsec);
    }
    return 0;
}
