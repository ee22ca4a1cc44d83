/* Draws one token per row: softmax at a temperature, min-p, top-k, top-p, inverse distribution.
 *
 * The law of services/worker/draw.py, one row at a time: what is kept is every token at least as
 * likely as a threshold, and the token is the first, ids ascending, whose running sum exceeds u
 * times the sum. A row's arithmetic has one order, whatever the other rows want.
 */
#include <stdatomic.h>

#include "elem.h"

enum { DRAW_BLOCK = 64 };

/* Less likely than the best token by this exponent counts as impossible: 1e-35. */
static const float NEGLIGIBLE = -80.0f;
/* Bounds tried for the least weight kept; the best token weighs 1. */
static const float BOUNDS[] = {1.0f / 64, 1.0f / 4096, 1.0f / (1 << 24), 0.0f};
/* The first bound of top-p alone: this share of the mass that it drops. */
static const float DROPPED_SHARE = 1.0f / 64;

typedef struct {
    int64_t width, stride;
    const float *logits;
    const int64_t *places;
    const float *temperatures, *top_ps, *min_ps;
    const int64_t *top_ks, *seeds, *positions;
    int64_t *tokens;
    atomic_int *failed;
} draw_t;

/* The finaliser of SplitMix64; services/worker/uniform.py has the same. */
ALWAYS_INLINE uint64_t mix(uint64_t state) {
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9u;
    state = (state ^ (state >> 27)) * 0x94D049BB133111EBu;
    return state ^ (state >> 31);
}

ALWAYS_INLINE float uniform(int64_t seed, int64_t position) {
    uint64_t state = mix(mix((uint64_t)seed) + ((uint64_t)position + 1) * 0x9E3779B97F4A7C15u);
    return (float)(state >> 40) * 0x1p-24f;
}

/* Weights of a row, 1 for the best token; returns their sum. */
static double weigh(const float *x, int64_t width, float temperature, float *weights) {
    float largest = -INFINITY, factor = 1.0f / temperature;
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < width; i++) largest = x[i] > largest ? x[i] : largest;
    double total = 0.0;
    for (int64_t first = 0; first < width; first += DRAW_BLOCK) {
        int64_t last = first + DRAW_BLOCK < width ? first + DRAW_BLOCK : width;
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = first; i < last; i++) {
            float distance = (x[i] - largest) * factor;
            weights[i] = distance > NEGLIGIBLE ? fast_exp(distance) : 0.0f;
            sum += weights[i];
        }
        total += (double)sum;
    }
    return total;
}

static void sift_down(float *heap, int64_t count, int64_t place) {
    float value = heap[place];
    for (int64_t child; (child = 2 * place + 1) < count; place = child) {
        if (child + 1 < count && heap[child + 1] > heap[child]) child++;
        if (heap[child] <= value) break;
        heap[place] = heap[child];
    }
    heap[place] = value;
}

/* Move the largest of a heap behind its end; the popped ones stand there in ascending order. */
ALWAYS_INLINE float pop(float *heap, int64_t *count) {
    float largest = heap[0];
    heap[0] = heap[--*count];
    heap[*count] = largest;
    if (*count) sift_down(heap, *count, 0);
    return largest;
}

static int64_t collect(const float *weights, int64_t width, float bound, float *found) {
    int64_t count = 0;
    for (int64_t i = 0; i < width; i++) {
        found[count] = weights[i];
        count += weights[i] >= bound && weights[i] > 0.0f;
    }
    return count;
}

/* The likeliest tokens of a row as a heap: certainly all that the filters keep. */
static int64_t gather(const float *weights, int64_t width, double total, int64_t top_k,
                      float top_p, float min_p, float *heap) {
    int64_t count = 0;
    if (!top_k && min_p == 0.0f) {
        count = collect(weights, width, (float)((1.0 - top_p) * total) * DROPPED_SHARE, heap);
        double mass = 0.0;
        for (int64_t i = 0; i < count; i++) mass += (double)heap[i];
        if (mass < top_p * total * (1.0 + 1e-6)) count = collect(weights, width, 0.0f, heap);
    } else {
        for (int i = 0; i < 4; i++) {
            float bound = top_k && BOUNDS[i] > min_p ? BOUNDS[i] : min_p;
            count = collect(weights, width, bound, heap);
            if (bound == min_p || count >= top_k) break;
        }
    }
    for (int64_t i = count / 2 - 1; i >= 0; i--) sift_down(heap, count, i);
    return count;
}

/* The least weight kept. */
static float threshold(const float *weights, int64_t width, double total, int64_t top_k,
                       float top_p, float min_p, float *heap) {
    int64_t size = gather(weights, width, total, top_k, top_p, min_p, heap), count = size;
    float floor = min_p;
    if (top_k || min_p > 0.0f) {
        /* min-p and top-k first: pop all that they leave, equal weights together. */
        double left = 0.0;
        while (count && (heap[0] >= floor)) {
            float weight = pop(heap, &count);
            left += (double)weight;
            if (size - count == top_k && weight > floor) floor = weight;
        }
        total = left;
    }
    if (top_p >= 1.0f) return floor;
    /* Then the likeliest of them until top-p has its share; alone, it pops as it goes. */
    int64_t end = top_k || min_p > 0.0f ? count : 0;
    double before = 0.0;
    float kept = 1.0f;
    for (int64_t i = size - 1; i >= end && before < (double)top_p * total; i--) {
        if (i < count) pop(heap, &count);
        kept = heap[i];
        before += (double)kept;
    }
    return kept;
}

/* First place whose running sum of weights at or above the threshold exceeds u times the sum. */
static int64_t invert(const float *weights, int64_t width, float least, float u) {
    double total = 0.0, target, before = 0.0;
    for (int pass = 0; pass < 2; pass++) {
        target = (double)u * total;
        before = 0.0;
        for (int64_t first = 0; first < width; first += DRAW_BLOCK) {
            int64_t last = first + DRAW_BLOCK < width ? first + DRAW_BLOCK : width;
            float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = first; i < last; i++) sum += weights[i] >= least ? weights[i] : 0.0f;
            if (pass && before + (double)sum > target) {
                int64_t token = first;
                for (int64_t i = first; i < last; i++) {
                    if (weights[i] < least || weights[i] == 0.0f) continue;
                    token = i;
                    before += (double)weights[i];
                    if (before > target) break;
                }
                return token;
            }
            before += (double)sum;
        }
        total = before;
    }
    return 0; /* rows of NaN */
}

static void draw_rows(const void *context, int64_t first, int64_t last) {
    const draw_t *d = context;
    float *weights = malloc(sizeof(float) * 2 * (size_t)d->width);
    if (!weights) {
        atomic_store(d->failed, 1);
        return;
    }
    for (int64_t row = first; row < last; row++) {
        const float *x = d->logits + d->places[row] * d->stride;
        double total = weigh(x, d->width, d->temperatures[row], weights);
        int64_t top_k = d->top_ks[row] < d->width ? d->top_ks[row] : 0;
        float top_p = d->top_ps[row], min_p = d->min_ps[row], least = 0.0f;
        if (top_k || top_p < 1.0f || min_p > 0.0f)
            least = threshold(weights, d->width, total, top_k, top_p, min_p, weights + d->width);
        d->tokens[row] =
            invert(weights, d->width, least, uniform(d->seeds[row], d->positions[row]));
    }
    free(weights);
}

int KERNEL(draw)(int64_t rows, int64_t width, int64_t stride, const float *logits,
                 const int64_t *places, const float *temperatures, const int64_t *top_ks,
                 const float *top_ps, const float *min_ps, const int64_t *seeds,
                 const int64_t *positions, int64_t *tokens) {
    atomic_int failed = 0;
    draw_t d = {width, stride, logits, places, temperatures, top_ps, min_ps, top_ks, seeds,
                positions, tokens, &failed};
    over_rows(rows, width, draw_rows, &d);
    return failed ? NO_MEMORY : OK;
}
