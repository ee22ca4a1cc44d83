/* Attention of neighbouring tokens of a sequence that see all its keys up to themselves: the keys of
 * a tile are brought into order once for all of them.
 *
 * Every token adds up the same products in the same order as it does alone (attend.h).
 */
#ifndef GLM_ATTEND_GROUP_H
#define GLM_ATTEND_GROUP_H

#include "attend.h"
#include "tile.h"

enum { GROUP = 16, GROUP_ROWS = GROUP * DOT };

_Static_assert(BLOCK % TILE == 0, "the keys of a tile lie in one block, one behind the other");

/* DOT heads of up to GROUP tokens. */
typedef struct {
    softmax_t softmax[GROUP];
    float factors[GROUP_ROWS];
    float scores[GROUP_ROWS][TILE] __attribute__((aligned(64)));
    elem_t weights[GROUP_ROWS][TILE] __attribute__((aligned(64)));
    float sums[LATENT / NZ_STRIP][GROUP_ROWS][NZ_STRIP] __attribute__((aligned(64)));
#ifdef ELEM_BF16
    elem_t words[LATENT / NZ_STRIP][TILE / PER_WORD][STRIP_STEP] __attribute__((aligned(64)));
#endif
    int is_begun;
} group_t;

static void begin_group(group_t *g, int tokens) {
    for (int token = 0; token < tokens; token++) begin_softmax(&g->softmax[token]);
    g->is_begun = 0;
}

/* Scores of one token's heads for keys `from` to `to` of a tile. */
ALWAYS_INLINE void score_for_token(group_t *g, int token, const elem_t *const query[DOT],
                                   const elem_t *const rope[DOT], const keys_t *keys, int from,
                                   int to, float scale) {
    for (int k = from; k < to; k += DOT)
        score_keys_of_tile(query, rope, keys, k, scale, NULL, g->scores + token * DOT);
}

/* Weights of one token's heads for the first `count` keys of a tile. */
static void weigh_for_token(group_t *g, int token, int count) {
    weigh_tile(&g->softmax[token], count, g->scores + token * DOT, g->factors + token * DOT,
               g->weights + token * DOT);
}

/* Bring the latents of a tile into the order of tile.h. */
static void order_latents(group_t *g, const keys_t *keys) {
#ifdef ELEM_BF16
    static const elem_t zeros[LATENT];
    for (int k = 0; k < keys->count; k += PER_WORD) {
        const elem_t *row = keys->latent[k], *next = k + 1 < keys->count ? row + LATENT : zeros;
        for (int strip = 0; strip < LATENT / NZ_STRIP; strip++)
            pack_words(row + strip * NZ_STRIP, next + strip * NZ_STRIP, NZ_STRIP,
                       g->words[strip][k / PER_WORD]);
    }
#else
    (void)g, (void)keys; /* a row of float32 is in order as it lies */
#endif
}

/* Add a tile's latents to the sums of `tokens` tokens from `first`, which all see `count` keys. */
static void add_latents(group_t *g, const keys_t *keys, int first, int tokens, int count) {
    for (int at = 0; at < LATENT; at += TILE_COLUMNS) {
        const int strip = at / NZ_STRIP, column = at % NZ_STRIP;
#ifdef ELEM_BF16
        const elem_t *words = g->words[strip][0] + column * PER_WORD;
        const int64_t step = STRIP_STEP;
        (void)keys;
#else
        const elem_t *words = keys->latent[0] + at;
        const int64_t step = LATENT;
#endif
        for (int64_t row = first * DOT, end = (first + tokens) * DOT; row < end;)
            row += sum_tile(end - row, g->weights[row], TILE, words, step, count,
                            g->is_begun ? g->factors + row : NULL, g->sums[strip][row] + column,
                            NZ_STRIP);
    }
}

#ifdef ELEM_BF16
/* Add the last of an odd number of keys: in the tile's words it is beside a key that this token does
 * not see, and whose latent must not matter even if it is no number. */
static void add_last_latent(group_t *g, const keys_t *keys, int token, int count) {
    elem_t words[STRIP_STEP];
    static const elem_t zeros[NZ_STRIP];
    static const float ones[DOT] = {1.0f, 1.0f, 1.0f, 1.0f};
    for (int at = 0; at < LATENT; at += NZ_STRIP) {
        pack_words(keys->latent[count - 1] + at, zeros, NZ_STRIP, words);
        for (int c = 0; c < NZ_STRIP; c += TILE_COLUMNS)
            sum_tile_4(g->weights[token * DOT] + count - 1, TILE, words + c * PER_WORD, STRIP_STEP, 1,
                       ones, g->sums[at / NZ_STRIP][token * DOT] + c, NZ_STRIP);
    }
}
#endif

/* One tile of keys for tokens of which the first sees `seen` of them, and each other one more. */
static void add_tile(group_t *g, const keys_t *keys, int tokens, int seen) {
    const int partial = seen < TILE ? TILE - seen : 0; /* tokens before those that see all */
    if (partial < tokens) add_latents(g, keys, partial, tokens - partial, TILE);
    for (int token = 0; token < tokens && token < partial; token++) {
        const int count = seen + token;
        if (count <= 0) continue;
        add_latents(g, keys, token, 1, count / PER_WORD * PER_WORD);
#ifdef ELEM_BF16
        if (count % PER_WORD) add_last_latent(g, keys, token, count);
#endif
    }
    g->is_begun = 1;
}

static void write_group(const group_t *g, int token, int64_t heads, elem_t *out) {
    for (int64_t i = 0; i < heads && i < DOT; i++) {
        const float total = g->softmax[token].total[i], factor = total > 0.0f ? 1.0f / total : 0.0f;
        for (int at = 0; at < LATENT; at += TILE_COLUMNS) {
            const float *sums = g->sums[at / NZ_STRIP][token * DOT + i] + at % NZ_STRIP;
            store_tile(*(const lanes_f *)sums * factor,
                       *(const lanes_f *)(sums + TILE_LANES) * factor, out + i * LATENT + at);
        }
    }
}

#endif
