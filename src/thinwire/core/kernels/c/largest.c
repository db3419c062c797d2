/* SPDX-License-Identifier: Apache-2.0 */
/* The k largest absolute values in one pass: elements above a threshold are collected, and when the buffer is full all
   but the k largest are dropped and the threshold rises. */

#define HIGH_BINS 65536
#define LOW_BITS 15

typedef struct {
    int32_t *sizes;   /* capacity elements: bits of absolute values, which are ordered as the values are */
    int64_t *indices; /* capacity elements */
    int32_t *counts;  /* HIGH_BINS elements */
    int64_t capacity, k, count;
    int32_t threshold; /* only larger sizes are collected */
    int nan;
} top_set;

/* The k-th largest of more than k sizes, and how many are larger: a radix select by 16 high and 15 low bits. */
static int32_t kth_largest(top_set *m, int64_t *larger) {
    int64_t above = 0, bin = HIGH_BINS - 1, low = (1 << LOW_BITS) - 1;
    memset(m->counts, 0, HIGH_BINS * sizeof(int32_t));
    for (int64_t i = 0; i < m->count; i++) m->counts[m->sizes[i] >> LOW_BITS]++;
    for (; above + m->counts[bin] < m->k; bin--) above += m->counts[bin];
    memset(m->counts, 0, sizeof(int32_t) << LOW_BITS);
    for (int64_t i = 0; i < m->count; i++)
        if (m->sizes[i] >> LOW_BITS == bin) m->counts[m->sizes[i] & ((1 << LOW_BITS) - 1)]++;
    for (; above + m->counts[low] < m->k; low--) above += m->counts[low];
    *larger = above;
    return (int32_t)(bin << LOW_BITS | low);
}

/* Keep the k largest, the first among equals. */
static void prune(top_set *m) {
    if (m->count <= m->k) return;
    int64_t larger, kept = 0;
    int32_t smallest = kth_largest(m, &larger);
    int64_t equals = m->k - larger;
    for (int64_t i = 0; i < m->count; i++) {
        int32_t size = m->sizes[i];
        int stays = size > smallest || (size == smallest && equals-- > 0);
        m->sizes[kept] = size;
        m->indices[kept] = m->indices[i];
        kept += stays;
    }
    m->count = kept;
    m->threshold = smallest;
}

/* Collect from up to sixteen elements, the first of which has this index. */
INLINE void collect(top_set *m, floats x, int64_t index, int64_t count) {
    ints sizes = (ints)((words)x & 0x7fffffffu);
    uint32_t found = high_bits((words)(sizes > m->threshold)) & ((1u << count) - 1);
    if (!found) return;
    for (; found; found &= found - 1) {
        int lane = __builtin_ctz(found);
        m->sizes[m->count] = sizes[lane];
        m->indices[m->count++] = index + lane;
        m->nan |= sizes[lane] > 0x7f800000;
    }
    if (m->count + LANES > m->capacity) prune(m);
}

static void collect_all(top_set *m, const float *x, int64_t index, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) collect(m, load(x + i), index + i, LANES);
    if (i < n) collect(m, load_some(x + i, n - i), index + i, n - i);
}

/* Writes the result to the beginning of `indices` and returns its length, or -1 if there is a NaN. The threshold begins
   at -1, below all sizes. capacity >= min(n, k) + 2 * 16. */
int64_t thinwire_top_k(
    const float *x, int64_t n, int64_t k, int32_t *sizes, int64_t *indices, int32_t *counts, int64_t capacity
) {
    top_set m = {sizes, indices, counts, capacity, k, 0, -1, 0};
    collect_all(&m, x, 0, n);
    prune(&m);
    return m.nan ? -1 : m.count;
}

/* -- indices packed into a few bits each -- */

void thinwire_pack_indices(const int64_t *indices, int64_t k, int width, uint8_t *out) {
    unsigned __int128 pending = 0;
    int bits = 0;
    for (int64_t i = 0; i < k; i++) {
        pending |= (unsigned __int128)(uint64_t)indices[i] << bits;
        for (bits += width; bits >= 8; bits -= 8, pending >>= 8) *out++ = (uint8_t)pending;
    }
    if (bits) *out = (uint8_t)pending;
}

void thinwire_unpack_indices(const uint8_t *packed, int64_t k, int width, int64_t *indices) {
    unsigned __int128 pending = 0;
    int bits = 0;
    for (int64_t i = 0; i < k; i++) {
        for (; bits < width; bits += 8) pending |= (unsigned __int128)*packed++ << bits;
        indices[i] = (int64_t)((uint64_t)pending & ((1ull << width) - 1));
        pending >>= width;
        bits -= width;
    }
}
