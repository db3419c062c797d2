/* Normalisation of many models, each with its own gain and shift: of rows [models, count, n] by layers, of
   [outer, inner, channels, places] by groups of channels of a sample, and by channels of a model over all samples,
   where the models are one of the first two axes and the samples the other. */

typedef float eight __attribute__((vector_size(32)));
typedef float four __attribute__((vector_size(16)));

/* The sum of the lanes: the second half is added to the first, until one is left. */
INLINE float halved(floats sum) {
    eight e[2];
    memcpy(e, &sum, sizeof e);
    e[0] = e[0] + e[1];
    four f[2];
    memcpy(f, e, sizeof f);
    f[0] = f[0] + f[1];
    return (f[0][0] + f[0][2]) + (f[0][1] + f[0][3]);
}

/* What is added up: x, x * y, (x - mean)^2, or y * ((x - mean) * scale). */
typedef enum { ITSELF, PRODUCT, SQUARE, NORMAL } term;

INLINE floats terms(term what, const float *x, const float *y, float mean, float scale) {
    floats found = load(x);
    if (what == PRODUCT) return found * load(y);
    if (what == ITSELF) return found;
    found = found - mean;
    return what == SQUARE ? found * found : load(y) * (found * scale);
}

/* Blocks of eight vectors by neighbours, one block after another; then the lanes, halves first. */
INLINE float in_order(term what, const float *x, const float *y, float mean, float scale, int64_t n) {
    floats sum = {};
    int64_t i = 0;
    for (; i + 8 * LANES <= n; i += 8 * LANES) {
        floats row[8];
        for (int k = 0; k < 8; k++) row[k] = terms(what, x + i + k * LANES, y + i + k * LANES, mean, scale);
        sum = sum + (((row[0] + row[1]) + (row[2] + row[3])) + ((row[4] + row[5]) + (row[6] + row[7])));
    }
    for (; i + LANES <= n; i += LANES) sum = sum + terms(what, x + i, y + i, mean, scale);
    if (i < n) {
        const size_t left = (size_t)(n - i) * sizeof(float);
        float one[LANES] = {0}, other[LANES] = {0}, rest[LANES] = {0};
        memcpy(one, x + i, left);
        if (what == PRODUCT || what == NORMAL) memcpy(other, y + i, left);
        const floats found = terms(what, one, other, mean, scale);
        memcpy(rest, &found, left);
        sum = sum + load(rest);
    }
    return halved(sum);
}

static float total(const float *x, int64_t n) { return in_order(ITSELF, x, x, 0.0f, 0.0f, n); }
static float dot(const float *x, const float *y, int64_t n) { return in_order(PRODUCT, x, y, 0.0f, 0.0f, n); }
static float squares_about(const float *x, float mean, int64_t n) { return in_order(SQUARE, x, x, mean, 0.0f, n); }
static float normal_dot(const float *y, const float *x, float mean, float scale, int64_t n) {
    return in_order(NORMAL, x, y, mean, scale, n);
}
static float root_under_one(float variance, float eps) { return 1.0f / __builtin_sqrtf(variance + eps); }

/* -- by layers: a row of less than eight whole vectors stays in registers, its sums in the order of `in_order` -- */

INLINE void normalise_vectors(
    const float *x, const float *gain, const float *shift, float *out, float *mean, float *scale, int count, float eps
) {
    const float n = (float)(count * LANES);
    floats row[7], sum = {}, squares = {};
    for (int k = 0; k < count; k++) {
        row[k] = load(x + k * LANES);
        sum = sum + row[k];
    }
    const float middle = *mean = halved(sum) / n;
    for (int k = 0; k < count; k++) {
        row[k] = row[k] - middle;
        squares = squares + row[k] * row[k];
    }
    const float factor = *scale = root_under_one(halved(squares) / n, eps);
    for (int k = 0; k < count; k++)
        store(out + k * LANES, row[k] * factor * load(gain + k * LANES) + load(shift + k * LANES));
}

/* All rows of a model, whose gain and shift stay in registers; as `return_row`, or without `of_x` as `add_row`. */
INLINE void return_vectors(
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
        const float first = halved(plain) / n, second = halved(weighted) / n;
        for (int k = 0; k < count; k++)
            store(of_x + (row * count + k) * LANES, scale * (slope[k] - first - normal[k] * second));
    }
    for (int k = 0; k < count; k++) store(of_gain + k * LANES, gains[k]), store(of_shift + k * LANES, shifts[k]);
}

/* Returns what is named, with the number of vectors as a constant, where a row of n numbers is so short. */
#define IN_REGISTERS(n, named)                                                                                        \
    switch ((n) % LANES ? 0 : (n) / LANES) {                                                                          \
        case 1: named(1); return;                                                                                     \
        case 2: named(2); return;                                                                                     \
        case 3: named(3); return;                                                                                     \
        case 4: named(4); return;                                                                                     \
        case 5: named(5); return;                                                                                     \
        case 6: named(6); return;                                                                                     \
        case 7: named(7); return;                                                                                     \
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
    float factor = *scale = root_under_one(dot(out, out, n) / (float)n, eps);
    for (int64_t i = 0; i < n; i++) out[i] = out[i] * factor * gain[i] + shift[i];
}

/* All rows of a model, whose gain and shift stay in registers; as `scale_row`. */
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

static void scale_row(
    const float *restrict x, const float *restrict gain, const float *restrict shift, float *restrict out, float mean,
    float scale, int64_t n
) {
    for (int64_t i = 0; i < n; i++) out[i] = (x[i] - mean) * scale * gain[i] + shift[i];
}

static void scale_rows(
    const float *x, const float *gain, const float *shift, float *out, const float *means, const float *scales,
    int64_t rows, int64_t n
) {
#define WITH(count) scale_vectors(x, gain, shift, out, means, scales, rows, count)
    IN_REGISTERS(n, WITH)
#undef WITH
    for (int64_t row = 0; row < rows; row++)
        scale_row(x + row * n, gain, shift, out + row * n, means[row], scales[row], n);
}

/* [models][count][n], a model's rows `step` from the next one's; scales are 1 / sqrt(variance + eps). */
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
            memcpy(mean, means, (size_t)count * sizeof(float));
            memcpy(scale, scales, (size_t)count * sizeof(float));
            scale_rows(x, gain, shift, out, mean, scale, count, n);
            continue;
        }
        for (int64_t row = 0; row < count; row++)
            normalise_row(x + b * step + row * n, gain, shift, out + row * n, mean + row, scale + row, n, eps);
    }
}

static void return_row(
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

/* One model's rows. */
static void return_rows(
    const float *gradient, const float *x, const float *gain, const float *means, const float *scales, float *of_x,
    float *of_gain, float *of_shift, float *normal, int64_t rows, int64_t n
) {
#define WITH(count) return_vectors(gradient, x, gain, means, scales, of_x, of_gain, of_shift, rows, count)
    IN_REGISTERS(n, WITH)
#undef WITH
    for (int64_t row = 0, at = 0; row < rows; row++, at += n)
        if (of_x)
            return_row(
                gradient + at, x + at, gain, means[row], scales[row], of_x + at, of_gain, of_shift, normal, n);
        else add_row(gradient + at, x + at, means[row], scales[row], of_gain, of_shift, n);
}

/* of_gain and of_shift are added to; `normal` is room for one row. */
void thinwire_layer_norm_back(
    const layers *l, const float *gradient, float *of_x, float *of_gain, float *of_shift, float *normal
) {
    const int64_t count = l->count, n = l->n;
    for (int64_t b = 0; b < l->models; b++)
        return_rows(
            gradient + b * count * n, l->x + b * l->step, l->gain + b * n, l->means + b * count, l->scales + b * count,
            of_x ? of_x + b * count * n : 0, of_gain + b * n, of_shift + b * n, normal, count, n);
}

/* -- by groups and by channels: `parts` blocks of `places` numbers, `step` from each to the next -- */

static void moments(const float *x, int64_t step, int64_t parts, int64_t places, float *mean, float *variance) {
    double sum = 0.0, squares = 0.0, count = (double)(parts * places);
    for (int64_t part = 0; part < parts; part++) sum += (double)total(x + part * step, places);
    float middle = *mean = (float)(sum / count);
    for (int64_t part = 0; part < parts; part++)
        squares += (double)squares_about(x + part * step, middle, places);
    *variance = (float)(squares / count);
}

INLINE void scale_block(
    const float *restrict x, float *restrict out, int64_t places, float mean, float factor, float shift
) {
    for (int64_t i = 0; i < places; i++) out[i] = (x[i] - mean) * factor + shift;
}

INLINE void return_block(
    const float *restrict gradient, const float *restrict x, float *restrict of_x, int64_t places, float mean,
    float factor, float first, float second
) {
    for (int64_t i = 0; i < places; i++) of_x[i] = gradient[i] * factor - (first + (x[i] - mean) * second);
}

/* [outer][inner][channels][places], of which `models_inner` tells whether the models are the inner axis. x may lie
   apart, or be the same for all of an axis; what is written is dense. `groups` is of no account by channels. */
typedef struct {
    const float *x, *gain;
    float *means, *variances;
    int64_t outer, inner, models_inner, channels, places, x_outer, x_inner, groups;
    float eps;
} blocks;

void thinwire_group_norm(const blocks *b, const float *shift, float *out) {
    const float *x = b->x, *gain = b->gain;
    float *means = b->means, *variances = b->variances;
    const int64_t outer = b->outer, inner = b->inner, models_inner = b->models_inner, channels = b->channels;
    const int64_t groups = b->groups, parts = channels / groups, places = b->places;
    const int64_t x_outer = b->x_outer, x_inner = b->x_inner;
    for (int64_t row = 0; row < outer * inner; row++) {
        const float *from = x + row / inner * x_outer + row % inner * x_inner;
        const int64_t model = (models_inner ? row % inner : row / inner) * channels;
        for (int64_t group = 0; group < groups; group++) {
            int64_t set = row * groups + group, at = group * parts * places;
            int64_t same = row % inner && !x_inner ? groups : row / inner && !x_outer ? inner * groups : 0;
            if (same) {
                means[set] = means[set - same];
                variances[set] = variances[set - same];
            } else moments(from + at, 0, 1, parts * places, means + set, variances + set);
            float scale = root_under_one(variances[set], b->eps);
            for (int64_t part = 0; part < parts; part++) {
                int64_t own = model + group * parts + part, block = at + part * places;
                scale_block(
                    from + block, out + row * channels * places + block, places, means[set], scale * gain[own],
                    shift[own]);
            }
        }
    }
}

/* of_gain and of_shift are added to; of_x may be missing. */
void thinwire_group_norm_back(const blocks *b, const float *gradient, float *of_x, float *of_gain, float *of_shift) {
    const float *x = b->x, *gain = b->gain, *means = b->means, *variances = b->variances;
    const int64_t outer = b->outer, inner = b->inner, models_inner = b->models_inner, channels = b->channels;
    const int64_t groups = b->groups, parts = channels / groups, places = b->places;
    const int64_t x_outer = b->x_outer, x_inner = b->x_inner;
    double count = (double)(parts * places);
    for (int64_t row = 0; row < outer * inner; row++) {
        const float *from = x + row / inner * x_outer + row % inner * x_inner;
        const int64_t model = (models_inner ? row % inner : row / inner) * channels;
        for (int64_t group = 0; group < groups; group++) {
            int64_t set = row * groups + group, at = group * parts * places, to = row * channels * places + at;
            float mean = means[set], scale = root_under_one(variances[set], b->eps);
            double first = 0.0, second = 0.0;
            for (int64_t part = 0; part < parts; part++) {
                int64_t own = model + group * parts + part, block = part * places;
                const float *back = gradient + to + block;
                float plain = total(back, places);
                float weighted = normal_dot(back, from + at + block, mean, scale, places);
                of_shift[own] = of_shift[own] + plain;
                of_gain[own] = of_gain[own] + weighted;
                first += (double)(plain * gain[own]);
                second += (double)(weighted * gain[own]);
            }
            if (!of_x) continue;
            float all = scale * (float)(first / count), some = scale * scale * (float)(second / count);
            for (int64_t part = 0; part < parts; part++) {
                int64_t own = model + group * parts + part, block = part * places;
                return_block(
                    gradient + to + block, from + at + block, of_x + to + block, places, mean, scale * gain[own], all,
                    some);
            }
        }
    }
}

/* Where a channel of a model begins and how far its samples are apart, in x and in what is dense. */
typedef struct {
    int64_t models, samples, from_model, from_sample, to_model, to_sample;
} layout;

static layout laid_out(const blocks *b) {
    const int64_t row = b->channels * b->places;
    if (b->models_inner) return (layout){b->inner, b->outer, b->x_inner, b->x_outer, row, b->inner * row};
    return (layout){b->outer, b->inner, b->x_outer, b->x_inner, b->inner * row, row};
}

void thinwire_batch_norm(const blocks *b, const float *shift, float *out) {
    const float *x = b->x, *gain = b->gain;
    float *means = b->means, *variances = b->variances;
    const int64_t channels = b->channels, places = b->places;
    const layout way = laid_out(b);
    for (int64_t channel = 0; channel < channels; channel++)
        for (int64_t model = 0; model < way.models; model++) {
            int64_t set = model * channels + channel, at = channel * places;
            const float *from = x + model * way.from_model + at;
            if (model && !way.from_model) {
                means[set] = means[channel];
                variances[set] = variances[channel];
            } else moments(from, way.from_sample, way.samples, places, means + set, variances + set);
            float factor = root_under_one(variances[set], b->eps) * gain[set];
            float *to = out + model * way.to_model + at;
            for (int64_t sample = 0; sample < way.samples; sample++)
                scale_block(
                    from + sample * way.from_sample, to + sample * way.to_sample, places, means[set], factor,
                    shift[set]);
        }
}

/* of_x may be missing. */
void thinwire_batch_norm_back(const blocks *b, const float *gradient, float *of_x, float *of_gain, float *of_shift) {
    const float *x = b->x, *gain = b->gain, *means = b->means, *variances = b->variances;
    const int64_t channels = b->channels, places = b->places;
    const layout way = laid_out(b);
    double count = (double)(way.samples * places);
    for (int64_t channel = 0; channel < channels; channel++)
        for (int64_t model = 0; model < way.models; model++) {
            int64_t set = model * channels + channel, at = channel * places;
            const float *from = x + model * way.from_model + at, *back = gradient + model * way.to_model + at;
            float mean = means[set], scale = root_under_one(variances[set], b->eps);
            double first = 0.0, second = 0.0;
            for (int64_t sample = 0; sample < way.samples; sample++) {
                const float *one = back + sample * way.to_sample;
                first += (double)total(one, places);
                second += (double)normal_dot(one, from + sample * way.from_sample, mean, scale, places);
            }
            of_shift[set] = (float)first;
            of_gain[set] = (float)second;
            if (!of_x) continue;
            float factor = scale * gain[set];
            float all = factor * (float)(first / count), some = scale * factor * (float)(second / count);
            for (int64_t sample = 0; sample < way.samples; sample++)
                return_block(
                    back + sample * way.to_sample, from + sample * way.from_sample,
                    of_x + model * way.to_model + at + sample * way.to_sample, places, mean, factor, all, some);
        }
}
