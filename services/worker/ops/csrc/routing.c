/* Choice of experts, sorting of token copies by expert, and the weighted sum at the end. */
#include "elem.h"

enum { MAX_EXPERTS = 2048 };

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

static void choose(const float *logits, const float *bias, int64_t experts, int64_t k,
                   int64_t k_group, int64_t groups, float factor, float epsilon, float *weights,
                   int32_t *chosen) {
    float score[MAX_EXPERTS], choice[MAX_EXPERTS];
    uint8_t is_closed[MAX_EXPERTS] = {0};
    for (int64_t i = 0; i < experts; i++) {
        score[i] = 1.0f / (1.0f + fast_exp(-logits[i]));
        choice[i] = score[i] + bias[i];
    }
    if (groups > 1) close_groups(choice, experts, k_group, groups, is_closed);
    float total = epsilon;
    for (int64_t j = 0; j < k; j++) {
        int64_t best = best_open(choice, is_closed, experts);
        is_closed[best] = 1;
        chosen[j] = (int32_t)best;
        weights[j] = score[best];
        total += score[best];
    }
    for (int64_t j = 0; j < k; j++) weights[j] = weights[j] / total * factor;
}

#ifndef ELEM_BF16
int glm_gating_top_k_f32(int64_t tokens, int64_t experts, int64_t k, int64_t k_group,
                         int64_t groups, double factor, double epsilon, const float *logits,
                         const float *bias, float *weights, int32_t *chosen) {
    if (experts > MAX_EXPERTS) return OUT_OF_RANGE;
#pragma omp parallel for if (tokens * experts * k > PARALLEL_ELEMENTS)
    for (int64_t token = 0; token < tokens; token++)
        choose(logits + token * experts, bias, experts, k, k_group, groups, (float)factor,
               (float)epsilon, weights + token * k, chosen + token * k);
    return OK;
}
#endif

int KERNEL(init_routing)(int64_t tokens, int64_t k, int64_t width, int64_t first, int64_t last,
                         const elem_t *x, const int32_t *experts, elem_t *rows, int32_t *order,
                         int64_t *counts) {
    int64_t copies = tokens * k;
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
#pragma omp parallel for if (copies * width > PARALLEL_ELEMENTS)
    for (int64_t i = 0; i < copies; i++)
        if (order[i] >= 0)
            memcpy(rows + order[i] * width, x + i / k * width, (size_t)width * sizeof(elem_t));
    return OK;
}

int KERNEL(token_unpermute)(int64_t tokens, int64_t k, int64_t width, const elem_t *rows,
                            const int32_t *order, const elem_t *weights, elem_t *y) {
#pragma omp parallel for if (tokens * k * width > PARALLEL_ELEMENTS)
    for (int64_t token = 0; token < tokens; token++) {
        elem_t *out = y + token * width;
        for (int64_t base = 0; base < width; base += 64) {
            int64_t count = width - base < 64 ? width - base : 64;
            float total[64] = {0};
            for (int64_t j = 0; j < k; j++) {
                float weight = to_float(weights[token * k + j]);
                const elem_t *row = rows + (int64_t)order[token * k + j] * width + base;
#pragma omp simd
                for (int64_t i = 0; i < count; i++) total[i] += weight * to_float(row[i]);
            }
            for (int64_t i = 0; i < count; i++) out[base + i] = from_float(total[i]);
        }
    }
    return OK;
}
