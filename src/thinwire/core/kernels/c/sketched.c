/* SPDX-License-Identifier: Apache-2.0 */
/* Count sketches: every block of `columns` elements is rotated into each row. */

#define STRIP 4096
/* Elements that are estimated together; a table that is read has SPAN more columns, which repeat the first ones. */
#define SPAN 512
#define MAX_ROWS 15

INLINE uint64_t row_seed(uint64_t key, int64_t row, int signs) {
    return mixed_long(mixed_long(key) + 2 * (uint64_t)row + (uint64_t)signs);
}

INLINE int64_t rotation(uint64_t seed, int64_t block, int64_t columns) {
    return (int64_t)(word_at((uint32_t)block, seed) % (uint64_t)columns);
}

/* Draw the words with the signs of elements from `place` on, and one more, which signs_at may read. Returns the first
   sign's bit. */
INLINE int64_t draw_signs(uint32_t *drawn, int64_t place, int64_t count, uint64_t seed) {
    uint32_t first = (uint32_t)(place >> 5);
    int64_t some = ((place & 31) + count + 31) / 32 + 1;
    for (int64_t i = 0; i < some; i++) drawn[i] = word_at(first + (uint32_t)i, seed);
    return place & 31;
}

/* cells += scale * x, with signs. */
static void add_signed(float *cells, const float *x, int64_t place, int64_t count, uint64_t seed, float scale) {
    uint32_t drawn[STRIP / 32 + 4];
    const uint8_t *stream = (const uint8_t *)drawn;
    int64_t bit = draw_signs(drawn, place, count, seed), i = 0;
    for (; i + LANES <= count; i += LANES) {
        floats value = (floats)((words)(load(x + i) * scale) ^ signs_at(stream, bit + i));
        store(cells + i, load(cells + i) + value);
    }
    for (; i < count; i++) {
        uint32_t sign = (uint32_t)stream[(bit + i) / 8] >> (bit + i) % 8 << 31;
        cells[i] = cells[i] + float_of(bits_of(x[i] * scale) ^ sign);
    }
}

/* Add the elements of a block of `length` that go to one strip of a row's cells: up to two runs, as the block is
   rotated. */
static void add_block(
    float *cells, int64_t strip, int64_t width, const float *x, int64_t start, int64_t length, int64_t columns,
    int64_t rotated, uint64_t seed, float scale
) {
    int64_t from = strip - rotated + (strip < rotated ? columns : 0), run = smaller(width, columns - from);
    if (from < length) add_signed(cells, x + start + from, start + from, smaller(run, length - from), seed, scale);
    if (run < width) add_signed(cells + run, x + start, start, smaller(width - run, length), seed, scale);
}

void thinwire_sketch(
    const float *x, int64_t n, float *table, int64_t rows, int64_t columns, uint64_t key, float scale
) {
    for (int64_t row = 0; row < rows; row++) {
        uint64_t places = row_seed(key, row, 0), signs = row_seed(key, row, 1);
        for (int64_t strip = 0; strip < columns; strip += STRIP)
            for (int64_t start = 0, block = 0; start < n; start += columns, block++)
                add_block(
                    table + row * columns + strip, strip, smaller(STRIP, columns - strip), x, start,
                    smaller(columns, n - start), columns, rotation(places, block, columns), signs, scale);
    }
}

/* A table to read, whose rows are `columns + SPAN` apart, and the length of the vector that it holds. */
typedef struct {
    const float *table;
    int64_t rows, columns;
    uint64_t key;
    int64_t n;
} sketch;

/* The median; of an even number, the lower of the two in the middle. Sorting networks, short ones for 3 and 5 rows. */
INLINE floats median(floats *v, int64_t rows) {
    if (rows == 1) return v[0];
    if (rows == 3) return upper(lower(v[0], v[1]), lower(upper(v[0], v[1]), v[2]));
    if (rows == 5) {
        floats low = upper(lower(v[0], v[1]), lower(v[2], v[3])), high = lower(upper(v[0], v[1]), upper(v[2], v[3]));
        return upper(lower(low, high), lower(upper(low, high), v[4]));
    }
    for (int64_t round = 0; round < rows; round++)
        for (int64_t i = round & 1; i + 1 < rows; i += 2) {
            floats low = lower(v[i], v[i + 1]);
            v[i + 1] = upper(v[i], v[i + 1]);
            v[i] = low;
        }
    return v[(rows - 1) / 2];
}

/* Estimate at most SPAN elements of one block. */
INLINE void estimate(
    const float *table, int64_t rows, int64_t columns, uint64_t key, int64_t block, int64_t place, int64_t count,
    float *out
) {
    uint32_t drawn[MAX_ROWS][SPAN / 32 + 4];
    const float *cells[MAX_ROWS];
    int64_t bit = 0;
    for (int64_t row = 0; row < rows; row++) {
        int64_t at = place - block * columns + rotation(row_seed(key, row, 0), block, columns);
        cells[row] = table + row * (columns + SPAN) + (at < columns ? at : at - columns);
        bit = draw_signs(drawn[row], place, count, row_seed(key, row, 1));
    }
    for (int64_t i = 0; i < count; i += LANES) {
        floats v[MAX_ROWS];
        for (int64_t row = 0; row < rows; row++)
            v[row] = (floats)((words)load(cells[row] + i) ^ signs_at((const uint8_t *)drawn[row], bit + i));
        store(out + i, median(v, rows));
    }
}

INLINE void estimates(
    const float *table, int64_t rows, int64_t columns, uint64_t key, int64_t n, float *out, top_set *m
) {
    float buffer[SPAN + LANES];
    for (int64_t start = 0, block = 0; start < n; start += columns, block++)
        for (int64_t place = start, end = smaller(n, start + columns); place < end; place += SPAN) {
            int64_t count = smaller(SPAN, end - place);
            estimate(table, rows, columns, key, block, place, count, buffer);
            if (m) collect_all(m, buffer, place, count);
            else memcpy(out + place, buffer, (size_t)count * sizeof(float));
        }
}

/* The usual numbers of rows as constants, so that loops over rows are unrolled. */
#define WITH_CONSTANT_ROWS(rows, call) \
    switch (rows) { \
        case 3: { enum { ROWS = 3 }; call; break; } \
        case 5: { enum { ROWS = 5 }; call; break; } \
        default: { const int64_t ROWS = rows; call; } \
    }

void thinwire_unsketch(const sketch *s, float *out) {
    WITH_CONSTANT_ROWS(s->rows, estimates(s->table, ROWS, s->columns, s->key, s->n, out, 0))
}

/* Estimates of the elements at `indices`; the table need not repeat columns, and rows <= 15. */
void thinwire_unsketch_at(const sketch *s, const int64_t *indices, int64_t count, float *out) {
    uint64_t places[MAX_ROWS], signs[MAX_ROWS];
    for (int64_t row = 0; row < s->rows; row++) {
        places[row] = row_seed(s->key, row, 0);
        signs[row] = row_seed(s->key, row, 1);
    }
    for (int64_t i = 0; i < count; i += LANES) {
        float cells[MAX_ROWS][LANES] = {0}, found[LANES];
        floats v[MAX_ROWS];
        int64_t some = smaller(LANES, count - i);
        for (int64_t lane = 0; lane < some; lane++) {
            int64_t place = indices[i + lane], block = place / s->columns, inner = place - block * s->columns;
            for (int64_t row = 0; row < s->rows; row++) {
                int64_t at = inner + rotation(places[row], block, s->columns);
                uint32_t sign = word_at((uint32_t)(place >> 5), signs[row]) >> (place & 31) << 31;
                float cell = s->table[row * s->columns + (at < s->columns ? at : at - s->columns)];
                cells[row][lane] = float_of(bits_of(cell) ^ sign);
            }
        }
        for (int64_t row = 0; row < s->rows; row++) v[row] = load(cells[row]);
        store(found, median(v, s->rows));
        /* The sorting networks lose a NaN. */
        for (int64_t row = 0; row < s->rows; row++)
            for (int64_t lane = 0; lane < some; lane++)
                if (cells[row][lane] != cells[row][lane]) found[lane] = cells[row][lane];
        memcpy(out + i, found, (size_t)some * sizeof(float));
    }
}

/* thinwire_top_k of the estimates, which are never stored; rows <= 15. */
int64_t thinwire_heavy(
    const sketch *s, int64_t k, int32_t *sizes, int64_t *indices, int32_t *counts, int64_t capacity
) {
    top_set m = {sizes, indices, counts, capacity, k, 0, -1, 0};
    WITH_CONSTANT_ROWS(s->rows, estimates(s->table, ROWS, s->columns, s->key, s->n, 0, &m))
    prune(&m);
    return m.nan ? -1 : m.count;
}
