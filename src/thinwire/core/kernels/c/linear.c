/* SPDX-License-Identifier: Apache-2.0 */
/* The gradients of the weights of linear layers of many models: the most memory that a training step writes.

   A block of ROWS rows by WIDEST vectors of the result is accumulated in registers. Products are fused with sums where
   the processor can, so the last bits depend on the processor. */

#if defined(__AVX512F__) && !defined(THINWIRE_PORTABLE)
#define ROWS 8
#define WIDEST 3
INLINE floats fused_multiply_add(float a, floats b, floats c) {
    return (floats)_mm512_fmadd_ps(_mm512_set1_ps(a), (__m512)b, (__m512)c);
}
#elif defined(__FMA__) && !defined(THINWIRE_PORTABLE)
#define ROWS 6
#define WIDEST 1
INLINE floats fused_multiply_add(float a, floats b, floats c) {
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
INLINE floats fused_multiply_add(float a, floats b, floats c) { return a * b + c; }
#endif
#define FEW 4
#define COLUMNS (WIDEST * LANES)

/* Store past the caches (non-temporally) if the processor can: an ordinary store first reads the line, and evicts data
   that is needed sooner. */
INLINE void store_streaming(float *x, floats value) {
#if defined(__AVX512F__) && !defined(THINWIRE_PORTABLE)
    _mm512_stream_ps(x, (__m512)value);
#else
    store(x, value);
#endif
}

/* Wait until other threads can read the stores that bypassed the caches. */
INLINE void fence(void) {
#if defined(__AVX512F__) && !defined(THINWIRE_PORTABLE)
    _mm_sfence();
#endif
}

#define UNROLL _Pragma("GCC unroll 16")

/* to[r][v ...] = sum of a[r][i] * b[i][v ...] over i, for `high` rows and `wide` vectors. Rows of b are COLUMNS apart,
   those of `to` are `step` apart. `stream` needs aligned results. */
INLINE void multiply(
    int high, int wide, const float *const *a, const float *b, int64_t count, float *to, int64_t step, int stream
) {
    floats sums[ROWS][3];
    const float *rows[ROWS];
    UNROLL for (int r = 0; r < high; r++) rows[r] = a[r];
    UNROLL for (int r = 0; r < high; r++)
        UNROLL for (int v = 0; v < wide; v++) sums[r][v] = broadcast(0.0f);
    for (int64_t i = 0; i < count; i++, b += COLUMNS) {
        floats x[3];
        UNROLL for (int v = 0; v < wide; v++) x[v] = load(b + v * LANES);
        UNROLL for (int r = 0; r < high; r++)
            UNROLL for (int v = 0; v < wide; v++) sums[r][v] = fused_multiply_add(rows[r][i], x[v], sums[r][v]);
    }
    if (stream) {
        UNROLL for (int r = 0; r < high; r++)
            UNROLL for (int v = 0; v < wide; v++) store_streaming(to + r * step + v * LANES, sums[r][v]);
        return;
    }
    UNROLL for (int r = 0; r < high; r++)
        UNROLL for (int v = 0; v < wide; v++) store(to + r * step + v * LANES, sums[r][v]);
}

typedef void product(const float *const *, const float *, int64_t, float *, int64_t, int);
#define PRODUCT_OF(NAME, HIGH, BROAD)                                                                                 \
    static void NAME(const float *const *a, const float *b, int64_t count, float *to, int64_t step, int stream) {     \
        multiply(HIGH, BROAD, a, b, count, to, step, stream);                                                         \
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

/* -- transposition -- */

typedef float quad __attribute__((vector_size(16)));
typedef quad quad_anywhere __attribute__((aligned(4), may_alias));

#if defined(__clang__)
#define MIX(A, B, ...) __builtin_shufflevector(A, B, __VA_ARGS__)
#else
#define MIX(A, B, ...) __builtin_shuffle(A, B, (ints){__VA_ARGS__})
#endif

/* Transpose four rows of sixteen: column j is then the four lanes j / 4 of found[j % 4]. */
INLINE void transpose_rows(const float *from, int64_t step, floats *found) {
    floats a[4], b[4];
    UNROLL for (int k = 0; k < 4; k++) a[k] = load(from + k * step);
    UNROLL for (int k = 0; k < 2; k++) {
        b[k] = MIX(a[k], a[k + 2], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
        b[k + 2] = MIX(a[k], a[k + 2], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    }
    UNROLL for (int k = 0; k < 4; k += 2) {
        found[k] = MIX(b[k], b[k + 1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
        found[k + 1] = MIX(b[k], b[k + 1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    }
}

/* Transpose a matrix, in blocks of four by sixteen as far as they fit. */
static void transpose(const float *from, int64_t rows, int64_t columns, int64_t from_step, float *to, int64_t to_step) {
    const int64_t high = rows / 4 * 4, broad = columns / LANES * LANES;
    for (int64_t j = 0; j < broad; j += LANES)
        for (int64_t i = 0; i < high; i += 4) {
            floats turned[4];
            transpose_rows(from + i * from_step + j, from_step, turned);
            UNROLL for (int k = 0; k < LANES; k++) {
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

/* Take whole vectors from the caller's workspace. */
static void *allocate(char **workspace, int64_t bytes) {
    char *found = *workspace;
    *workspace += rounded(bytes, 64);
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

/* A layer: the rows of each model's x, and their inputs and outputs; the strides between models in x and in the
   gradient; and whether to store the results past the caches. */
typedef struct {
    int64_t rows, inputs, outputs, x_model, y_model, stream;
} layer;

/* Some columns of one model's gradient of w, [outputs][inputs], from `transposed` [outputs][rows] and a panel of x. */
static void columns_of(const layer *l, const float *transposed, const float *panel, int64_t columns, float *of_w) {
    const int64_t vectors = rounded(columns, LANES) / LANES;
    for (int64_t o = 0; o < l->outputs; o += ROWS) {
        const int64_t rows = smaller(l->outputs - o, ROWS);
        const float *factors[ROWS];
        float rest[ROWS * COLUMNS], *to = of_w + o * l->inputs;
        const int whole = columns == vectors * LANES && (rows == ROWS || rows == FEW);
        /* Missing rows repeat the last one; their results are dropped. */
        for (int64_t r = 0; r < ROWS; r++) factors[r] = transposed + (o + (r < rows ? r : rows - 1)) * l->rows;
        (rows <= FEW ? FEW_PRODUCTS : PRODUCTS)[vectors - 1](
            factors, panel, l->rows, whole ? to : rest, whole ? l->inputs : COLUMNS,
            l->stream && whole && !(l->inputs % LANES) && !((uintptr_t)to % sizeof(floats))
        );
        if (!whole)
            for (int64_t r = 0; r < rows; r++)
                memcpy(to + r * l->inputs, rest + r * COLUMNS, (size_t)columns * sizeof(float));
    }
}

/* The gradients of w and of the biases from that of y. Without a workspace, returns the bytes that it must have. */
int64_t thinwire_linear_weights(
    const float *x, const float *gradient, float *of_w, float *of_bias, const layer *l, int64_t models, char *workspace
) {
    char *begin = workspace;
    float *transposed = allocate(&workspace, l->outputs * l->rows * 4);
    float *panel = allocate(&workspace, (l->rows * COLUMNS + LANES) * 4);
    if (!begin) return workspace - begin;
    memset(panel, 0, (size_t)(l->rows * COLUMNS + LANES) * sizeof(float));
    for (int64_t b = 0; b < models; b++) {
        const float *own = x + b * l->x_model;
        float *to = of_w + b * l->outputs * l->inputs;
        transpose(gradient + b * l->y_model, l->rows, l->outputs, l->outputs, transposed, l->rows);
        for (int64_t o = 0; o < l->outputs; o++) of_bias[b * l->outputs + o] = total(transposed + o * l->rows, l->rows);
        for (int64_t c = 0, columns; c < l->inputs; c += columns) {
            const int64_t left = l->inputs - c, vectors = rounded(left, LANES) / LANES;
            /* Four vectors are split into 2 + 2: a single one would use the registers badly. */
            columns = smaller(LANES * (WIDEST > 1 && vectors == WIDEST + 1 ? 2 : smaller(vectors, WIDEST)), left);
            for (int64_t i = 0; i < l->rows; i++) copy_row(own + i * l->inputs + c, columns, panel + i * COLUMNS);
            columns_of(l, transposed, panel, columns, to + c);
        }
    }
    fence();
    return 0;
}
