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
#define COLUMNS (WIDEST * LANES)

#define EVERY _Pragma("GCC unroll 8")

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
