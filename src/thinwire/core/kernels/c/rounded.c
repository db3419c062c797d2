/* SPDX-License-Identifier: Apache-2.0 */
/* Codes of one to eight bits, each the nearest of 2^bits levels, and the scale that fits them best. */

/* Of the mean absolute value: half the distance of levels that is best for normal numbers. From five bits on the levels
   reach to the largest number instead. */
static const float HALF_STEPS[5] = {0, 1.0f, 0.6240f, 0.3672f, 0.2101f};
/* Below this a block counts as zero: the reciprocal of its levels' distance would be infinite. */
#define SMALLEST_STEP 1e-30f

typedef struct {
    int64_t n, block;
    int bits;
} rounding;

/* Codes that wait for their bits to be written. */
typedef struct {
    uint8_t codes[2 * TILE], *planes;
    int64_t waiting, written, plane;
    int bits;
} plane_writer;

static void flush_tile(plane_writer *w) {
    write_planes(w->codes, TILE, w->planes + w->written / 8, w->plane, w->bits);
    w->written += TILE;
    w->waiting -= TILE;
    memcpy(w->codes, w->codes + TILE, (size_t)w->waiting);
}

static void flush_rest(plane_writer *w) {
    int64_t whole = (w->waiting + 7) / 8 * 8;
    memset(w->codes + w->waiting, 0, (size_t)(whole - w->waiting));
    write_planes(w->codes, whole, w->planes + w->written / 8, w->plane, w->bits);
}

/* Half the distance of levels, before it is fitted. */
static float half_step(const float *x, int64_t n, int bits) {
    if (bits > 4) return largest_size(x, n) / (float)(1 << bits);
    return HALF_STEPS[bits] * block_scale(tree_sum(x, n, 0), x, n, (float)n, 0);
}

/* The codes of up to a tile, and for the fit the products of sizes and levels and the sum of squared levels. */
static int64_t code_tile(const float *x, int64_t n, float inverse, int bits, uint8_t *codes, float *products) {
    const float most = (float)((1 << (bits - 1)) - 1);
    const int32_t middle = 1 << (bits - 1);
    int32_t squares = 0;
    for (int64_t i = 0; i < n; i++) {
        float size = float_of(bits_of(x[i]) & 0x7fffffffu) * inverse;
        /* NaN must not reach the cast. */
        int32_t step = (int32_t)(size < most ? size : most);
        int32_t sign = -(int32_t)(bits_of(x[i]) >> 31);
        codes[i] = (uint8_t)(middle + (step ^ sign));
        int32_t level = 2 * step + 1;
        products[i] = size * (float)level;
        squares += level * level;
    }
    return squares;
}

static void subtract_levels(float *x, int64_t n, float inverse, int bits, float scale) {
    const float most = (float)((1 << (bits - 1)) - 1);
    for (int64_t i = 0; i < n; i++) {
        float size = float_of(bits_of(x[i]) & 0x7fffffffu) * inverse;
        float level = (float)(2 * (int32_t)(size < most ? size : most) + 1) * scale;
        x[i] -= float_of(bits_of(level) | (bits_of(x[i]) & 0x80000000u));
    }
}

/* residual may be null; otherwise it becomes the rounding error of x plus residual. */
void thinwire_encode_rounded(const float *x, float *residual, uint8_t *out, const rounding *c) {
    const int64_t n = c->n, block = c->block, blocks = (n + block - 1) / block;
    const int bits = c->bits;
    plane_writer w = {.planes = out + 4 * blocks, .plane = (n + 7) / 8, .bits = bits};
    float products[TILE];
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t begin = b * block, count = smaller(n, begin + block) - begin;
        if (residual) add_to(residual + begin, x + begin, count);
        const float *totals = (residual ? residual : x) + begin;
        const float half = half_step(totals, count, bits);
        const int some = half >= SMALLEST_STEP;
        const float inverse = some ? 1 / (2 * half) : 0;
        tree sum = {.occupied = 0};
        int64_t squares = 0;
        for (int64_t i = 0; i < count; i += TILE) {
            const int64_t part = smaller(count - i, TILE);
            squares += code_tile(totals + i, part, inverse, bits, w.codes + w.waiting, products);
            tree_more(&sum, products, part, 0);
            if ((w.waiting += part) >= TILE) flush_tile(&w);
        }
        const float scale = some ? 2 * half * (tree_total(&sum) / (float)squares) : 0;
        write_scale(out, b, scale, 4);
        if (residual && some) subtract_levels(residual + begin, count, inverse, bits, scale);
    }
    flush_rest(&w);
}

void thinwire_decode_rounded(const uint8_t *payload, float *out, const rounding *c) {
    const int64_t n = c->n, block = c->block, blocks = (n + block - 1) / block, plane = (n + 7) / 8;
    const int32_t top = (1 << c->bits) - 1;
    uint8_t codes[TILE];
    for (int64_t i = 0; i < n;) {
        const int64_t begin = i, end = smaller(n, begin + TILE);
        read_planes(codes, (end - begin + 7) / 8 * 8, payload + 4 * blocks + begin / 8, plane, c->bits);
        while (i < end) {
            const int64_t b = i / block, part = smaller(end, (b + 1) * block) - i;
            const float scale = read_scale(payload, b, 4);
            const uint8_t *own = codes + (i - begin);
            for (int64_t j = 0; j < part; j++) out[i + j] = (float)(2 * (int32_t)own[j] - top) * scale;
            i += part;
        }
    }
}
