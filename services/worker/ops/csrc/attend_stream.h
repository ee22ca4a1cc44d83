/* Attention of tokens that do not share keys, one after the other: while the keys of one tile are
 * worked on, memory is asked for those that come about a tile later, be they the same token's or the
 * next one's. Rows lie apart, so the hardware does not guess which come next.
 */
#ifndef GLM_ATTEND_STREAM_H
#define GLM_ATTEND_STREAM_H

#include "attend.h"

enum {
    MOST_GROUPS = 4,   /* of DOT heads, that share a pass over a token's keys */
    LEAD = TILE / 2,   /* keys between the tile at work and what is asked for meanwhile */
    STREAM_TILES = 4,  /* in sight; a power of 2 */
};

typedef struct {
    lists_t lists;
    const elem_t *query, *query_rope, *latent, *rope;
    elem_t *out;
    int64_t parts; /* passes over a token's keys, each for some heads */
} attention_t;

static int64_t count_parts(int64_t heads) {
    return (heads + DOT * MOST_GROUPS - 1) / (DOT * MOST_GROUPS);
}

/* Keys of one item (token, some heads) that are worked on together. */
typedef struct {
    keys_t keys;
    int is_last; /* of its item */
} stream_tile_t;

/* The tiles of the items before `last`, one after the other. */
typedef struct {
    const attention_t *a;
    int64_t item, last;
    walk_t walk;                       /* of `item` */
    stream_tile_t tiles[STREAM_TILES]; /* a ring */
    int64_t made, used;                /* tiles so far */
    int64_t asked_tile;                /* the next key to ask for: its tile, and its place there */
    int asked;
} stream_t;

ALWAYS_INLINE void point_at(const attention_t *a, const int64_t rows[TILE], int count,
                            keys_t *keys) {
    keys->count = count;
    for (int k = 0; k < count; k++) {
        keys->latent[k] = a->latent + rows[k] * LATENT;
        keys->rope[k] = a->rope + rows[k] * ROTARY;
    }
    /* Whole groups of keys are scored. */
    for (int k = count; k % DOT; k++) {
        keys->latent[k] = keys->latent[count - 1];
        keys->rope[k] = keys->rope[count - 1];
    }
}

/* Make tiles while there is room in the ring. */
static void make_tiles(stream_t *s) {
    while (s->item < s->last && s->made < s->used + STREAM_TILES) {
        int64_t rows[TILE];
        stream_tile_t *tile = &s->tiles[s->made++ % STREAM_TILES];
        point_at(s->a, rows, next_rows(&s->walk, rows), &tile->keys);
        tile->is_last = tile->keys.count == 0 || s->walk.at >= s->walk.end;
        if (tile->is_last && ++s->item < s->last)
            s->walk = walk_of(&s->a->lists, s->item / s->a->parts);
    }
}

static void open_stream(stream_t *s, const attention_t *a, int64_t first, int64_t last) {
    s->a = a;
    s->item = first;
    s->last = last;
    s->walk = walk_of(&a->lists, first / a->parts);
    s->made = s->used = 0;
    s->asked_tile = 1; /* the first one is needed at once */
    s->asked = LEAD;
    make_tiles(s);
}

/* The rows to ask for while a tile of `count` keys is worked on: the next ones of the stream. At its
 * end they are those of the tile itself, which are there. */
static void choose_asked(stream_t *s, const keys_t *keys, keys_t *asked) {
    const int count = (keys->count + DOT - 1) / DOT * DOT;
    for (int k = 0; k < count;) {
        if (s->asked_tile >= s->made) {
            for (; k < count; k++) {
                asked->latent[k] = keys->latent[k];
                asked->rope[k] = keys->rope[k];
            }
            return;
        }
        const keys_t *from = &s->tiles[s->asked_tile % STREAM_TILES].keys;
        for (; k < count && s->asked < from->count; k++, s->asked++) {
            asked->latent[k] = from->latent[s->asked];
            asked->rope[k] = from->rope[s->asked];
        }
        if (s->asked < from->count) return;
        s->asked_tile++;
        s->asked = 0;
    }
}

/* Queries of DOT heads; past the last one they repeat it. */
ALWAYS_INLINE void find_queries(const attention_t *a, int64_t token, int64_t head,
                                const elem_t *query[DOT], const elem_t *rope[DOT]) {
    const int64_t heads = a->lists.heads;
    for (int i = 0; i < DOT; i++) {
        const int64_t row = token * heads + (head + i < heads ? head + i : heads - 1);
        query[i] = a->query + row * LATENT;
        rope[i] = a->query_rope + row * ROTARY;
    }
}

/* DOT heads of one token over one tile. */
ALWAYS_INLINE void attend_tile_alone(const attention_t *a, int64_t token, int64_t head,
                                     const keys_t *keys, const keys_t *asked, state_t *state) {
    const elem_t *query[DOT], *rope[DOT];
    float scores[DOT][TILE] __attribute__((aligned(64))), factors[DOT];
    elem_t weights[DOT][TILE] __attribute__((aligned(64)));
    find_queries(a, token, head, query, rope);
    for (int k = 0; k < keys->count; k += DOT)
        score_keys_of_tile(query, rope, keys, k, a->lists.scale, asked, scores);
    weigh_tile(&state->softmax, keys->count, scores, factors, weights);
    accumulate(state, keys, asked, factors, weights);
}

/* Items (token, some heads), each by itself. */
static void attend_alone(const attention_t *a, int64_t first, int64_t last) {
    state_t states[MOST_GROUPS];
    stream_t stream;
    keys_t asked;
    open_stream(&stream, a, first, last);
    for (int64_t item = first; item < last; item++) {
        const int64_t token = item / a->parts, head = item % a->parts * MOST_GROUPS * DOT;
        const int64_t left = (a->lists.heads - head + DOT - 1) / DOT;
        const int64_t groups = left < MOST_GROUPS ? left : MOST_GROUPS;
        for (int64_t g = 0; g < groups; g++) begin(&states[g]);
        for (int is_last = 0; !is_last;) {
            const stream_tile_t *tile = &stream.tiles[stream.used % STREAM_TILES];
            is_last = tile->is_last;
            choose_asked(&stream, &tile->keys, &asked);
            for (int64_t g = 0; g < groups && tile->keys.count > 0; g++)
                attend_tile_alone(a, token, head + g * DOT, &tile->keys, g ? NULL : &asked,
                                  &states[g]);
            stream.used++;
            make_tiles(&stream);
        }
        for (int64_t g = 0; g < groups; g++)
            write_heads(&states[g], a->lists.heads - head - g * DOT,
                        a->out + (token * a->lists.heads + head + g * DOT) * LATENT);
    }
}

#endif
