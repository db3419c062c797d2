/* The k largest sizes in one reading: a net that fills up, and whose mesh is widened when it is full. */

#define HIGH_BINS 65536
#define LOW_BITS 15

typedef struct {
    int32_t *sizes;  /* capacity elements: the bits of absolute values, which are ordered as these are */
    int64_t *places; /* capacity elements */
    int32_t *counts; /* HIGH_BINS elements */
    int64_t capacity, k, held;
    int32_t beyond; /* what is let in is larger */
    int nan;
} net;

/* The k-th largest of more than k, and how many are larger. */
static int32_t kth_largest(net *m, int64_t *larger) {
    int64_t above = 0, bin = HIGH_BINS - 1, low = (1 << LOW_BITS) - 1;
    memset(m->counts, 0, HIGH_BINS * sizeof(int32_t));
    for (int64_t i = 0; i < m->held; i++) m->counts[m->sizes[i] >> LOW_BITS]++;
    for (; above + m->counts[bin] < m->k; bin--) above += m->counts[bin];
    memset(m->counts, 0, sizeof(int32_t) << LOW_BITS);
    for (int64_t i = 0; i < m->held; i++)
        if (m->sizes[i] >> LOW_BITS == bin) m->counts[m->sizes[i] & ((1 << LOW_BITS) - 1)]++;
    for (; above + m->counts[low] < m->k; low--) above += m->counts[low];
    *larger = above;
    return (int32_t)(bin << LOW_BITS | low);
}

/* Keep the k largest, the first among equals. */
static void widen(net *m) {
    if (m->held <= m->k) return;
    int64_t larger, kept = 0;
    int32_t least_size = kth_largest(m, &larger);
    int64_t equals = m->k - larger;
    for (int64_t i = 0; i < m->held; i++) {
        int32_t size = m->sizes[i];
        int stays = size > least_size || (size == least_size && equals-- > 0);
        m->sizes[kept] = size;
        m->places[kept] = m->places[i];
        kept += stays;
    }
    m->held = kept;
    m->beyond = least_size;
}

/* Up to sixteen elements from `place` on. */
INLINE void let_in(net *m, floats x, int64_t place, int64_t count) {
    ints sizes = (ints)((words)x & 0x7fffffffu);
    uint32_t found = high_bits((words)(sizes > m->beyond)) & ((1u << count) - 1);
    if (!found) return;
    for (; found; found &= found - 1) {
        int lane = __builtin_ctz(found);
        m->sizes[m->held] = sizes[lane];
        m->places[m->held++] = place + lane;
        m->nan |= sizes[lane] > 0x7f800000;
    }
    if (m->held + LANES > m->capacity) widen(m);
}

static void let_all_in(net *m, const float *x, int64_t place, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) let_in(m, load(x + i), place + i, LANES);
    if (i < n) let_in(m, load_some(x + i, n - i), place + i, n - i);
}

/* places begins with the result; returns how many, or -1 where there is a NaN. capacity >= min(n, k) + 2 * 16. */
int64_t thinwire_top_k(
    const float *x, int64_t n, int64_t k, int32_t *sizes, int64_t *places, int32_t *counts, int64_t capacity
) {
    net m = {sizes, places, counts, capacity, k, 0, -1, 0};
    let_all_in(&m, x, 0, n);
    widen(&m);
    return m.nan ? -1 : m.held;
}

/* -- places in a few bits each -- */

void thinwire_pack_indices(const int64_t *places, int64_t k, int width, uint8_t *out) {
    unsigned __int128 held = 0;
    int bits = 0;
    for (int64_t i = 0; i < k; i++) {
        held |= (unsigned __int128)(uint64_t)places[i] << bits;
        for (bits += width; bits >= 8; bits -= 8, held >>= 8) *out++ = (uint8_t)held;
    }
    if (bits) *out = (uint8_t)held;
}

void thinwire_unpack_indices(const uint8_t *packed, int64_t k, int width, int64_t *places) {
    unsigned __int128 held = 0;
    int bits = 0;
    for (int64_t i = 0; i < k; i++) {
        for (; bits < width; bits += 8) held |= (unsigned __int128)*packed++ << bits;
        places[i] = (int64_t)((uint64_t)held & ((1ull << width) - 1));
        held >>= width;
        bits -= width;
    }
}
