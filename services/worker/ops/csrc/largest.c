/* The largest number of each row and its place: the first among equals, or the first NaN. */
#include "elem.h"

#ifndef ELEM_BF16 /* logits are float32 */
typedef struct {
    int64_t width, stride;
    const float *x;
    float *values;
    int64_t *places;
} largest_t;

/* The first place that equals `value`, which is in the row. */
static int64_t first_place(const float *x, int64_t width, float value) {
    enum { GROUP = 64 };
    int64_t start = 0;
    for (; start + GROUP <= width; start += GROUP) {
        int is_there = 0;
#pragma omp simd reduction(| : is_there)
        for (int64_t i = 0; i < GROUP; i++) is_there |= x[start + i] == value;
        if (is_there) break;
    }
    while (start < width && x[start] != value) start++;
    return start;
}

static int64_t first_nan(const float *x, int64_t width) {
    int64_t place = 0;
    while (place < width && x[place] == x[place]) place++;
    return place;
}

static void find_largest(const void *context, int64_t first, int64_t last) {
    const largest_t *l = context;
    for (int64_t row = first; row < last; row++) {
        const float *x = l->x + row * l->stride;
        float largest = -INFINITY;
        int has_nan = 0;
#pragma omp simd reduction(max : largest) reduction(| : has_nan)
        for (int64_t i = 0; i < l->width; i++) {
            largest = x[i] > largest ? x[i] : largest;
            has_nan |= x[i] != x[i];
        }
        l->places[row] = has_nan ? first_nan(x, l->width) : first_place(x, l->width, largest);
        l->values[row] = has_nan ? NAN : largest;
    }
}

int glm_largest_f32(int64_t rows, int64_t width, int64_t stride, const float *x, float *values,
                    int64_t *places) {
    if (width < 1) return OUT_OF_RANGE;
    largest_t l = {width, stride, x, values, places};
    over_rows(rows, width, find_largest, &l);
    return OK;
}
#endif
