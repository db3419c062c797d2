/* SPDX-License-Identifier: Apache-2.0 */
/* Quantization to codes of one to eight bits, stored as bit planes. */

#define TILE 1024

/* The parameters of the code; `squared` is used only to encode, `dither` only to decode. */
typedef struct {
    int64_t n, block;
    uint64_t seed;
    int bits, scale_bytes, squared, dither;
    float shift;
} coding;

typedef struct {
    int bits, dither;
    uint64_t seed;
    float shift, half;
} grid;

static grid grid_of(const coding *c) {
    float half = c->bits == 1 ? 0.5f : (float)((1 << (c->bits - 1)) - 1);
    return (grid){c->bits, c->dither, c->seed, c->shift, half};
}

INLINE float draw_for(const grid *g, int64_t place) {
    float draw = draw_at((uint32_t)place, g->seed) + g->shift;
    return draw >= 1 ? draw - 1 : draw;
}

static void code(const float *x, int64_t begin, int64_t count, float scale, const grid *g, uint8_t *codes) {
    float half = g->half, top = 2 * half, divisor = scale > 0 ? scale : 1;
    for (int64_t i = 0; i < count; i++) {
        float ratio = scale > 0 ? x[i] / divisor : 0;
        float place = half == 0.5f ? (ratio + 1) * 0.5f : ratio * half + half;
        place = place + draw_for(g, begin + i);
        /* In fp32 the sum may round up to the next code, and NaN must not reach the cast. */
        place = place > 0 ? place : 0;
        place = place < top ? place : top;
        codes[i] = (uint8_t)(int32_t)place;
    }
}

/* Write the bits of `count` codes, a multiple of 8, into the planes. */
static void write_planes(const uint8_t *codes, int64_t count, uint8_t *out, int64_t plane, int bits) {
    int64_t i = 0;
#if defined(__AVX2__) && !defined(THINWIRE_PORTABLE)
    for (; i + 32 <= count; i += 32) {
        __m256i some = _mm256_loadu_si256((const __m256i *)(codes + i));
        for (int bit = 0; bit < bits; bit++) {
            uint32_t word = (uint32_t)_mm256_movemask_epi8(_mm256_slli_epi16(some, 7 - bit));
            memcpy(out + bit * plane + i / 8, &word, 4);
        }
    }
#endif
    for (; i < count; i += 8)
        for (int bit = 0; bit < bits; bit++) {
            uint32_t byte = 0;
            for (int j = 0; j < 8; j++) byte |= (uint32_t)(codes[i + j] >> bit & 1) << j;
            out[bit * plane + i / 8] = (uint8_t)byte;
        }
}

static void read_planes(uint8_t *codes, int64_t count, const uint8_t *payload, int64_t plane, int bits) {
    int64_t i = 0;
#if defined(__AVX2__) && !defined(THINWIRE_PORTABLE)
    const __m256i own = _mm256_setr_epi8(
        0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    const __m256i single = _mm256_set1_epi64x((long long)0x8040201008040201ull);
    for (; i + 32 <= count; i += 32) {
        __m256i some = _mm256_setzero_si256();
        for (int bit = 0; bit < bits; bit++) {
            int32_t word;
            memcpy(&word, payload + bit * plane + i / 8, 4);
            __m256i spread = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(word), own), single);
            __m256i set = _mm256_cmpeq_epi8(spread, single);
            some = _mm256_or_si256(some, _mm256_and_si256(set, _mm256_set1_epi8((char)(1 << bit))));
        }
        _mm256_storeu_si256((__m256i *)(codes + i), some);
    }
#endif
    for (; i < count; i += 8)
        for (int j = 0; j < 8; j++) {
            uint32_t value = 0;
            for (int bit = 0; bit < bits; bit++) value |= (uint32_t)(payload[bit * plane + i / 8] >> j & 1) << bit;
            codes[i + j] = (uint8_t)value;
        }
}

static float largest_size(const float *x, int64_t n) {
    int32_t largest = 0;
    /* Absolute values are ordered as their bits are, and NaN is above all: the largest bits keep a NaN. */
    for (int64_t i = 0; i < n; i++) {
        int32_t bits = (int32_t)(bits_of(x[i]) & 0x7fffffffu);
        largest = bits > largest ? bits : largest;
    }
    return float_of((uint32_t)largest);
}

static float scale_of(const float *x, int64_t n, int squared, int scale_bytes) {
    float scale = squared ? block_scale(tree_sum(x, n, 1), x, n, 1, 1) : largest_size(x, n);
    if (scale_bytes == 4) return scale;
    /* Rounded up to bf16: no element may exceed its scale. */
    uint32_t half = half_of(scale);
    if (float_of(half << 16) < scale) half++;
    return float_of(half << 16);
}

void thinwire_quantize(const float *x, uint8_t *out, const coding *c) {
    const grid g = grid_of(c);
    const int64_t n = c->n, block = c->block;
    const int bits = c->bits, squared = c->squared, scale_bytes = c->scale_bytes;
    int64_t blocks = (n + block - 1) / block, plane = (n + 7) / 8, i = 0;
    uint8_t codes[TILE], *planes = out + blocks * scale_bytes;
    for (int64_t b = 0; b < blocks; b++) {
        int64_t end = smaller(n, (b + 1) * block);
        float scale = scale_of(x + i, end - i, squared, scale_bytes);
        write_scale(out, b, scale, scale_bytes);
        while (i < end) {
            int64_t some = smaller(end - i, TILE - i % TILE);
            code(x + i, i, some, scale, &g, codes + i % TILE);
            i += some;
            if (i % TILE == 0) write_planes(codes, TILE, planes + (i - TILE) / 8, plane, bits);
        }
    }
    int64_t left = n % TILE, whole = (left + 7) / 8 * 8;
    memset(codes + left, 0, (size_t)(whole - left));
    write_planes(codes, whole, planes + (n - left) / 8, plane, bits);
}

static void value(const uint8_t *codes, int64_t begin, int64_t count, float scale, const grid *g, float *out) {
    float half = g->half, step = scale / half;
    if (g->dither)
        for (int64_t i = 0; i < count; i++)
            out[i] = ((float)(int32_t)codes[i] - draw_for(g, begin + i) + 0.5f - half) * step;
    else
        for (int64_t i = 0; i < count; i++) out[i] = ((float)(int32_t)codes[i] - half) * step;
}

void thinwire_dequantize(const uint8_t *payload, float *out, const coding *c) {
    const grid g = grid_of(c);
    const int64_t n = c->n, block = c->block;
    const int bits = c->bits, scale_bytes = c->scale_bytes;
    int64_t blocks = (n + block - 1) / block, plane = (n + 7) / 8;
    uint8_t codes[TILE];
    const uint8_t *planes = payload + blocks * scale_bytes;
    for (int64_t i = 0; i < n;) {
        int64_t begin = i, end = smaller(n, begin + TILE);
        read_planes(codes, (end - begin + 7) / 8 * 8, planes + begin / 8, plane, bits);
        while (i < end) {
            int64_t b = i / block, some = smaller(end, (b + 1) * block) - i;
            value(codes + (i - begin), i, some, read_scale(payload, b, scale_bytes), &g, out + i);
            i += some;
        }
    }
}
