/* Attention of each token over its selected positions, on the cached latent rows themselves: a row
 * is read from memory once for MOST_GROUPS times DOT heads. */
#include "attend_group.h"
#include "attend_stream.h"

/* Whether a list has every position before its limit, in order. */
static int sees_all(const walk_t *walk) {
    int is_ordered = walk->end > 0 && walk->end == walk->limit;
    for (int64_t i = 0; i < walk->end; i++) is_ordered &= walk->positions[i] == (int32_t)i;
    return is_ordered;
}

/* Tokens from `token` on, none at or past `last`, that see all positions up to themselves and
 * follow each other in one sequence; at most GROUP. */
static int64_t count_group(const lists_t *l, int64_t token, int64_t last) {
    const walk_t first = walk_of(l, token);
    int64_t count = 1, most = last - token < GROUP ? last - token : GROUP;
    for (; count < most; count++) {
        const walk_t next = walk_of(l, token + count);
        if (next.table != first.table || next.limit != first.limit + count) break;
        if ((count == 1 && !sees_all(&first)) || !sees_all(&next)) break;
    }
    return count;
}

/* Keys of a tile that lie one behind the other. */
static void block_keys(const attention_t *a, const walk_t *walk, int64_t first, int count,
                       keys_t *keys) {
    const int64_t row = row_of(walk->table, (uint32_t)first);
    keys->count = count;
    for (int k = 0; k < count || k % DOT; k++) {
        const int64_t at = row + (k < count ? k : count - 1);
        keys->latent[k] = a->latent + at * LATENT;
        keys->rope[k] = a->rope + at * ROTARY;
    }
}

/* Scores of a group's tokens for a tile of which the first sees `seen` keys, some keys at a time so
 * that they are read from the nearest cache. */
static void score_tile(const attention_t *a, int64_t token, int tokens, int64_t head, int seen,
                       const keys_t *keys, group_t *group) {
    enum { NEAR = 16 };
    for (int from = 0; from < keys->count; from += NEAR)
        for (int i = seen < from + 1 ? from + 1 - seen : 0; i < tokens; i++) {
            const elem_t *query[DOT], *rope[DOT];
            const int count = seen + i < TILE ? seen + i : TILE;
            find_queries(a, token + i, head, query, rope);
            score_for_token(group, i, query, rope, keys, from,
                            count < from + NEAR ? count : from + NEAR, a->lists.scale);
        }
}

/* A group of tokens, heads `head` to `head + DOT`. */
static void attend_group(const attention_t *a, int64_t token, int tokens, int64_t head) {
    const walk_t walk = walk_of(&a->lists, token);
    group_t group;
    keys_t keys;
    begin_group(&group, tokens);
    for (int64_t first = 0; first < walk.limit + tokens - 1; first += TILE) {
        const int64_t left = walk.limit - first;
        const int seen = left < TILE ? (int)left : TILE; /* by the first token; each sees one more */
        block_keys(a, &walk, first, seen + tokens - 1 < TILE ? seen + tokens - 1 : TILE, &keys);
        order_latents(&group, &keys);
        score_tile(a, token, tokens, head, seen, &keys, &group);
        for (int i = seen < 1 ? 1 - seen : 0; i < tokens; i++)
            weigh_for_token(&group, i, seen + i < TILE ? seen + i : TILE);
        add_tile(&group, &keys, tokens, seen);
    }
    for (int i = 0; i < tokens; i++)
        write_group(&group, i, a->lists.heads - head,
                    a->out + ((token + i) * a->lists.heads + head) * LATENT);
}

/* Tokens from `token` on, none at or past `last`, that are taken one by one. */
static int64_t count_alone(const lists_t *l, int64_t token, int64_t last) {
    int64_t count = 1;
    while (token + count < last && count_group(l, token + count, last) == 1) count++;
    return count;
}

/* Items are (token, some heads). They are taken from the last one on: the last tokens of a prompt see
 * most keys, and what is left at the end, for one thread to wait for the other, is little. */
static void attend_items(const void *context, int64_t from, int64_t to) {
    const attention_t *a = context;
    const int64_t parts = a->parts, items = a->lists.paged.tokens * parts;
    const int64_t first = items - to, last = items - from;
    for (int64_t item = first; item < last;) {
        const int64_t token = item / parts, end = last / parts; /* whole tokens end there */
        const int64_t tokens = item % parts ? 1 : count_group(&a->lists, token, end);
        if (tokens > 1) {
            for (int64_t head = 0; head < a->lists.heads; head += DOT)
                attend_group(a, token, (int)tokens, head);
            item += tokens * parts;
        } else {
            const int64_t after = (token + count_alone(&a->lists, token, end)) * parts;
            attend_alone(a, item, after < last ? after : last);
            item = after;
        }
    }
}

/* Items that one thread takes at once: neighbours, since tokens of a sequence share their keys, and
 * where each has its own, the next one's are asked for meanwhile. */
static int64_t count_together(const attention_t *a, int64_t items) {
    enum { SHARES = 4, MOST = 16 }; /* shares of each thread, so that none waits long for another */
    if (a->lists.paged.tokens > 2 * a->lists.paged.sequences) return GROUP * a->parts;
    const int64_t share = items / (SHARES * glm_num_threads());
    return share < 1 ? 1 : (share < MOST ? share : MOST);
}

int KERNEL(sparse_attention)(int64_t tokens, int64_t heads, int64_t sequences, int64_t max_blocks,
                             int64_t num_blocks, int64_t width, int64_t is_causal, double scale,
                             const elem_t *query, const elem_t *query_rope, const elem_t *latent,
                             const elem_t *rope, const int32_t *positions, const int32_t *ends,
                             const int32_t *lens, const int32_t *blocks, elem_t *out) {
    attention_t a = {{{tokens, sequences, max_blocks, num_blocks, ends, lens, blocks},
                      positions, heads, width, is_causal, (float)scale},
                     query, query_rope, latent, rope, out, count_parts(heads)};
    if (!is_in_range(&a.lists.paged)) return OUT_OF_RANGE;
    const int64_t items = tokens * a.parts;
    const int is_small = count_rows_read(&a.lists) < PARALLEL_ROWS;
    glm_run(items, is_small ? items : count_together(&a, items), attend_items, &a);
    return OK;
}
