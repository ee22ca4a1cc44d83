"""How fast this machine reads memory: what the rate of a memory-bound step is held against.

A few lines of C that read a block of large pages from end to end, each thread a part of its own,
and add up what they see. The compiler is the one that builds the kernels.
"""

import ctypes
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

_SOURCE = """
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { MOST_THREADS = 256, LINE = 64, TURN = 4 * LINE, AHEAD = 1024 };
typedef int64_t lanes_t __attribute__((vector_size(LINE)));
typedef struct {
    const char *from;
    int64_t bytes;
    lanes_t total;
} part_t;

static void *read_part(void *argument) {
    part_t *part = argument;
    lanes_t totals[4] = {{0}};
    for (int64_t at = 0; at + TURN <= part->bytes; at += TURN)
        for (int i = 0; i < 4; i++) {
            const char *line = part->from + at + i * LINE;
            totals[i] += *(const lanes_t *)line;
            __builtin_prefetch(line + AHEAD, 0, 2);
        }
    part->total = totals[0] + totals[1] + totals[2] + totals[3];
    return 0;
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Least seconds of reading `bytes`; below 0 where there is no memory or no thread. */
double stream(int64_t bytes, int64_t threads, int64_t rounds) {
    pthread_t ids[MOST_THREADS];
    part_t parts[MOST_THREADS];
    double least = 1e9;
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS;
    char *block = mmap(0, (size_t)bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (block == MAP_FAILED || threads < 1 || threads > MOST_THREADS) return -1;
    madvise(block, (size_t)bytes, MADV_HUGEPAGE);
    memset(block, 1, (size_t)bytes);
    for (int64_t round = 0; round < rounds; round++) {
        double started = seconds();
        for (int64_t i = 0; i < threads; i++) {
            int64_t share = bytes / threads / TURN * TURN;
            parts[i] = (part_t){block + i * share, share, {0}};
            if (i && pthread_create(&ids[i], 0, read_part, &parts[i])) return -1;
        }
        read_part(&parts[0]);
        for (int64_t i = 1; i < threads; i++) pthread_join(ids[i], 0);
        double took = seconds() - started;
        least = took < least ? took : least;
    }
    munmap(block, (size_t)bytes);
    return least;
}
"""
_OPTIONS = ("-std=gnu11", "-O3", "-march=native", "-shared", "-fPIC", "-pthread", "-Wno-psabi")


def measure_stream(num_bytes: int, threads: int, rounds: int) -> float:
    """Bytes per second that so many threads read, best of the rounds."""
    compiler = shutil.which(os.environ.get("CC", "gcc"))
    if compiler is None:
        raise RuntimeError("no C compiler: install gcc, or set CC")
    with tempfile.TemporaryDirectory() as name:
        source, library = Path(name) / "stream.c", Path(name) / "stream.so"
        source.write_text(_SOURCE)
        subprocess.run([compiler, *_OPTIONS, str(source), "-o", str(library)], check=True)
        stream = ctypes.CDLL(str(library)).stream
        stream.argtypes = [ctypes.c_int64] * 3
        stream.restype = ctypes.c_double
        seconds = float(stream(num_bytes, threads, rounds))
    if seconds <= 0:
        raise RuntimeError(f"could not read {num_bytes} bytes with {threads} threads")
    return num_bytes / seconds
