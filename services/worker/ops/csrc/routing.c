/* Choice of experts, sorting of token copies by expert, and the weighted sum at the end. */
#include "elem.h"

enum { MAX_EXPERTS = 2048, SCORING = 32 }; /* SCORING: how many looks at it a score costs */

/* Index of the largest open score; the lowest index wins a tie. */
static int64_t best_open(const float *score, const uint8_t *is_closed, int64_t count) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; i++)
        if (!is_closed[i] && (best < 0 || score[i] > score[best])) best = i;
    return best;
}

/* Close every expert outside the k_group groups whose two best experts sum highest. */
static void close_groups(const float *choice, int64_t experts, int64_t k_group, int64_t groups,
                         uint8_t *is_closed) {
    int64_t size = experts / groups;
    float ranks[MAX_EXPERTS];
    uint8_t is_taken[MAX_EXPERTS] = {0};
    for (int64_t group = 0; group < groups; group++) {
        float first = -INFINITY, second = -INFINITY;
        for (int64_t i = group * size; i < (group + 1) * size; i++) {
            if (choice[i] > first) {
                second = first;
                first = choice[i];
            } else if (choice[i] > second) {
                second = choice[i];
            }
        }
        ranks[group] = first + second;
    }
    memset(is_closed, 1, (size_t)experts);
    for (int64_t chosen = 0; chosen < k_group; chosen++) {
        int64_t group = best_open(ranks, is_taken, groups);
        is_taken[group] = 1;
        memset(is_closed + group * size, 0, (size_t)size);
    }
}

typedef struct {
    int64_t experts, k, k_group, groups;
    float factor, epsilon;
    const float *logits, *bias;
    float *weights;
    int32_t *chosen;
} gate_t;

static void choose(const gate_t *g, const float *logits, float *weights, int32_t *chosen) {
    float score[MAX_EXPERTS], choice[MAX_EXPERTS];
    uint8_t is_closed[MAX_EXPERTS];
    memset(is_closed, 0, (size_t)g->experts);
    for (int64_t i = 0; i < g->experts; i++) score[i] = 1.0f / (1.0f + fast_exp(-logits[i]));
    for (int64_t i = 0; i < g->experts; i++) choice[i] = score[i] + g->bias[i];
    if (g->groups > 1) close_groups(choice, g->experts, g->k_group, g->groups, is_closed);
    float total = g->epsilon;
    for (int64_t j = 0; j < g->k; j++) {
        int64_t best = best_open(choice, is_closed, g->experts);
        is_closed[best] = 1;
        chosen[j] = (int32_t)best;
        weights[j] = score[best];
        total += score[best];
    }
    for (int64_t j = 0; j < g->k; j++) weights[j] = weights[j] / total * g->factor;
}

#ifndef ELEM_BF16
static void choose_tokens(const void *context, int64_t first, int64_t last) {
    const gate_t *g = context;
    for (int64_t token = first; token < last; token++)
        choose(g, g->logits + token * g->experts, g->weights + token * g->k,
               g->chosen + token * g->k);
}

int glm_gating_top_k_f32(int64_t tokens, int64_t experts, int64_t k, int64_t k_group,
                         int64_t groups, double factor, double epsilon, const float *logits,
                         const float *bias, float *weights, int32_t *chosen) {
    if (experts > MAX_EXPERTS) return OUT_OF_RANGE;
    gate_t g = {experts, k,    k_group, groups, (float)factor, (float)epsilon,
                logits,  bias, weights, chosen};
    over_rows(tokens, experts * (k + SCORING), choose_tokens, &g);
    return OK;
}
#endif

typedef struct {
    int64_t k, width;
    const elem_t *x, *rows, *weights;
    const int32_t *order;
    elem_t *y;
} copies_t;

static void spread_copies(const void *context, int64_t first, int64_t last) {
    const copies_t *c = context;
    for (int64_t i = first; i < last; i++)
        if (c->order[i] >= 0)
            memcpy(c->y + c->order[i] * c->width, c->x + i / c->k * c->width,
                   (size_t)c->width * sizeof(elem_t));
}

/* Count the copies of each expert from `first` to `last` and give each its row, by expert. */
static int sort_copies(int64_t copies, int64_t first, int64_t last, const int32_t *experts,
                       int32_t *order, int64_t *counts) {
    int64_t *next = malloc((size_t)(last - first) * sizeof(int64_t));
    if (!next) return NO_MEMORY;
    memset(counts, 0, (size_t)(last - first) * sizeof(int64_t));
    for (int64_t i = 0; i < copies; i++)
        if (experts[i] >= first && experts[i] < last) counts[experts[i] - first]++;
    int64_t start = 0;
    for (int64_t expert = 0; expert < last - first; expert++) {
        next[expert] = start;
        start += counts[expert];
    }
    for (int64_t i = 0; i < copies; i++) {
        int is_local = experts[i] >= first && experts[i] < last;
        order[i] = is_local ? (int32_t)next[experts[i] - first]++ : -1;
    }
    free(next);
    return OK;
}

int KERNEL(init_routing)(int64_t tokens, int64_t k, int64_t width, int64_t first, int64_t last,
                         const elem_t *x, const int32_t *experts, elem_t *rows, int32_t *order,
                         int64_t *counts) {
    int64_t copies = tokens * k;
    int status = sort_copies(copies, first, last, experts, order, counts);
    if (status) return status;
    copies_t c = {.k = k, .width = width, .x = x, .order = order, .y = rows};
    over_rows(copies, width, spread_copies, &c);
    return OK;
}

static void gather_tokens(const void *context, int64_t first, int64_t last) {
    enum { STRIP = 64 };
    const copies_t *c = context;
    for (int64_t token = first; token < last; token++) {
        const int32_t *order = c->order + token * c->k;
        const elem_t *weights = c->weights + token * c->k;
        for (int64_t base = 0; base < c->width; base += STRIP) {
            int64_t count = c->width - base < STRIP ? c->width - base : STRIP;
            float total[STRIP] = {0};
            for (int64_t j = 0; j < c->k; j++) {
                float weight = to_float(weights[j]);
                const elem_t *row = c->rows + order[j] * c->width + base;
#pragma omp simd
                for (int64_t i = 0; i < count; i++) total[i] += weight * to_float(row[i]);
            }
            elem_t *out = c->y + token * c->width + base;
            for (int64_t i = 0; i < count; i++) out[i] = from_float(total[i]);
        }
    }
}

int KERNEL(token_unpermute)(int64_t tokens, int64_t k, int64_t width, int64_t num_rows,
                            const elem_t *rows, const int32_t *order, const elem_t *weights,
                            elem_t *y) {
    for (int64_t i = 0; i < tokens * k; i++)
        if (order[i] < 0 || order[i] >= num_rows) return OUT_OF_RANGE;
    copies_t c = {.k = k, .width = width, .rows = rows, .weights = weights, .order = order, .y = y};
    over_rows(tokens, k * width, gather_tokens, &c);
    return OK;
}
