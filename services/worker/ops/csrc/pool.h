/* Threads that help a kernel when they can, and are never waited for when they cannot. */
#ifndef GLM_POOL_H
#define GLM_POOL_H

#include <stdint.h>

/* Part of a kernel: items `first` to `last` of its work. */
typedef void (*range_fn)(const void *context, int64_t first, int64_t last);

/* Use this many threads, the caller included; threads are made on first need and kept. */
int glm_set_num_threads(int64_t count);

/* Threads in use, the caller included. */
int64_t glm_num_threads(void);

/* Run `body` over all items in chunks; returns when every item is done. One caller at a time. */
void glm_run(int64_t count, int64_t chunk, range_fn body, const void *context);

#endif
