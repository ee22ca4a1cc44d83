/* Attention of each token over its selected positions, on the cached latent rows themselves.
 *
 * Keys are taken TILE at a time: scores, running softmax, weighted sum; so a row is read from
 * memory once. Heads are taken DOT at a time.
 */
#include "dot.h"
#include "pairs.h"
#include "paged.h"

enum { LATENT = 512, ROTARY = 64, TILE = 32, PARALLEL_ROWS = 512 };

typedef struct {
    const elem_t *latent[TILE], *rope[TILE];
    int count; /* valid rows; the rest repeat the last one and weigh nothing */
} keys_t;

/* Running state of DOT heads. */
typedef struct {
    float largest[DOT], total[DOT];
    float sum[DOT][LATENT] __attribute__((aligned(64))); /* in the order of accumulate() */
} state_t;

/* Ask for DOT rows that the next tile will read: rows lie apart, so the hardware does not guess. */
ALWAYS_INLINE void fetch_rows(const keys_t *keys, int from) {
    enum { LINE = 64 / sizeof(elem_t) };
    for (int k = from; k < from + DOT && k < keys->count; k++) {
        for (int at = 0; at < LATENT; at += LINE) __builtin_prefetch(keys->latent[k] + at, 0, 2);
        for (int at = 0; at < ROTARY; at += LINE) __builtin_prefetch(keys->rope[k] + at, 0, 2);
    }
}

/* scores[i][k] for DOT heads and a tile. */
static void score_tile(const elem_t *const query[DOT], const elem_t *const rope[DOT],
                       const keys_t *keys, const keys_t *next, float scale,
                       float scores[DOT][TILE]) {
    for (int k = 0; k < keys->count; k += DOT) {
        fetch_rows(next, k);
        lanes_t sums[16];
        float totals[16];
        dot_clear(sums);
        dot_add(sums, query, keys->latent + k, LATENT);
        dot_add(sums, rope, keys->rope + k, ROTARY);
        dot_total(sums, totals);
        for (int i = 0; i < DOT; i++)
            for (int j = 0; j < DOT; j++) scores[i][k + j] = totals[i * DOT + j] * scale;
    }
}

#if GLM_AVX512 && defined(ELEM_BF16)
/* Weights are rounded to bf16 (the totals use the rounded values) and two rows are taken at once.
 * `sum` keeps the order of interleave(). */
ALWAYS_INLINE void accumulate(state_t *state, const keys_t *keys, float weights[DOT][TILE]) {
    int32_t pairs[DOT][TILE / 2];
    int count = (keys->count + 1) / 2;
    for (int i = 0; i < DOT; i++) {
        __m512 front = _mm512_loadu_ps(weights[i]), back = _mm512_loadu_ps(weights[i] + 16);
        _mm512_storeu_si512(pairs[i], (__m512i)_mm512_cvtne2ps_pbh(back, front));
    }
    for (int at = 0; at < LATENT; at += 64) {
        __m512 sums[DOT][4];
        for (int i = 0; i < DOT; i++)
            for (int c = 0; c < 4; c++) sums[i][c] = _mm512_load_ps(state->sum[i] + at + 16 * c);
        for (int k = 0; k < count; k++) {
            const elem_t *first = keys->latent[2 * k] + at, *second = keys->latent[2 * k + 1] + at;
            __m512i a = _mm512_loadu_si512(first), b = _mm512_loadu_si512(second);
            __m512i c = _mm512_loadu_si512(first + 32), d = _mm512_loadu_si512(second + 32);
            __m512bh value[4];
            interleave(a, b, value);
            interleave(c, d, value + 2);
            for (int i = 0; i < DOT; i++) {
                __m512bh weight = (__m512bh)_mm512_set1_epi32(pairs[i][k]);
                for (int j = 0; j < 4; j++)
                    sums[i][j] = _mm512_dpbf16_ps(sums[i][j], weight, value[j]);
            }
        }
        for (int i = 0; i < DOT; i++)
            for (int c = 0; c < 4; c++) _mm512_store_ps(state->sum[i] + at + 16 * c, sums[i][c]);
    }
}

ALWAYS_INLINE float kept_weight(float weight) { return to_float(from_float(weight)); }

ALWAYS_INLINE void finish(const float *sum, float factor, elem_t *out) {
    __m512 factors = _mm512_set1_ps(factor);
    for (int at = 0; at < LATENT; at += 32)
        store_pair(_mm512_mul_ps(_mm512_load_ps(sum + at), factors),
                   _mm512_mul_ps(_mm512_load_ps(sum + at + 16), factors), out + at, ~0u);
}
#else
ALWAYS_INLINE void accumulate(state_t *state, const keys_t *keys, float weights[DOT][TILE]) {
    for (int k = 0; k < keys->count; k++) {
        const elem_t *row = keys->latent[k];
        for (int i = 0; i < DOT; i++) {
            float weight = weights[i][k];
#pragma omp simd
            for (int at = 0; at < LATENT; at++) state->sum[i][at] += weight * to_float(row[at]);
        }
    }
}

ALWAYS_INLINE float kept_weight(float weight) { return weight; }

ALWAYS_INLINE void finish(const float *sum, float factor, elem_t *out) {
    for (int at = 0; at < LATENT; at++) out[at] = from_float(sum[at] * factor);
}
#endif

/* Turn scores into weights relative to the largest score so far; rescale what was summed before. */
static void weigh_tile(state_t *state, int count, float scores[DOT][TILE]) {
    for (int i = 0; i < DOT; i++) {
        float largest = state->largest[i];
        for (int k = 0; k < count; k++) largest = scores[i][k] > largest ? scores[i][k] : largest;
        if (largest > state->largest[i]) {
            /* The first tile rescales zeros, so that the clamped exp(-inf) does no harm. */
            float factor = fast_exp(state->largest[i] - largest);
            state->total[i] *= factor;
            for (int at = 0; at < LATENT; at++) state->sum[i][at] *= factor;
            state->largest[i] = largest;
        }
        float total = 0.0f;
        for (int k = 0; k < TILE; k++) {
            float weight = k < count ? kept_weight(fast_exp(scores[i][k] - largest)) : 0.0f;
            scores[i][k] = weight;
            total += weight;
        }
        state->total[i] += total;
    }
}

typedef struct {
    paged_t paged;
    const elem_t *query, *query_rope, *latent, *rope;
    const int32_t *positions;
    int64_t heads, width, is_causal;
    float scale;
    elem_t *out;
} attention_t;

/* A walk along the position list of one token. */
typedef struct {
    const int32_t *table, *positions;
    int64_t at, end, limit;
} walk_t;

static walk_t walk_of(const paged_t *p, const attention_t *a, int64_t token) {
    walk_t walk = {0};
    int64_t sequence = token < p->tokens ? sequence_of(p, token) : -1;
    if (sequence < 0) return walk;
    walk.table = p->blocks + sequence * p->max_blocks;
    walk.positions = a->positions + token * a->width;
    walk.limit = a->is_causal ? causal_limit(p, sequence, token) : p->lens[sequence];
    walk.end = a->width < walk.limit ? a->width : walk.limit;
    return walk;
}

/* The next TILE positions of a walk at most; none when the list has ended. */
static void next_tile(const attention_t *a, walk_t *walk, keys_t *keys) {
    keys->count = 0;
    while (walk->at < walk->end && keys->count < TILE) {
        int32_t position = walk->positions[walk->at++];
        if (position < 0) walk->end = 0;
        if (position < 0 || position >= walk->limit) continue;
        int64_t row = row_of(walk->table, (uint32_t)position);
        keys->latent[keys->count] = a->latent + row * LATENT;
        keys->rope[keys->count++] = a->rope + row * ROTARY;
    }
    for (int k = keys->count; k > 0 && k % DOT; k++) {
        keys->latent[k] = keys->latent[keys->count - 1];
        keys->rope[k] = keys->rope[keys->count - 1];
    }
}

/* One token, heads `head` to `head + DOT`. */
static void attend(const paged_t *p, const attention_t *a, int64_t token, int64_t head) {
    int64_t heads = a->heads - head < DOT ? a->heads - head : DOT;
    const elem_t *query[DOT], *rope[DOT];
    for (int i = 0; i < DOT; i++) {
        int64_t row = token * a->heads + head + (i < heads ? i : heads - 1);
        query[i] = a->query + row * LATENT;
        rope[i] = a->query_rope + row * ROTARY;
    }
    state_t state;
    memset(&state, 0, sizeof state);
    for (int i = 0; i < DOT; i++) state.largest[i] = -INFINITY;
    walk_t walk = walk_of(p, a, token);
    keys_t tiles[2]; /* the one at work and the one being fetched */
    next_tile(a, &walk, &tiles[0]);
    for (int turn = 0; tiles[turn].count > 0; turn ^= 1) {
        float scores[DOT][TILE] __attribute__((aligned(64)));
        keys_t *keys = &tiles[turn], *next = &tiles[turn ^ 1], first;
        const keys_t *fetched = next;
        next_tile(a, &walk, next);
        if (next->count == 0) { /* the token after this one is likely next on this thread */
            walk_t after = walk_of(p, a, token + 1);
            next_tile(a, &after, &first);
            fetched = &first;
        }
        score_tile(query, rope, keys, fetched, a->scale, scores);
        weigh_tile(&state, keys->count, scores);
        accumulate(&state, keys, scores);
    }
    elem_t *out = a->out + (token * a->heads + head) * LATENT;
    for (int64_t i = 0; i < heads; i++) {
        float factor = state.total[i] > 0.0f ? 1.0f / state.total[i] : 0.0f;
        finish(state.sum[i], factor, out + i * LATENT);
    }
}

static void attend_items(const void *context, int64_t first, int64_t last) {
    const attention_t *a = context;
    int64_t groups = (a->heads + DOT - 1) / DOT;
    for (int64_t item = first; item < last; item++)
        attend(&a->paged, a, item / groups, item % groups * DOT);
}

int KERNEL(sparse_attention)(int64_t tokens, int64_t heads, int64_t sequences, int64_t max_blocks,
                             int64_t num_blocks, int64_t width, int64_t is_causal, double scale,
                             const elem_t *query, const elem_t *query_rope, const elem_t *latent,
                             const elem_t *rope, const int32_t *positions, const int32_t *ends,
                             const int32_t *lens, const int32_t *blocks, elem_t *out) {
    attention_t a = {{tokens, sequences, max_blocks, num_blocks, ends, lens, blocks},
                     query, query_rope, latent, rope, positions, heads, width, is_causal,
                     (float)scale, out};
    if (!is_in_range(&a.paged)) return OUT_OF_RANGE;
    int64_t items = tokens * ((heads + DOT - 1) / DOT), rows_read = 0;
    for (int64_t s = 0, start = 0; s < sequences; start = ends[s++])
        rows_read += (lens[s] < width ? lens[s] : width) * (ends[s] - start);
    /* Neighbours stay on one thread where there are many: it has fetched the next one's rows. */
    int64_t chunk = rows_read < PARALLEL_ROWS ? items : (items < 32 ? 1 : 4);
    glm_run(items, chunk, attend_items, &a);
    return OK;
}
