/* Products of rows with per-group matrices [inner, outer]: experts, and heads.
 *
 * Each output element sums over the inner dimension in order, whatever the number of rows beside
 * it: results do not depend on the batch.
 */
#include "pairs.h"
#include "repeat.h"

enum { ROWS = 8, COLUMNS = 32, WIDE = 4 * COLUMNS, CHUNK = 64, PARALLEL_PRODUCTS = 1 << 20 };

/* One function per number of rows, with the sums of each row in variables of their own. */
#define TILE_ARGUMENTS \
    const elem_t *x, int64_t x_stride, const elem_t *w, int64_t w_stride, int64_t inner, \
        int64_t columns, elem_t *y, int64_t y_stride

#if GLM_AVX512 && defined(ELEM_BF16)
ALWAYS_INLINE __m512bh broadcast_pair(const elem_t *x) {
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
}

#define CLEAR(r) __m512 low##r = _mm512_setzero_ps(), high##r = _mm512_setzero_ps();
#define ADD(r) \
    { \
        __m512bh both = broadcast_pair(x + r * x_stride); \
        low##r = _mm512_dpbf16_ps(low##r, both, pairs[0]); \
        high##r = _mm512_dpbf16_ps(high##r, both, pairs[1]); \
    }
#define ADD_LAST(r) \
    { \
        __m512bh both = (__m512bh)_mm512_set1_epi32(x[r * x_stride]); \
        low##r = _mm512_dpbf16_ps(low##r, both, pairs[0]); \
        high##r = _mm512_dpbf16_ps(high##r, both, pairs[1]); \
    }
#define STORE(r) store_pair(low##r, high##r, y + r * y_stride, mask);

#define TILE(n) \
    static void tile_##n(TILE_ARGUMENTS) { \
        __mmask32 mask = columns >= COLUMNS ? ~0u : (1u << columns) - 1u; \
        __m512bh pairs[2]; \
        REPEAT_##n(CLEAR) \
        int64_t k = 0; \
        for (; k + 1 < inner; k += 2, x += 2, w += 2 * w_stride) { \
            interleave(_mm512_maskz_loadu_epi16(mask, w), \
                       _mm512_maskz_loadu_epi16(mask, w + w_stride), pairs); \
            REPEAT_##n(ADD) \
        } \
        if (k < inner) { \
            interleave(_mm512_maskz_loadu_epi16(mask, w), _mm512_setzero_si512(), pairs); \
            REPEAT_##n(ADD_LAST) \
        } \
        REPEAT_##n(STORE) \
    }
#elif GLM_AVX512
#define CLEAR(r) __m512 low##r = _mm512_setzero_ps(), high##r = _mm512_setzero_ps();
#define ADD(r) \
    { \
        __m512 both = _mm512_set1_ps(x[r * x_stride]); \
        low##r = _mm512_fmadd_ps(both, first, low##r); \
        high##r = _mm512_fmadd_ps(both, second, high##r); \
    }
#define STORE(r) \
    _mm512_mask_storeu_ps(y + r * y_stride, (__mmask16)mask, low##r); \
    _mm512_mask_storeu_ps(y + r * y_stride + 16, (__mmask16)(mask >> 16), high##r);

#define TILE(n) \
    static void tile_##n(TILE_ARGUMENTS) { \
        __mmask32 mask = columns >= COLUMNS ? ~0u : (1u << columns) - 1u; \
        REPEAT_##n(CLEAR) \
        for (int64_t k = 0; k < inner; k++, x++, w += w_stride) { \
            __m512 first = _mm512_maskz_loadu_ps((__mmask16)mask, w); \
            __m512 second = _mm512_maskz_loadu_ps((__mmask16)(mask >> 16), w + 16); \
            REPEAT_##n(ADD) \
        } \
        REPEAT_##n(STORE) \
    }
#else
#define CLEAR(r) float sums##r[COLUMNS] = {0};
#define ADD(r) \
    for (int c = 0; c < COLUMNS; c++) sums##r[c] += to_float(x[r * x_stride]) * row[c];
#define STORE(r) \
    for (int64_t c = 0; c < count; c++) y[r * y_stride + c] = from_float(sums##r[c]);

#define TILE(n) \
    static void tile_##n(TILE_ARGUMENTS) { \
        float row[COLUMNS] = {0}; \
        int64_t count = columns < COLUMNS ? columns : COLUMNS; \
        REPEAT_##n(CLEAR) \
        for (int64_t k = 0; k < inner; k++, x++, w += w_stride) { \
            if (count == COLUMNS) \
                for (int c = 0; c < COLUMNS; c++) row[c] = to_float(w[c]); \
            else \
                for (int64_t c = 0; c < count; c++) row[c] = to_float(w[c]); \
            REPEAT_##n(ADD) \
        } \
        REPEAT_##n(STORE) \
    }
#endif

TILE(1)
TILE(2)
TILE(3)
TILE(4)
TILE(5)
TILE(6)
TILE(7)
TILE(8)

static void (*const tiles[ROWS + 1])(TILE_ARGUMENTS) = {NULL,   tile_1, tile_2, tile_3, tile_4,
                                                        tile_5, tile_6, tile_7, tile_8};

/* One row, WIDE columns: a single row's sums are too few to hide the latency of adding to them. */
static void tile_wide(const elem_t *x, const elem_t *w, int64_t w_stride, int64_t inner,
                      elem_t *y) {
#if GLM_AVX512 && defined(ELEM_BF16)
    __m512 low0, low1, low2, low3, high0, high1, high2, high3;
    low0 = low1 = low2 = low3 = high0 = high1 = high2 = high3 = _mm512_setzero_ps();
    const __mmask32 mask = ~0u;
#define ADD_WIDE(c) \
    { \
        __m512bh pairs[2]; \
        interleave(_mm512_loadu_si512(w + c * COLUMNS), \
                   is_pair ? _mm512_loadu_si512(w + w_stride + c * COLUMNS) \
                           : _mm512_setzero_si512(), \
                   pairs); \
        low##c = _mm512_dpbf16_ps(low##c, both, pairs[0]); \
        high##c = _mm512_dpbf16_ps(high##c, both, pairs[1]); \
    }
    int64_t k = 0;
    for (const int is_pair = 1; k + 1 < inner; k += 2, w += 2 * w_stride) {
        __m512bh both = broadcast_pair(x + k);
        REPEAT_4(ADD_WIDE)
    }
    if (k < inner) {
        const int is_pair = 0;
        __m512bh both = (__m512bh)_mm512_set1_epi32(x[k]);
        REPEAT_4(ADD_WIDE)
    }
    store_pair(low0, high0, y, mask);
    store_pair(low1, high1, y + COLUMNS, mask);
    store_pair(low2, high2, y + 2 * COLUMNS, mask);
    store_pair(low3, high3, y + 3 * COLUMNS, mask);
#undef ADD_WIDE
#else
    float sums[WIDE] = {0};
    for (int64_t k = 0; k < inner; k++, w += w_stride) {
        float factor = to_float(x[k]);
        for (int c = 0; c < WIDE; c++) sums[c] += factor * to_float(w[c]);
    }
    for (int c = 0; c < WIDE; c++) y[c] = from_float(sums[c]);
#endif
}

/* Up to WIDE columns for every row of a group. */
static void strip(int64_t rows, const elem_t *x, int64_t x_stride, const elem_t *w,
                  int64_t w_stride, int64_t inner, int64_t columns, elem_t *y, int64_t y_stride) {
    if (rows == 1 && columns >= WIDE) {
        tile_wide(x, w, w_stride, inner, y);
        return;
    }
    for (int64_t column = 0; column < columns && column < WIDE; column += COLUMNS)
        for (int64_t row = 0; row < rows; row += ROWS) {
            int64_t count = rows - row < ROWS ? rows - row : ROWS;
            tiles[count](x + row * x_stride, x_stride, w + column, w_stride, inner,
                         columns - column, y + row * y_stride + column, y_stride);
        }
}

typedef struct {
    int64_t inner, outer, strips;
    const elem_t *x, *w;
    elem_t *y;
    const int64_t *starts; /* grouped: first row of each group */
    int64_t tokens, chunks, token_stride, head_stride, y_stride; /* by head */
} product_t;

/* Items are (group, strip): a weight strip is read once for all rows of its group. */
static void multiply_groups(const void *context, int64_t first, int64_t last) {
    const product_t *p = context;
    for (int64_t item = first; item < last; item++) {
        int64_t group = item / p->strips, column = item % p->strips * WIDE;
        int64_t start = p->starts[group], rows = p->starts[group + 1] - start;
        if (rows > 0)
            strip(rows, p->x + start * p->inner, p->inner,
                  p->w + group * p->inner * p->outer + column, p->outer, p->inner,
                  p->outer - column, p->y + start * p->outer + column, p->outer);
    }
}

int KERNEL(grouped_matmul)(int64_t total_rows, int64_t groups, int64_t inner, int64_t outer,
                           int64_t is_counts, const elem_t *x, const elem_t *w,
                           const int64_t *group_list, elem_t *y) {
    int64_t *starts = malloc((size_t)(groups + 1) * sizeof(int64_t));
    if (!starts) return NO_MEMORY;
    int is_rising = 1;
    starts[0] = 0;
    for (int64_t group = 0; group < groups; group++) {
        starts[group + 1] = is_counts ? starts[group] + group_list[group] : group_list[group];
        is_rising &= starts[group + 1] >= starts[group];
    }
    if (!is_rising || starts[groups] > total_rows) {
        free(starts);
        return OUT_OF_RANGE;
    }
    product_t p = {.inner = inner, .outer = outer, .strips = (outer + WIDE - 1) / WIDE,
                   .x = x, .w = w, .y = y, .starts = starts};
    int64_t items = groups * p.strips;
    int is_large = total_rows * inner * outer > PARALLEL_PRODUCTS;
    glm_run(items, is_large ? 1 : items, multiply_groups, &p);
    free(starts);
    return OK;
}

/* Items are (head, chunk of tokens, strip). */
static void multiply_heads(const void *context, int64_t first, int64_t last) {
    const product_t *p = context;
    int64_t per_head = p->chunks * p->strips;
    for (int64_t item = first; item < last; item++) {
        int64_t head = item / per_head, token = item / p->strips % p->chunks * CHUNK;
        int64_t column = item % p->strips * WIDE;
        int64_t rows = p->tokens - token < CHUNK ? p->tokens - token : CHUNK;
        strip(rows, p->x + token * p->token_stride + head * p->head_stride, p->token_stride,
              p->w + head * p->inner * p->outer + column, p->outer, p->inner, p->outer - column,
              p->y + token * p->y_stride + head * p->outer + column, p->y_stride);
    }
}

/* [tokens, heads, inner] (any token and head stride) by [heads, inner, outer]; with one head, an
 * ordinary product. */
int KERNEL(head_matmul)(int64_t tokens, int64_t heads, int64_t inner, int64_t outer,
                        int64_t token_stride, int64_t head_stride, const elem_t *x, const elem_t *w,
                        elem_t *y) {
    product_t p = {.inner = inner, .outer = outer, .strips = (outer + WIDE - 1) / WIDE,
                   .x = x, .w = w, .y = y, .tokens = tokens,
                   .chunks = (tokens + CHUNK - 1) / CHUNK, .token_stride = token_stride,
                   .head_stride = head_stride, .y_stride = heads * outer};
    int64_t items = heads * p.chunks * p.strips;
    int is_large = tokens * heads * inner * outer > PARALLEL_PRODUCTS;
    glm_run(items, is_large ? 1 : items, multiply_heads, &p);
    return OK;
}
