/* Attention over packed 8-bit rows: 512 int8 latents, 64 bf16 rotary lanes, 4 float32 scales.
 *
 * A row is brought back to elements once per token, for all heads that one thread works on, in the
 * tile that the heads then read; from memory comes 57 % of what a bf16 row takes.
 */
#include "attend.h"

enum {
    SCALE_TILE = 128, /* latents under one scale */
    ROPE_AT = LATENT,
    SCALES_AT = ROPE_AT + ROTARY * 2,
    PACKED = SCALES_AT + LATENT / SCALE_TILE * 4,
    MAX_GROUPS = 32,  /* of DOT heads */
    FEW_TOKENS = 8,   /* below, a token's heads may go to several threads */
    FEW_GROUPS = 4,   /* groups of one such part: a row is unpacked once for so many */
};

typedef struct {
    lists_t lists;
    const elem_t *query;
    const int8_t *cache;
    int64_t groups_per_part, parts;
    elem_t *out;
} packed_attention_t;

/* One tile of rows, as elements. */
typedef struct {
    elem_t latent[TILE][LATENT] __attribute__((aligned(64)));
    elem_t rope[TILE][ROTARY] __attribute__((aligned(64)));
} unpacked_t;

ALWAYS_INLINE void fetch_packed(const int8_t *row) {
    for (int at = 0; at < PACKED; at += 64) __builtin_prefetch(row + at, 0, 2);
}

#if GLM_AVX512
ALWAYS_INLINE __m512 from_eights(const int8_t *x) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)x)));
}

ALWAYS_INLINE void unpack_latent(const int8_t *row, const float *scales, elem_t *latent) {
    for (int tile = 0; tile < LATENT / SCALE_TILE; tile++) {
        __m512 scale = _mm512_set1_ps(scales[tile]);
        for (int at = tile * SCALE_TILE; at < (tile + 1) * SCALE_TILE; at += 32) {
            __m512 front = _mm512_mul_ps(from_eights(row + at), scale);
            __m512 back = _mm512_mul_ps(from_eights(row + at + 16), scale);
#ifdef ELEM_BF16
            _mm512_store_si512(latent + at, (__m512i)_mm512_cvtne2ps_pbh(back, front));
#else
            _mm512_store_ps(latent + at, front);
            _mm512_store_ps(latent + at + 16, back);
#endif
        }
    }
}
#else
ALWAYS_INLINE void unpack_latent(const int8_t *row, const float *scales, elem_t *latent) {
    for (int tile = 0; tile < LATENT / SCALE_TILE; tile++) {
        float scale = scales[tile];
#pragma omp simd
        for (int at = tile * SCALE_TILE; at < (tile + 1) * SCALE_TILE; at++)
            latent[at] = from_float((float)row[at] * scale);
    }
}
#endif

#ifdef ELEM_BF16
ALWAYS_INLINE const elem_t *unpack_rope(const int8_t *row, elem_t *space) {
    memcpy(space, row + ROPE_AT, ROTARY * sizeof(elem_t));
    return space;
}
#else
ALWAYS_INLINE const elem_t *unpack_rope(const int8_t *row, elem_t *space) {
    for (int i = 0; i < ROTARY; i++) {
        uint16_t half;
        memcpy(&half, row + ROPE_AT + 2 * i, sizeof half);
        union { uint32_t bits; float value; } wide = {.bits = (uint32_t)half << 16};
        space[i] = wide.value;
    }
    return space;
}
#endif

/* Unpack `count` rows, and ask for the rows of the next tile on the way. */
static void unpack_tile(const int8_t *cache, const int64_t *rows, int count, const int64_t *next,
                        int num_next, unpacked_t *space, keys_t *keys) {
    keys->count = count;
    for (int k = 0; k < count; k++) {
        if (k < num_next) fetch_packed(cache + next[k] * PACKED);
        const int8_t *row = cache + rows[k] * PACKED;
        float scales[LATENT / SCALE_TILE];
        memcpy(scales, row + SCALES_AT, sizeof scales);
        unpack_latent(row, scales, space->latent[k]);
        keys->latent[k] = space->latent[k];
        keys->rope[k] = unpack_rope(row, space->rope[k]);
    }
    for (int k = count; k % DOT; k++) {
        keys->latent[k] = keys->latent[count - 1];
        keys->rope[k] = keys->rope[count - 1];
    }
}

/* DOT heads of one token over one tile. */
static void attend_tile(const packed_attention_t *a, int64_t token, int64_t head,
                        const keys_t *keys, state_t *state) {
    enum { QUERY = LATENT + ROTARY };
    int64_t heads = a->lists.heads, last = token * heads + heads - 1;
    const elem_t *query[DOT], *rope[DOT];
    for (int i = 0; i < DOT; i++) {
        int64_t row = token * heads + head + i;
        query[i] = a->query + (row < last ? row : last) * QUERY;
        rope[i] = query[i] + LATENT;
    }
    float scores[DOT][TILE] __attribute__((aligned(64))), factors[DOT];
    elem_t weights[DOT][TILE] __attribute__((aligned(64)));
    for (int k = 0; k < keys->count; k += DOT)
        score_keys_of_tile(query, rope, keys, k, a->lists.scale, NULL, scores);
    weigh_tile(&state->softmax, keys->count, scores, factors, weights);
    accumulate(state, keys, NULL, factors, weights);
}

/* One token, `groups` times DOT heads from `head`. */
static void attend_packed(const packed_attention_t *a, int64_t token, int64_t head, int64_t groups) {
    state_t states[MAX_GROUPS];
    unpacked_t space;
    keys_t keys;
    int64_t rows[2][TILE]; /* of the tile at work, and of the one being fetched */
    int counts[2];
    for (int64_t g = 0; g < groups; g++) begin(&states[g]);
    walk_t walk = walk_of(&a->lists, token);
    counts[0] = next_rows(&walk, rows[0]);
    for (int turn = 0; counts[turn] > 0; turn ^= 1) {
        int64_t after_rows[TILE], *fetched = rows[turn ^ 1];
        int num_fetched = counts[turn ^ 1] = next_rows(&walk, rows[turn ^ 1]);
        if (num_fetched == 0) { /* the token after this one is likely next on this thread */
            walk_t after = walk_of(&a->lists, token + 1);
            num_fetched = next_rows(&after, fetched = after_rows);
        }
        unpack_tile(a->cache, rows[turn], counts[turn], fetched, num_fetched, &space, &keys);
        for (int64_t g = 0; g < groups; g++)
            attend_tile(a, token, head + g * DOT, &keys, &states[g]);
    }
    elem_t *out = a->out + (token * a->lists.heads + head) * LATENT;
    for (int64_t g = 0; g < groups; g++)
        write_heads(&states[g], a->lists.heads - head - g * DOT, out + g * DOT * LATENT);
}

static void attend_packed_items(const void *context, int64_t first, int64_t last) {
    const packed_attention_t *a = context;
    int64_t all = (a->lists.heads + DOT - 1) / DOT;
    for (int64_t item = first; item < last; item++) {
        int64_t group = item % a->parts * a->groups_per_part, left = all - group;
        attend_packed(a, item / a->parts, group * DOT,
                      left < a->groups_per_part ? left : a->groups_per_part);
    }
}

int KERNEL(packed_attention)(int64_t tokens, int64_t heads, int64_t sequences, int64_t max_blocks,
                             int64_t num_blocks, int64_t width, int64_t is_causal, double scale,
                             const elem_t *query, const int8_t *cache, const int32_t *positions,
                             const int32_t *ends, const int32_t *lens, const int32_t *blocks,
                             elem_t *out) {
    int64_t groups = (heads + DOT - 1) / DOT;
    int64_t per_part = tokens < FEW_TOKENS && groups > FEW_GROUPS ? FEW_GROUPS : groups;
    packed_attention_t a = {{{tokens, sequences, max_blocks, num_blocks, ends, lens, blocks},
                             positions, heads, width, is_causal, (float)scale},
                            query, cache, per_part, (groups + per_part - 1) / per_part, out};
    if (groups > MAX_GROUPS || !is_in_range(&a.lists.paged)) return OUT_OF_RANGE;
    int64_t items = tokens * a.parts, few = count_rows_read(&a.lists) < PARALLEL_ROWS;
    glm_run(items, few ? items : (items < 32 ? 1 : 4), attend_packed_items, &a);
    return OK;
}
