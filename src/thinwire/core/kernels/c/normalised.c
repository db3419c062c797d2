/* SPDX-License-Identifier: Apache-2.0 */
/* Normalisation of many models, each with its own gain and shift.

   Layer norm is of rows [models, count, n]. Group and batch norm are of [outer, inner, channels, positions], where the
   models are one of the first two axes and the samples the other. */

typedef float eight __attribute__((vector_size(32)));
typedef float four __attribute__((vector_size(16)));

/* Sum the lanes: the second half is added to the first until one is left. */
INLINE float lane_sum(floats sum) {
    eight e[2];
    memcpy(e, &sum, sizeof e);
    e[0] = e[0] + e[1];
    four f[2];
    memcpy(f, e, sizeof f);
    f[0] = f[0] + f[1];
    return (f[0][0] + f[0][2]) + (f[0][1] + f[0][3]);
}

/* The terms of a sum: x, x * y, (x - mean)^2, or y * ((x - mean) * scale). */
typedef enum { IDENTITY, PRODUCT, SQUARE, NORMAL } term;

INLINE floats terms(term kind, const float *x, const float *y, float mean, float scale) {
    floats found = load(x);
    if (kind == PRODUCT) return found * load(y);
    if (kind == IDENTITY) return found;
    found = found - mean;
    return kind == SQUARE ? found * found : load(y) * (found * scale);
}

/* Sum in the order of the definition in torch: eight vectors pairwise, block after block, then the lanes. */
INLINE float sum_of(term kind, const float *x, const float *y, float mean, float scale, int64_t n) {
    floats sum = {};
    int64_t i = 0;
    for (; i + 8 * LANES <= n; i += 8 * LANES) {
        floats row[8];
        for (int k = 0; k < 8; k++) row[k] = terms(kind, x + i + k * LANES, y + i + k * LANES, mean, scale);
        sum = sum + (((row[0] + row[1]) + (row[2] + row[3])) + ((row[4] + row[5]) + (row[6] + row[7])));
    }
    for (; i + LANES <= n; i += LANES) sum = sum + terms(kind, x + i, y + i, mean, scale);
    if (i < n) {
        /* Terms of the padding may not be zero: only those of existing elements are added. */
        const size_t left = (size_t)(n - i) * sizeof(float);
        float one[LANES] = {0}, other[LANES] = {0}, rest[LANES] = {0};
        memcpy(one, x + i, left);
        if (kind == PRODUCT || kind == NORMAL) memcpy(other, y + i, left);
        const floats found = terms(kind, one, other, mean, scale);
        memcpy(rest, &found, left);
        sum = sum + load(rest);
    }
    return lane_sum(sum);
}

static float total(const float *x, int64_t n) { return sum_of(IDENTITY, x, x, 0.0f, 0.0f, n); }
static float dot(const float *x, const float *y, int64_t n) { return sum_of(PRODUCT, x, y, 0.0f, 0.0f, n); }
static float squares_about(const float *x, float mean, int64_t n) { return sum_of(SQUARE, x, x, mean, 0.0f, n); }
static float normal_dot(const float *y, const float *x, float mean, float scale, int64_t n) {
    return sum_of(NORMAL, x, y, mean, scale, n);
}
static float inverse_root(float variance, float eps) { return 1.0f / __builtin_sqrtf(variance + eps); }

/* -- layer norm: a row of less than eight whole vectors stays in registers; its sums are in the order of `sum_of` -- */

INLINE void normalise_vectors(
    const float *x, const float *gain, const float *shift, float *out, float *mean, float *scale, int count, float eps
) {
    const float n = (float)(count * LANES);
    floats row[7], sum = {}, squares = {};
    for (int k = 0; k < count; k++) {
        row[k] = load(x + k * LANES);
        sum = sum + row[k];
    }
    const float middle = *mean = lane_sum(sum) / n;
    for (int k = 0; k < count; k++) {
        row[k] = row[k] - middle;
        squares = squares + row[k] * row[k];
    }
    const float factor = *scale = inverse_root(lane_sum(squares) / n, eps);
    for (int k = 0; k < count; k++)
        store(out + k * LANES, row[k] * factor * load(gain + k * LANES) + load(shift + k * LANES));
}

/* The backward of all rows of a model, whose gradients of gain and shift stay in registers. */
INLINE void backward_vectors(
    const float *gradient, const float *x, const float *gain, const float *means, const float *scales, float *of_x,
    float *of_gain, float *of_shift, int64_t rows, int count
) {
    const float n = (float)(count * LANES);
    floats gains[7], shifts[7];
    for (int k = 0; k < count; k++) gains[k] = load(of_gain + k * LANES), shifts[k] = load(of_shift + k * LANES);
    for (int64_t row = 0; row < rows; row++, gradient += count * LANES, x += count * LANES) {
        const float mean = means[row], scale = scales[row];
        floats normal[7], slope[7], plain = {}, weighted = {};
        for (int k = 0; k < count; k++) {
            const floats given = load(gradient + k * LANES);
            normal[k] = (load(x + k * LANES) - mean) * scale;
            gains[k] = gains[k] + given * normal[k];
            shifts[k] = shifts[k] + given;
            if (!of_x) continue;
            slope[k] = given * load(gain + k * LANES);
            plain = plain + slope[k];
            weighted = weighted + slope[k] * normal[k];
        }
        if (!of_x) continue;
        const float first = lane_sum(plain) / n, second = lane_sum(weighted) / n;
        for (int k = 0; k < count; k++)
            store(of_x + (row * count + k) * LANES, scale * (slope[k] - first - normal[k] * second));
    }
    for (int k = 0; k < count; k++) store(of_gain + k * LANES, gains[k]), store(of_shift + k * LANES, shifts[k]);
}

/* If a row of n numbers is short enough, run `call` with its number of vectors as a constant, and return. */
#define IN_REGISTERS(n, call)                                                                                         \
    switch ((n) % LANES ? 0 : (n) / LANES) {                                                                          \
        case 1: call(1); return;                                                                                      \
        case 2: call(2); return;                                                                                      \
        case 3: call(3); return;                                                                                      \
        case 4: call(4); return;                                                                                      \
        case 5: call(5); return;                                                                                      \
        case 6: call(6); return;                                                                                      \
        case 7: call(7); return;                                                                                      \
    }

static void normalise_row(
    const float *restrict x, const float *restrict gain, const float *restrict shift, float *restrict out,
    float *mean, float *scale, int64_t n, float eps
) {
#define WITH(count) normalise_vectors(x, gain, shift, out, mean, scale, count, eps)
    IN_REGISTERS(n, WITH)
#undef WITH
    float middle = *mean = total(x, n) / (float)n;
    for (int64_t i = 0; i < n; i++) out[i] = x[i] - middle;
    float factor = *scale = inverse_root(dot(out, out, n) / (float)n, eps);
    for (int64_t i = 0; i < n; i++) out[i] = out[i] * factor * gain[i] + shift[i];
}

/* All rows of a model whose moments are known; its gain and shift stay in registers. */
INLINE void scale_vectors(
    const float *x, const float *gain, const float *shift, float *out, const float *means, const float *scales,
    int64_t rows, int count
) {
    floats gains[7], shifts[7];
    for (int k = 0; k < count; k++) gains[k] = load(gain + k * LANES), shifts[k] = load(shift + k * LANES);
    for (int64_t row = 0; row < rows; row++)
        for (int k = 0; k < count; k++, x += LANES, out += LANES)
            store(out, (load(x) - means[row]) * scales[row] * gains[k] + shifts[k]);
}

static void scale_rows(
    const float *restrict x, const float *restrict gain, const float *restrict shift, float *restrict out,
    const float *means, const float *scales, int64_t rows, int64_t n
) {
#define WITH(count) scale_vectors(x, gain, shift, out, means, scales, rows, count)
    IN_REGISTERS(n, WITH)
#undef WITH
    for (int64_t row = 0; row < rows; row++, x += n, out += n) {
        const float mean = means[row], scale = scales[row];
        for (int64_t i = 0; i < n; i++) out[i] = (x[i] - mean) * scale * gain[i] + shift[i];
    }
}

/* [models][count][n], `step` numbers from model to model, 0 if all share x; scales are 1 / sqrt(variance + eps). */
typedef struct {
    const float *x, *gain;
    float *means, *scales;
    int64_t models, count, n, step;
    float eps;
} layers;

void thinwire_layer_norm(const layers *l, const float *shift, float *out) {
    const float *x = l->x, *gain = l->gain;
    const float eps = l->eps;
    float *means = l->means, *scales = l->scales;
    const int64_t models = l->models, count = l->count, n = l->n, step = l->step;
    for (int64_t b = 0; b < models; b++, gain += n, shift += n, out += count * n) {
        float *mean = means + b * count, *scale = scales + b * count;
        if (b && !step) {
            /* A shared x has the same moments for all models. */
            memcpy(mean, means, (size_t)count * sizeof(float));
            memcpy(scale, scales, (size_t)count * sizeof(float));
            scale_rows(x, gain, shift, out, mean, scale, count, n);
            continue;
        }
        for (int64_t row = 0; row < count; row++)
            normalise_row(x + b * step + row * n, gain, shift, out + row * n, mean + row, scale + row, n, eps);
    }
}

static void backward_row(
    const float *restrict gradient, const float *restrict x, const float *restrict gain, float mean, float scale,
    float *restrict of_x, float *restrict of_gain, float *restrict of_shift, float *restrict normal, int64_t n
) {
    for (int64_t i = 0; i < n; i++) {
        normal[i] = (x[i] - mean) * scale;
        of_x[i] = gradient[i] * gain[i];
        of_gain[i] = of_gain[i] + gradient[i] * normal[i];
        of_shift[i] = of_shift[i] + gradient[i];
    }
    float first = total(of_x, n) / (float)n, second = dot(of_x, normal, n) / (float)n;
    for (int64_t i = 0; i < n; i++) of_x[i] = scale * (of_x[i] - first - normal[i] * second);
}

static void add_row(
    const float *restrict gradient, const float *restrict x, float mean, float scale, float *restrict of_gain,
    float *restrict of_shift, int64_t n
) {
    for (int64_t i = 0; i < n; i++) {
        of_gain[i] = of_gain[i] + gradient[i] * ((x[i] - mean) * scale);
        of_shift[i] = of_shift[i] + gradient[i];
    }
}

/* The backward of one model's rows. */
static void backward_rows(
    const float *gradient, const float *x, const float *gain, const float *means, const float *scales, float *of_x,
    float *of_gain, float *of_shift, float *normal, int64_t rows, int64_t n
) {
#define WITH(count) backward_vectors(gradient, x, gain, means, scales, of_x, of_gain, of_shift, rows, count)
    IN_REGISTERS(n, WITH)
#undef WITH
    for (int64_t row = 0, at = 0; row < rows; row++, at += n)
        if (of_x)
            backward_row(
                gradient + at, x + at, gain, means[row], scales[row], of_x + at, of_gain, of_shift, normal, n);
        else add_row(gradient + at, x + at, means[row], scales[row], of_gain, of_shift, n);
}

/* Adds to of_gain and of_shift; of_x may be null; `normal` is a buffer for one row. */
void thinwire_layer_norm_back(
    const layers *l, const float *gradient, float *of_x, float *of_gain, float *of_shift, float *normal
) {
    const int64_t count = l->count, n = l->n;
    for (int64_t b = 0; b < l->models; b++)
        backward_rows(
            gradient + b * count * n, l->x + b * l->step, l->gain + b * n, l->means + b * count, l->scales + b * count,
            of_x ? of_x + b * count * n : 0, of_gain + b * n, of_shift + b * n, normal, count, n);
}

/* -- batch norm -- */

/* Mean and variance of `parts` blocks of `positions` numbers, `step` apart: each is summed in fp32, all in fp64. */
static void moments(const float *x, int64_t step, int64_t parts, int64_t positions, float *mean, float *variance) {
    double sum = 0.0, squares = 0.0, count = (double)(parts * positions);
    for (int64_t part = 0; part < parts; part++) sum += (double)total(x + part * step, positions);
    float middle = *mean = (float)(sum / count);
    for (int64_t part = 0; part < parts; part++)
        squares += (double)squares_about(x + part * step, middle, positions);
    *variance = (float)(squares / count);
}

INLINE void scale_block(
    const float *restrict x, float *restrict out, int64_t positions, float mean, float factor, float shift
) {
    for (int64_t i = 0; i < positions; i++) out[i] = (x[i] - mean) * factor + shift;
}

INLINE void backward_block(
    const float *restrict gradient, const float *restrict x, float *restrict of_x, int64_t positions, float mean,
    float factor, float first, float second
) {
    for (int64_t i = 0; i < positions; i++) of_x[i] = gradient[i] * factor - (first + (x[i] - mean) * second);
}

/* [outer][inner][channels][positions]; `models_inner` is 1 if the models are the inner axis. x has strides, 0 along an
   axis that shares it; results are contiguous. */
typedef struct {
    const float *x, *gain;
    float *means, *variances;
    int64_t outer, inner, models_inner, channels, positions, x_outer, x_inner;
    float eps;
} blocks;

/* The strides of models and samples, in x and in the contiguous results. */
typedef struct {
    int64_t models, samples, from_model, from_sample, to_model, to_sample;
} layout;

static layout layout_of(const blocks *b) {
    const int64_t row = b->channels * b->positions;
    if (b->models_inner) return (layout){b->inner, b->outer, b->x_inner, b->x_outer, row, b->inner * row};
    return (layout){b->outer, b->inner, b->x_outer, b->x_inner, b->inner * row, row};
}

void thinwire_batch_norm(const blocks *b, const float *shift, float *out) {
    const float *x = b->x, *gain = b->gain;
    float *means = b->means, *variances = b->variances;
    const int64_t channels = b->channels, positions = b->positions;
    const layout strides = layout_of(b);
    for (int64_t channel = 0; channel < channels; channel++)
        for (int64_t model = 0; model < strides.models; model++) {
            int64_t set = model * channels + channel, at = channel * positions;
            const float *from = x + model * strides.from_model + at;
            if (model && !strides.from_model) {
                means[set] = means[channel];
                variances[set] = variances[channel];
            } else moments(from, strides.from_sample, strides.samples, positions, means + set, variances + set);
            float factor = inverse_root(variances[set], b->eps) * gain[set];
            float *to = out + model * strides.to_model + at;
            for (int64_t sample = 0; sample < strides.samples; sample++)
                scale_block(
                    from + sample * strides.from_sample, to + sample * strides.to_sample, positions, means[set], factor,
                    shift[set]);
        }
}

/* of_x may be null. */
void thinwire_batch_norm_back(const blocks *b, const float *gradient, float *of_x, float *of_gain, float *of_shift) {
    const float *x = b->x, *gain = b->gain, *means = b->means, *variances = b->variances;
    const int64_t channels = b->channels, positions = b->positions;
    const layout strides = layout_of(b);
    double count = (double)(strides.samples * positions);
    for (int64_t channel = 0; channel < channels; channel++)
        for (int64_t model = 0; model < strides.models; model++) {
            int64_t set = model * channels + channel, at = channel * positions;
            const float *from = x + model * strides.from_model + at, *back = gradient + model * strides.to_model + at;
            float mean = means[set], scale = inverse_root(variances[set], b->eps);
            double first = 0.0, second = 0.0;
            for (int64_t sample = 0; sample < strides.samples; sample++) {
                const float *one = back + sample * strides.to_sample;
                first += (double)total(one, positions);
                second += (double)normal_dot(one, from + sample * strides.from_sample, mean, scale, positions);
            }
            of_shift[set] = (float)first;
            of_gain[set] = (float)second;
            if (!of_x) continue;
            float factor = scale * gain[set];
            float all = factor * (float)(first / count), some = scale * factor * (float)(second / count);
            for (int64_t sample = 0; sample < strides.samples; sample++)
                backward_block(
                    back + sample * strides.to_sample, from + sample * strides.from_sample,
                    of_x + model * strides.to_model + at + sample * strides.to_sample, positions, mean, factor, all,
                    some);
        }
}
