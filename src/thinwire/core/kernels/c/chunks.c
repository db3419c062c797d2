/* SPDX-License-Identifier: Apache-2.0 */
/* The largest elements of each chunk of a vector, with their places and codes of a few bits.

   A record for each chunk: its scale in fp32, the places in ascending order, and the codes, each packed into whole
   bytes. */

#define MOST_CHUNK 16384
#define FIRST_BINS 2048

typedef struct {
    int64_t n, chunk, kept;
    int bits, width;
} chunking;

/* Of a chunk with `count` elements, as many as of a whole one, in proportion. */
INLINE int64_t kept_of(const chunking *c, int64_t count) { return (c->kept * count + c->chunk - 1) / c->chunk; }

INLINE int64_t packed_bytes(int64_t count, int width) { return (count * width + 7) / 8; }

/* The k-th largest of n sizes of 31 bits, and how many are larger: a radix select by 11, 10 and 10 bits. */
static int32_t kth_of_chunk(const int32_t *sizes, int64_t n, int64_t k, int64_t *larger) {
    /* Two counters for each bin: neighbors often have one bin, and each count waits for the one before. */
    int32_t counts[2][FIRST_BINS], few[1024], left[MOST_CHUNK];
    memset(counts, 0, sizeof counts);
    for (int64_t i = 0; i + 2 <= n; i += 2) {
        counts[0][sizes[i] >> 20]++;
        counts[1][sizes[i + 1] >> 20]++;
    }
    if (n % 2) counts[0][sizes[n - 1] >> 20]++;
    int64_t above = 0, found = 0;
    int32_t bin = FIRST_BINS - 1;
    for (; above + counts[0][bin] + counts[1][bin] < k; bin--) above += counts[0][bin] + counts[1][bin];
    for (int64_t i = 0; i < n; i++) {
        left[found] = sizes[i];
        found += sizes[i] >> 20 == bin;
    }
    int32_t prefix = bin;
    for (int shift = 10; shift >= 0; shift -= 10) {
        memset(few, 0, sizeof few);
        for (int64_t i = 0; i < found; i++) few[left[i] >> shift & 1023]++;
        int32_t at = 1023;
        for (; above + few[at] < k; at--) above += few[at];
        prefix = prefix << 10 | at;
        int64_t stay = 0;
        for (int64_t i = 0; i < found; i++) {
            left[stay] = left[i];
            stay += left[i] >> shift == prefix;
        }
        found = stay;
    }
    *larger = above;
    return prefix;
}

/* The places of the k largest of a chunk, in order; the first of equal ones. -1 for a NaN among them. */
static int64_t places_of_chunk(const float *x, int64_t n, int64_t k, int64_t *places) {
    int32_t sizes[MOST_CHUNK + LANES];
    for (int64_t i = 0; i < n; i++) sizes[i] = (int32_t)(bits_of(x[i]) & 0x7fffffffu);
    int64_t larger, count = 0;
    const int32_t least = kth_of_chunk(sizes, n, k, &larger);
    int64_t equals = k - larger;
    int nan = 0;
    memset(sizes + n, 0xff, LANES * sizeof(int32_t));
    for (int64_t i = 0; i < n; i += LANES) {
        ints some;
        memcpy(&some, sizes + i, sizeof some);
        uint32_t found = high_bits((words)(some >= least));
        for (; found; found &= found - 1) {
            const int64_t place = i + __builtin_ctz(found);
            if (sizes[place] == least && equals-- <= 0) continue;
            nan |= sizes[place] > 0x7f800000;
            places[count++] = place;
        }
    }
    return nan ? -1 : count;
}

/* residual may be null; otherwise it becomes the unsent part of x plus residual. Returns -1 if there is a NaN. */
int64_t thinwire_encode_chunks(const float *x, float *residual, uint8_t *out, const chunking *c) {
    int64_t places[MOST_CHUNK], numbers[MOST_CHUNK];
    float values[MOST_CHUNK], products[TILE];
    uint8_t codes[MOST_CHUNK];
    for (int64_t begin = 0; begin < c->n; begin += c->chunk) {
        const int64_t count = smaller(c->chunk, c->n - begin), k = kept_of(c, count);
        if (residual) add_to(residual + begin, x + begin, count);
        const float *totals = (residual ? residual : x) + begin;
        if (places_of_chunk(totals, count, k, places) < 0) return -1;
        for (int64_t i = 0; i < k; i++) values[i] = totals[places[i]];
        const float half = half_step(values, k, c->bits);
        const int some = half >= SMALLEST_STEP;
        const float inverse = some ? 1 / (2 * half) : 0;
        tree sum = {.occupied = 0};
        int64_t squares = 0;
        for (int64_t i = 0; i < k; i += TILE) {
            const int64_t part = smaller(k - i, TILE);
            squares += code_tile(values + i, part, inverse, c->bits, codes + i, products);
            tree_more(&sum, products, part, 0);
        }
        const float scale = some ? 2 * half * (tree_total(&sum) / (float)squares) : 0;
        write_scale(out, 0, scale, 4);
        thinwire_pack_indices(places, k, c->width, out + 4);
        for (int64_t i = 0; i < k; i++) numbers[i] = codes[i];
        thinwire_pack_indices(numbers, k, c->bits, out + 4 + packed_bytes(k, c->width));
        out += 4 + packed_bytes(k, c->width) + packed_bytes(k, c->bits);
        if (!residual || !some) continue;
        subtract_levels(values, k, inverse, c->bits, scale);
        for (int64_t i = 0; i < k; i++) residual[begin + places[i]] = values[i];
    }
    return 0;
}

/* Add the records. Returns -1 if a position is outside its chunk, before anything is written there. */
int64_t thinwire_decode_chunks(const uint8_t *payload, float *out, const chunking *c) {
    int64_t places[MOST_CHUNK], numbers[MOST_CHUNK];
    const int64_t top = ((int64_t)1 << c->bits) - 1;
    for (int64_t begin = 0; begin < c->n; begin += c->chunk) {
        const int64_t count = smaller(c->chunk, c->n - begin), k = kept_of(c, count);
        const float scale = read_scale(payload, 0, 4);
        thinwire_unpack_indices(payload + 4, k, c->width, places);
        thinwire_unpack_indices(payload + 4 + packed_bytes(k, c->width), k, c->bits, numbers);
        payload += 4 + packed_bytes(k, c->width) + packed_bytes(k, c->bits);
        for (int64_t i = 0; i < k; i++)
            if (places[i] >= count) return -1;
        for (int64_t i = 0; i < k; i++) out[begin + places[i]] += (float)(2 * numbers[i] - top) * scale;
    }
    return 0;
}
