/* Products of rows of factors with vectors of numbers, both read where they lie: what convolutions consist of.

   Products are fused with sums where the processor can, so that the last bits are a processor's own. */

#if defined(__AVX512F__) && !defined(LACONIC_PORTABLE)
#define ROWS 8
#define WIDEST 3
INLINE floats fused(float a, floats b, floats c) {
    return (floats)_mm512_fmadd_ps(_mm512_set1_ps(a), (__m512)b, (__m512)c);
}
#elif defined(__FMA__) && !defined(LACONIC_PORTABLE)
#define ROWS 6
#define WIDEST 1
INLINE floats fused(float a, floats b, floats c) {
    __m256 x[2], y[2];
    memcpy(x, &b, 64);
    memcpy(y, &c, 64);
    for (int half = 0; half < 2; half++) y[half] = _mm256_fmadd_ps(_mm256_set1_ps(a), x[half], y[half]);
    memcpy(&c, y, 64);
    return c;
}
#else
#define ROWS 6
#define WIDEST 1
INLINE floats fused(float a, floats b, floats c) { return a * b + c; }
#endif
#define FEW 4
#define COLUMNS (WIDEST * LANES)

/* Past the caches, where there is a way: a result that would drive out what is needed sooner. */
INLINE void store_away(float *x, floats value) {
#if defined(__AVX512F__) && !defined(LACONIC_PORTABLE)
    _mm512_stream_ps(x, (__m512)value);
#else
    store(x, value);
#endif
}

/* Until all that was stored past the caches can be read by others. */
INLINE void settle(void) {
#if defined(__AVX512F__) && !defined(LACONIC_PORTABLE)
    _mm_sfence();
#endif
}

#define EVERY _Pragma("GCC unroll 16")

/* sum of a[r][i] * b[at[i] + v * far ...] over i, for `high` rows and `wide` vectors. Rows of `to` lie `step` apart;
   they begin with what `start` has for them, or with what they hold. Whole lines may be stored `away`. */
INLINE void multiply(
    int high, int wide, const float *const *a, const float *b, const int32_t *at, int64_t count, int64_t far,
    const float *start, float *to, int64_t step, int away
) {
    floats sums[ROWS][3];
    const float *rows[ROWS];
    EVERY for (int r = 0; r < high; r++) rows[r] = a[r];
    EVERY for (int r = 0; r < high; r++)
        EVERY for (int v = 0; v < wide; v++) sums[r][v] = start ? all(start[r]) : load(to + r * step + v * LANES);
    for (int64_t i = 0; i < count; i++) {
        const float *from = b + at[i];
        floats x[3];
        EVERY for (int v = 0; v < wide; v++) x[v] = load(from + v * far);
        EVERY for (int r = 0; r < high; r++)
            EVERY for (int v = 0; v < wide; v++) sums[r][v] = fused(rows[r][i], x[v], sums[r][v]);
    }
    if (away) {
        EVERY for (int r = 0; r < high; r++)
            EVERY for (int v = 0; v < wide; v++) store_away(to + r * step + v * LANES, sums[r][v]);
        return;
    }
    EVERY for (int r = 0; r < high; r++)
        EVERY for (int v = 0; v < wide; v++) store(to + r * step + v * LANES, sums[r][v]);
}

typedef void product(
    const float *const *, const float *, const int32_t *, int64_t, int64_t, const float *, float *, int64_t, int
);
#define PRODUCT_OF(NAME, HIGH, BROAD)                                                                                 \
    static void NAME(                                                                                                 \
        const float *const *a, const float *b, const int32_t *at, int64_t count, int64_t far, const float *start,     \
        float *to, int64_t step, int away                                                                             \
    ) {                                                                                                               \
        multiply(HIGH, BROAD, a, b, at, count, far, start, to, step, away);                                           \
    }
PRODUCT_OF(product_1, ROWS, 1)
PRODUCT_OF(few_1, FEW, 1)
#if WIDEST == 3
PRODUCT_OF(product_2, ROWS, 2)
PRODUCT_OF(product_3, ROWS, 3)
PRODUCT_OF(few_2, FEW, 2)
PRODUCT_OF(few_3, FEW, 3)
static product *const PRODUCTS[] = {product_1, product_2, product_3}, *const FEW_PRODUCTS[] = {few_1, few_2, few_3};
#else
static product *const PRODUCTS[] = {product_1}, *const FEW_PRODUCTS[] = {few_1};
#endif

/* Of so many vectors, those of the next product: none is left alone if that can be. */
INLINE int64_t vectors_of(int64_t left) { return WIDEST > 1 && left == WIDEST + 1 ? 2 : least(left, WIDEST); }

/* Rows of factors; those that there are not repeat the last. */
INLINE void rows_at(const float *a, int64_t step, int64_t rows, const float **found) {
    for (int64_t r = 0; r < ROWS; r++) found[r] = a + (r < rows ? r : rows - 1) * step;
}

/* -- rows and columns -- */

typedef float quad __attribute__((vector_size(16)));
typedef quad quad_anywhere __attribute__((aligned(4), may_alias));

#if defined(__clang__)
#define MIX(A, B, ...) __builtin_shufflevector(A, B, __VA_ARGS__)
#else
#define MIX(A, B, ...) __builtin_shuffle(A, B, (ints){__VA_ARGS__})
#endif

/* Four rows of sixteen: column j is then lane j / 4 of found[j % 4]. */
INLINE void transpose_rows(const float *from, int64_t step, floats *found) {
    floats a[4], b[4];
    EVERY for (int k = 0; k < 4; k++) a[k] = load(from + k * step);
    EVERY for (int k = 0; k < 2; k++) {
        b[k] = MIX(a[k], a[k + 2], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
        b[k + 2] = MIX(a[k], a[k + 2], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    }
    EVERY for (int k = 0; k < 4; k += 2) {
        found[k] = MIX(b[k], b[k + 1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
        found[k + 1] = MIX(b[k], b[k + 1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    }
}

/* Rows become columns, in pieces of four by sixteen as far as they go. */
static void transpose(const float *from, int64_t rows, int64_t columns, int64_t from_step, float *to, int64_t to_step) {
    const int64_t high = rows / 4 * 4, broad = columns / LANES * LANES;
    for (int64_t j = 0; j < broad; j += LANES)
        for (int64_t i = 0; i < high; i += 4) {
            floats turned[4];
            transpose_rows(from + i * from_step + j, from_step, turned);
            EVERY for (int k = 0; k < LANES; k++) {
                quad lanes[4];
                memcpy(lanes, turned + k % 4, sizeof lanes);
                *(quad_anywhere *)(to + (j + k) * to_step + i) = lanes[k / 4];
            }
        }
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = i < high ? broad : 0; j < columns; j++) to[j * to_step + i] = from[i * from_step + j];
}

/* -- what comes next: it lies too far apart for the processor to foresee, and is called into the cache bit by bit -- */

typedef struct {
    const float *at;
    int64_t lines, each;
} coming;

/* So many numbers, over so many calls; or nothing. */
INLINE coming coming_from(const float *next, int64_t n, int64_t calls) {
    const int64_t lines = next ? (n + LANES - 1) / LANES : 0;
    return (coming){next, lines, lines / calls + 1};
}

INLINE void call(coming *next) {
    const int64_t some = least(next->each, next->lines);
    for (int64_t i = 0; i < some; i++) __builtin_prefetch(next->at + i * LANES, 0, 2);
    next->at += some * LANES;
    next->lines -= some;
}
