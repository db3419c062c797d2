/* SPDX-License-Identifier: Apache-2.0 */
/* Steps of adaptive optimizers with frozen variance. 1-bit LAMB needs two passes: one turns momenta into directions and
   computes what the trust ratio needs, the other steps. 1-bit Adam needs one.

   Sums of squares are pairwise sums. A strip is sixteen elements; the last one may be shorter, and is copied into a
   buffer, so that nothing beyond the end is read or written. */

typedef struct {
    const float *frozen, *x;
    float *momentum, *before, *fresh;
} tensors;

typedef struct {
    float beta1, beta2, fresh_weight, eps, decay;
} coefficients;

typedef struct {
    floats largest;
    words nan;
} maximum;

#if defined(__AVX512F__) && !defined(THINWIRE_PORTABLE)
INLINE floats roots_of(floats x) { return (floats)_mm512_sqrt_ps((__m512)x); }
#elif defined(__AVX2__) && !defined(THINWIRE_PORTABLE)
INLINE floats roots_of(floats x) {
    __m256 halves[2];
    memcpy(halves, &x, 64);
    for (int half = 0; half < 2; half++) halves[half] = _mm256_sqrt_ps(halves[half]);
    memcpy(&x, halves, 64);
    return x;
}
#else
INLINE floats roots_of(floats x) {
    for (int lane = 0; lane < LANES; lane++) x[lane] = __builtin_sqrtf(x[lane]);
    return x;
}
#endif

/* Update the maximum with a strip of `count` ratios. NaN is recorded separately, as a maximum would lose it. */
INLINE void update_maximum(maximum *top, floats ratio, int64_t count) {
    for (int64_t lane = count; lane < LANES; lane++) ratio[lane] = 0;
    top->largest = upper(ratio, top->largest);
    top->nan |= (words)(ratio != ratio);
}

static float maximum_of(const maximum *top) {
    float largest = 0;
    uint32_t nan = 0;
    for (int lane = 0; lane < LANES; lane++) {
        largest = top->largest[lane] > largest ? top->largest[lane] : largest;
        nan |= top->nan[lane];
    }
    return nan ? __builtin_nanf("") : largest;
}

/* Compute one strip of directions. Returns their squares without decay; `whole` gets those with decay. */
INLINE floats direction_strip(
    const tensors *at, int64_t i, int64_t count, coefficients by, maximum *top, floats *whole
) {
    floats m = load(at->momentum + i), gradient = m - by.beta1 * load(at->before + i);
    floats fresh = by.beta2 * load(at->fresh + i) + by.fresh_weight * (gradient * gradient);
    floats denominator = roots_of(load(at->frozen + i)) + by.eps, u = m / denominator;
    floats square = u * u;
    update_maximum(top, denominator / (roots_of(fresh) + by.eps), count);
    if (at->x) {
        u = u + by.decay * load(at->x + i);
        *whole = u * u;
    }
    store(at->before + i, m);
    store(at->fresh + i, fresh);
    store(at->momentum + i, u);
    return square;
}

INLINE floats pairwise(const floats *row) {
    return ((row[0] + row[1]) + (row[2] + row[3])) + ((row[4] + row[5]) + (row[6] + row[7]));
}

/* The last strip, of fewer than sixteen elements. */
static floats direction_tail(
    const tensors *at, int64_t i, int64_t n, coefficients by, maximum *top, floats *whole
) {
    float buffer[5][LANES] = {{0}};
    const float *from[5] = {at->frozen, at->x, at->momentum, at->before, at->fresh};
    size_t nbytes = (size_t)(n - i) * sizeof(float);
    for (int k = 0; k < 5; k++)
        if (from[k]) memcpy(buffer[k], from[k] + i, nbytes);
    tensors copied = {buffer[0], at->x ? buffer[1] : 0, buffer[2], buffer[3], buffer[4]};
    floats square = direction_strip(&copied, 0, n - i, by, top, whole);
    memcpy(at->momentum + i, buffer[2], nbytes);
    memcpy(at->before + i, buffer[3], nbytes);
    memcpy(at->fresh + i, buffer[4], nbytes);
    return square;
}

INLINE void directions(const tensors *at, int64_t n, coefficients by, float *found) {
    maximum top = {{0}, {0}};
    tree plain = {.occupied = 0}, whole = {.occupied = 0};
    floats first[8], second[8] = {{0}};
    int64_t i = 0;
    for (; i + 8 * LANES <= n; i += 8 * LANES) {
        for (int k = 0; k < 8; k++) first[k] = direction_strip(at, i + k * LANES, LANES, by, &top, second + k);
        if (!at->x) continue;
        tree_add(&plain, pairwise(first), 3);
        tree_add(&whole, pairwise(second), 3);
    }
    for (; i < n; i += LANES) {
        *first = i + LANES <= n ? direction_strip(at, i, LANES, by, &top, second)
                                : direction_tail(at, i, n, by, &top, second);
        tree_add(&plain, *first, 0);
        tree_add(&whole, *second, 0);
    }
    found[0] = maximum_of(&top);
    found[1] = at->x ? tree_total(&plain) : 0;
    found[2] = at->x ? tree_total(&whole) : 0;
}

/* found[0] is the largest ratio, found[1] and found[2] the sums of squares without and with decay. x is null without
   decay; the sums are then not needed and 0. Two calls, so that the compiler makes a version of the loop for each. */
void thinwire_lamb_direction(
    float *momentum, float *before, const float *frozen, float *fresh, const float *x, int64_t n, const float *numbers,
    float *found
) {
    tensors with = {frozen, x, momentum, before, fresh}, without = {frozen, 0, momentum, before, fresh};
    coefficients by;
    memcpy(&by, numbers, sizeof by);
    if (x) directions(&with, n, by, found);
    else directions(&without, n, by, found);
}

void thinwire_scaled_step(float *restrict x, const float *restrict direction, int64_t n, float ratio, float rate) {
    for (int64_t i = 0; i < n; i++) x[i] = x[i] - rate * (ratio * direction[i]);
}

/* 1-bit Adam has no trust ratio, so one pass does all. */
void thinwire_frozen_adam_step(
    float *x, float *before, const float *momentum, const float *frozen, int64_t n, float eps, float decay, float rate
) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        floats m = load(momentum + i), place = load(x + i), u = m / (roots_of(load(frozen + i)) + eps);
        if (decay != 0) u = u + decay * place;
        store(before + i, m);
        store(x + i, place - rate * u);
    }
    for (; i < n; i++) {
        float u = momentum[i] / (__builtin_sqrtf(frozen[i]) + eps);
        if (decay != 0) u = u + decay * x[i];
        before[i] = momentum[i];
        x[i] = x[i] - rate * u;
    }
}
