/* SPDX-License-Identifier: Apache-2.0 */
/* What the kernels share: arithmetic on sixteen numbers at a time, in whatever vectors the processor has.

   No sum is reassociated and no product fused with a sum, so the results are torch's, bit by bit. Only the gradients of
   linear layers (linear.c) differ in rounding. THINWIRE_PORTABLE avoids all intrinsics; the results are the same. */

#include <stdint.h>
#include <string.h>
#if defined(__x86_64__) && !defined(THINWIRE_PORTABLE)
#include <immintrin.h>
#endif

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

typedef float floats __attribute__((vector_size(64)));
typedef int32_t ints __attribute__((vector_size(64)));
typedef uint32_t words __attribute__((vector_size(64)));
typedef floats unaligned __attribute__((aligned(4), may_alias));

/* How far bit 0 to 15 of a word is from the sign bit of its lane. */
static const words SIGN_SHIFTS = {31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16};

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE floats load(const float *x) { return *(const unaligned *)x; }
INLINE void store(float *x, floats value) { *(unaligned *)x = value; }
INLINE floats broadcast(float x) { return x - (floats){}; }
INLINE floats abs_of(floats x) { return (floats)((words)x & 0x7fffffffu); }

/* Collect the highest bit of every lane: bit j is that of lane j. */
INLINE uint32_t high_bits(words x) {
#if defined(__AVX512DQ__) && !defined(THINWIRE_PORTABLE)
    return _mm512_movepi32_mask((__m512i)x);
#elif defined(__AVX2__) && !defined(THINWIRE_PORTABLE)
    __m256 low, high;
    memcpy(&low, &x, 32);
    memcpy(&high, (const char *)&x + 32, 32);
    return (uint32_t)_mm256_movemask_ps(low) | (uint32_t)_mm256_movemask_ps(high) << 8;
#else
    uint32_t bits = 0;
    for (int lane = 0; lane < LANES; lane++) bits |= x[lane] >> 31 << lane;
    return bits;
#endif
}

#if defined(__AVX512F__) && !defined(THINWIRE_PORTABLE)
/* Minimum and maximum of each lane. */
INLINE floats lower(floats a, floats b) { return (floats)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE floats upper(floats a, floats b) { return (floats)_mm512_max_ps((__m512)b, (__m512)a); }
#elif defined(__AVX2__) && !defined(THINWIRE_PORTABLE)
INLINE floats lower(floats a, floats b) {
    __m256 x[2], y[2];
    memcpy(x, &a, 64);
    memcpy(y, &b, 64);
    for (int half = 0; half < 2; half++) x[half] = _mm256_min_ps(x[half], y[half]);
    memcpy(&a, x, 64);
    return a;
}
INLINE floats upper(floats a, floats b) {
    __m256 x[2], y[2];
    memcpy(x, &a, 64);
    memcpy(y, &b, 64);
    for (int half = 0; half < 2; half++) x[half] = _mm256_max_ps(y[half], x[half]);
    memcpy(&a, x, 64);
    return a;
}
#else
INLINE floats lower(floats a, floats b) {
    words less = (words)(a < b);
    return (floats)(((words)a & less) | ((words)b & ~less));
}
INLINE floats upper(floats a, floats b) {
    words less = (words)(a < b);
    return (floats)(((words)b & less) | ((words)a & ~less));
}
#endif

/* Sixteen bits of a stream from bit `place` on, moved to the sign bits of the lanes. Reads four bytes. */
INLINE words signs_at(const uint8_t *stream, int64_t place) {
    uint32_t word;
    memcpy(&word, stream + (place >> 3), 4);
    return ((word >> (place & 7)) + (words){}) << SIGN_SHIFTS & 0x80000000u;
}

INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

INLINE float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* -- random numbers: a function of a seed and an index -- */

INLINE uint32_t mixed(uint32_t word) {
    word = (word ^ word >> 16) * 0x85ebca6bu;
    word = (word ^ word >> 13) * 0xc2b2ae35u;
    return word ^ word >> 16;
}

INLINE uint32_t word_at(uint32_t place, uint64_t seed) {
    return mixed(mixed(place ^ (uint32_t)seed) ^ (uint32_t)(seed >> 32));
}

INLINE float draw_at(uint32_t place, uint64_t seed) {
    return (float)(int32_t)(word_at(place, seed) >> 8) * 0x1p-24f;
}

static uint64_t mixed_long(uint64_t word) {
    word = (word ^ word >> 33) * 0xff51afd7ed558ccdull;
    word = (word ^ word >> 33) * 0xc4ceb9fe1a85ec53ull;
    return word ^ word >> 33;
}

void thinwire_uniform(float *out, int64_t n, uint64_t seed, uint64_t offset) {
    for (int64_t i = 0; i < n; i++) out[i] = draw_at((uint32_t)(offset + (uint64_t)i), seed);
}

/* -- scales: fp32, or bf16 to nearest even -- */

INLINE uint16_t half_of(float x) {
    uint32_t bits = bits_of(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE void write_scale(uint8_t *out, int64_t at, float scale, int scale_bytes) {
    if (scale_bytes == 4) {
        memcpy(out + 4 * at, &scale, 4);
        return;
    }
    uint16_t half = half_of(scale);
    memcpy(out + 2 * at, &half, 2);
}

INLINE float read_scale(const uint8_t *payload, int64_t at, int scale_bytes) {
    uint32_t bits = 0;
    memcpy((uint8_t *)&bits + 4 - scale_bytes, payload + scale_bytes * at, scale_bytes);
    return float_of(bits);
}

/* -- pairwise sums of rows of sixteen lanes, as a binary counter: level k holds the sum of 2^k rows; then the lanes are
   added, halves first -- */

typedef struct {
    floats levels[48];
    uint64_t occupied;
} tree;

INLINE void tree_add(tree *sum, floats row, int level) {
    for (; sum->occupied >> level & 1; level++) {
        row = sum->levels[level] + row;
        sum->occupied ^= 1ull << level;
    }
    sum->levels[level] = row;
    sum->occupied |= 1ull << level;
}

static float tree_total(const tree *sum) {
    floats row = {};
    int found = 0;
    for (int level = 0; level < 48; level++)
        if (sum->occupied >> level & 1) {
            row = found ? (floats)(sum->levels[level] + row) : sum->levels[level];
            found = 1;
        }
    float lanes[LANES];
    store(lanes, row);
    for (int half = LANES / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
    return lanes[0];
}

/* The last elements, fewer than sixteen, padded with zeros. */
INLINE floats load_some(const float *x, int64_t count) {
    float filled[LANES] = {0};
    for (int64_t i = 0; i < count; i++) filled[i] = x[i];
    return load(filled);
}

INLINE floats magnitude(floats x, int squared) { return squared ? x * x : abs_of(x); }

/* Add absolute values, or squares; of several calls all but the last add a multiple of 128. */
INLINE void tree_more(tree *sum, const float *x, int64_t n, int squared) {
    int64_t i = 0;
    for (; i + 8 * LANES <= n; i += 8 * LANES) {
        floats row[8];
        for (int k = 0; k < 8; k++) row[k] = magnitude(load(x + i + k * LANES), squared);
        tree_add(sum, ((row[0] + row[1]) + (row[2] + row[3])) + ((row[4] + row[5]) + (row[6] + row[7])), 3);
    }
    for (; i + LANES <= n; i += LANES) tree_add(sum, magnitude(load(x + i), squared), 0);
    if (i < n) tree_add(sum, magnitude(load_some(x + i, n - i), squared), 0);
}

/* The sum of absolute values, or of squares. */
static float tree_sum(const float *x, int64_t n, int squared) {
    tree sum = {.occupied = 0};
    tree_more(&sum, x, n, squared);
    return tree_total(&sum);
}

/* A scale from a sum of absolute values or squares over `count`. If it overflowed, it is taken again of numbers 2^96
   times smaller. */
static float block_scale(float sum, const float *x, int64_t n, float count, int squared) {
    float mean = sum / count, scale = squared ? __builtin_sqrtf(mean) : mean;
    if (scale != __builtin_inff()) return scale;
    tree small = {.occupied = 0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) tree_add(&small, magnitude(load(x + i) * 0x1p-96f, squared), 0);
    if (i < n) tree_add(&small, magnitude(load_some(x + i, n - i) * 0x1p-96f, squared), 0);
    mean = tree_total(&small) / count;
    return (squared ? __builtin_sqrtf(mean) : mean) * 0x1p96f;
}
