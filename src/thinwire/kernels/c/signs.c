/* Signs in a bit each. A stretch is that part of a block that fits the innermost cache. */

#define STRETCH 4096


/* The signs of elements begin.. to bits begin.. of a stream that is zero so far. */
static void write_signs(const float *x, int64_t begin, int64_t count, uint8_t *stream) {
    int64_t i = 0;
    for (; i < count && (begin + i) % 8; i++) stream[(begin + i) / 8] |= (uint8_t)(bits_of(x[i]) >> 31 << (begin + i) % 8);
    for (; i + LANES <= count; i += LANES) {
        uint16_t bits = (uint16_t)high_bits((words)load(x + i));
        memcpy(stream + (begin + i) / 8, &bits, 2);
    }
    for (; i < count; i++) stream[(begin + i) / 8] |= (uint8_t)(bits_of(x[i]) >> 31 << (begin + i) % 8);
}

static void add_to(float *error, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) error[i] = x[i] + error[i];
}

static void leave_unsaid(float *error, int64_t n, float scale) {
    uint32_t bits = scale == 0 ? 0 : bits_of(scale), mask = scale == 0 ? 0 : 0x80000000u;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        floats owed = load(error + i);
        store(error + i, owed - (floats)(((words)owed & mask) ^ bits));
    }
    for (; i < n; i++) error[i] = error[i] - float_of((bits_of(error[i]) & mask) ^ bits);
}

/* x + error, its signs and the sum of its sizes, from one reading; error may be absent. */
static float take_stock(const float *x, float *error, int64_t begin, int64_t count, uint8_t *stream, int squared) {
    tree sum = {.held = 0};
    int64_t i = 0;
    if (begin % 8 == 0)
        for (; i + 8 * LANES <= count; i += 8 * LANES) {
            floats row[8];
            uint16_t bits[8];
            for (int k = 0; k < 8; k++) {
                floats owed = load(x + i + k * LANES);
                if (error) store(error + i + k * LANES, owed = owed + load(error + i + k * LANES));
                bits[k] = (uint16_t)high_bits((words)owed);
                row[k] = measured(owed, squared);
            }
            memcpy(stream + (begin + i) / 8, bits, sizeof bits);
            tree_add(&sum, ((row[0] + row[1]) + (row[2] + row[3])) + ((row[4] + row[5]) + (row[6] + row[7])), 3);
        }
    if (error) add_to(error + i, x + i, count - i);
    const float *rest = error ? error : x;
    write_signs(rest + i, begin + i, count - i, stream);
    for (; i + LANES <= count; i += LANES) tree_add(&sum, measured(load(rest + i), squared), 0);
    if (i < count) tree_add(&sum, measured(load_some(rest + i, count - i), squared), 0);
    return tree_total(&sum);
}

void thinwire_encode_signs(
    const float *x, float *error, uint8_t *out, int64_t n, int64_t block, int squared, int scale_bytes
) {
    int64_t blocks = (n + block - 1) / block;
    uint8_t *stream = out + blocks * scale_bytes;
    memset(stream, 0, (size_t)((n + 7) / 8));
    for (int64_t b = 0; b < blocks; b++) {
        int64_t begin = b * block, count = least(block, n - begin);
        float mean = take_stock(x + begin, error ? error + begin : 0, begin, count, stream, squared) / (float)count;
        write_scale(out, b, squared ? __builtin_sqrtf(mean) : mean, scale_bytes);
        if (error) leave_unsaid(error + begin, count, read_scale(out, b, scale_bytes));
    }
}

/* out = what bits begin.. stand for, or out += that. */
INLINE void spell(const uint8_t *stream, float scale, float *out, int64_t begin, int64_t count, int more) {
    uint32_t bits = scale == 0 ? 0 : bits_of(scale), mask = scale == 0 ? 0 : 0x80000000u;
    int64_t i = 0;
    /* Four bytes are read for sixteen signs. */
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

/* A row of payloads, `stride` bytes apart, added up in their order. */
void thinwire_sum_signs(
    const uint8_t *payloads, int64_t count, int64_t stride, float *out, int64_t n, int64_t block, int scale_bytes
) {
    int64_t blocks = (n + block - 1) / block;
    for (int64_t b = 0; b < blocks; b++)
        for (int64_t begin = b * block, end = least(n, begin + block); begin < end; begin += STRETCH) {
            int64_t some = least(STRETCH, end - begin);
            for (int64_t w = 0; w < count; w++) {
                const uint8_t *payload = payloads + w * stride, *stream = payload + blocks * scale_bytes;
                float scale = read_scale(payload, b, scale_bytes);
                if (w) spell(stream, scale, out + begin, begin, some, 1);
                else spell(stream, scale, out + begin, begin, some, 0);
            }
        }
}
