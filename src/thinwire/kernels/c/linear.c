/* The gradients of the weights of linear layers, of many models: more numbers than anything else that a pass writes.

   They are products of rows of factors with vectors of numbers. Products are fused with sums where the processor can,
   so that the last bits are a processor's own. */

#if defined(__AVX512F__) && !defined(THINWIRE_PORTABLE)
#define ROWS 8
#define WIDEST 3
INLINE floats fused(float a, floats b, floats c) {
    return (floats)_mm512_fmadd_ps(_mm512_set1_ps(a), (__m512)b, (__m512)c);
}
#elif defined(__FMA__) && !defined(THINWIRE_PORTABLE)
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
#if defined(__AVX512F__) && !defined(THINWIRE_PORTABLE)
    _mm512_stream_ps(x, (__m512)value);
#else
    store(x, value);
#endif
}

/* Until all that was stored past the caches can be read by others. */
INLINE void settle(void) {
#if defined(__AVX512F__) && !defined(THINWIRE_PORTABLE)
    _mm_sfence();
#endif
}

#define EVERY _Pragma("GCC unroll 16")

/* to[r][v ...] = sum of a[r][i] * b[i][v ...] over i, for `high` rows and `wide` vectors. Rows of b lie COLUMNS apart,
   those of `to` `step` apart. Whole lines may be stored `away`. */
INLINE void multiply(
    int high, int wide, const float *const *a, const float *b, int64_t count, float *to, int64_t step, int away
) {
    floats sums[ROWS][3];
    const float *rows[ROWS];
    EVERY for (int r = 0; r < high; r++) rows[r] = a[r];
    EVERY for (int r = 0; r < high; r++)
        EVERY for (int v = 0; v < wide; v++) sums[r][v] = all(0.0f);
    for (int64_t i = 0; i < count; i++, b += COLUMNS) {
        floats x[3];
        EVERY for (int v = 0; v < wide; v++) x[v] = load(b + v * LANES);
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

typedef void product(const float *const *, const float *, int64_t, float *, int64_t, int);
#define PRODUCT_OF(NAME, HIGH, BROAD)                                                                                 \
    static void NAME(const float *const *a, const float *b, int64_t count, float *to, int64_t step, int away) {       \
        multiply(HIGH, BROAD, a, b, count, to, step, away);                                                           \
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

/* -- the layer -- */

INLINE int64_t rounded(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

/* Room of the caller's, in whole vectors. */
static void *taken(char **room, int64_t bytes) {
    char *found = *room;
    *room += rounded(bytes, 64);
    return found;
}

INLINE void copy_row(const float *from, int64_t n, float *to) {
    if (n < LANES) {
        if (n > 0) memcpy(to, from, (size_t)n * sizeof(float));
    } else {
        for (int64_t j = 0; j + LANES < n; j += LANES) store(to + j, load(from + j));
        store(to + n - LANES, load(from + n - LANES));
    }
}

/* What a layer looks like: rows of each model's x, what they hold and what comes of them; how far the models lie apart
   in x and in the gradient; and whether results are more than caches hold. */
typedef struct {
    int64_t rows, inputs, outputs, x_model, y_model, away;
} layer;

/* Some columns of one model's gradient of w, [outputs][inputs], from `turned` [outputs][rows] and the panel. */
static void columns_of(const layer *l, const float *turned, const float *panel, int64_t columns, float *of_w) {
    const int64_t vectors = rounded(columns, LANES) / LANES;
    for (int64_t o = 0; o < l->outputs; o += ROWS) {
        const int64_t rows = least(l->outputs - o, ROWS);
        const float *factors[ROWS];
        float rest[ROWS * COLUMNS], *to = of_w + o * l->inputs;
        const int whole = columns == vectors * LANES && (rows == ROWS || rows == FEW);
        /* Rows that there are not repeat the last. */
        for (int64_t r = 0; r < ROWS; r++) factors[r] = turned + (o + (r < rows ? r : rows - 1)) * l->rows;
        (rows <= FEW ? FEW_PRODUCTS : PRODUCTS)[vectors - 1](
            factors, panel, l->rows, whole ? to : rest, whole ? l->inputs : COLUMNS,
            l->away && whole && !(l->inputs % LANES) && !((uintptr_t)to % sizeof(floats))
        );
        if (!whole)
            for (int64_t r = 0; r < rows; r++)
                memcpy(to + r * l->inputs, rest + r * COLUMNS, (size_t)columns * sizeof(float));
    }
}

/* The gradients of w and of the shifts from that of y; without room, the bytes of it that are needed. */
int64_t thinwire_linear_weights(
    const float *x, const float *gradient, float *of_w, float *of_shift, const layer *l, int64_t models, char *room
) {
    char *begin = room;
    float *turned = taken(&room, l->outputs * l->rows * 4), *panel = taken(&room, (l->rows * COLUMNS + LANES) * 4);
    if (!begin) return room - begin;
    memset(panel, 0, (size_t)(l->rows * COLUMNS + LANES) * sizeof(float));
    for (int64_t b = 0; b < models; b++) {
        const float *own = x + b * l->x_model;
        float *to = of_w + b * l->outputs * l->inputs;
        transpose(gradient + b * l->y_model, l->rows, l->outputs, l->outputs, turned, l->rows);
        for (int64_t o = 0; o < l->outputs; o++) of_shift[b * l->outputs + o] = total(turned + o * l->rows, l->rows);
        for (int64_t c = 0, columns; c < l->inputs; c += columns) {
            const int64_t left = l->inputs - c, vectors = rounded(left, LANES) / LANES;
            /* No vector is left alone if that can be. */
            columns = least(LANES * (WIDEST > 1 && vectors == WIDEST + 1 ? 2 : least(vectors, WIDEST)), left);
            for (int64_t i = 0; i < l->rows; i++) copy_row(own + i * l->inputs + c, columns, panel + i * COLUMNS);
            columns_of(l, turned, panel, columns, to + c);
        }
    }
    settle();
    return 0;
}
