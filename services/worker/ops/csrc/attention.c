/* Attention of each token over its selected positions, on the cached latent rows themselves: a row
 * is read from memory once. */
#include "attend.h"

typedef struct {
    lists_t lists;
    const elem_t *query, *query_rope, *latent, *rope;
    elem_t *out;
} attention_t;

static void next_keys(const attention_t *a, walk_t *walk, keys_t *keys) {
    int64_t rows[TILE] = {0};
    int count = keys->count = next_rows(walk, rows);
    for (int k = 0; k < TILE; k++) {
        int64_t row = rows[k < count ? k : 0];
        keys->latent[k] = a->latent + row * LATENT;
        keys->rope[k] = a->rope + row * ROTARY;
    }
}

/* One token, heads `head` to `head + DOT`. */
static void attend(const attention_t *a, int64_t token, int64_t head) {
    int64_t heads = a->lists.heads, last = token * heads + heads - 1;
    const elem_t *query[DOT], *rope[DOT];
    for (int i = 0; i < DOT; i++) {
        int64_t row = token * heads + head + i;
        query[i] = a->query + (row < last ? row : last) * LATENT;
        rope[i] = a->query_rope + (row < last ? row : last) * ROTARY;
    }
    state_t state;
    begin(&state);
    walk_t walk = walk_of(&a->lists, token);
    keys_t tiles[2]; /* the one at work and the one being fetched */
    next_keys(a, &walk, &tiles[0]);
    for (int turn = 0; tiles[turn].count > 0; turn ^= 1) {
        float scores[DOT][TILE] __attribute__((aligned(64)));
        keys_t *keys = &tiles[turn], *next = &tiles[turn ^ 1], first;
        const keys_t *fetched = next;
        next_keys(a, &walk, next);
        if (next->count == 0) { /* the token after this one is likely next on this thread */
            walk_t after = walk_of(&a->lists, token + 1);
            next_keys(a, &after, &first);
            fetched = &first;
        }
        /* Rows lie apart, so the hardware does not guess which come next. */
        for (int k = 0; k < keys->count; k += DOT)
            score_keys_of_tile(query, rope, keys, k, a->lists.scale, fetched, scores);
        weigh_tile(&state, keys->count, scores);
        accumulate(&state, keys, fetched, scores);
    }
    write_heads(&state, heads - head, a->out + (token * heads + head) * LATENT);
}

static void attend_items(const void *context, int64_t first, int64_t last) {
    const attention_t *a = context;
    int64_t groups = (a->lists.heads + DOT - 1) / DOT;
    for (int64_t item = first; item < last; item++)
        attend(a, item / groups, item % groups * DOT);
}

int KERNEL(sparse_attention)(int64_t tokens, int64_t heads, int64_t sequences, int64_t max_blocks,
                             int64_t num_blocks, int64_t width, int64_t is_causal, double scale,
                             const elem_t *query, const elem_t *query_rope, const elem_t *latent,
                             const elem_t *rope, const int32_t *positions, const int32_t *ends,
                             const int32_t *lens, const int32_t *blocks, elem_t *out) {
    attention_t a = {{{tokens, sequences, max_blocks, num_blocks, ends, lens, blocks},
                      positions, heads, width, is_causal, (float)scale},
                     query, query_rope, latent, rope, out};
    if (!is_in_range(&a.lists.paged)) return OUT_OF_RANGE;
    int64_t items = tokens * ((heads + DOT - 1) / DOT);
    /* Neighbours stay on one thread where there are many: it has fetched the next one's rows. */
    int64_t few = count_rows_read(&a.lists) < PARALLEL_ROWS;
    glm_run(items, few ? items : (items < 32 ? 1 : 4), attend_items, &a);
    return OK;
}
