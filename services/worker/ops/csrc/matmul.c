/* Products of rows with matrices [inner, outer], packed (nz.h) or plain: a matrix for all rows, one
 * for each head, or one for each group of rows.
 *
 * Each output element sums over the inner dimension in order, whatever the number of rows beside
 * it: results do not depend on the batch.
 */
#include "tile.h"

enum { CHUNK = 96, PARALLEL_PRODUCTS = 1 << 20 };

typedef struct {
    int64_t inner, outer, is_packed;
    int64_t strips, per_item, items; /* strips of a matrix, strips of an item, items of a matrix */
    const elem_t *x, *w;
    elem_t *y;
    int *status;
    const int64_t *starts; /* grouped: first row of each group */
    int64_t tokens, chunks, token_stride, head_stride, y_stride; /* by head */
} product_t;

/* Rows that are multiplied with one matrix, at one place in the result. */
typedef struct {
    const elem_t *x, *w;
    elem_t *y;
    int64_t count, x_stride, y_stride;
} rows_t;

/* Elements of `columns` packed columns. */
ALWAYS_INLINE int64_t packed_size(int64_t inner, int64_t columns) {
    return (inner + PER_WORD - 1) / PER_WORD * PER_WORD * columns;
}

/* Words of `width` columns from plain rows; columns from `columns` on are zero. */
static void pack_strip(const elem_t *plain, int64_t stride, int64_t rows, int64_t columns,
                       int64_t width, elem_t *packed) {
    static const elem_t zeros[NZ_STRIP];
    if (columns < width) memset(packed, 0, (size_t)packed_size(rows, width) * sizeof(elem_t));
    for (int64_t k = 0; k < rows; k += PER_WORD, packed += width * PER_WORD) {
        const elem_t *row = plain + k * stride;
        pack_words(row, k + PER_WORD > rows ? zeros : row + stride, columns, packed);
    }
}

/* Some rows with the columns of a tile, or with the fewer that there are: what the tile adds up past
 * them is not stored. */
static void multiply_tile(int64_t count, const rows_t *rows, int64_t row, const elem_t *w,
                          int64_t step, int64_t inner, int64_t column, int64_t columns) {
    const elem_t *x = rows->x + row * rows->x_stride;
    elem_t *y = rows->y + row * rows->y_stride + column;
    if (columns >= TILE_COLUMNS) {
        tiles[count](x, rows->x_stride, w, step, inner, y, rows->y_stride);
        return;
    }
    elem_t results[TILE_ROWS * TILE_COLUMNS];
    tiles[count](x, rows->x_stride, w, step, inner, results, TILE_COLUMNS);
    for (int64_t i = 0; i < count; i++)
        memcpy(y + i * rows->y_stride, results + i * TILE_COLUMNS, (size_t)columns * sizeof(elem_t));
}

/* One strip for every row, in tiles of about the same number of rows. */
static void multiply_strip(const product_t *p, const rows_t *rows, int64_t strip, elem_t *space) {
    const int64_t column = strip * NZ_STRIP, left = p->outer - column;
    const int64_t columns = left < NZ_STRIP ? left : NZ_STRIP;
    const elem_t *w = rows->w + packed_size(p->inner, column);
    int64_t step = columns * PER_WORD;
    if (!p->is_packed) {
        pack_strip(rows->w + column, p->outer, p->inner, columns, NZ_STRIP, space);
        w = space;
        step = STRIP_STEP;
    }
    const int64_t parts = (rows->count + TILE_ROWS - 1) / TILE_ROWS;
    for (int64_t part = 0, row = 0; part < parts; part++) {
        int64_t count = (rows->count - row + parts - part - 1) / (parts - part);
        for (int64_t c = 0; c < columns; c += TILE_COLUMNS)
            multiply_tile(count, rows, row, w + c * PER_WORD, step, p->inner, column + c, columns - c);
        row += count;
    }
}

/* The strips of one item. */
static void multiply_item(const product_t *p, const rows_t *rows, int64_t item, elem_t *space) {
    int64_t strip = item * p->per_item, last = strip + p->per_item;
    last = last < p->strips ? last : p->strips;
    const int64_t whole = p->outer / NZ_STRIP < last ? p->outer / NZ_STRIP : last;
    if (rows->count == 1 && p->is_packed)
        for (; strip + WIDE_STRIPS <= whole; strip += WIDE_STRIPS)
            tile_wide(rows->x, rows->w + packed_size(p->inner, strip * NZ_STRIP),
                      packed_size(p->inner, NZ_STRIP), p->inner, rows->y + strip * NZ_STRIP);
    for (; strip < last; strip++) multiply_strip(p, rows, strip, space);
}

ALWAYS_INLINE const elem_t *matrix_of(const product_t *p, int64_t index) {
    return p->w + index * (p->is_packed ? packed_size(p->inner, p->outer) : p->inner * p->outer);
}

/* Where a strip of a plain matrix is packed; NULL for packed ones, or where there is no memory. */
static elem_t *get_strip_space(const product_t *p) {
    if (p->is_packed) return NULL;
    elem_t *space = malloc((size_t)packed_size(p->inner, NZ_STRIP) * sizeof(elem_t));
    if (!space) __atomic_store_n(p->status, NO_MEMORY, __ATOMIC_RELAXED);
    return space;
}

/* Items are (group, some strips): a weight strip is read once for all rows of its group. */
static void multiply_groups(const void *context, int64_t first, int64_t last) {
    const product_t *p = context;
    elem_t *space = get_strip_space(p);
    for (int64_t item = first; item < last && (space || p->is_packed); item++) {
        int64_t group = item / p->items, start = p->starts[group];
        rows_t rows = {p->x + start * p->inner, matrix_of(p, group), p->y + start * p->outer,
                       p->starts[group + 1] - start, p->inner, p->outer};
        if (rows.count > 0) multiply_item(p, &rows, item % p->items, space);
    }
    free(space);
}

/* Items are (head, chunk of tokens, some strips). */
static void multiply_heads(const void *context, int64_t first, int64_t last) {
    const product_t *p = context;
    const int64_t per_head = p->chunks * p->items;
    elem_t *space = get_strip_space(p);
    for (int64_t item = first; item < last && (space || p->is_packed); item++) {
        int64_t head = item / per_head, token = item % p->chunks * CHUNK;
        int64_t left = p->tokens - token;
        rows_t rows = {p->x + token * p->token_stride + head * p->head_stride, matrix_of(p, head),
                       p->y + token * p->y_stride + head * p->outer, left < CHUNK ? left : CHUNK,
                       p->token_stride, p->y_stride};
        multiply_item(p, &rows, item % per_head / p->chunks, space);
    }
    free(space);
}

/* Check the matrices, and cut each into items of `per_item` strips. */
static int open_product(product_t *p, int64_t matrices, int64_t per_item) {
    const int64_t row_bytes = p->outer * (int64_t)sizeof(elem_t);
    int status = nz_check(p->w, matrices, p->inner, row_bytes, (int)p->is_packed);
    if (p->is_packed) p->w += nz_first(row_bytes) / (int64_t)sizeof(elem_t);
    p->strips = (p->outer + NZ_STRIP - 1) / NZ_STRIP;
    p->per_item = per_item;
    p->items = (p->strips + per_item - 1) / per_item;
    return status;
}

static int run_product(product_t *p, int64_t items, int64_t rows, range_fn body) {
    int status = OK;
    p->status = &status;
    glm_run(items, rows * p->inner * p->outer > PARALLEL_PRODUCTS ? 1 : items, body, p);
    return status;
}

int KERNEL(grouped_matmul)(int64_t total_rows, int64_t groups, int64_t inner, int64_t outer,
                           int64_t is_counts, int64_t is_packed, const elem_t *x, const elem_t *w,
                           const int64_t *group_list, elem_t *y) {
    product_t p = {.inner = inner, .outer = outer, .is_packed = is_packed, .x = x, .w = w, .y = y};
    int status = open_product(&p, groups, total_rows > 4 * groups ? 1 : WIDE_STRIPS);
    if (status) return status;
    int64_t *starts = malloc((size_t)(groups + 1) * sizeof(int64_t));
    if (!starts) return NO_MEMORY;
    int is_rising = 1;
    starts[0] = 0;
    for (int64_t group = 0; group < groups; group++) {
        starts[group + 1] = is_counts ? starts[group] + group_list[group] : group_list[group];
        is_rising &= starts[group + 1] >= starts[group];
    }
    p.starts = starts;
    status = !is_rising || starts[groups] > total_rows
                 ? OUT_OF_RANGE
                 : run_product(&p, groups * p.items, total_rows, multiply_groups);
    free(starts);
    return status;
}

/* [tokens, heads, inner] (any token and head stride) by [heads, inner, outer]; with one head, an
 * ordinary product. */
int KERNEL(head_matmul)(int64_t tokens, int64_t heads, int64_t inner, int64_t outer,
                        int64_t token_stride, int64_t head_stride, int64_t is_packed,
                        const elem_t *x, const elem_t *w, elem_t *y) {
    product_t p = {.inner = inner, .outer = outer, .is_packed = is_packed, .x = x, .w = w, .y = y,
                   .tokens = tokens, .chunks = (tokens + CHUNK - 1) / CHUNK,
                   .token_stride = token_stride, .head_stride = head_stride,
                   .y_stride = heads * outer};
    int status = open_product(&p, heads, tokens > 1 ? 1 : WIDE_STRIPS);
    if (status) return status;
    return run_product(&p, heads * p.chunks * p.items, tokens * heads, multiply_heads);
}

typedef struct {
    int64_t rows, columns, strips;
    const elem_t *plain;
    elem_t *packed;
} packing_floats_t;

static void pack_strips(const void *context, int64_t first, int64_t last) {
    const packing_floats_t *p = context;
    for (int64_t item = first; item < last; item++) {
        const int64_t matrix = item / p->strips, column = item % p->strips * NZ_STRIP;
        const int64_t left = p->columns - column, width = left < NZ_STRIP ? left : NZ_STRIP;
        pack_strip(p->plain + matrix * p->rows * p->columns + column, p->columns, p->rows, width,
                   width, p->packed + packed_size(p->rows, matrix * p->columns + column));
    }
}

int KERNEL(pack_floats)(int64_t matrices, int64_t rows, int64_t columns, const elem_t *plain,
                        elem_t *packed) {
    packing_floats_t p = {rows, columns, (columns + NZ_STRIP - 1) / NZ_STRIP, plain, packed};
    over_rows(matrices * p.strips, rows * NZ_STRIP, pack_strips, &p);
    return OK;
}
