/* SPDX-License-Identifier: Apache-2.0 */
/* One bit per number: its sign. */

/* Elements that are summed over all payloads while they are in the innermost cache. */
#define CHUNK 4096

/* Write the signs of elements begin.. to bits begin.. of a stream whose bits are still zero. */
static void write_signs(const float *x, int64_t begin, int64_t count, uint8_t *stream) {
    int64_t i = 0;
    for (; i < count && (begin + i) % 8; i++)
        stream[(begin + i) / 8] |= (uint8_t)(bits_of(x[i]) >> 31 << (begin + i) % 8);
    for (; i + LANES <= count; i += LANES) {
        uint16_t bits = (uint16_t)high_bits((words)load(x + i));
        memcpy(stream + (begin + i) / 8, &bits, 2);
    }
    for (; i < count; i++) stream[(begin + i) / 8] |= (uint8_t)(bits_of(x[i]) >> 31 << (begin + i) % 8);
}

static void add_to(float *residual, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) residual[i] = x[i] + residual[i];
}

/* Subtract from x + residual what its signs are decoded to. With scale 0 that is 0, without a sign. */
static void subtract_decoded(float *residual, int64_t n, float scale) {
    uint32_t bits = scale == 0 ? 0 : bits_of(scale), mask = scale == 0 ? 0 : 0x80000000u;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        floats total = load(residual + i);
        store(residual + i, total - (floats)(((words)total & mask) ^ bits));
    }
    for (; i < n; i++) residual[i] = residual[i] - float_of((bits_of(residual[i]) & mask) ^ bits);
}

/* In one pass: write x + residual over the residual, write the signs of that, and return the sum of its absolute values
   or squares. residual may be null. */
static float add_and_measure(
    const float *x, float *residual, int64_t begin, int64_t count, uint8_t *stream, int squared
) {
    tree sum = {.occupied = 0};
    int64_t i = 0;
    if (begin % 8 == 0)
        for (; i + 8 * LANES <= count; i += 8 * LANES) {
            floats row[8];
            uint16_t bits[8];
            for (int k = 0; k < 8; k++) {
                floats total = load(x + i + k * LANES);
                if (residual) store(residual + i + k * LANES, total = total + load(residual + i + k * LANES));
                bits[k] = (uint16_t)high_bits((words)total);
                row[k] = magnitude(total, squared);
            }
            memcpy(stream + (begin + i) / 8, bits, sizeof bits);
            tree_add(&sum, ((row[0] + row[1]) + (row[2] + row[3])) + ((row[4] + row[5]) + (row[6] + row[7])), 3);
        }
    if (residual) add_to(residual + i, x + i, count - i);
    const float *totals = residual ? residual : x;
    write_signs(totals + i, begin + i, count - i, stream);
    for (; i + LANES <= count; i += LANES) tree_add(&sum, magnitude(load(totals + i), squared), 0);
    if (i < count) tree_add(&sum, magnitude(load_some(totals + i, count - i), squared), 0);
    return tree_total(&sum);
}

void thinwire_encode_signs(
    const float *x, float *residual, uint8_t *out, int64_t n, int64_t block, int squared, int scale_bytes
) {
    int64_t blocks = (n + block - 1) / block;
    uint8_t *stream = out + blocks * scale_bytes;
    memset(stream, 0, (size_t)((n + 7) / 8));
    for (int64_t b = 0; b < blocks; b++) {
        int64_t begin = b * block, count = smaller(block, n - begin);
        float *own = residual ? residual + begin : 0;
        float sum = add_and_measure(x + begin, own, begin, count, stream, squared);
        write_scale(out, b, block_scale(sum, own ? own : x + begin, count, (float)count, squared), scale_bytes);
        /* The scale as the receiver reads it, after rounding. The block is still in the cache. */
        if (own) subtract_decoded(own, count, read_scale(out, b, scale_bytes));
    }
}

/* Decode bits begin.. into out, or add them to it. */
INLINE void decode(const uint8_t *stream, float scale, float *out, int64_t begin, int64_t count, int more) {
    uint32_t bits = scale == 0 ? 0 : bits_of(scale), mask = scale == 0 ? 0 : 0x80000000u;
    int64_t i = 0;
    /* signs_at reads two bytes beyond its sixteen signs. */
    for (; i + 2 * LANES <= count; i += LANES) {
        floats value = (floats)((signs_at(stream, begin + i) & mask) ^ bits);
        store(out + i, more ? (floats)(load(out + i) + value) : value);
    }
    for (; i < count; i++) {
        uint32_t sign = (uint32_t)stream[(begin + i) / 8] >> (begin + i) % 8 << 31;
        float value = float_of((sign & mask) ^ bits);
        out[i] = more ? out[i] + value : value;
    }
}

/* Sum payloads, which are `stride` bytes apart, in their order. */
void thinwire_sum_signs(
    const uint8_t *payloads, int64_t count, int64_t stride, float *out, int64_t n, int64_t block, int scale_bytes
) {
    int64_t blocks = (n + block - 1) / block;
    for (int64_t b = 0; b < blocks; b++)
        for (int64_t begin = b * block, end = smaller(n, begin + block); begin < end; begin += CHUNK) {
            int64_t length = smaller(CHUNK, end - begin);
            for (int64_t w = 0; w < count; w++) {
                const uint8_t *payload = payloads + w * stride, *stream = payload + blocks * scale_bytes;
                float scale = read_scale(payload, b, scale_bytes);
                if (w) decode(stream, scale, out + begin, begin, length, 1);
                else decode(stream, scale, out + begin, begin, length, 0);
            }
        }
}
