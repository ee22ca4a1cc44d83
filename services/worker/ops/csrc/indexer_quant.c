/* Selection of the best positions per token, on int8 keys with a float16 scale each.
 *
 * Rounds where the device does: a product, over 1024, to float16; a head's weight times its query's
 * scale to float16; the sum over heads and the key's scale in float32.
 */
#include "half.h"
#include "paged.h"
#include "select.h"

enum { QUANT_KEYS = 32, QUANT_HEADS = 4 }; /* at once */
_Static_assert(QUANT_KEYS <= PADDING, "whole groups of keys are scored, past the last one too");

/* The factor of a head: its weight times its query's scale. */
ALWAYS_INLINE float factor_of(half_t weight, half_t scale) {
    return round_half(half_to_float(weight) * half_to_float(scale));
}

#if GLM_AVX512 && defined(__AVX512VNNI__)
enum { WORDS = HEAD / 4 }; /* four int8 lanes to an int32 */

/* One token's queries, padded with heads that weigh nothing. */
typedef struct {
    int32_t rows[MAX_HEADS + QUANT_HEADS][WORDS];
    int32_t offsets[MAX_HEADS + QUANT_HEADS]; /* keys are read with 128 added: what takes it back */
    float factors[MAX_HEADS + QUANT_HEADS];
} queries_t;

static void read_queries(const int8_t *query, const half_t *weights, const half_t *scales,
                         int64_t heads, queries_t *q) {
    memset(q, 0, sizeof *q);
    memcpy(q->rows, query, (size_t)heads * HEAD);
    for (int64_t head = 0; head < heads; head++) {
        int32_t total = 0;
        for (int at = 0; at < HEAD; at++) total += query[head * HEAD + at];
        q->offsets[head] = -128 * total;
        q->factors[head] = factor_of(weights[head], scales[head]);
    }
}

/* Rows 0 to 15 of 16 words become words 0 to 15 of 16 rows. */
ALWAYS_INLINE void transpose(__m512i x[16]) {
    __m512i y[16];
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + 2 + j]);
            x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + 2 + j]);
        }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 8; j += 4) {
            y[i + 2 * j] = _mm512_shuffle_i32x4(x[i + 2 * j], x[i + 2 * j + 4], 0x88);
            y[i + 2 * j + 4] = _mm512_shuffle_i32x4(x[i + 2 * j], x[i + 2 * j + 4], 0xdd);
        }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 8; j += 4) {
            x[i + j] = _mm512_shuffle_i32x4(y[i + j], y[i + j + 8], 0x88);
            x[i + j + 8] = _mm512_shuffle_i32x4(y[i + j], y[i + j + 8], 0xdd);
        }
}

/* Word w of 16 keys in words[w], each lane with 128 added: the product instruction wants one side
 * without a sign. */
ALWAYS_INLINE void read_keys(const int8_t *keys, __m512i words[WORDS]) {
    const __m512i flip = _mm512_set1_epi8((char)0x80);
    for (int half = 0; half < WORDS; half += 16) {
        for (int key = 0; key < 16; key++)
            words[half + key] =
                _mm512_xor_si512(_mm512_loadu_si512(keys + key * HEAD + half * 4), flip);
        transpose(words + half);
    }
}

/* total + weight * float16(positive part of the products over 1024) */
ALWAYS_INLINE __m512 add_head(__m512i products, float weight, __m512 total) {
    __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(products), _mm512_set1_ps(0x1p-10f));
    __m256i rounded = _mm512_cvtps_ph(_mm512_max_ps(scaled, _mm512_setzero_ps()),
                                      _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return _mm512_fmadd_ps(_mm512_cvtph_ps(rounded), _mm512_set1_ps(weight), total);
}

/* Scores of QUANT_KEYS keys. */
static void score_group(const queries_t *q, int64_t heads, const int8_t *keys, const half_t *scales,
                        float *scores) {
    __m512i front[WORDS], back[WORDS];
    read_keys(keys, front);
    read_keys(keys + 16 * HEAD, back);
    __m512 totals[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int64_t head = 0; head < heads; head += QUANT_HEADS) {
        __m512i sums[QUANT_HEADS][2];
        for (int i = 0; i < QUANT_HEADS; i++)
            sums[i][0] = sums[i][1] = _mm512_set1_epi32(q->offsets[head + i]);
        for (int word = 0; word < WORDS; word++)
            for (int i = 0; i < QUANT_HEADS; i++) {
                __m512i query = _mm512_set1_epi32(q->rows[head + i][word]);
                sums[i][0] = _mm512_dpbusd_epi32(sums[i][0], front[word], query);
                sums[i][1] = _mm512_dpbusd_epi32(sums[i][1], back[word], query);
            }
        for (int i = 0; i < QUANT_HEADS; i++)
            for (int j = 0; j < 2; j++)
                totals[j] = add_head(sums[i][j], q->factors[head + i], totals[j]);
    }
    for (int j = 0; j < 2; j++) {
        __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(scales + 16 * j)));
        _mm512_storeu_ps(scores + 16 * j, _mm512_mul_ps(totals[j], scale));
    }
}
#else
/* One token's queries, as int16: a compiler has a product with sums for those. */
typedef struct {
    int16_t rows[MAX_HEADS][HEAD];
    float factors[MAX_HEADS];
} queries_t;

static void read_queries(const int8_t *query, const half_t *weights, const half_t *scales,
                         int64_t heads, queries_t *q) {
    for (int64_t head = 0; head < heads; head++) {
        for (int at = 0; at < HEAD; at++) q->rows[head][at] = query[head * HEAD + at];
        q->factors[head] = factor_of(weights[head], scales[head]);
    }
}

static void score_group(const queries_t *q, int64_t heads, const int8_t *keys, const half_t *scales,
                        float *scores) {
    for (int key = 0; key < QUANT_KEYS; key++) {
        int16_t row[HEAD];
        for (int at = 0; at < HEAD; at++) row[at] = keys[key * HEAD + at];
        float total = 0.0f;
        for (int64_t head = 0; head < heads; head++) {
            int32_t product = 0;
#pragma omp simd reduction(+ : product)
            for (int at = 0; at < HEAD; at++) product += (int32_t)q->rows[head][at] * row[at];
            float positive = product > 0 ? (float)product * 0x1p-10f : 0.0f;
            total += q->factors[head] * round_normal_half(positive);
        }
        scores[key] = total * half_to_float(scales[key]);
    }
}
#endif

typedef struct {
    paged_t paged;
    const int8_t *query, *keys;
    const half_t *weights, *query_scales, *key_scales;
    int64_t heads, count, longest;
    int32_t *positions;
    int *status;
} quant_select_t;

static void quant_select_for_token(const quant_select_t *s, int64_t token, space_t *space) {
    const paged_t *p = &s->paged;
    int64_t sequence = sequence_of(p, token), heads = s->heads;
    int64_t limit = sequence < 0 ? 0 : causal_limit(p, sequence, token);
    int32_t *positions = s->positions + token * s->count;
    if (limit <= s->count) {
        select_all(limit, s->count, positions);
        return;
    }
    if (!get_space(s->longest, space, s->status)) return;
    queries_t queries;
    read_queries(s->query + token * heads * HEAD, s->weights + token * heads,
                 s->query_scales + token * heads, heads, &queries);
    const int32_t *table = p->blocks + sequence * p->max_blocks;
    for (int64_t start = 0; start < limit; start += QUANT_KEYS) {
        int64_t row = row_of(table, (uint32_t)start);
        score_group(&queries, heads, s->keys + row * HEAD, s->key_scales + row,
                    space->scores + start);
    }
    select_scored(space, limit, s->count, positions);
}

static void quant_select_tokens(const void *context, int64_t first, int64_t last) {
    space_t space = {0};
    for (int64_t token = first; token < last; token++)
        quant_select_for_token(context, token, &space);
    free(space.scores);
}

int KERNEL(quant_lightning_indexer)(int64_t tokens, int64_t heads, int64_t sequences,
                                    int64_t max_blocks, int64_t num_blocks, int64_t count,
                                    const int8_t *query, const int8_t *keys, const half_t *weights,
                                    const half_t *query_scales, const half_t *key_scales,
                                    const int32_t *ends, const int32_t *lens,
                                    const int32_t *blocks, int32_t *positions) {
    int status = OK;
    quant_select_t s = {{tokens, sequences, max_blocks, num_blocks, ends, lens, blocks},
                        query, keys, weights, query_scales, key_scales, heads, count, 0,
                        positions, &status};
    if (heads > MAX_HEADS || !is_in_range(&s.paged)) return OUT_OF_RANGE;
    for (int64_t i = 0; i < sequences; i++) s.longest = lens[i] > s.longest ? lens[i] : s.longest;
    if (s.longest > count)
        glm_run(tokens, tokens < 32 ? 1 : 4, quant_select_tokens, &s);
    else
        over_rows(tokens, count / 8, quant_select_tokens, &s); /* only filled */
    return status;
}
