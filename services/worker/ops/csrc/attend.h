/* Attention over listed positions, a tile of keys at a time: scores, running softmax, weighted sum.
 *
 * Heads are taken DOT at a time. What a key is made of is the caller's: it fills in `keys_t`. A tile
 * is the keys at the same places of a list for every token, so what a token gives does not depend on
 * who shares its keys.
 */
#ifndef GLM_ATTEND_H
#define GLM_ATTEND_H

#include "dot.h"
#include "pairs.h"
#include "paged.h"
#include "vector.h"

enum { LATENT = 512, ROTARY = 64, TILE = 64, PARALLEL_ROWS = 512 };

typedef struct {
    const elem_t *latent[TILE], *rope[TILE];
    int count; /* valid rows; the rest repeat one of them and weigh nothing */
} keys_t;

/* Rows to ask memory for while a tile is worked on, as many as the tile has keys. A machine drops
 * requests that come in bursts, so they are spread evenly: the first half of the rows while the tile
 * is scored, the other half while it is summed up. */
enum {
    LINE = 64,
    LATENT_BYTES = LATENT * sizeof(elem_t),
    PARTS = 4, /* of a row, while it is scored */
#if GLM_AVX512 && defined(ELEM_BF16)
    SCORED_BYTES = LATENT_BYTES / 2, /* asked for in each part: half a row for each key */
    SUM_STEP = 64,                   /* columns that are summed up at once */
    SUMMED_BYTES = LATENT_BYTES / (LATENT / SUM_STEP),
#else
    SCORED_BYTES = LATENT_BYTES,
#endif
    SCORED_PARTS = LATENT_BYTES / SCORED_BYTES, /* parts that ask for one row */
};

ALWAYS_INLINE void fetch(const elem_t *row, int from, int bytes) {
    const char *start = (const char *)row + from;
    for (int at = 0; at < bytes; at += LINE) __builtin_prefetch(start + at, 0, 2);
}

/* What is asked for in one part of scoring the keys from `k`. */
ALWAYS_INLINE void fetch_scoring(const keys_t *asked, int k, int part) {
    const int row = (k + part) / SCORED_PARTS;
    fetch(asked->latent[row], (k + part) % SCORED_PARTS * SCORED_BYTES, SCORED_BYTES);
    fetch(asked->rope[k + part], 0, ROTARY * sizeof(elem_t));
}

/* Running softmax of DOT heads: the largest score and the sum of weights relative to it. */
typedef struct {
    float largest[DOT], total[DOT];
} softmax_t;

/* Running state of DOT heads. */
typedef struct {
    softmax_t softmax;
    float sum[DOT][LATENT] __attribute__((aligned(64))); /* in the order of accumulate() */
} state_t;

ALWAYS_INLINE void begin_softmax(softmax_t *softmax) {
    for (int i = 0; i < DOT; i++) softmax->largest[i] = -INFINITY, softmax->total[i] = 0.0f;
}

ALWAYS_INLINE void begin(state_t *state) {
    memset(state->sum, 0, sizeof state->sum);
    begin_softmax(&state->softmax);
}

/* scores[i][k] for DOT heads and the DOT keys from `k`. `asked`: rows to ask for, or NULL. Without
 * intrinsics a function of its own: two places that it was made part of might add up in different
 * orders. */
#if GLM_AVX512
ALWAYS_INLINE
#else
static __attribute__((noinline))
#endif
void score_keys_of_tile(const elem_t *const query[DOT], const elem_t *const rope[DOT],
                                      const keys_t *keys, int k, float scale, const keys_t *asked,
                                      float scores[DOT][TILE]) {
    lanes_t sums[16];
    dot_clear(sums);
    for (int part = 0; part < PARTS; part++) {
        const elem_t *queries[DOT], *rows[DOT];
        for (int i = 0; i < DOT; i++) {
            queries[i] = query[i] + part * (LATENT / PARTS);
            rows[i] = keys->latent[k + i] + part * (LATENT / PARTS);
        }
        if (asked) fetch_scoring(asked, k, part);
        dot_add(sums, queries, rows, LATENT / PARTS);
    }
    dot_add(sums, rope, keys->rope + k, ROTARY);
#if GLM_AVX512
    __m512 totals = _mm512_mul_ps(dot_reduce(sums), _mm512_set1_ps(scale));
    _mm_storeu_ps(scores[0] + k, _mm512_castps512_ps128(totals));
    _mm_storeu_ps(scores[1] + k, _mm512_extractf32x4_ps(totals, 1));
    _mm_storeu_ps(scores[2] + k, _mm512_extractf32x4_ps(totals, 2));
    _mm_storeu_ps(scores[3] + k, _mm512_extractf32x4_ps(totals, 3));
#else
    float totals[16];
    dot_total(sums, totals);
    for (int i = 0; i < DOT; i++)
        for (int j = 0; j < DOT; j++) scores[i][k + j] = totals[i * DOT + j] * scale;
#endif
}

#if GLM_AVX512 && defined(ELEM_BF16)
/* Weights are rounded to bf16 (the totals use the rounded values) and two rows are taken at once.
 * `sum` keeps the order of interleave(). `asked`: rows to ask for, or NULL. */
ALWAYS_INLINE void accumulate(state_t *state, const keys_t *keys, const keys_t *asked,
                              const float factors[DOT], const elem_t weights[DOT][TILE]) {
    const int count = (keys->count + 1) / 2, scored = (keys->count + DOT - 1) / DOT * DOT / 2;
    for (int at = 0; at < LATENT; at += SUM_STEP) {
        __m512 sums[DOT][4];
        for (int i = 0; i < DOT; i++)
            for (int c = 0; c < 4; c++)
                sums[i][c] = _mm512_mul_ps(_mm512_load_ps(state->sum[i] + at + 16 * c),
                                           _mm512_set1_ps(factors[i]));
        for (int k = 0; k < count; k++) {
            if (asked) fetch(asked->latent[scored + k], at / SUM_STEP * SUMMED_BYTES, SUMMED_BYTES);
            const elem_t *first = keys->latent[2 * k] + at, *second = keys->latent[2 * k + 1] + at;
            __m512i a = _mm512_loadu_si512(first), b = _mm512_loadu_si512(second);
            __m512i c = _mm512_loadu_si512(first + 32), d = _mm512_loadu_si512(second + 32);
            __m512bh value[4];
            interleave(a, b, value);
            interleave(c, d, value + 2);
            for (int i = 0; i < DOT; i++) {
                int32_t pair;
                memcpy(&pair, weights[i] + 2 * k, sizeof pair);
                __m512bh weight = (__m512bh)_mm512_set1_epi32(pair);
                for (int j = 0; j < 4; j++)
                    sums[i][j] = _mm512_dpbf16_ps(sums[i][j], weight, value[j]);
            }
        }
        for (int i = 0; i < DOT; i++)
            for (int c = 0; c < 4; c++) _mm512_store_ps(state->sum[i] + at + 16 * c, sums[i][c]);
    }
}

ALWAYS_INLINE void finish(const float *sum, float factor, elem_t *out) {
    __m512 factors = _mm512_set1_ps(factor);
    for (int at = 0; at < LATENT; at += 32)
        store_pair(_mm512_mul_ps(_mm512_load_ps(sum + at), factors),
                   _mm512_mul_ps(_mm512_load_ps(sum + at + 16), factors), out + at, ~0u);
}
#else
ALWAYS_INLINE void accumulate(state_t *state, const keys_t *keys, const keys_t *asked,
                              const float factors[DOT], const elem_t weights[DOT][TILE]) {
    (void)asked; /* asked for already */
    for (int i = 0; i < DOT; i++)
        for (int at = 0; at < LATENT; at++) state->sum[i][at] *= factors[i];
    for (int k = 0; k < keys->count; k++) {
        const elem_t *row = keys->latent[k];
        for (int i = 0; i < DOT; i++) {
            float weight = to_float(weights[i][k]);
#pragma omp simd
            for (int at = 0; at < LATENT; at++) state->sum[i][at] += weight * to_float(row[at]);
        }
    }
}

ALWAYS_INLINE void finish(const float *sum, float factor, elem_t *out) {
    for (int at = 0; at < LATENT; at++) out[at] = from_float(sum[at] * factor);
}
#endif

#if GLM_AVX512
ALWAYS_INLINE float largest_of(const float *scores, int count, float largest) {
    __m512 most = _mm512_set1_ps(largest);
    for (int k = 0; k < count; k += 16) {
        __mmask16 mask = count - k < 16 ? (__mmask16)((1u << (count - k)) - 1u) : (__mmask16)~0u;
        most = _mm512_mask_max_ps(most, mask, _mm512_loadu_ps(scores + k), most);
    }
    return _mm512_reduce_max_ps(most);
}

ALWAYS_INLINE float weigh_row(const float *scores, int count, float largest, elem_t *weights) {
    __m512 total = _mm512_setzero_ps(), shift = _mm512_set1_ps(largest);
    for (int k = 0; k < count; k += 16) {
        __mmask16 mask = count - k < 16 ? (__mmask16)((1u << (count - k)) - 1u) : (__mmask16)~0u;
        __m512 x = _mm512_sub_ps(_mm512_loadu_ps(scores + k), shift);
        __m512 weight = _mm512_maskz_mov_ps(mask, fast_exps(x));
#ifdef ELEM_BF16
        __m256i kept = (__m256i)_mm512_cvtneps_pbh(weight);
        _mm256_storeu_si256((__m256i *)(weights + k), kept);
        weight = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(kept), 16));
#else
        _mm512_storeu_ps(weights + k, weight);
#endif
        total = _mm512_add_ps(total, weight);
    }
    return _mm512_reduce_add_ps(total);
}
#else
ALWAYS_INLINE float largest_of(const float *scores, int count, float largest) {
    for (int k = 0; k < count; k++) largest = scores[k] > largest ? scores[k] : largest;
    return largest;
}

ALWAYS_INLINE float weigh_row(const float *scores, int count, float largest, elem_t *weights) {
    float total = 0.0f;
#pragma omp simd reduction(+ : total)
    for (int k = 0; k < count; k++) {
        weights[k] = from_float(fast_exp(scores[k] - largest));
        total += to_float(weights[k]);
    }
    /* The partner of the last one. */
    for (int k = count; k < count + count % 2; k++) weights[k] = from_float(0.0f);
    return total;
}
#endif

/* Turn scores into weights relative to the largest score so far; factors[i] is what the sums so far
 * must be multiplied with. Behind the last weight of an odd number stands a zero. */
static __attribute__((noinline)) void weigh_tile(softmax_t *softmax, int count, const float scores[DOT][TILE],
                       float factors[DOT], elem_t weights[DOT][TILE]) {
    for (int i = 0; i < DOT; i++) {
        float largest = largest_of(scores[i], count, softmax->largest[i]);
        /* The first tile rescales zeros, so that the clamped exp(-inf) does no harm. */
        factors[i] = largest > softmax->largest[i] ? fast_exp(softmax->largest[i] - largest) : 1.0f;
        softmax->largest[i] = largest;
        float total = weigh_row(scores[i], count, largest, weights[i]);
        softmax->total[i] = softmax->total[i] * factors[i] + total;
    }
}

/* The position lists of a step: what each token attends to. */
typedef struct {
    paged_t paged;
    const int32_t *positions; /* [tokens, width] */
    int64_t heads, width, is_causal;
    float scale;
} lists_t;

/* A walk along the position list of one token. */
typedef struct {
    const int32_t *table, *positions;
    int64_t at, end, limit;
} walk_t;

static walk_t walk_of(const lists_t *l, int64_t token) {
    const paged_t *p = &l->paged;
    walk_t walk = {0};
    int64_t sequence = token < p->tokens ? sequence_of(p, token) : -1;
    if (sequence < 0) return walk;
    walk.table = p->blocks + sequence * p->max_blocks;
    walk.positions = l->positions + token * l->width;
    walk.limit = l->is_causal ? causal_limit(p, sequence, token) : p->lens[sequence];
    walk.end = l->width < walk.limit ? l->width : walk.limit;
    return walk;
}

/* The same where the next TILE positions follow each other in a block, as they do in lists of all
 * positions; returns whether they did. */
ALWAYS_INLINE int next_rows_of_block(walk_t *walk, int64_t rows[TILE]) {
    if (walk->end - walk->at < TILE) return 0;
    const int32_t *positions = walk->positions + walk->at, first = positions[0];
    if (first < 0 || first % BLOCK > BLOCK - TILE || first + TILE > walk->limit) return 0;
    int32_t differs = 0;
    for (int k = 0; k < TILE; k++) differs |= positions[k] ^ (first + k);
    if (differs) return 0;
    const int64_t row = row_of(walk->table, (uint32_t)first);
    for (int k = 0; k < TILE; k++) rows[k] = row + k;
    walk->at += TILE;
    return 1;
}

/* Cache rows of the next TILE positions of a walk at most; returns how many, 0 at the list's end. */
ALWAYS_INLINE int next_rows(walk_t *walk, int64_t rows[TILE]) {
    int count = 0;
    if (next_rows_of_block(walk, rows)) return TILE;
    while (walk->at < walk->end && count < TILE) {
        int32_t position = walk->positions[walk->at++];
        if (position < 0) walk->end = 0;
        if (position < 0 || position >= walk->limit) continue;
        rows[count++] = row_of(walk->table, (uint32_t)position);
    }
    return count;
}

/* Where to begin with several threads: rows of cache that the whole step reads. */
static int64_t count_rows_read(const lists_t *l) {
    const paged_t *p = &l->paged;
    int64_t total = 0;
    for (int64_t s = 0, start = 0; s < p->sequences; start = p->ends[s++])
        total += (p->lens[s] < l->width ? p->lens[s] : l->width) * (p->ends[s] - start);
    return total;
}

/* Write DOT heads, or as many as there are. */
ALWAYS_INLINE void write_heads(const state_t *state, int64_t heads, elem_t *out) {
    for (int64_t i = 0; i < heads && i < DOT; i++) {
        float total = state->softmax.total[i], factor = total > 0.0f ? 1.0f / total : 0.0f;
        finish(state->sum[i], factor, out + i * LATENT);
    }
}

#endif
